"""Claims about a mask that must hold at every size: that it hides the future, and that it does nothing else.

The operator's own causality takes the place of what the graph computes, so looking at some sizes is not enough. A part
of the mask that hides the future at short and long probes, and is computed with no number beyond them, hides it always.
"""

from math import ceil

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.block import Heads
from ortmoe_cli.attention.conjuncts import Conjunct, conjuncts
from ortmoe_cli.attention.constants import Numbers, numbers_of
from ortmoe_cli.attention.line import Term
from ortmoe_cli.attention.mask import Claims
from ortmoe_cli.attention.probes import Probes, Regime
from ortmoe_cli.attention.reference import future
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.attention.scores import Bias, attention_mask, find_bias, is_causal, joins_cache, tokens_of
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Padding, Probe, Sizes

_PROBED = 1_000
"""Thresholds up to here show at the long probes."""
_LARGEST = 4_090
"""Longer prompts are not probed: their mask has too many elements."""
_MARGIN = 5
_SURE = -6e4
"""What blocks below this cannot be opened again by what else is added to scores."""
_SMALL = 1e3
_NO_PART = "no part of the mask hides the future by itself"


class Prover:
    """Proves masks of one graph; what layers share is proven once."""

    def __init__(self, index: Index, probes: Probes) -> None:
        self._index, self._probes = index, probes
        self._doubts: dict[tuple[Conjunct, tuple[tuple[int, int], ...]], str] = {}
        self._numbers: dict[str, Numbers] = {}

    def claims(self, anchor: Anchor, heads: Heads, base: Probe) -> Claims:
        """What can be claimed of the mask of a block. Raises Refused."""
        terms = mask_terms(self._index, base, anchor)
        long = list(self._probes.long_for(heads.query.tensor, base))
        doubt, counts = self._doubt(anchor, heads, base, terms, [probe for probe in long if probe.sizes.new > 1])
        seen = self._look(anchor, heads, long)
        plain = (
            len(seen) == len(long)
            and all(bias.origin is Origin.NONE and is_causal(bias) for bias in seen)
            and all(self._numbers_of(base, term.tensor).none for term in terms)
        )
        return Claims(plain and not doubt, doubt, counts)

    def _look(self, anchor: Anchor, heads: Heads, long: list[Probe]) -> list[Bias]:
        """The bias at long probes, as far as it can be evaluated. Raises Refused for what only these show."""
        found = []
        for probe in long:
            try:
                bias = find_bias(self._index, probe, anchor, heads)
            except Refused:
                continue
            seen = bias.open
            where = f"with {probe.sizes.new} new and {probe.sizes.past} old tokens"
            if (seen & future(*seen.shape[-2:])).any():
                raise Refused("GQA105", f"{where}, queries see keys of their future")
            if not seen.any(-1).all():
                raise Refused("GQA105", f"{where}, queries see no key at all")
            found.append(bias)
        return found

    # --- the future

    def _doubt(
        self, anchor: Anchor, heads: Heads, base: Probe, terms: tuple[Term, ...], long: list[Probe]
    ) -> tuple[str, bool]:
        """Why the mask may show the future at some size, '' if it cannot; whether that rests on counting a mask."""
        index = self._index
        if not long:
            return "", False  # one new token has no future
        own = anchor.line is None and bool(index.attribute(anchor.node, "is_causal", 0))
        if own and (heads.key_cache is None or joins_cache(index, anchor)):
            return "", False
        doubts, counted = [], False
        for conjunct in conjuncts(index, (base, *long), terms):
            doubt = self._doubt_about(conjunct, heads, base, long)
            doubts.append(doubt)
            if not doubt and not self._outweighed(conjunct, terms, long):
                free = not long[0].origin(conjunct.tensor) & Origin.MASK
                if free or self._whatever_the_mask(conjunct, heads, lowest=-50):
                    return "", False
                counted = True
        if counted:
            return "", True
        told = [doubt for doubt in doubts if doubt and doubt != _NO_PART]
        return told[0] if told else _NO_PART, False

    def _doubt_about(self, conjunct: Conjunct, heads: Heads, base: Probe, long: list[Probe]) -> str:
        lengths = tuple(
            (tokens_of(probe, heads.query, heads), tokens_of(probe, heads.all_keys, heads)) for probe in long
        )
        known = (conjunct, lengths)
        if known not in self._doubts:
            self._doubts[known] = self._examine(conjunct, heads, base, long)
        return self._doubts[known]

    def _examine(self, conjunct: Conjunct, heads: Heads, base: Probe, long: list[Probe]) -> str:
        """Why one part of the mask may not hide the future."""
        numbers = self._numbers_of(base, conjunct.tensor)
        bound = max(numbers.tables, default=0)
        for probe in long:
            value, total = probe.value(conjunct.tensor), probe.sizes.total
            if value is None and 0 < bound < total:
                continue  # a table ends there, and the graph with it
            if value is None:
                return f"the mask could not be evaluated with {probe.sizes.new} new and {probe.sizes.past} old tokens"
            if not self._hides(conjunct, probe, heads):
                return _NO_PART
            if probe.origin(conjunct.tensor) & ~Origin.MASK:
                return "the part of the mask that hides the future depends on positions that the caller gives"
        if not numbers.clear:
            return f"whether the mask hides the future at every length cannot be shown: {numbers.unclear}"
        if not self._beyond(conjunct, heads, numbers, bound):
            largest = max([*numbers.thresholds, bound])
            return f"whether the mask hides the future beyond the constant {largest:.12g} in it cannot be shown"
        given = any(probe.origin(conjunct.tensor) & Origin.MASK for probe in long)
        if given and not self._whatever_the_mask(conjunct, heads, lowest=0):
            return "whether the mask hides the future depends on the mask that the caller gives"
        return ""

    def _beyond(self, conjunct: Conjunct, heads: Heads, numbers: Numbers, bound: int) -> bool:
        """Whether it hides the future just beyond its own constants too, or to the end of its tables."""
        wanted = []
        if numbers.reach > _PROBED:
            wanted.append(ceil(numbers.reach) + _MARGIN)
        if bound > _PROBED:
            wanted.append(bound)
        end = self._probes.end_of(heads.query.tensor)
        for total in wanted:
            if end and total > end:
                continue  # the graph itself goes no further
            if total > _LARGEST:
                return False
            probe = self._probes.at(Regime("beyond", Sizes(1, total)))
            if probe.value(conjunct.tensor) is None and 0 < bound < total:
                continue
            if probe.sizes.total < total or not self._hides(conjunct, probe, heads):
                return False
        return True

    def _whatever_the_mask(self, conjunct: Conjunct, heads: Heads, lowest: int) -> bool:
        """Whether a part that depends on a padding mask hides the future for masks that no caller would give."""
        for seed in range(3):
            for sizes in (Sizes(2, 9), Sizes(1, 40), Sizes(1, 5, 8)):
                probe = self._probes.with_masks(Regime("odd masks", sizes, Padding("left", (2, 0))), seed, lowest)
                if probe.sizes.new > 1 and not self._hides(conjunct, probe, heads):
                    return False
        return True

    def _hides(self, conjunct: Conjunct, probe: Probe, heads: Heads) -> bool:
        value = probe.value(conjunct.tensor)
        if value is None:
            return False
        new, total = tokens_of(probe, heads.query, heads), tokens_of(probe, heads.all_keys, heads)
        blocked = conjunct.blocked(value)
        rows = (1,) * (2 - blocked.ndim) + blocked.shape
        if rows[-1] not in (1, total) or rows[-2] not in (1, new):
            return False
        return bool((blocked | ~future(new, total)).all())

    def _outweighed(self, conjunct: Conjunct, terms: tuple[Term, ...], long: list[Probe]) -> bool:
        """Whether something else that is added may outweigh a weak block (-10000)."""
        if conjunct.kind in ("allow", "block"):
            return False
        for probe in long:
            value = probe.value(conjunct.tensor)
            if value is None:
                continue
            low = -value if conjunct.kind == "sub" else value
            if low[conjunct.blocked(value)].max(initial=-np.inf) <= _SURE:
                continue
            for term in terms:
                added = probe.value(term.tensor)
                if term.kind in ("add", "sub") and (
                    added is None or (added if term.kind == "add" else -added).max() > _SMALL
                ):
                    return True
        return False

    def _numbers_of(self, base: Probe, tensor: str) -> Numbers:
        if tensor not in self._numbers:
            self._numbers[tensor] = numbers_of(self._index, base, (base, *self._probes.of_sizes(base)[1:]), tensor)
        return self._numbers[tensor]


def mask_terms(index: Index, probe: Probe, anchor: Anchor) -> tuple[Term, ...]:
    """Everything that keeps keys out of a block's scores."""
    if anchor.line is not None:
        return anchor.line.terms
    mask = attention_mask(index, anchor)
    if not mask:
        return ()
    value = probe.value(mask)
    return (Term("allow" if value is not None and value.dtype == bool else "add", mask),)
