"""What a policy asks of a model, read off its graph: fused nodes, stored experts, assumptions."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from onnx import GraphProto, NodeProto

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.order import subgraphs
from ortmoe_cli.outcome import ASSUMED_KEY

FUSED: Mapping[str, str] = {
    "moe": "com.microsoft.MoE",
    "qmoe": "com.microsoft.QMoE",
    "gqa": "com.microsoft.GroupQueryAttention",
}
"""The fused operators, by the name that a policy gives them."""


def counts(index: Index) -> dict[str, int]:
    """How many fused nodes of each kind the model holds, those in functions and subgraphs too."""
    graph = index.model.proto.graph
    bodies = (node for function in index.model.proto.functions for node in function.node)
    ops = Counter(node.op_type for node in (*_nodes(graph), *bodies) if node.domain == "com.microsoft")
    return {name: ops[op.rpartition(".")[2]] for name, op in FUSED.items()}


def assumed(index: Index) -> tuple[str, ...]:
    """The promises under which the model was fused, from its metadata."""
    props = {entry.key: entry.value for entry in index.model.proto.metadata_props}
    return tuple(filter(None, (name.strip() for name in props.get(ASSUMED_KEY, "").split(","))))


def expert_bits(index: Index) -> dict[int, tuple[int, int | None]]:
    """For each QMoE node, its bits for a weight and its block size (None: one scale for each row)."""
    return {
        i: (int(index.attribute(i, "expert_weight_bits", 4)), index.attribute(i, "block_size"))
        for i in index.nodes_of(FUSED["qmoe"])
    }


def float_expert_bytes(index: Index) -> tuple[int, int]:
    """Bytes of expert weights in floats, and of all expert weights, in the fused nodes."""
    floats = sum(weight_bytes(index, i) for i in index.nodes_of(FUSED["moe"]))
    return floats, floats + sum(weight_bytes(index, i) for i in index.nodes_of(FUSED["qmoe"]))


def weight_bytes(index: Index, i: int) -> int:
    """Bytes of the constants that a node reads."""
    found = 0
    for name in index.inputs(i):
        if name in index.model.weights:
            found += index.model.weights[name].nbytes
        elif name and index.is_constant(name):
            found += 4 * math.prod(index.constant_shape(name) or (0,))
    return found


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for child in subgraphs(node):
            yield from _nodes(child)
