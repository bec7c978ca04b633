"""Every mutation of a block is reproduced exactly on many inputs, or refused with the code that names the reason."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Refusal
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model
from tests.moe.graphs import E, H
from tests.moe.mutations import CASES, REPRODUCED

SIZES = (1e-9, 1e-4, 1.0, 30.0, 1e4, 1e7)


@pytest.mark.parametrize("case", CASES)
def test_mutation(case: str, tmp_path: Path) -> None:
    mutation, form = CASES[case]
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    model = mutation.model(form)
    onnx.save(model, before)
    index = Index(open_model(before))
    cutter = Cutter(index)
    found = moe.find(Context(index, cutter))
    assert len(found) == 1, found
    (outcome,) = found
    if isinstance(outcome, Fusion):
        proto = splice(index.model, [outcome.island])
        write_model(index.model, proto, outcome.weights, lambda name: lookup(index, cutter, name), after)
        compare(model, before, after, mutation.noise)
        assert mutation.outcome == REPRODUCED, "reproduced, but expected to be refused"
    else:
        assert isinstance(outcome, Refusal)
        assert outcome.code in mutation.outcome, f"{outcome.code} {outcome.message} {outcome.nearest}"


def compare(model: ModelProto, before: Path, after: Path, noise: float) -> None:
    """Both models in the runtime: every size, several shapes, random and skewed routing."""
    first, second = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (before, after))
    router = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "router.weight")
    rng = np.random.default_rng(17)
    for batch, seq in ((1, 1), (2, 40), (1, 900), (6, 1)):
        for size in SIZES:
            x = rng.standard_normal((batch, seq, H)) * size
            if seq > 1:  # nearly all tokens want one expert
                x[:, 2 * E :] += size * 2 * router[:, 1]
            feeds = {"x": x.astype(np.float32)}
            for want, got in zip(first.run(None, feeds), second.run(None, feeds), strict=True):
                assert want.shape == got.shape
                finite = np.isfinite(want)
                scale = np.abs(want[finite]).max(initial=1e-30)
                error = np.abs(want[finite] - got[finite]).max(initial=0) / scale
                assert error < noise, f"{batch}x{seq}, size {size:g}: {error:.1e}"
