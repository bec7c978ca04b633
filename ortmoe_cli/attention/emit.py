"""Builds the GroupQueryAttention that takes a block's place, in the form that changes nothing ('safe').

Rotation stays outside, keys enter the cache as they did, and the mask that the graph computes goes in as a bias: exact
for any padding. `seqlens_k` says T-1 for every sequence, so the operator's own causality counts from the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from ortmoe_cli.attention.block import Block, Cache, Core
from ortmoe_cli.attention.carrier import Carrier
from ortmoe_cli.attention.detach import InnerSize
from ortmoe_cli.attention.layout import Layout
from ortmoe_cli.attention.lengths import Length, Unit
from ortmoe_cli.attention.line import Line
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island, IslandBuilder

_LOWEST: dict[int, float] = {
    TensorProto.FLOAT: float(np.finfo(np.float32).min),
    TensorProto.FLOAT16: float(np.finfo(np.float16).min),
    TensorProto.BFLOAT16: -3.3895313892515355e38,
    TensorProto.DOUBLE: float(np.finfo(np.float64).min),
}
"""The lowest finite number of each type: minus infinity would give nan in rows where every key is blocked."""
ELEMENT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""What GroupQueryAttention computes in."""
_SHAPE_SLICES_SINCE = 15
_AXES_ARE_INPUTS_SINCE = 13


@dataclass(frozen=True)
class Plan:
    """Everything that decides what is emitted."""

    block: Block
    carrier: Carrier
    sizes: Sequence[InnerSize]
    tokens: str | None
    """A graph input that is [B, S] as the queries are: layers that read their sizes there share these nodes."""
    taken: frozenset[str] = frozenset()
    """Tensors that other islands give already: layers may share a cache."""


def emit(index: Index, plan: Plan) -> Island:
    """The island of a plan."""
    return _Emitter(index, plan).build()


