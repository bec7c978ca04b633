"""Which tensor of the graph can be handed to the fused operator as its bias."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.fixed import BLOCKED
from ortmoe_cli.attention.mask import Sight
from ortmoe_cli.attention.proof import mask_terms
from ortmoe_cli.graph.index import Index

_CLOSE = 1e-6
_RANK = 4


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
    """The cheapest carrier that gives the bias, by structure; seen to do so in every situation.

    A tensor of the graph is one only if nothing else is added on the way to the softmax. Else the way is copied.
    """
    terms = mask_terms(index, sights[0].probe, anchor)
    if anchor.line is None or (len(terms) == 1 and not anchor.line.scaled and terms[0].kind != "sub"):
        (term,) = terms
        carrier = Carrier(term.kind, term.tensor)  # type: ignore[arg-type]
        if anchor.line is None or all(_carries(carrier, sight) for sight in sights):
            return _described(carrier, sights)
    full = all(sight.bias.shape[2:] == sight.bias.values.shape[2:] for sight in sights)
    return Carrier("copy", full=full, floor=-np.inf)


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
