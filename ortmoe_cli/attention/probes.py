"""The situations in which a block is looked at: prompts, decodes and chunks, with and without padding."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Padding, Probe, Role, Sizes, probe
from ortmoe_cli.graph.roles import roles


@dataclass(frozen=True)
class Regime:
    """One situation. Several new tokens after a past only for one sequence: the operator takes no more."""

    name: str
    sizes: Sizes
    padding: Padding | None = None
    positions: str = "counted"


REGIMES = (
    Regime("prompt", Sizes(2, 9)),
    Regime("decode", Sizes(2, 1, 11)),
    Regime("chunk", Sizes(1, 3, 8)),
    Regime("left-padded prompt", Sizes(2, 9), Padding("left", (3, 0))),
    Regime("left-padded decode", Sizes(2, 1, 11), Padding("left", (3, 0))),
    Regime("right-padded prompt", Sizes(2, 9), Padding("right", (2, 0))),
    Regime("left-padded chunk", Sizes(1, 3, 8), Padding("left", (4,))),
    Regime("prompt of odd positions", Sizes(2, 12), positions="random"),
    Regime("decode at odd positions", Sizes(2, 1, 11), positions="random"),
    Regime("long prompt", Sizes(1, 40)),
    Regime("long decode", Sizes(2, 1, 70)),
)
SAMPLE = ("prompt", "left-padded prompt", "left-padded decode")
"""The regimes that are verified when a sample is enough."""
LONG = (Sizes(1, 40), Sizes(1, 40, 70), Sizes(1, 300), Sizes(2, 1, 300), Sizes(1, 1100), Sizes(1, 3, 1100))
"""Sizes at which claims about every size are tested."""
_FAR, _FAR_NEW = 1_000_003, 200_003
"""More tokens than a model is given: a size or a factor that stops growing, or starts to, shows here."""
_FAR_SQUARE = 4_099
"""As many as an input that is square in the tokens allows."""
_BASES = (Sizes(3, 7, 5), Sizes(3, 1, 5), Sizes(1, 7, 5), Sizes(1, 1, 5))
"""Sizes to identify at. All differ, so that dimensions can be told apart; graphs traced with one token need others."""


class Probes:
    """Partial evaluations of one graph, each made once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._made: dict[Regime, Probe] = {}
        self._ends: dict[str, int] = {}

    @cached_property
    def roles(self) -> dict[str, Role]:
        return roles(self.index)

    @property
    def has_cache(self) -> bool:
        return Role.PAST in self.roles.values()

    @property
    def has_mask(self) -> bool:
        return Role.MASK in self.roles.values()

    def at(self, regime: Regime) -> Probe:
        """The partial evaluation in a regime."""
        if regime not in self._made:
            self._made[regime] = probe(
                self.index, regime.sizes, regime.padding, positions=regime.positions, roles=self.roles
            )
        return self._made[regime]

    @cached_property
    def long(self) -> tuple[Probe, ...]:
        """The long probes, as far as fixed sizes leave any."""
        found: dict[Sizes, Probe] = {}
        for sizes in LONG:
            made = self.at(Regime("long", sizes if self.has_cache else Sizes(sizes.batch, sizes.new)))
            found.setdefault(made.sizes, made)
        return tuple(found.values())

    @cached_property
    def fixed(self) -> tuple[bool, bool]:
        """Whether the graph fixes the number of sequences, and of new tokens, to one or more."""
        one, other = (self.at(Regime("fixed", Sizes(b, s, p))).sizes for b, s, p in ((3, 7, 5), (2, 5, 4)))
        return one.batch == other.batch, one.new == other.new

    def long_for(self, tensor: str, base: Probe) -> tuple[Probe, ...]:
        """The long probes at which a tensor has a shape; with several new tokens only if `base` has several.

        Where the graph ends before, as a table of positions does, the last is at its end.
        """
        probes = [p for p in self.long if p.shape(tensor) is not None and (p.sizes.new == 1 or base.sizes.new > 1)]
        end = self.end_of(tensor) if base.sizes.new > 1 else 0
        if end:
            probes.append(self.at(Regime("end", Sizes(1, end))))
        return tuple(probes)

    def end_of(self, tensor: str) -> int:
        """The longest prompt for which a tensor has a shape; 0 if the long probes do not reach it."""
        if tensor not in self._ends:
            self._ends[tensor] = self._find_end(tensor)
        return self._ends[tensor]

    def _find_end(self, tensor: str) -> int:
        def runs(new: int) -> bool:
            return self.at(Regime("end", Sizes(1, new))).shape(tensor) is not None

        low, high = 2, max(sizes.new for sizes in LONG)
        if runs(high) or not runs(low):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs(middle) else (low, middle)
        return low

    @cached_property
    def far(self) -> Probe:
        """A probe for shapes and numbers alone, with very many tokens."""
        ranks = [len(self.index.graph_inputs[n].dims or ()) for n, role in self.roles.items() if role is Role.MASK]
        square = max(ranks, default=0) > 2
        sizes = Sizes(1, 3, _FAR) if self.has_cache else Sizes(1, _FAR_SQUARE if square else _FAR_NEW)
        return self.at(Regime("far", sizes))

    def growing(self, base: Probe) -> tuple[Probe, ...]:
        """Ever longer probes, with several new tokens only if `base` has several."""
        probes = (base, *self.ladder)
        if base.sizes.new > 1:
            return tuple(probe for probe in probes if probe.sizes.new > 1)
        ones = (self.at(Regime("growing", Sizes(1, 1, past))) for past in (40, 300, _FAR))
        return (base, *(ones if self.has_cache else ()))

    @cached_property
    def ladder(self) -> tuple[Probe, ...]:
        """Ever longer probes, the longest for shapes and numbers alone."""
        return (*self.long, self.far)

    def with_masks(self, regime: Regime, seed: int, lowest: int) -> Probe:
        """A probe with holes in its masks (seed 0), or integers from `lowest` on instead of 0 and 1."""
        made, rng = self.at(regime), np.random.default_rng(seed)
        values = dict(made.feeds.values)
        for name, role in self.roles.items():
            if role is Role.MASK and name in values:
                odd = rng.integers(lowest if seed else 0, 50 if seed else 2, values[name].shape)
                values[name] = odd.astype(values[name].dtype)
        return Probe(self.index, self.roles, replace(made.feeds, values=values))

    def bases(self) -> Iterator[Probe]:
        """Probes to identify on, the most telling first."""
        seen = set()
        for sizes in _BASES:
            made = self.at(Regime("base", sizes))
            if made.sizes not in seen:
                seen.add(made.sizes)
                yield made

    def of_sizes(self, base: Probe) -> tuple[Probe, ...]:
        """Probes that tell sizes apart, with as many sequences and new tokens as a graph that needs `base` can take."""
        batch, new = (2, 5) if base.sizes.batch > 1 else (1, 1), (11, 3) if base.sizes.new > 1 else (1, 1)
        others = [self.at(Regime("sizes", Sizes(b, s, p))) for b, s, p in zip(batch, new, (4, 6), strict=True)]
        return (base, *others)

    @cached_property
    def regimes(self) -> tuple[Regime, ...]:
        """The regimes that differ for this graph: caches, masks, positions and free sizes permitting."""
        found: dict[object, Regime] = {}
        for regime in REGIMES:
            positional = Role.POSITIONS in self.roles.values()
            if (regime.padding and not self.has_mask) or (regime.positions == "random" and not positional):
                continue
            if regime.sizes.past and not self.has_cache:
                continue
            key = (self.at(regime).sizes, regime.padding, regime.positions)
            found.setdefault(key, regime)
        return tuple(found.values())
