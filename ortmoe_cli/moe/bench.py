"""Runs a block on its own, at sizes of one's choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Probe, Sizes, probe
from ortmoe_cli.graph.roles import roles
from ortmoe_cli.moe.anchor import Router

Array = NDArray[Any]

_PAST = 2


class Probes:
    """Partial evaluations of the whole graph, one per size, made when first asked for."""

    def __init__(self, index: Index) -> None:
        self._index, self._roles = index, roles(index)
        self._made: dict[tuple[int, int], Probe] = {}
        self._exits: list[tuple[str, str, str, int]] = []

    def at(self, batch: int, new: int) -> Probe:
        if (batch, new) not in self._made:
            made = self._made[batch, new] = probe(self._index, Sizes(batch, new, _PAST), roles=self._roles)
            for known in self._exits:
                _settle(made, *known)
        return self._made[batch, new]

    def settle(self, exit_: str, like: str, hidden: str, width: int) -> None:
        """A block's exit has the shape of `like`, or is (T,H) for '': evaluation need not go through its experts."""
        self._exits.append((exit_, like, hidden, width))
        for made in self._made.values():
            _settle(made, exit_, like, hidden, width)


def _settle(at: Probe, exit_: str, like: str, hidden: str, width: int) -> None:
    shape = at.shape(like or hidden)
    if shape is not None:
        at.settle(exit_, shape if like else (int(np.prod(shape[:-1])), width))


@dataclass(frozen=True, eq=False)
class Setting:
    """Concrete sizes of a block: T tokens, the shapes of X0 and L, and the values of what it reads from elsewhere."""

    tokens: int
    hidden_shape: tuple[int, ...]
    logits_shape: tuple[int, ...]
    outside: Mapping[str, Array]


class Unknown(Exception):
    """A block reads a tensor from elsewhere whose value depends on more than sizes."""


class Bench:
    """Evaluates pieces of one router's block in the float32 shadow."""

    def __init__(self, cutter: Cutter, probes: Probes, router: Router, hidden: str, width: int) -> None:
        self.cutter, self.probes, self.router, self.hidden, self.width = cutter, probes, router, hidden, width
        self._settings: dict[tuple[int, int, frozenset[str]], Setting] = {}

    def setting(self, batch: int, new: int, outside: frozenset[str]) -> Setting:
        """The block at these sizes (or those that the graph fixes). Raises Unknown."""
        key = (batch, new, outside)
        if key not in self._settings:
            self._settings[key] = self._setting(batch, new, outside)
        return self._settings[key]

    def typical(self) -> tuple[Probe, int]:
        """A partial evaluation and the number of tokens in it, as many as the graph makes of 16 (0 if unknown)."""
        found = []
        for batch, new in ((1, 16), (16, 1)):
            at = self.probes.at(batch, new)
            found.append((int(np.prod((at.shape(self.hidden) or (0, 0))[:-1])), at))
        tokens, at = max(found, key=lambda pair: pair[0])
        return at, tokens

    def _setting(self, batch: int, new: int, outside: frozenset[str]) -> Setting:
        at, router = self.probes.at(batch, new), self.router
        hidden = at.shape(self.hidden) or (batch, new, self.width)
        if hidden[-1] != self.width or 0 in hidden:
            hidden = (batch, new, self.width)
        if int(np.prod(hidden[:-1])) != batch * new and not outside:  # nothing else fixes the sizes
            hidden = (batch, new, self.width) if len(hidden) > 2 else (batch * new, self.width)
        tokens = int(np.prod(hidden[:-1]))
        logits = at.shape(router.logits)
        if logits is None or int(np.prod(logits)) != tokens * router.experts:
            logits = self._run_logits(hidden)
        if int(np.prod(logits)) != tokens * router.experts:
            raise Unknown(router.logits)
        values = {}
        for name in outside:
            value = at.value(name)
            if value is None or at.origin(name) != Origin.NONE:
                raise Unknown(name)
            values[name] = value
        return Setting(tokens, hidden, logits, values)

    def _run_logits(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        try:
            found = self.cutter.run([self.router.logits], {self.hidden: np.zeros(hidden, np.float32)})
            return tuple(found[self.router.logits].shape)
        except CutError:
            return (*hidden[:-1], self.router.experts)

    def run(self, setting: Setting, outputs: Sequence[str], hidden: Array, logits: Array) -> dict[str, Array]:
        """Values of `outputs` for X0 (T,H) and L (T,E), whatever their shapes in the graph. Raises CutError."""
        return self.cutter.run(outputs, self.feeds(setting, hidden, logits))

    def feeds(self, setting: Setting, hidden: Array, logits: Array) -> dict[str, Array]:
        """What a run is fed with."""
        feeds = dict(setting.outside)
        feeds[self.hidden] = hidden.reshape(setting.hidden_shape).astype(np.float32)
        feeds[self.router.logits] = logits.reshape(setting.logits_shape).astype(np.float32)
        return feeds
