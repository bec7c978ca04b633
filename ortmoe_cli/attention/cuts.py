"""What an island drops may depend on sizes and constants alone, and must hold every token, at every size."""

from collections.abc import Collection, Sequence

from ortmoe_cli.attention.anchor import is_data
from ortmoe_cli.attention.block import Block, Core
from ortmoe_cli.attention.layout import Layout
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Probe


def refuse_dropped_inputs(index: Index, probe: Probe, block: Block, region: Collection[int]) -> None:
    """Refuse a block of which a dropped node reads an input of the graph (a mask, a flag), unless it is the mask."""
    carried: set[str] = set()
    if block.anchor.line is not None:
        carried = {term.tensor for term in block.anchor.line.terms}
    elif len(index.inputs(block.anchor.node)) > 3:
        carried = {index.inputs(block.anchor.node)[3]}
    for i in sorted(region):
        for name in index.inputs(i):
            if not name or name in carried or is_data(index, probe, name):
                continue
            if probe.origin(name) is not Origin.NONE:
                raise Refused("GQA108", f"{index.op(i)} inside the attention depends on an input, through '{name}'")


def refuse_cut_tokens(block: Block, probes: Sequence[Probe]) -> None:
    """Refuse queries, keys, values or caches that lose tokens at some of these probes."""
    heads = block.heads
    first = _tokens(probes[0], heads.query)
    extra = 0 if first is None else first - probes[0].sizes.new  # the sequence of a decoder beside an encoder
    for probe in probes:
        sizes = probe.sizes
        new = sizes.new + extra
        wanted = [(heads.query, new, "queries"), (heads.key, new, "keys"), (heads.value, new, "values")]
        for cache, what in ((heads.key_cache, "keys"), (heads.value_cache, "values")):
            if cache is not None:
                wanted.append((cache.past, sizes.past, f"old {what}"))
                wanted.append((cache.present, sizes.past + new, f"old and new {what}"))
        for core, tokens, what in wanted:
            found = _tokens(probe, core)
            if found is None and probe is not probes[0] and _tokens(probe, heads.query) is None:
                continue  # the graph is not made for so many tokens: a table of positions ends before
            if found != tokens:
                where = f"with {new} new and {sizes.past} old tokens"
                raise Refused("GQA113", f"{where}, there are {found} {what} instead of {tokens}")


def _tokens(probe: Probe, core: Core) -> int | None:
    shape = probe.shape(core.tensor)
    if shape is None:
        return None
    if core.layout is Layout.RW:
        return shape[0] // probe.sizes.batch
    return shape[-2] if core.layout is Layout.BNLD else shape[1]
