"""The launch model: how many nodes of a run start kernels, and how many experts it reads, from the graph alone.

A fused node counts as one launch although its kernel starts several; the profile of `bench` counts the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnx import NodeProto

from ortmoe_cli.engine.inspect import Inspection
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Weight, tensor_bytes
from ortmoe_cli.graph.order import subgraphs
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Already, Fusion
from ortmoe_cli.report.model import Launches
from ortmoe_cli.runtime.capture import host_side, live

_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape", "Size", "Constant"}
"""Operators that start no kernel: their result is their input under another shape, or known to the host."""


def model_launches(found: Inspection, tokens: Sequence[int]) -> tuple[Launches, ...]:
    """The launch model for each number of new tokens. Loops count once: how often they turn is not in the graph."""
    if not tokens:
        return ()
    before, after = launches(found.index), launches(_fused(found))
    experts = list(_experts(found))
    rows = []
    for count in tokens:
        touched = [each * expected_share(count, each, chosen) for each, chosen, _ in experts]
        active = sum(size * used / each for used, (each, _, size) in zip(touched, experts, strict=True))
        total = sum(each for each, _, _ in experts), sum(size for _, _, size in experts)
        rows.append(Launches(count, before, after, round(sum(touched), 1), total[0], round(active), total[1]))
    return tuple(rows)


def expected_share(tokens: int, experts: int, chosen: int) -> float:
    """The share of E experts that T tokens use, when each chooses k of them evenly."""
    return 1.0 - (1.0 - min(chosen, experts) / experts) ** tokens


def launches(index: Index) -> int:
    """Nodes that start a kernel: not views, not constants, not shape arithmetic on the host."""
    host = host_side(index, {}, False)
    return sum(
        1 + sum(_inner(index.node(i))) for i in live(index) if index.op(i) not in _VIEWS and i not in host.arithmetic
    )


def _inner(node: NodeProto) -> Iterator[int]:
    """Launches of the bodies in a node: all of a loop's, once."""
    for graph in subgraphs(node):
        for child in graph.node:
            if child.op_type not in _VIEWS:
                yield 1 + sum(_inner(child))


def _fused(found: Inspection) -> Index:
    """The graph as it would be after fusing."""
    proto = splice(found.model, [fusion.island for fusion in found.fusions])
    weights = {
        tensor.name: found.model.weights.get(tensor.name)
        or Weight(tensor.name, tensor.data_type, tuple(tensor.dims), None, False)
        for tensor in proto.graph.initializer
    }
    for packed in (weight for fusion in found.fusions for weight in fusion.weights):
        weights[packed.name] = Weight(packed.name, packed.elem_type, packed.shape, None, False)
    return Index(replace(found.model, proto=proto, weights=weights))


def _experts(found: Inspection) -> Iterator[tuple[int, int, int]]:
    """(E, k, bytes of all experts) of every block that is or can be fused."""
    for outcome in found.outcomes:
        if outcome.kind != "moe" or not isinstance(outcome, Fusion | Already):
            continue
        experts, chosen = outcome.facts.get("E"), outcome.facts.get("k")
        if not isinstance(experts, int) or not isinstance(chosen, int) or experts < 1:
            continue
        if isinstance(outcome, Fusion):
            size = sum(tensor_bytes(weight.elem_type, weight.shape) for weight in outcome.weights)
        else:
            size = _read_by(found.index, outcome.name)
        yield experts, chosen, size


def _read_by(index: Index, name: str) -> int:
    """Bytes of the initializers of a fused node."""
    for i in index.nodes_of("com.microsoft.MoE", "com.microsoft.QMoE"):
        if name in (index.node(i).name, *index.outputs(i)):
            return sum(index.model.weights[read].nbytes for read in index.inputs(i) if read in index.model.weights)
    return 0
