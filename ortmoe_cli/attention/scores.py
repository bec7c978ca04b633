"""How scores become weights: scale, softcap, sinks and bias, read off the softmax input under chosen queries.

With queries of zero the softmax input *is* the bias, whatever formula made it. Small queries give the scale, huge ones
the softcap.
"""

from dataclasses import dataclass

import numpy as np

from ortmoe_cli.attention.anchor import Anchor
from ortmoe_cli.attention.block import Core, Heads, Scoring
from ortmoe_cli.attention.fixed import BLOCKED
from ortmoe_cli.attention.layout import Layout, arranged, heads_first
from ortmoe_cli.attention.reference import future
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Probe

_HUGE = 1e7
_SATURATED = 0.5
"""Scores that stay below this part of what they should be are capped."""
_SMALL = 1e-3
"""Part of the softcap at which tanh is still linear to 1e-6."""
_LINEAR = 1e-4
_NICE = 1e-5
_INSIDE = 0.1
_ELEMENTS = 1 << 24
_RANK = 4
_PAST_INPUT = 4


@dataclass(frozen=True)
class Bias:
    """What is added to the scores, [B, H, S, T], and the kinds of inputs that it was computed from.

    `shape` is that of the numbers before they were repeated for all sequences, heads and tokens.
    """

    values: np.ndarray
    origin: Origin
    shape: tuple[int, ...] = ()

    @property
    def open(self) -> np.ndarray:
        """[B, H, S, T] bool: which keys are seen."""
        return np.asarray(self.values > BLOCKED)


def noise(probe: Probe, core: Core, heads: Heads, seed: int) -> np.ndarray:
    """Random heads [B, N, L, D] for a core at this probe. Raises Refused."""
    shape = probe.shape(core.tensor)
    if shape is None:
        raise Refused("GQA107", f"the shape of '{core.tensor}' could not be derived at {_described(probe)}")
    if 0 in shape:
        raise Refused("GQA107", f"'{core.tensor}' is empty at {_described(probe)}")
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    seen = heads_first(array, core.layout, probe.sizes.batch, heads.size)
    if seen is None:
        raise Refused("GQA111", f"'{core.tensor}' changes its layout with the sizes")
    return seen


def place(probe: Probe, core: Core, values: np.ndarray) -> np.ndarray:
    """Heads [B, N, L, D] in the layout of the core's tensor."""
    shape = probe.shape(core.tensor)
    array = arranged(values, core.layout)
    return np.asarray(array if shape is None else array.reshape(shape))


