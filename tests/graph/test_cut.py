"""Cuts compute what the whole model computes, in float32, whatever the model's own precision."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import IslandBuilder
from ortmoe_cli.graph.model import open_model

RNG = np.random.default_rng(0)


def network(dtype: type, layers: int = 2) -> onnx.ModelProto:
    """x -> (MatMul, If(sum > 0: + w, - w), Relu) per layer; the If captures outer tensors."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, weights, x = [], [], "x"
    for k in range(layers):
        w = (RNG.standard_normal((8, 8)) / 3).astype(dtype)
        weights += [numpy_helper.from_array(w, f"w{k}"), numpy_helper.from_array(np.ones(40, dtype)[:8], f"b{k}")]
        branches = {
            f"{name}_branch": helper.make_graph(
                [helper.make_node(op, [f"m{k}", f"b{k}"], [f"{name}{k}"])],
                name,
                [],
                [helper.make_tensor_value_info(f"{name}{k}", elem, None)],
            )
            for name, op in (("then", "Add"), ("else", "Sub"))
        }
        nodes += [
            helper.make_node("MatMul", [x, f"w{k}"], [f"m{k}"]),
            helper.make_node("ReduceSum", [f"m{k}"], [f"s{k}"], keepdims=0),
            helper.make_node("Cast", [f"s{k}"], [f"c{k}"], to=TensorProto.FLOAT),
            helper.make_node("Greater", [f"c{k}", "zero"], [f"p{k}"]),
            helper.make_node("If", [f"p{k}"], [f"i{k}"], **branches),
            helper.make_node("Relu", [f"i{k}"], [f"y{k}"]),
        ]
        x = f"y{k}"
    weights.append(numpy_helper.from_array(np.array(0, np.float32), "zero"))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", elem, ["n", 8])],
        [helper.make_tensor_value_info(x, elem, ["n", 8])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def opened(tmp_path: Path, proto: onnx.ModelProto) -> Cutter:
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    return Cutter(Index(open_model(path)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_cut_computes_what_the_model_computes(tmp_path: Path, dtype: type) -> None:
    proto = network(dtype)
    cutter = opened(tmp_path, proto)
    wide = network(np.float32)
    for tensor, source in zip(wide.graph.initializer, proto.graph.initializer, strict=True):
        value = numpy_helper.to_array(source).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, source.name))
    x = RNG.standard_normal((5, 8)).astype(np.float32)
    session = ort.InferenceSession(wide.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})[0]
    whole = cutter.run(["y1"], {"x": x})["y1"]
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    middle = cutter.run(["y0", "x"], {"x": x})
    np.testing.assert_array_equal(middle["x"], x)
    np.testing.assert_allclose(cutter.run(["y1"], {"y0": middle["y0"]})["y1"], expected, rtol=1e-5, atol=1e-6)


def test_layers_of_equal_structure_share_a_session(tmp_path: Path) -> None:
    cutter = opened(tmp_path, network(np.float32, layers=3))
    x = RNG.standard_normal((5, 8)).astype(np.float32)
    for k, source in enumerate(("x", "y0", "y1")):
        cutter.run([f"m{k}"], {source: x[: k + 1]})
    assert len(cutter._sessions) == 1


def test_errors_name_the_reason(tmp_path: Path) -> None:
    cutter = opened(tmp_path, network(np.float32))
    with pytest.raises(CutError) as caught:
        cutter.run(["y1"], {})
    assert caught.value.reason == "free"
    assert "'x'" in str(caught.value)
    with pytest.raises(CutError) as caught:
        cutter.run(["y1"], {"x": np.zeros((5, 7), np.float32)})
    assert caught.value.reason == "run"


def test_constants_keep_their_type(tmp_path: Path) -> None:
    proto = network(np.float16)
    proto.graph.node.insert(0, helper.make_node("Transpose", ["w0"], ["wt"]))
    cutter = opened(tmp_path, proto)
    assert cutter.constant("wt").dtype == np.float16
    np.testing.assert_array_equal(cutter.constant("wt"), cutter.constant("w0").T)


def test_island_runs_in_the_same_shadow(tmp_path: Path) -> None:
    cutter = opened(tmp_path, network(ml_dtypes.bfloat16))
    builder = IslandBuilder("isle", 20)
    half = builder.constant(np.array(0.5, ml_dtypes.bfloat16))
    scaled = builder.one("Mul", builder.one("MatMul", "x", builder.weight("w", TensorProto.BFLOAT16, (8, 8))), half)
    builder.produce("y1", scaled)
    x, w = RNG.standard_normal((2, 8)), RNG.standard_normal((8, 8))
    got = cutter.run_island(builder.build(), {"x": x.astype(np.float32)}, {"isle/w": w.astype(ml_dtypes.bfloat16)})
    expected = x.astype(np.float32) @ w.astype(ml_dtypes.bfloat16).astype(np.float32) * 0.5
    np.testing.assert_allclose(got["y1"], expected, rtol=1e-5, atol=1e-6)
