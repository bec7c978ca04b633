"""Long, lopsided probes: what shows only when many tokens want the same expert."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.bench import Bench
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.thresholds import places

Array = NDArray[Any]

_USUAL = 512
_LEAST = 64
_MOST = 8192
_OPERATIONS = 8e9
"""Multiplications that a long probe may cost."""


def longest(index: Index, bench: Bench, block: Block) -> int:
    """Tokens of the skewed probe: well past any number that positions or counts are compared with, as far as time
    allows."""
    experts = block.experts
    usual = {len(experts.members), block.source.chosen, block.width, experts.inner, 2 * experts.inner}
    limits = [0, *places(index, bench.cutter, block.cone, block.region.nodes, usual, _MOST // 2)]
    wanted = max(_USUAL, 2 * max(limits))
    per_token = 3 * block.width * experts.inner * len(experts.members)  # some forms compute every expert
    affordable = max(_LEAST, int(_OPERATIONS / per_token))
    return max(min(wanted, affordable), min(2 * max(limits), _MOST))


def unequal_routing(index: Index, bench: Bench, block: Block, logits: Array, few: int) -> float | None:
    """For blocks that copy weights for every token, so that no long probe fits into memory: is the routing of a token
    the same among many as among few?

    Compares everything that the logits alone decide, between all tokens and the last `few` of them. What holds hidden
    states besides is the same by then, whatever the number of tokens. None if the tensors cannot be cut by token.
    """
    names = _decided(index, block)
    total = len(logits)
    try:
        whole = _routing(bench, block, names, logits)
        part = _routing(bench, block, names, logits[-few:])
    except CutError:
        return None
    worst = 0.0
    for name in names:
        a, b = whole[name], part[name]
        if a.size % total or b.size != a.size // total * few:
            if a.dtype.kind in "iu" and a.size <= 8:
                continue  # a shape
            return None
        a = a.reshape(total, -1)[-few:].astype(np.float64)
        b = b.reshape(few, -1).astype(np.float64)
        worst = max(worst, float(np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0.0)))
    return worst


def _routing(bench: Bench, block: Block, names: list[str], logits: Array) -> dict[str, Array]:
    setting = bench.setting(1, len(logits), block.region.outside)
    if setting.tokens != len(logits):
        raise CutError("run", "the graph fixes the number of tokens")
    return bench.run(setting, names, np.zeros((len(logits), block.width), np.float32), logits)


def _decided(index: Index, block: Block) -> list[str]:
    """Tensors that the logits alone decide, read where weights are picked or hidden states come in."""
    cone = block.cone
    heavy = {m.tensor for e in block.experts.members for m in (*e.first, e.down)}
    heavy |= {v.tensor for e in block.experts.members for v in (*e.first_bias, e.down_bias) if v}
    found: dict[str, None] = {}
    for i in block.region.nodes:
        reads = index.reads(i)
        picks = any(name in heavy for name in reads)
        if picks:
            heavy.update(index.outputs(i))
        if picks or any(name in cone.hidden for name in index.outputs(i)):
            for name in reads:
                if name in cone.routed and name not in cone.hidden and name not in heavy:
                    found[name] = None
    return list(found)
