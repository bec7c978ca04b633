"""The replacement of a block: the model's own router, and one MoE node fed with the logarithms of its weights.

The node makes softmax → top-k → division by the sum of the k. Given log w at the chosen experts and a very low number
elsewhere, that is w / Σw, whatever router made w and however it broke ties; Σw is multiplied back after the node. This
also keeps a row right whose weights are all zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island, IslandBuilder
from ortmoe_cli.moe.activation import Activation
from ortmoe_cli.moe.block import Block, RawLogits
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.packing import Plan, plan
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Dense, Pair
from ortmoe_cli.outcome import Fact
from ortmoe_cli.weights.pack import PackedWeight

Array = NDArray[Any]

_FLOAT, _HALF = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)
_FILL = {_FLOAT: -1e30, int(TensorProto.BFLOAT16): -1e30, _HALF: -6e4}
"""The logit of an expert that was not chosen: as good as minus infinity, and finite in each type."""
_TINY = np.array(1e-30, np.float32)
"""Weights below this are treated as this, so that no logarithm is infinite."""
_NUMPY = {
    _FLOAT: np.dtype(np.float32),
    _HALF: np.dtype(np.float16),
    int(TensorProto.BFLOAT16): np.dtype(ml_dtypes.bfloat16),
}
_UNGATED = {"relu": "relu", "silu": "silu", "identity": "identity", "gelu_tanh": "gelu"}


@dataclass(frozen=True)
class Terms:
    """What the report says about a quantised node. code '': as for any fusion."""

    code: str = ""
    message: str = ""
    contract: tuple[str, ...] = ()
    assumes: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """An island, and the packed weights that it reads.

    proof: what is compared with the original in place of a quantised node: the same block with a float one. terms: what
    the report says about it beyond a plain fusion.
    """

    island: Island
    weights: tuple[PackedWeight, ...]
    proof: "Rewrite | None" = None
    terms: Terms = field(default_factory=Terms)


Node = Callable[["Emitter", str, str], str]
"""Adds the node for (x (T,H), logits (T,E)); its result (T,H)."""


def emit(index: Index, block: Block, source: Source, name: str) -> Rewrite:
    """The island that takes the place of a block. Raises Refused where the operator cannot express it."""
    attributes = activation_attributes(block.experts.activation)
    elem_type = _node_type(index, block)
    made = plan(block.experts, source, block.width, elem_type, lambda part: f"{name}/{part}")

    def node(e: Emitter, x: str, logits: str) -> str:
        return e.builder.one(
            "MoE", x, logits, *e.weights(made), domain="com.microsoft", **routing_attributes(block), **attributes
        )

    return Rewrite(build(index, block, name, elem_type, node), tuple(made.weights.values()))


def build(index: Index, block: Block, name: str, elem_type: int, node: Node) -> Island:
    """The island around a node of this type: what feeds it and what is done with its result."""
    builder = IslandBuilder(name, index.opset)
    e = Emitter(index, builder, block, elem_type)
    x = e.typed(e.flat(block.input, block.width), index.elem_type(block.input), elem_type)
    logits, factor = e.routing()
    if block.input_scale:
        x = builder.one("Mul", x, factor)
    y = node(e, x, logits)
    if factor and not block.input_scale:
        y = builder.one("Mul", y, factor)
    builder.produce(block.exit, e.finish(y))
    return builder.build()


def routing_attributes(block: Block) -> Mapping[str, Any]:
    return {"k": block.source.chosen, "normalize_routing_weights": 1}


def activation_attributes(activation: Activation) -> Mapping[str, Any]:
    """The node's attributes for an activation. Raises Refused."""
    if activation.gated and activation.name == "swiglu":
        found = {
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": float(activation.alpha),
            "activation_beta": float(activation.beta),
        }
        return found | ({"swiglu_limit": float(activation.limit)} if np.isfinite(activation.limit) else {})
    if not activation.gated and activation.name in _UNGATED:
        return {"activation_type": _UNGATED[activation.name]}
    raise Refused("MOE105", f"the operator does not offer the activation {activation.describe()}")


def _node_type(index: Index, block: Block) -> int:
    """The type of the node is that of the weights: they are moved, never converted."""
    tensors = {m.tensor for e in block.experts.members for m in (*e.first, e.down)}
    types = {index.elem_type(name) for name in tensors}
    if len(types) != 1 or (found := types.pop()) not in _FILL:
        raise Refused("MOE112", f"expert weights of the types {sorted(types)}")
    return found


