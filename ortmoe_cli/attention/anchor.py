"""Where attention might be: a softmax between two products of data, or an operator that is attention by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from ortmoe_cli.attention.below import find_values
from ortmoe_cli.attention.einsum import Axes, context_axes, score_axes
from ortmoe_cli.attention.line import PRODUCTS, Line, read_line
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_SCORE_OPS = {
    "Add", "Sub", "Mul", "Div", "Tanh", "Where", "Concat", "Cast", "CastLike", "Max", "Min", "Clip", "Reshape",
    "Identity", "Unsqueeze", "Squeeze", "Expand", "Neg", "ReduceMax", "Transpose", "Flatten",
}  # fmt: skip
"""What the scores may pass through on their way to the softmax."""
_REACH = 40
_LENGTHS_INPUT, _SCORES_OUTPUT = 6, 3


@dataclass(frozen=True)
class Anchor:
    """A place that computes attention, by its operands.

    `line` leads from the product of queries and keys to the softmax; it is None for an Attention node, which computes
    everything itself.
    """

    node: int
    query: str
    key: str
    value: str
    context: str
    line: Line | None = None
    key_in_rows: bool = False
    """The key operand is [.., T, D], not transposed."""
    axes: tuple[Axes | None, Axes | None, Axes | None] = (None, None, None)
    """How query, key and value operands are transposed before anything else (for Einsum)."""
    tokens_first: bool = False
    """The context is [B, S, N, D], not [B, N, S, D]."""


def is_data(index: Index, probe: Probe, name: str) -> bool:
    """Whether a tensor depends on hidden states or caches."""
    return bool(name) and not index.is_constant(name) and probe.value(name) is None


def data_inputs(index: Index, probe: Probe, i: int) -> list[str]:
    return [name for name in index.inputs(i) if is_data(index, probe, name)]


def softmax_anchor(index: Index, probe: Probe, far: Sequence[Probe], i: int) -> Anchor | None:
    """The anchor around a Softmax; None if it is no attention (a router, a classifier). Raises Refused.

    `far` are ever longer probes, up to more tokens than any model is given.
    """
    entering = index.inputs(i)[0]
    if not _looks_like_attention(index, i):
        return None
    if not is_data(index, probe, entering):
        raise Refused(
            "GQA107", "the scores do not depend on data: the meaning of the graph's inputs was not understood"
        )
    _one_product_above(index, probe, entering)
    line = read_line(index, probe, far, entering)
    product = line.product
    values, weights = find_values(index, probe, i, bool(line.sinks))
    shape, axis = probe.shape(entering), index.attribute(i, "axis", -1)
    if shape is None:
        raise Refused("GQA107", "the shape of the scores could not be derived")
    rank = len(shape)
    if axis not in (-1, rank - 1):
        raise Refused("GQA111", f"the softmax runs over axis {axis} of {rank}, not over the last one")
    operands = _Operands(index, product, values, weights)
    for node in (product, values):
        flags = [name for name in ("transA", "transBatchA", "transBatchB") if index.attribute(node, name, 0)]
        if flags or (node == values and index.attribute(node, "transB", 0)):
            raise Refused("GQA111", f"a {index.op(node)} of the attention transposes its operands")
    return Anchor(
        i, operands.query, operands.key, operands.value, index.outputs(values)[0], line, operands.key_in_rows,
        operands.axes, operands.tokens_first,
    )  # fmt: skip


class _Operands:
    """Queries, keys and values of the two products."""

    def __init__(self, index: Index, product: int, values: int, weights: str) -> None:
        self.query, self.key = index.inputs(product)[:2]
        self.key_in_rows = bool(index.attribute(product, "transB", 0))
        self.tokens_first = False
        query_axes = key_axes = value_axes = None
        if index.op(product) == "Einsum":
            scores = score_axes(index.attribute(product, "equation", ""))
            self.query, self.key = (index.inputs(product)[k] for k in (scores.query_input, 1 - scores.query_input))
            query_axes, key_axes, self.key_in_rows = scores.query, scores.key, True
        place = index.inputs(values).index(weights)
        self.value = index.inputs(values)[1 - place]
        if index.op(values) == "Einsum":
            context = context_axes(index.attribute(values, "equation", ""), place)
            value_axes, self.tokens_first = context.value, context.tokens_first
        elif place != 0:
            raise Refused("GQA111", "the attention weights are the right-hand side of the product with the values")
        self.axes = (query_axes, key_axes, value_axes)


def attention_anchor(index: Index, i: int) -> Anchor:
    """The anchor of an Attention node of opset 23 and later. Raises Refused."""
    inputs, outputs = index.inputs(i), index.outputs(i)
    if len(inputs) > _LENGTHS_INPUT and inputs[_LENGTHS_INPUT]:
        raise Refused("GQA112", "an Attention node that is told the length of every sequence (nonpad_kv_seqlen)")
    if len(outputs) > _SCORES_OUTPUT and outputs[_SCORES_OUTPUT] and index.consumers(outputs[_SCORES_OUTPUT]):
        raise Refused("GQA112", "an Attention node whose scores are read (qk_matmul_output)")
    query, key, value = index.inputs(i)[:3]
    return Anchor(i, query, key, value, index.outputs(i)[0], key_in_rows=True)


def _looks_like_attention(index: Index, i: int) -> bool:
    """Whether products of data stand close above and below, whatever lies between. Projections bound the search."""
    above = _search(index, [index.inputs(i)[0]], upwards=True)
    return above and _search(index, [index.outputs(i)[0]], upwards=False)


def _search(index: Index, starts: Sequence[str], upwards: bool) -> bool:
    stack, seen = list(starts), set(starts)
    for _ in range(_REACH):
        if not stack:
            return False
        tensor = stack.pop(0)
        producer = index.producer(tensor)
        nodes = index.consumers(tensor) if not upwards else () if producer is None else (producer,)
        for node in nodes:
            data = [name for name in index.inputs(node) if name and not index.is_constant(name)]
            if index.op(node) in PRODUCTS:
                if len(data) == 2:
                    return True
                continue
            onwards = data if upwards else [name for name in index.outputs(node) if name]
            if index.op(node) in ("Shape", "Size", "Gemm", "Conv", "TopK", "Softmax"):
                continue
            stack += [name for name in onwards if name not in seen]
            seen.update(onwards)
    return False


def _one_product_above(index: Index, probe: Probe, tensor: str) -> None:
    """Refuse scores that come from several products, or a mask that is computed from data."""
    products: set[int] = set()
    seen: set[int] = set()
    odd: set[str] = set()
    stack = [tensor]
    while stack:
        i = index.producer(stack.pop())
        if i is None or i in seen:
            continue
        data = data_inputs(index, probe, i)
        if index.op(i) in PRODUCTS:
            products.add(i)
            if len(data) != 2:
                odd.add(index.op(i))
            continue
        if index.op(i) not in _SCORE_OPS:
            odd.add(index.op(i))
            continue
        seen.add(i)
        stack.extend(data)
    if len(products) == 1 and odd:
        raise Refused("GQA105", f"the mask depends on data: it is computed by {', '.join(sorted(odd))}")
    if odd:
        raise Refused("GQA108", f"{', '.join(sorted(odd))} between the scores and the softmax is not recognised")
    if len(products) != 1:
        raise Refused("GQA108", f"the scores are a sum of {len(products)} products (relative positions?), not one")
