"""Fused nodes that a model came with: findings, and repairs that compute what the schema says."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli import engine, moe, rules
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.moe.activation import FUNCTIONS, Activation
from ortmoe_cli.outcome import Already, Context, Fusion, Options, Outcome
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import write_model

E, K, H, I = 4, 2, 16, 24  # noqa: E741
SHAPES = {
    "fc1": (E, I, H),
    "fc1_bias": (E, I),
    "fc2": (E, H, I),
    "fc2_bias": (E, H),
    "fc3": (E, I, H),
    "fc3_bias": (E, I),
}
SLOTS = ("fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias")


def node_model(
    given: dict[str, Any], elem_type: int = TensorProto.FLOAT, op: str = "MoE", rank: int = 2, **attributes: Any
) -> onnx.ModelProto:
    """Two additions around one MoE node, so that its input is an intermediate tensor nobody else reads.

    given: weights by slot, arrays or shapes."""
    rng = np.random.default_rng(5)
    tensors = []
    for slot, wanted in given.items():
        value = (rng.standard_normal(wanted) * 0.3).astype(np.float32) if isinstance(wanted, tuple) else wanted
        kind = helper.tensor_dtype_to_np_dtype(elem_type) if value.dtype == np.float32 else value.dtype
        tensors.append(numpy_helper.from_array(value.astype(kind), slot))
    names = [slot if slot in given else "" for slot in SLOTS]
    while not names[-1]:
        names.pop()
    shape = ["batch", "tokens", H] if rank == 3 else ["tokens", H]
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node(op, ["twice", "logits", *names], ["z"], domain="com.microsoft", name="experts", **attributes),
        helper.make_node("Neg", ["z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", elem_type, shape),
            helper.make_tensor_value_info("logits", elem_type, ["all", E]),
        ],
        [helper.make_tensor_value_info("y", elem_type, shape)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def look(
    model: onnx.ModelProto, tmp_path: Path, ep: Any = "cpu", repair: Any = "auto"
) -> tuple[Outcome, Index, Cutter]:
    path = tmp_path / "node.onnx"
    onnx.save(model, path)
    index = Index(open_model(path))
    cutter = Cutter(index)
    (found,) = moe.find(Context(index, cutter, Options(ep=ep, repair=repair)))
    assert rules.get(found.code)
    return found, index, cutter


def formula(model: onnx.ModelProto, x: Any, logits: Any, act: Any, normalise: bool) -> Any:
    """−MoE(2x), expert by expert; act(first product, third product or None)."""
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    x = 2 * x.reshape(-1, H).astype(np.float64)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    result = np.zeros_like(x)
    for t in range(len(x)):
        chosen = np.argsort(-share[t])[:K]
        for e in chosen:
            first = w["fc1"][e] @ x[t] + (w["fc1_bias"][e] if "fc1_bias" in w else 0)
            third = w["fc3"][e] @ x[t] + (w["fc3_bias"][e] if "fc3_bias" in w else 0) if "fc3" in w else None
            made = w["fc2"][e] @ act(first, third) + (w["fc2_bias"][e] if "fc2_bias" in w else 0)
            result[t] -= made * share[t, e] / (share[t, chosen].sum() if normalise else 1)
    return result


def silu(first: Any, third: Any) -> Any:
    return FUNCTIONS["silu"](first) * (1 if third is None else third)


def relu(first: Any, third: Any) -> Any:
    return np.maximum(first, 0)


CLAMPED = {"activation_type": "swiglu", "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.5}
SWIGLU = Activation("swiglu", True, 1.702, 1.0, 1.5)
GATED = ("fc1", "fc2", "fc3")
REPAIRS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "fc3": ("MOE203", {s: SHAPES[s] for s in GATED}, silu, {"activation_type": "silu", "normalize_routing_weights": 1}),
    "fc3 with biases": ("MOE203", SHAPES, silu, {"activation_type": "silu", "normalize_routing_weights": 1}),
    "fc3, swiglu": ("MOE203", SHAPES, SWIGLU, CLAMPED | {"normalize_routing_weights": 1}),
    "fc3, not normalised": ("MOE203", SHAPES, silu, {"activation_type": "silu"}),
    "halves": (
        "MOE205",
        {"fc1": (E, 2 * I, H), "fc1_bias": (E, 2 * I), "fc2": (E, H, I)},
        lambda first, third: SWIGLU(first[:I], first[I:]),
        CLAMPED | {"swiglu_fusion": 2, "normalize_routing_weights": 1},
    ),
    "not normalised": ("MOE204", {s: SHAPES[s] for s in SLOTS[:4]}, relu, {}),
    "in turn, not normalised": (
        "MOE204",
        {"fc1": (E, 2 * I, H), "fc2": (E, H, I)},
        lambda first, third: SWIGLU(first[::2], first[1::2]),
        CLAMPED | {"swiglu_fusion": 1},
    ),
}


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize("rank", [2, 3])
def test_repair(name: str, rank: int, tmp_path: Path) -> None:
    code, given, act, attributes = REPAIRS[name]
    model = node_model(given, rank=rank, k=K, **attributes)
    found, index, cutter = look(model, tmp_path)
    assert isinstance(found, Fusion), found
    assert (found.code, found.guarantee) == (code, "repaired")
    assert found.checks
    proto = splice(index.model, [found.island])
    nodes = [n for n in proto.graph.node if n.op_type == "MoE"]
    assert len(nodes) == 1
    target = tmp_path / "repaired.onnx"
    write_model(index.model, proto, found.weights, lambda n: lookup(index, cutter, n), target)
    session = ort.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 6, H) if rank == 3 else (12, H)).astype(np.float32)
    logits = rng.standard_normal((12, E)).astype(np.float32)
    (got,) = session.run(None, {"x": x, "logits": logits})
    want = formula(model, x, logits, act, bool(attributes.get("normalize_routing_weights")))
    assert got.shape == x.shape
    assert np.abs(got.reshape(-1, H) - want).max() < 1e-5 * np.abs(want).max()
    again, _, _ = look(onnx.load(target), tmp_path)
    assert isinstance(again, Already)
    assert again.code == "MOE002"


def test_half_precision_is_repaired_when_asked_for(tmp_path: Path) -> None:
    given = {s: SHAPES[s] for s in GATED}
    attributes = {"k": K, "activation_type": "silu", "normalize_routing_weights": 1}
    model = node_model(given, TensorProto.FLOAT16, **attributes)
    found, _, _ = look(model, tmp_path)
    assert isinstance(found, Already)
    assert found.code == "MOE203"
    assert "--repair all" in found.message
    assert isinstance(look(model, tmp_path, repair="all")[0], Fusion)
    assert isinstance(look(node_model(given, **attributes), tmp_path, repair="none")[0], Already)


def test_repair_of_a_node_that_the_runtime_miscomputes(tmp_path: Path) -> None:
    """The original as a whole is wrong in this runtime; that must not look like a fault of the repaired model."""
    onnx.save(node_model({s: SHAPES[s] for s in SLOTS[:4]}, k=K), tmp_path / "m.onnx")
    report = engine.fuse(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert [(b.status, b.code, b.guarantee) for b in report.blocks] == [("fused", "MOE204", "repaired")]
    assert any("compared with the original" in note for note in report.notes), report.notes


def test_weights_that_need_no_repacking_stay_where_they_are(tmp_path: Path) -> None:
    found, index, _ = look(node_model({s: SHAPES[s] for s in SLOTS[:4]}, k=K), tmp_path)
    assert isinstance(found, Fusion)
    assert found.weights == ()
    assert {"fc1", "fc2"} <= {t.name for t in splice(index.model, [found.island]).graph.initializer}


PLAIN = {s: SHAPES[s] for s in ("fc1", "fc1_bias", "fc2", "fc2_bias")}
BAD: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "old order": ("MOE202", "old order", {"fc1": (E, H, I), "fc2": (E, I, H)}, {}),
    "old order, square inner": ("MOE209", "do not fit", {"fc1": (E, I, I), "fc2": (E, I, I)}, {}),
    "too many chosen": ("MOE208", "k=5 of 4", PLAIN, {"k": 5}),
    "bias too short": ("MOE209", "fc1_bias is [4, 16]", PLAIN | {"fc1_bias": (E, H)}, {}),
    "experts differ": ("MOE209", "3 in fc2", PLAIN | {"fc2": (3, H, I), "fc2_bias": (3, H)}, {}),
    "unknown attribute": ("MOE201", "no attribute 'colour'", PLAIN, {"colour": 3}),
    "fc3 with relu": ("MOE203", "fc3", {s: SHAPES[s] for s in GATED}, {"activation_type": "relu"}),
    "sparse mixer": ("MOE212", "use_sparse_mixer", PLAIN, {"use_sparse_mixer": 1}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_repaired_is_said(name: str, tmp_path: Path) -> None:
    code, words, given, attributes = BAD[name]
    attributes = {"k": K, "normalize_routing_weights": 1} | attributes
    found, _, _ = look(node_model(given, **attributes), tmp_path)
    assert isinstance(found, Already), found
    assert found.code == code, found
    assert words in found.message


def test_bfloat16_is_a_finding_on_the_cpu_only(tmp_path: Path) -> None:
    model = node_model(PLAIN, TensorProto.BFLOAT16, k=K, normalize_routing_weights=1)
    assert look(model, tmp_path)[0].code == "MOE206"
    assert look(model, tmp_path, "cuda")[0].code == "MOE002"


def test_sizes_are_a_finding_on_cuda_only(tmp_path: Path) -> None:
    model = node_model({"fc1": (E, 10, H), "fc2": (E, H, 10)}, k=K, normalize_routing_weights=1)
    assert look(model, tmp_path, "cuda")[0].code == "MOE207"
    found = look(model, tmp_path)[0]
    assert found.code == "MOE002"
    assert "MOE207" in str(found.facts["findings"])


def test_quantised_node_says_how_it_is_packed(tmp_path: Path) -> None:
    given = {
        "fc1": np.zeros((E, I, H // 2), np.uint8),
        "fc1_bias": (E, I),  # the third slot of QMoE holds scales
        "fc2": np.zeros((E, H, I // 2), np.uint8),
    }
    model = node_model(given, op="QMoE", k=K, normalize_routing_weights=1)
    node = model.graph.node[1]
    del node.input[:]
    node.input.extend(["twice", "logits", "fc1", "fc1_bias", "", "fc2", "fc2_scales"])
    model.graph.initializer.append(numpy_helper.from_array(np.ones((E, H), np.float32), "fc2_scales"))
    assert look(model, tmp_path)[0].code == "MOE002"
    assert look(model, tmp_path, "cuda")[0].code in ("MOE206", "MOE207", "MOE211")
    node.attribute.append(helper.make_attribute("weights_prepacked", 0))
    assert "MOE211" not in str(look(model, tmp_path)[0].facts["findings"])


def test_good_node_has_no_findings(tmp_path: Path) -> None:
    given = {"fc1": (E, 2 * I, H), "fc2": (E, H, I)}
    found, _, _ = look(node_model(given, k=K, normalize_routing_weights=1, **CLAMPED, swiglu_fusion=1), tmp_path)
    assert isinstance(found, Already)
    assert found.code == "MOE002"
    assert "findings" not in found.facts
