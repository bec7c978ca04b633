"""The layer that a block belongs to, by the names around it."""

import re

from ortmoe_cli.graph.index import Index

_PROJECTIONS = ("MatMul", "Gemm", "com.microsoft.MatMulNBits", "com.microsoft.FusedMatMul")
_APPENDS = ("Concat", "Attention")
_NUMBER = re.compile(r"\d+")
_REACH = 80


def layer_of(index: Index, i: int) -> int | None:
    """The layer number in the name of a node, else the one that its projections and what lies between agree on, else
    the only number in the names of its cache."""
    own = index.layer_of(i)
    if own is not None:
        return own
    around = _around(index, i)
    named = index.layer_of(*around)
    return named if named is not None else _number_of_cache(index, around)


def _number_of_cache(index: Index, nodes: list[int]) -> int | None:
    names = {n for i in nodes if index.op(i) in _APPENDS for n in index.inputs(i) if n in index.graph_inputs}
    numbers = {tuple(_NUMBER.findall(name)) for name in names}
    if len(numbers) != 1 or len(found := numbers.pop()) != 1:
        return None
    return int(found[0])


def _around(index: Index, i: int) -> list[int]:
    """The nodes from the projections of queries, keys and values to that of the context."""
    found, queue = {i}, [i]
    for node in queue:  # grows as it is read
        if node != i and index.op(node) in _PROJECTIONS and any(index.is_constant(n) for n in index.inputs(node)):
            continue
        above = [index.producer(name) for name in index.inputs(node) if name and not index.is_constant(name)]
        below = [reader for name in index.outputs(node) for reader in index.consumers(name)]
        for near in (*above, *below):
            if (
                near is not None
                and near not in found
                and len(found) < _REACH
                and index.op(near) not in ("Shape", "Size")
            ):
                found.add(near)
                queue.append(near)
    return sorted(found)
