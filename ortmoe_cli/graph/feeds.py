"""Concrete inputs for a graph: sizes, padding, positions. Masks and integers get values, data stays opaque."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from ortmoe_cli.graph.index import Index, InputInfo
from ortmoe_cli.graph.operators import numpy_type
from ortmoe_cli.graph.roles import FLOATS, Role, cache_axis

_TOKEN_RANGE = (3, 120)
_UNBOUND = 4
"""The size of a dimension that nothing binds, beyond batch and sequence."""
_BLOCKED = np.float32(np.finfo(np.float16).min)
ENCODER_EXTRA = 3
"""A second sequence (an encoder's) is this much longer than the first, so that the two can be told apart."""


@dataclass(frozen=True)
class Sizes:
    """Batch B, new tokens S, tokens in the cache P."""

    batch: int
    new: int
    past: int = 0

    @property
    def total(self) -> int:
        """T = P + S."""
        return self.past + self.new


@dataclass(frozen=True)
class Padding:
    """How many tokens of each sequence are padding (repeated over the batch), at its beginning or its end."""

    side: str
    counts: tuple[int, ...]

    def mask(self, sizes: Sizes) -> np.ndarray:
        """True where a token is real, [B, T]."""
        place = np.arange(sizes.total)[None]
        count = np.resize(np.array(self.counts), sizes.batch)[:, None]
        return place >= count if self.side == "left" else place < sizes.total - count


@dataclass(frozen=True)
class Feeds:
    """One set of graph inputs: the values that are known and the shapes of all."""

    sizes: Sizes
    """What was asked for, where the graph's fixed dimensions allow it."""
    real: np.ndarray
    """[B, T] bool: which tokens are no padding."""
    values: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...] | None]
    symbols: Mapping[str, int]
    """The sizes of symbolic dimensions, as far as the inputs agree on them."""


def make_feeds(
    index: Index,
    roles: Mapping[str, Role],
    sizes: Sizes,
    padding: Padding | None = None,
    *,
    positions: str = "counted",
    seed: int = 0,
) -> Feeds:
    """Inputs of these sizes. `positions`: 'counted' (over real tokens), 'arange', or 'random' below T."""
    sizes = _fitted(index, roles, sizes)
    real = padding.mask(sizes) if padding else np.ones((sizes.batch, sizes.total), bool)
    binding = _Binding(index, roles, sizes)
    make = _ValueMaker(sizes, real, positions, np.random.default_rng(seed))
    shapes = {name: binding.shape(name) for name in index.graph_inputs}
    values = {}
    for name, info in index.graph_inputs.items():
        shape = shapes[name]
        value = None if shape is None else make.value(info, roles[name], shape)
        if value is not None:
            values[name] = value
    return Feeds(sizes, real, values, shapes, binding.symbols)


@dataclass(frozen=True)
class _ValueMaker:
    """Makes the values of masks, positions and other integers."""

    sizes: Sizes
    real: np.ndarray
    mode: str
    rng: np.random.Generator

    def value(self, info: InputInfo, role: Role, shape: tuple[int, ...]) -> np.ndarray | None:
        if info.elem_type in (TensorProto.STRING, TensorProto.UNDEFINED):
            return None
        dtype = numpy_type(info.elem_type)
        if role is Role.TOKENS:
            return self.rng.integers(*_TOKEN_RANGE, shape).astype(dtype)
        if role is Role.MASK:
            return self._mask(info.elem_type, shape).astype(dtype)
        if role is Role.POSITIONS:
            return self._positions(shape).astype(dtype)
        return np.zeros(shape, dtype) if role is Role.OTHER and dtype.kind in "iub" else None

    def _mask(self, elem_type: int, shape: tuple[int, ...]) -> np.ndarray:
        """A padding mask [B, T], or the causal mask [B|1, 1, S, T] that a caller would compute from it."""
        sizes, real = self.sizes, self.real
        if len(shape) == 2:
            return real if shape == real.shape else np.ones(shape, bool)
        allowed = np.arange(sizes.total)[None] <= np.arange(sizes.past, sizes.total)[:, None]
        causal = allowed & real[:, None, :]
        causal = causal[:, None] if len(shape) == 4 else causal
        cropped = causal[tuple(slice(size) for size in shape)]
        mask = np.broadcast_to(cropped, shape) if _fits(cropped.shape, shape) else np.ones(shape, bool)
        return np.where(mask, np.float32(0), _BLOCKED) if elem_type in FLOATS else mask

    def _positions(self, shape: tuple[int, ...]) -> np.ndarray:
        sizes = self.sizes
        counted = np.maximum(np.cumsum(self.real, 1) - 1, 0)[:, sizes.past :]
        if self.mode == "random":
            return self.rng.integers(0, max(sizes.total, 1), shape)
        if self.mode == "counted" and shape[-2:] == counted.shape:
            return np.broadcast_to(counted, shape)
        return np.broadcast_to(np.arange(sizes.past, sizes.past + (shape[-1] if shape else 1)), shape or (1,))


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) == len(target) and all(size in (1, wanted) for size, wanted in zip(shape, target, strict=True))


