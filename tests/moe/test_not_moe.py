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


def feed_forward(g: Graph, x: str, inner: int = 8, out: int = H) -> str:
    first = (g.op("MatMul", x, g.constant(g.weight(H, inner))) for _ in range(2))
    return str(g.op("MatMul", graphs.silu(g, *first), g.constant(g.weight(inner, out))))


def best_rows(g: Graph, scores: str, count: int = 4) -> str:
    """The hidden states of the tokens with the best scores (batch, seq)."""
    _, ids = g.op("TopK", scores, g.ints(count), outputs=2, axis=1)
    return str(g.op("GatherND", "x", g.op("Unsqueeze", ids, g.ints(-1)), batch_dims=1))


def class_scores(g: Graph, classes: int = 9) -> str:
    return str(g.op("ReduceMax", g.op("MatMul", "x", g.constant(g.weight(H, classes))), g.ints(-1), keepdims=0))


def test_detector_with_several_layers_behind_the_selection(find: Find) -> None:
    g = Graph()
    rows = best_rows(g, class_scores(g))
    for _ in range(4):
        rows = g.op("Add", rows, feed_forward(g, rows))
    assert find(g.model(rows)) == []


def test_detector_with_parallel_heads(find: Find) -> None:
    """Heads of equal shape on the selected tokens: nothing chooses between them."""
    g = Graph()
    rows = best_rows(g, class_scores(g, 6))
    assert find(g.model(g.op("Concat", *[feed_forward(g, rows, out=4) for _ in range(3)], axis=-1))) == []


def test_two_stage_detector(find: Find) -> None:
    """Scores of the chosen weigh the refined queries, flattened over classes."""
    g = Graph()
    scores = g.op("Sigmoid", g.op("MatMul", "x", g.constant(g.weight(H, 6))))
    flat = g.op("Reshape", scores, g.op("Concat", g.op("Shape", "x", start=0, end=1), g.ints(-1), axis=0))
    top, ids = g.op("TopK", flat, g.ints(4), outputs=2, axis=1)
    token = g.op("Unsqueeze", g.op("Div", ids, g.ints(6)), g.ints(-1))
    rows = g.op("GatherND", "x", token, batch_dims=1)
    refined = g.op("Add", rows, g.op("Mul", feed_forward(g, rows), g.op("Unsqueeze", top, g.ints(-1))))
    assert find(g.model(refined)) == []


def test_beam_search(find: Find) -> None:
    """The best tokens of a step are embedded and scored again."""
    g = Graph()
    head, table = g.constant(g.weight(H, 50)), g.constant(g.weight(50, H))
    scores = g.op("LogSoftmax", g.op("MatMul", "x", head), axis=-1)
    top, ids = g.op("TopK", scores, g.ints(4), outputs=2, axis=-1)
    beams = g.op("Gather", table, ids, axis=0)
    again = g.op("LogSoftmax", g.op("MatMul", g.op("Tanh", beams), head), axis=-1)
    total = g.op("Add", again, g.op("Unsqueeze", top, g.ints(-1)))
    total = g.op("Reshape", total, g.op("Concat", g.op("Shape", "x", start=0, end=2), g.ints(-1), axis=0))
    score, place = g.op("TopK", total, g.ints(4), outputs=2, axis=-1)
    chosen = g.op("Gather", table, g.op("Mod", place, g.ints(50)), axis=0)
    assert find(g.model(g.op("Mul", chosen, g.op("Unsqueeze", score, g.ints(-1))))) == []


