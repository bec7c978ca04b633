"""Post-dominators: the nodes that everything computed from a tensor has to pass on its way out of the model."""

from collections.abc import Collection, Iterator

from ortmoe_cli.graph.index import Index

_SHAPE_OPS = ("Shape", "Size")


class PostDominators:
    """The post-dominator tree of a graph, by one pass from the end (the nodes of an ONNX graph are sorted).

    Edges into Shape and Size do not count: layers share shapes. A graph output that the graph also reads (router
    logits, hidden states handed out on the side) is no way out, unless no other remains. With `outputs`, only these
    are ways out at all.
    """

    def __init__(self, index: Index, outputs: Collection[str] | None = None) -> None:
        self._index = index
        ways_out = set(index.graph_outputs if outputs is None else outputs)
        end = len(index)
        self._parent: list[int] = [-1] * end + [end]
        depth = [0] * (end + 1)
        for i in range(end - 1, -1, -1):
            common = -1
            for after in self._successors(i, ways_out):
                if self._parent[after] >= 0:
                    common = after if common < 0 else self._meet(common, after, depth)
            if common >= 0:
                self._parent[i], depth[i] = common, depth[common] + 1

    def _meet(self, a: int, b: int, depth: list[int]) -> int:
        """The nearest node above both in the tree."""
        while a != b:
            if depth[a] < depth[b]:
                a, b = b, a
            a = self._parent[a]
        return a

    def _successors(self, i: int, ways_out: Collection[str]) -> Iterator[int]:
        index = self._index
        for name in index.outputs(i):
            read = False
            for reader in index.consumers(name) if name else ():
                read = True
                if index.op(reader) not in _SHAPE_OPS:
                    yield reader
            if name in ways_out and not read:
                yield len(index)

    def chain(self, tensor: str) -> Iterator[int]:
        """The post-dominators of a tensor's producer, nearest first."""
        node = self._index.producer(tensor)
        end = len(self._index)
        node = end if node is None else self._parent[node]
        while 0 <= node < end:
            yield node
            node = self._parent[node]
