"""Operators that hold quantised weights, and where in them a constant of the graph lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import NBITS
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.weights.store import view
from ortmoe_cli.weights.stored import Lines, Matrix, Stored, zero_points

Array = NDArray[Any]

GATHER = "com.microsoft.GatherBlockQuantized"
PASSING = frozenset(
    {
        "Cast",
        "Flatten",
        "Gather",
        "GatherND",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that take parts of their first input, or show it in another shape."""
_MOST_VIEWS = 2000
DEQUANTIZE = ("DequantizeLinear", "com.microsoft.DequantizeLinear")

_CODES = {
    getattr(TensorProto, name): (bits, signed)
    for name, bits, signed in (
        ("INT2", 2, True), ("UINT2", 2, False), ("INT4", 4, True), ("UINT4", 4, False), ("INT8", 8, True),
        ("UINT8", 8, False),
    )
    if hasattr(TensorProto, name)
}  # fmt: skip


def stored(index: Index, name: str) -> Stored | None:
    """The quantised constant that this tensor stands for: the result of a dequantisation, or the codes that a product
    or a lookup reads. None if it is none. Raises Refused for a form that cannot be read."""
    i = index.producer(name)
    if i is not None:
        return _dequantize(index, i) if index.op(i) in DEQUANTIZE and index.is_constant(name) else None
    weight = index.model.weights.get(name)
    if weight is None or weight.elem_type not in _CODES:
        return None
    for i in index.consumers(name):
        if index.op(i) == NBITS and index.inputs(i)[1] == name:
            return _nbits(index, i)
        if index.op(i) == GATHER and index.inputs(i)[0] == name:
            return _gather(index, i)
    return _looked_up(index, name)


def shape_of(index: Index, name: str) -> tuple[int, ...] | None:
    """The shape of what a quantised constant stands for, None if it is none."""
    try:
        found = stored(index, name)
    except Refused:
        return None
    return found.shape if found else None


def behind(index: Index, name: str) -> str:
    """The quantised constant that a constant shows in another shape, '' if there is none."""
    for _ in range(12):
        if stored(index, name) is not None:
            return name
        i = index.producer(name)
        if i is None or not index.inputs(i):
            return ""
        name = index.inputs(i)[0]
    return ""


def _nbits(index: Index, i: int) -> Stored:
    codes, scales, zeros, order, *_ = (*index.inputs(i)[1:], "", "", "")
    rows, columns = int(index.attribute(i, "N")), int(index.attribute(i, "K"))
    bits, block = int(index.attribute(i, "bits", 4)), int(index.attribute(i, "block_size"))
    if bits not in (2, 4, 8):
        raise Refused("MOE131", f"experts of {bits} bits")
    if order:
        raise Refused("MOE131", "the columns of the experts are in an order of their own (g_idx)")
    if index.attribute(i, "weight_prepacked", 0):
        raise Refused("MOE131", "the experts are packed for one kind of device already (weight_prepacked)")
    found = Stored(codes, scales, zeros, bits, False, (rows, columns), (1, block), 2 ** (bits - 1), padded=True)
    return _checked(index, found)


