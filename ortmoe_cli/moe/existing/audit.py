"""Fused nodes that a model came with: what they are, what is wrong with them, and the repair where it is exact."""

from collections.abc import Iterator, Sequence

from onnx import TensorProto

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.order import subgraphs
from ortmoe_cli.graph.probe import Sizes, probe
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.existing.findings import Finding, findings, weighs
from ortmoe_cli.moe.existing.node import FUSED, FusedNode
from ortmoe_cli.moe.existing.repair import repair, verify
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.region import cone_of
from ortmoe_cli.outcome import Already, Check, Context, Fact, Fusion, Outcome
from ortmoe_cli.weights.store import lookup

_MOST_NODES = 400


def already_fused(context: Context) -> Iterator[Outcome]:
    """One outcome for each node: Already, or Fusion where something is wrong with it that can be repaired."""
    index = context.index
    nodes = index.nodes_of(*FUSED)
    at = probe(index, Sizes(1, 4, 0)) if nodes else None
    for i in nodes:
        shape = at.shape(index.inputs(i)[0]) if at is not None and index.inputs(i) else None
        ranks = at.shape(index.inputs(i)[1]) if at is not None and len(index.inputs(i)) > 1 else None
        node = FusedNode(index, i, shape[-1] if shape else None, len(ranks) if ranks is not None else None)
        yield _outcome(context, node)
    proto = index.model.proto
    nested = [node for f in proto.functions for node in f.node]
    nested += [child for node in proto.graph.node for graph in subgraphs(node) for child in graph.node]
    while nested:
        raw = nested.pop()
        nested += [child for graph in subgraphs(raw) for child in graph.node]
        if raw.domain == "com.microsoft" and raw.op_type in ("MoE", "QMoE"):
            text = f"already a {raw.op_type} node, inside control flow or a function: not checked"
            yield Already("moe", raw.name or raw.output[0], None, "MOE002", text)


def _outcome(context: Context, node: FusedNode) -> Outcome:
    found, ep = findings(node, context.options.ep), context.options.ep
    grave = [f for f in found if weighs(f, ep)]
    if any(f.repairable for f in found) and all(f.repairable for f in grave) and _wanted(context, node):
        try:
            return _repaired(context, node, [f for f in found if f.repairable], found)
        except (Refused, CutError):
            pass  # then it stays as it is, with its findings
    facts, text = _facts(node, found), _text(node)
    layer = node.index.layer_of(node.i)
    if grave:
        message = f"{text}: {grave[0].message}"
        if all(f.repairable for f in grave) and not _wanted(context, node):
            message += "; --repair all rewrites it"
        return Already("moe", node.name, layer, grave[0].code, message, facts)
    notes = "; ".join(f.message for f in found)
    return Already("moe", node.name, layer, "MOE002", f"{text}; {notes}" if notes else text, facts)


def _wanted(context: Context, node: FusedNode) -> bool:
    """Half precision is for CUDA, where these nodes work, and rounds elsewhere: it is left alone unless asked for."""
    wanted = context.options.repair
    return wanted == "all" or (wanted == "auto" and node.elem_type == TensorProto.FLOAT)


def _repaired(context: Context, node: FusedNode, repaired: Sequence[Finding], found: Sequence[Finding]) -> Fusion:
    made = repair(node)
    checks: tuple[Check, ...] = ()
    if context.options.verify != "none":
        checks = verify(node, made, context.cutter, lambda name: lookup(node.index, context.cutter, name))
    others = [f for f in found if f not in repaired]
    return Fusion(
        "moe",
        node.name,
        node.index.layer_of(node.i),
        repaired[0].code,
        f"{_text(node)}: {'; '.join(f.message for f in repaired)}",
        "repaired",
        made.island,
        made.weights,
        (),
        1,
        _facts(node, others) | {"repaired": " ".join(f.code for f in repaired)},
        checks,
    )


def _text(node: FusedNode) -> str:
    sizes = {"E": node.experts, "k": int(node.attribute("k")), "I": node.inner}
    known = " ".join(f"{key}={value}" for key, value in sizes.items() if value is not None)
    return f"already a {node.kind} node ({known} {node.attribute('activation_type')})"


def _facts(node: FusedNode, found: Sequence[Finding]) -> dict[str, Fact]:
    facts: dict[str, Fact] = {"k": int(node.attribute("k")), "activation": str(node.attribute("activation_type"))}
    for key, value in (("E", node.experts), ("H", node.hidden_size), ("I", node.inner)):
        if value is not None:
            facts[key] = value
    if found:
        facts["findings"] = "; ".join(f"{f.code}{f' ({f.where})' if f.where else ''} {f.message}" for f in found)
    return facts


def reaches_fused(index: Index, router: Router) -> bool:
    """Whether the logits, and not only what they do to hidden states, come to a fused node."""
    cone = cone_of(index, router.hidden, router.logits, min(len(index), router.node + _MOST_NODES))
    return any(index.op(i) in FUSED for name in cone.routed if name not in cone.hidden for i in index.consumers(name))
