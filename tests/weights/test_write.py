"""What is written is what was read, wherever the weights lie and wherever the output goes."""

import os
import resource
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.errors import ModelError, OutputError
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.weights import files, layout
from ortmoe_cli.weights.write import write_model
from tests.weights.models import COLS, ROWS, build, full, noise, packed


def write(path, target, names=(), **options):
    model = open_model(path)
    weights = [packed(model, names)] if names else []
    return write_model(model, model.proto, weights, model.array, target, **options)


def run(path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": noise(77, ROWS, COLS)})[0]


def with_packed(path, names):
    """The input with the packed weight added by onnx itself."""
    model = onnx.load(path)
    values = np.stack([numpy_helper.to_array(t).T for n in names for t in model.graph.initializer if t.name == n])
    header = TensorProto(name="packed", data_type=TensorProto.FLOAT, dims=values.shape, raw_data=values.tobytes())
    model.graph.initializer.append(header)
    return model.SerializeToString(deterministic=True)


def comparable(message):
    """onnx keeps the default data location of a tensor that it loaded from outside; that is not a difference."""
    model = onnx.ModelProto.FromString(message)
    for tensor in layout._tensors(model):
        tensor.ClearField("data_location")
    return model.SerializeToString(deterministic=True)


PLACES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLACES, st.integers(0, 3), st.sampled_from(["same", "other"]), st.sampled_from([0, 1 << 40]), st.booleans())
def test_nothing_is_lost(tmp_path_factory, places, count, where, packed_limit, crowded):
    """Byte-equal as onnx reads it: inline, outside, mixed and nested, with and without packed weights."""
    inline, external, nested = places
    folder = tmp_path_factory.mktemp("in")
    path = build(folder, inline=inline, external=external, nested=nested)
    names = [f"w{k}" for k in range(min(count, inline + external))]
    before = {p: p.read_bytes() for p in folder.iterdir()}
    target = (folder if where == "same" else tmp_path_factory.mktemp("out")) / "fused.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "INLINE_PACKED", packed_limit)
        if crowded:
            patch.setattr(layout, "INLINE_TOTAL", 1)
        report = write(path, target, names)
    expected = with_packed(path, names) if names else full(path)
    assert comparable(full(target)) == comparable(expected)
    assert {p: p.read_bytes() for p in before} == before
    outside = external or nested or (crowded and (inline or names)) or (names and not packed_limit)
    assert (report.data is not None) == bool(outside)
    assert report.proto_bytes == target.stat().st_size
    assert report.data_bytes == (report.data.stat().st_size if report.data else 0)
    assert report.moved == (inline if crowded else 0)
    locations = {t.name: t.data_location for t in onnx.load(target, load_external_data=False).graph.initializer}
    assert not names or (locations["packed"] == TensorProto.EXTERNAL) == bool(outside)
    assert {p.name for p in target.parent.iterdir()} - {p.name for p in before} == {
        "fused.onnx",
        *(["fused.onnx.data"] if outside else []),
    }
    if not nested:  # the runtime wants weights of subgraphs inside
        np.testing.assert_array_equal(run(target), run(path))


def test_an_untouched_inline_model_is_written_without_parsing_weights(tmp_path):
    """Initializers keep their order, and inline weights stay inline."""
    path = build(tmp_path, inline=3, external=0)
    write(path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx.data").exists()
    names = [t.name for t in onnx.load(tmp_path / "out.onnx").graph.initializer]
    assert names == ["w0", "small", "w1", "w2", "typed"]


def test_offsets_are_aligned_and_shared_weights_stored_once(tmp_path):
    path = build(tmp_path, inline=0, external=3)
    model = onnx.load(path, load_external_data=False)
    twin = model.graph.initializer.add()
    twin.CopyFrom(next(t for t in model.graph.initializer if t.name == "w1"))
    twin.name = "twin"
    path.write_bytes(model.SerializeToString())
    report = write(path, tmp_path / "out.onnx", ["w0", "w2"])
    entries = {}
    for tensor in onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.initializer:
        if tensor.external_data:
            entries[tensor.name] = {e.key: e.value for e in tensor.external_data}
    assert entries["w1"] == entries["twin"]
    assert {e["location"] for e in entries.values()} == {"out.onnx.data"}
    assert all(int(e["offset"]) % 4096 == 0 for e in entries.values())
    assert report.data_bytes < 5 * 4096
    assert report.copied_bytes == 3 * ROWS * COLS * 4
    assert report.packed_bytes == 2 * ROWS * COLS * 4
    np.testing.assert_array_equal(run(tmp_path / "out.onnx"), run(path))


def test_relative_paths_and_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    build(tmp_path / "a")
    expected = run(tmp_path / "a/model.onnx")
    monkeypatch.chdir(tmp_path / "a")
    write(type(tmp_path)("model.onnx"), type(tmp_path)("../b/out.onnx"), ["w0"])
    write(type(tmp_path)("model.onnx"), type(tmp_path)("out.onnx"), ["w0"])
    monkeypatch.chdir("/")
    for path in (tmp_path / "b/out.onnx", tmp_path / "a/out.onnx"):
        np.testing.assert_array_equal(run(path), expected)
    (tmp_path / "b").rename(tmp_path / "c")
    np.testing.assert_array_equal(run(tmp_path / "c/out.onnx"), expected)


@pytest.mark.parametrize("name", ["ünïcode é.onnx", "with space.onnx", "x" * 240 + ".onnx", "noext"])
def test_names(tmp_path, name):
    path = build(tmp_path)
    write(path, tmp_path / name)
    np.testing.assert_array_equal(run(tmp_path / name), run(path))


@pytest.mark.parametrize("ir_version", [3, 8])
def test_packed_weights_load_in_every_ir_version(tmp_path, ir_version):
    model = onnx.load(build(tmp_path))
    path, inputs = tmp_path / "old.onnx", ["x", "w0"] if ir_version < 4 else ["x"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "packed"], ["out"])],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, COLS]) for name in inputs],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, ROWS, ROWS])],
        [t for t in model.graph.initializer if t.name == "w0"],
    )
    opsets = [helper.make_opsetid("", 7)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path)
    write(path, tmp_path / "out.onnx", ["w0"])
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    np.testing.assert_allclose(run(tmp_path / "out.onnx")[0], noise(77, ROWS, COLS) @ noise(0, ROWS, COLS).T, rtol=1e-4)


