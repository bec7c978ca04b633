"""Blocks in the forms that exporters write are fused, and compute the same."""

from collections.abc import Callable
from functools import partial

import pytest
from onnx import ModelProto, TensorProto

from ortmoe_cli.outcome import Fusion, Outcome
from tests.moe import graphs
from tests.moe.conftest import Compare, Find
from tests.moe.graphs import E, Graph, H, I, K, Parts

FORMS: dict[str, Callable[[Graph, Parts], str]] = {
    "gathered": graphs.gathered,
    "static loop": graphs.static_loop,
    "dense loop": graphs.dense_loop,
    "dense bmm": graphs.dense_bmm,
}
ROUTERS: dict[str, Callable[[Graph, str], tuple[str, str]]] = {
    "softmax renormalised": graphs.softmax_router,
    "softmax": partial(graphs.softmax_router, renormalise=False),
    "temperature": partial(graphs.softmax_router, temperature=1.7),
    "sigmoid, bias, scale": graphs.sigmoid_router,
}


def only(found: list[Outcome]) -> Outcome:
    assert len(found) == 1, found
    return found[0]


def block(form: str, parts: Parts) -> ModelProto:
    g = Graph()
    return g.model(FORMS[form](g, parts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_form_with_every_router(form: str, router: str, find: Find, fused_error: Compare) -> None:
    model = block(form, Parts(router=ROUTERS[router]))
    found = only(find(model))
    assert isinstance(found, Fusion), found
    assert (found.code, found.guarantee) == ("MOE001", "exact")
    assert {key: found.facts[key] for key in "EkHI"} == {"E": E, "k": K, "H": H, "I": I}
    assert {"ties", "skew", "hidden x100", "one token"} <= {c.regime for c in found.checks}
    assert fused_error(model) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_clamped_activation_with_biases(form: str, find: Find, fused_error: Compare) -> None:
    model = block(form, Parts(activate=graphs.clamped(), bias=True))
    found = only(find(model))
    assert isinstance(found, Fusion), found
    node = next(n for n in found.island.nodes if n.op_type == "MoE")
    values = {a.name: a for a in node.attribute}
    assert values["activation_alpha"].f == pytest.approx(1.702, rel=1e-4)
    assert (values["activation_beta"].f, values["swiglu_limit"].f) == (1.0, 3.0)
    assert fused_error(model) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_up_half_first(form: str, fused_error: Compare) -> None:
    assert fused_error(block(form, Parts(up_first=True))) < 1e-5


def test_node_is_written_in_the_safe_form(find: Find) -> None:
    found = only(find(block("gathered", Parts())))
    assert isinstance(found, Fusion)
    node = next(n for n in found.island.nodes if n.op_type == "MoE")
    values = {a.name: a for a in node.attribute}
    assert (values["normalize_routing_weights"].i, values["swiglu_fusion"].i, values["k"].i) == (1, 1, K)
    assert [w.shape for w in found.weights] == [(E, 2 * I, H), (E, H, I)]
    assert all(w.elem_type == TensorProto.FLOAT for w in found.weights)


@pytest.mark.parametrize("hits", [3, 5, E])
def test_hit_list_is_repaired(hits: int, find: Find) -> None:
    """The export runs only when as many experts are hit as in its trace; the fused node always runs."""
    g = Graph()
    found = only(find(g.model(graphs.hit_list(hits)(g, Parts()))))
    assert isinstance(found, Fusion), found
    assert (found.code, found.guarantee) == ("MOE003", "repaired")
    assert found.checks
    assert f"exactly {hits} experts" in found.message


def test_shared_expert_and_residual_are_kept(fused_error: Compare) -> None:
    """What is added without the router's say stays in the graph, also where the sum starts from it."""
    g = Graph()
    parts = Parts()
    tokens, ids, weights = graphs._start(g, parts)
    gate = g.op("Sigmoid", g.op("MatMul", tokens, g.constant(g.weight(H, 1))))
    inner = graphs.silu(
        g, g.op("MatMul", tokens, g.constant(g.weight(H, I))), g.op("MatMul", tokens, g.constant(g.weight(H, I)))
    )
    total = g.op("Mul", g.op("MatMul", inner, g.constant(g.weight(I, H))), gate)
    for e in range(E):
        chosen = g.op("Cast", g.op("Equal", ids, g.ints(e)), to=TensorProto.FLOAT)
        share = g.op("ReduceSum", g.op("Mul", weights, chosen), g.ints(-1), keepdims=1)
        total = g.op("Add", total, g.op("Mul", graphs._expert(g, parts, tokens, e), share))
    assert fused_error(g.model(graphs._end(g, total))) < 1e-5
