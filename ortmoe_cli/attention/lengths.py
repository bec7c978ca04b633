"""Sizes as formulas of batch and tokens, read off several probes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ortmoe_cli.graph.probe import Probe

Unit = Literal["1", "B", "S", "P", "T", "BS"]
_UNITS: tuple[Unit, ...] = ("B", "S", "P", "T", "BS")


@dataclass(frozen=True)
class Length:
    """factor · unit + offset, with B sequences, S new, P old and T = P + S tokens."""

    factor: int
    unit: Unit
    offset: int = 0


def formula(tensor: str, probes: Sequence[Probe], offsets: Sequence[int] = (0, 1)) -> tuple[Length, ...] | None:
    """Every dimension as a formula that holds at all probes; None if one has no formula."""
    shapes = [probe.shape(tensor) for probe in probes]
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(probes) or len({len(shape) for shape in known}) != 1:
        return None
    units = [_sizes(probe) for probe in probes]
    lengths = []
    for sizes in zip(*known, strict=True):
        length = next(_fitting(sizes, units, offsets), None)
        if length is None:
            return None
        lengths.append(length)
    return tuple(lengths)


def _sizes(probe: Probe) -> Mapping[Unit, int]:
    sizes = probe.sizes
    return {"B": sizes.batch, "S": sizes.new, "P": sizes.past, "T": sizes.total, "BS": sizes.batch * sizes.new}


def _fitting(sizes: Sequence[int], units: Sequence[Mapping[Unit, int]], offsets: Sequence[int]) -> Iterator[Length]:
    if len(set(sizes)) == 1:
        yield Length(sizes[0], "1")
    for offset in offsets:
        for unit in _UNITS:
            values = [known[unit] for known in units]
            if 0 in values or (sizes[0] - offset) % values[0]:
                continue
            factor = (sizes[0] - offset) // values[0]
            if factor > 0 and all(size == factor * value + offset for size, value in zip(sizes, values, strict=True)):
                yield Length(factor, unit, offset)
