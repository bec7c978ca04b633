"""The values of constant tensors, as views of the mapped file wherever the graph only looks at a weight differently.

Exporters seldom feed an expert's matrix to a MatMul as it is: it is a transpose, a slice or an entry of a stacked
weight, written as nodes. Running those nodes would copy each weight, sometimes the whole stack for every expert. Seen
as strides they cost nothing.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index

Array = NDArray[Any]

SPILL = 256 << 20
"""A view that must be copied (a reshape across a transpose) goes to a temporary file from this many bytes on."""


_DEQUANTISE = ("DequantizeLinear", "com.microsoft.DequantizeLinear")

Root = Callable[[str], "Array | None"]
"""Gives the value of a tensor that is not to be looked behind, None for all others."""


def lookup(index: Index, cutter: Cutter, name: str, root: Root | None = None) -> Array:
    """The value of a constant tensor, read-only: a view of the memory map where possible, else evaluated.

    Views may also start from tensors that `root` knows. Raises CutError: 'free' for a tensor that callers can change (a
    weight that is also an input is a mere default).
    """
    if not index.is_constant(name):
        raise CutError("free", f"'{name}' is not constant")
    value = view(index, cutter, name, root)
    if value is None:
        value = cutter.constant(name)
    value = np.asarray(value).view()
    value.flags.writeable = False
    return value


def view(index: Index, cutter: Cutter, name: str, root: Root | None = None) -> Array | None:
    """The tensor as a view of an initializer, or of what `root` knows; None if that is not what it is.

    What `root` knows may be seen through a dequantisation: its values are the dequantised ones already.
    """
    steps: list[_Step] = []
    tensor = name
    dequantised = False
    value: Array | None = None
    while (value := root(tensor) if root else None) is None and not index.is_initializer(tensor):
        i = index.producer(tensor)
        if i is None or not index.inputs(i):
            return None
        if root is not None and index.op(i) in _DEQUANTISE:
            dequantised = True
        elif index.op(i) not in _VIEWS:
            return None
        else:
            steps.append(_Step(index, cutter, i, tensor))
        tensor = index.inputs(i)[0]
    if value is None:
        if dequantised:
            return None
        value = index.model.array(tensor)
    try:
        for step in reversed(steps):
            value = _VIEWS[index.op(step.node)](step, value)
            if value is None:
                return None
    except (ValueError, IndexError):  # the node does not fit its input: the runtime will say so in its own words
        return None
    return value


@dataclass(frozen=True)
class _Step:
    """One node on the way from the initializer to the tensor."""

    index: Index
    cutter: Cutter
    node: int
    output: str

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.index.attribute(self.node, name, default)

    def operand(self, position: int) -> Array | None:
        """The value of a small constant input; None if it is left out."""
        names = self.index.inputs(self.node)
        if position >= len(names) or not names[position]:
            return None
        return self.cutter.constant(names[position])

    def ints(self, attribute: str, position: int) -> list[int] | None:
        """Numbers that older operator sets keep in an attribute and newer ones in an input."""
        value = self.attribute(attribute)
        if value is None:
            value = self.operand(position)
        return None if value is None else [int(v) for v in np.ravel(value)]


def _transpose(step: _Step, array: Array) -> Array:
    return array.transpose(step.attribute("perm"))


def _reshape(step: _Step, array: Array) -> Array | None:
    dims = step.ints("shape", 1)
    if dims is None:
        return None
    if not step.attribute("allowzero", 0):
        dims = [array.shape[axis] if dim == 0 else dim for axis, dim in enumerate(dims)]
    return _reshaped(array, dims)


def _flatten(step: _Step, array: Array) -> Array:
    axis = step.attribute("axis", 1)
    return _reshaped(array, (math.prod(array.shape[:axis]), math.prod(array.shape[axis:])))


def _squeeze(step: _Step, array: Array) -> Array:
    axes = step.ints("axes", 1)
    return array.squeeze() if axes is None else array.squeeze(tuple(axes))


def _unsqueeze(step: _Step, array: Array) -> Array | None:
    axes = step.ints("axes", 1)
    return None if axes is None else np.expand_dims(array, tuple(axes))


def _identity(step: _Step, array: Array) -> Array:
    return array


def _cast(step: _Step, array: Array) -> Array | None:
    return array if step.attribute("to") == helper.np_dtype_to_tensor_dtype(array.dtype) else None


def _slice(step: _Step, array: Array) -> Array | None:
    starts, ends = step.ints("starts", 1), step.ints("ends", 2)
    if starts is None or ends is None:
        return None
    axes, strides = step.ints("axes", 3), step.ints("steps", 4)
    where = [slice(None)] * array.ndim
    for start, end, axis, stride in zip(
        starts, ends, range(len(starts)) if axes is None else axes, strides or [1] * len(starts), strict=True
    ):
        where[axis] = slice(start, end, stride)
    return array[tuple(where)]


def _gather(step: _Step, array: Array) -> Array | None:
    """One entry, or entries at even distances; others cannot be a view."""
    axis = step.attribute("axis", 0)
    axis = axis + array.ndim if axis < 0 else axis
    picks = step.operand(1)
    if picks is None or picks.ndim > 1:
        return None
    size = array.shape[axis]
    entries = [int(v) + size if v < 0 else int(v) for v in np.ravel(picks)]
    if not entries or not all(0 <= entry < size for entry in entries):
        return None
    before = (slice(None),) * axis
    if not picks.ndim:
        entry: Array = array[(*before, slice(entries[0], entries[0] + 1))]
        return entry.squeeze(axis)
    stride = entries[1] - entries[0] if len(entries) > 1 else 1
    if not stride or entries != list(range(entries[0], entries[-1] + stride, stride)):
        return None
    stop = entries[-1] + stride
    view: Array = array[(*before, slice(entries[0], None if stop < 0 else stop, stride))]
    return view


def _split(step: _Step, array: Array) -> Array:
    axis = step.attribute("axis", 0)
    outputs = step.index.outputs(step.node)
    sizes = step.ints("split", 1)
    if sizes is None:
        size = -(-array.shape[axis] // int(step.attribute("num_outputs", len(outputs))))
        sizes = [size] * len(outputs)
    which = outputs.index(step.output)
    start = sum(sizes[:which])
    where = [slice(None)] * array.ndim
    where[axis] = slice(start, start + sizes[which])
    return array[tuple(where)]


def _reshaped(array: Array, shape: Sequence[int]) -> Array:
    """A view, or the one copy that the shape asks for; a big copy lies in a file, so that memory stays bounded."""
    try:
        return array.reshape(shape, copy=False)
    except ValueError:
        if array.nbytes < SPILL:
            return array.reshape(shape)
    with tempfile.TemporaryFile() as file:
        spilled = np.memmap(file, array.dtype, "w+", shape=array.shape)
    spilled[...] = array
    return spilled.reshape(shape)


_VIEWS: dict[str, Callable[[_Step, Any], Array | None]] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Identity": _identity,
    "Cast": _cast,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
}
