"""A read-only view of a graph: who makes a tensor, who reads it, what is constant.

Callers speak in tensor names and node numbers (positions in the graph). Inside are arrays of integers, because a
decoder of a million nodes has several million edges and one Python object per edge would not fit.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from ortmoe_cli.graph.model import Model
from ortmoe_cli.graph.order import CycleError, captures, topological
from ortmoe_cli.graph.types import Like, elem_type_rule
from ortmoe_cli.graph.values import attribute_value, constant_value

_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
_SUBGRAPH_OPS = {"If", "Loop", "Scan", "SequenceMap"}
_SAME_SHAPE = {"Identity", "Cast", "Neg", "DequantizeLinear"}
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h)[./_](\d+)(?=[./_\]']|$)")


@dataclass(frozen=True)
class InputInfo:
    """A graph input: its element type and dimensions (an int, a symbol, or None for unknown; None for unknown rank)."""

    name: str
    elem_type: int
    dims: tuple[int | str | None, ...] | None


class Index:
    """The graph of a model, indexed once.

    Nodes are numbered in an order in which everything is made before it is read. That is the order of the file, but for
    the converters that append nodes at the end, which ONNX forbids and the runtime allows.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._fill(list(model.proto.graph.node))
        if (self._producer[self._reads] >= self._readers_in_order).any():
            with suppress(CycleError):  # `validate` will say so
                self._fill(topological(self._nodes))

    def _fill(self, nodes: list[NodeProto]) -> None:
        model, graph = self.model, self.model.proto.graph
        self._nodes = nodes
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._op_names: list[str] = []
        op_ids: dict[str, int] = {}
        ops: list[int] = []
        reads: list[int] = []
        read_ends: list[int] = []
        makes: list[int] = []
        make_ends: list[int] = []
        for node in self._nodes:
            op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            if op not in op_ids:
                op_ids[op] = len(self._op_names)
                self._op_names.append(op)
            ops.append(op_ids[op])
            reads.extend(self._id(name) for name in node.input if name)
            if node.domain or node.op_type in _SUBGRAPH_OPS:
                reads.extend(self._id(name) for name in captures(node))
            read_ends.append(len(reads))
            makes.extend(self._id(name) for name in node.output if name)
            make_ends.append(len(makes))
        for name in (*model.weights, *(i.name for i in graph.input), *(o.name for o in graph.output)):
            self._id(name)
        self._ops: np.ndarray = np.array(ops, np.int32)
        self._reads, self._read_ends = np.array(reads, np.int32), np.array([0, *read_ends], np.int64)
        self._makes, self._make_ends = np.array(makes, np.int32), np.array([0, *make_ends], np.int64)
        count = len(self._names)
        self._producer = np.full(count, -1, np.int32)
        self._producer[self._makes] = np.repeat(np.arange(len(ops), dtype=np.int32), np.diff(self._make_ends))
        order = np.argsort(self._reads, kind="stable")
        self._readers = self._readers_in_order[order]
        self._reader_ends = np.concatenate([[0], np.cumsum(np.bincount(self._reads, minlength=count))])

    @property
    def _readers_in_order(self) -> np.ndarray:
        """For each read, the node that reads."""
        return np.repeat(np.arange(len(self._nodes), dtype=np.int32), np.diff(self._read_ends))

    def _id(self, name: str) -> int:
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = len(self._names)
            self._names.append(name)
        return found

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: str) -> bool:
        return name in self._ids

    # --- nodes

    def node(self, i: int) -> NodeProto:
        return self._nodes[i]

    def op(self, i: int) -> str:
        """The operator, with its domain unless that is the default one: 'MatMul', 'com.microsoft.MoE'."""
        return self._op_names[int(self._ops[i])]

    def inputs(self, i: int) -> tuple[str, ...]:
        """The inputs as written, '' where one is left out."""
        return tuple(self._nodes[i].input)

    def outputs(self, i: int) -> tuple[str, ...]:
        return tuple(self._nodes[i].output)

    def reads(self, i: int) -> tuple[str, ...]:
        """Every tensor that the node needs: its inputs and what its subgraphs capture."""
        return tuple(self._names[t] for t in self._reads[self._read_ends[i] : self._read_ends[i + 1]])

    def attribute(self, i: int, name: str, default: Any = None) -> Any:
        """An attribute as a Python value (int, float, str, list, numpy array for tensors), or `default`."""
        for attribute in self._nodes[i].attribute:
            if attribute.name == name:
                return attribute_value(attribute)
        return default

    def nodes_of(self, *ops: str) -> tuple[int, ...]:
        """The nodes with one of these operators, in graph order."""
        wanted = [k for k, name in enumerate(self._op_names) if name in ops]
        return tuple(np.flatnonzero(np.isin(self._ops, wanted)).tolist())

    def layer_of(self, *nodes: int) -> int | None:
        """The layer number that the names of these nodes, of their weights or of their scopes agree on, if any."""
        found: dict[int, int] = {}
        for i in nodes:
            node = self._nodes[i]
            for text in (node.name, *node.input, *(p.value for p in node.metadata_props), *node.output):
                match = _LAYER.search(text)
                if match:
                    found[int(match[1])] = found.get(int(match[1]), 0) + 1
                    break
        return max(found, key=lambda layer: found[layer]) if found else None

    # --- many at once: tensors as numbers

    def ids(self, names: Iterable[str]) -> np.ndarray:
        """The numbers of tensors that the graph knows."""
        return np.array([self._ids[name] for name in names if name in self._ids], np.int64)

    def names(self, ids: Iterable[int]) -> list[str]:
        return [self._names[t] for t in ids]

    def ops_of(self, nodes: np.ndarray | slice) -> np.ndarray:
        """A number for the operator of each of these nodes."""
        return np.asarray(self._ops[nodes])

    def op_numbers(self, *ops: str) -> list[int]:
        return [k for k, name in enumerate(self._op_names) if name in ops]

    def read_by(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What nodes read, one after the other, and how many tensors each of them reads."""
        return _ranges(self._reads, self._read_ends, nodes)

    def made_by(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What nodes make, and how many tensors each of them makes."""
        return _ranges(self._makes, self._make_ends, nodes)

    def readers_of(self, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that read these tensors, and how many readers each of them has."""
        return _ranges(self._readers, self._reader_ends, tensors)

    def unused_prefix(self, wanted: str) -> str:
        """`wanted`, or that with a number, so that nothing is called 'prefix/…' yet: a model may be fused twice."""
        prefix, count = wanted, 1
        while prefix in self._prefixes:
            count += 1
            prefix = f"{wanted}_{count}"
        return prefix

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        """What the names in the graph begin with, up to a slash."""
        names = (*self._names, *(node.name for node in self._nodes))
        return frozenset(name.partition("/")[0] for name in names if "/" in name)

    # --- tensors

    def producer(self, name: str) -> int | None:
        """The node that makes a tensor; None for inputs, initializers and unknown names."""
        tensor = self._ids.get(name)
        if tensor is None or self._producer[tensor] < 0:
            return None
        return int(self._producer[tensor])

    def consumers(self, name: str) -> tuple[int, ...]:
        """The nodes that read a tensor, each as often as it reads it, in graph order."""
        tensor = self._ids.get(name)
        if tensor is None:
            return ()
        return tuple(self._readers[self._reader_ends[tensor] : self._reader_ends[tensor + 1]].tolist())

    def is_initializer(self, name: str) -> bool:
        """Whether a tensor is an initializer that no caller can override."""
        return name in self.model.weights and name not in self.overridable

    def is_constant(self, name: str) -> bool:
        """Whether a tensor depends on nothing but initializers and Constant nodes."""
        tensor = self._ids.get(name)
        return tensor is not None and bool(self._constants[tensor])

    @cached_property
    def _constants(self) -> np.ndarray:
        constant = np.zeros(len(self._names), bool)
        for name in self.model.weights:
            constant[self._ids[name]] = name not in self.overridable
        random = {k for k, name in enumerate(self._op_names) if name in _RANDOM}
        for i, node in enumerate(self._nodes):
            reads = self._reads[self._read_ends[i] : self._read_ends[i + 1]]
            if (not len(reads) or constant[reads].all()) and int(self._ops[i]) not in random:
                for name in node.output:
                    if name:
                        constant[self._ids[name]] = True
        return constant

    def constant_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of an initializer or Constant, through casts and transposes; None if it takes a run to know."""
        permutations = []
        while name not in self.model.weights:
            i = self.producer(name)
            if i is None:
                return None
            op = self.op(i)
            if op == "Constant":
                value = constant_value(self._nodes[i])
                shape: tuple[int, ...] = value.shape
                break
            if op == "Transpose":
                permutations.append(self.attribute(i, "perm"))
            elif op not in _SAME_SHAPE:
                return None
            name = self._nodes[i].input[0]
        else:
            shape = self.model.weights[name].shape
        for permutation in reversed(permutations):
            shape = tuple(shape[axis] for axis in permutation) if permutation else shape[::-1]
        return shape

    def elem_type(self, name: str) -> int:
        """The element type of a tensor (TensorProto.DataType), 0 where neither the file nor the operators tell."""
        chain, tensor = [], name
        while tensor not in self._elem_types:
            i = self.producer(tensor)
            if i is None:
                self._elem_types[tensor] = 0
                break
            chain.append(tensor)
            rule = elem_type_rule(self._nodes[i], self.outputs(i).index(tensor))
            if isinstance(rule, Like):
                inputs = self._nodes[i].input
                tensor = next((name for name in (*inputs[rule.input :], *inputs) if name), "")
            else:
                self._elem_types[tensor] = rule
        for link in chain:
            self._elem_types[link] = self._elem_types[tensor]
        return self._elem_types[name]

    @cached_property
    def _elem_types(self) -> dict[str, int]:
        graph = self.model.proto.graph
        known = {name: weight.elem_type for name, weight in self.model.weights.items()}
        for info in (*graph.value_info, *graph.input, *graph.output):
            if info.type.tensor_type.elem_type:
                known[info.name] = info.type.tensor_type.elem_type
        return known

    @cached_property
    def graph_inputs(self) -> Mapping[str, InputInfo]:
        """The inputs that a caller must feed (initializers may be listed as inputs too; those have a default)."""
        return {
            info.name: InputInfo(info.name, info.type.tensor_type.elem_type, _dims(info))
            for info in self.model.proto.graph.input
            if info.name not in self.model.weights
        }

    @cached_property
    def overridable(self) -> frozenset[str]:
        """From IR 4 on, an initializer that is listed as an input is only a default."""
        proto = self.model.proto
        return frozenset(i.name for i in proto.graph.input if proto.ir_version >= 4 and i.name in self.model.weights)

    @cached_property
    def graph_outputs(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.model.proto.graph.output)

    @cached_property
    def opset(self) -> int:
        """The version of the default operator set."""
        return max((o.version for o in self.model.proto.opset_import if o.domain in ("", "ai.onnx")), default=1)

    def descendants(
        self, starts: Iterable[str], skip_ops: Collection[str] = ("Shape", "Size"), stop: Collection[str] = ()
    ) -> set[str]:
        """Every tensor that depends on one of `starts`, not through an operator in `skip_ops`, nor through `stop`."""
        found = set(starts)
        stack = list(found)
        while stack:
            for i in self.consumers(stack.pop()):
                if self.op(i) in skip_ops:
                    continue
                for name in self._nodes[i].output:
                    if name and name not in found and name not in stop:
                        found.add(name)
                        stack.append(name)
        return found


def _ranges(values: np.ndarray, ends: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries values[ends[k] : ends[k + 1]] for each k of `which`, and how many these are."""
    starts, counts = ends[which], ends[which + 1] - ends[which]
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) if len(which) else starts
    return values[np.arange(int(counts.sum())) + offsets], counts


def _dims(info: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    if not info.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in info.type.tensor_type.shape.dim
    )
