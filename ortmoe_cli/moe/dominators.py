"""Post-dominators: the nodes that everything computed from a tensor has to pass on its way out of the model."""

from collections.abc import Collection, Iterator

import numpy as np

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
        nodes = np.arange(len(index))
        made, counts = index.made_by(nodes)
        makers = np.repeat(nodes, counts)
        readers, reads = index.readers_of(made)
        sources = np.repeat(makers, reads)
        ways_out = index.ids(index.graph_outputs if outputs is None else outputs)
        leaves = makers[(reads == 0) & np.isin(made, ways_out)]
        use = ~np.isin(index.ops_of(readers), index.op_numbers(*_SHAPE_OPS))
        sources = np.concatenate([sources[use], leaves])
        targets = np.concatenate([readers[use], np.full(len(leaves), len(index))])
        order = np.argsort(sources, kind="stable")
        ends = np.searchsorted(sources[order], np.arange(len(index) + 1))
        self._parent = np.array(_tree(targets[order].tolist(), ends.tolist()), np.int32)

    def chain(self, tensor: str) -> Iterator[int]:
        """The post-dominators of a tensor's producer, nearest first."""
        producer = self._index.producer(tensor)
        end = len(self._index)
        node = end if producer is None else int(self._parent[producer])
        while 0 <= node < end:
            yield node
            node = int(self._parent[node])


def _tree(successors: list[int], ends: list[int]) -> list[int]:
    """The parent of each node; -1 where there is no way out."""
    end = len(ends) - 1
    parent, depth = [-1] * end + [end], [0] * (end + 1)
    for i in range(end - 1, -1, -1):
        common = -1
        for after in successors[ends[i] : ends[i + 1]]:
            if parent[after] < 0 or after == common:
                continue
            if common < 0:
                common = after
                continue
            while common != after:  # to the nearest node above both
                if depth[common] < depth[after]:
                    common, after = after, common  # noqa: PLW2901
                common = parent[common]
        if common >= 0:
            parent[i], depth[i] = common, depth[common] + 1
    return parent
