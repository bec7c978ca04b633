"""What each graph input is for, by what it feeds, its rank and its type. Names of inputs say nothing here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from onnx import TensorProto

from ortmoe_cli.graph.index import Index, InputInfo

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

_VIEWS = {"Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Slice"}
_OFFSETS = {"Add", "Sub"}
_ARITHMETIC = _VIEWS | _OFFSETS | {"Mul", "Div", "MatMul", "Einsum", "Gemm", "Concat", "Gather"}
_CACHE_SLOTS = {
    "Attention": (4, 5),
    "com.microsoft.GroupQueryAttention": (3, 4),
    "com.microsoft.MultiHeadAttention": (6, 7),
    "ScatterElements": (0,),
    "ScatterND": (0,),
    "TensorScatter": (0,),
}
_EMBEDDINGS = {
    "Gather": (0, 1),
    "GatherND": (0, 1),
    "com.microsoft.GatherBlockQuantized": (0, 1),
    "com.microsoft.EmbedLayerNormalization": (2, 0),
}
"""Operators that look rows up: (slot of the table, slot of the row numbers)."""
_ROTATIONS = {"RotaryEmbedding": (3,), "com.microsoft.RotaryEmbedding": (1,), "com.microsoft.GroupQueryAttention": (9,)}
_MAX_STEPS = 200
_MAX_VIEWS = 8
_MAX_TYPES = 16
"""A table with more rows than this is not one of segment types."""


class Role(Enum):
    """What a graph input means to a decoder."""

    TOKENS = "token ids [B, S]"
    MASK = "attention mask [B, T] or [B|1, N|1, S, T]"
    POSITIONS = "positions [B, S], [S] or [3, B, S]"
    PAST = "cached keys or values [B, H, P, D]"
    HIDDEN = "hidden states [B, S, H]"
    OTHER = "anything else"


@dataclass(frozen=True)
class Uses:
    """How a graph input is used, as far as one can see through views, casts and offsets."""

    tables: Mapping[str, int] = field(default_factory=dict)
    """Tables whose rows it looks up, with their number of elements."""
    rows: tuple[int, ...] = ()
    """The numbers of rows of these tables."""
    rotates: bool = False
    """It is an angle's factor: multiplied with a constant vector, or a position for RotaryEmbedding."""
    caches: bool = False
    """Something is appended to it or written into it."""
    token_axis: int | None = None
    """The axis along which something is appended to it."""


def roles(index: Index) -> dict[str, Role]:
    """The role of every graph input."""
    uses = {name: uses_of(index, name) for name in index.graph_inputs}
    embedding = _embedding(uses)
    found = {name: _role(info, uses[name], embedding) for name, info in index.graph_inputs.items()}
    if not {Role.TOKENS, Role.HIDDEN} & set(found.values()):  # tokens that look up several tables of one size
        sizes = {name: max(use.tables.values()) for name, use in uses.items() if use.tables and not use.rotates}
        found |= dict.fromkeys(sorted(sizes, key=lambda name: -sizes[name])[:1], Role.TOKENS)
    return found


def _embedding(uses: Mapping[str, Uses]) -> str:
    """The token embedding: the largest table; of equal ones, the one looked up by the first input."""
    sizes: dict[str, int] = {}
    for use in uses.values():
        if not use.rotates and len(set(use.tables.values())) == len(use.tables):
            sizes |= {table: size for table, size in use.tables.items() if table not in sizes}
    return max(sizes, key=lambda table: sizes[table], default="")


def _role(info: InputInfo, uses: Uses, embedding: str) -> Role:
    if info.dims is None:
        return Role.OTHER
    rank, is_float = len(info.dims), info.elem_type in FLOATS
    if is_float:
        if uses.caches and rank == 4:
            return Role.PAST
        by_rank = {2: Role.MASK, 3: Role.HIDDEN, 4: Role.MASK}
        return Role.OTHER if uses.caches else by_rank.get(rank, Role.OTHER)
    if info.elem_type == TensorProto.BOOL:
        return Role.MASK if rank in (2, 3, 4) else Role.OTHER
    if uses.tables:
        twins = len(set(uses.tables.values())) < len(uses.tables)  # cosines and sines have tables of equal size
        if embedding in uses.tables and not uses.rotates and not twins:
            return Role.TOKENS
        return Role.POSITIONS if uses.rotates or max(uses.rows) > _MAX_TYPES else Role.OTHER
    if uses.rotates:
        return Role.POSITIONS
    if rank in (2, 4):
        return Role.MASK
    return Role.POSITIONS if rank in (1, 3) and info.dims[-1] != 1 else Role.OTHER


