"""Attention that a model came with in fused form."""

from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index

GROUP_QUERY = "com.microsoft.GroupQueryAttention"
FUSED_OTHERS = ("com.microsoft.MultiHeadAttention", "com.microsoft.Attention", "com.microsoft.PackedMultiHeadAttention",
                "com.microsoft.DecoderMaskedMultiHeadAttention")  # fmt: skip
_LEAST_INPUTS = 7


def check_existing(index: Index, i: int) -> dict[str, str | int | float | bool]:
    """The facts of a GroupQueryAttention node. Raises Refused if it contradicts the operator's schema."""
    heads, kv_heads = (int(index.attribute(i, name, 0)) for name in ("num_heads", "kv_num_heads"))
    if heads <= 0 or kv_heads <= 0 or heads % kv_heads:
        raise Refused("GQA114", f"a GroupQueryAttention node with {heads} heads and {kv_heads} key heads is invalid")
    inputs = index.inputs(i)
    if len(inputs) < _LEAST_INPUTS or not inputs[0] or not inputs[5] or not inputs[6]:
        raise Refused("GQA114", "a GroupQueryAttention node lacks its query or its lengths")
    facts: dict[str, str | int | float | bool] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "rotary": bool(index.attribute(i, "do_rotary", 0)),
    }
    window = int(index.attribute(i, "local_window_size", -1))
    if window == 0:
        raise Refused("GQA114", "a GroupQueryAttention node has a window of 0, with which the runtime computes garbage")
    if window > 0:
        facts["window"] = window
    return facts
