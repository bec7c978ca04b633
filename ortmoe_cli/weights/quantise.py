"""Rounds float matrices to a few bits: (code − zero) · scale per block of inputs, or per row.

Two methods. 'rtn' rounds to the nearest of evenly spaced levels between the extremes. 'search' tries smaller ranges,
which lose the outliers a little and gain on all others, refits the scale to the codes by least squares, and keeps what
has the least error with weights that favour large elements (as k-quants do).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Method = Literal["rtn", "search"]

_SHRINK = (1.0, 0.92, 0.84, 0.76, 0.68)
"""Shares of the full range that 'search' tries."""
_CHUNK = 1 << 18
"""Elements at a time: what is worked on stays in the cache."""


@dataclass(frozen=True)
class Scheme:
    """How to round. block 0: one scale per row; symmetric: no zero points, the middle code is zero."""

    bits: int
    block: int
    symmetric: bool = True
    method: Method = "rtn"

    @property
    def levels(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def describe(self) -> str:
        where = f"in blocks of {self.block}" if self.block else "per row"
        kind = "" if self.symmetric else ", asymmetric"
        return f"int{self.bits} {where}{kind}"


@dataclass(frozen=True, eq=False)
class Rounded:
    """Codes [rows, inputs], zero points [rows, blocks] (a byte each), scales [rows, blocks] in the type asked for."""

    codes: Array
    scales: Array
    zeros: Array

    def values(self) -> Array:
        """What they stand for, float32 [rows, inputs]."""
        rows, blocks = self.scales.shape
        codes = self.codes.reshape(rows, blocks, -1).astype(np.float32) - self.zeros[..., None].astype(np.float32)
        return (codes * self.scales[..., None].astype(np.float32)).reshape(rows, -1)


def quantise(matrix: Array, scheme: Scheme, scale_type: np.dtype[Any]) -> Rounded:
    """Round a matrix [rows, inputs]; the block has to divide the inputs. Scales are rounded to their type first, so
    that the codes make up for that."""
    rows, inputs = matrix.shape
    block = scheme.block or inputs
    if inputs % block:
        raise ValueError(f"blocks of {block} do not divide {inputs} inputs")
    blocks = matrix.reshape(rows * (inputs // block), block)
    codes = np.empty(blocks.shape, np.uint8)
    scales, zeros = np.empty(len(blocks), scale_type), np.empty(len(blocks), np.uint8)
    step = max(1, _CHUNK // block)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        codes[part], scales[part], zeros[part] = _round(blocks[part].astype(np.float32), scheme, scale_type)
    shape = rows, inputs // block
    return Rounded(codes.reshape(rows, inputs), scales.reshape(shape), zeros.reshape(shape))


def _round(x: Array, scheme: Scheme, scale_type: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Blocks (n, block) to codes, scales (n), zero points (n)."""
    best: tuple[Array, Array, Array] | None = None
    least: Array | None = None
    importance = np.abs(x) + np.sqrt((x * x).mean(axis=1, keepdims=True))

    def stored(scale: Array) -> Array:
        """The scale in its type; what vanishes there, or was nothing, becomes 1."""
        with np.errstate(over="ignore"):
            small = scale.astype(scale_type)
        usable = (small.astype(np.float32) != 0) & np.isfinite(small.astype(np.float32))
        return np.where(usable, small, np.ones(1, scale_type))

    def consider(scale: Array, zero: Array) -> None:
        nonlocal best, least
        small = stored(scale)
        codes = _codes(x, small, zero, scheme)
        if scheme.method == "rtn":
            best = codes, small, zero
            return
        off = _values(codes, small, zero)
        off -= x
        error = np.einsum("ij,ij,ij->i", importance, off, off)
        if best is None or least is None:
            best, least = (codes, small, zero), error
            return
        better = np.flatnonzero(error < least)
        for kept, new in zip((*best, least), (codes, small, zero, error), strict=True):
            kept[better] = new[better]

    for scale, zero in _candidates(x, scheme):
        consider(scale, zero)
    assert best is not None
    if scheme.method == "search":
        consider(_refit(x, best[0], best[2], importance), best[2].copy())
    return best


def _candidates(x: Array, scheme: Scheme) -> Iterator[tuple[Array, Array]]:
    """(scale, zero) of each block to try; the first is what 'rtn' takes."""
    shrink = _SHRINK if scheme.method == "search" else _SHRINK[:1]
    if scheme.symmetric:
        middle = np.full(len(x), scheme.middle, np.uint8)
        size = np.abs(x).max(axis=1)
        for share in shrink:
            yield share * size / max(scheme.middle - 1, 1), middle
        if scheme.method == "search":  # the codes reach one further below the middle: let the largest element lie there
            extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
            for share in shrink:
                yield -share * extreme / scheme.middle, middle
        return
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    for share in shrink:
        scale = share * (high - low) / scheme.levels
        zero = np.rint(-share * low / np.where(scale == 0, 1, scale))
        yield scale, np.clip(zero, 0, scheme.levels).astype(np.uint8)


def _codes(x: Array, scale: Array, zero: Array, scheme: Scheme) -> Array:
    codes = np.rint(x / scale.astype(np.float32)[:, None])
    codes += zero.astype(np.float32)[:, None]
    return np.clip(codes, 0, scheme.levels, out=codes).astype(np.uint8)


def _values(codes: Array, scale: Array, zero: Array) -> Array:
    shifted = codes.astype(np.float32) - zero.astype(np.float32)[:, None]
    return np.asarray(shifted * scale.astype(np.float32)[:, None])


def _refit(x: Array, codes: Array, zero: Array, importance: Array) -> Array:
    """The scale that suits the codes best."""
    shifted = codes.astype(np.float32) - zero.astype(np.float32)[:, None]
    power = (importance * shifted * shifted).sum(axis=1)
    return np.asarray((importance * shifted * x).sum(axis=1) / np.where(power == 0, 1, power))
