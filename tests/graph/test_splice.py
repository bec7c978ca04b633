"""Splicing changes the region and nothing else."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island, IslandBuilder
from ortmoe_cli.graph.model import Model, open_model
from ortmoe_cli.graph.order import captures
from ortmoe_cli.graph.splice import splice


def doubled() -> onnx.ModelProto:
    """y = relu(x + x) - x, z = x + x's sign; with everything around it that must survive."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "two"], ["a"], name="double", doc_string="keep me"),
            helper.make_node("Relu", ["a"], ["b"], name="relu"),
            helper.make_node("Sub", ["b", "x"], ["y"], name="last"),
            helper.make_node("Sign", ["x"], ["z"], name="other"),
            helper.make_node("Abs", ["x"], ["nobody reads this"], name="dead before"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("y", "z")],
        [
            numpy_helper.from_array(np.array(2, np.float32), "two"),
            numpy_helper.from_array(np.zeros(3), "unread before"),
        ],
        value_info=[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("a", "b")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    proto.graph.node[3].metadata_props.add(key="scope", value="layers.0")
    proto.metadata_props.add(key="who", value="me")
    return proto


def opened(tmp_path: Path, proto: onnx.ModelProto) -> Model:
    onnx.save(proto, tmp_path / "m.onnx")
    return open_model(tmp_path / "m.onnx")


def island() -> Island:
    builder = IslandBuilder("isle", 20)
    builder.produce("b", builder.one("Max", builder.one("Add", "x", "x"), builder.constant(np.array(0, np.float32))))
    return builder.build()


def test_only_the_region_changes(tmp_path: Path) -> None:
    proto = doubled()
    model = opened(tmp_path, proto)
    unchanged = model.proto.SerializeToString(deterministic=True)
    out = splice(model, [island()])
    assert model.proto.SerializeToString(deterministic=True) == unchanged
    survivors = {n.name: n.SerializeToString(deterministic=True) for n in out.graph.node}
    for node in proto.graph.node:
        if node.name in ("double", "relu"):
            assert node.name not in survivors
        else:
            assert survivors[node.name] == node.SerializeToString(deterministic=True)
    assert [t.name for t in out.graph.initializer] == ["unread before", "isle/const_0"]
    assert [v.name for v in out.graph.value_info] == ["b"]
    assert (out.metadata_props, out.graph.input, out.graph.output, out.opset_import) == (
        proto.metadata_props, proto.graph.input, proto.graph.output, proto.opset_import,
    )  # fmt: skip
    x = np.array([-1.5, 0, 2], np.float32)
    runs = [
        ort.InferenceSession(p.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for p in (proto, out)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])


def test_order_stays_topological_when_an_early_tensor_is_replaced(tmp_path: Path) -> None:
    """'a' is read early, and its replacement depends on 'c', which is made late."""
    proto = doubled()
    proto.graph.node.append(helper.make_node("Mul", ["x", "two"], ["c"], name="late"))
    proto.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["n"]))
    builder = IslandBuilder("isle", 20)
    builder.produce("a", builder.one("Identity", "c"))
    out = splice(opened(tmp_path, proto), [builder.build()])
    made = {"x", "two", "unread before"}
    for node in out.graph.node:
        assert set(node.input) <= made
        made.update(node.output)
    assert [n.name for n in out.graph.node if n.name != "isle/Identity_0"].index("other") < len(out.graph.node)
    onnx.checker.check_model(out)


def test_a_listed_initializer_stays_an_input(tmp_path: Path) -> None:
    proto = doubled()
    proto.graph.input.append(helper.make_tensor_value_info("two", TensorProto.FLOAT, []))
    model = opened(tmp_path, proto)
    index = Index(model)
    assert index.is_constant("unread before")
    assert not index.is_constant("two")
    out = splice(model, [island()])
    assert "two" in [t.name for t in out.graph.initializer]
    assert "two" in [i.name for i in out.graph.input]


def test_an_island_may_not_read_what_it_replaces() -> None:
    builder = IslandBuilder("isle", 20)
    builder.produce("b", builder.one("Relu", "b"))
    with pytest.raises(ValueError, match="reads 'b', which it replaces"):
        builder.build()


def test_captured_tensors_keep_their_producers(tmp_path: Path) -> None:
    proto = doubled()
    branch = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["inner"])], "then", [], [helper.make_tensor_value_info("inner", 1, ["n"])]
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    node = helper.make_node("If", ["yes"], ["w"], name="if", then_branch=branch, else_branch=branch)
    assert captures(node) == ("a",)
    proto.graph.node.append(node)
    proto.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["n"]))
    out = splice(opened(tmp_path, proto), [island()])
    assert "double" in [n.name for n in out.graph.node]
    assert "relu" not in [n.name for n in out.graph.node]
    assert onnx.load_from_string(out.SerializeToString()) == out


def test_a_dead_branch_goes_with_what_it_reads(tmp_path: Path) -> None:
    """Valid models hold nodes that no output needs; left without their input they would not load."""
    proto = doubled()
    proto.graph.node.append(helper.make_node("Exp", ["a"], ["d"], name="dead on a"))
    proto.graph.node.append(helper.make_node("Log", ["d"], ["e"], name="dead on d"))
    proto.graph.node.append(helper.make_node("Log", ["b"], ["f"], name="dead on b"))
    out = splice(opened(tmp_path, proto), [island()])
    names = [n.name for n in out.graph.node]
    assert "dead before" in names
    assert "dead on b" in names
    assert "dead on a" not in names
    assert "dead on d" not in names
    ort.InferenceSession(out.SerializeToString(), providers=["CPUExecutionProvider"])


def test_notes_about_names_that_nobody_makes_stay(tmp_path: Path) -> None:
    proto = doubled()
    for name in ("a", "b", "elsewhere"):
        proto.graph.quantization_annotation.add(tensor_name=name)
    proto.graph.value_info.append(helper.make_tensor_value_info("elsewhere", TensorProto.FLOAT, ["n"]))
    out = splice(opened(tmp_path, proto), [island()])
    assert [q.tensor_name for q in out.graph.quantization_annotation] == ["b", "elsewhere"]
    assert [v.name for v in out.graph.value_info] == ["b", "elsewhere"]
