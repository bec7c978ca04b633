"""Blocks of experts in bodies of control flow and in functions: found, named and left alone."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortmoe_cli.outcome import Fusion, Outcome, Refusal
from tests.moe import graphs
from tests.moe.conftest import Find
from tests.moe.graphs import E, Graph, H, I, Parts
from tests.moe.test_forms import FORMS, block, only


def info(name: str, elem_type: int = TensorProto.FLOAT, shape: list[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def refused(found: list[Outcome], *words: str) -> None:
    outcome = only(found)
    assert isinstance(outcome, Refusal), outcome
    assert outcome.code == "MOE115"
    for word in words:
        assert word in outcome.message, outcome.message


def whole(nodes: list[NodeProto], weights: list[TensorProto], extra: list[onnx.ValueInfoProto]) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "outer",
        [info("x", shape=["batch", "seq", H]), *extra],
        [info("out", shape=["batch", "seq", H])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def body(form: str, inner_weights: bool) -> tuple[GraphProto, list[TensorProto]]:
    """The nodes of a block as a body that captures x, its weights inside or outside."""
    graph = block(form, Parts()).graph
    weights = list(graph.initializer)
    inner = helper.make_graph(list(graph.node), "body", [], [info("y")], weights if inner_weights else [])
    return inner, [] if inner_weights else weights


def identity(name: str = "y") -> GraphProto:
    return helper.make_graph([helper.make_node("Identity", ["x"], [name])], "other", [], [info(name)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner_weights", [False, True])
def test_block_in_a_branch(form: str, inner_weights: bool, find: Find) -> None:
    branch, weights = body(form, inner_weights)
    node = helper.make_node("If", ["flag"], ["out"], name="merged", then_branch=branch, else_branch=identity())
    found = find(whole([node], weights, [info("flag", TensorProto.BOOL, [])]))
    refused(found, "then_branch", "If 'merged'")
    assert isinstance(found[0], Refusal)
    assert f"E={E}" in found[0].nearest, "what it would have been"


def test_blocks_in_both_branches(find: Find) -> None:
    (one, weights), (two, _) = body("gathered", False), body("dense bmm", True)
    node = helper.make_node("If", ["flag"], ["out"], name="merged", then_branch=one, else_branch=two)
    found = find(whole([node], weights, [info("flag", TensorProto.BOOL, [])]))
    assert [o.code for o in found] == ["MOE115", "MOE115"]


def test_block_in_a_branch_in_a_branch(find: Find) -> None:
    branch, weights = body("static loop", False)
    node = helper.make_node("If", ["flag"], ["z"], name="deep", then_branch=branch, else_branch=identity())
    outer = helper.make_graph([node], "outer", [], [info("z")])
    top = helper.make_node("If", ["flag"], ["out"], name="top", then_branch=outer, else_branch=identity("w"))
    refused(find(whole([top], weights, [info("flag", TensorProto.BOOL, [])])), "If 'deep'")


def test_block_in_a_loop(find: Find) -> None:
    graph = block("gathered", Parts()).graph
    nodes = [*graph.node, helper.make_node("Identity", ["go"], ["still"])]
    inputs = [info("turn", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("x", shape=["b", "s", H])]
    inner = helper.make_graph(nodes, "body", inputs, [info("still", TensorProto.BOOL), info("y")])
    node = helper.make_node("Loop", ["count", "", "x"], ["out"], name="turns", body=inner)
    found = find(whole([node], list(graph.initializer), [info("count", TensorProto.INT64, [])]))
    refused(found, "Loop 'turns'")


def test_block_in_a_scan(find: Find) -> None:
    graph = block("dense loop", Parts()).graph
    inner = helper.make_graph(list(graph.node), "body", [info("x", shape=["b", "s", H])], [info("y")])
    node = helper.make_node("Scan", ["steps"], ["out"], name="sweep", body=inner, num_scan_inputs=1)
    model = whole([node], list(graph.initializer), [info("steps", shape=["n", "b", "s", H])])
    refused(find(model), "Scan 'sweep'")


def test_experts_of_a_router_in_branches(find: Find) -> None:
    """Each expert is computed only if a token wants it; the router is outside."""
    g, parts = Graph(), Parts()
    tokens, ids, weights = graphs._start(g, parts)
    total = g.op("Sub", tokens, tokens)
    for e in range(E):
        mask = g.op("Equal", ids, g.ints(e))
        wanted = g.op(
            "Cast", g.op("ReduceMax", g.op("Cast", mask, to=TensorProto.INT64), keepdims=0), to=TensorProto.BOOL
        )
        share = g.op(
            "ReduceSum", g.op("Mul", weights, g.op("Cast", mask, to=TensorProto.FLOAT)), g.ints(-1), keepdims=1
        )
        outside = len(g.nodes)
        made = g.op("Mul", graphs._expert(g, parts, tokens, e), share)
        inside, g.nodes = g.nodes[outside:], g.nodes[:outside]
        then = helper.make_graph(inside, f"expert{e}", [], [info(made)])
        zero = helper.make_graph(
            [helper.make_node("Sub", [tokens, tokens], [f"none{e}"])], "no", [], [info(f"none{e}")]
        )
        total = g.op("Add", total, g.op("If", wanted, then_branch=then, else_branch=zero))
    refused(find(g.model(graphs._end(g, total))), "If '")


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_a_router_in_a_loop(shared: bool, find: Find) -> None:
    """One turn per expert; a shared expert beside it hides nothing."""
    g, parts = Graph(), Parts()
    tokens, ids, weights = graphs._start(g, parts)
    w1, w2 = g.constant(parts.weights["w1"], "experts.w1"), g.constant(parts.weights["w2"], "experts.w2")
    start = g.op("Sub", tokens, tokens)
    outside = len(g.nodes)
    share = g.op("Cast", g.op("Equal", ids, "turn"), to=TensorProto.FLOAT)
    share = g.op("ReduceSum", g.op("Mul", weights, share), g.ints(-1), keepdims=1)
    up = g.op("MatMul", tokens, g.op("Transpose", g.op("Gather", w1, "turn", axis=0), perm=[1, 0]))
    gate, up = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    matrix = g.op("Transpose", g.op("Gather", w2, "turn", axis=0), perm=[1, 0])
    down = g.op("Mul", g.op("MatMul", graphs.silu(g, gate, up), matrix), share)
    summed, still = g.op("Add", "so_far", down), g.op("Identity", "go")
    inside, g.nodes = g.nodes[outside:], g.nodes[:outside]
    inputs = [info("turn", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("so_far", shape=["t", H])]
    inner = helper.make_graph(inside, "body", inputs, [info(still, TensorProto.BOOL), info(summed)])
    total = g.op("Loop", g.constant(np.int64(E)), "", start, body=inner)
    if shared:
        one, two = (g.op("MatMul", tokens, g.constant(g.weight(H, I))) for _ in range(2))
        total = g.op("Add", total, g.op("MatMul", graphs.silu(g, one, two), g.constant(g.weight(I, H))))
    refused(find(g.model(graphs._end(g, total))), "Loop 'n")


# --- functions

DOMAIN = "made.here"


def called(model: ModelProto, functions: list[onnx.FunctionProto]) -> ModelProto:
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def function(name: str, inputs: list[str], outputs: list[str], nodes: list[NodeProto]) -> onnx.FunctionProto:
    return helper.make_function(
        DOMAIN, name, inputs, outputs, nodes, [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    )


def test_activation_in_a_function_is_no_obstacle(find: Find) -> None:
    def activate(g: Graph, gate: str, up: str) -> str:
        return str(g.op("Swiglu", gate, up, domain=DOMAIN))

    nodes = [
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["g", "s"], ["gs"]),
        helper.make_node("Mul", ["gs", "u"], ["o"]),
    ]
    model = called(block("static loop", Parts(activate=activate)), [function("Swiglu", ["g", "u"], ["o"], nodes)])
    assert isinstance(only(find(model)), Fusion)


@pytest.mark.parametrize("form", FORMS)
def test_whole_block_in_a_function(form: str, find: Find) -> None:
    """Two layers call one function with their own weights."""
    graph = block(form, Parts()).graph
    names = [t.name for t in graph.initializer]
    layer = function("Layer", ["x", *names], ["y"], list(graph.node))
    weights = []
    for n in range(2):
        for tensor in graph.initializer:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = f"layers.{n}.{tensor.name}"
            weights.append(copy)
    nodes = [
        helper.make_node(
            "Layer", [source, *(f"layers.{n}.{name}" for name in names)], [target], name=f"layer_{n}", domain=DOMAIN
        )
        for n, (source, target) in enumerate((("x", "middle"), ("middle", "out")))
    ]
    found = find(called(whole(nodes, weights, []), [layer]))
    assert [o.code for o in found] == ["MOE115", "MOE115"]
    assert "function 'Layer', called by 'layer_0'" in found[0].message
    assert "function 'Layer', called by 'layer_1'" in found[1].message


def test_each_expert_in_a_function(find: Find) -> None:
    g, parts = Graph(), Parts()
    tokens, ids, weights = graphs._start(g, parts)
    total = ""
    for e in range(E):
        first, second = (g.constant(parts.weights[w][e].T.copy(), f"experts.{e}.{w}") for w in ("w1", "w2"))
        chosen = g.op("Cast", g.op("Equal", ids, g.ints(e)), to=TensorProto.FLOAT)
        share = g.op("ReduceSum", g.op("Mul", weights, chosen), g.ints(-1), keepdims=1)
        scaled = g.op("Mul", g.op("Expert", tokens, first, second, domain=DOMAIN), share)
        total = g.op("Add", total, scaled) if total else scaled
    nodes = [
        helper.make_node("MatMul", ["r", "a"], ["p"]),
        helper.make_node("Split", ["p"], ["g", "u"], axis=-1, num_outputs=2),
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["g", "s"], ["gs"]),
        helper.make_node("Mul", ["gs", "u"], ["i"]),
        helper.make_node("MatMul", ["i", "b"], ["o"]),
    ]
    refused(find(called(g.model(graphs._end(g, total)), [function("Expert", ["r", "a", "b"], ["o"], nodes)])), "Expert")


def test_selection_in_a_function(find: Find) -> None:
    """The graph itself shows no TopK."""

    def router(g: Graph, logits: str) -> tuple[str, str]:
        ids, weights = g.op("Route", logits, domain=DOMAIN, outputs=2)
        return ids, weights

    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array([graphs.K], np.int64))),
        helper.make_node("Softmax", ["l"], ["p"], axis=-1),
        helper.make_node("TopK", ["p", "k"], ["w", "i"], axis=-1),
    ]
    model = called(block("gathered", Parts(router=router)), [function("Route", ["l"], ["i", "w"], nodes)])
    refused(find(model), "function")


# --- control flow that has nothing to do with experts


def harmless(name: str) -> tuple[Callable[[Graph], str], str]:
    return HARMLESS[name], name


def _beam_loop(g: Graph) -> str:
    """Beam search: logits, the best tokens, and a loop that goes on with them through a network."""
    logits = g.op("MatMul", "x", g.constant(g.weight(H, 40)))
    _, ids = g.op("TopK", logits, g.ints(2), outputs=2, axis=-1)
    table, weight = g.constant(g.weight(40, H)), g.constant(g.weight(H, 40))
    outside = len(g.nodes)
    picked = g.op("Gather", table, "beams")
    scores = g.op("MatMul", g.op("Relu", picked), weight)
    best = g.op("ArgMax", scores, axis=-1, keepdims=0)
    still = g.op("Identity", "go")
    inside, g.nodes = g.nodes[outside:], g.nodes[:outside]
    inputs = [info("turn", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("beams", TensorProto.INT64)]
    inner = helper.make_graph(inside, "b", inputs, [info(still, TensorProto.BOOL), info(best, TensorProto.INT64)])
    made = g.op("Loop", g.constant(np.int64(3)), "", ids, body=inner)
    return str(g.op("Cast", made, to=TensorProto.FLOAT))


def _sampler_branch(g: Graph) -> str:
    """Greedy or sampled."""
    logits = g.op("MatMul", "x", g.constant(g.weight(H, 40)))
    top, ids = g.op("TopK", logits, g.ints(5), outputs=2, axis=-1)
    greedy = helper.make_graph(
        [helper.make_node("ArgMax", [logits], ["g"], axis=-1)], "g", [], [info("g", TensorProto.INT64)]
    )
    first = helper.make_graph(
        [helper.make_node("Slice", [ids, g.ints(0), g.ints(1), g.ints(-1)], ["f"])],
        "f",
        [],
        [info("f", TensorProto.INT64)],
    )
    hot = g.op("Less", g.op("ReduceMax", top, keepdims=0), g.constant(np.float32(1)))
    return str(g.op("Cast", g.op("If", hot, then_branch=greedy, else_branch=first), to=TensorProto.FLOAT))


HARMLESS: dict[str, Callable[[Graph], str]] = {
    "beam search in a loop": _beam_loop,
    "sampler in a branch": _sampler_branch,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_control_flow_without_experts(name: str, find: Find) -> None:
    g = Graph()
    assert find(g.model(HARMLESS[name](g))) == []
