"""Facts about GroupQueryAttention on the CPU."""

import subprocess
import sys

import numpy as np
from onnx import TensorProto, helper

from ortmoe_cli.runtime.facts import Fact, refused
from ortmoe_cli.runtime.nodes import Array, far, gqa, model, noise, session, softmax

_N, _KV, _D = 4, 2, 16
_CLOSE = 1e-4


def inputs(batch: int, new: int, past: int = 0, size: int = _D) -> dict[str, Array]:
    """Values for S new tokens after P cached ones, without padding."""
    found = {
        "query": noise(batch, new, _N * size),
        "key": noise(batch, new, _KV * size, seed=1),
        "value": noise(batch, new, _KV * size, seed=2),
        "seqlens_k": np.full(batch, past + new - 1, np.int32),
        "total_sequence_length": np.array([past + new], np.int32),
    }
    if past:
        found |= {name: noise(batch, _KV, past, size, seed=i) for i, name in enumerate(("past_key", "past_value"), 3)}
    return found


def reference(values: dict[str, Array], window: int = 0) -> Array:
    """Causal attention in doubles, [B, S, N·D]."""

    def heads(x: Array, count: int) -> Array:
        return np.asarray(x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3), np.float64)

    q, k, v = heads(values["query"], _N), heads(values["key"], _KV), heads(values["value"], _KV)
    if "past_key" in values:
        k, v = np.concatenate([values["past_key"], k], 2), np.concatenate([values["past_value"], v], 2)
    k, v = np.repeat(k, _N // _KV, 1), np.repeat(v, _N // _KV, 1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    distance = np.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - np.arange(k.shape[2])[None]
    allowed = (distance >= 0) & (distance < window if window else True)
    out = softmax(np.where(allowed, scores, -np.inf)) @ v
    return np.asarray(out.transpose(0, 2, 1, 3).reshape(values["query"].shape))


def _prompt() -> tuple[bool, str]:
    values = inputs(2, 5)
    error = far(gqa(_N, _KV, values)[0], reference(values))
    return error < _CLOSE, f"error {error:.0e}"


def _decode() -> tuple[bool, str]:
    values = inputs(2, 1, 5)
    error = far(gqa(_N, _KV, values)[0], reference(values))
    return error < _CLOSE, f"error {error:.0e}"


def _window() -> tuple[bool, str]:
    values = inputs(1, 7)
    error = far(gqa(_N, _KV, values, local_window_size=3)[0], reference(values, 3))
    return error < _CLOSE, f"error {error:.0e}"


def _no_window() -> tuple[bool, str]:
    values = inputs(1, 7)
    error = far(gqa(_N, _KV, values, local_window_size=0)[0], reference(values))
    return not error < _CLOSE, f"accepted, error {error:.0e}"


def _chunk() -> tuple[bool, str]:
    values = inputs(2, 3, 5)
    return refused(lambda: gqa(_N, _KV, values), "batch_size must be 1", "INVALID_ARGUMENT")


def _single_chunk() -> tuple[bool, str]:
    values = inputs(1, 3, 5)
    error = far(gqa(_N, _KV, values)[0], reference(values))
    return error < _CLOSE, f"error {error:.0e}"


def _head_size() -> tuple[bool, str]:
    return refused(lambda: gqa(_N, _KV, inputs(1, 4, size=12)), "multiple of 8")


def _positions() -> tuple[bool, str]:
    """Rows whose positions start elsewhere are rotated as the first row is."""
    values = inputs(2, 4)
    angles = np.arange(64)[:, None] / 10000 ** (np.arange(0, _D, 2) / _D)[None]
    values |= {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}
    counted = np.tile(np.arange(4), (2, 1))
    keys = [
        gqa(_N, _KV, values | {"position_ids": positions}, do_rotary=1)[1]
        for positions in (counted, counted + np.array([[0], [7]]))
    ]
    error = far(keys[0], keys[1])
    return error < _CLOSE, f"keys of a second row at positions 7… differ by {error:.0e} from those at 0…"


def _total_of_shape() -> tuple[bool, str]:
    """The length as a cast of a shape that is fixed: shape inference hands the operator 64-bit data."""
    values = inputs(1, 1, 5)
    del values["total_sequence_length"]
    outputs = ["y", "present_key", "present_value"]
    nodes = [
        helper.make_node("Shape", ["past_key"], ["length"], start=2, end=3),
        helper.make_node("Cast", ["length"], ["total"], to=TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention", ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"], outputs,
            domain="com.microsoft", num_heads=_N, kv_num_heads=_KV,
        ),
    ]  # fmt: skip
    return refused(
        lambda: session(model(nodes, values, dict.fromkeys(outputs, np.float32), {})), "ParseData type mismatch"
    )


def _empty_batch() -> tuple[bool, str]:
    code = (
        "import numpy as np; from ortmoe_cli.runtime.probe_gqa import inputs; from ortmoe_cli.runtime.nodes import gqa;"
        "v = inputs(1, 4); empty = {k: (x[:0] if k != 'total_sequence_length' else x) for k, x in v.items()};"
        "gqa(4, 2, empty)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode < 0, f"the process ended with {done.returncode}"


FACTS = (
    Fact("gqa-prompt", "GroupQueryAttention without a cache is causal attention", _prompt),
    Fact("gqa-decode", "with a cache, one new token sees all cached ones", _decode),
    Fact("gqa-window", "local_window_size=W keeps i−j < W", _window),
    Fact("gqa-window-0", "local_window_size=0 is accepted and gives garbage", _no_window),
    Fact("gqa-chunk", "several new tokens after a cache are refused for more than one sequence", _chunk),
    Fact("gqa-chunk-1", "and right for one", _single_chunk),
    Fact("gqa-head-size", "head sizes that are no multiple of 8 are refused", _head_size),
    Fact("gqa-positions", "on a first prompt, only position_ids[0, 0] counts", _positions),
    Fact("gqa-total-of-shape", "a total length that is a cast of a fixed shape is refused", _total_of_shape),
    Fact("gqa-empty-batch", "a batch of 0 kills the process", _empty_batch),
)
