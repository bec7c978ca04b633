"""Runs a block often enough that every expert has been seen at work, also where it only runs for certain routings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.bench import Array, Bench, Setting, Unknown
from ortmoe_cli.moe.probing import hidden_states, restricted_logits, spread_logits
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.region import Cut
from ortmoe_cli.moe.samples import Run, Samples

_LEAST_TOKENS = 8
_MOST_RUNS = 64
_DRAWS = 3


@dataclass(frozen=True)
class Hits:
    """The block only runs if exactly `count` experts are hit (None: it runs for every routing)."""

    count: int | None


@dataclass(frozen=True, eq=False)
class Sampler:
    """Samples one region. `chosen`: experts per token, as far as the graph tells; `row_bytes`: what the run allocates
    for the gathered weights of one token."""

    index: Index
    bench: Bench
    region: Cut
    outputs: tuple[str, ...]
    chosen: int
    row_bytes: int
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.bench.router.experts

    def most_tokens(self) -> int:
        """What fits into the budget, next to the packed weights."""
        return max(1, self.bench.cutter.byte_budget * 3 // 4 // max(self.row_bytes, 1))

    def settings(self, tokens: int) -> Iterator[Setting]:
        """Sizes to try, the most promising first: one long sequence, two, many short ones, one token."""
        seen = set()
        for batch, new in ((1, tokens), (tokens, 1), (2, max(tokens // 2, 1)), (1, 1)):
            try:
                setting = self.bench.setting(batch, new, self.region.outside)
            except Unknown:
                continue
            if setting.hidden_shape not in seen and setting.tokens <= 4 * max(tokens, 1):
                seen.add(setting.hidden_shape)
                yield setting

    def sample(self) -> tuple[Samples, Hits]:
        """Values of all outputs while every expert is hit. Raises CutError with the last reason if nothing runs."""
        tokens = min(max(_LEAST_TOKENS, -(-2 * self.experts // self.chosen)), self.most_tokens())
        settings = sorted(self.settings(tokens), key=lambda s: (s.tokens < tokens, abs(s.tokens - tokens)))
        failure: CutError | None = None
        for setting in settings:
            try:
                samples = self._go_round(setting, None, self.experts)
                return samples, Hits(None if self._runs_for_few(setting) else self.experts)
            except CutError as error:
                failure = failure or error
        for setting in settings[:2]:
            for count in self._counts():
                try:
                    return self._go_round(setting, count, self.experts), Hits(count)
                except CutError:
                    continue
        raise failure or CutError("run", "no sizes suit the graph")

    def _runs_for_few(self, setting: Setting) -> bool:
        """Whether the block also runs when all tokens go to the same few experts."""
        rng = np.random.default_rng(self.seed)
        hidden = hidden_states(rng, setting.tokens, self.bench.width)
        logits = restricted_logits(rng, setting.tokens, self.experts, self.chosen, np.arange(self.chosen))
        try:
            self.bench.run(setting, self.outputs, hidden, logits)
        except CutError:
            return False
        return True

    def _counts(self) -> list[int]:
        """How many experts may have to be hit: lengths of constant splits of ones first, then every number."""
        hints = []
        for i in self.region.nodes:
            names = self.index.inputs(i)
            if self.index.op(i) != "Split" or len(names) < 2 or self.index.attribute(i, "axis", 0):
                continue
            if self.index.is_constant(names[1]):
                sizes = self.bench.cutter.constant(names[1])
                if 1 <= sizes.size <= self.experts and (sizes == 1).all():
                    hints.append(int(sizes.size))
        hints.sort(reverse=True)
        return list(dict.fromkeys([*hints, *range(1, min(self.experts, 64) + 1)]))

    def _go_round(self, setting: Setting, count: int | None, experts: int) -> Samples:
        """Runs until every expert had its turn."""
        rng = np.random.default_rng(self.seed)
        per_run = count if count is not None else setting.tokens * self.chosen
        rounds = min(-(-2 * experts // per_run), _MOST_RUNS)  # twice, so that no two experts have the same tokens
        return Samples(tuple(self._one(rng, setting, count, k * per_run) for k in range(rounds)))

    def _one(self, rng: np.random.Generator, setting: Setting, count: int | None, start: int) -> Run:
        hidden = hidden_states(rng, setting.tokens, self.bench.width)
        failure: CutError | None = None
        for draw in range(1 if count is None else _DRAWS):
            logits = self.logits(rng, setting.tokens, count, start if draw == 0 else int(rng.integers(self.experts)))
            try:
                return Run(hidden, logits, self.bench.run(setting, self.outputs, hidden, logits))
            except CutError as error:
                failure = error
        assert failure is not None
        raise failure

    def logits(self, rng: np.random.Generator, tokens: int, count: int | None, start: int) -> Array:
        """L (T,E) that hits every expert in turn, or exactly `count` of them."""
        if count is None:
            return spread_logits(rng, tokens, self.experts, self.chosen, start)
        active = (start + np.arange(count)) % self.experts
        return restricted_logits(rng, tokens, self.experts, min(self.chosen, count), np.sort(active))


def gathered_bytes(bench: Bench, region: Cut, products: Sequence[Product]) -> int:
    """Bytes per token that a run allocates for weights picked by the routing, where their shapes are known."""
    total = 0
    at, tokens = bench.typical()
    for product in products:
        shape = at.shape(product.operand)
        if product.routed and shape is not None and np.prod(shape[:-2]) >= tokens > 1:
            total += 4 * int(np.prod(shape)) // tokens
    return 2 * total


def wanted_outputs(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
