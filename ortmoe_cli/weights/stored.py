"""Quantised matrices where they lie: codes, scales and zero points of one constant, read expert by expert.

A constant of any rank holds its codes row by row; a scale belongs to a box of elements, whose edges are the
`granularity`. A matrix of an expert is a part of that constant: one axis is its rows, one its columns, the others are
fixed. Nothing here knows which operator the constant belongs to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.model import Model
from ortmoe_cli.weights.bits import flipped, pack, packed_length, unpack

Array = NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """A quantised constant: (code − zero) · scale, all three initializers of the model.

    shape: of the constant. granularity: along each axis, how many neighbours share a scale. signed: codes are in two's
    complement. zeros: '' if the model holds none, then `zero` (in terms of unsigned codes) is that of all.
    padded: rows are filled up to whole blocks, and rows of zero points to whole bytes (as MatMulNBits has it).
    """

    codes: str
    scales: str
    zeros: str
    bits: int
    signed: bool
    shape: tuple[int, ...]
    granularity: tuple[int, ...]
    zero: int
    padded: bool = False

    @property
    def half(self) -> int:
        """What a signed code is shifted by to become an unsigned one."""
        return 1 << (self.bits - 1)

    @property
    def boxes(self) -> tuple[int, ...]:
        """How many scales there are along each axis."""
        return tuple(-(-size // edge) for size, edge in zip(self.shape, self.granularity, strict=True))


@dataclass(frozen=True)
class Lines:
    """Rows or columns of a matrix: places along an axis of a constant."""

    axis: int
    places: range

    def of(self, part: slice) -> "Lines":
        return Lines(self.axis, self.places[part])


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix [outputs, inputs] within a constant. `fixed`: the place along each other axis."""

    stored: Stored
    rows: Lines
    columns: Lines
    fixed: Mapping[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.places), len(self.columns.places)

    def groups(self) -> list[int]:
        """For each column, which of the scales of a row it has."""
        edge = self.stored.granularity[self.columns.axis]
        return [place // edge for place in self.columns.places]

    # --- values

    def packed_codes(self, model: Model) -> Array:
        """Unsigned codes as bytes [outputs, inputs · bits / 8]: the bytes of the model where they suit, else repacked.

        Rows that do not end with a byte are filled up.
        """
        ready = self._ready(model)
        if ready is not None:
            return flipped(ready, self.stored.bits) if self.stored.signed else ready
        return pack(self.codes(model), self.stored.bits)

    def codes(self, model: Model) -> Array:
        """Unsigned codes [outputs, inputs], a byte each."""
        stored = self.stored
        found = self._box(model)
        codes = found[np.ix_(np.array(self.rows.places), np.array(self.columns.places))]
        return np.asarray(codes ^ np.uint8(stored.half) if stored.signed else codes)

    def scales(self, model: Model, starts: range) -> Array:
        """Scales [outputs, groups] of the groups that start with these columns, in their own type."""
        return self._per_box(model.array(self.stored.scales).reshape(self.stored.boxes), starts)

    def zeros(self, model: Model, starts: range) -> Array:
        """Unsigned zero points [outputs, groups], a byte each."""
        stored = self.stored
        if not stored.zeros:
            return np.full((len(self.rows.places), len(starts)), stored.zero, np.uint8)
        return self._per_box(zero_points(stored, model), starts)

    def dequantised(self, model: Model) -> Array:
        """(code − zero) · scale as float32 [outputs, inputs]."""
        every = range(self.shape[1])
        shifted = self.codes(model).astype(np.float32) - self.zeros(model, every).astype(np.float32)
        return np.asarray(shifted * self.scales(model, every).astype(np.float32), np.float32)

    # --- where they lie

    def _per_box(self, values: Array, starts: range) -> Array:
        stored = self.stored
        where: list[Any] = [0] * len(stored.shape)
        for axis, place in self.fixed.items():
            where[axis] = place // stored.granularity[axis]
        picks = {}
        for lines, places in ((self.rows, self.rows.places), (self.columns, [self.columns.places[s] for s in starts])):
            picks[lines.axis] = np.array(places) // stored.granularity[lines.axis]
            where[lines.axis] = slice(None)
        matrix = values[tuple(where)]
        matrix = matrix if self.rows.axis < self.columns.axis else matrix.T
        return np.asarray(matrix[np.ix_(picks[self.rows.axis], picks[self.columns.axis])])

    def _ready(self, model: Model) -> Array | None:
        """The bytes of the matrix as rows in the order wanted, where no code has to change its place in a byte."""
        stored, columns = self.stored, self.columns
        width = stored.shape[-1]
        whole = columns.axis == len(stored.shape) - 1 and columns.places == range(width)
        if not whole or width * stored.bits % 8 or self.rows.places.step < 0:
            return None
        table = self._table(model)
        where = [self.fixed.get(axis, 0) for axis in range(len(stored.shape) - 1)]
        strides = [math.prod(stored.shape[axis + 1 : -1]) for axis in range(len(stored.shape) - 1)]
        start = sum(
            place * stride
            for axis, (place, stride) in enumerate(zip(where, strides, strict=True))
            if axis != self.rows.axis
        )
        places, stride = self.rows.places, strides[self.rows.axis]
        begin = start + places.start * stride
        return table[begin : begin + len(places) * places.step * stride : places.step * stride]

    def _table(self, model: Model) -> Array:
        """The constant's bytes, a row of it to a row."""
        stored = self.stored
        data = model.raw(stored.codes)
        return data.reshape(math.prod(stored.shape[:-1]), -1)[:, : packed_length(stored.shape[-1], stored.bits)]

    def _box(self, model: Model) -> Array:
        """The codes as stored, the whole of the axes of rows and columns at the fixed places: [rows, columns]."""
        stored = self.stored
        bits, shape = stored.bits, stored.shape
        lead = [axis for axis in range(len(shape) - 2) if axis in self.fixed]
        if stored.padded:
            block = unpack(self._table(model), bits, shape[-1])
        elif len(lead) == len(shape) - 2:
            size = shape[-2] * shape[-1]
            entry = sum(self.fixed[axis] * math.prod(shape[axis + 1 : -2]) for axis in lead)
            first = entry * size * bits // 8
            skip = entry * size * bits % 8 // bits
            data = model.raw(stored.codes)[first : first + packed_length(size + skip, bits)]
            block = unpack(data, bits, size + skip)[skip:].reshape(shape[-2:])
        else:
            everything = unpack(model.raw(stored.codes), bits, math.prod(shape)).reshape(shape)
            block = everything[tuple(self.fixed.get(axis, slice(None)) for axis in range(len(shape)))]
        return block if self.rows.axis < self.columns.axis else block.T


def zero_points(stored: Stored, model: Model) -> Array:
    """All zero points of a constant as unsigned codes, a byte each, in the order of its scales.

    Raises ValueError for zero points that are no codes.
    """
    values = model.array(stored.zeros)
    if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
        floats = values.astype(np.float64)
        codes = np.rint(floats)
        if not np.array_equal(floats, codes) or codes.min(initial=0) < 0 or codes.max(initial=0) >= 2**stored.bits:
            raise ValueError("zero points between the codes")
        return codes.astype(np.uint8).reshape(stored.boxes)
    if stored.padded and stored.bits < 8:
        data = model.raw(stored.zeros).reshape(stored.shape[0], -1)
        return unpack(data, stored.bits, stored.boxes[-1])
    codes = values.astype(np.int16).astype(np.uint8) if values.dtype.itemsize == 1 else values.astype(np.uint8)
    codes = codes & np.uint8(2**stored.bits - 1)
    codes = codes ^ np.uint8(stored.half) if stored.signed else codes
    return codes.reshape(stored.boxes)
