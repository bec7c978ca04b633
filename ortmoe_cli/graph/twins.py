"""Pieces of a graph that are equal but for their weights: the layers of a model.

What one piece was found to compute, another of equal structure computes with its own weights. Equal structure means:
the same operators with the same attributes, wired alike, and constants alike. Small constants and all whole numbers
have to be equal by value, for they say what is computed; only large floating-point and quantised weights may differ.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Weight
from ortmoe_cli.graph.plan import is_large

_WHOLE = {TensorProto.INT64, TensorProto.INT32, TensorProto.UINT64, TensorProto.UINT32, TensorProto.BOOL}
"""Types of ids, sizes and tables."""
_BUILT_IN = {getattr(TensorProto, name) for name in ("INT4", "UINT4", "INT2", "UINT2") if hasattr(TensorProto, name)}
"""Types that cuts build in: a cut that ran with one such weight does not run with another."""
_SMALL = 4096
"""Up to so many bytes a constant's values are looked at to know whether it is a weight."""


class Piece:
    """Nodes of a graph, in graph order, that others are compared with."""

    def __init__(self, index: Index, nodes: Sequence[int]) -> None:
        self.index = index
        self.nodes = np.array(nodes, np.int64)
        self._wiring = index.read_by(self.nodes), index.made_by(self.nodes)
        (reads, _), (makes, _) = self._wiring
        self._tensors, self._first, self._number = np.unique(
            np.concatenate([reads, makes]), return_index=True, return_inverse=True
        )
        self._leaves = np.flatnonzero(~np.isin(self._tensors, makes))
        self._signatures = [_signature(index, i) for i in nodes]

    def twin(self, shift: int) -> dict[str, str] | None:
        """The tensors of the piece so many nodes further on, by the names of those here; None if it is another.

        Beyond weights the pieces may read different tensors: what these are is up to the caller.
        """
        index, nodes = self.index, self.nodes + shift
        if nodes[0] < 0 or nodes[-1] >= len(index) or (index.ops_of(nodes) != index.ops_of(self.nodes)).any():
            return None
        wiring = index.read_by(nodes), index.made_by(nodes)
        if any(not np.array_equal(a[1], b[1]) for a, b in zip(wiring, self._wiring, strict=True)):
            return None
        found = np.concatenate([wiring[0][0], wiring[1][0]])
        tensors = found[self._first]
        if (tensors[self._number] != found).any() or len(np.unique(tensors)) != len(tensors):
            return None
        if any(_signature(index, i) != known for i, known in zip(nodes.tolist(), self._signatures, strict=True)):
            return None
        here, there = index.names(self._tensors.tolist()), index.names(tensors.tolist())
        names = dict(zip(here, there, strict=True))
        for k in self._leaves.tolist():
            if not _alike(index, here[k], there[k], names):
                return None
        return names


def _signature(index: Index, i: int) -> tuple[object, ...]:
    """What a node is, beyond its operator and its wiring: attributes, and which inputs it leaves out."""
    node = index.node(i)
    attributes = tuple(a.SerializeToString() for a in node.attribute)
    inputs = tuple(node.input)
    return (attributes, [bool(name) for name in inputs] if "" in inputs else len(inputs), len(node.output))


def _alike(index: Index, a: str, b: str, names: dict[str, str]) -> bool:
    """Whether two tensors from outside play the same part. Adds what a constant is made of to `names`."""
    if a == b:
        return True
    if index.is_constant(a) != index.is_constant(b):
        return False
    if not index.is_constant(a):
        return True
    if index.is_initializer(a) or index.is_initializer(b):
        return index.is_initializer(a) and index.is_initializer(b) and _same_weight(index, a, b)
    i, j = index.producer(a), index.producer(b)
    if i is None or j is None or index.op(i) != index.op(j) or _signature(index, i) != _signature(index, j):
        return False
    reads = index.reads(i), index.reads(j)
    if len(reads[0]) != len(reads[1]) or index.outputs(i).index(a) != index.outputs(j).index(b):
        return False
    for here, there in (*zip(*reads, strict=True), *zip(index.outputs(i), index.outputs(j), strict=True)):
        if here and names.setdefault(here, there) != there:
            return False
    return all(_alike(index, here, there, names) for here, there in zip(*reads, strict=True))


def _same_weight(index: Index, a: str, b: str) -> bool:
    weights: Mapping[str, Weight] = index.model.weights
    first, second = weights[a], weights[b]
    if (first.elem_type, first.shape) != (second.elem_type, second.shape):
        return False
    if first.elem_type in _BUILT_IN:
        return bool(np.array_equal(index.model.raw(a), index.model.raw(b)))
    if first.elem_type not in _WHOLE and (first.nbytes > _SMALL or _is_weight(index, a, first)):
        return True
    if first.span is None and second.span is None:
        raw = index.model.tensor(a).raw_data
        if raw:
            return bool(raw == index.model.tensor(b).raw_data)
    return index.model.array(a).tobytes() == index.model.array(b).tobytes()


def _is_weight(index: Index, name: str, weight: Weight) -> bool:
    return math.prod(weight.shape) > 1 and is_large(index.model.array(name))
