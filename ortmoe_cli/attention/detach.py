"""Sizes that the rest of the graph reads off a block's inner tensors.

`Shape` of repeated keys, of scores or of the cache would keep the old computation alive, or close a cycle (a mask that
is cut to the length of the keys it masks). The island gives these sizes instead, computed from its own inputs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ortmoe_cli.attention.anchor import is_data
from ortmoe_cli.attention.block import Block
from ortmoe_cli.attention.lengths import Length, formula
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe


@dataclass(frozen=True)
class InnerSize:
    """A Shape or Size node inside a block: its output and the lengths that make it up (multiplied, for Size)."""

    output: str
    lengths: tuple[Length, ...]
    is_product: bool = False


def inner_nodes(index: Index, probe: Probe, block: Block) -> frozenset[int]:
    """The nodes that compute the merged heads and the caches from the operator's inputs: they become superfluous."""
    heads = block.heads
    stops = {heads.query.tensor, heads.key.tensor, heads.value.tensor}
    stack = [block.merged.tensor]
    for cache in (heads.key_cache, heads.value_cache):
        if cache is not None:
            stops.add(cache.past.tensor)
            stack.append(cache.present.tensor)
    found: set[int] = set()
    while stack:
        name = stack.pop()
        i = index.producer(name)
        if i is None or i in found or name in stops or not is_data(index, probe, name):
            continue
        found.add(i)
        stack.extend(index.inputs(i))
    return frozenset(found)


def inner_sizes(
    index: Index, block: Block, nodes: frozenset[int], probes: Sequence[Probe], taken: Collection[str]
) -> list[InnerSize]:
    """The sizes of inner tensors that are read anywhere, can be given by a formula and are not `taken`."""
    found = []
    for i in sorted(nodes):
        for tensor in index.outputs(i):
            readers = [
                r
                for r in index.consumers(tensor)
                if index.op(r) in ("Shape", "Size") and index.outputs(r)[0] not in taken
            ]
            lengths = formula(tensor, probes) if readers and tensor != block.merged.tensor else None
            for reader in readers if lengths else ():
                size = _inner_size(index, reader, lengths or ())
                if size.lengths:
                    found.append(size)
    return found


def _inner_size(index: Index, reader: int, lengths: tuple[Length, ...]) -> InnerSize:
    if index.op(reader) == "Size":
        return InnerSize(index.outputs(reader)[0], lengths, is_product=True)
    start, end = index.attribute(reader, "start", 0), index.attribute(reader, "end", None)
    return InnerSize(index.outputs(reader)[0], lengths[start:end])
