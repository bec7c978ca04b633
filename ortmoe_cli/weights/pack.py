"""Expert weights in the layout of an operator: plans as plain data, carried out one expert at a time.

An exporter leaves an expert as a handful of matrices in whatever orientation suited it; the MoE operators want one
`[E, rows, cols]` tensor, with the gate and up rows interleaved or in halves. A plan says which rows go where. It holds
no values, so it can be made, compared and thrown away at will; carrying it out moves bytes and never computes, so the
type is irrelevant and every bit survives (NaN payloads included). No more than one expert is ever in memory.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ortmoe_cli.graph.model import tensor_bytes

Array = NDArray[Any]
Source = Callable[[str], Array]
"""Gives the value of a constant tensor; called as often as needed, so it should return views, not copies."""

Rows = tuple[int | None, int | None, int]
"""A slice of rows: start, stop, step."""

ALL: Rows = (None, None, 1)

TILE = 256
"""Side of the square in which matrices are transposed; a tile and its copy stay in the L2 cache."""


class PlanError(ValueError):
    """A plan that leaves rows empty, or does not fit the tensors it names. A defect of whoever made it."""


@dataclass(frozen=True)
class Piece:
    """Some rows of an expert, and where they come from.

    tensor: a constant tensor of the model; expert: the leading index into it, None if it is this expert's own.
    transpose: swap the axes of a matrix (`[in, out]` to `[out, in]`); nothing to do for a vector.
    source: the rows to take, after that; target: the rows of the expert's slot that they fill.
    columns: the columns to take of these rows, where one matrix holds several experts side by side.
    shape: the matrix that a flat entry is, row by row, before it is transposed.
    """

    tensor: str
    expert: int | None = None
    transpose: bool = False
    source: Rows = ALL
    target: Rows = ALL
    columns: Rows = ALL
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class PackedWeight:
    """A new initializer: shape `(E, rows, cols)` or `(E, rows)`, and for each expert the pieces that fill its slot."""

    name: str
    elem_type: int
    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise PlanError(f"'{self.name}': a packed weight is [E, rows] or [E, rows, cols], not {list(self.shape)}")
        if len(self.pieces) != self.shape[0]:
            raise PlanError(f"'{self.name}' has {self.shape[0]} experts, but pieces for {len(self.pieces)}")
        if self.elem_type == TensorProto.STRING or tensor_bytes(self.elem_type, (8,)) != 8 * self.dtype.itemsize:
            name = TensorProto.DataType.Name(self.elem_type)
            raise PlanError(f"'{self.name}': {name} elements are not whole bytes; pack them into UINT8 first")
        for targets in {tuple(piece.target for piece in expert): None for expert in self.pieces}:
            _check_filled(self.name, self.shape[1], targets)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.elem_type, self.shape)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type))


@dataclass(frozen=True)
class ComputedWeight(PackedWeight):
    """A packed weight whose bytes are computed from its pieces, one expert at a time, and not just moved.

    The pieces say which rows of which constants an expert is made of; what becomes of them is the subclass's affair.
    """

    def __post_init__(self) -> None:
        if len(self.pieces) != self.shape[0]:
            raise PlanError(f"'{self.name}' has {self.shape[0]} experts, but pieces for {len(self.pieces)}")

    def slot(self, expert: int, source: Source) -> Array:
        """The values of one expert, of the shape `shape[1:]` and the type `dtype`."""
        raise NotImplementedError


def materialise(packed: PackedWeight, source: Source, experts: Sequence[int] | None = None) -> Array:
    """The packed values of some experts (all by default), `(len(experts), rows[, cols])`, in the weight's own type."""
    chosen = range(packed.shape[0]) if experts is None else experts
    if isinstance(packed, ComputedWeight):
        return np.stack([packed.slot(expert, source) for expert in chosen])
    result = np.empty((len(chosen), *packed.shape[1:]), _bits(packed.dtype))
    arrays: Mapping[str, Array] = {}
    for slot, expert in zip(result, chosen, strict=True):
        arrays = _arrays(packed, expert, source, arrays)
        _fill(slot, packed, expert, arrays)
        _drop_pages(arrays.values())
    return result.view(packed.dtype)


def chunks(packed: PackedWeight, source: Source) -> Iterator[memoryview]:
    """The packed bytes, one expert at a time, in C order; together they are `packed.nbytes` long.

    A chunk is good until the next one is asked for: the buffer is used again, and the old view is released so that
    looking at it later fails instead of showing the wrong expert.
    """
    if isinstance(packed, ComputedWeight):
        for expert in range(packed.shape[0]):
            yield np.ascontiguousarray(packed.slot(expert, source)).reshape(-1).view(np.uint8).data
        return
    buffer: Array | None = None
    arrays: Mapping[str, Array] = {}
    for expert in range(packed.shape[0]):
        arrays = _arrays(packed, expert, source, arrays)
        slot = _ready(packed, expert, arrays)
        if slot is None:
            if buffer is None:
                buffer = np.empty(packed.shape[1:], _bits(packed.dtype))
            _fill(buffer, packed, expert, arrays)
            slot = buffer
        flat = slot.reshape(-1).view(np.uint8)
        chunk, alive = flat.data, weakref.ref(flat)
        del flat
        yield chunk
        with suppress(BufferError):
            chunk.release()
        if alive() is not None:  # the caller keeps an array over this chunk: leave it the buffer
            buffer = None
        _drop_pages(arrays.values())


