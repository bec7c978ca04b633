"""Facts about the CUDA provider. Those about results were never seen on a GPU by the developers: they are hypotheses.

What happens when a session is made (options, placement, rewrites) was seen with a stand-in for the CUDA libraries.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from onnx import helper

from ortmoe_cli.runtime import probe_gqa, probe_moe
from ortmoe_cli.runtime.facts import Fact, Untestable, refused
from ortmoe_cli.runtime.nodes import E, K, T, choose, far, gqa, mixture, model, moe_node, noise, run, session
from ortmoe_cli.runtime.settings import CUDA

_HALF = 2e-2


@cache
def loads() -> tuple[bool, str]:
    """Whether the CUDA provider really loads, and if not, why."""
    import onnxruntime as ort  # noqa: PLC0415

    if CUDA not in ort.get_available_providers():
        return False, "this build of the runtime has no CUDA provider"
    ort.set_default_logger_severity(4)
    try:
        session(_doubling(), CUDA)
    except Exception as error:
        return False, missing_library() or " ".join(str(error).split())[-140:]
    return True, "loads"


def missing_library() -> str:
    """The first library that the CUDA provider needs and the system does not find, as the loader says it."""
    import ctypes  # noqa: PLC0415

    from ortmoe_cli.runtime.binaries import cuda_library  # noqa: PLC0415

    path = cuda_library()
    if path is None:
        return ""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        text = str(error)
        return "" if "Provider_GetHost" in text else f"{text.partition(': cannot open')[0]} is missing"
    return ""


def needs_cuda(probe: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
    """The probe, on machines where CUDA loads only."""

    def guarded() -> tuple[bool, str]:
        ready, reason = loads()
        if not ready:
            raise Untestable(f"no CUDA here: {reason}")
        return probe()

    return guarded


def _doubling() -> bytes:
    return model([helper.make_node("Add", ["x", "x"], ["y"])], {"x": noise(2, 4)}, {"y": np.float32}, {})


def _unknown_option() -> tuple[bool, str]:
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers = [(CUDA, {"cuda_graph_enable_partial": "1"})]
    return refused(
        lambda: ort.InferenceSession(_doubling(), options, providers=providers, enable_fallback=0),
        "Unknown provider option",
    )


def _gqa_float32() -> tuple[bool, str]:
    values = probe_gqa.inputs(2, 5)
    names = ["query", "key", "value", "", "", "seqlens_k", "total_sequence_length"]
    node = helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", num_heads=4, kv_num_heads=2)
    data = model([node], values, {"y": np.float32}, {})
    return refused(lambda: session(data, CUDA, config={"session.disable_cpu_ep_fallback": "1"}))


def _gqa_half() -> tuple[bool, str]:
    values = probe_gqa.inputs(2, 8, size=64)
    half = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in values.items()}
    error = far(gqa(4, 2, half, CUDA)[0], probe_gqa.reference(values))
    return error < _HALF, f"error {error:.0e}"


def _rotated(**settings: Any) -> None:
    """Projections, rotations and GroupQueryAttention with a bias, as a session."""
    half, size = np.float16, 16
    values: dict[str, Any] = {
        "x": noise(1, 4, 64).astype(half),
        "positions": np.arange(4)[None],
        "bias": np.zeros((1, 1, 4, 4), half),
        "seqlens": np.array([3], np.int32),
        "total": np.array([4], np.int32),
    }
    values |= {name: np.zeros((1, 2, 0, size), half) for name in ("past_key", "past_value")}
    heads = {"q": 4, "k": 2, "v": 2}
    weights = {f"w_{name}": noise(64, count * size).astype(half) for name, count in heads.items()}
    weights |= {name: np.ones((16, size // 2), half) for name in ("cos", "sin")}
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name]) for name in heads]
    for name in ("q", "k"):
        table = [name, "positions", "cos", "sin"]
        nodes.append(helper.make_node("RotaryEmbedding", table, [f"{name}_r"], domain="com.microsoft"))
    names = ["q_r", "k_r", "v", "past_key", "past_value", "seqlens", "total", "", "", "", "bias"]
    outputs = ["y", "present_key", "present_value"]
    nodes.append(
        helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", num_heads=4, kv_num_heads=2)
    )
    session(model(nodes, values, dict.fromkeys(outputs, half), weights), CUDA, **settings)


def _fusion_breaks() -> tuple[bool, str]:
    return refused(_rotated, "invalid model")


def _fusion_off() -> tuple[bool, str]:
    _rotated(config={"optimization.disable_specified_optimizers": "GroupQueryAttentionFusion"})
    return True, "loads"


def _moe(activation: str, router: np.ndarray | None = None) -> np.ndarray:
    router = probe_moe.ROUTER if router is None else router
    weights = {"fc1": probe_moe.FC1, "fc2": probe_moe.FC2}
    node = moe_node(activation_type=activation, normalize_routing_weights=1)
    (got,) = run(node, {"x": probe_moe.X, "router": router}, weights, np.float32, CUDA)
    return got


def _moe_float32() -> tuple[bool, str]:
    wanted = mixture(probe_moe.X, *probe_moe.routing(True), probe_moe.FC1, probe_moe.FC2, probe_moe.relu)
    error = far(_moe("relu"), wanted)
    return error < _HALF, f"error {error:.0e}"


def _moe_ties() -> tuple[bool, str]:
    router, weights = np.zeros((T, E), np.float32), np.full((T, K), 1 / K)
    wanted = mixture(probe_moe.X, choose(router, K), weights, probe_moe.FC1, probe_moe.FC2, probe_moe.relu)
    error = far(_moe("relu", router), wanted)
    return error < _HALF, f"error against the lowest numbers {error:.0e}"


def _moe_swiglu() -> tuple[bool, str]:
    fc1, fc2 = probe_moe.swiglu_weights()
    (got,) = run(moe_node(**probe_moe.SWIGLU), {"x": probe_moe.X, "router": probe_moe.ROUTER},
                 {"fc1": fc1, "fc2": fc2}, np.float32, CUDA)  # fmt: skip
    error = far(got, mixture(probe_moe.X, *probe_moe.routing(True), fc1, fc2, probe_moe.gated))
    return error < _HALF, f"error {error:.0e}"


def _moe_gelu() -> tuple[bool, str]:
    from math import erf  # noqa: PLC0415

    exact = np.vectorize(lambda x: 0.5 * x * (1 + erf(x / 2**0.5)))
    wanted = mixture(probe_moe.X, *probe_moe.routing(True), probe_moe.FC1, probe_moe.FC2, exact)
    error = far(_moe("gelu"), wanted)
    return error < 1e-4, f"error against the erf form {error:.0e}"


def _graph_replays() -> tuple[bool, str]:
    """A recorded graph computes with the new values that were written to the old addresses."""
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    made = ort.InferenceSession(_doubling(), options, providers=[(CUDA, {"enable_cuda_graph": "1"})], enable_fallback=0)
    x = ort.OrtValue.ortvalue_from_numpy(noise(2, 4), "cuda", 0)
    y = ort.OrtValue.ortvalue_from_numpy(noise(2, 4), "cuda", 0)
    binding: Any = made.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("gpu_graph_id", "1")
    for _ in range(3):
        made.run_with_iobinding(binding, run_options)
    x.update_inplace(noise(2, 4, seed=9))
    made.run_with_iobinding(binding, run_options)
    error = far(y.numpy(), 2 * noise(2, 4, seed=9))
    return error < _HALF, f"error {error:.0e}"


def _fact(name: str, claim: str, probe: Callable[[], tuple[bool, str]]) -> Fact:
    return Fact(name, claim, needs_cuda(probe), "cuda")


FACTS = (
    _fact("cuda-unknown-option", "an unknown option of the provider is refused", _unknown_option),
    _fact("cuda-gqa-float32", "GroupQueryAttention has no float32 kernel", _gqa_float32),
    _fact("cuda-gqa-float16", "GroupQueryAttention in float16 is causal attention", _gqa_half),
    _fact(
        "cuda-gqa-fusion",
        "projections, rotations and GroupQueryAttention with a bias are folded into an invalid graph: it does not load",
        _fusion_breaks,
    ),
    _fact("cuda-gqa-no-fusion", "without the optimiser GroupQueryAttentionFusion it loads", _fusion_off),
    _fact("cuda-moe", "MoE with relu is right", _moe_float32),
    _fact("cuda-moe-ties", "of equal scores, MoE takes the expert with the lowest number", _moe_ties),
    _fact("cuda-moe-swiglu", "swiglu_fusion=1 is silu(gate)·up over interleaved rows", _moe_swiglu),
    _fact("cuda-moe-gelu", "gelu is the erf form", _moe_gelu),
    _fact("cuda-graph", "a recorded graph computes with new values at the old addresses", _graph_replays),
)
