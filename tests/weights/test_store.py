"""Constants through view chains: equal to what ONNX Runtime computes, and not copied."""

import mmap

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, save_model

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.weights import store
from ortmoe_cli.weights.store import lookup


class Chain:
    """A graph of one weight and the nodes that look at it."""

    def __init__(self, weight, name="w", opset=20):
        self.nodes, self.tensors, self.opset = [], [numpy_helper.from_array(weight, name)], opset
        self.last = name

    def then(self, op, *operands, out=0, outputs=1, **attributes):
        names = []
        for operand in operands:
            names.append(f"c{len(self.tensors)}" if operand is not None else "")
            if operand is not None:
                self.tensors.append(numpy_helper.from_array(np.asarray(operand, np.int64), names[-1]))
        results = [f"t{len(self.nodes)}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, [self.last, *names], results, **attributes))
        self.last = results[out]
        return self

    def save(self, path, inputs=()):
        graph = helper.make_graph(
            [*self.nodes, helper.make_node("Identity", [self.last], ["out"])],
            "g",
            list(inputs),
            [helper.make_empty_tensor_value_info("out")],
            self.tensors,
        )
        save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10), path)
        return path

    def look(self, path, name=None):
        index = Index(open_model(self.save(path)))
        return lookup(index, Cutter(index), name or self.last), index


def expected(path):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {})[0]


