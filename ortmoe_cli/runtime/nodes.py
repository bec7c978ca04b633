"""Single fused nodes, run by themselves, and what they should give."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from ortmoe_cli.runtime.settings import CPU

Array = NDArray[Any]
IR_VERSION = 10
OPSET = 21

T, E, K, H, I = 6, 4, 2, 16, 24  # noqa: E741  tokens, experts, experts per token, hidden, inner
_GQA_INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache",
               "sin_cache", "position_ids", "attention_bias", "head_sink")  # fmt: skip


def model(
    nodes: Sequence[NodeProto], inputs: Mapping[str, Array], outputs: Mapping[str, Any], weights: Mapping[str, Array]
) -> bytes:
    """A model of these nodes. `outputs`: the numpy type of each."""
    kind = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        list(nodes),
        "probe",
        [helper.make_tensor_value_info(name, kind(value.dtype), list(value.shape)) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, kind(np.dtype(dtype)), None) for name, dtype in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())


def session(data: bytes, provider: str = CPU, **settings: Any) -> Any:
    """A quiet session on one provider. `settings` are attributes of the session options, or `config` entries."""
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for key, value in settings.pop("config", {}).items():
        options.add_session_config_entry(key, value)
    for key, value in settings.items():
        setattr(options, key, value)
    made = ort.InferenceSession(data, options, providers=[provider], enable_fallback=0)
    if provider not in made.get_providers():
        raise RuntimeError(f"{provider} did not load")
    return made


def run(
    node: NodeProto,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    dtype: Any = np.float32,
    provider: str = CPU,
) -> list[Array]:
    """The results of one node, all of one type."""
    data = model([node], inputs, dict.fromkeys((name for name in node.output if name), dtype), weights)
    return list(session(data, provider).run(None, dict(inputs)))


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return np.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) * scale, np.float32)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def choose(scores: Array, k: int, highest: bool = False) -> Array:
    """The k experts of each token [T, k]; of equal ones, those with the lowest number, or with the highest."""
    if highest:
        return np.asarray(scores.shape[1] - 1 - np.argsort(-scores[:, ::-1], axis=-1, kind="stable")[:, :k])
    return np.asarray(np.argsort(-scores, axis=-1, kind="stable")[:, :k])


def mixture(x: Array, chosen: Array, weights: Array, fc1: Array, fc2: Array, gate: Any) -> Array:
    """Σ w · fc2[e] · gate(fc1[e] · x), in doubles: x [T, H], chosen and weights [T, k]."""
    out = np.zeros((len(x), fc2.shape[1]))
    for t, token in enumerate(x.astype(np.float64)):
        for e, weight in zip(chosen[t], weights[t], strict=True):
            out[t] += weight * (fc2[e].astype(np.float64) @ gate(fc1[e].astype(np.float64) @ token))
    return out


def moe_node(
    inputs: Sequence[str] = ("x", "router", "fc1", "", "fc2"), op: str = "MoE", **attributes: Any
) -> NodeProto:
    made: NodeProto = helper.make_node(op, list(inputs), ["y"], domain="com.microsoft", **{"k": K, **attributes})
    return made


def gqa(heads: int, kv_heads: int, values: Mapping[str, Array], provider: str = CPU, **attributes: Any) -> list[Array]:
    """A GroupQueryAttention node: output, present key, present value."""
    names = [name if name in values else "" for name in _GQA_INPUTS]
    while not names[-1]:
        names.pop()
    node = helper.make_node(
        "GroupQueryAttention", names, ["y", "present_key", "present_value"], domain="com.microsoft",
        num_heads=heads, kv_num_heads=kv_heads, **attributes,
    )  # fmt: skip
    return run(node, values, {}, values["query"].dtype, provider)


def far(one: Array, other: Array) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(one - other).max() / (np.abs(other).max() + 1e-30))
