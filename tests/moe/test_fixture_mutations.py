"""Exports perturbed in one place, everywhere: a number, a clip or a bend behind each tensor in turn. The fused model
still equals the perturbed one, or the block is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, shape_inference

from ortmoe_cli import moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Refusal
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model
from tests.moe import surgery
from tests.moe.surgery import Patient

FOLDER = Path(__file__).parents[2] / "fixtures"
CHANGES: dict[str, Callable[[Patient, str], str]] = {
    "scaled by 1.01": surgery.scale(1.01),
    "clipped at 1000": surgery.clip(1000),
    "clipped at 1e7": surgery.clip(1e7),
    "bent at 300": surgery.nonlinear_beyond(300),
}
FIXTURES = ("dense_bmm", "dense_expert_loop", "sigmoid_bias_shared")
SIZES = (1e-3, 1.0, 100.0, 1e4)


def float_tensors(model: ModelProto) -> list[str]:
    """Tensors made by nodes that are floats, the outputs of the graph aside."""
    inferred = shape_inference.infer_shapes(model)
    kinds = {i.name: i.type.tensor_type.elem_type for i in inferred.graph.value_info}
    made = [name for node in model.graph.node for name in node.output if node.op_type != "Constant"]
    return [name for name in made if kinds.get(name) == TensorProto.FLOAT]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fixture", FIXTURES)
def test_each_tensor_changed(fixture: str, change: str, tmp_path: Path) -> None:
    original = onnx.load(FOLDER / f"{fixture}.onnx")
    outcomes = []
    for tensor in float_tensors(original):
        patient = Patient(onnx.load(FOLDER / f"{fixture}.onnx"))
        patient.behind(tensor, CHANGES[change])
        outcomes.append(outcome(patient.model, tmp_path, f"{tensor} {change}"))
    assert outcomes.count("fused") > 1, "what lies before the block, or behind it, changes nothing about it"
    assert outcomes.count("refused") > 1 or change == "scaled by 1.01"


def outcome(model: ModelProto, folder: Path, title: str) -> str:
    """'fused' (and equal), or 'refused'."""
    before, after = folder / "before.onnx", folder / "after.onnx"
    onnx.save(model, before)
    index = Index(open_model(before))
    cutter = Cutter(index)
    (found,) = moe.find(Context(index, cutter))
    if isinstance(found, Refusal):
        return "refused"
    assert isinstance(found, Fusion)
    proto = splice(index.model, [found.island])
    write_model(index.model, proto, found.weights, lambda name: lookup(index, cutter, name), after)
    first, second = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (before, after))
    rng = np.random.default_rng(4)
    width = model.graph.input[0].type.tensor_type.shape.dim[-1].dim_value
    for batch, seq in ((2, 9), (1, 120)):
        for size in SIZES:
            feeds = {model.graph.input[0].name: (rng.standard_normal((batch, seq, width)) * size).astype(np.float32)}
            (want,), (got,) = first.run(None, feeds), second.run(None, feeds)
            finite = np.isfinite(want)
            error = np.abs(want - got)[finite].max(initial=0) / np.abs(want[finite]).max(initial=1e-30)
            assert error < 1e-3, f"{title}, size {size:g}: {error:.1e}"
    return "fused"
