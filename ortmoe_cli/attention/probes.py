"""The situations in which a block is looked at: prompts, decodes and chunks, with and without padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
)
SAMPLE = ("prompt", "left-padded prompt", "left-padded decode")
"""The regimes that are verified when a sample is enough."""
_BASES = (Sizes(3, 7, 5), Sizes(3, 1, 5), Sizes(1, 7, 5), Sizes(1, 1, 5))
"""Sizes to identify at. All differ, so that dimensions can be told apart; graphs traced with one token need others."""


class Probes:
    """Partial evaluations of one graph, each made once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._made: dict[Regime, Probe] = {}

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
