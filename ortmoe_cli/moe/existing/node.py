"""A fused node as it stands in the graph."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ortmoe_cli.graph.index import Index

FUSED = ("com.microsoft.MoE", "com.microsoft.QMoE")
_SLOTS = {
    "MoE": ("input", "router", "fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias"),
    "QMoE": (
        "input", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales",
        "fc3_bias", "fc1_zero", "fc2_zero", "fc3_zero", "router_weights",
    ),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "k": 1,
    "activation_type": "relu",
    "normalize_routing_weights": 0,
    "use_sparse_mixer": 0,
    "swiglu_fusion": 0,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_limit": float("inf"),
    "expert_weight_bits": 4,
    "block_size": 0,
    "quant_type": "int",
    "weights_prepacked": -1,
}


@dataclass(frozen=True, eq=False)
class FusedNode:
    """An MoE or QMoE node: its inputs by name, its attributes, and what can be known about sizes without running."""

    index: Index
    i: int
    hidden_size: int | None
    router_rank: int | None = None

    @property
    def kind(self) -> str:
        return self.index.node(self.i).op_type

    @property
    def name(self) -> str:
        return self.index.node(self.i).name or self.index.outputs(self.i)[0]

    def attribute(self, name: str) -> Any:
        return self.index.attribute(self.i, name, _DEFAULTS.get(name))

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The inputs that are there, by what they are for."""
        return {slot: n for slot, n in zip(_SLOTS[self.kind], self.index.inputs(self.i), strict=False) if n}

    def shape(self, slot: str) -> tuple[int, ...] | None:
        name = self.inputs.get(slot)
        return self.index.constant_shape(name) if name else None

    @property
    def experts(self) -> int | None:
        shape = self.shape("fc1")
        return shape[0] if shape else None

    @property
    def merged(self) -> bool:
        """Whether fc1 makes gate and up."""
        return self.attribute("activation_type") == "swiglu" and self.attribute("swiglu_fusion") in (1, 2)

    @property
    def elem_type(self) -> int:
        """The type of the node, by whichever tensor tells it."""
        slots = ("input", "router", "fc1") if self.kind == "MoE" else ("input", "router")
        return next((t for slot in slots if (t := self.index.elem_type(self.inputs.get(slot, "")))), 0)

    @cached_property
    def inner(self) -> int | None:
        """I, by the second matrices where they are [E,H,I] and by the first otherwise."""
        first = self.shape("fc1")
        if first is None or len(first) != 3:
            return None
        return first[1] // 2 if self.merged else first[1]
