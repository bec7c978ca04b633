"""Facts about MoE and QMoE on the CPU."""

from typing import Any

import numpy as np
from onnx import helper

from ortmoe_cli.runtime.facts import Fact, refused
from ortmoe_cli.runtime.nodes import (
    E,
    H,
    I,
    K,
    T,
    choose,
    far,
    mixture,
    model,
    moe_node,
    noise,
    run,
    session,
    silu,
    softmax,
)

_CLOSE = 1e-4
X, ROUTER = noise(T, H), noise(T, E, seed=1)
FC1, FC2 = noise(E, I, H, seed=2, scale=0.3), noise(E, H, I, seed=3, scale=0.3)
SWIGLU: dict[str, Any] = {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}


def swiglu_weights() -> tuple[np.ndarray, np.ndarray]:
    return noise(E, 2 * I, H, seed=4, scale=0.3), noise(E, H, I, seed=5, scale=0.3)


def routing(normalised: bool) -> tuple[np.ndarray, np.ndarray]:
    chosen = choose(ROUTER, K)
    weights = np.take_along_axis(softmax(ROUTER.astype(np.float64)), chosen, 1)
    return chosen, weights / weights.sum(1, keepdims=True) if normalised else weights


def relu(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x, 0))


def gated(x: np.ndarray) -> np.ndarray:
    return np.asarray(silu(x[0::2]) * x[1::2])


