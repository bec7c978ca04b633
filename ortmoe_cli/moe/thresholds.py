"""Numbers in a block beside which it may behave differently, and probes on both sides of each.

A clip at 1000 or a special case for positions from 40 on shows nowhere but there. So every constant that hidden states
meet in a part of the graph that the rewrite replaces chooses sizes of hidden states, and whole numbers choose numbers
of tokens.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.region import Cone, Cut

Array = NDArray[Any]

_BOUNDS = frozenset({
    "Clip", "Min", "Max", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Where", "Mod", "Shrink",
    "ThresholdedRelu", "HardSigmoid",
})  # fmt: skip
"""Operators with a threshold: constants of any shape count."""
_SHIFTS = frozenset({"Add", "Sub", "Div", "Mul", "Pow"})
"""Operators that move or scale towards a threshold of what follows: single numbers count, not biases."""
_PLACES = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Slice", "Min", "Max", "Clip", "Equal", "Mod"})
"""Operators that positions may meet a number in."""
_ATTRIBUTES = ("alpha", "beta", "min", "max", "lambd", "bias")
_MOST_NUMBERS = 8
_LEAST, _MOST = 1e-30, 1e30
_MARGIN = 8.0
_GROWS = 1.5
LARGER = tuple(10.0**p for p in range(3, 9))
SMALLER = tuple(10.0**p for p in range(-3, -9, -1))
"""Sizes of hidden states beyond the usual ones."""


@dataclass(frozen=True)
class Threshold:
    """A tensor that holds hidden states, and a magnitude at which something may happen to it."""

    tensor: str
    number: float


def replaced(index: Index, cone: Cone, region: Cut, kept: Collection[str]) -> tuple[int, ...]:
    """The nodes of a region that nothing in `kept` needs."""
    alive, stack, seen = set[int](), list(kept), set[str]()
    inside = frozenset(region.nodes)
    while stack:
        name = stack.pop()
        i = index.producer(name)
        if name in seen or i is None or i not in inside:
            continue
        seen.add(name)
        alive.add(i)
        stack.extend(n for n in index.reads(i) if n not in (cone.hidden_states, cone.logits))
    return tuple(i for i in region.nodes if i not in alive)


def thresholds(
    index: Index, cutter: Cutter, cone: Cone, nodes: Iterable[int], tensors: Collection[str] | None = None
) -> list[Threshold]:
    """All of them, each once. `tensors`: those to look at, instead of all that hold hidden states."""
    watched = {*cone.hidden, cone.hidden_states} if tensors is None else tensors
    found: dict[Threshold, None] = {}
    for i in nodes:
        op = index.op(i)
        if op not in _BOUNDS and op not in _SHIFTS:
            continue
        data = [n for n in index.inputs(i) if n in watched]
        numbers = [float(v) for name in _ATTRIBUTES if (v := index.attribute(i, name)) is not None]
        for name in index.inputs(i):
            if name and name not in data and index.is_constant(name):
                numbers += _numbers(cutter, name, single=op in _SHIFTS)
        for number in (abs(n) for n in numbers):
            if _LEAST < number < _MOST:
                size = 1 / number if op == "Mul" else number
                found.update((Threshold(name, size), None) for name in data)
    return list(found)


def _numbers(cutter: Cutter, name: str, single: bool) -> list[float]:
    value = _value(cutter, name)
    if value is None or value.dtype.kind not in "fV" or (single and value.size > 1) or not value.size:
        return []
    numbers = np.abs(value.astype(np.float64).reshape(-1))
    numbers = numbers[np.isfinite(numbers)]
    return [float(numbers.min()), float(numbers.max())] if numbers.size else []


def _value(cutter: Cutter, name: str) -> Array | None:
    try:
        return cutter.constant(name)
    except CutError:
        return None


class Coverage:
    """Which thresholds have been seen from both sides: `low` and `high` hold those that have not."""

    def __init__(self, wanted: Iterable[Threshold]) -> None:
        self.low = set(wanted)
        self.high = set(self.low)
        self._now: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    @property
    def tensors(self) -> tuple[str, ...]:
        """Those that are still of interest."""
        return tuple(sorted({t.tensor for t in self.low | self.high}))

    def see(self, values: Mapping[str, Array]) -> None:
        """Take note of a probe."""
        for name in self.tensors:
            size = _size(values, name)
            if size is not None:
                self.high -= {t for t in self.high if t.tensor == name and size[1] >= _MARGIN * t.number}
                self.low -= {t for t in self.low if t.tensor == name and size[0] <= t.number / _MARGIN}
                before = self._now.get(name, size)
                self._now[name] = max(before[0], size[0]), max(before[1], size[1])

    def begin(self) -> None:
        """Here begins a series of probes whose hidden states grow, or shrink, from step to step."""
        self._last, self._now = {}, {}

    def step(self) -> None:
        """One step is done. A tensor that no longer changes with the hidden states never gets to its threshold."""
        for name, (middle, largest) in self._now.items():
            if name in self._last:
                before = self._last[name]
                if before[1] / _GROWS <= largest < _GROWS * before[1]:
                    self.high = {t for t in self.high if t.tensor != name}
                if before[0] / _GROWS < middle <= _GROWS * before[0]:
                    self.low = {t for t in self.low if t.tensor != name}
        self._last, self._now = self._now, {}


def _size(values: Mapping[str, Array], name: str) -> tuple[float, float] | None:
    """The middle and the largest magnitude."""
    value = values.get(name)
    if value is None or value.dtype.kind != "f" or not value.size:
        return None
    magnitudes = np.abs(value[np.isfinite(value)])
    return (float(np.median(magnitudes)), float(magnitudes.max())) if magnitudes.size else None


def places(
    index: Index, cutter: Cutter, cone: Cone, nodes: Iterable[int], usual: Collection[int], most: int
) -> list[int]:
    """Numbers that positions or counts of tokens may be compared with, directly or after a shift or a division.

    `usual`: widths and counts of experts. Where hidden states meet a float it is a magnitude, not a position.
    """
    found: dict[int, None] = {}
    for i in nodes:
        op = index.op(i)
        if op not in _PLACES and op not in _SHIFTS:
            continue
        kinds = "iu" if any(name in cone.hidden for name in index.inputs(i)) else "fiuV"
        for name in index.inputs(i):
            value = _value(cutter, name) if name and index.is_constant(name) else None
            if value is None or value.size > _MOST_NUMBERS or value.dtype.kind not in kinds:
                continue
            for number in np.abs(value.astype(np.float64).reshape(-1)).tolist():
                if op == "Mul" and 0 < number < 1:
                    number = 1 / number  # noqa: PLW2901  the count at which the product passes one
                if 2 <= number <= most and number not in usual:
                    found[math.ceil(number)] = None
    return list(found)