@dataclass(frozen=True)
class Emitter:
    index: Index
    builder: IslandBuilder
    block: Block
    elem_type: int

    def numbers(self, *values: int) -> str:
        return self.builder.constant(np.array(values, np.int64))

    def flat(self, tensor: str, width: int) -> str:
        """(…, width) as (T, width)."""
        return self.builder.one("Reshape", tensor, self.numbers(-1, width))

    def typed(self, tensor: str, have: int, want: int) -> str:
        return tensor if have == want else self.builder.cast(tensor, want)

    def sum_of(self, tensor: str) -> str:
        """(T,n) to (T,1)."""
        if self.index.opset >= 13:
            return self.builder.one("ReduceSum", tensor, self.numbers(1), keepdims=1)
        return self.builder.one("ReduceSum", tensor, axes=[1], keepdims=1)

    def largest_of(self, tensor: str) -> str:
        if self.index.opset >= 18:
            return self.builder.one("ReduceMax", tensor, self.numbers(1), keepdims=1)
        return self.builder.one("ReduceMax", tensor, axes=[1], keepdims=1)

    def routing(self) -> tuple[str, str]:
        """(logits (T,E), factor (T,1) or '') for the node, in its type."""
        if self.block.direct and self.block.recognised is not None:
            return self._raw(self.block.recognised)
        b, source = self.builder, self.block.source
        experts = len(self.block.experts.members)
        if isinstance(source, Pair):
            weights = self._float(self._rows(source), source.weights)
            ids = self.flat(source.ids, source.chosen)
            ids = self.typed(ids, self.index.elem_type(source.ids), int(TensorProto.INT64))
            tokens = b.one("Gather", b.one("Shape", ids), self.numbers(0), axis=0)
            shape = b.one("Concat", tokens, self.numbers(experts), axis=0)
            fill = b.one("ConstantOfShape", shape, value=np.array([_FILL[self.elem_type]], np.float32))
            logits = b.one("ScatterElements", fill, ids, self._logarithm(weights), axis=1)
        else:
            weights = self._float(self._rows(source), source.weights)
            logits = self._logarithm(weights)
        return self.typed(logits, _FLOAT, self.elem_type), self._factor(weights)

    def _factor(self, weights: str) -> str:
        """What normalising divided by, times the block's own scale: weights (T,n) to (T,1)."""
        b, factor = self.builder, self.sum_of(weights)
        if self.block.scale != 1.0:
            factor = b.one("Mul", factor, b.constant(np.array(self.block.scale, np.float32)))
        return self.typed(factor, _FLOAT, self.elem_type)

    def _raw(self, router: RawLogits) -> tuple[str, str]:
        """The router's own logits."""
        b, source = self.builder, self.block.source
        name = self.block.router.logits
        logits, have = self.flat(name, self.block.router.experts), self.index.elem_type(name)
        logits = self.typed(logits, have, self.elem_type)
        if router.normalised:
            scaled = router.scale != 1.0
            return logits, b.constant(np.array(router.scale, _NUMPY[self.elem_type])) if scaled else ""
        return logits, self._factor(self._float(self._rows(source), source.weights))

    def _rows(self, source: Pair | Dense) -> str:
        """The weights of the chosen experts (T,k), or those of all (T,E)."""
        if isinstance(source, Pair):
            return self.flat(source.weights, source.chosen)
        experts = self.block.router.experts
        if not source.turned:
            return self.flat(source.weights, experts)
        return self.builder.one(
            "Transpose", self.builder.one("Reshape", source.weights, self.numbers(experts, -1)), perm=[1, 0]
        )

    def _float(self, tensor: str, original: str) -> str:
        return self.typed(tensor, self.index.elem_type(original), _FLOAT)

    def _logarithm(self, weights: str) -> str:
        """log w; in half precision relative to the largest of a token, where the type is finest."""
        b = self.builder
        logits = b.one("Log", b.one("Max", weights, b.constant(_TINY)))
        return logits if self.elem_type == _FLOAT else b.one("Sub", logits, self.largest_of(logits))

    def weights(self, made: Plan) -> list[str]:
        """The node's inputs from fc1 on, '' for a bias that is left out, none behind the last."""
        names = []
        for part in ("fc1", "fc1_bias", "fc2", "fc2_bias"):
            if part in made.weights:
                packed = made.weights[part]
                names.append(self.builder.weight(part, packed.elem_type, packed.shape))
            elif part in made.constants:
                names.append(self.builder.constant(made.constants[part].astype(_NUMPY[self.elem_type])))
            else:
                names.append("")
        return names if names[-1] else names[:-1]

    def finish(self, y: str) -> str:
        """The node's result (T,H) as the exit: its type, what is added, its shape."""
        b, block = self.builder, self.block
        elem_type = self.index.elem_type(block.exit)
        y = self.typed(y, self.elem_type, elem_type or self.elem_type)
        for addition in block.additions:
            other = self.flat(addition.tensor, block.width)
            other = self.typed(other, self.index.elem_type(addition.tensor), elem_type or self.elem_type)
            if addition.factor != 1.0:
                kind = _NUMPY.get(elem_type or self.elem_type, np.dtype(np.float32))
                other = b.one("Mul", other, b.constant(np.array(addition.factor, kind)))
            y = b.one("Add", y, other)
        return b.one("Reshape", y, b.one("Shape", block.reshape)) if block.reshape else y