def _check_filled(name: str, rows: int, targets: Sequence[Rows]) -> None:
    filled = np.zeros(rows, np.int32)
    for target in targets:
        filled[slice(*target)] += 1
    wrong = np.flatnonzero(filled != 1)
    if len(wrong):
        times = int(filled[wrong[0]])
        what = "not filled" if not times else f"filled {times} times"
        raise PlanError(f"'{name}': row {wrong[0]} of {rows} is {what} ({len(wrong)} such rows)")


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer of the same size: numpy moves those fast, and cannot alter them."""
    return np.dtype(f"u{dtype.itemsize}")


def _arrays(packed: PackedWeight, expert: int, source: Source, held: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors that an expert needs; those that the expert before needed too (stacked ones) are kept."""
    arrays: dict[str, Array] = {}
    for piece in packed.pieces[expert]:
        if piece.tensor not in arrays:
            arrays[piece.tensor] = held[piece.tensor] if piece.tensor in held else source(piece.tensor)
    return arrays


def _fill(slot: Array, packed: PackedWeight, expert: int, arrays: Mapping[str, Array]) -> None:
    for piece in packed.pieces[expert]:
        _move(_rows(packed, expert, piece, arrays[piece.tensor]), slot[slice(*piece.target)])


def _ready(packed: PackedWeight, expert: int, arrays: Mapping[str, Array]) -> Array | None:
    """The slot's bytes where they already lie in the model exactly as wanted, so that nothing need be copied."""
    if len(packed.pieces[expert]) != 1:
        return None
    (piece,) = packed.pieces[expert]
    rows = _rows(packed, expert, piece, arrays[piece.tensor])
    forward = range(*slice(*piece.target).indices(packed.shape[1])) == range(packed.shape[1])
    return rows if forward and rows.flags.c_contiguous else None


def _rows(packed: PackedWeight, expert: int, piece: Piece, array: Array) -> Array:
    """The rows that a piece takes, as unsigned integers `[rows(, cols)]`: a view of `array`."""
    where = f"'{packed.name}', expert {expert}: '{piece.tensor}' {list(array.shape)}"
    if array.dtype != packed.dtype:
        raise PlanError(f"{where} holds {array.dtype}, not {packed.dtype}")
    if piece.expert is not None:
        if not array.ndim or not 0 <= piece.expert < array.shape[0]:
            raise PlanError(f"{where} has no entry {piece.expert}")
        array = array[piece.expert]
    if piece.shape is not None:
        if array.size != piece.shape[0] * piece.shape[1]:
            raise PlanError(f"{where} holds {array.size} elements for an expert, not {list(piece.shape)}")
        array = array.reshape(piece.shape)
    if array.ndim != len(packed.shape) - 1:
        raise PlanError(f"{where} has {array.ndim} axes for an expert, {len(packed.shape) - 1} are needed")
    rows = (array.T if piece.transpose else array)[slice(*piece.source)]
    if piece.columns != ALL:
        rows = rows[..., slice(*piece.columns)]
    places = len(range(*slice(*piece.target).indices(packed.shape[1])))
    if rows.shape != (places, *packed.shape[2:]):
        raise PlanError(f"{where} gives {list(rows.shape)}, the place for it is {[places, *packed.shape[2:]]}")
    return rows.view(_bits(packed.dtype))


def _move(rows: Array, place: Array) -> None:
    """`place[...] = rows`, fast also where `rows` runs down the columns of a large matrix.

    Reading a matrix against its grain costs a cache miss per element, worse when its width is a power of two. So a
    tile is first copied as it lies, into a scratch whose odd width keeps its columns in different cache sets, and
    turned from there: 3 to 5 times faster than plain numpy for two-byte elements.
    """
    if rows.ndim != 2 or abs(rows.strides[0]) >= abs(rows.strides[1]) or rows.size <= TILE * TILE:
        place[...] = rows
        return
    scratch = np.empty((TILE, TILE + 64 // rows.itemsize), rows.dtype)
    for left in range(0, rows.shape[1], TILE):
        for top in range(0, rows.shape[0], TILE):
            tile = np.s_[top : top + TILE, left : left + TILE]
            lying = rows[tile].T
            copy = scratch[: lying.shape[0], : lying.shape[1]]
            copy[...] = lying
            place[tile] = copy.T


def _drop_pages(arrays: Iterable[Array]) -> None:
    """Tell the system that the file pages behind these arrays may go: they would count as our memory until unmapped."""
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            base.madvise(mmap.MADV_DONTNEED)