def test_product_key_memory(find: Find) -> None:
    """Two selections over half keys, and the values of the best pairs."""
    g = Graph()
    query = g.op("MatMul", "x", g.constant(g.weight(H, 8)))
    halves = g.op("Split", query, outputs=2, axis=-1, num_outputs=2)
    picked = [
        g.op("TopK", g.op("MatMul", h, g.constant(g.weight(4, 16))), g.ints(4), outputs=2, axis=-1) for h in halves
    ]
    (s1, i1), (s2, i2) = picked
    shape = g.op("Concat", g.op("Shape", "x", start=0, end=2), g.ints(-1), axis=0)
    sums = g.op("Reshape", g.op("Add", g.op("Unsqueeze", s1, g.ints(-1)), g.op("Unsqueeze", s2, g.ints(-2))), shape)
    pairs = g.op("Add", g.op("Mul", g.op("Unsqueeze", i1, g.ints(-1)), g.ints(16)), g.op("Unsqueeze", i2, g.ints(-2)))
    top, best = g.op("TopK", sums, g.ints(4), outputs=2, axis=-1)
    slots = g.op("GatherElements", g.op("Reshape", pairs, shape), best, axis=-1)
    values = g.op("Gather", g.constant(g.weight(256, H)), slots, axis=0)
    weighted = g.op("Mul", values, g.op("Unsqueeze", g.op("Softmax", top, axis=-1), g.ints(-1)))
    assert find(g.model(g.op("ReduceSum", weighted, g.ints(2), keepdims=0))) == []


def test_largest_activations_only(find: Find) -> None:
    """A feed-forward network that keeps the best of its inner values."""
    g = Graph()
    inner = g.op("MatMul", "x", g.constant(g.weight(H, 24)))
    top, ids = g.op("TopK", inner, g.ints(5), outputs=2, axis=-1)
    zeros = g.op("Sub", inner, inner)
    kept = g.op("ScatterElements", zeros, ids, g.op("Relu", top), axis=-1)
    assert find(g.model(g.op("MatMul", kept, g.constant(g.weight(24, H))))) == []


def test_vector_quantisation(find: Find) -> None:
    """The nearest entry of a codebook, and a decoder."""
    g = Graph()
    nearest = g.op("ArgMax", g.op("MatMul", "x", g.constant(g.weight(H, 12))), axis=-1, keepdims=0)
    code = g.op("Gather", g.constant(g.weight(12, H)), nearest, axis=0)
    assert find(g.model(feed_forward(g, g.op("Add", code, g.op("Sub", "x", "x"))))) == []


def test_classifier_with_its_label(find: Find) -> None:
    g = Graph()
    logits = g.op("MatMul", g.op("ReduceMean", "x", g.ints(1), keepdims=0), g.constant(g.weight(H, 10)))
    label = g.op("Cast", g.op("ArgMax", logits, axis=-1, keepdims=1), to=TensorProto.FLOAT)
    assert find(g.model(g.op("Concat", logits, label, axis=-1))) == []


def test_pruned_tokens(find: Find) -> None:
    """Token pruning: the rest of the network runs on the best half, and is scattered back."""
    g = Graph()
    _, ids = g.op("TopK", class_scores(g, 3), g.ints(3), outputs=2, axis=1)
    place = g.op("Unsqueeze", ids, g.ints(-1))
    rows = g.op("GatherND", "x", place, batch_dims=1)
    q, k = (g.op("MatMul", rows, g.constant(g.weight(H, H))) for _ in range(2))
    mixed = g.op("MatMul", g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), axis=-1), rows)
    made = feed_forward(g, g.op("Add", rows, mixed))
    full = g.op("Expand", place, g.op("Shape", made))
    assert find(g.model(g.op("ScatterElements", "x", full, made, axis=1))) == []


def test_soft_slots(find: Find) -> None:
    """Soft mixture: every slot is an average of all tokens; nothing is chosen."""
    g = Graph()
    scores = g.op("MatMul", "x", g.constant(g.weight(H, 4)))
    slots = g.op("MatMul", g.op("Transpose", g.op("Softmax", scores, axis=1), perm=[0, 2, 1]), "x")
    pieces = g.op("Split", slots, outputs=4, axis=1, num_outputs=4)
    made = g.op("Concat", *[feed_forward(g, piece) for piece in pieces], axis=1)
    assert find(g.model(g.op("MatMul", g.op("Softmax", scores, axis=-1), made))) == []
