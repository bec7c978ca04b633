"""The numbers that a known tensor is computed with: windows, chunks, thresholds, lengths of tables.

They say at which sizes something may begin to happen that shorter probes do not show.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ortmoe_cli.attention.lengths import formula
from ortmoe_cli.graph.feeds import ENCODER_EXTRA
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe
from ortmoe_cli.graph.types import HALF

_COMPARES = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Clip"}
_VIEWS = {
    "Cast", "CastLike", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Expand", "Identity", "Transpose", "Tile",
    "Concat", "Slice", "Gather", "ConstantOfShape",
}  # fmt: skip
_CLEAR = _COMPARES | _VIEWS | {
    "Range", "Add", "Sub", "And", "Or", "Not", "Xor", "Where", "GatherND", "GatherElements", "ScatterND",
    "ScatterElements", "Trilu", "Shape", "Size", "CumSum", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "Neg",
    "Abs", "Sign", "IsNaN", "IsInf", "BitwiseAnd", "BitwiseOr", "BitwiseNot", "Split", "Constant", "Mul", "EyeLike",
    "Dropout", "NonZero",
}  # fmt: skip
"""Operators whose thresholds are sums of the constants that are put in."""
_COUNTS = _COMPARES | {"Range", "Add", "Sub", "CumSum", "ReduceSum"}
"""What goes wrong on large integers in half precision."""
_AXES = {
    "Unsqueeze": (1,), "Squeeze": (1,), "CumSum": (1,), "ReduceSum": (1,), "ReduceMax": (1,), "ReduceMin": (1,),
    "ReduceProd": (1,), "Slice": (3, 4), "Split": (1,), "CastLike": (1,),
}  # fmt: skip
"""Inputs that name dimensions."""
_SIZED = {"Reshape": 1, "Expand": 1, "Tile": 1, "ConstantOfShape": 0}
"""Inputs that are shapes: a constant among them is a size of its own, not a threshold."""
_ATTRIBUTES = ("starts", "ends", "min", "max", "value")
_OFFSETS = (0, 1, ENCODER_EXTRA)
_VALUES = 64
"""Larger constants are tables: their dimensions count, not their values."""
_NODES = 4_000
_LOW, _ENDLESS = -1e4, float(2**31 - 2)
_BEYOND = 1e30


@dataclass
class Numbers:
    """`thresholds`: magnitudes above 1; `tables`: lengths; `clear`: nothing makes other thresholds out of them."""

    thresholds: list[float] = field(default_factory=list)
    tables: set[int] = field(default_factory=set)
    clear: bool = True
    unclear: str = ""

    @property
    def none(self) -> bool:
        return self.clear and not self.thresholds and not self.tables

    @property
    def reach(self) -> float:
        """No threshold lies beyond, if the numbers are clear."""
        return float(sum(self.thresholds))


def numbers_of(index: Index, probe: Probe, shapes: tuple[Probe, ...], root: str) -> Numbers:
    """The numbers behind a tensor. `shapes` are probes at which the sizes it reads must follow formulas."""
    return _Collector(index, probe, shapes).collect(root)


class _Collector:
    def __init__(self, index: Index, probe: Probe, shapes: tuple[Probe, ...]) -> None:
        self._index, self._probe, self._shapes = index, probe, shapes
        self._numbers = Numbers()
        self._multiplies = False

    def collect(self, root: str) -> Numbers:
        stack, seen = [(root, "")], {root}
        while stack:
            name, reader = stack.pop()
            if self._index.is_constant(name):
                self._constant(name, reader)
                continue
            i = self._index.producer(name)
            if i is None:
                continue
            self._judge(i)
            if self._index.op(i) in ("Shape", "Size"):
                continue
            for read, context in self._reads(i, reader):
                if self._index.is_constant(read):
                    self._constant(read, context)
                elif read not in seen:
                    seen.add(read)
                    stack.append((read, context))
            if len(seen) > _NODES:
                self._unclear("it is computed by too many nodes")
                break
        if self._multiplies and self._numbers.thresholds:
            self._unclear("it multiplies")
        return self._numbers

    def _reads(self, i: int, reader: str) -> Iterator[tuple[str, str]]:
        """The inputs that decide values, each with the operator that its numbers meet."""
        index = self._index
        op, inputs = index.op(i), index.inputs(i)
        context = reader if op in _VIEWS else op
        source = index.producer(inputs[0]) if inputs else None
        picks_a_size = op in ("Gather", "Slice") and source is not None and index.op(source) == "Shape"
        for k, name in enumerate(inputs):
            if not name or k in _AXES.get(op, ()) or (picks_a_size and k):
                continue
            if _SIZED.get(op) == k:
                if not index.is_constant(name):
                    yield name, "size"
                continue
            yield name, ("bound" if op in ("Slice", "Gather") and k else context)
        for key in _ATTRIBUTES:
            value = index.attribute(i, key, None)
            if value is not None and not isinstance(value, str) and op != "Constant":
                self._values(np.atleast_1d(np.asarray(value, np.float64)), context, np.float32)

    def _judge(self, i: int) -> None:
        index, op = self._index, self._index.op(i)
        if op not in _CLEAR:
            self._unclear(f"{op} is part of it")
        self._multiplies |= op == "Mul"
        if op in ("Shape", "Size"):
            if formula(index.inputs(i)[0], self._shapes, _OFFSETS) is None:
                self._unclear(f"the sizes of '{index.inputs(i)[0]}' follow no formula")
        elif op in _COUNTS and any(index.elem_type(n) in HALF for n in index.inputs(i)):
            values = [self._probe.value(name) for name in index.inputs(i) if name]
            if any(v is not None and v.size > 1 and len(np.unique(v[np.abs(v) < -_LOW])) > 2 for v in values):
                self._unclear(f"{op} counts in half precision")

    def _constant(self, name: str, reader: str) -> None:
        value = self._probe.value(name)
        if value is None:
            shape = self._probe.shape(name)
            if shape is None:
                self._unclear(f"the constant '{name}' could not be read")
            self._numbers.tables.update(size for size in shape or () if size > 1)
        elif value.size > _VALUES:
            self._numbers.tables.update(size for size in value.shape if size > 1)
        elif value.dtype.kind in "iufb":
            self._values(value.astype(np.float64).reshape(-1), reader, value.dtype)

    def _values(self, values: np.ndarray, reader: str, dtype: object) -> None:
        is_float = np.dtype(dtype).kind == "f"  # type: ignore[call-overload]
        for number in {float(v) for v in values}:
            magnitude = abs(number)
            if np.isnan(number) or magnitude <= 1 or magnitude >= _BEYOND:
                continue
            if is_float and reader not in _COMPARES and (number <= _LOW or (magnitude >= -_LOW and reader == "Mul")):
                continue  # what is added to scores to keep keys out
            if not is_float and reader in ("bound", "size") and magnitude >= _ENDLESS:
                continue  # to the end of a dimension
            self._numbers.thresholds.append(magnitude)

    def _unclear(self, why: str) -> None:
        self._numbers.clear = False
        self._numbers.unclear = self._numbers.unclear or why
