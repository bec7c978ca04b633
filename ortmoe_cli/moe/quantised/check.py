"""Quantised nodes as the runtime really computes them.

Verification feeds weights to its sessions. Kernels of QMoE treat fed weights and constant ones differently: constant
weights are packed ahead, and packed ones of 8 bits in blocks are multiplied with rounded activations. So the node is
also run here as a user would run it, with its weights built in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ValueInfoProto, helper, numpy_helper

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.shadow import shadow_node, value_info, widen
from ortmoe_cli.moe.bench import Bench
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.emit import Rewrite
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.packed import PackedValues
from ortmoe_cli.moe.probing import hidden_states
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Pair
from ortmoe_cli.moe.sampling import Sampler

Array = NDArray[Any]

EXACT = 1e-4
ROUNDED = 5e-2
"""The largest relative difference between a node that rounds activations and the same weights in float."""
_BUILT_IN = 256 << 20
"""Quantised weights of more bytes than this are fed."""
_MOST_RUNS = 12
_TOKENS = 24


class NodeCheck:
    """Compares quantised nodes of a block with float ones."""

    def __init__(self, index: Index, bench: Bench, block: Block, sampler: Sampler, source: Source) -> None:
        self._index, self._bench, self._block, self._sampler = index, bench, block, sampler
        self._source = source

    def differences(self, rounding: Rewrite, *exact: Rewrite) -> list[float]:
        """‖rounding − exact‖ / ‖exact‖ over tokens for every expert, for each of `exact`. Raises Refused where the node
        does not run."""
        budget = self._bench.cutter.byte_budget
        values = [PackedValues(rewrite.weights, self._source, budget) for rewrite in exact]
        codes = _Codes(rounding, self._source, budget)
        session: ort.InferenceSession | None = None
        off, size = np.zeros(len(exact)), np.zeros(len(exact))
        for fed in self._feeds({name for rewrite in (rounding, *exact) for name in rewrite.island.inputs}):
            hit = self._hit(fed)
            cutter, exit_ = self._bench.cutter, self._block.exit
            try:
                if codes.built_in:
                    session = session or _session(rounding.island, codes.all(), fed, self._index.opset)
                    feeds = {name: widen(fed[name]) for name in rounding.island.inputs}
                    got = session.run([exit_], feeds)[0]
                else:
                    got = cutter.run_island(rounding.island, _only(fed, rounding.island), codes.of(hit))[exit_]
                wanted = [
                    cutter.run_island(rewrite.island, _only(fed, rewrite.island), known.of(hit))[exit_]
                    for rewrite, known in zip(exact, values, strict=True)
                ]
            except CutError as error:
                raise Refused("MOE114", f"the quantised node does not run ({error.detail})") from error
            off += [((got.astype(np.float64) - want) ** 2).sum() for want in wanted]
            size += [(want.astype(np.float64) ** 2).sum() for want in wanted]
        if not size.all():
            raise Refused("MOE111", "the original ran on none of the probes")
        return [float(error) for error in np.sqrt(off / size)]

    def _feeds(self, names: set[str]) -> Iterator[dict[str, Array]]:
        """What the islands read, for tokens that go to every expert in turn."""
        rng = np.random.default_rng(77)
        experts, count, chosen = self._bench.router.experts, self._block.hits, self._block.source.chosen
        wanted = sorted(names | _routing(self._block))
        tokens = min(_TOKENS, self._sampler.most_tokens())
        setting = next((s for s in self._sampler.settings(tokens) if s.tokens >= min(tokens, 1)), None)
        if setting is None:
            return
        step = setting.tokens * chosen if count is None else count
        for start in range(0, min(experts, step * _MOST_RUNS), step):
            logits = self._sampler.logits(rng, setting.tokens, count, start)
            hidden = hidden_states(rng, setting.tokens, self._bench.width, (1.0,))
            try:
                yield self._bench.run(setting, wanted, hidden, logits)
            except CutError:
                continue

    def _hit(self, values: Mapping[str, Array]) -> list[int]:
        source, experts = self._block.source, self._bench.router.experts
        if isinstance(source, Pair):
            return [int(e) for e in np.unique(values[source.ids])]
        weights = values[source.weights]
        rows = weights.reshape(experts, -1).T if source.turned else weights.reshape(-1, experts)
        return [int(e) for e in np.flatnonzero((rows != 0).any(axis=0))]


def bare(block: Block) -> Block:
    """The block without what is added to the experts: an error must not hide behind that."""
    return replace(block, additions=())


class _Codes(PackedValues):
    """The weights of a quantised node; all of them at once if they are to be built in."""

    def __init__(self, rewrite: Rewrite, source: Source, budget: int) -> None:
        super().__init__(rewrite.weights, source, budget)
        self._experts = rewrite.weights[0].shape[0]
        self.built_in = sum(weight.nbytes for weight in rewrite.weights) <= min(_BUILT_IN, budget)

    def all(self) -> dict[str, Array]:
        return self.of(range(self._experts))


def _routing(block: Block) -> set[str]:
    source = block.source
    return {source.ids, source.weights} if isinstance(source, Pair) else {source.weights}


def _only(values: Mapping[str, Array], island: Island) -> dict[str, Array]:
    return {name: values[name] for name in island.inputs}


def _session(
    island: Island, weights: Mapping[str, Array], fed: Mapping[str, Array], opset: int
) -> ort.InferenceSession:
    """The island with its weights built in, in the float32 shadow."""
    constants = {name: widen(value) for name, value in (*island.constants.items(), *weights.items())}
    graph = helper.make_graph(
        [shadow_node(node, {}) for node in island.nodes],
        "node",
        [value_info(name, widen(fed[name])) for name in island.inputs],
        [ValueInfoProto(name=name) for name in island.outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        data = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CutError("load", str(error).replace("\n", " ")[:300]) from error
