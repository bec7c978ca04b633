"""What kind of mask a block has, by looking at which keys are seen in every situation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortmoe_cli.attention.probes import Regime
from ortmoe_cli.attention.reference import future
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.attention.scores import Bias, is_causal
from ortmoe_cli.graph.probe import Origin, Probe


@dataclass(frozen=True)
class Sight:
    """The bias of a block in one situation."""

    regime: Regime
    probe: Probe
    bias: Bias

    @property
    def live(self) -> np.ndarray:
        """[B, S] bool: queries of real tokens that see something. What the others give means nothing."""
        real = self.probe.real[:, -self.bias.values.shape[2] :]
        seen: np.ndarray = np.all(np.any(self.bias.open, -1), 1)
        return np.asarray(seen & real if real.shape == seen.shape else seen)


@dataclass(frozen=True)
class Claims:
    """What holds at every size. `plain`: the future is hidden and nothing else. `doubt`: why it may not be."""

    plain: bool
    doubt: str = ""
    counts: bool = False
    """The mask that a caller gives is counted to tell the past from the future: it must not be negative."""


@dataclass(frozen=True)
class Mask:
    """A mask that never shows the future.

    `plain`: it hides the future and nothing else, whatever the inputs, so the operator's own causality says it all.
    """

    plain: bool
    window: int | None
    padding: bool
    counts: bool = False


def judge(sights: Sequence[Sight], claims: Claims) -> Mask:
    """The mask behind these observations, and what can be claimed of it at every size. Raises Refused."""
    origin = refuse_seen(sights)
    if claims.doubt:
        raise Refused("GQA105", claims.doubt)
    plain = origin is Origin.NONE and claims.plain and all(is_causal(sight.bias) for sight in sights)
    return Mask(plain, _window(sights), bool(origin & Origin.MASK), claims.counts)


def refuse_seen(sights: Sequence[Sight]) -> Origin:
    """Refuse masks that are seen to be none for the operator; else, what the mask is computed from. Raises Refused."""
    if not sights:
        raise Refused("GQA107", "the mask could not be evaluated in any situation")
    origin = Origin.NONE
    for sight in sights:
        origin |= sight.bias.origin
        _refuse_open_future(sight)
    if origin & (Origin.TOKENS | Origin.OTHER):
        raise Refused(
            "GQA105", "the mask depends on token ids or on an input of unknown meaning, not on positions alone"
        )
    return origin


def _refuse_open_future(sight: Sight) -> None:
    bias, live = sight.bias, sight.live
    new, total = bias.values.shape[2:]
    if sight.regime.padding is None and sight.regime.positions != "random" and not live.all():
        raise Refused("GQA105", f"in a {sight.regime.name}, {int((~live).sum())} queries see no key at all")
    seen = bias.open & live[:, None, :, None]
    ahead = seen & future(new, total)
    if not ahead.any():
        return
    if (seen | ~(live[:, None, :, None] & _real_keys(sight))).all():
        raise Refused("GQA101", "every token sees every other (bidirectional, as in an encoder): not causal")
    count = int(ahead.any((1, 3)).sum())
    raise Refused("GQA105", f"in a {sight.regime.name}, {count} of {live.size} queries see keys of their future")


def _real_keys(sight: Sight) -> np.ndarray:
    """[B, 1, 1, T] bool: keys that are no padding, as far as the mask is as long as the keys."""
    total = sight.bias.values.shape[-1]
    real = sight.probe.real
    if real.shape[1] != total:
        real = np.ones((real.shape[0], total), bool)
    return real[:, None, None, :]


def _window(sights: Sequence[Sight]) -> int | None:
    """The sliding window that all observations agree on, if they show one."""
    widths: set[int] | None = None
    for sight in sights:
        if sight.regime.positions == "random" or sight.regime.padding is not None:
            continue
        new, total = sight.bias.values.shape[2:]
        back = np.arange(total - new, total)[:, None] - np.arange(total)[None]
        seen = sight.bias.open
        fitting = {w for w in range(1, total) if (seen == ((back >= 0) & (back < w))).all()}
        if not fitting and (seen == (back >= 0)).all():
            continue
        widths = fitting if widths is None else widths & fitting
    return min(widths) if widths else None
