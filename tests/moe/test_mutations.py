"""Mutations: a block that is a little different is reproduced exactly, or refused with the right code."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.outcome import Fusion, Refusal
from tests.moe import graphs
from tests.moe.conftest import Compare, Find
from tests.moe.graphs import E, Graph, H, Parts
from tests.moe.test_forms import FORMS, block, only


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.69])
@pytest.mark.parametrize("limit", [2.0, 7.0])
def test_other_constants_are_found(form: str, alpha: float, limit: float, fused_error: Compare) -> None:
    assert fused_error(block(form, Parts(activate=graphs.clamped(alpha, limit)))) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_gate_clamped_on_both_sides_is_refused(form: str, find: Find) -> None:
    """The operator clamps the gate from above only; the difference shows for large negative gates."""

    def activate(g: Graph, gate: str, up: str) -> str:
        top, bottom = g.constant(np.float32(1.5)), g.constant(np.float32(-1.5))
        gate, up = g.op("Clip", gate, bottom, top), g.op("Clip", up, bottom, top)
        return graphs.silu(g, gate, g.op("Add", up, g.constant(np.float32(1))))

    found = only(find(block(form, Parts(activate=activate))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE105"


@pytest.mark.parametrize("form", FORMS)
def test_gelu_gate_is_refused(form: str, find: Find) -> None:
    found = only(find(block(form, Parts(activate=graphs.gelu))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE105"
    assert "gelu" in found.message


@pytest.mark.parametrize("form", ["gathered", "dense bmm"])
def test_one_expert_permuted(form: str, fused_error: Compare) -> None:
    """The weights of one expert in another order are just other weights."""
    model = block(form, Parts())
    tensor = next(t for t in model.graph.initializer if t.name == "experts.w1")
    values = numpy_helper.to_array(tensor).copy()
    values[2] = values[2, ::-1]
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    assert fused_error(model) < 1e-5


def test_one_expert_with_another_activation_is_refused(find: Find) -> None:
    g, made = Graph(), []

    def activate(g: Graph, gate: str, up: str) -> str:
        made.append(gate)
        return graphs.gelu(g, gate, up) if len(made) == 3 else graphs.silu(g, gate, up)

    found = only(find(g.model(graphs.static_loop(g, Parts(activate=activate)))))
    assert isinstance(found, Refusal)
    assert found.code in ("MOE105", "MOE113")


@pytest.mark.parametrize("form", ["static loop", "dense loop"])
def test_missing_expert_is_refused(form: str, find: Find) -> None:
    found = only(find(block(form, Parts(skip=4))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE101"
    assert found.message == f"{E - 1} of {E} experts are in the file"


@pytest.mark.parametrize("hits", [3, 5])
def test_fixed_weights_behind_a_hit_list_are_refused(hits: int, find: Find) -> None:
    """The i-th hit uses expert i's weights: wrong for most routings unless all are there."""
    g = Graph()
    found = only(find(g.model(graphs.hit_list(hits, stacked=False)(g, Parts()))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE101"
    assert found.message.startswith(f"{hits} of {E}")


def test_frozen_sizes_are_refused(find: Find) -> None:
    g = Graph()
    found = only(find(g.model(graphs.frozen_sizes(g, Parts()))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE102"


@pytest.mark.parametrize("capacity", [40, 200])
def test_capacity_is_refused(capacity: int, find: Find) -> None:
    """Nothing shows until an expert overflows."""
    found = only(find(block("static loop", Parts(capacity=capacity))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE103"


def test_input_scaling_with_two_experts_is_refused(find: Find) -> None:
    g = Graph()
    found = only(find(g.model(graphs.input_scaled(g, Parts()))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE104"


@pytest.mark.parametrize("form", FORMS)
def test_negative_weights_are_refused(form: str, find: Find) -> None:
    found = only(find(block(form, Parts(router=graphs.tanh_router))))
    assert isinstance(found, Refusal)
    assert found.code == "MOE106"


def test_ties_broken_towards_the_last_are_reproduced(fused_error: Compare) -> None:
    """Logits that are all equal: TopK over the reversed experts picks the last ones, and so must the fused block."""

    def router(g: Graph, logits: str) -> tuple[str, str]:
        ends = g.ints(-1), g.ints(-E - 1), g.ints(1), g.ints(-1)
        coarse = g.op("Round", g.op("Mul", logits, g.constant(np.float32(0.5))))
        turned = g.op("Slice", g.op("Softmax", coarse, axis=-1), *ends)
        top, ids = g.op("TopK", turned, g.ints(2), outputs=2, axis=-1)
        return g.op("Sub", g.ints(E - 1), ids), top

    assert fused_error(block("gathered", Parts(router=router))) < 1e-5


def test_quantised_experts_are_refused(find: Find) -> None:
    model = block("dense bmm", Parts())
    tensor = next(t for t in model.graph.initializer if t.name == "experts.w1")
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.round(values * 64).astype(np.int8), "experts.w1.q"))
    scale = numpy_helper.from_array(np.array(1 / 64, np.float32), "scale")
    model.graph.initializer.append(scale)
    dequantise = helper.make_node("DequantizeLinear", ["experts.w1.q", "scale"], ["experts.w1"])
    model.graph.node.insert(0, dequantise)
    found = only(find(model))
    assert isinstance(found, Refusal)
    assert found.code == "MOE131", "one weight is quantised, the other not"


def test_half_precision_weights_keep_their_type(find: Find) -> None:
    model = block("gathered", Parts())
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    found = only(find(model))
    assert isinstance(found, Fusion), found
    assert {w.elem_type for w in found.weights} == {TensorProto.FLOAT16}
    fill = next(n for n in found.island.nodes if n.op_type == "ConstantOfShape").attribute[0].t
    assert np.isfinite(numpy_helper.to_array(fill).astype(np.float16)).all()
    assert found.facts["H"] == H
