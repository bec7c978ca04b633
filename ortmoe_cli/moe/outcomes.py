"""Findings in the words of the report."""

from collections.abc import Sequence
from dataclasses import replace

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.direct import wording
from ortmoe_cli.moe.emit import Rewrite
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Pair
from ortmoe_cli.outcome import Check, Fact, Fusion, Options, Refusal


def block_name(index: Index, router: Router) -> str:
    """What to call a block: its router."""
    return index.node(router.node).name or router.logits


def fusion(
    index: Index, block: Block, rewrite: Rewrite, checks: Sequence[Check], options: Options, like: Block | None = None
) -> Fusion:
    """A block that can be replaced. `like`: the block of equal structure that it was identified by."""
    experts, chosen = block.experts, block.source.chosen
    facts: dict[str, Fact] = {
        "E": len(experts.members),
        "k": chosen,
        "H": block.width,
        "I": experts.inner,
        "activation": experts.activation.describe(),
        "layout": experts.layout.kind + (", up first" if experts.layout.up_first else ""),
        "router": block.router_kind,
        "routing": "ids and weights" if isinstance(block.source, Pair) else "weights of all experts",
        "additions": len(block.additions),
        "identified": "by evaluation" if like is None else f"structure equals {block_name(index, like.router)}",
        "verified": _verified(options, like),
    }
    repaired = block.hits is not None
    text = " ".join(f"{key}={facts[key]}" for key in ("E", "k", "H", "I", "activation"))
    form = wording(index, block, options)
    layer = index.layer_of(block.router.node, *block.region.nodes[:8])
    where = "" if layer is None or rewrite.terms.code != "MOE005" else f"layer {layer}: "
    contract = [*form.contract, *(where + sentence for sentence in rewrite.terms.contract)]
    facts |= {
        "routing form": form.why,
        "nodes before": len(block.region.nodes),
        "nodes after": len(rewrite.island.nodes),
    }
    facts |= rewrite.terms.facts
    if rewrite.terms.message:
        text += f"; {rewrite.terms.message}"
    if repaired:
        text += f"; the export only ran when exactly {block.hits} experts were hit"
    if experts.activation.name == "gelu_tanh":
        contract.append("gelu in its tanh form: what the CPU kernel computes, the CUDA kernel may not")
    assumes = tuple(filter(None, (rewrite.terms.assumes, form.assumes)))
    found = Fusion(
        "moe",
        block_name(index, block.router),
        layer,
        "MOE003" if repaired else rewrite.terms.code or "MOE001",
        text,
        "assumed" if assumes else "repaired" if repaired else "exact",
        rewrite.island,
        rewrite.weights,
        tuple(contract),
        len(block.region.nodes),
        facts,
        tuple(checks),
        assumes=assumes,
    )
    if rewrite.proof is None:
        return found
    return replace(found, proof=replace(found, island=rewrite.proof.island, weights=rewrite.proof.weights))


def _verified(options: Options, like: Block | None) -> str:
    """How the rewrite was compared with the original."""
    if options.verify == "none":
        return "not verified"
    if like is None or options.verify == "full":
        return "on all probes"
    return "with its own weights on a sample of probes; the block of equal structure on all"


def refusal(index: Index, router: Router, reason: Refused) -> Refusal:
    """A block that is left alone."""
    facts: dict[str, Fact] = {"E": router.experts, "H": router.width}
    name = block_name(index, router)
    return Refusal("moe", name, index.layer_of(router.node), reason.code, reason.message, reason.nearest, facts)
