"""The numpy operators and shape rules against ONNX Runtime, value for value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Sizes, probe
from tests.graph.building import index_of, ints


@dataclass(frozen=True)
class Case:
    """One node on small constants."""

    op: str
    inputs: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    outputs: int = 1

    def __str__(self) -> str:
        return self.op


F = np.random.default_rng(0).standard_normal
X = F((2, 3, 4)).astype(np.float32)
I3 = np.array([[2, 0, 1], [1, 1, 0]])


CASES = [
    *(Case(op, (np.abs(X) + 0.5,)) for op in ("Sqrt", "Log", "Reciprocal", "Exp", "Tanh", "Sigmoid", "Softplus")),
    *(Case(op, (X,)) for op in ("Abs", "Neg", "Cos", "Sin", "Floor", "Ceil", "Round", "Sign", "Relu", "Erf", "IsNaN")),
    Case("IsInf", (np.array([np.inf, -np.inf, 1, np.nan], np.float32),), (("detect_negative", 0),)),
    Case("Not", (X > 0,)),
    *(Case(op, (X, X[:, :1])) for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Greater", "LessOrEqual")),
    *(Case(op, (ints(-7, 7, 5, -5), ints(2, -2, 3, 3))) for op in ("Div", "Mod", "Equal", "GreaterOrEqual", "Less")),
    Case("Mod", (ints(-7, 7), ints(3, -3)), (("fmod", 1),)),
    *(Case(op, (X > 0, X[:1] > 0)) for op in ("And", "Or", "Xor")),
    Case("Pow", (np.abs(X), np.array(2.0, np.float32))),
    Case("Where", (X > 0, X, np.float32(-np.inf))),
    Case("Clip", (X, np.float32(-0.5), np.float32(0.5))),
    Case("Cast", (X * 3,), (("to", TensorProto.INT64),)),
    Case("Cast", (X,), (("to", TensorProto.BOOL),)),
    Case("Reshape", (X, ints(0, -1))),
    Case("Reshape", (np.zeros((0, 3), np.float32), ints(3, 0)), (("allowzero", 1),)),
    Case("Transpose", (X,), (("perm", [2, 0, 1]),)),
    Case("Transpose", (X,)),
    Case("Unsqueeze", (X, ints(-1, 0))),
    Case("Squeeze", (X[:1], ints(0))),
    Case("Squeeze", (X[:1],)),
    Case("Flatten", (X,), (("axis", 2),)),
    Case("Expand", (X[:, :1], ints(3, 4))),
    Case("Tile", (X, ints(1, 2, 3))),
    Case("Concat", (X, X[:, :1]), (("axis", 1),)),
    Case("Split", (X, ints(1, 3)), (("axis", 2),), 2),
    Case("Split", (X,), (("axis", 1), ("num_outputs", 2)), 2),
    Case("Slice", (X, ints(1), ints(3), ints(2))),
    Case("Slice", (X, ints(-1), ints(-100), ints(2), ints(-1))),
    Case("Slice", (X, ints(-100, 9), ints(2**62, 0), ints(0, 2), ints(1, -2))),
    Case("Gather", (X, I3), (("axis", 1),)),
    Case("Gather", (X, np.array(-1)), (("axis", 2),)),
    Case("GatherElements", (X[0], I3[:, :2]), (("axis", 0),)),
    Case("GatherND", (X, ints(1, 0).reshape(1, 2))),
    Case("GatherND", (X, ints(1, 0).reshape(2, 1)), (("batch_dims", 1),)),
    Case("ScatterND", (X, ints(1, 2).reshape(1, 2), X[0, :1])),
    Case("ScatterND", (X, ints(0, 0).reshape(2, 1), X), (("reduction", "add"),)),
    Case("ScatterElements", (X[0], ints(2, 0, 1, 1).reshape(1, 4), X[0, :1]), (("axis", 0),)),
    Case("ScatterElements", (X[0], ints(1, 1).reshape(1, 2), X[0, :1, :2]), (("axis", 1), ("reduction", "add"))),
    Case("Range", (np.array(2), np.array(9), np.array(3))),
    Case("Range", (np.float32(3), np.float32(0), np.float32(-1))),
    Case("ConstantOfShape", (ints(2, 3),), (("value", numpy_helper.from_array(np.array([7], np.int32))),)),
    Case("ConstantOfShape", (ints(2),)),
    Case("CumSum", (X, np.array(1))),
    Case("CumSum", (X, np.array(1)), (("exclusive", 1), ("reverse", 1))),
    Case("Trilu", (X, np.array(1)), (("upper", 0),)),
    Case("Trilu", (X,)),
    Case("OneHot", (ints(0, 2, -1, 9), np.array(3), np.array([0.5, 2.0], np.float32))),
    Case("OneHot", (I3, np.array(3), np.array([0, 1])), (("axis", 1),)),
    Case("TopK", (X, ints(2)), (("axis", 1),), 2),
    Case("TopK", (X, ints(3)), (("largest", 0),), 2),
    Case("NonZero", (X > 0,)),
    Case("Softmax", (X,), (("axis", 1),)),
    Case("LogSoftmax", (X,)),
    Case("ArgMax", (np.array([[1, 5, 5]], np.float32),), (("axis", 1), ("select_last_index", 1))),
    Case("ArgMin", (X,), (("axis", -1), ("keepdims", 0))),
    *(
        Case(op, (X, ints(-1, 0)))
        for op in ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceProd", "ReduceL2", "ReduceMin")
    ),
    Case("ReduceSum", (X,), (("keepdims", 0),)),
    Case("ReduceSum", (X,), (("noop_with_empty_axes", 1),)),
    Case("MatMul", (X, X[0].T.copy())),
    Case("MatMul", (X[0, 0], X[0].T.copy())),
    Case("Gemm", (X[0], X[1], X[0, :, :3].copy()), (("transB", 1), ("alpha", 0.5), ("beta", 2.0))),
    Case("Einsum", (X, X), (("equation", "bij,bkj->bik"),)),
    Case("Pad", (X, ints(0, 1, 0, 0, 0, 2))),
    Case("BitwiseAnd", (ints(6, 5), ints(3, 4))),
]


def built(case: Case, folder: Path) -> tuple[Index, dict[str, np.ndarray], list[str], list[np.ndarray]]:
    """The index of a one-node graph on constants, the constants, and what the runtime makes of them."""
    constants = {f"x{k}": np.asarray(value) for k, value in enumerate(case.inputs)}
    outputs = [f"y{k}" for k in range(case.outputs)]
    node = helper.make_node(case.op, list(constants), outputs, **dict(case.attributes))
    index = index_of([node], {}, outputs, constants, folder)
    return index, constants, outputs, unoptimised(folder / "m.onnx").run(None, {})


def unoptimised(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_the_runtime(case: Case, tmp_path: Path) -> None:
    index, _, outputs, wanted = built(case, tmp_path)
    made = probe(index, Sizes(1, 1))
    for name, value in zip(outputs, wanted, strict=True):
        got = made.value(name)
        assert got is not None
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-6)


ON_DATA = [c for c in CASES if np.ndim(c.inputs[0]) == 3 and np.asarray(c.inputs[0]).dtype == np.float32]


@pytest.mark.parametrize("case", ON_DATA, ids=str)
def test_shapes_are_found_without_the_first_value(case: Case, tmp_path: Path) -> None:
    """The first input becomes data of which only the shape is known."""
    first = np.asarray(case.inputs[0])
    _, constants, outputs, wanted = built(case, tmp_path)
    node = helper.make_node(case.op, list(constants), outputs, **dict(case.attributes))
    data = {"x0": (TensorProto.FLOAT, list(first.shape))}
    rest = {name: value for name, value in constants.items() if name != "x0"}
    index = index_of([helper.make_node("Relu", ["data"], ["x0"]), node], {"data": data["x0"]}, outputs, rest, tmp_path)
    made = probe(index, Sizes(2, 3))
    for name, value in zip(outputs, wanted, strict=True):
        assert made.is_data(name)
        assert made.shape(name) == value.shape


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chains_of_shape_arithmetic(data: st.DataObject, tmp_path: Path) -> None:
    """Random chains of views and arithmetic, value for value as the runtime has them."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    nodes, constants, name = [], {"x": F(shape).astype(np.float32)}, "x"
    for k in range(data.draw(st.integers(1, 6))):
        rank, made = len(shape), f"t{k}"
        op = data.draw(
            st.sampled_from(["Transpose", "Unsqueeze", "Flatten", "Slice", "Gather", "Mul", "ReduceSum", "Concat"])
        )
        op = op if rank else "Unsqueeze"
        axis = data.draw(st.integers(-rank, rank - 1)) if rank else 0
        if op == "Transpose":
            nodes.append(helper.make_node(op, [name], [made], perm=data.draw(st.permutations(range(rank)))))
        elif op == "Unsqueeze":
            constants[f"c{k}"] = ints(data.draw(st.integers(0, rank)))
            nodes.append(helper.make_node("Unsqueeze", [name, f"c{k}"], [made]))
        elif op == "Flatten":
            nodes.append(helper.make_node(op, [name], [made], axis=axis))
        elif op == "Slice":
            bounds = data.draw(st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([-2, -1, 1, 2])))
            for part, value in zip("abcd", (bounds[0], bounds[1], axis, bounds[2]), strict=True):
                constants[f"{part}{k}"] = ints(value)
            nodes.append(helper.make_node(op, [name, *(f"{part}{k}" for part in "abcd")], [made]))
        elif op == "Gather":
            size = shape[axis]
            if size == 0:
                break
            constants[f"c{k}"] = np.array(data.draw(st.integers(-size, size - 1)))
            nodes.append(helper.make_node(op, [name, f"c{k}"], [made], axis=axis))
        elif op == "ReduceSum":
            constants[f"c{k}"] = ints(axis)
            nodes.append(helper.make_node(op, [name, f"c{k}"], [made], keepdims=data.draw(st.integers(0, 1))))
        else:
            attributes = {"axis": axis} if op == "Concat" else {}
            nodes.append(helper.make_node(op, [name, name], [made], **attributes))
        name = made
        index = index_of(nodes, {}, [name], constants, tmp_path)
        value = probe(index, Sizes(1, 1)).value(name)
        assert value is not None
        shape = list(value.shape)
        if not value.size:  # the runtime itself errs on reductions of nothing
            break
    if not nodes:
        return
    wanted = unoptimised(tmp_path / "m.onnx").run(None, {})[0]
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
