"""Cuts a piece out of a graph and runs it in ONNX Runtime.

A cut goes from the tensors that are fed to the tensors that are asked for. It is evaluated as a float32 shadow (see
`shadow`). Large weights are inputs of the cut, not part of it: pieces of equal structure, layer after layer, share one
session, and memory-mapped weights are read by the kernels where they lie.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index, constant_value
from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.order import reads_of
from ortmoe_cli.graph.shadow import shadow_node, value_info, widen

_INLINE_ELEMENTS = 32
"""Floating-point constants of more elements than this are fed, so that layers differ in their feeds only."""
_INLINE_BYTES = 4096
"""Any constant larger than this is fed."""
_CONSTANT_CACHE_BYTES = 1 << 16
_SESSIONS = 24

Feeds = Mapping[str, np.ndarray]


class CutError(Exception):
    """A cut cannot be evaluated. `reason`: 'free' (it needs a graph input), 'load' or 'run' (the runtime refuses)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Region:
    """The nodes between two sets of tensors, in graph order; the graph inputs they need; every tensor they touch."""

    nodes: tuple[int, ...]
    free: frozenset[str]
    reached: frozenset[str]


class Cutter:
    """Evaluates pieces of one graph. `byte_budget` is what callers should let one run allocate."""

    def __init__(self, index: Index, byte_budget: int = 256 << 20) -> None:
        self.index, self.byte_budget = index, byte_budget
        self._sessions: OrderedDict[bytes, ort.InferenceSession] = OrderedDict()
        self._constants: dict[str, np.ndarray] = {}

    def region(self, outputs: Iterable[str], stops: Collection[str]) -> Region:
        """What has to be computed for `outputs` when the values of `stops` are given."""
        index, nodes, free, reached = self.index, set(), set(), set()
        stack = list(outputs)
        while stack:
            name = stack.pop()
            if name in reached:
                continue
            reached.add(name)
            if name in stops or index.is_initializer(name):
                continue
            i = index.producer(name)
            if i is None:
                free.add(name)
            elif i not in nodes:
                nodes.add(i)
                stack.extend(index.reads(i))
        return Region(tuple(sorted(nodes)), frozenset(free), frozenset(reached))

    def run(self, outputs: Sequence[str], feeds: Feeds) -> dict[str, np.ndarray]:
        """The values of `outputs` when the tensors in `feeds` have the given values. Halves go in and out as float32.

        Raises CutError.
        """
        region = self.region(outputs, feeds)
        if region.free:
            raise CutError("free", f"needs the graph input {', '.join(map(repr, sorted(region.free)))}")
        values = {name: widen(np.asarray(feeds[name])) for name in region.reached if name in feeds}
        known = dict(values)
        for name in region.reached:
            if self.index.is_initializer(name) and name not in values:
                values[name] = widen(self.index.model.array(name))
        computed = [name for name in outputs if name not in values]
        results = self._evaluate([self.index.node(i) for i in region.nodes], values, computed, always=known)
        return {name: results[name] if name in results else values[name] for name in outputs}

    def run_island(self, island: Island, feeds: Feeds, weights: Feeds) -> dict[str, np.ndarray]:
        """The outputs of a replacement alone, in the same shadow, given what it reads from the graph."""
        values = {name: widen(np.asarray(value)) for name, value in (*feeds.items(), *weights.items())}
        values |= {name: widen(value) for name, value in island.constants.items()}
        return self._evaluate(island.nodes, values, island.outputs, always=feeds)

    def constant(self, name: str) -> np.ndarray:
        """The value of a constant tensor in its own element type; a view of the file where it is an initializer.

        Raises CutError where the runtime cannot compute it.
        """
        if self.index.is_initializer(name):
            return self.index.model.array(name)
        if name in self._constants:
            return self._constants[name]
        i = self.index.producer(name)
        if i is not None and self.index.op(i) == "Constant":
            value = constant_value(self.index.node(i))
        else:
            own = helper.tensor_dtype_to_np_dtype(self.index.elem_type(name) or onnx.TensorProto.FLOAT)
            value = self.run([name], {})[name]
            value = value.astype(own) if value.dtype.kind == "f" and value.dtype != own else value
        if value.nbytes <= _CONSTANT_CACHE_BYTES:
            self._constants[name] = value
        return value

    def release(self) -> None:
        """Drop sessions and maps, and with them the memory they hold."""
        self._sessions.clear()
        self.index.model.release()

    def _evaluate(
        self, nodes: Sequence[NodeProto], values: Feeds, outputs: Sequence[str], always: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Run nodes on values. Values that are large, or named in `always`, are fed; the others are built in."""
        if not outputs:
            return {}
        read = {name for node in nodes for name in reads_of(node)}
        used = [name for name in sorted(values) if name in read or name in outputs]
        names = _numbered(nodes, used)
        fed = [name for name in used if name in always or _is_large(values[name])]
        graph = helper.make_graph(
            [shadow_node(node, names) for node in nodes],
            "cut",
            [value_info(names[name], values[name]) for name in fed],
            [onnx.ValueInfoProto(name=names.get(name, name)) for name in outputs],
            [numpy_helper.from_array(values[name], names[name]) for name in used if name not in fed],
        )
        session = self._session(graph)
        feeds = {names[name]: np.ascontiguousarray(values[name]) for name in fed}
        try:
            results = session.run(None, feeds)
        except Exception as error:
            raise CutError("run", _first_line(error)) from error
        return dict(zip(outputs, results, strict=True))

    def _session(self, graph: onnx.GraphProto) -> ort.InferenceSession:
        source = self.index.model.proto
        opsets = {o.domain: o.version for o in source.opset_import}
        opsets.setdefault("com.microsoft", 1)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
            functions=list(source.functions),
            ir_version=max(8, min(source.ir_version, 12)),
        )
        key = model.SerializeToString(deterministic=True)
        if key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(key, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise CutError("load", _first_line(error)) from error
        self._sessions[key] = session
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return session


def _is_large(value: np.ndarray) -> bool:
    return value.nbytes > _INLINE_BYTES or (value.dtype.kind == "f" and value.size > _INLINE_ELEMENTS)


def _numbered(nodes: Sequence[NodeProto], values: Sequence[str]) -> dict[str, str]:
    """Names by order of appearance, so that pieces of equal structure become equal bytes."""
    names: dict[str, str] = {}
    for node in nodes:
        for name in (*reads_of(node), *node.output):
            if name and name not in names:
                names[name] = f"t{len(names)}"
    for name in values:
        names.setdefault(name, f"t{len(names)}")
    return names


def _first_line(error: Exception) -> str:
    text = str(error).split("Status Message:")[-1].strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
