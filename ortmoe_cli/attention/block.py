"""What identification finds out about one block of attention."""

from dataclasses import dataclass

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.layout import Layout
from ortmoe_cli.attention.lengths import Length


@dataclass(frozen=True)
class Core:
    """A tensor that holds queries, keys or values with all heads, and how. The operand is `factor` times it."""

    tensor: str
    layout: Layout
    factor: float = 1.0


@dataclass(frozen=True)
class Cache:
    """Old tokens that are put before the new ones: `past` [B, N, P, D] and new give `present` [B, N, T, D]."""

    past: Core
    present: Core


@dataclass(frozen=True)
class Heads:
    """The operands of the fused operator: H query heads, N key and value heads, all of size D."""

    query: Core
    key: Core
    value: Core
    key_cache: Cache | None
    value_cache: Cache | None
    heads: int
    kv_heads: int
    size: int

    @property
    def all_keys(self) -> Core:
        """Old and new keys together."""
        return self.key_cache.present if self.key_cache else self.key

    @property
    def all_values(self) -> Core:
        return self.value_cache.present if self.value_cache else self.value


@dataclass(frozen=True)
class Scoring:
    """softmax over keys of softcap(scale · q·k) + bias, with one more column per head that is thrown away (a sink)."""

    scale: float
    softcap: float = 0.0
    sinks: np.ndarray | None = None


@dataclass(frozen=True)
class Merged:
    """The tensor in which the heads are side by side again."""

    tensor: str
    layout: Layout


@dataclass(frozen=True)
class Block:
    """One block of attention, identified.

    `context` and `product` are the shapes of the context and of q·k where they are not simply [B, H, S, ..], as in
    graphs that fold batch and heads, or a group of heads and tokens, into one dimension.
    """

    name: str
    layer: int | None
    anchor: Anchor
    heads: Heads
    scoring: Scoring
    merged: Merged
    stacked: frozenset[str] = frozenset()
    """Cores that hold batch and heads in one dimension, [B*N, L, D]."""
    context: tuple[Length, ...] | None = None
    product: tuple[Length, ...] | None = None
