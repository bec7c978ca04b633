"""Every block of attention in a graph, with its replacement or the reason why it has none."""

from collections.abc import Sequence
from dataclasses import dataclass

from ortmoe_cli.attention.anchor import Anchor, attention_anchor, softmax_anchor
from ortmoe_cli.attention.block import Block, Heads
from ortmoe_cli.attention.carrier import NOTHING, find_carrier
from ortmoe_cli.attention.cores import find_heads
from ortmoe_cli.attention.cuts import refuse_cut_tokens, refuse_dropped_inputs
from ortmoe_cli.attention.detach import inner_nodes, inner_sizes
from ortmoe_cli.attention.emit import ELEMENT_TYPES, Plan, emit
from ortmoe_cli.attention.existing import FUSED_OTHERS, GROUP_QUERY, check_existing
from ortmoe_cli.attention.layer import layer_of
from ortmoe_cli.attention.layout import Layout
from ortmoe_cli.attention.lengths import Length, formula
from ortmoe_cli.attention.mask import Mask, Sight, judge, refuse_seen
from ortmoe_cli.attention.merge import find_merged
from ortmoe_cli.attention.probes import SAMPLE, Probes
from ortmoe_cli.attention.proof import Prover
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.attention.scores import find_bias, find_scoring, tokens_of
from ortmoe_cli.attention.verify import check_island, check_reference
from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.probe import Probe, Role
from ortmoe_cli.outcome import Already, Check, Context, Fact, Fusion, Outcome, Refusal

_CHUNKS = "several new tokens after a cache are accepted for one sequence at a time; the runtime refuses them for more"
_EMPTY = {
    "batch": "a batch of no sequences must not be fed: the runtime's kernel ends the process",
    "tokens": "a call without new tokens is refused by the runtime",
}
_COUNTS = "numbers in the attention mask must not be negative: they are counted to tell the past from the future"
_RETRIED = ("GQA103", "GQA107", "GQA111")
"""Refusals that may be due to sizes for which the graph was not made."""


def find(context: Context) -> list[Outcome]:
    """The outcome of every attention block, in graph order."""
    return _Search(context).run()


@dataclass(frozen=True)
class _Found:
    """A block that can be replaced, before anything is emitted."""

    block: Block
    mask: Mask
    sights: tuple[Sight, ...]
    region: frozenset[int]
    base: Probe