def _gather(index: Index, i: int) -> Stored:
    codes, _, scales, zeros, *_ = (*index.inputs(i), "", "")
    weight = index.model.weights.get(codes)
    if weight is None or weight.elem_type not in _CODES:
        raise Refused("MOE131", f"the codes '{codes}' are no initializer of integers")
    bits, signed = _CODES[weight.elem_type]
    shape, zero = weight.shape, 0
    if bits == 8:
        bits = int(index.attribute(i, "bits", 4))
        shape, zero = (*shape[:-1], shape[-1] * 8 // bits), 2 ** (bits - 1)
    axis = int(index.attribute(i, "quantize_axis", 1)) % len(shape)
    edges = [1] * len(shape)
    edges[axis] = int(index.attribute(i, "block_size", 128))
    half = 2 ** (bits - 1) if signed else zero
    return _checked(index, Stored(codes, scales, zeros, bits, signed, shape, tuple(edges), half))


def _looked_up(index: Index, name: str) -> Stored | None:
    """Codes of which parts are taken first and dequantised then, all with the same scale."""
    found: set[tuple[str, str]] = set()
    stack, seen = [name], {name}
    while stack and len(seen) < _MOST_VIEWS:
        for i in index.consumers(stack.pop()):
            op, inputs = index.op(i), index.inputs(i)
            if op in DEQUANTIZE and inputs[0] in seen:
                found.add((inputs[1], inputs[2] if len(inputs) > 2 else ""))
            elif op in PASSING and inputs[0] in seen:
                fresh = [output for output in index.outputs(i) if output and output not in seen]
                seen.update(fresh)
                stack += fresh
    if len(found) != 1:
        return None
    (scales, zeros), weight = found.pop(), index.model.weights[name]
    if scales not in index.model.weights or math.prod(index.model.weights[scales].shape) != 1:
        return None
    bits, signed = _CODES[weight.elem_type]
    half = 2 ** (bits - 1) if signed else 0
    return _checked(index, Stored(name, scales, zeros, bits, signed, weight.shape, weight.shape, half))


def _dequantize(index: Index, i: int) -> Stored | None:
    codes, scales, zeros, *_ = (*index.inputs(i), "")
    weight, scale = index.model.weights.get(codes), index.model.weights.get(scales)
    if weight is None and scale is not None and math.prod(scale.shape) == 1:
        return None  # what it is a part of is what counts
    if weight is None or scale is None:
        raise Refused("MOE131", f"the codes or scales of '{index.outputs(i)[0]}' are computed in the graph")
    if weight.elem_type not in _CODES:
        raise Refused("MOE131", f"experts of the type {TensorProto.DataType.Name(weight.elem_type)}")
    bits, signed = _CODES[weight.elem_type]
    axis = int(index.attribute(i, "axis", 1))
    block = int(index.attribute(i, "block_size", 0))
    edges = list(weight.shape) if not block else [1] * len(weight.shape)
    if block or math.prod(scale.shape) > 1:
        edges[axis] = block or 1
    zero = 2 ** (bits - 1) if signed else 0
    return _checked(index, Stored(codes, scales, zeros, bits, signed, weight.shape, tuple(edges), zero))


def _checked(index: Index, found: Stored) -> Stored:
    """Raises Refused unless all parts are initializers that fit together."""
    weights = index.model.weights
    for name in (found.codes, found.scales, *([found.zeros] if found.zeros else [])):
        if not index.is_initializer(name):
            raise Refused("MOE131", f"'{name}' is no initializer")
    if math.prod(weights[found.scales].shape) != math.prod(found.boxes):
        raise Refused("MOE131", f"{list(weights[found.scales].shape)} scales for weights of shape {list(found.shape)}")
    if found.zeros:
        try:
            zero_points(found, index.model)
        except ValueError as error:
            raise Refused("MOE131", f"zero points '{found.zeros}' cannot be codes ({error})") from error
    return found


@dataclass(frozen=True, eq=False)
class Place:
    """A constant of the graph as a part of a quantised one: for each of its axes the places along an axis of that, and
    what the other axes are fixed at."""

    stored: Stored
    lines: tuple[Lines | None, ...]
    """None for an axis of one element."""
    fixed: dict[int, int]

    def matrix(self, expert: int | None, transpose: bool, rows: slice, columns: slice) -> Matrix:
        """One expert's matrix [outputs, inputs]. Raises Refused."""
        lines, fixed = list(self.lines), dict(self.fixed)
        while len(lines) > 2:
            first = lines.pop(0)
            if first is not None:
                fixed[first.axis] = first.places[expert or 0]
        given = [line if line is not None else self._single(lines) for line in lines]
        if len(given) != 2 or given[0].axis == given[1].axis:
            raise Refused("MOE131", "experts that are no matrices within the quantised weights")
        pair = given[::-1] if transpose else given
        return Matrix(self.stored, pair[0].of(rows), pair[1].of(columns), fixed)

    def _single(self, lines: Sequence[Lines | None]) -> Lines:
        used = {line.axis for line in (*lines, *self.lines) if line is not None}
        free = [axis for axis in range(len(self.stored.shape)) if axis not in used]
        if not free:
            raise Refused("MOE131", "experts that are no matrices within the quantised weights")
        return Lines(free[0], range(self.fixed[free[0]], self.fixed[free[0]] + 1))


def place(index: Index, cutter: Cutter, name: str) -> Place:
    """Where a constant lies in the quantised one behind it. Raises Refused."""
    root = behind(index, name)
    found = stored(index, root)
    if found is None:
        raise Refused("MOE131", f"'{name}' does not come from quantised weights")
    lines: list[Lines | None] = []
    fixed: dict[int, int] = {}
    for axis, size in enumerate(found.shape):
        ruler = np.arange(size, dtype=np.int32).reshape([-1 if a == axis else 1 for a in range(len(found.shape))])
        marks = np.broadcast_to(ruler, found.shape)
        seen = view(index, cutter, name, {root: marks}.get)
        if seen is None:
            raise Refused("MOE131", f"'{name}' is computed from dequantised weights")
        lines = lines or [None] * seen.ndim
        follows = [a for a in range(seen.ndim) if seen.shape[a] > 1 and seen.take(1, a).flat[0] != seen.flat[0]]
        if not follows:
            fixed[axis] = int(seen.flat[0])
            continue
        line = np.moveaxis(seen, follows[0], 0).reshape(seen.shape[follows[0]], -1)[:, 0]
        step = int(line[1]) - int(line[0])
        places = range(int(line[0]), int(line[0]) + step * len(line), step)
        straight = len(follows) == 1 and np.array_equal(line, np.array(places)) and _constant(seen, follows[0])
        if not straight or lines[follows[0]] is not None:
            raise Refused("MOE131", f"'{name}' mixes axes of the quantised weights")
        lines[follows[0]] = Lines(axis, places)
    return Place(found, tuple(lines), fixed)


def _constant(marks: Array, axis: int) -> bool:
    """Whether marks only change along one axis."""
    sizes = enumerate(zip(marks.strides, marks.shape, strict=True))
    if all(stride == 0 or size == 1 or a == axis for a, (stride, size) in sizes):
        return True
    first = marks[tuple(slice(None) if a == axis else slice(0, 1) for a in range(marks.ndim))]
    return bool((marks == first).all())
