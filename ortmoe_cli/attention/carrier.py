"""Which tensor of the graph can be handed to the fused operator as its bias."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.mask import Sight
from ortmoe_cli.attention.reference import BLOCKED
from ortmoe_cli.attention.scores import attention_mask
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_CLOSE = 1e-6
_RANK = 4
_CONSTANT_RANGE = (2, 1_000_000)
_SLICE_NODES = 2_000


@dataclass(frozen=True)
class Carrier:
    """Where the bias comes from.

    'none': nothing to carry. 'add': `tensor` is the bias. 'allow' and 'block': `tensor` is a condition under which a
    key is seen, or not. 'copy': no tensor holds it, the nodes that add it are repeated on scores of zero.
    """

    kind: Literal["none", "add", "allow", "block", "copy"]
    tensor: str = ""
    full: bool = False
    """The tensor spans all queries and keys, [.., S, T]."""
    floor: float = 0.0
    """The lowest number seen in it."""
    squeezed: int = 0
    """Dimensions of one between the first and the last three: scores of grouped heads have more of them."""


NOTHING = Carrier("none")


def find_carrier(index: Index, anchor: Anchor, sights: Sequence[Sight]) -> Carrier:
    """The cheapest carrier that gives the bias in every situation."""
    if anchor.product is None:
        mask = attention_mask(index, anchor)
        kind: Literal["allow", "add"] = "allow" if sights[0].probe.value(mask).dtype == bool else "add"  # type: ignore[union-attr]
        return _described(Carrier(kind, mask), sights)
    for i in sorted(anchor.path):
        for carrier in _offers(index, i):
            if all(_carries(carrier, sight) for sight in sights):
                return _described(carrier, sights)
    return Carrier("copy", full=True, floor=-np.inf)


def _offers(index: Index, i: int) -> list[Carrier]:
    if index.op(i) == "Add":
        return [Carrier("add", name) for name in index.inputs(i)]
    if index.op(i) == "Where":
        condition = index.inputs(i)[0]
        return [Carrier("allow", condition), Carrier("block", condition)]
    return []


def _carries(carrier: Carrier, sight: Sight) -> bool:
    """Whether the carrier gives the bias: the same keys blocked, the same numbers elsewhere."""
    value, bias = _value(carrier.tensor, sight), sight.bias
    if value is None:
        return False
    try:
        value = np.broadcast_to(value, bias.values.shape)
    except ValueError:
        return False
    seen = bias.open
    if carrier.kind == "add":
        if not np.array_equal(value > BLOCKED, seen):
            return False
        return bool(np.abs(np.where(seen, value - np.where(seen, bias.values, 0), 0)).max() <= _CLOSE)
    wanted = value.astype(bool) if carrier.kind == "allow" else ~value.astype(bool)
    return np.array_equal(wanted, seen) and not np.abs(np.where(seen, bias.values, 0)).max() > _CLOSE


def _described(carrier: Carrier, sights: Sequence[Sight]) -> Carrier:
    values = [(_value(carrier.tensor, sight), sight.bias.values.shape) for sight in sights]
    known = [(value, shape) for value, shape in values if value is not None]
    full = all(value.ndim == 4 and value.shape[2:] == shape[2:] for value, shape in known)
    floor = min((float(value.min()) for value, _ in known), default=-np.inf)
    rank = len(sights[0].probe.shape(carrier.tensor) or ())
    return Carrier(carrier.kind, carrier.tensor, full, floor, max(rank - _RANK, 0))


def _value(tensor: str, sight: Sight) -> np.ndarray | None:
    """The value of a tensor in rank 4 at most, if it can be looked at so."""
    value = sight.probe.value(tensor)
    if value is None or value.ndim <= _RANK:
        return value
    extra = value.ndim - _RANK
    return value.reshape(value.shape[0], *value.shape[1 + extra :]) if set(value.shape[1 : 1 + extra]) == {1} else None


def mask_constants(index: Index, probe: Probe, anchor: Anchor) -> list[int]:
    """The integers that a block's mask is computed with: windows, chunks, maximal lengths."""
    roots = [attention_mask(index, anchor)] if anchor.product is None else []
    for i in anchor.path:
        roots += [name for name in index.inputs(i) if name and probe.value(name) is not None]
    found: set[int] = set()
    seen, stack = set(roots), list(roots)
    while stack and len(seen) < _SLICE_NODES:
        name = stack.pop()
        value = probe.value(name)
        if value is not None and index.is_constant(name) and value.size == 1 and value.dtype.kind in "iuf":
            number = float(value.reshape(()))
            if np.isfinite(number) and number == int(number) and _in_range(abs(number)):
                found.add(abs(int(number)))
        made_by = index.producer(name)
        if made_by is None or index.op(made_by) in ("Shape", "Size"):
            continue
        for read in index.inputs(made_by):
            if read and read not in seen and _bounds(index, made_by, read):
                seen.add(read)
                stack.append(read)
    return sorted(found)


def _bounds(index: Index, i: int, name: str) -> bool:
    """Whether an input can be a bound of the mask; axes and sizes of reshapes cannot."""
    first = index.inputs(i)[0]
    if index.op(i) in ("Unsqueeze", "Squeeze", "Reshape", "Transpose", "ReduceSum", "CumSum", "Expand"):
        return first == name
    source = index.producer(first)
    picks_a_size = index.op(i) in ("Gather", "Slice") and source is not None and index.op(source) == "Shape"
    return not picks_a_size or first == name


def _in_range(number: float) -> bool:
    low, high = _CONSTANT_RANGE
    return low <= number <= high