class _Search:
    def __init__(self, context: Context) -> None:
        self._context, self._index = context, context.index
        self._probes = Probes(context.index)
        self._prover = Prover(context.index, self._probes)
        self._names: set[str] = set()
        self._taken: set[str] = set()

    def run(self) -> list[Outcome]:
        index = self._index
        nodes = index.nodes_of("Softmax", "Attention", GROUP_QUERY, *FUSED_OTHERS)
        outcomes: list[Outcome] = []
        for done, i in enumerate(nodes):
            self._context.progress("attention", done, len(nodes))
            outcome = self._outcome(i)
            if outcome is not None:
                outcomes.append(outcome)
        self._context.progress("attention", len(nodes), len(nodes))
        return outcomes

    def _outcome(self, i: int) -> Outcome | None:
        """What becomes of a softmax or an attention operator; None for a softmax that is no attention."""
        index = self._index
        layer = layer_of(index, i)
        name = self._name(i, layer)
        try:
            if index.op(i) == GROUP_QUERY:
                facts = check_existing(index, i)
                return Already("gqa", name, layer, "GQA002", "already a GroupQueryAttention", facts)
            if index.op(i) in FUSED_OTHERS:
                raise Refused("GQA112", f"a {index.op(i).removeprefix('com.microsoft.')} node: fused, but not grouped")
            return self._fusion(i, name, layer)
        except Refused as refused:
            return Refusal("gqa", name, layer, refused.code, refused.message, refused.nearest)

    def _fusion(self, i: int, name: str, layer: int | None) -> Fusion | None:
        """The replacement around an anchor. Raises Refused."""
        found = self._identify(i, name, layer)
        if found is None:
            return None
        index, block, mask = self._index, found.block, found.mask
        carrier = NOTHING if mask.plain else find_carrier(index, block.anchor, found.sights)
        probes = self._probes.of_sizes(found.base)
        sizes = inner_sizes(index, block, found.region, probes, self._taken)
        island = emit(index, Plan(block, carrier, sizes, self._tokens(block, probes), frozenset(self._taken)))
        checks = self._checks(found, island)
        self._taken.update(island.outputs)
        contract = self._contract(block, mask)
        return Fusion(
            "gqa", name, layer,
            code="GQA003" if contract else "GQA001",
            message=_message(block, mask),
            guarantee="narrowed" if contract else "exact",
            island=island,
            contract=contract,
            region=len(found.region),
            facts=_facts(block, mask, carrier.kind),
            checks=checks,
        )  # fmt: skip

    def _contract(self, block: Block, mask: Mask) -> tuple[str, ...]:
        """The inputs that the original may take and the operator does not."""
        fixed_batch, fixed_new = self._probes.fixed
        lines = []
        if block.heads.key_cache is not None and not fixed_batch and not fixed_new:
            lines.append(_CHUNKS)
        if not fixed_batch:
            lines.append(_EMPTY["batch"])
        if not fixed_new:
            lines.append(_EMPTY["tokens"])
        if mask.counts:
            lines.append(_COUNTS)
        return tuple(lines)

    def _checks(self, found: _Found, island: Island) -> tuple[Check, ...]:
        """Proof that block and island agree, as thorough as was asked for. Raises Refused."""
        verify = self._context.options.verify
        if verify == "none":
            return ()
        sights = [sight for sight in found.sights if verify == "full" or sight.regime.name in SAMPLE]
        if found.block.anchor.line is not None:
            for sight in sights:
                check_reference(sight.probe, found.block, sight)
        return check_island(self._index, self._context.cutter, found.block, island, sights or found.sights)

    # --- identification

    def _identify(self, i: int, name: str, layer: int | None) -> _Found | None:
        """Identify at the first sizes that the graph can be evaluated at."""
        refusals: list[Refused] = []
        bases = list(self._probes.bases())
        made = self._index.outputs(i)[0]
        for probe in [base for base in bases if base.shape(made) is not None] or bases[:1]:
            try:
                return self._identify_at(probe, i, name, layer)
            except Refused as refused:
                refusals.append(refused)
                if refused.code not in _RETRIED:
                    break
        raise refusals[0]

    def _identify_at(self, probe: Probe, i: int, name: str, layer: int | None) -> _Found | None:
        index = self._index
        far = self._probes.ladder
        anchor = attention_anchor(index, i) if index.op(i) == "Attention" else softmax_anchor(index, probe, far, i)
        if anchor is None:
            return None
        heads = find_heads(index, probe, far, anchor)
        elem_type = index.elem_type(heads.all_keys.tensor)
        if elem_type not in ELEMENT_TYPES:
            raise Refused("GQA110", f"element type {elem_type} is not supported by GroupQueryAttention")
        block = self._block(probe, name, layer, anchor, heads)
        region = inner_nodes(index, probe, block)
        refuse_dropped_inputs(index, probe, block, region)
        refuse_cut_tokens(block, self._probes.growing(probe))
        sights = self._sights(anchor, heads)
        refuse_seen(sights)
        mask = judge(sights, self._prover.claims(anchor, heads, probe))
        return _Found(block, mask, sights, region, probe)

    def _block(self, probe: Probe, name: str, layer: int | None, anchor: Anchor, heads: Heads) -> Block:
        index, probes = self._index, self._probes.of_sizes(probe)
        merged = find_merged(index, probe, anchor.context, heads, anchor.tokens_first)
        cores = (heads.query, heads.key, heads.value)
        stacked = {c.tensor for c in cores if c.layout is Layout.BNLD and len(probe.shape(c.tensor) or ()) == 3}
        plain = (probe.sizes.batch, heads.heads, tokens_of(probe, heads.query, heads))
        context = product = None
        shape = probe.shape(anchor.context) or ()
        if (
            merged.tensor == anchor.context
            and merged.layout in (Layout.BNLD, Layout.BLND)
            and (
                len(shape) != 4
                or shape[:3] != (plain if merged.layout is Layout.BNLD else (plain[0], plain[2], plain[1]))
            )
        ):
            context = _needed(formula(anchor.context, probes), "context")
        if anchor.line is not None and (probe.shape(index.outputs(anchor.line.product)[0]) or ())[:3] != plain:
            product = _needed(formula(index.outputs(anchor.line.product)[0], probes), "scores")
        scoring = find_scoring(index, probe, anchor, heads)
        return Block(name, layer, anchor, heads, scoring, merged, frozenset(stacked), context, product)

    def _sights(self, anchor: Anchor, heads: Heads) -> tuple[Sight, ...]:
        """The bias in every situation in which it can be evaluated."""
        sights = []
        for regime in self._probes.regimes:
            probe = self._probes.at(regime)
            try:
                sights.append(Sight(regime, probe, find_bias(self._index, probe, anchor, heads)))
            except Refused as refused:
                if refused.code != "GQA107":
                    raise
        return tuple(sights)

    def _tokens(self, block: Block, probes: Sequence[Probe]) -> str | None:
        """The graph input that is [B, S, ..] wherever the queries are."""
        heads, roles = block.heads, self._probes.roles
        wanted = [(probe.sizes.batch, tokens_of(probe, heads.query, heads)) for probe in probes]
        for role in (Role.TOKENS, Role.HIDDEN):
            for name in (name for name, found in roles.items() if found is role):
                if [(probe.shape(name) or ())[:2] for probe in probes] == wanted:
                    return name
        return None

    def _name(self, i: int, layer: int | None) -> str:
        """A name for the block's island that no other has."""
        name = f"gqa_layer_{layer}" if layer is not None else f"gqa_{i}"
        if name in self._names:
            name = f"{name}_{i}"
        self._names.add(name)
        return self._index.unused_prefix(name)


def _needed(lengths: tuple[Length, ...] | None, what: str) -> tuple[Length, ...]:
    if lengths is None:
        raise Refused("GQA111", f"the shape of the {what} follows no formula of batch and tokens")
    return lengths


def _message(block: Block, mask: Mask) -> str:
    heads, scoring = block.heads, block.scoring
    parts = [f"{heads.heads} query heads on {heads.kv_heads} key/value heads of size {heads.size}"]
    if mask.window:
        parts.append(f"window {mask.window}")
    if scoring.softcap:
        parts.append(f"softcap {scoring.softcap:g}")
    if scoring.sinks is not None:
        parts.append("sinks")
    parts.append("cache" if heads.key_cache else "no cache")
    return ", ".join(parts)


def _facts(block: Block, mask: Mask, bias: str) -> dict[str, Fact]:
    heads, scoring = block.heads, block.scoring
    facts: dict[str, Fact] = {
        "heads": heads.heads, "kv_heads": heads.kv_heads, "head_size": heads.size, "scale": scoring.scale,
        "cache": heads.key_cache is not None, "form": "safe", "bias": bias, "padding": mask.padding,
    }  # fmt: skip
    if scoring.softcap:
        facts["softcap"] = scoring.softcap
    if scoring.sinks is not None:
        facts["sinks"] = True
    if mask.window:
        facts["window"] = mask.window
    return facts
