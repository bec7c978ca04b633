"""Partial evaluation: given sizes and integer inputs, the shape of any tensor, and its value where that is knowable.

Masks, positions and shape arithmetic have values; whatever depends on the embedding of a token, on hidden states or on
a cache has none, only a shape. "This mask does not depend on the data" is then a question with a yes-or-no answer.

Nothing is evaluated before it is asked for. What cannot be known (an unknown operator, control flow, an odd graph) is
unknown; no question raises.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from ortmoe_cli.graph.declared import declared_shapes
from ortmoe_cli.graph.feeds import Feeds, Padding, Sizes, make_feeds
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Weight
from ortmoe_cli.graph.movement import Unsupported
from ortmoe_cli.graph.operators import OPERATORS, compute, compute_by_reference, numpy_type
from ortmoe_cli.graph.roles import Role
from ortmoe_cli.graph.roles import roles as find_roles
from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.graph.shapes import RULES, infer_by_onnx
from ortmoe_cli.graph.values import constant_value

__all__ = ["Origin", "Padding", "Probe", "Role", "Sizes", "probe"]

_CONSTANT_BYTES = 4 << 20
"""Larger constants are shapes only."""
_PRODUCT_BYTES = 1 << 16
"""The same for weights of matrix products."""
_VALUE_ELEMENTS = 1 << 24
"""Larger results are shapes only."""
_REFERENCE_ELEMENTS = 1 << 16
_CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}


class Origin(Flag):
    """Which kinds of graph inputs a value was computed from. Shapes of inputs do not count."""

    NONE = 0
    TOKENS = auto()
    MASK = auto()
    POSITIONS = auto()
    OTHER = auto()


_ORIGIN = {Role.TOKENS: Origin.TOKENS, Role.MASK: Origin.MASK, Role.POSITIONS: Origin.POSITIONS}


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a tensor."""

    shape: tuple[int, ...] | None = None
    value: np.ndarray | None = None
    origin: Origin = Origin.NONE


_UNKNOWN = Fact()


