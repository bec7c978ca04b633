"""What is said about CUDA graphs from the graph alone, against what the runtime really refuses."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from ortmoe_cli import engine
from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.graph.index import Index
from ortmoe_cli.outcome import Options
from ortmoe_cli.policy.derive import dimensions, symbols
from ortmoe_cli.runtime.capture import capture
from ortmoe_cli.runtime.kernels import _covers, _registry, why_not_on_cuda

FOLDER = Path(__file__).parents[2] / "fixtures"
NAMES = list(tomllib.loads((FOLDER / "manifest.toml").read_text("utf-8"))["fixture"])
SIZES = {"batch": 2, "sequence": 5, "past": 3, "total": 8}
ASK = """
import json, sys
import onnxruntime as ort
ort.set_default_logger_severity(4)
answers = []
for path, sizes in json.loads(sys.argv[1]):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    try:
        ort.InferenceSession(path, options, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})],
                             enable_fallback=0)
        answers.append("")
    except Exception as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
REGISTRY = """
import collections, json
from onnxruntime.capi import onnxruntime_pybind11_state as state
found = collections.defaultdict(lambda: collections.defaultdict(set))
for kernel in state.get_all_opkernel_def():
    if kernel.provider != "CUDAExecutionProvider" or kernel.domain not in ("", "com.microsoft"):
        continue
    types = kernel.type_constraints
    name = "T" if "T" in types else min(types, default=None)
    plain = [t[7:-1] for t in types.get(name, ()) if t.startswith("tensor(")]
    op = (kernel.domain and kernel.domain + ".") + kernel.op_name
    since, until = kernel.version_range
    found[op][since, until if until < 2**31 - 1 else None].update(plain)
print(json.dumps({op: sorted([a, b or 0, sorted(t)] for (a, b), t in rows.items()) for op, rows in found.items()}))
"""


def fixed_sizes(index: Index) -> dict[str, int]:
    roles = dimensions(index)
    total = SIZES["total"] if "past" in roles.values() else SIZES["sequence"]
    return {name: (SIZES | {"total": total})[str(role)] for name, role in roles.items()}


def test_the_runtime_refuses_the_models_that_we_say(cuda: Callable[..., Any], tmp_path: Path) -> None:
    cases, expected = [], []
    for name in NAMES:
        fused = tmp_path / f"{name}.onnx"
        engine.fuse(FOLDER / f"{name}.onnx", fused, Options(verify="none", only=frozenset({"moe"})))
        for path in (FOLDER / f"{name}.onnx", fused):
            index = open_index(path)
            sizes = fixed_sizes(index)
            for given in ({}, sizes if set(sizes) >= set(symbols(index)) else {}):
                cases.append((str(path), given))
                expected.append(capture(index, bool(given)).accepted)
    answers = cuda(ASK, json.dumps(cases))
    ours = [
        (Path(path).name, sizes, said, answer[-100:])
        for (path, sizes), said, answer in zip(cases, expected, answers, strict=True)
        if said != ("graph capture" not in answer) and "ShapeInferenceError" not in answer and "Mismatch" not in answer
    ]
    assert ours == []
    assert {True, False} == set(expected)


def test_the_registry_is_that_of_the_installed_runtime(cuda: Callable[..., Any]) -> None:
    import onnxruntime as ort

    from ortmoe_cli.runtime.kernels import SOURCE

    if ort.__version__ != SOURCE:
        pytest.skip(f"the registry is that of {SOURCE}")
    kept = {
        op: sorted([since, until or 0, sorted(types)] for since, until, types in rows)
        for op, rows in _registry().items()
    }
    assert kept == cuda(REGISTRY)


def index_of(
    tmp_path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[Any]]], output: str
) -> Index:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()],
        [helper.make_empty_tensor_value_info(output)],
        [helper.make_tensor("zero", TensorProto.INT64, [], [0])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return open_index(path)


def test_a_size_that_a_kernel_reads_is_a_copy_until_shapes_are_fixed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Gather", ["shape", "zero"], ["rows"], name="rows"),
        helper.make_node("Cast", ["rows"], ["count"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "count"], ["y"], name="div"),
    ]
    index = index_of(tmp_path, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, "y")
    found = capture(index, fixed=False)
    assert [(copy.tensor, copy.to_host, index.node(copy.reader).name) for copy in found.copies] == [
        ("count", False, "div")
    ]
    assert not found.accepted
    assert capture(index, fixed=True).accepted


def test_a_size_that_only_shapes_something_is_no_copy(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Expand", ["bias", "shape"], ["wide"]),
        helper.make_node("Add", ["x", "wide"], ["y"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 4]), "bias": (TensorProto.FLOAT, [1])}
    assert capture(index_of(tmp_path, nodes, inputs, "y"), fixed=False).accepted


def test_data_dependent_nodes_are_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"], name="hit")]
    found = capture(index_of(tmp_path, nodes, {"x": (TensorProto.FLOAT, [2, 4])}, "y"), fixed=True)
    assert found.data_dependent == (0,)


@pytest.mark.parametrize(("kind", "word"), [(TensorProto.FLOAT, "float"), (TensorProto.FLOAT16, None)])
def test_kernels_depend_on_the_element_type(tmp_path: Path, kind: int, word: str | None) -> None:
    names = ["q", "k", "v", "", "", "lengths", "total"]
    node = helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", num_heads=2, kv_num_heads=2)
    inputs = {name: (kind, [1, 4, 16]) for name in "qkv"}
    inputs |= {"lengths": (TensorProto.INT32, [1]), "total": (TensorProto.INT32, [1])}
    reason = why_not_on_cuda(index_of(tmp_path, [node], inputs, "y"), 0)
    assert (reason is None) if word is None else (reason is not None and f"for {word} " in reason)


def test_a_kernel_without_an_end_is_for_its_version_only() -> None:
    assert _covers(13, 13, None)
    assert not _covers(14, 13, None)
    assert _covers(14, 13, 14)
    assert not _covers(15, 13, 14)


def test_an_operator_without_kernels_is_named(tmp_path: Path) -> None:
    index = index_of(tmp_path, [helper.make_node("Det", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [2, 2])}, "y")
    assert why_not_on_cuda(index, 0) == "there is no CUDA kernel for this operator"
