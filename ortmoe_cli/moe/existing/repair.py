"""A fused node in the form that every provider runs: gate and up interleaved in fc1, routing weights normalised.

The sum that normalising divides by is multiplied back after the node; it is the sum of the k largest probabilities.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.island import Island, IslandBuilder
from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.moe.emit import activation_attributes
from ortmoe_cli.moe.existing.node import FusedNode
from ortmoe_cli.moe.existing.reference import reference, swiglu
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.packed import PackedValues
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.verify import TOLERANCE, token_errors
from ortmoe_cli.outcome import Check
from ortmoe_cli.weights.pack import ALL, PackedWeight, Piece, Rows

Array = NDArray[Any]

_GATE: Rows = (0, None, 2)
_UP: Rows = (1, None, 2)
_FLOAT = int(TensorProto.FLOAT)
_TOKENS = 24
_MOST_EXPERTS = 6


@dataclass(frozen=True, eq=False)
class Repair:
    """The island that takes the node's place, and what it reads."""

    island: Island
    weights: tuple[PackedWeight, ...]


def repair(node: FusedNode) -> Repair:
    """The node rewritten."""
    index, inputs = node.index, node.inputs
    name = index.unused_prefix(f"moe_{node.i}")
    b = IslandBuilder(name, index.opset)
    packed: list[PackedWeight] = []
    first, first_bias = inputs["fc1"], inputs.get("fc1_bias", "")
    attributes: Mapping[str, Any]
    if "fc3" in inputs or (node.merged and node.attribute("swiglu_fusion") == 2):
        for slot in ("fc1", "fc1_bias"):
            made = _interleaved(node, slot, f"{name}/{slot}")
            if made is not None:
                packed.append(made)
                b.weight(slot, made.elem_type, made.shape)
        first = f"{name}/fc1"
        first_bias = f"{name}/fc1_bias" if len(packed) > 1 else ""
        attributes = activation_attributes(swiglu(node))
    else:
        attributes = _kept(node)
    tail = [first, first_bias, inputs["fc2"], inputs.get("fc2_bias", "")]
    while not tail[-1]:
        tail.pop()
    y = b.one(
        "MoE",
        inputs["input"],
        inputs["router"],
        *tail,
        domain="com.microsoft",
        k=int(node.attribute("k")),
        normalize_routing_weights=1,
        **attributes,
    )
    if not node.attribute("normalize_routing_weights"):
        y = _times_sum(b, node, y)
    b.produce(index.outputs(node.i)[0], y)
    return Repair(b.build(), tuple(packed))


def _kept(node: FusedNode) -> dict[str, Any]:
    """The node's own attributes, but for what is set anew."""
    names = [a.name for a in node.index.node(node.i).attribute]
    return {n: node.attribute(n) for n in names if n not in ("k", "normalize_routing_weights")}


def _interleaved(node: FusedNode, slot: str, name: str) -> PackedWeight | None:
    """Gate and up rows in turn: of fc1 and fc3, or of the halves of fc1. None for a bias that neither has."""
    suffix = slot.removeprefix("fc1")
    gate, up = node.inputs.get(f"fc1{suffix}"), node.inputs.get(f"fc3{suffix}")
    third = "fc3" in node.inputs
    weight = node.shape("fc1")
    assert weight is not None
    experts, rows, width = weight
    inner = rows if third else rows // 2
    if not third:
        up = gate
    if gate is None and up is None:
        return None
    if gate is None or up is None:
        raise Refused("MOE203", "only one of the gate and up matrices has a bias")
    from_gate: Rows = ALL if third else (0, inner, 1)
    from_up: Rows = ALL if third else (inner, 2 * inner, 1)
    pieces = tuple((Piece(gate, e, False, from_gate, _GATE), Piece(up, e, False, from_up, _UP)) for e in range(experts))
    shape = (experts, 2 * inner) if suffix else (experts, 2 * inner, width)
    return PackedWeight(name, node.index.elem_type(gate), shape, pieces)


def _times_sum(b: IslandBuilder, node: FusedNode, y: str) -> str:
    """y times the sum of the k largest probabilities of its token, whatever its rank."""
    logits, elem_type, opset = node.inputs["router"], node.elem_type, node.index.opset
    if elem_type != _FLOAT:
        logits = b.cast(logits, _FLOAT)
    k = b.constant(np.array([int(node.attribute("k"))], np.int64))
    top = b.op("TopK", [b.one("Softmax", logits, axis=1), k], 2, axis=1, largest=1, sorted=0)[0]
    if opset >= 13:
        total = b.one("ReduceSum", top, b.constant(np.array([1], np.int64)), keepdims=1)
    else:
        total = b.one("ReduceSum", top, axes=[1], keepdims=1)
    if elem_type != _FLOAT:
        total = b.cast(total, elem_type)
    width = (node.shape("fc2") or (0, 0))[1]
    flat = b.one("Reshape", y, b.constant(np.array([-1, width], np.int64)))
    return b.one("Reshape", b.one("Mul", flat, total), b.one("Shape", node.inputs["input"]))


def verify(node: FusedNode, made: Repair, cutter: Cutter, source: Source) -> tuple[Check, ...]:
    """The rewritten node in the runtime against the formula of the schema. Raises Refused where they differ."""
    shapes = node.shape("fc1"), node.shape("fc2")
    assert shapes[0] is not None
    assert shapes[1] is not None
    experts, width = shapes[0][0], shapes[1][1]
    rng, errors = np.random.default_rng(7), dict[str, float]()
    some = np.sort(rng.permutation(experts)[: max(_MOST_EXPERTS, int(node.attribute("k")))])
    values = {slot: _filled(source(node.inputs[slot]), some) for slot in _weights(node)}
    packed = PackedValues(made.weights, source, cutter.byte_budget).of(some.tolist())
    for size, sharpness in ((1.0, 1.5), (0.01, 0.1), (20.0, 8.0), (100.0, 1.0)):
        x = (rng.standard_normal((_TOKENS, width)) * size).astype(np.float32)
        logits = np.full((_TOKENS, experts), -1e4, np.float32)
        logits[:, some] = rng.standard_normal((_TOKENS, len(some))) * sharpness
        feeds = {node.inputs[slot]: value for slot, value in values.items()}
        feeds |= {node.inputs["input"]: x, node.inputs["router"]: logits}
        feeds = {name: value for name, value in feeds.items() if name in made.island.inputs}
        (got,) = cutter.run_island(made.island, feeds, packed).values()
        regime = f"hidden x{size:g}, logits x{sharpness:g}"
        errors[regime] = float(np.nanmax(token_errors(reference(node, x, logits, values), got)))
    worst = max(errors.values())
    if not worst <= TOLERANCE:
        raise Refused("MOE114", f"the repaired node differs from the formula of the schema by {worst:.1e}")
    return tuple(Check(regime, error) for regime, error in errors.items())


def _weights(node: FusedNode) -> Iterable[str]:
    return [slot for slot in node.inputs if slot not in ("input", "router")]


def _filled(value: Array, experts: Array) -> Array:
    """As float32 with these experts in it: pages that nobody writes take no memory."""
    result = np.zeros(value.shape, np.float32)
    for e in experts:
        result[e] = widen(value[e])
    return result
