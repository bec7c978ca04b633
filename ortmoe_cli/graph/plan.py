"""The model that a cut becomes: the float32 shadow of some nodes, with numbered names and a list of what to feed.

Large weights are fed, and in half precision they are fed as they lie in the file. What merely moves numbers (a lookup
of the routed experts' weights, a transpose) moves them in half precision; they are widened where something computes
with them. Widening is exact, so it makes no difference where it happens, except to memory: a widened copy of all
experts of a real model takes gigabytes, one expert megabytes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from ortmoe_cli.graph.order import reads_of, subgraphs
from ortmoe_cli.graph.shadow import shadow_node, value_info, widen

_INLINE_ELEMENTS = 32
"""Floating-point constants of more elements than this are fed, so that layers differ in their feeds only."""
_INLINE_BYTES = 4096
"""Any constant larger than this is fed."""
_UNFEEDABLE = {"int4", "uint4", "int2", "uint2", "float4_e2m1fn"}
"""Types that the runtime takes as constants only, not from Python."""
_NARROW_BYTES = 1 << 17
"""Weights in half precision of at least so many bytes are fed as they are."""
_MOVES = frozenset(
    {"Flatten", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators that move their first input and compute nothing; the CPU provider has them for half precision."""

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Cut:
    """A graph to be run. fed: (name in the model, name in the graph) of what it takes; narrow: the element type of
    those that it takes in half precision, by name in the graph."""

    graph: GraphProto
    fed: tuple[tuple[str, str], ...]
    narrow: Mapping[str, int]


def build(
    nodes: Sequence[NodeProto], values: Feeds, outputs: Sequence[str], always: Collection[str], *, late: bool = True
) -> Cut:
    """Values that are large, or named in `always`, are fed; the others are built in. With `late`, weights in half
    precision are widened where they are used."""
    reads = [tuple(reads_of(node)) for node in nodes]
    read = {name for names in reads for name in names}
    used = [name for name in sorted(values) if name in read or name in outputs]
    names = _numbered(nodes, reads, used)
    fed = [name for name in used if name in always or is_large(values[name])]
    narrow = {name for name in fed if name not in always and is_narrow(values[name])} if late else set[str]()
    made = _Narrow(names, narrow).shadow(nodes, reads, outputs) if narrow else [shadow_node(n, names) for n in nodes]
    inner = {name: _narrow_name(names[name]) if name in narrow else names[name] for name in fed}
    graph = helper.make_graph(
        made,
        "cut",
        [value_info(inner[name], values[name] if name in narrow else widen(values[name])) for name in fed],
        [onnx.ValueInfoProto(name=names.get(name, name)) for name in outputs],
        [numpy_helper.from_array(widen(values[name]), names[name]) for name in used if name not in inner],
    )
    types = {inner[name]: helper.np_dtype_to_tensor_dtype(values[name].dtype) for name in narrow}
    return Cut(graph, tuple(inner.items()), types)


def is_large(value: np.ndarray) -> bool:
    """Whether a constant is fed and not built in."""
    if value.dtype.name in _UNFEEDABLE:
        return False
    return value.nbytes > _INLINE_BYTES or (value.dtype.kind in "fV" and value.size > _INLINE_ELEMENTS)


def is_narrow(value: np.ndarray) -> bool:
    """Whether a weight is fed in half precision."""
    return value.dtype.kind in "fV" and value.dtype.itemsize == 2 and value.nbytes >= _NARROW_BYTES


class _Narrow:
    """Shadows nodes with some tensors left in half precision for as long as they are only moved."""

    def __init__(self, names: Mapping[str, str], narrow: Collection[str]) -> None:
        self._names, self._narrow, self._wide = names, set(narrow), set[str]()

    def shadow(
        self, nodes: Sequence[NodeProto], reads: Sequence[Sequence[str]], outputs: Collection[str]
    ) -> list[NodeProto]:
        made: list[NodeProto] = []
        for node, names in zip(nodes, reads, strict=True):
            if (
                node.op_type in _MOVES
                and not node.domain
                and node.input[0] in self._narrow
                and not any(subgraphs(node))
            ):
                self._narrow.update(name for name in node.output if name)
                moved = {name: _narrow_name(self._names[name]) for name in (node.input[0], *node.output) if name}
                made.append(shadow_node(node, {**self._picked(node), **moved}))
                continue
            self._widen(names, made)
            made.append(shadow_node(node, self._names))
        self._widen(outputs, made)
        return made

    def _picked(self, node: NodeProto) -> dict[str, str]:
        return {name: self._names[name] for name in node.input if name}

    def _widen(self, names: Collection[str], made: list[NodeProto]) -> None:
        """Make the float32 form of these tensors where there is none yet."""
        for name in names:
            if name in self._narrow and name not in self._wide:
                self._wide.add(name)
                inner = self._names[name]
                made.append(helper.make_node("Cast", [_narrow_name(inner)], [inner], to=TensorProto.FLOAT))


def _narrow_name(name: str) -> str:
    return f"{name}h"


def _numbered(nodes: Sequence[NodeProto], reads: Sequence[Sequence[str]], values: Sequence[str]) -> dict[str, str]:
    """Names by order of appearance, so that pieces of equal structure become equal bytes."""
    names: dict[str, str] = {}
    for node, read in zip(nodes, reads, strict=True):
        for name in (*read, *node.output):
            if name and name not in names:
                names[name] = f"t{len(names)}"
    for name in values:
        names.setdefault(name, f"t{len(names)}")
    return names
