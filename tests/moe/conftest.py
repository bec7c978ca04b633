"""Runs the finder on a hand-written block, and the rewritten block in the runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Outcome
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model

Find = Callable[[onnx.ModelProto], list[Outcome]]
Compare = Callable[[onnx.ModelProto], float]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """moe.find on a model."""

    def run(model: onnx.ModelProto) -> list[Outcome]:
        path = tmp_path / "found.onnx"
        onnx.save(model, path)
        index = Index(open_model(path))
        return moe.find(Context(index, Cutter(index)))

    return run


@pytest.fixture
def fused_error(tmp_path: Path) -> Compare:
    """Fuses a model, and gives the largest relative difference that it then shows in the runtime."""

    def run(model: onnx.ModelProto) -> float:
        before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
        onnx.save(model, before)
        opened = open_model(before)
        index = Index(opened)
        cutter = Cutter(index)
        fusions = [o for o in moe.find(Context(index, cutter)) if isinstance(o, Fusion)]
        assert len(fusions) == 1
        packed = [w for f in fusions for w in f.weights]
        proto = splice(opened, [f.island for f in fusions])
        assert sum(n.op_type == "MoE" for n in proto.graph.node) == 1
        assert not any(n.op_type in ("NonZero", "GatherND", "Erf") for n in proto.graph.node), "the old block is alive"
        write_model(opened, proto, packed, lambda name: lookup(index, cutter, name), after)
        first, second = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (before, after))
        worst, rng = 0.0, np.random.default_rng(11)
        for batch, seq, scale in ((2, 40, 1.0), (1, 64, 10.0)):
            x = (rng.standard_normal((batch, seq, 16)) * scale).astype(np.float32)
            want, got = first.run(None, {"x": x})[0], second.run(None, {"x": x})[0]
            assert want.shape == got.shape
            worst = max(worst, float(np.abs(want - got).max() / np.abs(want).max()))
        return worst

    return run
