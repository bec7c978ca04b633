"""Matrix products of a region that may belong to experts: tokens times a weight that comes from constants."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import NBITS, PRODUCTS
from ortmoe_cli.moe.region import Cone, Cut

Array = NDArray[Any]

_LOOKUPS = (
    "Gather", "GatherND", "GatherElements", "Slice", "Split", "SplitToSequence", "Compress",
    "com.microsoft.GatherBlockQuantized", "DequantizeLinear", "com.microsoft.DequantizeLinear",
)  # fmt: skip
_MOST_STEPS = 40
QUANTISED = {
    "com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4", "com.microsoft.MatMulFpQ4", "MatMulInteger",
    "QLinearMatMul", "DequantizeLinear", "com.microsoft.DequantizeLinear", "com.microsoft.MatMulIntegerToFloat",
    "com.microsoft.DynamicQuantizeMatMul", "com.microsoft.GatherBlockQuantized",
}  # fmt: skip
"""Operators that say that experts are stored quantised."""


@dataclass(frozen=True)
class Product:
    """data · weight. `base` is the constant that the weight comes from, `routed` whether the routing chooses from it.

    data_axis, out_axis: the axes of the data that is summed over and of the result that it becomes; turned: the
    weight's last two axes are [inputs, outputs], not [outputs, inputs]; bias: what a Gemm adds.
    """

    node: int
    data: str
    out: str
    operand: str
    base: str
    routed: bool
    data_axis: int
    out_axis: int
    turned: bool
    bias: str = ""

    def transposed(self, shape: tuple[int, ...], inputs: int, outputs: int) -> bool:
        """Whether a matrix of `base` has to be transposed to become [outputs, inputs]."""
        rows, columns = shape[-2:]
        if rows != columns and {rows, columns} == {inputs, outputs}:
            return (rows, columns) == (inputs, outputs)
        return self.turned

    def inputs(self, value: Array) -> int:
        """The inner width, by a value of the data operand."""
        return int(value.shape[self.data_axis])

    def outputs(self, value: Array) -> int:
        """The outer width, by a value of the result."""
        return int(value.shape[self.out_axis])

    def data_rows(self, value: Array) -> Array:
        """The data operand as rows (n, inputs)."""
        return _rows(value, self.data_axis)

    def out_rows(self, value: Array) -> Array:
        """The result as rows (n, outputs)."""
        return _rows(value, self.out_axis)


def _rows(value: Array, axis: int) -> Array:
    return np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])


def find_products(index: Index, cone: Cone, region: Cut) -> list[Product]:
    """The products of a region whose one operand holds X0 and whose other comes from constants, in graph order."""
    found = []
    for i in region.nodes:
        product = None
        if index.op(i) in PRODUCTS:
            product = _of_matmul(index, cone, i)
        elif index.op(i) == "Einsum":
            product = _of_einsum(index, cone, i)
        elif index.op(i) == NBITS:
            product = _of_codes(index, cone, i)
        if product is not None:
            found.append(product)
    return found


def _of_matmul(index: Index, cone: Cone, i: int) -> Product | None:
    first, second, *rest = index.inputs(i)
    holds = [name in cone.hidden for name in (first, second)]
    if sum(holds) != 1:
        return None
    left = holds[1]
    data, operand = (second, first) if left else (first, second)
    if index.attribute(i, "transB" if left else "transA", 0):
        return None
    traced = _trace(index, cone, operand)
    if traced is None:
        return None
    base, swapped = traced
    turned = (not left) ^ bool(index.attribute(i, "transA" if left else "transB", 0)) ^ swapped
    axis = -2 if left else -1
    bias = rest[0] if rest else ""
    return Product(i, data, index.outputs(i)[0], operand, base, operand in cone.routed, axis, axis, turned, bias)


def _of_codes(index: Index, cone: Cone, i: int) -> Product | None:
    """A product with quantised weights [outputs, inputs]: these are called by their codes."""
    data, codes, *rest = index.inputs(i)
    if data not in cone.hidden or not index.is_constant(codes):
        return None
    bias = rest[3] if len(rest) > 3 else ""
    return Product(i, data, index.outputs(i)[0], codes, codes, False, -1, -1, False, bias)


def _of_einsum(index: Index, cone: Cone, i: int) -> Product | None:
    """A sum of products with one operand that holds X0, one from constants, and perhaps masks or routing weights."""
    equation = str(index.attribute(i, "equation", "")).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    terms, result = equation.split("->")
    letters = dict(zip(index.inputs(i), terms.split(","), strict=False))
    data = [name for name in letters if name in cone.hidden]
    weights = [
        (name, traced)
        for name in letters
        if name not in cone.hidden and (traced := _trace(index, cone, name)) and _is_matrix(index, traced[0])
    ]
    weights = [(name, traced) for name, traced in weights if len(letters[name]) >= 2]
    if len(data) != 1 or len(weights) != 1:
        return None
    operand, (base, swapped) = weights[0]
    first, second = letters[operand][-2], letters[operand][-1]
    summed = [c for c in (first, second) if c in letters[data[0]] and c not in result]
    kept = [c for c in (first, second) if c in result and c not in letters[data[0]]]
    if len(summed) != 1 or len(kept) != 1 or summed == kept:
        return None
    return Product(
        i,
        data[0],
        index.outputs(i)[0],
        operand,
        base,
        operand in cone.routed,
        letters[data[0]].index(summed[0]),
        result.index(kept[0]),
        (first == summed[0]) ^ swapped,
    )


def _is_matrix(index: Index, constant: str) -> bool:
    """Whether a constant may hold expert weights: floating-point, of rank 2 or more."""
    shape = index.constant_shape(constant)
    return index.elem_type(constant) not in (6, 7, 9) and (shape is None or len(shape) >= 2)


def constant_behind(index: Index, cone: Cone, tensor: str) -> str | None:
    """The constant that a tensor is, or that the routing picks it from."""
    traced = _trace(index, cone, tensor)
    return traced[0] if traced else None


def _trace(index: Index, cone: Cone, tensor: str) -> tuple[str, bool] | None:
    """The constant behind a tensor, and whether the last two axes were exchanged on the way."""
    swapped, routed = False, tensor in cone.routed
    for _ in range(_MOST_STEPS):
        if index.is_constant(tensor):
            return _unflattened(index, tensor) if routed else tensor, swapped
        i = index.producer(tensor)
        if i is None or tensor not in cone.routed or tensor in cone.hidden or tensor == cone.logits:
            return None
        if index.op(i) == "Transpose":
            order = index.attribute(i, "perm")
            swapped ^= order is None or list(order)[-2:] == [len(order) - 1, len(order) - 2]
        sources = [name for name in index.inputs(i) if name]
        if not sources:
            return None
        constants = [name for name in sources if index.is_constant(name) and index.elem_type(name) not in (6, 7, 9)]
        tensor = sources[0] if index.op(i) in _LOOKUPS or not constants else constants[0]
    return None


def _unflattened(index: Index, constant: str) -> str:
    """Stacked weights that were flattened to [E, rows · columns] for a lookup, before that."""
    i = index.producer(constant)
    if i is None or index.op(i) not in ("Reshape", "Flatten") or len(index.constant_shape(constant) or (0, 0)) != 2:
        return constant
    behind = index.inputs(i)[0]
    return behind if len(index.constant_shape(behind) or ()) == 3 else constant


def dequantised(index: Index, tensor: str) -> str:
    """The operator that makes a constant from quantised values, if one does."""
    for _ in range(8):
        i = index.producer(tensor)
        if i is None or not index.inputs(i):
            return ""
        if index.op(i) in QUANTISED:
            return index.op(i)
        tensor = index.inputs(i)[0]
    return ""
