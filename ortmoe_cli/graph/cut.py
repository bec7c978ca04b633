"""Cuts a piece out of a graph and runs it in ONNX Runtime.

A cut goes from the tensors that are fed to the tensors that are asked for. It is evaluated as a float32 shadow (see
`shadow`). Large weights are inputs of the cut, not part of it: pieces of equal structure, layer after layer, share one
session, and memory-mapped weights are read by the kernels where they lie.
"""

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.plan import Cut, Feeds, build
from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.graph.values import constant_value

_CONSTANT_CACHE_BYTES = 1 << 16
_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20
_SESSIONS = 24
_PLANS = 48


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


@dataclass(frozen=True)
class _Plan:
    """A cut that is ready to run: for equal outputs and feeds the graph is not walked twice.

    computed: the outputs that the session makes; the others are feeds or weights themselves.
    """

    session: ort.InferenceSession | None
    cut: Cut | None
    computed: tuple[str, ...]


class Cutter:
    """Evaluates pieces of one graph. `byte_budget` is what callers should let one run allocate."""

    def __init__(self, index: Index, byte_budget: int = 256 << 20) -> None:
        _return_memory()
        self.index, self.byte_budget = index, byte_budget
        self._sessions: OrderedDict[bytes, ort.InferenceSession] = OrderedDict()
        self._plans: OrderedDict[tuple[object, ...], _Plan] = OrderedDict()
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

    def run(self, outputs: Sequence[str], feeds: Feeds, twin: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
        """The values of `outputs` when the tensors in `feeds` have the given values. Halves go in and out as float32.

        `twin` says which weights to read instead of those that the cut names: a piece of equal structure is run as this
        one (see `twins`). Raises CutError.
        """
        twin = twin or {}
        given = {name: widen(np.asarray(value)) for name, value in feeds.items()}
        key = (tuple(outputs), *sorted((name, value.dtype.str) for name, value in given.items()))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(outputs, given)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        results: dict[str, np.ndarray] = {}
        if plan.session is not None and plan.cut is not None:
            values = (
                (inner, given[name] if name in given else self.index.model.array(twin.get(name, name)))
                for name, inner in plan.cut.fed
            )
            results = dict(zip(plan.computed, _run(plan.session, plan.cut, dict(values)), strict=True))
        for name in outputs:
            if name not in results:
                value = given[name] if name in given else self.index.model.array(twin.get(name, name))
                results[name] = widen(value)
        return {name: results[name] for name in outputs}

    def _plan(self, outputs: Sequence[str], given: Feeds) -> _Plan:
        region = self.region(outputs, given)
        if region.free:
            raise CutError("free", f"needs the graph input {', '.join(map(repr, sorted(region.free)))}")
        values = {name: given[name] for name in region.reached if name in given}
        always = frozenset(values)
        for name in region.reached:
            if self.index.is_initializer(name) and name not in values:
                values[name] = self.index.model.array(name)
        computed = tuple(dict.fromkeys(name for name in outputs if name not in values))
        if not computed:
            return _Plan(None, None, ())
        nodes = [self.index.node(i) for i in region.nodes]
        try:
            cut = build(nodes, values, computed, always)
            session = self._session(cut.graph)
        except CutError:
            cut = build(nodes, values, computed, always, late=False)  # perhaps a kernel has no half-precision form
            session = self._session(cut.graph)
        return _Plan(session, replace(cut, graph=onnx.GraphProto()), computed)

    def run_island(self, island: Island, feeds: Feeds, weights: Feeds) -> dict[str, np.ndarray]:
        """The outputs of a replacement alone, in the same shadow, given what it reads from the graph."""
        values = {name: widen(np.asarray(value)) for name, value in (*feeds.items(), *weights.items())}
        values |= {name: widen(value) for name, value in island.constants.items()}
        cut = build(island.nodes, values, island.outputs, always=feeds, late=False)
        results = _run(self._session(cut.graph), cut, {inner: values[name] for name, inner in cut.fed})
        return dict(zip(island.outputs, results, strict=True))

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
        self._plans.clear()
        self.index.model.release()

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
        serialised = model.SerializeToString(deterministic=True)
        key = hashlib.sha256(serialised).digest()
        if key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(serialised, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise CutError("load", _first_line(error)) from error
        self._sessions[key] = session
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return session


def _run(session: ort.InferenceSession, cut: Cut, feeds: Feeds) -> list[np.ndarray]:
    """The outputs of a session. Feeds are widened unless the graph takes them as they are."""
    ready = {
        name: _narrow(value, cut.narrow[name]) if name in cut.narrow else np.ascontiguousarray(widen(value))
        for name, value in feeds.items()
    }
    try:
        return [np.asarray(value) for value in session.run(None, ready)]
    except Exception as error:
        raise CutError("run", _first_line(error)) from error


def _narrow(value: np.ndarray, elem_type: int) -> ort.OrtValue:
    """Half precision as it lies in the file; numpy has no type for one of them, so the bits are handed over."""
    bits = np.ascontiguousarray(value).view(np.uint16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, elem_type)


@cache
def _return_memory() -> None:
    """Have the C library map large blocks one by one, so that what a run frees is free: by itself it raises the size
    from which it does so, and blocks of weights, widened one after the other, add up to gigabytes that it keeps."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


def _first_line(error: Exception) -> str:
    text = str(error).split("Status Message:")[-1].strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
