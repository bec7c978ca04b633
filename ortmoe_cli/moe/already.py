"""MoE and QMoE nodes that a model came with."""

from collections.abc import Iterator

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.order import subgraphs
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.region import cone_of
from ortmoe_cli.outcome import Already, Fact

FUSED = ("com.microsoft.MoE", "com.microsoft.QMoE")
_MOST_NODES = 400


def already_fused(index: Index) -> Iterator[Already]:
    """One finding for each node, those in subgraphs and functions too."""
    for i in index.nodes_of(*FUSED):
        facts: dict[str, Fact] = {"k": int(index.attribute(i, "k", 1))}
        facts["activation"] = str(index.attribute(i, "activation_type", "relu"))
        shape = index.constant_shape(index.inputs(i)[2]) if len(index.inputs(i)) > 2 else None
        if shape:
            facts["E"] = shape[0]
        name = index.node(i).name or index.outputs(i)[0]
        text = " ".join(f"{key}={value}" for key, value in facts.items())
        yield Already(
            "moe", name, index.layer_of(i), "MOE002", f"already a {index.node(i).op_type} node ({text})", facts
        )
    proto = index.model.proto
    nested = [node for f in proto.functions for node in f.node]
    nested += [child for node in proto.graph.node for graph in subgraphs(node) for child in graph.node]
    while nested:
        node = nested.pop()
        nested += [child for graph in subgraphs(node) for child in graph.node]
        if node.domain == "com.microsoft" and node.op_type in ("MoE", "QMoE"):
            yield Already("moe", node.name or node.output[0], None, "MOE002", f"already a {node.op_type} node")


def reaches_fused(index: Index, router: Router) -> bool:
    """Whether the logits, and not only what they do to hidden states, come to a fused node."""
    cone = cone_of(index, router.hidden, router.logits, min(len(index), router.node + _MOST_NODES))
    return any(index.op(i) in FUSED for name in cone.routed if name not in cone.hidden for i in index.consumers(name))