def _fitted(index: Index, roles: Mapping[str, Role], sizes: Sizes) -> Sizes:
    """The sizes that the fixed dimensions of the inputs leave."""
    batch, new, past = sizes.batch, sizes.new, sizes.past
    leading = _leading(roles)
    for name, info in index.graph_inputs.items():
        dims = tuple(_number(dim) for dim in info.dims or ())
        if len(dims) < 2:  # not said, or nothing to fit
            continue
        if name == leading:
            batch, new = dims[0] or batch, dims[1] or new
        elif roles[name] is Role.PAST:
            fixed = dims[cache_axis(index, name)]
            batch, past = dims[0] or batch, past if fixed is None else fixed
    if Role.PAST not in roles.values():
        past = 0
    return Sizes(batch, new, past)


def _leading(roles: Mapping[str, Role]) -> str | None:
    """The input that says how many sequences and new tokens there are."""
    for wanted in (Role.TOKENS, Role.HIDDEN):
        for name, role in roles.items():
            if role is wanted:
                return name
    return None


def _number(dim: int | str | None) -> int | None:
    """A fixed dimension; some exporters write it as a symbol that is a number."""
    if isinstance(dim, str):
        return int(dim) if dim.isdecimal() else None
    return dim


class _Binding:
    """Gives every dimension of every input a size: by role first, then by symbol."""

    def __init__(self, index: Index, roles: Mapping[str, Role], sizes: Sizes) -> None:
        self._index, self._roles, self._sizes = index, roles, sizes
        self._leading = _leading(roles)
        self._symbols: dict[str, int] = {}
        order = sorted(index.graph_inputs, key=lambda name: (name != self._leading, roles[name] is Role.MASK))
        self._shapes = {name: self._bind(name) for name in order}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes[name]

    @property
    def symbols(self) -> dict[str, int]:
        """Symbols that have one size only: some exporters use one for lengths that differ."""
        bound: dict[str, set[int]] = {}
        for name, shape in self._shapes.items():
            for dim, size in zip(self._index.graph_inputs[name].dims or (), shape or (), strict=True):
                if isinstance(dim, str):
                    bound.setdefault(dim, set()).add(size)
        return {symbol: sizes.pop() for symbol, sizes in bound.items() if len(sizes) == 1}

    def _bind(self, name: str) -> tuple[int, ...] | None:
        dims = self._index.graph_inputs[name].dims
        if dims is None:
            return None
        shape = []
        for axis, dim in enumerate(dims):
            size = _number(dim)
            if size is None and isinstance(dim, str) and self._free_to_follow(name, axis):
                size = self._symbols.get(dim)
            if size is None:
                size = self._by_role(name, axis, len(dims), named=isinstance(dim, str))
            if isinstance(dim, str):
                self._symbols.setdefault(dim, size)
            shape.append(size)
        return tuple(shape)

    def _free_to_follow(self, name: str, axis: int) -> bool:
        """A mask is as long as cache and new tokens together, whatever its symbol says."""
        role = self._roles[name]
        return not (role is Role.MASK and axis and self._sizes.past) and not (
            role is Role.PAST and axis == self._token_axis(name)
        )

    def _token_axis(self, name: str) -> int:
        return cache_axis(self._index, name)

    def _by_role(self, name: str, axis: int, rank: int, *, named: bool) -> int:
        sizes, role = self._sizes, self._roles[name]
        if role is Role.POSITIONS:
            return {rank - 1: sizes.new, rank - 2: sizes.batch}.get(axis, 3)
        if rank == 1:
            return sizes.batch
        if axis == 0:
            return sizes.batch
        if role is Role.MASK:
            return sizes.total if axis == rank - 1 else sizes.new if axis == rank - 2 else 1
        if role is Role.PAST and axis == self._token_axis(name):
            return sizes.past
        if role in (Role.TOKENS, Role.HIDDEN) and axis == 1:
            return sizes.new if name == self._leading or not named else sizes.new + ENCODER_EXTRA
        return _UNBOUND
