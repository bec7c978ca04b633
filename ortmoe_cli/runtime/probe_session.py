"""Facts about sessions: settings that are ignored, fallbacks, what the runtime fuses by itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ortmoe_cli.runtime.facts import Fact, Untestable, refused
from ortmoe_cli.runtime.nodes import IR_VERSION, model, noise, session
from ortmoe_cli.runtime.settings import CPU, CUDA


def _doubling(dims: list[Any]) -> bytes:
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", kind, dims)],
        [helper.make_tensor_value_info("y", kind, dims)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=IR_VERSION)
    return bytes(made.SerializeToString())


def _options() -> Any:
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def _start(options: Any) -> Any:
    import onnxruntime as ort  # noqa: PLC0415

    return ort.InferenceSession(_doubling(["b", 4]), options, providers=[CPU])


def _three_arguments() -> tuple[bool, str]:
    return refused(lambda: _options().add_free_dimension_override_by_name("b", 1, 64), "incompatible")


def _fixes() -> tuple[bool, str]:
    options = _options()
    options.add_free_dimension_override_by_name("b", 3)
    made = _start(options)
    made.run(None, {"x": noise(3, 4)})
    return refused(lambda: made.run(None, {"x": noise(2, 4)}), "Got invalid dimensions", "Expected")


def _unknown_dimension() -> tuple[bool, str]:
    options = _options()
    options.add_free_dimension_override_by_name("no_such_dimension", 3)
    _start(options).run(None, {"x": noise(2, 4)})
    return True, "accepted"


def _unknown_key() -> tuple[bool, str]:
    options = _options()
    options.add_session_config_entry("session.no_such_key", "1")
    options.add_session_config_entry("gpu_graph_capture", "1")
    _start(options)
    return True, "accepted"


def _silent_fallback() -> tuple[bool, str]:
    import onnxruntime as ort  # noqa: PLC0415

    if CUDA not in ort.get_available_providers():
        raise Untestable("this build has no CUDA provider")
    ort.set_default_logger_severity(4)
    made = ort.InferenceSession(_doubling(["b", 4]), _options(), providers=[(CUDA, {})], enable_fallback=0)
    if CUDA in made.get_providers():
        raise Untestable("CUDA loads here")
    return True, f"asked for CUDA without fallback, got {', '.join(made.get_providers())}"


def _schemas() -> tuple[bool, str]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415

    names = {schema.name for schema in state.get_all_operator_schema() if schema.domain == "com.microsoft"}
    wanted = {"MoE", "QMoE", "GroupQueryAttention"}
    return wanted <= names, f"{len(names)} operators of com.microsoft"


def _kernels() -> tuple[bool, str]:
    code = "from onnxruntime.capi import onnxruntime_pybind11_state as s; s.get_all_opkernel_def()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode < 0, f"the process ended with {done.returncode}"


def optimised_graph(data: bytes, provider: str = CPU) -> onnx.GraphProto:
    """The graph that the runtime runs in place of a model, at its highest level."""
    with tempfile.TemporaryDirectory(prefix="ortmoe-") as folder:
        path = Path(folder) / "optimised.onnx"
        session(data, provider, optimized_model_filepath=os.fspath(path))
        return onnx.load(path).graph


def optimised(data: bytes) -> set[str]:
    """The operators of that graph, on the CPU."""
    return {node.op_type for node in optimised_graph(data).node}


def _norm(reciprocal: bool) -> bytes:
    x = noise(2, 3, 8)
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["sq"]),
        helper.make_node("ReduceMean", ["sq", "axis"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "eps"], ["var"]),
        helper.make_node("Sqrt", ["var"], ["std"]),
    ]
    if reciprocal:
        nodes += [helper.make_node("Reciprocal", ["std"], ["r"]), helper.make_node("Mul", ["x", "r"], ["n"])]
    else:
        nodes.append(helper.make_node("Div", ["x", "std"], ["n"]))
    nodes.append(helper.make_node("Mul", ["scale", "n"], ["y"]))
    weights = {
        "two": np.array(2, np.float32), "axis": np.array([-1]), "eps": np.array(1e-6, np.float32),
        "scale": np.ones(8, np.float32),
    }  # fmt: skip
    return model(nodes, {"x": x}, {"y": np.float32}, weights)


def _div_norm() -> tuple[bool, str]:
    found = optimised(_norm(False))
    return "SimplifiedLayerNormalization" in found, ", ".join(sorted(found))


def _reciprocal_norm() -> tuple[bool, str]:
    found = optimised(_norm(True))
    return "SimplifiedLayerNormalization" not in found, ", ".join(sorted(found))


def _silu() -> tuple[bool, str]:
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    found = optimised(model(nodes, {"x": noise(2, 8)}, {"y": np.float32}, {}))
    return "QuickGelu" in found, ", ".join(sorted(found))


def _no_moe() -> tuple[bool, str]:
    nodes = [
        helper.make_node("MatMul", ["x", "router"], ["logits"]),
        helper.make_node("TopK", ["logits", "k"], ["v", "i"], axis=-1),
        helper.make_node("Softmax", ["v"], ["w"]),
        helper.make_node("Gather", ["experts", "i"], ["chosen"]),
        helper.make_node("Unsqueeze", ["x", "axes"], ["column"]),
        helper.make_node("MatMul", ["chosen", "column"], ["each"]),
        helper.make_node("Squeeze", ["each", "last"], ["flat"]),
        helper.make_node("Unsqueeze", ["w", "last2"], ["wide"]),
        helper.make_node("Mul", ["flat", "wide"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "one"], ["y"], keepdims=0),
    ]
    weights = {
        "router": noise(8, 4), "experts": noise(4, 8, 8), "k": np.array([2]), "axes": np.array([1, 3]),
        "last": np.array([3]), "last2": np.array([2]), "one": np.array([1]),
    }  # fmt: skip
    found = optimised(model(nodes, {"x": noise(3, 8)}, {"y": np.float32}, weights))
    return not {"MoE", "QMoE"} & found, ", ".join(sorted(found))


FACTS = (
    Fact("override-range", "a free dimension override takes a name and one size, no range", _three_arguments),
    Fact("override-fixes", "an overridden dimension has that size only", _fixes),
    Fact("override-unknown", "an override of a dimension that does not exist is ignored silently", _unknown_dimension),
    Fact("config-unknown", "unknown session keys, gpu_graph_capture too, are ignored silently", _unknown_key),
    Fact(
        "silent-fallback", "a CUDA provider that does not load becomes a CPU session without an error", _silent_fallback
    ),
    Fact("schemas", "the schemas of the fused operators can be read", _schemas),
    Fact("kernel-registry", "reading the kernel registry kills the process where CUDA is missing", _kernels),
    Fact("norm-div", "RMS normalisation in its Div form is fused", _div_norm),
    Fact("norm-reciprocal", "in its Reciprocal form it is not", _reciprocal_norm),
    Fact("silu-quickgelu", "x·sigmoid(x) becomes QuickGelu", _silu),
    Fact("no-moe-fusion", "the runtime fuses no routed experts into MoE", _no_moe),
)
