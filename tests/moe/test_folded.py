"""Experts that share one matrix: side by side in an axis, or flattened into the rows of a table."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortmoe_cli.outcome import Fusion, Refusal
from tests.moe import graphs
from tests.moe.conftest import Compare, Find
from tests.moe.graphs import E, Graph, H, I, K, Parts
from tests.moe.test_forms import only

ORDERS = ("expert by expert", "gate and up apart", "element by element")


def folded(g: Graph, parts: Parts, order: str, gated: bool = True, linear: bool = False) -> str:
    """One product for all first matrices, the routing on the inner values, one product for all second matrices.

    linear: weights are [outputs, inputs], as in a Linear, not [inputs, outputs].
    """
    tokens, ids, weights = graphs._start(g, parts)
    shape = g.op("Concat", g.op("Shape", tokens, start=0, end=1), g.ints(E), axis=0)
    shares = g.op("ScatterElements", g.op("ConstantOfShape", shape), ids, weights, axis=1)
    w1, w2 = parts.weights["w1"], parts.weights["w2"]  # [E,2I,H], [E,H,I]
    if not gated:
        w1 = w1[:, :I]
    inner = w2.transpose(0, 2, 1).reshape(E * I, H)
    rows = len(w1[0])
    if order == "expert by expert":
        first, view, axis = w1.reshape(-1, H), (-1, E, rows), 2
    elif order == "gate and up apart":
        first, view, axis = w1.reshape(E, -1, I, H).swapaxes(0, 1).reshape(-1, H), (-1, rows // I, E, I), 1
    else:
        first, view, axis = w1.swapaxes(0, 1).reshape(-1, H), (-1, rows, E), 1
        inner = w2.transpose(2, 0, 1).reshape(E * I, H)
    if linear:
        made = g.op("Gemm", tokens, g.constant(first.copy(), "first"), transB=1)
    else:
        made = g.op("MatMul", tokens, g.constant(first.T.copy(), "first"))
    if parts.bias:
        made = g.op("Add", made, g.constant(g.weight(len(first)), "first.bias"))
    made = g.op("Reshape", made, g.ints(*view))
    if gated:
        a, b = g.op("Split", made, outputs=2, axis=axis, num_outputs=2)
        made = parts.activate(g, a, b)
    else:
        made = g.op("Relu", made)
    made = g.op("Reshape", made, g.ints(-1, E, I) if order != "element by element" else g.ints(-1, I, E))
    shares = g.op("Unsqueeze", shares, g.ints(-1 if order != "element by element" else 1))
    made = g.op("Reshape", g.op("Mul", made, shares), g.ints(-1, E * I))
    return graphs._end(g, g.op("MatMul", made, g.constant(inner.copy(), "second")))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_folded_experts(order: str, linear: bool, bias: bool, find: Find, fused_error: Compare) -> None:
    g = Graph()
    model = g.model(folded(g, Parts(bias=bias), order, linear=linear))
    found = only(find(model))
    assert isinstance(found, Fusion), found
    assert {key: found.facts[key] for key in "EkHI"} == {"E": E, "k": K, "H": H, "I": I}
    assert fused_error(model) < 1e-5


@pytest.mark.parametrize("order", ["expert by expert", "element by element"])
def test_folded_experts_without_gate(order: str, fused_error: Compare) -> None:
    g = Graph()
    assert fused_error(g.model(folded(g, Parts(), order, gated=False))) < 1e-5


def test_folded_clamped_experts(fused_error: Compare) -> None:
    g = Graph()
    assert fused_error(g.model(folded(g, Parts(activate=graphs.clamped(1.4, 2.5)), ORDERS[0]))) < 1e-5


def test_folded_experts_in_no_known_order_are_refused(find: Find) -> None:
    g = Graph()
    model = g.model(folded(g, Parts(), ORDERS[0]))
    rng = np.random.default_rng(0)
    shuffle = rng.permutation(E * I)
    _shuffled(model, "second", shuffle)
    node = next(n for n in model.graph.node if "second" in n.input)
    scattered = _gathered(model, node.input[0], shuffle)
    node.input[0] = scattered
    found = only(find(model))
    assert isinstance(found, Refusal)
    assert found.code == "MOE108"
    assert "order" in found.message


def _shuffled(model: Any, name: str, order: Any) -> None:
    from onnx import numpy_helper

    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[order].copy(), name))


def _gathered(model: Any, name: str, order: Any) -> str:
    from onnx import helper, numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(order.astype(np.int64), "order"))
    at = next(k for k, n in enumerate(model.graph.node) if name in n.output)
    model.graph.node.insert(at + 1, helper.make_node("Gather", [name, "order"], [name + "/shuffled"], axis=1))
    return name + "/shuffled"


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_the_rows_of_a_table(turned: bool, find: Find, fused_error: Compare) -> None:
    """An embedding lookup that is reshaped to matrices, [outputs, inputs] or [inputs, outputs]."""
    g, parts = Graph(), Parts()
    tokens, ids, weights = graphs._start(g, parts)

    def lookup(name: str) -> str:
        value = parts.weights[name]
        value = value.transpose(0, 2, 1) if turned else value
        picked = g.op("Gather", g.constant(value.reshape(E, -1).copy(), name), ids, axis=0)
        return str(g.op("Reshape", picked, g.ints(-1, K, *value.shape[1:])))

    def product(matrix: str, vectors: str) -> str:
        if turned:
            return str(g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", vectors, g.ints(2)), matrix), g.ints(2)))
        return str(g.op("Squeeze", g.op("MatMul", matrix, g.op("Unsqueeze", vectors, g.ints(-1))), g.ints(-1)))

    up = product(lookup("w1"), g.op("Unsqueeze", tokens, g.ints(1)))
    gate, up = g.op("Split", up, outputs=2, axis=-1, num_outputs=2)
    down = product(lookup("w2"), graphs.silu(g, gate, up))
    down = g.op("Mul", down, g.op("Unsqueeze", weights, g.ints(-1)))
    model = g.model(graphs._end(g, g.op("ReduceSum", down, g.ints(1), keepdims=0)))
    found = only(find(model))
    assert isinstance(found, Fusion), found
    assert [w.elem_type for w in found.weights] == [TensorProto.FLOAT] * 2
    assert fused_error(model) < 1e-5
