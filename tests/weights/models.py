"""Models for the writer's tests: weights inline, outside, shared and nested, and everything that must survive."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model, set_external_data

from ortmoe_cli.weights.pack import PackedWeight, Piece

ROWS, COLS = 24, 32


def noise(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def outside(tensor: TensorProto, folder: Path, location: str, shared: bool = False) -> None:
    """Move the tensor's data to the end of a file; `shared`: point to the start of it."""
    with open(folder / location, "ab") as file:
        offset = 0 if shared else file.tell()
        if not shared:
            file.write(tensor.raw_data)
    set_external_data(tensor, location, offset, len(tensor.raw_data))
    tensor.ClearField("raw_data")


def build(folder: Path, name="model.onnx", inline=2, external=2, location="weights.bin", nested=False) -> Path:
    """A chain of additions over `[ROWS, COLS]` weights, with one of all that a writer could lose."""
    tensors = []
    for k in range(inline + external):
        tensors.append(numpy_helper.from_array(noise(k, ROWS, COLS), f"w{k}"))
        if k >= inline:
            outside(tensors[-1], folder, location)
    tensors.insert(1, numpy_helper.from_array(np.array([2.0], np.float32), "small"))
    tensors.append(helper.make_tensor("typed", TensorProto.FLOAT, [400], list(range(400))))
    nodes, last = [], "x"
    for tensor in tensors[: inline + external + 1]:
        nodes.append(helper.make_node("Add", [last, tensor.name], [f"y.{tensor.name}"], name=f"add/{tensor.name}"))
        last = nodes[-1].output[0]
    if nested:
        inner = numpy_helper.from_array(noise(9, ROWS, COLS), "inner")
        outside(inner, folder, "nested.bin")
        bodies = [
            helper.make_graph(
                [helper.make_node("Sum", [last, name], [f"{branch}.out"])],
                branch,
                [],
                [helper.make_tensor_value_info(f"{branch}.out", TensorProto.FLOAT, [ROWS, COLS])],
                [inner] if name == "inner" else [],
            )
            for branch, name in (("then", "inner"), ("else", last))
        ]
        nodes.append(helper.make_node("If", ["yes"], ["y.if"], then_branch=bodies[0], else_branch=bodies[1]))
        tensors.append(numpy_helper.from_array(np.array(True), "yes"))
        last = "y.if"
    nodes.append(helper.make_node("twice", [last], ["out"], domain="local", doc_string="a doc"))
    nodes[0].metadata_props.add(key="namespace", value="model.layers.0")
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", COLS])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["rows", COLS])],
        tensors,
        doc_string="graph doc",
        value_info=[helper.make_tensor_value_info("y.small", TensorProto.FLOAT, None)],
    )
    graph.quantization_annotation.add(tensor_name="x").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w0")
    twice = helper.make_function(
        "local", "twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    model = helper.make_model(
        graph,
        functions=[twice],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("local", 1)],
        ir_version=10,
        producer_name="somebody",
        producer_version="1",
        doc_string="model doc",
        domain="a.b",
        model_version=7,
    )
    helper.set_model_props(model, {"author": "me"})
    model.graph.MergeFromString(b"\xfa\x7f\x04gone")  # field 2047: unknown to this version of ONNX
    model.MergeFromString(b"\xfa\x7f\x05later")
    (folder / name).write_bytes(model.SerializeToString())
    return folder / name


def full(path: Path) -> bytes:
    """All that a file holds, with its weights, in a form that does not depend on where they lie."""
    model = onnx.load(path)
    load_external_data_for_model(model, str(path.parent))
    return model.SerializeToString(deterministic=True)


def packed(model, names, name="packed") -> PackedWeight:
    """The transposes of some weights, stacked."""
    pieces = tuple((Piece(n, transpose=True),) for n in names)
    return PackedWeight(name, TensorProto.FLOAT, (len(names), COLS, ROWS), pieces)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder (links by where they lead)."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
