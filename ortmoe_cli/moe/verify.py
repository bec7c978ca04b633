"""Proves a rewrite: the original piece and its replacement on the same probes, in all regimes where they could part.

Tokens are independent of each other in what is to be proven, so different regimes share a run, token by token, and the
error is judged per token. A probe on which the original fails proves nothing and counts for nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.bench import Bench, Setting, Unknown
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.emit import Rewrite
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.packed import PackedValues
from ortmoe_cli.moe.probing import hidden_states, skewed_logits, spread_logits, tied_logits
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Pair
from ortmoe_cli.moe.sampling import Sampler
from ortmoe_cli.moe.skew import longest, unequal_routing
from ortmoe_cli.outcome import Check

Array = NDArray[Any]

TOLERANCE = 1e-4
_HIDDEN = (1.0, 0.01, 20.0, 100.0)
_LOGITS = (1.5, 0.02, 0.3, 8.0)
_EACH = 6
"""Tokens per combination of scales."""


@dataclass(frozen=True, eq=False)
class Probe:
    """X (T,H), L (T,E) and the regime of each token."""

    hidden: Array
    logits: Array
    regimes: tuple[str, ...]


class Verifier:
    """Compares one block with its rewrite."""

    def __init__(self, index: Index, bench: Bench, block: Block, rewrite: Rewrite, sampler: Sampler, source: Source):
        self.bench, self.block, self.sampler, self.index = bench, block, sampler, index
        self._rewrite = rewrite
        self._weights = PackedValues(rewrite.weights, source, bench.cutter.byte_budget)
        self._errors: dict[str, float] = {}
        self._rng = np.random.default_rng(2024)

    def verify(self, full: bool) -> tuple[Check, ...]:
        """The largest error of each regime. Raises Refused when one is too large, or when nothing could be compared."""
        for probe in self._mixed() if self.block.hits is None else self._restricted():
            self._run(probe)
        if full and self.block.hits is None:
            self._shapes()
            self._skew()
        if not self._errors:
            raise Refused("MOE111", "the original ran on none of the probes")
        for regime, error in self._errors.items():
            if not error <= TOLERANCE:
                code = "MOE103" if regime == "skew" else "MOE114"
                what = "tokens are dropped when many choose one expert" if code == "MOE103" else "the rewrite differs"
                raise Refused(code, f"{what} ({regime}: {error:.1e} of the output)")
        return tuple(Check(regime, error) for regime, error in self._errors.items())

    # --- probes

    def _mixed(self) -> Iterator[Probe]:
        """All scales of hidden states and logits, ties, and every expert in turn."""
        width, experts = self.block.width, self.bench.router.experts
        rng, kinds = self._rng, []
        for scale in _LOGITS:
            kinds.append((1.0, f"logits x{scale:g}", rng.standard_normal((_EACH, experts)) * scale))
        for size in _HIDDEN[1:]:
            kinds.append((size, f"hidden x{size:g}", rng.standard_normal((_EACH, experts)) * _LOGITS[0]))
        kinds.append((1.0, "ties", tied_logits(rng, 2 * _EACH, experts)))
        every = -(-experts // self.block.source.chosen)
        kinds.append((1.0, "every expert", spread_logits(rng, every, experts, self.block.source.chosen)))
        hidden = np.concatenate([hidden_states(rng, len(logits), width, (size,)) for size, _, logits in kinds])
        logits = np.concatenate([logits for _, _, logits in kinds]).astype(np.float32)
        regimes = tuple(regime for _, regime, found in kinds for _ in range(len(found)))
        step = min(len(hidden), self.sampler.most_tokens())
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            yield Probe(hidden[part], logits[part], regimes[part])

    def _restricted(self) -> Iterator[Probe]:
        """Routings of a block that only runs for a certain number of hit experts."""
        count, experts = self.block.hits or 1, self.bench.router.experts
        tokens = min(max(8, 2 * count), self.sampler.most_tokens())
        for draw in range(-(-experts // count) + 2):
            logits = self.sampler.logits(self._rng, tokens, count, draw * count)
            scale = (1.0, 0.3, 3.0)[draw % 3]
            size = _HIDDEN[draw % len(_HIDDEN)]
            hidden = hidden_states(self._rng, tokens, self.block.width, (size,))
            regime = f"{count} experts hit, hidden x{size:g}, logits x{scale:g}"
            yield Probe(hidden, logits * np.float32(scale), (regime,) * tokens)
        tokens = min(longest(self.index, self.bench, self.block), self.sampler.most_tokens())
        logits = self.sampler.logits(self._rng, tokens, count, 0)
        logits[max(2 * count, tokens // 8) :, 1 % count] += 6
        yield Probe(hidden_states(self._rng, tokens, self.block.width, (1.0,)), logits, ("skew",) * tokens)

    def _shapes(self) -> None:
        """One token; several sequences."""
        for batch, new, regime in ((1, 1, "one token"), (2, 3, "two sequences")):
            try:
                setting = self.bench.setting(batch, new, self.block.region.outside)
            except Unknown:
                continue
            logits = self._rng.standard_normal((setting.tokens, self.bench.router.experts)) * 1.5
            hidden = hidden_states(self._rng, setting.tokens, self.block.width, (1.0,))
            self._compare(setting, Probe(hidden, logits.astype(np.float32), (regime,) * setting.tokens))

    def _skew(self) -> None:
        """Nearly all tokens to one expert."""
        tokens = longest(self.index, self.bench, self.block)
        experts = self.bench.router.experts
        logits = skewed_logits(self._rng, tokens, experts)
        if tokens > self.sampler.most_tokens():
            error = unequal_routing(self.index, self.bench, self.block, logits, self.sampler.most_tokens())
            if error is not None:
                self._errors["skew"] = error
                return
            tokens = self.sampler.most_tokens()
            logits = skewed_logits(self._rng, tokens, experts)
        hidden = hidden_states(self._rng, tokens, self.block.width, (1.0,))
        self._run(Probe(hidden, logits, ("skew",) * tokens))

    # --- comparison

    def _run(self, probe: Probe) -> None:
        """Compare at the first sizes at which the original runs."""
        count = len(probe.hidden)
        settings = list(self.sampler.settings(count))
        if any(setting.tokens == count and self._compare(setting, probe) for setting in settings):
            return
        any(setting.tokens < count and self._in_pieces(setting, probe) for setting in settings)

    def _in_pieces(self, setting: Setting, probe: Probe) -> bool:
        """The graph fixes the number of tokens: so many at a time."""
        step, ran = setting.tokens, False
        if probe.regimes[0] == "skew":
            return False  # it only shows among many
        for start in range(0, len(probe.hidden) - step + 1, step):
            part = slice(start, start + step)
            ran |= self._compare(setting, Probe(probe.hidden[part], probe.logits[part], probe.regimes[part]))
        return ran

    def _compare(self, setting: Setting, probe: Probe) -> bool:
        """Whether the original ran; notes the errors."""
        island, exit_ = self._rewrite.island, self.block.exit
        try:
            values = self.bench.run(setting, [exit_, *island.inputs], probe.hidden, probe.logits)
        except CutError:
            return False
        before = values[exit_]
        weights = values[self.block.source.weights]
        if weights.min(initial=0.0) < -TOLERANCE * np.abs(weights).max(initial=0.0):
            raise Refused("MOE106", f"routing weights go down to {weights.min():.2g}")
        feeds = {name: values[name] for name in island.inputs}
        packed = self._weights.of(self._hit(values))
        try:
            after = self.bench.cutter.run_island(island, feeds, packed)[exit_]
        except CutError as failure:
            raise Refused("MOE114", f"the rewrite fails where the original runs ({failure.detail})") from failure
        if before.shape != after.shape:
            raise Refused("MOE114", f"the rewrite has the shape {list(after.shape)}, the original {list(before.shape)}")
        errors = token_errors(before.reshape(setting.tokens, -1), after.reshape(setting.tokens, -1))
        for regime, error in zip(probe.regimes, errors.tolist(), strict=True):
            if not np.isnan(error):
                self._errors[regime] = max(self._errors.get(regime, 0.0), error)
        return True

    def _hit(self, values: dict[str, Array]) -> Sequence[int]:
        """The experts whose weights matter."""
        source, experts = self.block.source, self.bench.router.experts
        if isinstance(source, Pair):
            return [int(e) for e in np.unique(values[source.ids])]
        weights = values[source.weights]
        rows = weights.reshape(experts, -1).T if source.turned else weights.reshape(-1, experts)
        return [int(e) for e in np.flatnonzero((rows != 0).any(axis=0))]


def token_errors(before: Array, after: Array) -> Array:
    """(T,) the largest difference of a token, relative to its own size; NaN where the original is not finite."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(before).all(axis=1)
    size = np.abs(before).max(axis=1, initial=0.0)
    usual = np.median(size[finite & (size > 0)]) if (finite & (size > 0)).any() else 1.0
    with np.errstate(invalid="ignore"):
        error = np.abs(before - after).max(axis=1, initial=0.0) / np.maximum(size, 1e-3 * usual)
    error[~np.isfinite(error)] = np.inf
    error[~finite] = np.nan
    return np.asarray(error)
