"""Selections that have nothing to do with experts yield nothing at all."""

import numpy as np
from onnx import TensorProto

from tests.moe import graphs
from tests.moe.conftest import Find
from tests.moe.graphs import Graph, H


def test_sampling_from_vocabulary_logits(find: Find) -> None:
    g = Graph()
    logits = g.op("MatMul", "x", g.constant(g.weight(H, 50)))
    top, ids = g.op("TopK", logits, g.ints(5), outputs=2, axis=-1)
    chosen = g.op("GatherElements", ids, g.op("ArgMax", g.op("Softmax", top), axis=-1, keepdims=1), axis=-1)
    assert find(g.model(g.op("Cast", chosen, to=TensorProto.FLOAT))) == []


def test_detector_with_a_network_on_the_best_queries(find: Find) -> None:
    g = Graph()
    scores = g.op("ReduceMax", g.op("MatMul", "x", g.constant(g.weight(H, 9))), g.ints(-1), keepdims=0)
    _, ids = g.op("TopK", scores, g.ints(4), outputs=2, axis=1)
    rows = g.op("GatherND", "x", g.op("Unsqueeze", ids, g.ints(-1)), batch_dims=1)
    inner = g.op("Relu", g.op("MatMul", rows, g.constant(g.weight(H, 32))))
    assert find(g.model(g.op("MatMul", inner, g.constant(g.weight(32, H))))) == []


def test_top_tokens_only_are_processed(find: Find) -> None:
    """Mixture of depths: one score per token."""
    g = Graph()
    score = g.op("MatMul", "x", g.constant(g.weight(H, 1)))
    _, ids = g.op("TopK", g.op("Squeeze", score, g.ints(-1)), g.ints(3), outputs=2, axis=1)
    place = g.op("Unsqueeze", ids, g.ints(-1))
    rows = g.op("GatherND", "x", place, batch_dims=1)
    made = graphs.silu(
        g, g.op("MatMul", rows, g.constant(g.weight(H, 8))), g.op("MatMul", rows, g.constant(g.weight(H, 8)))
    )
    assert find(g.model(g.op("MatMul", made, g.constant(g.weight(8, H))))) == []


def test_attention_over_the_top_keys(find: Find) -> None:
    g = Graph()
    q, k, v = (g.op("MatMul", "x", g.constant(g.weight(H, H))) for _ in range(3))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    top, _ = g.op("TopK", scores, g.ints(2), outputs=2, axis=-1)
    least = g.op("ReduceMin", top, g.ints(-1), keepdims=1)
    kept = g.op("Where", g.op("Less", scores, least), g.constant(np.float32(-1e9)), scores)
    mixed = g.op("MatMul", g.op("Softmax", kept, axis=-1), v)
    assert find(g.model(g.op("MatMul", mixed, g.constant(g.weight(H, H))))) == []
