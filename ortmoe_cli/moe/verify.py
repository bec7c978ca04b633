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
from ortmoe_cli.moe.thresholds import LARGER, SMALLER, Coverage, replaced, thresholds
from ortmoe_cli.outcome import Check

Array = NDArray[Any]

TOLERANCE = 1e-4
_HIDDEN = (1.0, 0.01, 20.0, 100.0)
_LOGITS = (1.5, 0.02, 0.3, 8.0, 60.0)
_EACH = 6
"""Tokens per combination of scales."""
_SHARPEST, _MOST_SIZES = 1e6, 8
_WEIGHT_BYTES = 256 << 20
"""Packed weights in float32 take no more memory than this: with larger experts, probes hit fewer of them at a time."""
_UNWANTED = 12.0
_MOST_GATHERED = 8
_FEW = 2
"""The same for a sample."""


@dataclass(frozen=True, eq=False)
class Probe:
    """X (T,H), L (T,E) and the regime of each token."""

    hidden: Array
    logits: Array
    regimes: tuple[str, ...]


class Verifier:
    """Compares one block with its rewrite."""

    def __init__(
        self,
        index: Index,
        bench: Bench,
        block: Block,
        rewrite: Rewrite,
        sampler: Sampler,
        source: Source,
        *,
        again: bool = False,
    ):
        """`again`: a block of the same structure was verified before, so its numbers need not be looked at again."""
        self.bench, self.block, self.sampler, self.index = bench, block, sampler, index
        self._rewrite = rewrite
        self._weights = PackedValues(rewrite.weights, source, _WEIGHT_BYTES)
        self._room = max(2 * block.source.chosen, self._weights.room())
        self._errors: dict[str, float] = {}
        self._rng = np.random.default_rng(2024)
        gone = () if again else replaced(index, block.cone, block.region, rewrite.island.inputs)
        self._coverage = Coverage(thresholds(index, bench.cutter, block.cone, gone))

    def verify(self, full: bool) -> tuple[Check, ...]:
        """The largest error of each regime. Raises Refused when one is too large, or when nothing could be compared."""
        for probe in self._mixed() if self.block.hits is None else self._restricted():
            self._run(probe)
        if full:
            self._magnitudes()
            if self.block.direct:
                self._sharpness()
        if full and self.block.hits is None:
            self._shapes()
            self._skew()
        return self._judged()

    def sample(self) -> tuple[Check, ...]:
        """A few tokens of every regime. For a block whose equal was verified in full: what differs are weights, and
        those of an expert are wrong for every token or for none. Which experts have their turn depends on the layer."""
        if self.block.hits is not None:
            return self.verify(full=False)
        self._rng = np.random.default_rng(self.block.router.node)
        for probe in self._mixed(_FEW, _FEW * len(_HIDDEN)):
            self._run(probe)
        return self._judged()

    def _judged(self) -> tuple[Check, ...]:
        if not self._errors:
            raise Refused("MOE111", "the original ran on none of the probes")
        for regime, error in self._errors.items():
            if not error <= TOLERANCE:
                code = "MOE103" if regime == "skew" else "MOE114"
                what = "tokens are dropped when many choose one expert" if code == "MOE103" else "the rewrite differs"
                raise Refused(code, f"{what} ({regime}: {error:.1e} of the output)")
        return tuple(Check(regime, error) for regime, error in self._errors.items())

    # --- probes

    def _mixed(self, each: int = _EACH, most: int | None = None) -> Iterator[Probe]:
        """All scales of hidden states and logits, ties, and every expert in turn; or with `most`, so many of these
        tokens."""
        width, experts = self.block.width, self.bench.router.experts
        rng, kinds = self._rng, []
        first = 0 if most is None else int(rng.integers(experts))
        for scale in _LOGITS:
            kinds.append((1.0, f"logits x{scale:g}", rng.standard_normal((each, experts)) * scale))
        for size in _HIDDEN[1:]:
            kinds.append((size, f"hidden x{size:g}", rng.standard_normal((each, experts)) * _LOGITS[0]))
        kinds.append((1.0, "ties", tied_logits(rng, 2 * each, experts)))
        every = min(-(-experts // self.block.source.chosen), most or experts)
        kinds.append((1.0, "every expert", spread_logits(rng, every, experts, self.block.source.chosen, first)))
        hidden = np.concatenate([hidden_states(rng, len(logits), width, (size,)) for size, _, logits in kinds])
        logits = np.concatenate([logits for _, _, logits in kinds]).astype(np.float32)
        regimes = tuple(regime for _, regime, found in kinds for _ in range(len(found)))
        step = min(len(hidden), self.sampler.most_tokens(), max(1, self._room // self.block.source.chosen))
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

    def _magnitudes(self) -> None:
        """Hidden states so large, or so small, that every number they meet is passed."""
        coverage = self._coverage
        for side, sizes in (("high", LARGER), ("low", SMALLER)):
            coverage.begin()
            for size in sizes:
                if not getattr(coverage, side):
                    break
                for probe in self._every_expert(size):
                    self._run(probe)
                coverage.step()

    def _sharpness(self) -> None:
        """Logits beyond every number that the router compares them with: the node is to do the router's work."""
        region, cone = self.block.region, self.block.cone
        numbers = {t.number for t in thresholds(self.index, self.bench.cutter, cone, region.nodes, cone.routed)}
        sizes = {30.0, 300.0, *(8 * n for n in numbers if 1 <= n <= _SHARPEST)}
        for size in sorted(sizes)[:_MOST_SIZES]:
            tokens = min(2 * _EACH, self.sampler.most_tokens())
            logits = (self._rng.standard_normal((tokens, self.bench.router.experts)) * size).astype(np.float32)
            hidden = hidden_states(self._rng, tokens, self.block.width, (1.0,))
            self._run(Probe(hidden, self._few(logits), (f"logits x{size:g}",) * tokens))

    def _every_expert(self, size: float) -> Iterator[Probe]:
        """Hidden states of one size for every expert."""
        experts, count, chosen = self.bench.router.experts, self.block.hits, self.block.source.chosen
        tokens = min(max(-(-experts // chosen), 2 * _EACH), self.sampler.most_tokens())
        tokens = tokens if count is not None or self._room >= experts else min(tokens, max(1, self._room // chosen))
        step = tokens * chosen if count is None else count
        for start in range(0, experts, step):
            logits = self.sampler.logits(self._rng, tokens, count, start)
            hidden = hidden_states(self._rng, tokens, self.block.width, (size,))
            yield Probe(hidden, logits, (f"hidden x{size:g}",) * tokens)

    def _shapes(self) -> None:
        """One token; several sequences."""
        for batch, new, regime in ((1, 1, "one token"), (2, 3, "two sequences"), (9, 2, "nine sequences")):
            try:
                setting = self.bench.setting(batch, new, self.block.region.outside)
            except Unknown:
                continue
            if setting.tokens * self.sampler.row_bytes > _MOST_GATHERED * self.bench.cutter.byte_budget:
                continue  # a form that copies weights for every token
            logits = self._rng.standard_normal((setting.tokens, self.bench.router.experts)) * 1.5
            hidden = hidden_states(self._rng, setting.tokens, self.block.width, (1.0,))
            self._compare(setting, Probe(hidden, self._few(logits), (regime,) * setting.tokens))

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
        self._run(Probe(hidden, self._few(logits), ("skew",) * tokens))

    def _few(self, logits: Array) -> Array:
        """L (T,E) that wants no more experts than there is room for: neighbours, because of groups."""
        experts = logits.shape[1]
        if self._room < experts:
            logits = logits.copy()
            logits[:, self._room :] -= _UNWANTED + np.abs(logits).max()
        return logits.astype(np.float32)

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
        source = self.block.source
        routing = (source.weights, source.ids) if isinstance(source, Pair) else (source.weights,)
        names = dict.fromkeys((exit_, *routing, *island.inputs, *self._coverage.tensors))
        try:
            values = self.bench.run(setting, tuple(names), probe.hidden, probe.logits)
        except CutError:
            return False
        self._coverage.see(values)
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
            if not np.isnan(error) and not (self.block.direct and regime == "ties"):
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
