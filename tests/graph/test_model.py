"""Opening: weights stay in the file, and every way in which a file can be broken is one clear line."""

import contextlib
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.errors import ModelError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.validate import validate
from ortmoe_cli.graph.wire import BIG, WireError, encode_varint, strip

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int8, ml_dtypes.int4, np.bool_]


def tiny(weights: dict[str, np.ndarray], **settings: object) -> onnx.ModelProto:
    """A model that adds nothing up but carries these weights."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"], name="only")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], **settings)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3 * BIG)), max_size=5), st.booleans())
def test_weights_read_as_onnx_reads_them(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[type, int]], external: bool
) -> None:
    rng = np.random.default_rng(len(plan))
    weights = {f"w{k}": rng.integers(0, 2, size).astype(dtype) for k, (dtype, size) in enumerate(plan)}
    path = tmp_path_factory.mktemp("m") / "m.onnx"
    onnx.save(tiny(weights), path, save_as_external_data=external, size_threshold=64)
    model = open_model(path)
    assert list(model.weights) == list(weights)
    for name, value in weights.items():
        read = model.array(name)
        assert read.dtype == value.dtype
        assert read.shape == value.shape
        assert np.array_equal(read.astype(np.float32), value.astype(np.float32))
    if not external:
        assert len(model.proto.SerializeToString()) < 8 * BIG + 1024 * len(plan)
        assert all(w.span is not None for w in model.weights.values() if w.nbytes >= BIG)


def test_everything_but_the_weights_is_kept(tmp_path: Path) -> None:
    proto = tiny({"w": np.zeros(BIG, np.float32), "small": np.ones(3, np.float32)})
    proto.metadata_props.add(key="who", value="me")
    proto.graph.doc_string = "about"
    proto.graph.initializer[0].doc_string = "a weight"
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString() + encode_varint(999 << 3 | 2) + b"\x03abc")
    read = open_model(path).proto
    assert b"abc" in read.SerializeToString()
    read.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data
    assert read.SerializeToString(deterministic=True).startswith(proto.SerializeToString(deterministic=True)[:20])
    read.DiscardUnknownFields()
    assert read == proto


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no graph"),
        (b"not a model at all", "is not an ONNX model"),
        (b"\x3a\xff\xff\x7f", "is not an ONNX model"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "holds no graph"),
        (helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString(), "the graph is empty"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        open_model(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        open_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="is a folder"):
        open_model(tmp_path)


def external_model(tmp_path: Path, **entries: str) -> Path:
    proto = tiny({"w": np.arange(1000, dtype=np.float32)})
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=64)
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"location": "../m.data"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": "C:\\m.data"}, "outside the model's folder"),
        ({"location": "other.data"}, "is missing"),
        ({"offset": "8"}, "is cut short"),
        ({"offset": "-4"}, "is cut short"),
        ({"length": "3996"}, "should be 4000 bytes"),
        ({"length": "many"}, "not a number"),
    ],
)
def test_external_data_that_does_not_fit(tmp_path: Path, entries: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        open_model(external_model(tmp_path, **entries))


def test_inline_data_of_the_wrong_length(tmp_path: Path) -> None:
    proto = tiny({"w": np.zeros(1000, np.float32)})
    proto.graph.initializer[0].dims[0] = 999
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="should be 3996 bytes"):
        open_model(path)


@pytest.mark.parametrize(
    ("nodes", "outputs", "words"),
    [
        ([("Relu", ["nowhere"], ["y"])], ["y"], "reads 'nowhere', which is not made"),
        ([("Add", ["a", "x"], ["y"]), ("Relu", ["y"], ["a"])], ["y"], "a cycle"),
        ([("Relu", ["x"], ["y"]), ("Abs", ["x"], ["y"])], ["y"], "made twice"),
        ([("Relu", ["x"], ["y"])], ["z"], "nothing makes the output 'z'"),
        ([("Relu", ["x"], ["y"])], [], "no outputs"),
    ],
)
def test_graphs_that_contradict_themselves(
    tmp_path: Path, nodes: list[tuple[str, list[str], list[str]]], outputs: list[str], words: str
) -> None:
    proto = tiny({})
    del proto.graph.node[:], proto.graph.output[:]
    proto.graph.node.extend(helper.make_node(*node) for node in nodes)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=words):
        validate(Index(open_model(path)))


@given(st.binary(max_size=200))
def test_strip_never_hangs_or_crashes(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert strip(memoryview(data)).message is not None


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], raw_data=b"123"),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], float_data=[1.0, 2.0]),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4000]),
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[4], int32_data=[1]),
    ],
)
def test_values_that_are_too_few(tmp_path: Path, tensor: TensorProto) -> None:
    proto = tiny({})
    proto.graph.initializer.append(tensor)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="are stored") as caught:
        open_model(tmp_path / "m.onnx")
    assert caught.value.code == "EXT103"


def test_values_as_numbers(tmp_path: Path) -> None:
    """Every type can hold its values as numbers instead of bytes."""
    proto = tiny({})
    for elem_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT4):
        proto.graph.initializer.append(helper.make_tensor(f"w{elem_type}", elem_type, [3], [1, 0, 1]))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    model = open_model(tmp_path / "m.onnx")
    assert all(model.array(name).astype(np.float32).tolist() == [1, 0, 1] for name in model.weights)


def test_a_node_without_its_inputs(tmp_path: Path) -> None:
    proto = tiny({})
    del proto.graph.node[0].input[:]
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="'only' lacks inputs"):
        validate(Index(open_model(tmp_path / "m.onnx")))
