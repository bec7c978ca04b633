"""Findings in the words of the report."""

from collections.abc import Sequence

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.emit import Rewrite
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Pair
from ortmoe_cli.outcome import Check, Fact, Fusion, Options, Refusal


def block_name(index: Index, router: Router) -> str:
    """What to call a block: its router."""
    return index.node(router.node).name or router.logits


def fusion(index: Index, block: Block, rewrite: Rewrite, checks: Sequence[Check], options: Options) -> Fusion:
    """A block that can be replaced."""
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
    }
    repaired = block.hits is not None
    text = " ".join(f"{key}={facts[key]}" for key in ("E", "k", "H", "I", "activation"))
    contract = []
    if repaired:
        text += f"; the export only ran when exactly {block.hits} experts were hit"
    if experts.activation.name == "gelu_tanh":
        contract.append("gelu in its tanh form: what the CPU kernel computes, the CUDA kernel may not")
    return Fusion(
        "moe",
        block_name(index, block.router),
        index.layer_of(block.router.node, *block.region.nodes[:8]),
        "MOE003" if repaired else "MOE001",
        text,
        "repaired" if repaired else "exact",
        rewrite.island,
        rewrite.weights,
        tuple(contract),
        len(block.region.nodes),
        facts,
        tuple(checks),
    )


def refusal(index: Index, router: Router, reason: Refused) -> Refusal:
    """A block that is left alone."""
    facts: dict[str, Fact] = {"E": router.experts, "H": router.width}
    name = block_name(index, router)
    return Refusal("moe", name, index.layer_of(router.node), reason.code, reason.message, reason.nearest, facts)