class _Emitter:
    def __init__(self, index: Index, plan: Plan) -> None:
        self._index, self._plan, self._block = index, plan, plan.block
        self._builder = IslandBuilder(plan.block.name, index.opset)
        self._type = index.elem_type(plan.block.heads.all_keys.tensor)
        self._units: dict[Unit, str] = {}

    def build(self) -> Island:
        heads, scoring, builder = self._block.heads, self._block.scoring, self._builder
        attributes: dict[str, int | float] = {
            "num_heads": heads.heads, "kv_num_heads": heads.kv_heads, "scale": float(np.float32(scoring.scale)),
        }  # fmt: skip
        if scoring.softcap:
            attributes["softcap"] = float(np.float32(scoring.softcap))
        inputs = [
            *(self._side_by_side(core) for core in (heads.query, heads.key, heads.value)),
            self._past(heads.key_cache),
            self._past(heads.value_cache),
            builder.cast(self._last_places(), TensorProto.INT32),
            self._total(),
            "", "", "",
            self._bias(),
            self._sinks(),
        ]  # fmt: skip
        while not inputs[-1]:
            inputs.pop()
        made = builder.op("GroupQueryAttention", inputs, 3, domain="com.microsoft", **attributes)
        builder.produce(self._block.merged.tensor, self._merged(made[0]))
        for cache, present in ((heads.key_cache, made[1]), (heads.value_cache, made[2])):
            if cache is not None and cache.present.tensor not in self._plan.taken:
                builder.produce(cache.present.tensor, self._stored(cache, present))
        for size in self._plan.sizes:
            builder.produce(size.output, self._size(size))
        return builder.build()

    # --- tokens and heads

    def _side_by_side(self, core: Core) -> str:
        """Queries, keys or values as [B, S, N*D] in the operator's type."""
        builder, heads = self._builder, self._block.heads
        count = heads.heads if core is heads.query else heads.kv_heads
        tensor = core.tensor
        if self._index.elem_type(tensor) != self._type:
            tensor = builder.cast(tensor, self._type)
        if core.layout is Layout.BLW:
            return tensor
        if core.layout is Layout.RW:
            return builder.one("Reshape", tensor, self._numbers(self._unit("B"), self._unit("S"), count * heads.size))
        if core.layout is Layout.BNLD:
            if tensor in self._block.stacked:
                rows = self._numbers(self._unit("B"), count, self._unit("S"), heads.size)
                tensor = builder.one("Reshape", tensor, rows)
            tensor = builder.one("Transpose", tensor, perm=[0, 2, 1, 3])
        return builder.one("Reshape", tensor, builder.constant(np.array([0, 0, count * heads.size], np.int64)))

    def _past(self, cache: Cache | None) -> str:
        if cache is None:
            return ""
        if cache.past.layout is Layout.BNLD:
            return cache.past.tensor
        return self._builder.one("Transpose", cache.past.tensor, perm=[0, 2, 1, 3])

    def _stored(self, cache: Cache, present: str) -> str:
        """The cache in the order of dimensions that the graph keeps it in."""
        if cache.present.layout is Layout.BNLD:
            return present
        return self._builder.one("Transpose", present, perm=[0, 2, 1, 3])

    def _merged(self, output: str) -> str:
        """The operator's output [B, S, H*D] as the tensor that it replaces."""
        builder, heads, merged = self._builder, self._block.heads, self._block.merged
        if merged.layout is Layout.RW:
            width = np.array([-1, heads.heads * heads.size], np.int64)
            output = builder.one("Reshape", output, builder.constant(width))
        elif merged.layout is not Layout.BLW:
            split = np.array([0, 0, heads.heads, heads.size], np.int64)
            output = builder.one("Reshape", output, builder.constant(split))
            if merged.layout is Layout.BNLD:
                output = builder.one("Transpose", output, perm=[0, 2, 1, 3])
            if self._block.context is not None:
                output = builder.one("Reshape", output, self._lengths(self._block.context))
        wanted = self._index.elem_type(merged.tensor)
        return output if wanted in (self._type, 0) else builder.cast(output, wanted)

    # --- bias

    def _bias(self) -> str:
        """The mask as [B|1, H|1, S, T] in the operator's type, nothing below its lowest number."""
        carrier, builder = self._plan.carrier, self._builder
        if carrier.kind == "none":
            return ""
        lowest = self._constant(_LOWEST[self._type])
        tensor = self._squeezed(carrier)
        if carrier.kind in ("allow", "block"):
            zero = self._constant(0.0)
            sides = (zero, lowest) if carrier.kind == "allow" else (lowest, zero)
            bias = builder.one("Where", tensor, *sides)
        else:
            bias = tensor if carrier.kind == "add" else self._copied()
            own = self._index.elem_type(carrier.tensor or self._line.biased)
            floor = carrier.floor
            if floor < _LOWEST[self._type] or np.isnan(floor):
                bias = builder.one("Max", bias, builder.constant(_typed(max(_LOWEST[self._type], _LOWEST[own]), own)))
            bias = bias if own == self._type else builder.cast(bias, self._type)
        return (
            bias if carrier.full else builder.one("Expand", bias, self._numbers(1, 1, self._unit("S"), self._unit("T")))
        )

    def _squeezed(self, carrier: Carrier) -> str:
        """The carrier's tensor in rank 4 at most."""
        if not carrier.squeezed:
            return carrier.tensor
        axes = list(range(1, 1 + carrier.squeezed))
        if self._index.opset < _AXES_ARE_INPUTS_SINCE:
            return self._builder.one("Squeeze", carrier.tensor, axes=axes)
        return self._builder.one("Squeeze", carrier.tensor, self._builder.constant(np.array(axes, np.int64)))

    def _copied(self) -> str:
        """The nodes that add to the scores once more, on a product of zeros: what they add."""
        line, builder, index = self._line, self._builder, self._index
        product = index.outputs(line.product)[0]
        names = {size.output: self._size(size) for size in self._plan.sizes}
        names[product] = self._zeros(index.elem_type(product))
        for i in line.nodes:
            node = index.node(i)
            attributes = {a.name: index.attribute(i, a.name) for a in node.attribute}
            inputs = [names.get(name, name) for name in index.inputs(i)]
            made = builder.op(node.op_type, inputs, len(node.output), domain=node.domain, **attributes)
            names |= dict(zip(index.outputs(i), (made,) if isinstance(made, str) else made, strict=True))
        scores = names[line.biased]
        if self._block.product is None:
            return scores
        rows = self._numbers(self._unit("B"), self._block.heads.heads, self._unit("S"), -1)
        return builder.one("Reshape", scores, rows)

    def _zeros(self, elem_type: int) -> str:
        """A product of zeros, as small as the nodes that follow allow."""
        builder = self._builder
        if self._line.plain_shape and self._block.product is None:
            return builder.constant(_typed(0.0, elem_type).reshape(1, 1, 1, 1))
        if self._block.product is not None:
            shape = self._lengths(self._block.product)
        else:
            shape = self._numbers(self._unit("B"), self._block.heads.heads, self._unit("S"), self._unit("T"))
        return builder.one("Expand", builder.constant(_typed(0.0, elem_type)), shape)

    @property
    def _line(self) -> Line:
        assert self._block.anchor.line is not None
        return self._block.anchor.line

    def _sinks(self) -> str:
        sinks = self._block.scoring.sinks
        if sinks is None:
            return ""
        return self._builder.constant(sinks.astype(helper.tensor_dtype_to_np_dtype(self._type)))

    # --- sizes

    def _total(self) -> str:
        """T as int32 [1].

        With fixed dimensions T is known when the runtime loads the model, and the type check of GroupQueryAttention
        then sees through the cast to an int64 and refuses the model. It does not see through a Reshape.
        """
        total = self._builder.cast(self._unit("T"), TensorProto.INT32)
        return self._builder.one("Reshape", total, self._builder.constant(np.array([1], np.int64)))

    def _last_places(self) -> str:
        """T-1 for every sequence, [B]."""
        one = self._builder.constant(np.array([1], np.int64))
        return self._builder.one("Expand", self._builder.one("Sub", self._unit("T"), one), self._unit("B"))

    def _unit(self, unit: Unit) -> str:
        """B, S, P, T or B·S as a tensor of one integer."""
        if unit not in self._units:
            self._units[unit] = self._make_unit(unit)
        return self._units[unit]

    def _make_unit(self, unit: Unit) -> str:
        heads, builder = self._block.heads, self._builder
        if unit in ("B", "S"):
            return self._from_queries(0 if unit == "B" else 1)
        if unit == "P":
            assert heads.key_cache is not None
            return self._dimension(heads.key_cache.past.tensor, 2 if heads.key_cache.past.layout is Layout.BNLD else 1)
        if unit == "T":
            return builder.one("Add", self._unit("P"), self._unit("S")) if heads.key_cache else self._unit("S")
        return builder.one("Mul", self._unit("B"), self._unit("S"))

    def _from_queries(self, which: int) -> str:
        """B (0) or S (1)."""
        if self._plan.tokens is not None:
            return self._dimension(self._plan.tokens, which)
        axes = {Layout.BLW: (0, 1), Layout.BLND: (0, 1), Layout.BNLD: (0, 2)}
        heads = self._block.heads
        for core in (heads.query, heads.key, heads.value):
            if core.layout in axes and core.tensor not in self._block.stacked:
                return self._dimension(core.tensor, axes[core.layout][which])
        raise Refused("GQA111", "neither the graph's inputs nor its heads say how many sequences there are")

    def _dimension(self, tensor: str, axis: int) -> str:
        builder = self._builder
        if self._index.opset >= _SHAPE_SLICES_SINCE:
            return builder.one("Shape", tensor, start=axis, end=axis + 1)
        return builder.one("Gather", builder.one("Shape", tensor), builder.constant(np.array([axis], np.int64)), axis=0)

    def _size(self, size: InnerSize) -> str:
        shape = self._lengths(size.lengths)
        return self._builder.one("ReduceProd", shape, keepdims=0) if size.is_product else shape

    def _lengths(self, lengths: Sequence[Length]) -> str:
        return self._numbers(*(self._length(length) for length in lengths))

    def _length(self, length: Length) -> str | int:
        builder = self._builder
        if length.unit == "1":
            return length.factor
        number = self._unit(length.unit)
        if length.factor != 1:
            number = builder.one("Mul", number, builder.constant(np.array([length.factor], np.int64)))
        if length.offset:
            number = builder.one("Add", number, builder.constant(np.array([length.offset], np.int64)))
        return number

    def _numbers(self, *parts: str | int) -> str:
        """A list of integers, some of them known, some tensors of one integer."""
        builder = self._builder
        names = [p if isinstance(p, str) else builder.constant(np.array([p], np.int64)) for p in parts]
        return names[0] if len(names) == 1 else builder.one("Concat", *names, axis=0)

    def _constant(self, value: float) -> str:
        return self._builder.constant(_typed(value, self._type))


def _typed(value: float, elem_type: int) -> np.ndarray:
    return np.array(value, helper.tensor_dtype_to_np_dtype(elem_type))
