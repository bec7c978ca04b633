"""Routers that few exporters write: what becomes of each is in the table of mutations."""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from tests.moe import graphs
from tests.moe.graphs import E, Graph

Router = Callable[[Graph, str], tuple[str, str]]


def last_on_ties(g: Graph, logits: str) -> tuple[str, str]:
    """Coarse logits, and a TopK over the reversed experts: on ties it picks the last."""
    ends = g.ints(-1), g.ints(-E - 1), g.ints(1), g.ints(-1)
    coarse = g.op("Round", g.op("Mul", logits, g.constant(np.float32(0.5))))
    turned = g.op("Slice", g.op("Softmax", coarse, axis=-1), *ends)
    top, ids = g.op("TopK", turned, g.ints(graphs.K), outputs=2, axis=-1)
    return g.op("Sub", g.ints(E - 1), ids), top


def one_expert_louder(g: Graph, logits: str) -> tuple[str, str]:
    ids, weights = graphs.softmax_router(g, logits)
    factors = g.constant(np.array([1, 1, 1, 1.5, 1, 1], np.float32))
    return ids, g.op("Mul", weights, g.op("Gather", factors, ids, axis=0))


def renamed(g: Graph, logits: str) -> tuple[str, str]:
    ids, weights = graphs.softmax_router(g, logits)
    return g.op("Gather", g.constant(np.array([3, 0, 5, 1, 4, 2], np.int64)), ids, axis=0), weights


def dropped_below(g: Graph, logits: str, least: float = 0.35) -> tuple[str, str]:
    ids, weights = graphs.softmax_router(g, logits)
    return ids, g.op("Where", g.op("Less", weights, g.constant(np.float32(least))), g.constant(np.float32(0)), weights)


def l1(g: Graph, logits: str) -> tuple[str, str]:
    top, ids = g.op("TopK", g.op("Softmax", logits, axis=-1), g.ints(graphs.K), outputs=2, axis=-1)
    return ids, g.op("Div", top, g.op("ReduceL1", top, g.ints(-1), keepdims=1))


def with_eps(g: Graph, logits: str, eps: float = 0.3) -> tuple[str, str]:
    top, ids = g.op("TopK", g.op("Sigmoid", logits), g.ints(graphs.K), outputs=2, axis=-1)
    return ids, g.op(
        "Div", top, g.op("Add", g.op("ReduceSum", top, g.ints(-1), keepdims=1), g.constant(np.float32(eps)))
    )


def top_softmax(g: Graph, logits: str) -> tuple[str, str]:
    top, ids = g.op("TopK", logits, g.ints(graphs.K), outputs=2, axis=-1)
    return ids, g.op("Softmax", top, axis=-1)


def negated_largest(g: Graph, logits: str) -> tuple[str, str]:
    """The smallest logits win."""
    top, ids = g.op("TopK", logits, g.ints(graphs.K), outputs=2, axis=-1, largest=0)
    return ids, g.op("Softmax", g.op("Neg", top), axis=-1)


def by_length(g: Graph, logits: str) -> tuple[str, str]:
    ids, weights = graphs.softmax_router(g, logits)
    count = g.op("Cast", g.op("Squeeze", g.op("Shape", weights, start=0, end=1)), to=TensorProto.FLOAT)
    return ids, g.op("Mul", weights, g.op("Log", g.op("Add", count, g.constant(np.float32(1)))))


def masked(g: Graph, logits: str, place: int = 40) -> tuple[str, str]:
    """No expert from position 40 on."""
    ids, weights = graphs.softmax_router(g, logits)
    count = g.op("Squeeze", g.op("Shape", weights, start=0, end=1))
    index = g.op("Range", g.constant(np.int64(0)), count, g.constant(np.int64(1)))
    inside = g.op("Cast", g.op("Less", index, g.constant(np.int64(place))), to=TensorProto.FLOAT)
    return ids, g.op("Mul", weights, g.op("Unsqueeze", inside, g.ints(1)))