def weight(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def mapped(value, index):
    return any(np.shares_memory(value, data) for data in index.model._maps.values())


@st.composite
def steps(draw):
    """A chain of one to four view operators over `[8, 6, 10]`, each valid where it stands."""
    shape, chain = (8, 6, 10), Chain(weight(8, 6, 10))
    probe = np.empty(shape)
    for _ in range(draw(st.integers(1, 4))):
        rank, op = probe.ndim, draw(st.sampled_from(OPS))
        axis = draw(st.integers(-rank, rank - 1)) if rank else 0
        if not rank and op not in ("Identity", "Cast", "Unsqueeze", "Flatten"):
            continue
        probe = OPS_DRAW[op](draw, chain, probe, axis)
    return chain


def d_transpose(draw, chain, probe, axis):
    perm = draw(st.permutations(range(probe.ndim)))
    chain.then("Transpose", perm=perm) if draw(st.booleans()) else chain.then("Transpose")
    return probe.transpose(perm) if "perm" in str(chain.nodes[-1]) else probe.T


def d_reshape(draw, chain, probe, axis):
    dims = [probe.size, 1] if draw(st.booleans()) or probe.ndim < 2 else [0, -1]
    if 0 in probe.shape:
        dims = list(probe.shape)
    chain.then("Reshape", dims)
    return np.empty([probe.shape[0], probe.size // probe.shape[0]] if dims == [0, -1] else dims)


def d_flatten(draw, chain, probe, axis):
    axis = draw(st.integers(-probe.ndim, probe.ndim))
    chain.then("Flatten", axis=axis)
    cut = axis + probe.ndim if axis < 0 else axis
    return np.empty((int(np.prod(probe.shape[:cut])), int(np.prod(probe.shape[cut:]))))


def d_squeeze(draw, chain, probe, axis):
    if draw(st.booleans()):
        chain.then("Squeeze")
        return probe.squeeze()
    ones = [k for k, n in enumerate(probe.shape) if n == 1][:1]
    if ones:
        chain.then("Squeeze", [ones[0] - probe.ndim])
        return probe.squeeze(ones[0])
    return probe


def d_unsqueeze(draw, chain, probe, axis):
    chain.then("Unsqueeze", [0, -1])
    return probe[None, ..., None]


def d_identity(draw, chain, probe, axis):
    chain.then("Identity")
    return probe


def d_cast(draw, chain, probe, axis):
    chain.then("Cast", to=TensorProto.FLOAT)
    return probe


def d_slice(draw, chain, probe, axis):
    n, far = probe.shape[axis], 2**62
    start = draw(st.one_of(st.integers(-n - 2, n + 2), st.sampled_from([far, -far])))
    end = draw(st.one_of(st.integers(-n - 2, n + 2), st.sampled_from([far, -far])))
    stride = draw(st.sampled_from([1, 2, -1, -3]))
    if not range(*slice(start, end, stride).indices(n)):
        return probe
    chain.then("Slice", [start], [end], [axis], [stride])
    return probe[(slice(None),) * (axis % probe.ndim) + (slice(start, end, stride),)]


def d_gather(draw, chain, probe, axis):
    n = probe.shape[axis]
    one = st.integers(-n, n - 1)
    picks = draw(st.one_of(one, st.lists(one, min_size=1, max_size=3), st.just(list(range(n))[::-2])))
    chain.then("Gather", picks, axis=axis)
    return np.take(probe, picks, axis)


def d_split(draw, chain, probe, axis):
    n = probe.shape[axis]
    if draw(st.booleans()):
        first = draw(st.integers(1, n))
        out = draw(st.integers(0, 1)) if first < n else 0
        chain.then("Split", [first, n - first], out=out, outputs=2, axis=axis)
        return np.split(probe, [first], axis)[out]
    parts = draw(st.integers(1, min(n, 3)))
    size = -(-n // parts)
    if size * (parts - 1) >= n:
        return probe
    out = draw(st.integers(0, parts - 1))
    chain.then("Split", out=out, outputs=parts, axis=axis, num_outputs=parts)
    return np.split(probe, range(size, n, size), axis)[out]


OPS_DRAW = {key[2:].capitalize(): value for key, value in list(globals().items()) if key.startswith("d_")}
OPS = sorted(OPS_DRAW)


@settings(max_examples=150, deadline=None)
@given(steps())
def test_chains_equal_the_runtime(tmp_path_factory, chain):
    path = tmp_path_factory.mktemp("chain") / "m.onnx"
    value, _ = chain.look(path)
    reference = expected(path)
    assert value.shape == reference.shape
    np.testing.assert_array_equal(value, reference)
    assert not value.flags.writeable


VIEWS = [
    Chain(weight(8, 6, 10)),
    Chain(weight(8, 6, 10)).then("Transpose", perm=[0, 2, 1]).then("Gather", 3, axis=0),
    Chain(weight(8, 6, 10)).then("Gather", [1, 3, 5], axis=1),
    Chain(weight(480)).then("Gather", -7).then("Reshape", [1]),
    Chain(weight(480)).then("Gather", 7),
    Chain(weight(8, 6, 10)).then("Split", out=1, outputs=3, axis=0, num_outputs=3),
    Chain(weight(8, 6, 10)).then("Gather", [5, 3, 1], axis=-2).then("Gather", [7, 5, 3, 1]),
    Chain(weight(8, 6, 10)).then("Gather", [4, 2, 0], axis=1),
    Chain(weight(8, 6, 10)).then("Flatten", axis=-1).then("Reshape", [0, 5, -1]),
    Chain(weight(8, 6, 10)).then("Reshape", [48, 10]).then("Slice", [12], [18]).then("Transpose"),
    Chain(weight(8, 6, 10)).then("Split", [2, 4], out=1, outputs=2, axis=1).then("Cast", to=TensorProto.FLOAT),
    Chain(weight(8, 6, 10)).then("Unsqueeze", [0]).then("Squeeze", [0]).then("Identity").then("Flatten", axis=2),
]


@pytest.mark.parametrize("chain", VIEWS, ids=lambda c: "-".join(n.op_type for n in c.nodes) or "none")
def test_views_are_not_copied(tmp_path, chain):
    value, index = chain.look(tmp_path / "m.onnx")
    assert mapped(value, index)
    np.testing.assert_array_equal(value, expected(tmp_path / "m.onnx"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8])
def test_types_are_kept(tmp_path, dtype):
    value, index = Chain(weight(32, 64, dtype=dtype)).then("Transpose").look(tmp_path / "m.onnx")
    assert value.dtype == dtype
    assert mapped(value, index)
    assert value.tobytes() == weight(32, 64, dtype=dtype).T.tobytes()


def test_older_operator_sets_keep_numbers_in_attributes(tmp_path):
    chain = Chain(weight(8, 6, 10), opset=9)
    chain.then("Slice", starts=[1, 2], ends=[7, 100], axes=[0, 2]).then("Unsqueeze", axes=[1])
    chain.then("Split", out=1, outputs=2, axis=0, split=[2, 4]).then("Squeeze", axes=[1])
    value, index = chain.look(tmp_path / "m.onnx")
    assert mapped(value, index)
    np.testing.assert_array_equal(value, weight(8, 6, 10)[1:7, :, 2:][2:])


def test_allowzero(tmp_path, monkeypatch):
    chain = Chain(weight(8, 40)).then("Slice", [0], [0]).then("Reshape", [40, 0], allowzero=1)
    monkeypatch.setattr(Cutter, "_session", None)
    assert chain.look(tmp_path / "m.onnx")[0].shape == (40, 0)


@pytest.mark.parametrize("spill", [1 << 30, 1])
def test_a_reshape_across_a_transpose_is_copied_once(tmp_path, monkeypatch, spill):
    """In memory where small, in a file where big; the file is gone with the array."""
    monkeypatch.setattr(store, "SPILL", spill)
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    chain = Chain(weight(8, 6, 10)).then("Transpose", perm=[2, 0, 1]).then("Reshape", [80, 6]).then("Transpose")
    value, index = chain.look(tmp_path / "m.onnx")
    assert not mapped(value, index)
    np.testing.assert_array_equal(value, expected(tmp_path / "m.onnx"))
    base = value
    while base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base.base, mmap.mmap) == (spill == 1)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


EVALUATED = [
    Chain(weight(8, 6, 10)).then("Neg"),
    Chain(weight(8, 6, 10)).then("Neg").then("Transpose"),
    Chain(weight(8, 6, 10)).then("Cast", to=TensorProto.DOUBLE).then("Transpose"),
    Chain(weight(8, 6, 10)).then("Gather", [[0, 1], [2, 3]]),
    Chain(weight(8, 6, 10)).then("Gather", [0, 1, 5]),
]


@pytest.mark.parametrize("chain", EVALUATED, ids=lambda c: "-".join(n.op_type for n in c.nodes))
def test_other_chains_are_evaluated(tmp_path, chain):
    value, index = chain.look(tmp_path / "m.onnx")
    assert not mapped(value, index)
    np.testing.assert_array_equal(value, expected(tmp_path / "m.onnx"))


def test_what_can_change_is_not_constant(tmp_path):
    """A weight that is also an input is only its default value."""
    chain = Chain(weight(8, 6, 10)).then("Transpose")
    info = helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 6, 10])
    index = Index(open_model(chain.save(tmp_path / "m.onnx", [info])))
    for name in ("w", chain.last):
        with pytest.raises(CutError, match="free"):
            lookup(index, Cutter(index), name)


def test_a_node_that_does_not_fit_is_the_runtimes_to_explain(tmp_path):
    with pytest.raises(CutError):
        Chain(weight(8, 6, 10)).then("Reshape", [7, 7]).look(tmp_path / "m.onnx")
