"""Queries, keys and values behind the operands of a block: which tensors, how they hold heads, where the cache is.

A tensor is recognised by evaluation: fill it with noise and see whether the operand is that noise, heads repeated,
times a constant. So it does not matter by which nodes an exporter repeats and transposes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.block import Cache, Core, Heads
from ortmoe_cli.attention.layout import Layout, heads_first, token_axis
from ortmoe_cli.attention.moves import Moves
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_STATIC_CACHES = {"ScatterND", "ScatterElements", "TensorScatter", "Where", "com.microsoft.GroupQueryAttention"}
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class _Operand:
    """An operand of a block: [.., rows, D], or [.., D, rows] for keys that are transposed, or [B, rows, N*D]."""

    tensor: str
    batch: int
    rows: int
    size: int
    transposed: bool = False
    packed: bool = False
    axes: tuple[int, ...] | None = None

    def heads_first(self, value: np.ndarray) -> np.ndarray:
        """The value as [B, N, rows, D]."""
        if self.axes is not None:
            value = value.transpose(self.axes)
        if self.packed:
            return value.reshape(self.batch, self.rows, -1, self.size).transpose(0, 2, 1, 3)
        if self.transposed:
            value = value.swapaxes(-1, -2)
        return value.reshape(self.batch, -1, self.rows, self.size)


def find_heads(index: Index, probe: Probe, far: Sequence[Probe], anchor: Anchor) -> Heads:
    """The heads of a block. `far` are ever longer probes, up to very many tokens. Raises Refused."""
    query, key, value, heads = _operands(index, probe, anchor)
    finder = _Finder(index, probe, far)
    query_core = finder.core(query, "queries", heads=heads)
    cached = _inner_cache(index, anchor)
    key_core, key_cache = finder.cached_core(key, "keys", cached[0], query.rows)
    value_core, value_cache = finder.cached_core(value, "values", cached[1], query.rows)
    kv_heads = finder.count(key_cache.present if key_cache and not cached[0] else key_core, key)
    value_heads = finder.count(value_cache.present if value_cache and not cached[1] else value_core, value)
    if kv_heads != value_heads or heads % kv_heads:
        raise Refused("GQA111", f"{heads} query heads with {kv_heads} key heads and {value_heads} value heads")
    if (key_cache is None) != (value_cache is None):
        side = "keys" if key_cache else "values"
        raise Refused("GQA113", f"only the {side} are cached")
    factor = value_cache.present.factor if value_cache else value_core.factor
    if abs(factor - 1) > _TOLERANCE:
        raise Refused("GQA113", f"the values are multiplied by {factor:.6g} before they are weighted")
    if query.size % 8:
        raise Refused("GQA104", f"the heads have size {query.size}, which is not a multiple of 8")
    return Heads(query_core, key_core, value_core, key_cache, value_cache, heads, kv_heads, query.size)


def _operands(index: Index, probe: Probe, anchor: Anchor) -> tuple[_Operand, _Operand, _Operand, int]:
    """The operands and the number of query heads."""
    shapes = [probe.shape(name) for name in (anchor.query, anchor.key, anchor.value)]
    query, key, value = (_transposed(shape, axes) for shape, axes in zip(shapes, anchor.axes, strict=True))
    if not query or not key or not value:
        raise Refused("GQA107", "the shapes of queries, keys and values could not be derived")
    batch = probe.sizes.batch
    if anchor.line is None and len(query) == 3:
        heads, kv_heads = (int(index.attribute(anchor.node, name, 0)) for name in ("q_num_heads", "kv_num_heads"))
        if not heads or not kv_heads:
            raise Refused("GQA112", "an Attention node on rank 3 does not say how many heads it has")
        size, value_size = query[2] // heads, value[2] // kv_heads
        _same_size(size, value_size)
        operands = [
            _Operand(name, batch, shape[1], size, packed=True)
            for name, shape in zip((anchor.query, anchor.key, anchor.value), (query, key, value), strict=True)
        ]
        return operands[0], operands[1], operands[2], heads
    size, rows, transposed = query[-1], query[-2], not anchor.key_in_rows
    _same_size(size, value[-1])
    if min(len(query), len(key), len(value)) < 3 or 0 in (*query, *key, *value):
        raise Refused("GQA111", f"queries {list(query)}, keys {list(key)}: no heads")
    new = probe.sizes.new if rows % probe.sizes.new == 0 and len(query) >= 4 else rows
    heads, rest = divmod(int(np.prod(query)), batch * new * size)
    keys = key[-1] if transposed else key[-2]
    if rest or np.prod(key) % (batch * keys * size) or np.prod(value) % (batch * keys * size):
        raise Refused("GQA111", f"queries {list(query)} and keys {list(key)} do not divide into {batch} sequences")
    return (
        _Operand(anchor.query, batch, new, size, axes=anchor.axes[0]),
        _Operand(anchor.key, batch, keys, size, transposed=transposed, axes=anchor.axes[1]),
        _Operand(anchor.value, batch, keys, size, axes=anchor.axes[2]),
        heads,
    )


def _transposed(shape: tuple[int, ...] | None, axes: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is None or axes is None:
        return shape or ()
    return tuple(shape[axis] for axis in axes)


def _same_size(size: int, value_size: int) -> None:
    if size != value_size:
        raise Refused(
            "GQA102",
            f"key heads have size {size}, value heads {value_size} (latent attention); the operator takes one size",
        )


def _inner_cache(index: Index, anchor: Anchor) -> tuple[Cache | None, Cache | None]:
    """The caches that an Attention node joins itself."""
    inputs, outputs = index.inputs(anchor.node), index.outputs(anchor.node)
    if anchor.line is not None or len(inputs) < 6 or not inputs[4]:
        return None, None
    if len(outputs) < 3 or not outputs[1] or not outputs[2]:
        raise Refused("GQA113", "an Attention node reads a cache and returns none")
    return tuple(Cache(Core(inputs[4 + k], Layout.BNLD), Core(outputs[1 + k], Layout.BNLD)) for k in range(2))  # type: ignore[return-value]


class _Finder:
    """Recognises cores at one probe."""

    def __init__(self, index: Index, probe: Probe, far: Sequence[Probe]) -> None:
        self._index, self._probe, self._moves = index, probe, Moves(index, probe, far)

    def core(self, operand: _Operand, what: str, heads: int | None = None) -> Core:
        """The tensor farthest up that the operand is a copy of, heads repeated. `heads`: how many it must have."""
        best, tiled, probe = None, False, self._probe
        for tensor in self._moves.clean(operand.tensor):
            shape = probe.shape(tensor)
            if shape is None:
                break
            noise = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
            value = noise if tensor == operand.tensor else probe.given({tensor: noise}).value(operand.tensor)
            if value is None:
                break
            wanted = operand.heads_first(value)
            for layout in Layout:
                source = heads_first(noise, layout, operand.batch, operand.size)
                if source is None or source.shape[2] != operand.rows or (heads and source.shape[1] != heads):
                    continue
                factor = _repeats(wanted, source)
                if factor is not None:
                    best = Core(tensor, layout, factor)
                    break
                tiled |= _tiles(wanted, source)
        if tiled:
            raise Refused(
                "GQA106", f"the {what} repeat their heads in turn (0 1 0 1), not each beside itself (0 0 1 1)"
            )
        if best is None:
            raise Refused(
                "GQA111", f"the layout of the {what} {list(probe.shape(operand.tensor) or ())} is not supported"
            )
        return best

    def cached_core(self, operand: _Operand, what: str, inner: Cache | None, new: int) -> tuple[Core, Cache | None]:
        """The new keys or values, and the cache they are appended to, if any."""
        core = self.core(operand, what)
        if inner is not None:
            return core, inner
        concat = self._index.producer(core.tensor)
        if concat is not None and self._index.op(concat) == "Concat" and len(self._index.inputs(concat)) == 2:
            return self._split_cache(core, operand, what, concat, new)
        if operand.rows != new:
            odd, chain = self._moves.first_odd(operand.tensor), self._moves.chain(operand.tensor)
            if odd:
                raise Refused("GQA113", f"the {what} of all tokens go through {odd} on their way to the product")
            last = self._index.producer(chain[-1])
            if last is not None and self._index.op(last) == "Concat":
                raise Refused("GQA111", f"the {what} are not taken from their cache with all heads in order")
            if concat is not None and self._index.op(concat) in _STATIC_CACHES:
                raise Refused("GQA113", f"the {what} lie in a cache of fixed size ({self._index.op(concat)})")
            raise Refused(
                "GQA103", f"{new} queries look at {operand.rows} {what} of another sequence (cross-attention)"
            )
        return core, None

    def _split_cache(
        self, core: Core, operand: _Operand, what: str, concat: int, new: int
    ) -> tuple[Core, Cache | None]:
        old, appended = self._index.inputs(concat)
        shape, rank = self._probe.shape(appended), len(self._probe.shape(core.tensor) or ())
        axis = self._index.attribute(concat, "axis", 0) % max(rank, 1)
        if core.layout not in (Layout.BNLD, Layout.BLND) or rank != 4 or axis != token_axis(core.layout):
            return core, None
        if shape is None or shape[axis] != new or not self._is_data(old):
            raise Refused("GQA113", f"the {what} are joined from two pieces, and the second is not the new tokens")
        piece = _Operand(appended, operand.batch, new, operand.size)
        fresh = self._fresh(piece, core.layout, what)
        return fresh, Cache(Core(old, core.layout), core)

    def _fresh(self, piece: _Operand, layout: Layout, what: str) -> Core:
        """The core of what is appended to a cache: it is stored as it is, so no factor is allowed."""
        if layout is Layout.BLND:
            return Core(piece.tensor, layout)
        core = self.core(piece, what)
        exact = abs(core.factor - 1) <= _TOLERANCE and self.count(core, piece) == self.count(
            Core(piece.tensor, layout), piece
        )
        return core if exact else Core(piece.tensor, layout)

    def count(self, core: Core, operand: _Operand) -> int:
        """How many heads a core has."""
        shape = self._probe.shape(core.tensor)
        assert shape is not None
        seen = heads_first(np.broadcast_to(np.float32(0), shape), core.layout, operand.batch, operand.size)
        assert seen is not None
        return int(seen.shape[1])

    def _is_data(self, name: str) -> bool:
        return not self._index.is_constant(name) and self._probe.value(name) is None


def _repeats(operand: np.ndarray, source: np.ndarray) -> float | None:
    """The factor by which the operand is the source, each head repeated in place; None if it is not."""
    heads, kv_heads = operand.shape[1], source.shape[1]
    if heads % kv_heads or operand.shape[2:] != source.shape[2:]:
        return None
    return _factor(operand, np.repeat(source, heads // kv_heads, 1))


def _tiles(operand: np.ndarray, source: np.ndarray) -> bool:
    heads, kv_heads = operand.shape[1], source.shape[1]
    if heads == kv_heads or heads % kv_heads or operand.shape[2:] != source.shape[2:]:
        return False
    return _factor(operand, np.tile(source, (1, heads // kv_heads, 1, 1))) is not None


def _factor(value: np.ndarray, reference: np.ndarray) -> float | None:
    """c where value == c · reference, None if there is no such c."""
    if value.shape != reference.shape:
        return None
    factor = float(np.vdot(reference, value) / np.vdot(reference, reference))
    difference = np.abs(value - factor * reference).max()
    return factor if factor and difference <= _TOLERANCE * abs(factor) * np.abs(reference).max() else None
