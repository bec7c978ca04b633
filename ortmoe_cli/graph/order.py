"""Orders in which every tensor is made before it is read."""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from onnx import AttributeProto, GraphProto, NodeProto


class CycleError(ValueError):
    """No order exists: some nodes wait for each other. `node` is one of them."""

    def __init__(self, node: NodeProto) -> None:
        super().__init__("the graph has a cycle")
        self.node = node


def topological(nodes: Sequence[NodeProto], old: int | None = None) -> list[NodeProto]:
    """The nodes so that everything is made before it is read. Raises CycleError.

    The first `old` nodes keep their order as far as that allows; each later one goes right behind its last input.
    By default all count as old.
    """
    old = len(nodes) if old is None else old
    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    readers: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for i, node in enumerate(nodes):
        for j in {producer[name] for name in reads_of(node) if name in producer}:
            readers[j].append(i)
            waiting[i] += 1
    ready = [(i if i < old else -1, i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        place, i = heapq.heappop(ready)
        ordered.append(nodes[i])
        for j in readers[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (j if j < old else place, j))
    if len(ordered) != len(nodes):
        raise CycleError(next(node for node, count in zip(nodes, waiting, strict=True) if count))
    return ordered


def reads_of(node: NodeProto) -> Iterable[str]:
    """Every tensor that a node needs: its inputs and what its subgraphs capture."""
    return (*(name for name in node.input if name), *captures(node))


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node holds in its attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def captures(node: NodeProto) -> tuple[str, ...]:
    """The outer tensors that a node's subgraphs read, in order, without repeats."""
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        inner = {i.name for i in graph.input} | {t.name for t in graph.initializer}
        for child in graph.node:
            for name in (*child.input, *captures(child)):
                if name and name not in inner:
                    found[name] = None
            inner.update(child.output)
        for output in graph.output:
            if output.name not in inner:
                found[output.name] = None
    return tuple(found)
