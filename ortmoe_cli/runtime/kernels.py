"""Which nodes the CUDA provider has a kernel for, from the registry of runtime 1.31.1.

The registry can only be read where the provider loads, and reading it where it does not ends the process. So it is kept
as a file; `tests/runtime` compares it with the installed runtime.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from onnx import TensorProto, defs

from ortmoe_cli.graph.index import Index

SOURCE = "1.31.1"
"""The release whose registry this is."""

_TYPES = {
    TensorProto.DataType.Value(name): name.lower()
    for name in TensorProto.DataType.keys()  # noqa: SIM118  no mapping
}

HOST_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "CumSum": (1,), "Expand": (1,), "OneHot": (1,), "Pad": (1, 2, 3), "Range": (0, 1, 2),
    "ReduceMax": (1,), "ReduceMean": (1,), "ReduceMin": (1,), "ReduceSum": (1,), "ReduceProd": (1,), "Reshape": (1,),
    "ReduceSumSquare": (1,), "ReduceL2": (1,), "ReduceLogSumExp": (1,), "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4),
    "Split": (1,), "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,), "If": (0,),
    "Loop": (0, 1), "com.microsoft.GroupQueryAttention": (6,),
}  # fmt: skip
"""Inputs that CUDA kernels read in the memory of the host."""

HOST_OUTPUTS = ("Shape", "Size")
"""Operators whose result is made in the memory of the host."""

DATA_DEPENDENT = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "com.microsoft.GridSample", "StringSplit")
"""Operators whose result has a shape that depends on values: the host must wait for the device to know it."""

CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


@cache
def _registry() -> Mapping[str, list[tuple[int, int | None, frozenset[str]]]]:
    text = (files("ortmoe_cli.runtime") / "cuda_kernels.json").read_text("utf-8")
    return {
        op: [(since, until, frozenset(types.split())) for since, until, types in rows]
        for op, rows in json.loads(text).items()
    }


def why_not_on_cuda(index: Index, i: int) -> str | None:
    """Why the CUDA provider has no kernel for a node, or None if it has one. Functions are left to their bodies."""
    op, node = index.op(i), index.node(i)
    if op == "Constant" or any(f.name == node.op_type and f.domain == node.domain for f in index.model.proto.functions):
        return None
    rows = _registry().get(op)
    if rows is None:
        return None if _expands(op, index) else "there is no CUDA kernel for this operator"
    version = _since(index, i)
    fitting = [types for since, until, types in rows if _covers(version, since, until)]
    if not fitting:
        return f"there is no CUDA kernel for version {version} of this operator"
    elem_type = next((index.elem_type(name) for name in index.inputs(i) if name), 0)
    if op == "Where":
        elem_type = index.elem_type(index.inputs(i)[1])
    name = _TYPES.get(elem_type, "")
    if elem_type and not any(name in types or not types for types in fitting):
        return f"there is no CUDA kernel for {name} (there is for {', '.join(sorted(frozenset().union(*fitting)))})"
    return None


def _expands(op: str, index: Index) -> bool:
    """Whether the operator is a function of others, which the runtime inlines."""
    if "." in op or not defs.has(op):
        return False
    schema = defs.get_schema(op, index.opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _since(index: Index, i: int) -> int:
    """The version of a node's operator, at the model's opset."""
    node = index.node(i)
    if node.domain not in ("", "ai.onnx"):
        return 1
    try:
        return int(defs.get_schema(node.op_type, index.opset, "").since_version)
    except defs.SchemaError:
        return 1  # an operator of the runtime's own


def _covers(version: int, since: int, until: int | None) -> bool:
    """A kernel without an end is for exactly its version: later ones may mean something else."""
    return version == since if until is None else since <= version <= until
