"""Operators that only move data, in numpy: slices, gathers, scatters, reshapes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Inputs = Sequence[Array | None]
Attribute = Callable[[str, Any], Any]
"""attribute(name, default) of the node at hand."""
Operator = Callable[[Inputs, Attribute, int], Sequence[Array]]
"""operator(inputs, attribute, number of outputs): inputs are None where left out."""


class Unsupported(Exception):
    """Evaluation in numpy cannot compute this node."""


def ints(value: Array | None, default: Any = None) -> Any:
    """The integers of a tensor that gives axes, sizes or bounds."""
    return default if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def optional(inputs: Inputs, position: int) -> Array | None:
    return inputs[position] if position < len(inputs) else None


def given(inputs: Inputs, position: int) -> Array:
    """An input that the operator cannot do without."""
    value = optional(inputs, position)
    if value is None:
        raise Unsupported(f"input {position} is left out")
    return value


def _slice(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x = given(inputs, 0)
    starts = ints(optional(inputs, 1), attribute("starts", None))
    ends = ints(optional(inputs, 2), attribute("ends", None))
    axes = ints(optional(inputs, 3), attribute("axes", None)) or range(len(starts))
    steps = ints(optional(inputs, 4)) or [1] * len(starts)
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        low, high = (0, size) if step > 0 else (-1, size - 1)
        first = min(max(start + size if start < 0 else start, 0), high)
        last = min(max(end + size if end < 0 else end, low), size)
        index[axis] = slice(first, None if last < 0 else last, step)
    return [x[tuple(index)]]


def target_shape(shape: Sequence[int], wanted: Sequence[int], allow_zero: bool) -> tuple[int, ...]:
    """The shape that Reshape gives to a tensor of `shape` (0 copies a dimension, -1 is inferred)."""
    target = [shape[k] if size == 0 and not allow_zero else size for k, size in enumerate(wanted)]
    if -1 in target:
        known = math.prod(size for size in target if size != -1)
        total = math.prod(shape)
        if known == 0 or total % known:
            raise Unsupported(f"Reshape of {list(shape)} to {list(wanted)}")
        target[target.index(-1)] = total // known
    if math.prod(target) != math.prod(shape):
        raise Unsupported(f"Reshape of {list(shape)} to {list(wanted)}")
    return tuple(target)


def _reshape(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x = given(inputs, 0)
    wanted = ints(optional(inputs, 1), attribute("shape", None))
    return [x.reshape(target_shape(x.shape, wanted, bool(attribute("allowzero", 0))))]


def _unsqueeze(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    axes = ints(optional(inputs, 1), attribute("axes", None))
    return [np.expand_dims(given(inputs, 0), tuple(axes))]


def _squeeze(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    axes = ints(optional(inputs, 1), attribute("axes", None))
    return [np.squeeze(given(inputs, 0), None if axes is None else tuple(axes))]


def split_sizes(size: int, sizes: Sequence[int] | None, outputs: int) -> list[int]:
    """The lengths into which Split cuts a dimension."""
    if sizes:
        return list(sizes)
    chunk = -(-size // outputs)
    return [max(0, min(chunk, size - k * chunk)) for k in range(outputs)]


def _split(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, axis = given(inputs, 0), attribute("axis", 0)
    sizes = split_sizes(x.shape[axis], ints(optional(inputs, 1), attribute("split", None)), outputs)
    return np.split(x, np.cumsum(sizes)[:-1].astype(int), axis=axis)


def _expand(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x = given(inputs, 0)
    return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(ints(inputs[1]))))]


def _gather(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    return [np.take(given(inputs, 0), given(inputs, 1).astype(np.int64), axis=attribute("axis", 0))]


def _gather_elements(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, indices, axis = given(inputs, 0), given(inputs, 1).astype(np.int64), attribute("axis", 0)
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return [x[tuple(places)]]


def _gather_nd(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    x, indices, batch = given(inputs, 0), given(inputs, 1), attribute("batch_dims", 0)
    rank = indices.ndim - 1
    places = [np.arange(x.shape[k]).reshape([-1 if j == k else 1 for j in range(rank)]) for k in range(batch)]
    return [x[(*places, *np.moveaxis(indices, -1, 0))]]


_SCATTER: Mapping[str, Callable[..., Any]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def _scatter(x: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    result = np.array(x)
    if reduction == "none":
        result[places] = updates
    else:
        _SCATTER[reduction](result, places, updates)
    return result


def _scatter_nd(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    places = tuple(np.moveaxis(given(inputs, 1), -1, 0))
    return [_scatter(given(inputs, 0), places, given(inputs, 2), attribute("reduction", "none"))]


def _scatter_elements(inputs: Inputs, attribute: Attribute, outputs: int) -> Sequence[Array]:
    indices = given(inputs, 1)
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[attribute("axis", 0)] = indices
    return [_scatter(given(inputs, 0), tuple(places), given(inputs, 2), attribute("reduction", "none"))]


def flattened(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """The shape that Flatten gives."""
    axis = axis % len(shape) if axis < 0 else axis
    return math.prod(shape[:axis]), math.prod(shape[axis:])


VIEWS: Mapping[str, Operator] = {
    "Expand": _expand,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": lambda i, a, n: [np.transpose(given(i, 0), a("perm", None))],
    "Unsqueeze": _unsqueeze,
}
"""Operators that only look at a tensor in another way: their shapes are found by looking at an empty one."""

MOVEMENT: Mapping[str, Operator] = {
    **VIEWS,
    "Flatten": lambda i, a, n: [given(i, 0).reshape(flattened(given(i, 0).shape, a("axis", 1)))],
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Concat": lambda i, a, n: [np.concatenate([given(i, k) for k in range(len(i))], a("axis", 0))],
    "Tile": lambda i, a, n: [np.tile(given(i, 0), ints(i[1]))],
}