@pytest.mark.parametrize("mover", files.MOVERS)
@pytest.mark.parametrize("gives_up", [None, OSError(18, "Invalid cross-device link"), 0])
def test_every_way_to_copy(tmp_path, monkeypatch, mover, gives_up):
    """Each way alone gives the same file, also after a faster one that stops half-way, with an error or silently."""
    calls = []

    def faster(source, target, offset, count):
        calls.append(offset)
        if len(calls) <= 2:
            return by_hand(source, target, offset, count)
        if gives_up:
            raise gives_up
        return 0

    by_hand = files.MOVERS[-1]
    monkeypatch.setattr(files, "_SMALL", 0)
    monkeypatch.setattr(files, "BLOCK", 1000)
    monkeypatch.setattr(files, "MOVERS", (mover,) if gives_up is None else (faster, mover))
    path = build(tmp_path, external=2, inline=2)
    write(path, tmp_path / "out.onnx")
    assert comparable(full(tmp_path / "out.onnx")) == comparable(full(path))
    assert len(calls) == (0 if gives_up is None else 4)  # each of the two files tries anew


def test_progress(tmp_path):
    seen = []
    report = write(build(tmp_path), tmp_path / "out.onnx", ["w0"], progress=lambda *step: seen.append(step))
    total = report.proto_bytes + report.data_bytes
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_permissions(tmp_path):
    """New files obey the umask, replaced ones keep what they had; a new data file is no more open than its graph."""
    path, target = build(tmp_path), tmp_path / "out.onnx"
    old = os.umask(0o027)
    try:
        write(path, target)
    finally:
        os.umask(old)
    data = tmp_path / "out.onnx.data"
    assert [p.stat().st_mode & 0o777 for p in (target, data)] == [0o640, 0o640]
    target.chmod(0o600)
    data.unlink()
    write(path, target)
    assert [p.stat().st_mode & 0o777 for p in (target, data)] == [0o600, 0o600]


def test_a_weight_file_that_shrinks_is_noticed(tmp_path):
    path = build(tmp_path)
    model = open_model(path)
    os.truncate(tmp_path / "weights.bin", 100)
    with pytest.raises(ModelError, match="became shorter"):
        write_model(model, model.proto, [], model.array, tmp_path / "out.onnx")
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".ortmoe*"))


def test_the_input_is_not_kept_mapped(tmp_path):
    """A mapped file cannot be replaced or deleted on every system, and counts as memory."""
    model = open_model(build(tmp_path))
    write_model(model, model.proto, [packed(model, ["w0"])], model.array, tmp_path / "out.onnx")
    assert not model._maps


def test_a_model_with_a_data_file_keeps_one(tmp_path):
    """Also when every external weight was repacked, however small the result."""
    model = open_model(build(tmp_path, inline=0, external=1))
    proto = onnx.ModelProto.FromString(model.proto.SerializeToString())
    del proto.graph.initializer[0]
    assert proto.graph.initializer[0].name != "w0"
    report = write_model(model, proto, [packed(model, ["w0"])], model.array, tmp_path / "out.onnx")
    assert report.data_bytes == report.packed_bytes == ROWS * COLS * 4


def test_two_weights_of_one_name(tmp_path):
    model = open_model(build(tmp_path))
    twins = [packed(model, ["w0"]), packed(model, ["w1"])]
    with pytest.raises(ValueError, match="two initializers called 'packed'"):
        write_model(model, model.proto, twins, model.array, tmp_path / "out.onnx")


def test_a_graph_beyond_protobuf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(layout.Layout, "proto_bytes", property(lambda self: 1 << 31))
    with pytest.raises(OutputError, match="2 GiB"):
        write(build(tmp_path), tmp_path / "out.onnx")


MEMORY = """
import resource, sys
from pathlib import Path
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.weights.pack import PackedWeight, Piece
from ortmoe_cli.weights.write import write_model
model = open_model(Path(sys.argv[1]))
E, rows, cols = model.weights["w"].shape
plan = PackedWeight("packed", 1, (E, cols, rows), tuple((Piece("w", e, True),) for e in range(E)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_model(model, model.proto, [plan], model.array, Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize("external", [True, False])
def test_memory_does_not_grow_with_the_model(tmp_path, external):
    """96 MB copied and 96 MB packed in experts of 4 MB."""
    weight = np.zeros((24, 1024, 1024), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(
        helper.make_model(graph, ir_version=10),
        tmp_path / "m.onnx",
        save_as_external_data=external,
        location="w.bin" if external else None,
    )
    arguments = [sys.executable, "-c", MEMORY, str(tmp_path / "m.onnx"), str(tmp_path / "o.onnx")]
    grown = int(subprocess.run(arguments, capture_output=True, check=True, text=True).stdout) << 10
    assert (tmp_path / "o.onnx.data").stat().st_size >= weight.nbytes
    assert grown < 32 << 20, f"{grown:,} bytes"


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    """A real refusal of the system: files may not grow beyond some size."""
    path = build(tmp_path, external=3)
    before = sorted(p.name for p in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            write(path, tmp_path / "out.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