def cache_axis(index: Index, name: str) -> int:
    """Where a cached input of rank 4 has its tokens."""
    axis = uses_of(index, name).token_axis
    return 2 if axis is None else axis % 4


def uses_of(index: Index, name: str) -> Uses:
    """Follow an input through views, casts and constant offsets to what reads it."""
    tables: dict[str, tuple[int, ...]] = {}
    rotates = caches = False
    axis: int | None = None
    seen, stack = {name}, [name]
    for _ in range(_MAX_STEPS):
        if not stack:
            break
        tensor = stack.pop()
        for i in index.consumers(tensor):
            op, inputs = index.op(i), index.inputs(i)
            slots = [k for k, read in enumerate(inputs) if read == tensor]
            table = _looked_up(index, i, slots)
            if table is not None and table[1] is not None:
                tables[table[0]] = table[1]
            rotates |= table is not None and table[1] is None
            rotates |= any(k in _ROTATIONS.get(op, ()) for k in slots) or _rotates(index, i, tensor)
            if _appends(index, i, tensor):
                caches, axis = True, index.attribute(i, "axis", 0) if axis is None else axis
            caches |= any(k in _CACHE_SLOTS.get(op, ()) for k in slots)
            view = (op in _VIEWS and 0 in slots) or (op == "Concat" and len(inputs) == 1)
            if view or (op in _OFFSETS and _other_is_constant(index, i, tensor)):
                for output in index.outputs(i):
                    if output and output not in seen:
                        seen.add(output)
                        stack.append(output)
    rotates = rotates or _becomes_angle(index, name)
    sizes = {table: math.prod(shape) for table, shape in tables.items()}
    return Uses(sizes, tuple(shape[0] for shape in tables.values()), rotates, caches, axis)


def _looked_up(index: Index, i: int, slots: list[int]) -> tuple[str, tuple[int, ...] | None] | None:
    """The table of numbers (not of integers, as in an index grid) whose rows a node looks up, if it does.

    Its shape is None if the table is computed, as cosines and sines may be.
    """
    if index.op(i) not in _EMBEDDINGS:
        return None
    table_slot, row_slot = _EMBEDDINGS[index.op(i)]
    if row_slot not in slots or table_slot >= len(index.inputs(i)):
        return None
    name, shape = _constant_behind(index, index.inputs(i)[table_slot])
    numbers = index.node(i).domain == "com.microsoft" or index.elem_type(name) in FLOATS
    return (name, shape) if numbers and (shape is None or len(shape) >= 2) else None


def _rotates(index: Index, i: int, tensor: str) -> bool:
    """Whether a node multiplies the tensor with a constant vector of frequencies."""
    if index.op(i) not in ("MatMul", "Mul", "Einsum", "Div") or index.elem_type(tensor) not in FLOATS:
        return False
    others = [name for name in index.inputs(i) if name != tensor]
    if len(others) != 1:
        return False
    name, shape = _constant_behind(index, others[0])
    return index.elem_type(name) in FLOATS and math.prod(shape or (1,)) > 1


def _becomes_angle(index: Index, name: str) -> bool:
    """Whether arithmetic on the tensor ends in a cosine or sine; masks are counted or compared before they do."""
    seen, queue = {name}, [name]
    for tensor in queue:  # grows as it is read
        for i in index.consumers(tensor):
            if index.op(i) in ("Cos", "Sin"):
                return True
            if index.op(i) in _ARITHMETIC and len(queue) < _MAX_STEPS:
                fresh = [output for output in index.outputs(i) if output and output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return False


def _constant_behind(index: Index, name: str) -> tuple[str, tuple[int, ...] | None]:
    """The constant that a tensor is a view of (a slice, a cast, a repetition), with its shape if there is one."""
    for _ in range(_MAX_VIEWS):
        shape = index.constant_shape(name)
        i = index.producer(name)
        if shape is not None or i is None or index.op(i) not in _VIEWS:
            return name, shape
        name = index.inputs(i)[0]
    return name, None


def _appends(index: Index, i: int, tensor: str) -> bool:
    """Whether a node appends something computed to the tensor."""
    others = [name for name in index.inputs(i) if name != tensor]
    return index.op(i) == "Concat" and len(others) == 1 and index.inputs(i)[0] == tensor


def _other_is_constant(index: Index, i: int, tensor: str) -> bool:
    return all(name == tensor or index.is_constant(name) for name in index.inputs(i))
