"""The index answers what a walk over the nodes would."""

from pathlib import Path

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.validate import validate


@st.composite
def chains(draw: st.DrawFn) -> onnx.ModelProto:
    """Random graphs of nodes with one or two inputs; some depend on the input, some only on a constant."""
    names, nodes = ["x", "c"], []
    for k in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.sampled_from([*names, ""]), min_size=1, max_size=2).filter(any))
        nodes.append(helper.make_node("Sum", inputs, [f"t{k}"], name=f"n{k}"))
        names.append(f"t{k}")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [onnx.ValueInfoProto(name=names[-1])],
        [numpy_helper.from_array(np.zeros(2, np.float32), "c")],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10)


def opened(folder: Path, proto: onnx.ModelProto) -> Index:
    onnx.save(proto, folder / "m.onnx")
    return Index(open_model(folder / "m.onnx"))


@settings(max_examples=60, deadline=None)
@given(chains())
def test_against_a_plain_walk(tmp_path_factory, proto: onnx.ModelProto) -> None:  # type: ignore[no-untyped-def]
    index = opened(tmp_path_factory.mktemp("g"), proto)
    constant, from_x = {"c"}, {"x"}
    for i, node in enumerate(proto.graph.node):
        reads = [name for name in node.input if name]
        assert index.inputs(i) == tuple(node.input)
        assert index.reads(i) == tuple(reads)
        assert index.producer(node.output[0]) == i
        if all(name in constant for name in reads):
            constant.add(node.output[0])
        if any(name in from_x for name in reads):
            from_x.add(node.output[0])
    for name in ("x", "c", *(n.output[0] for n in proto.graph.node)):
        readers = [i for i, n in enumerate(proto.graph.node) for other in n.input if other == name]
        assert list(index.consumers(name)) == readers
        assert index.is_constant(name) == (name in constant)
        assert index.elem_type(name) == TensorProto.FLOAT
    assert index.descendants(["x"]) == from_x
    assert index.producer("unknown") is None
    assert index.consumers("unknown") == ()
    assert not index.is_constant("unknown")


def test_element_types_without_annotations(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Greater", ["half", "half"], ["bool"]),
        helper.make_node("Where", ["bool", "half", "half"], ["where"]),
        helper.make_node("TopK", ["where", "k"], ["values", "indices"]),
        helper.make_node("Shape", ["values"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Constant", [], ["seven"], value_int=7),
        helper.make_node("SkipSimplifiedLayerNormalization", ["where"], ["norm"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["dequantised"]),
        helper.make_node("CastLike", ["q", "half"], ["like"]),
    ]
    weights = {"k": np.array([1]), "q": np.zeros(4, np.int8), "scale": np.ones(1, np.float16)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [onnx.ValueInfoProto(name="norm")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    index = opened(tmp_path, helper.make_model(graph, ir_version=10))
    half, int64 = TensorProto.FLOAT16, TensorProto.INT64
    expected = {
        "half": half, "bool": TensorProto.BOOL, "where": half, "values": half, "indices": int64, "shape": int64,
        "zeros": TensorProto.FLOAT, "seven": int64, "norm": half, "dequantised": half, "like": half, "nowhere": 0,
    }  # fmt: skip
    assert {name: index.elem_type(name) for name in expected} == expected
    assert index.op(7) == "com.microsoft.SkipSimplifiedLayerNormalization"
    assert index.nodes_of("TopK", "Where") == (2, 3)


def test_constant_shapes_through_transposes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[2, 0, 1]),
        helper.make_node("Cast", ["wt"], ["cast"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["cast"], ["back"]),
        helper.make_node("Reshape", ["w", "flat"], ["reshaped"]),
    ]
    weights = {"w": np.zeros((2, 3, 4), np.float32), "flat": np.array([-1])}
    graph = helper.make_graph(
        nodes, "g", [], [onnx.ValueInfoProto(name="back")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    index = opened(tmp_path, helper.make_model(graph, ir_version=10))
    assert index.constant_shape("cast") == (4, 2, 3)
    assert index.constant_shape("back") == (3, 2, 4)
    assert index.constant_shape("reshaped") is None


def test_layer_numbers_come_from_names(tmp_path: Path) -> None:
    names = ["/model/layers.3/mlp/MatMul", "node_MatMul_12", "model.h.7.attn", "transformer/blocks/11/x", "layers"]
    nodes = [helper.make_node("Relu", ["x"], [f"t{k}"], name=name) for k, name in enumerate(names)]
    nodes[1].metadata_props.add(key="namespace", value="['', 'model', 'model.layers.5', 'model.layers.5.mlp']")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [onnx.ValueInfoProto(name="t0")]
    )
    index = opened(tmp_path, helper.make_model(graph, ir_version=10))
    assert [index.layer_of(i) for i in range(5)] == [3, 5, 7, 11, None]
    assert index.layer_of(0, 1, 1) == 5


def test_a_file_out_of_order_is_numbered_in_order(tmp_path: Path) -> None:
    """Some converters append their casts at the end; the runtime loads such files."""
    nodes = [
        helper.make_node("Relu", ["half"], ["y"]),
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [onnx.ValueInfoProto(name="y")]
    )
    index = opened(tmp_path, helper.make_model(graph, ir_version=10))
    assert [index.op(i) for i in range(2)] == ["Cast", "Relu"]
    assert (index.producer("half"), index.consumers("half")) == (0, (1,))
    validate(index)


def test_a_prefix_that_nothing_uses(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["moe_1/y"], name="moe_2/relu"), helper.make_node("Abs", ["x"], ["moe_3"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [onnx.ValueInfoProto(name="moe_3")]
    )
    index = opened(tmp_path, helper.make_model(graph, ir_version=10))
    wanted = ("moe_1", "moe_2", "moe_3")
    assert [index.unused_prefix(name) for name in wanted] == ["moe_1_2", "moe_2_2", "moe_3"]
