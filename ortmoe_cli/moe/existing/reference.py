"""What the schema says that an MoE node computes, in numpy: for nodes that the runtime at hand cannot run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.activation import FUNCTIONS, Activation
from ortmoe_cli.moe.existing.node import FusedNode

Array = NDArray[Any]


def reference(node: FusedNode, x: Array, logits: Array, weights: Mapping[str, Array]) -> Array:
    """X (T,H), L (T,E) → (T,H). `weights`: by slot, every expert that is chosen filled in."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : int(node.attribute("k"))]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares = np.take_along_axis(shares, chosen, axis=1)
    if node.attribute("normalize_routing_weights"):
        shares = shares / shares.sum(axis=1, keepdims=True)
    result = np.zeros_like(x, np.float64)
    for e in np.unique(chosen):
        token, slot = np.nonzero(chosen == e)
        inner = _inner(node, _affine(x[token], weights, "fc1", e), _third(node, x[token], weights, e))
        result[token] += shares[token, slot, None] * _affine(inner, weights, "fc2", e)
    return result


def _affine(rows: Array, weights: Mapping[str, Array], slot: str, e: int) -> Array:
    made = rows.astype(np.float64) @ weights[slot][e].astype(np.float64).T
    return np.asarray(made + weights[f"{slot}_bias"][e] if f"{slot}_bias" in weights else made)


def _third(node: FusedNode, rows: Array, weights: Mapping[str, Array], e: int) -> Array | None:
    return _affine(rows, weights, "fc3", e) if "fc3" in node.inputs else None


def _inner(node: FusedNode, first: Array, third: Array | None) -> Array:
    """What enters the second product."""
    kind = node.attribute("activation_type")
    if kind != "swiglu":
        made = FUNCTIONS[{"gelu": "gelu_tanh"}.get(kind, kind)](first)
        return made if third is None else made * third
    if third is None:
        half = first.shape[1] // 2
        interleaved = node.attribute("swiglu_fusion") == 1
        first, third = (first[:, ::2], first[:, 1::2]) if interleaved else (first[:, :half], first[:, half:])
    return swiglu(node)(first, third)


def swiglu(node: FusedNode) -> Activation:
    """The gated activation of a node; silu with a third matrix is one too."""
    if node.attribute("activation_type") == "silu":
        return Activation("swiglu", True)
    names = ("activation_alpha", "activation_beta", "swiglu_limit")
    return Activation("swiglu", True, *(float(node.attribute(name)) for name in names))