def _in_place(normalise: int) -> float:
    """The error of a node whose input and output are both intermediate tensors."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["h"]),
        moe_node(("h", "router", "fc1", "", "fc2"), activation_type="relu", normalize_routing_weights=normalise),
        helper.make_node("Neg", ["y"], ["a"]),
        helper.make_node("Neg", ["a"], ["z"]),
    ]
    data = model(nodes, {"x": X, "router": ROUTER}, {"z": np.float32}, {"fc1": FC1, "fc2": FC2})
    (got,) = session(data).run(None, {"x": X, "router": ROUTER})
    return far(got, mixture(2 * X, *routing(bool(normalise)), FC1, FC2, relu))


def _normalised_in_place() -> tuple[bool, str]:
    error = _in_place(1)
    return error < _CLOSE, f"error {error:.0e}"


def _raw_in_place() -> tuple[bool, str]:
    error = _in_place(0)
    return error > _CLOSE, f"error {error:.0e}: " + (
        "wrong" if error > _CLOSE else "right here, mended in this release"
    )


def _ties() -> tuple[bool, str]:
    router = np.zeros((T, E), np.float32)
    (got,) = run(moe_node(activation_type="relu", normalize_routing_weights=1), {"x": X, "router": router},
                 {"fc1": FC1, "fc2": FC2})  # fmt: skip
    weights = np.full((T, K), 1 / K)
    errors = [far(got, mixture(X, choose(router, K, highest), weights, FC1, FC2, relu)) for highest in (True, False)]
    return errors[0] < _CLOSE < errors[1], f"highest number {errors[0]:.0e}, lowest {errors[1]:.0e}"


def _legacy_layout() -> tuple[bool, str]:
    fc1, fc2 = FC1.transpose(0, 2, 1).copy(), FC2.transpose(0, 2, 1).copy()
    (got,) = run(moe_node(activation_type="relu", normalize_routing_weights=1), {"x": X, "router": ROUTER},
                 {"fc1": fc1, "fc2": fc2})  # fmt: skip
    error = far(got, mixture(X, *routing(True), FC1, FC2, relu))
    return error > _CLOSE, f"accepted, error {error:.0e}"


def _swiglu() -> tuple[bool, str]:
    fc1, fc2 = swiglu_weights()
    (got,) = run(moe_node(**SWIGLU), {"x": X, "router": ROUTER}, {"fc1": fc1, "fc2": fc2})
    error = far(got, mixture(X, *routing(True), fc1, fc2, gated))
    return error < _CLOSE, f"error {error:.0e}"


def _other_swiglu() -> tuple[bool, str]:
    fc1, fc2 = swiglu_weights()
    attributes = SWIGLU | {"swiglu_fusion": 2}
    return refused(lambda: run(moe_node(**attributes), {"x": X, "router": ROUTER}, {"fc1": fc1, "fc2": fc2}))


def _third_weight() -> tuple[bool, str]:
    node = moe_node(("x", "router", "fc1", "", "fc2", "", "fc3"), activation_type="silu", normalize_routing_weights=1)
    return refused(lambda: run(node, {"x": X, "router": ROUTER}, {"fc1": FC1, "fc2": FC2, "fc3": FC1}))


def _gelu() -> tuple[bool, str]:
    (got,) = run(moe_node(activation_type="gelu", normalize_routing_weights=1), {"x": X, "router": ROUTER},
                 {"fc1": FC1, "fc2": FC2})  # fmt: skip

    def tanh(x: np.ndarray) -> np.ndarray:
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))

    error = far(got, mixture(X, *routing(True), FC1, FC2, tanh))
    return error < _CLOSE, f"error against the tanh form {error:.0e}"


def _bfloat16() -> tuple[bool, str]:
    import ml_dtypes  # noqa: PLC0415

    narrow = [value.astype(ml_dtypes.bfloat16) for value in (X, ROUTER, FC1, FC2)]
    inputs, weights = (
        dict(zip(("x", "router"), narrow[:2], strict=True)),
        dict(zip(("fc1", "fc2"), narrow[2:], strict=True)),
    )
    data = model(
        [moe_node(activation_type="relu", normalize_routing_weights=1)], inputs, {"y": ml_dtypes.bfloat16}, weights
    )
    return refused(lambda: session(data), "NOT_IMPLEMENTED", "implementation")


def _any_routing() -> tuple[bool, str]:
    """Weights that no softmax of the logits gives, scattered as logarithms."""
    chosen, weights = choose(ROUTER, K), np.abs(noise(T, K, seed=6)) + 0.1
    logits = np.full((T, E), -1e30, np.float32)
    np.put_along_axis(logits, chosen, np.log(weights).astype(np.float32), 1)
    (got,) = run(moe_node(activation_type="relu", normalize_routing_weights=1), {"x": X, "router": logits},
                 {"fc1": FC1, "fc2": FC2})  # fmt: skip
    total = weights.sum(1, keepdims=True)
    error = far(got * total, mixture(X, chosen, weights, FC1, FC2, relu))
    return error < _CLOSE, f"error {error:.0e}"


def _quantised(bits: int = 4) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """QMoE inputs with one scale for each row, and the weights that they stand for."""
    fc1, fc2 = noise(E, 2 * H, H, seed=7), noise(E, H, H, seed=8)
    packed, plain = {}, []
    for name, value in (("fc1", fc1), ("fc2", fc2)):
        scale = np.abs(value).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
        codes = np.clip(np.round(value / scale) + 2 ** (bits - 1), 0, 2**bits - 1).astype(np.uint8)
        plain.append(((codes.astype(np.float32) - 2 ** (bits - 1)) * scale).astype(np.float32))
        packed[name] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        packed[f"{name}_scale"] = scale[..., 0].astype(np.float32)
    return packed, plain[0], plain[1]


def _qmoe(normalise: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed, fc1, fc2 = _quantised()
    names = ("x", "router", "fc1", "fc1_scale", "", "fc2", "fc2_scale")
    node = moe_node(names, "QMoE", **SWIGLU | {"normalize_routing_weights": normalise}, expert_weight_bits=4)
    (got,) = run(node, {"x": X, "router": ROUTER}, packed)
    return got, fc1, fc2


def _qmoe_packing() -> tuple[bool, str]:
    got, fc1, fc2 = _qmoe(1)
    error = far(got, mixture(X, *routing(True), fc1, fc2, gated))
    return error < 1e-3, f"error {error:.0e}"


def _qmoe_normalises() -> tuple[bool, str]:
    got, fc1, fc2 = _qmoe(0)
    error = far(got, mixture(X, *routing(True), fc1, fc2, gated))
    return error < 1e-3, f"with normalize_routing_weights=0, error against normalised weights {error:.0e}"


FACTS = (
    Fact("moe-normalised", "MoE with normalize_routing_weights=1 is right between other nodes", _normalised_in_place),
    Fact(
        "moe-in-place",
        "MoE with normalize_routing_weights=0 is wrong between other nodes (up to 1.31.1)",
        _raw_in_place,
    ),
    Fact("moe-ties", "of equal scores, MoE takes the expert with the highest number", _ties),
    Fact("moe-legacy-layout", "expert weights [E, in, out] are accepted and give garbage", _legacy_layout),
    Fact("moe-swiglu", "swiglu_fusion=1 is silu(gate)·up over interleaved rows", _swiglu),
    Fact("moe-swiglu-halves", "swiglu_fusion=2 is refused", _other_swiglu),
    Fact("moe-fc3", "a third expert weight is refused", _third_weight),
    Fact("moe-gelu", "gelu is the tanh form", _gelu),
    Fact("moe-bfloat16", "there is no bfloat16 kernel", _bfloat16),
    Fact("moe-any-routing", "any ids and weights can be fed as scattered logarithms", _any_routing),
    Fact("qmoe-packing", "QMoE reads int4 with the low nibble first and a zero point of 8", _qmoe_packing),
    Fact("qmoe-normalises", "QMoE normalises whatever normalize_routing_weights says", _qmoe_normalises),
)