class Probe:
    """One partial evaluation. Values are in shadow types: half precision comes as float32."""

    def __init__(self, index: Index, roles: Mapping[str, Role], feeds: Feeds, parent: "Probe | None" = None) -> None:
        self.index, self.roles, self.feeds = index, roles, feeds
        self._parent = parent
        self._facts: dict[str, Fact] = {"": _UNKNOWN}
        self._declared: dict[str, tuple[int, ...]] | None = None

    # --- questions

    @property
    def sizes(self) -> Sizes:
        """The sizes in force: fixed dimensions of the graph override what was asked for."""
        return self.feeds.sizes

    @property
    def real(self) -> np.ndarray:
        """[B, T] bool: which tokens are no padding."""
        return self.feeds.real

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.fact(name).shape

    def value(self, name: str) -> np.ndarray | None:
        """The value, if it can be known without any data; read-only."""
        return self.fact(name).value

    def dtype(self, name: str) -> int:
        """The element type in the graph (TensorProto.DataType), 0 if unknown."""
        return self.index.elem_type(name)

    def origin(self, name: str) -> Origin:
        """Which integer inputs a known value was computed from."""
        return self.fact(name).origin

    def is_data(self, name: str) -> bool:
        """Whether a tensor has no knowable value."""
        return self.fact(name).value is None

    def given(self, values: Mapping[str, np.ndarray]) -> "Probe":
        """The same probe with values for some tensors of data, and so for what depends on them alone."""
        child = Probe(self.index, self.roles, self.feeds, self)
        for name, value in values.items():
            array = widen(np.asarray(value))
            child._facts[name] = Fact(array.shape, array)
        return child

    def settle(self, name: str, shape: tuple[int, ...]) -> None:
        """The shape of a tensor of data is known from elsewhere: spare the way there."""
        self._facts.setdefault(name, Fact(shape))

    def fact(self, name: str) -> Fact:
        """Everything known of a tensor."""
        found = self._facts.get(name)
        if found is not None:
            return found
        stack, entered = [name], set()
        while stack:
            top = stack[-1]
            if top in self._facts:
                stack.pop()
                continue
            i = self.index.producer(top)
            if i is None:
                self._facts[top] = self._leaf(top)
                continue
            if self._inherit(top):
                continue
            missing = [read for read in self.index.inputs(i) if read not in self._facts]
            if missing and i not in entered:
                entered.add(i)
                stack.extend(missing)
                continue
            for read in missing:  # the graph has a cycle
                self._facts[read] = _UNKNOWN
            self._evaluate(i)
            self._facts.setdefault(top, _UNKNOWN)
        return self._facts[name]

    # --- evaluation

    def _inherit(self, name: str) -> bool:
        """Take over what the parent knows, unless it lacks the value."""
        if self._parent is None:
            return False
        fact = self._parent.fact(name)
        if fact.value is None:
            return False
        self._facts[name] = fact
        return True

    def _leaf(self, name: str) -> Fact:
        if self._parent is not None:
            return self._parent.fact(name)
        weight = self.index.model.weights.get(name)
        if weight is not None and self.index.is_initializer(name):
            large = weight.nbytes > _CONSTANT_BYTES or self._multiplies(name, weight)
            if large or weight.elem_type == TensorProto.STRING:
                return Fact(weight.shape)
            return Fact(weight.shape, widen(self.index.model.array(name)))
        if weight is not None:
            return Fact(weight.shape)  # a default that callers may override
        value = self.feeds.values.get(name)
        if value is not None:
            return Fact(value.shape, value, _ORIGIN.get(self.roles[name], Origin.OTHER))
        return Fact(self.feeds.shapes.get(name))

    def _multiplies(self, name: str, weight: Weight) -> bool:
        """Whether a weight is nothing but one side of matrix products: only its shape matters then, and all experts
        of a layer together take gigabytes."""
        if weight.nbytes <= _PRODUCT_BYTES or len(weight.shape) < 2:
            return False
        readers = self.index.consumers(name)
        turned = [self.index.outputs(i)[0] for i in readers if self.index.op(i) == "Transpose"]
        behind = [i for tensor in turned for i in self.index.consumers(tensor)]
        return all(self.index.op(i) in ("MatMul", "Gemm", "Transpose") for i in readers) and all(
            self.index.op(i) in ("MatMul", "Gemm") for i in behind
        )

    def _evaluate(self, i: int) -> None:
        """Fill in the facts of a node's outputs from those of its inputs."""
        op, names = self.index.op(i), self.index.outputs(i)
        inputs = [self._facts[name] for name in self.index.inputs(i)]
        try:
            facts = self._special(i, op, inputs) or self._values(i, op, inputs) or self._shapes(i, op, inputs)
        except Exception:  # a graph may be odd in more ways than can be listed
            facts = [_UNKNOWN] * len(names)
        for name, fact in zip(names, facts, strict=False):
            if name and name not in self._facts:
                self._facts[name] = fact if fact.shape is not None else self._by_declaration(name)

    def _special(self, i: int, op: str, inputs: list[Fact]) -> list[Fact] | None:
        if op == "Constant":
            value = widen(constant_value(self.index.node(i)))
            return [Fact(value.shape, value if value.nbytes <= _CONSTANT_BYTES else None)]
        if op in ("Shape", "Size"):
            shape = inputs[0].shape
            if shape is None and self._parent is not None:
                shape = self._parent.shape(self.index.inputs(i)[0])
            if shape is None:
                return [_UNKNOWN]
            if op == "Size":
                return [Fact((), np.array(math.prod(shape), np.int64))]
            start, end = self.index.attribute(i, "start", 0), self.index.attribute(i, "end", None)
            numbers = np.array(shape[start:end], np.int64)
            return [Fact(numbers.shape, numbers)]
        if op == "CastLike" and inputs[0].value is not None:
            value = inputs[0].value.astype(numpy_type(self.index.elem_type(self.index.inputs(i)[1])))
            return [Fact(value.shape, value, inputs[0].origin)]
        return None

    def _values(self, i: int, op: str, inputs: list[Fact]) -> list[Fact] | None:
        """The outputs by value, if all inputs have one and the operator looks up no embedding."""
        names = self.index.inputs(i)
        given = [fact for fact, name in zip(inputs, names, strict=True) if name]
        if any(fact.value is None for fact in given) or op in _CONTROL_FLOW or self._embeds(op, inputs):
            return None
        attribute = partial(self.index.attribute, i)
        values = [fact.value if name else None for fact, name in zip(inputs, names, strict=True)]
        outputs = len(self.index.outputs(i))
        if op in OPERATORS:
            shapes = self._shapes(i, op, inputs) if op in _GROWS else []
            if any(fact.shape is not None and math.prod(fact.shape) > _VALUE_ELEMENTS for fact in shapes):
                return shapes
            try:
                results = compute(op, values, attribute, outputs)
            except Unsupported:
                return None
        elif self.index.node(i).domain in ("", "ai.onnx") and _elements(given) <= _REFERENCE_ELEMENTS:
            try:
                results = compute_by_reference(self.index.node(i), self.index.opset, values)
            except Exception:  # onnx.reference raises anything
                return None
        else:
            return None
        origin = Origin.NONE
        for fact in given:
            origin |= fact.origin
        return [Fact(value.shape, value, origin) for value in results]

    def _embeds(self, op: str, inputs: list[Fact]) -> bool:
        """Whether a lookup by token turns integers into data."""
        if op not in ("Gather", "GatherND", "GatherElements"):
            return False
        table, rows = inputs[0].value, inputs[1]
        return table is not None and table.dtype.kind == "f" and bool(rows.origin & (Origin.TOKENS | Origin.OTHER))

    def _shapes(self, i: int, op: str, inputs: list[Fact]) -> list[Fact]:
        """The outputs by shape alone."""
        if op in _CONTROL_FLOW:
            return [_UNKNOWN] * len(self.index.outputs(i))
        shapes, values = [fact.shape for fact in inputs], [fact.value for fact in inputs]
        attribute, outputs = partial(self.index.attribute, i), len(self.index.outputs(i))
        rule = RULES.get(op)
        if rule is not None:
            try:
                return [Fact(shape) for shape in rule(shapes, values, attribute, outputs)]
            except Unsupported:
                return [_UNKNOWN] * outputs
        types = [self.index.elem_type(name) if name else 0 for name in self.index.inputs(i)]
        node = self.index.node(i)
        if node.domain not in ("", "ai.onnx"):
            return [_UNKNOWN] * outputs
        return [Fact(shape) for shape in infer_by_onnx(node, self.index.opset, shapes, types, values)]

    def _by_declaration(self, name: str) -> Fact:
        """What the file says of a tensor that evaluation lost, if its dimensions can be computed."""
        if self._parent is not None:
            return Fact(self._parent.shape(name))
        if self._declared is None:
            self._declared = declared_shapes(self.index, self.feeds.symbols)
        return Fact(self._declared.get(name))


_GROWS = {"Expand", "Tile", "ConstantOfShape", "MatMul", "And", "Or", "Where", "Add", "Mul", "Greater", "LessOrEqual"}
"""Operators that can make something large out of small things."""


def _elements(facts: list[Fact]) -> int:
    return sum(fact.value.size for fact in facts if fact.value is not None)


def probe(
    index: Index,
    sizes: Sizes,
    padding: Padding | None = None,
    *,
    positions: str = "counted",
    seed: int = 0,
    roles: Mapping[str, Role] | None = None,
) -> Probe:
    """A partial evaluation at these sizes.

    `padding` says which tokens the mask inputs call padding; `positions` fills position inputs: 'counted' (over real
    tokens), 'arange' or 'random'; `roles` saves finding the roles of the inputs again. The sizes in force (see
    `Probe.sizes`) differ from those asked for where the graph fixes a dimension or has no cache.
    """
    known: Any = roles if roles is not None else find_roles(index)
    return Probe(index, known, make_feeds(index, known, sizes, padding, positions=positions, seed=seed))
