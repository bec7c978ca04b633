"""Numbers, facts and layers in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortmoe_cli.outcome import Fact

_BARE = frozenset({"activation", "router", "mask", "dtype"})
"""Facts whose value speaks for itself: `silu`, not `activation=silu`."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(count: int) -> str:
    """A number of bytes: '57.3 GB'."""
    power = min(int(math.log(count, 1000)) if count else 0, len(_UNITS) - 1)
    return f"{count} bytes" if power == 0 else f"{count / 1000**power:.1f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """A time: '0.4 s', '83 s', '12 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def counted(count: int, noun: str) -> str:
    """'1 node', '4,412 nodes'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def fact(key: str, value: Fact) -> str:
    """One fact, or '' where it says nothing: 'E=128', 'silu', 'qk-norm'."""
    if isinstance(value, bool):
        return key.replace("_", "-") if value else ""
    if value in {0, "", "none"}:
        return ""
    if isinstance(value, float):
        return f"{key}={value:.6g}"
    return str(value) if key in _BARE else f"{key}={value}"


def facts(values: Mapping[str, Fact]) -> str:
    """All facts of a block on one line: 'E=128 k=8 H=2048 I=768 silu'."""
    return " ".join(filter(None, (fact(key, value) for key, value in values.items())))


def layers(numbers: Iterable[int]) -> str:
    """Layer numbers as ranges: '0–47', '0, 2, …, 46', '0–3, 7'."""
    return ", ".join(_runs(sorted(set(numbers))))


def _runs(numbers: list[int]) -> Iterator[str]:
    while numbers:
        count = _progression(numbers, 1)
        if count < 3:
            step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
            every = _progression(numbers, step)
            if every >= 4:
                yield f"{numbers[0]}, {numbers[1]}, …, {numbers[every - 1]}"
                numbers = numbers[every:]
                continue
        taken = count if count >= 3 else 1
        yield f"{numbers[0]}–{numbers[taken - 1]}" if taken > 1 else str(numbers[0])
        numbers = numbers[taken:]


def _progression(numbers: list[int], step: int) -> int:
    """How many of the first numbers follow each other at this distance."""
    return next((i for i in range(1, len(numbers)) if numbers[i] - numbers[i - 1] != step), len(numbers))
