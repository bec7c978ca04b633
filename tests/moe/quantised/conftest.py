"""Hand-written blocks with quantised weights, fused and run."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Model, open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Options, Outcome
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model
from tests.moe import graphs

FIXTURES = Path(__file__).parents[3] / "fixtures"
sys.path.insert(0, str(FIXTURES))

Find = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of several blocks."""
    monkeypatch.setattr(graphs, "H", 32)
    monkeypatch.setattr(graphs, "I", 48)


class Bench:
    """A model, what was found in it, and the fused model."""

    def __init__(self, folder: Path, proto: onnx.ModelProto) -> None:
        self.folder = folder
        self.before, self.after = folder / "before.onnx", folder / "after.onnx"
        onnx.save(proto, self.before)
        self.model: Model = open_model(self.before)
        self.index = Index(self.model)
        self.cutter = Cutter(self.index)

    def find(self, options: Options | None = None) -> Outcome:
        (outcome,) = moe.find(Context(self.index, self.cutter, options or Options()))
        return outcome

    def write(self, fusion: Fusion) -> onnx.ModelProto:
        proto = splice(self.model, [fusion.island])
        source = lambda name: lookup(self.index, self.cutter, name)  # noqa: E731
        write_model(self.model, proto, fusion.weights, source, self.after)
        return onnx.load(self.after)

    def difference(self, optimise: bool = True) -> float:
        """‖after − before‖ / ‖before‖ in the runtime, the original without any optimisation."""
        plain = ort.SessionOptions()
        plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        usual = ort.SessionOptions()
        first = ort.InferenceSession(self.before, plain, providers=["CPUExecutionProvider"])
        second = ort.InferenceSession(self.after, usual if optimise else plain, providers=["CPUExecutionProvider"])
        rng, off, size = np.random.default_rng(11), 0.0, 0.0
        for batch, seq in ((2, 40), (1, 64)):
            x = rng.standard_normal((batch, seq, graphs.H)).astype(np.float32)
            want, got = first.run(None, {"x": x})[0], second.run(None, {"x": x})[0]
            assert want.shape == got.shape
            off, size = off + float(((want - got) ** 2).sum()), size + float((want**2).sum())
        return float(np.sqrt(off / size))


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[onnx.ModelProto], Bench]:
    return lambda proto: Bench(tmp_path, proto)