def find_scoring(index: Index, probe: Probe, anchor: Anchor, heads: Heads) -> Scoring:
    """Scale, softcap and sinks of a block. Raises Refused."""
    if anchor.line is None:
        scale = float(index.attribute(anchor.node, "scale", 0.0)) or 1 / np.sqrt(heads.size)
        factor = heads.query.factor * heads.all_keys.factor
        return Scoring(scale * factor, float(index.attribute(anchor.node, "softcap", 0.0)))
    biased = anchor.line.biased
    bias = find_bias(index, probe, anchor, heads)
    queries, keys = noise(probe, heads.query, heads, 1), noise(probe, heads.all_keys, heads, 2)
    products = queries.astype(np.float64) @ np.repeat(keys, heads.heads // heads.kv_heads, 1).swapaxes(-1, -2)
    clear = bias.open & (np.abs(products) > _INSIDE * np.abs(products).max())
    if not clear.any():
        raise Refused("GQA107", f"no query sees a key at {_described(probe)}")

    def ratio(amplitude: float) -> np.ndarray:
        """Softmax input over amplitude · q·k, where keys are seen."""
        scores = _scores(probe, biased, heads, queries * np.float32(amplitude), keys)
        return np.asarray((scores[clear] - bias.values[clear]) / (amplitude * products[clear]))

    typical = float(np.median(ratio(1e-2)))
    if not np.isfinite(typical) or typical == 0:
        raise Refused("GQA108", "the softmax input does not grow with the product of queries and keys")
    softcap = 0.0
    if np.abs(np.median(ratio(_HUGE))) < _SATURATED * abs(typical):
        softcap = float(np.abs(ratio(_HUGE) * _HUGE * products[clear]).max())
    amplitude = _SMALL * softcap / (abs(typical) * np.abs(products).max()) if softcap else 1.0
    ratios = ratio(amplitude)
    scale = float(np.median(ratios))
    if np.abs(ratios - scale).max() > _LINEAR * abs(scale) * max(1.0, _noise_floor(bias, amplitude * scale)):
        raise Refused(
            "GQA108",
            f"the softmax input is not proportional to the product of queries and keys "
            f"(off by {np.abs(ratios - scale).max() / abs(scale):.1e})",
        )
    return Scoring(_nice(scale, heads.size), softcap, _sinks(probe, anchor.line.sinks, heads.heads))


def _scores(probe: Probe, biased: str, heads: Heads, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The scores [B, H, S, T] before sinks and softmax, for given queries and keys."""
    cores = ((heads.query, queries), (heads.all_keys, keys))
    scores = probe.given({core.tensor: place(probe, core, array) for core, array in cores}).value(biased)
    if scores is None:
        raise Refused("GQA107", f"the scores could not be evaluated at {_described(probe)}")
    shape = (queries.shape[0], heads.heads, queries.shape[2], keys.shape[2])
    if scores.size != np.prod(shape):
        raise Refused("GQA111", f"scores {list(scores.shape)} for {heads.heads} heads")
    return scores.reshape(shape)


def _sinks(probe: Probe, name: str, heads: int) -> np.ndarray | None:
    """The sinks [H] that join the scores as one more column."""
    if not name:
        return None
    value = probe.value(name)
    if value is None or value.ndim < _RANK or value.shape[-1] != 1 or value.shape[-3] not in (1, heads):
        raise Refused("GQA108", "the additional column of the softmax is not one number per head")
    numbers = np.broadcast_to(value.reshape(-1, *value.shape[-3:]), (int(np.prod(value.shape[:-3])), heads,
                                                                    *value.shape[-2:]))  # fmt: skip
    sinks = numbers[0, :, 0, 0]
    if np.abs(numbers - sinks[None, :, None, None]).max() > 0:
        raise Refused("GQA108", "the additional column of the softmax is not one number per head")
    return np.array(sinks)


def find_bias(index: Index, probe: Probe, anchor: Anchor, heads: Heads) -> Bias:
    """The bias at this probe: the scores of a product that is zero. Raises Refused."""
    if anchor.line is None:
        return _attention_bias(index, probe, anchor, heads)
    line = anchor.line
    product = index.outputs(line.product)[0]
    shape = probe.shape(product)
    if shape is None or 0 in shape:
        raise Refused("GQA107", f"the shape of the scores could not be derived at {_described(probe)}")
    wanted = (probe.sizes.batch, heads.heads, tokens_of(probe, heads.query, heads), shape[-1])
    alone = line.plain_shape and shape == wanted
    if not alone and np.prod(shape) > _ELEMENTS:
        raise Refused("GQA107", f"the scores are too large to evaluate at {_described(probe)}")
    given = probe.given({product: np.zeros((1,) * _RANK if alone else shape, np.float32)})
    values = given.value(line.biased)
    if values is None:
        raise Refused("GQA107", f"the scores could not be evaluated at {_described(probe)}")
    try:
        whole = np.broadcast_to(values, wanted) if alone else values.reshape(wanted)
    except ValueError as error:
        raise Refused("GQA111", f"scores {list(values.shape)} for {heads.heads} heads") from error
    return Bias(whole, given.origin(line.biased), values.shape if alone else wanted)


def tokens_of(probe: Probe, core: Core, heads: Heads) -> int:
    """How many tokens a core holds at this probe. Raises Refused."""
    shape = probe.shape(core.tensor)
    seen = None
    if shape is not None:
        seen = heads_first(np.broadcast_to(np.float32(0), shape), core.layout, probe.sizes.batch, heads.size)
    if seen is None:
        raise Refused("GQA107", f"the shape of '{core.tensor}' could not be derived")
    return int(seen.shape[2])


def _attention_bias(index: Index, probe: Probe, anchor: Anchor, heads: Heads) -> Bias:
    """The bias of an Attention node: its mask, and the causal one that it may bring along."""
    new, cache = tokens_of(probe, heads.query, heads), heads.key_cache
    past = 0 if cache is None else noise_tokens(probe, cache.past)
    total = past + tokens_of(probe, heads.key, heads)
    shape = (probe.sizes.batch, heads.heads, new, total)
    values, origin = np.zeros(shape, np.float32), Origin.NONE
    if index.attribute(anchor.node, "is_causal", 0):
        offset = past if joins_cache(index, anchor) else 0
        hidden = np.arange(total)[None] > np.arange(new)[:, None] + offset
        values = values + np.where(hidden, -np.inf, 0).astype(np.float32)
    mask_name = attention_mask(index, anchor)
    if mask_name:
        mask = probe.value(mask_name)
        if mask is None:
            raise Refused("GQA105", f"the mask '{mask_name}' depends on data")
        origin = probe.origin(mask_name)
        added = np.where(mask, 0, -np.inf).astype(np.float32) if mask.dtype == bool else mask
        if mask.shape[-1] != total:
            raise Refused("GQA105", f"a mask of {mask.shape[-1]} columns for {total} keys")
        values = values + np.broadcast_to(added, shape)
    return Bias(values, origin, shape)


def joins_cache(index: Index, anchor: Anchor) -> bool:
    """Whether an Attention node appends to the cache itself; then its causality counts from the end."""
    inputs = index.inputs(anchor.node)
    return len(inputs) > _PAST_INPUT and bool(inputs[_PAST_INPUT])


def noise_tokens(probe: Probe, core: Core) -> int:
    """How many tokens a cache holds at this probe."""
    shape = probe.shape(core.tensor)
    if shape is None or len(shape) != 4:
        raise Refused("GQA107", f"the shape of the cache '{core.tensor}' could not be derived")
    return shape[2 if core.layout is Layout.BNLD else 1]


def attention_mask(index: Index, anchor: Anchor) -> str:
    """The mask input of an Attention node, '' if it has none."""
    inputs = index.inputs(anchor.node)
    return inputs[3] if len(inputs) > 3 else ""


def is_causal(bias: Bias) -> bool:
    """Whether the bias blocks exactly the future."""
    hidden, seen = future(*bias.values.shape[-2:]), bias.open
    return bool((seen == ~hidden).all() and not np.where(seen, bias.values, 0).any())


def _noise_floor(bias: Bias, typical_score: float) -> float:
    """How much rounding a bias adds to scores, in units of the tolerance: large biases hide small scores."""
    largest = np.abs(np.where(bias.open, bias.values, 0)).max()
    return float(largest / max(abs(typical_score), 1e-9) * 1e-2)


def _nice(scale: float, size: int) -> float:
    """The number that was meant by a measured scale: 1/√D or a power of two, if it is one."""
    for meant in (size**-0.5, 2.0 ** round(np.log2(abs(scale))) * np.sign(scale)):
        if abs(scale - meant) <= _NICE * abs(meant):
            return float(meant)
    return scale


def _described(probe: Probe) -> str:
    sizes = probe.sizes
    return f"batch {sizes.batch}, {sizes.new} new and {sizes.past} old tokens"
