"""What may be wrong with a fused node: each check gives at most one finding."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import TensorProto

from ortmoe_cli.moe.existing.node import FusedNode

_GATED = {"silu", "swiglu"}
_HALVES = (int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16))


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a node (on the provider `where`, if it is wrong there only).

    grave: the node does not run there, or computes something else than its schema says.
    """

    code: str
    message: str
    where: str = ""
    grave: bool = True
    repairable: bool = False


def findings(node: FusedNode, ep: str) -> list[Finding]:
    """Everything that is wrong with a node, what matters on the wanted provider first."""
    found = [finding for check in _CHECKS for finding in check(node)]
    return sorted(found, key=lambda f: not weighs(f, ep))


def weighs(finding: Finding, ep: str) -> bool:
    """Whether a finding says that the node does not do its work on the wanted provider."""
    return finding.grave and finding.where in ("", ep)


def _schema(node: FusedNode) -> Iterator[Finding]:
    schema = schema_of(node.kind)
    if schema is None:
        yield Finding("MOE201", f"the installed runtime has no operator {node.kind}")
        return
    raw = node.index.node(node.i)
    unknown = [a.name for a in raw.attribute if a.name not in schema.attributes]
    if unknown:
        yield Finding("MOE201", f"the operator {node.kind} of the installed runtime has no attribute '{unknown[0]}'")
    if len(raw.input) > schema.max_input:
        yield Finding("MOE201", f"{len(raw.input)} inputs, the operator takes {schema.max_input} at most")
    missing = [slot for slot in ("input", "router", "fc1", "fc2") if slot not in node.inputs]
    if missing:
        yield Finding("MOE201", f"the input {missing[0]} is missing")
    types = {node.index.elem_type(node.inputs[slot]) for slot in _typed(node)} - {0}
    if len(types) > 1:
        names = " and ".join(sorted(TensorProto.DataType.Name(t) for t in types))
        yield Finding("MOE201", f"inputs of the types {names}: the operator wants one")


def _typed(node: FusedNode) -> list[str]:
    """Inputs that must have one type."""
    slots = ["input", "router", "fc1_bias", "fc2_bias", "fc3_bias", "router_weights"]
    if node.kind == "MoE":
        slots += ["fc1", "fc2", "fc3"]
    return [slot for slot in slots if slot in node.inputs]


def _legacy(node: FusedNode) -> Iterator[Finding]:
    """Weights [E,in,out], the order of earlier runtimes."""
    first, second = node.shape("fc1"), node.shape("fc2")
    if node.kind != "MoE" or not first or not second or len(first) != 3 or len(second) != 3:
        return
    times = 2 if node.merged else 1
    fits = first[2] == second[1] and first[1] == times * second[2]
    turned = first[1] == second[2] and first[2] == times * second[1]
    if node.hidden_size is not None:
        fits &= first[2] == node.hidden_size
        turned &= first[1] == node.hidden_size
    if turned and not fits:
        text = f"weights {list(first)} and {list(second)} are in the old order [experts, in, out]"
        yield Finding("MOE202", f"{text}: the runtime reads them as [experts, out, in] and computes garbage")
    elif not fits:
        yield Finding("MOE209", f"weights {list(first)} and {list(second)} do not fit each other")


def _third(node: FusedNode) -> Iterator[Finding]:
    if "fc3" not in node.inputs:
        return
    activation = node.attribute("activation_type")
    repairable = node.kind == "MoE" and activation in _GATED and not node.merged
    yield Finding(
        "MOE203", "separate gate and up matrices (fc3) are not implemented on the CPU", "cpu", True, repairable
    )
    if "fc3_bias" in node.inputs:
        yield Finding("MOE203", "the bias of fc3 is never read on CUDA", "cuda", True, repairable)


def _normalise(node: FusedNode) -> Iterator[Finding]:
    if node.attribute("normalize_routing_weights"):
        return
    if node.kind == "MoE":
        text = (
            "normalize_routing_weights=0 gives wrong results on the CPU before 1.32 when the input is reused in place"
        )
        yield Finding("MOE204", text, "cpu", True, True)
    elif "router_weights" not in node.inputs:
        text = "QMoE always normalises the routing weights on the CPU; normalize_routing_weights=0 is ignored"
        yield Finding("MOE204", text, "cpu")


def _halves(node: FusedNode) -> Iterator[Finding]:
    activation, fusion = node.attribute("activation_type"), node.attribute("swiglu_fusion")
    if activation == "swiglu" and fusion != 1 and "fc3" not in node.inputs:
        repairable = node.kind == "MoE" and fusion == 2
        yield Finding("MOE205", f"swiglu_fusion={fusion} is not implemented on the CPU", "cpu", True, repairable)


def _types(node: FusedNode) -> Iterator[Finding]:
    if node.elem_type == TensorProto.BFLOAT16 and node.kind == "MoE":
        yield Finding("MOE206", "bfloat16 is not implemented on the CPU", "cpu")
    if node.elem_type == TensorProto.FLOAT and node.kind == "QMoE":
        yield Finding("MOE206", "QMoE takes float16 or bfloat16 on CUDA, not float", "cuda")


def _sizes(node: FusedNode) -> Iterator[Finding]:
    hidden, inner = node.hidden_size or (node.shape("fc2") or (0, 0))[1], node.inner
    if not hidden or not inner:
        return
    step = 64 if node.kind == "QMoE" else 8 if node.elem_type in _HALVES else 4
    least = 64 if node.kind == "QMoE" else 16
    if min(hidden, inner) < least or hidden % step or inner % step:
        text = f"H={hidden} and I={inner}: CUDA wants at least {least} and multiples of {step}"
        yield Finding("MOE207", text, "cuda")


def _chosen(node: FusedNode) -> Iterator[Finding]:
    k, experts = int(node.attribute("k")), node.experts
    if k < 1 or (experts is not None and k > experts):
        yield Finding("MOE208", f"k={k} of {experts} experts")


def _shapes(node: FusedNode) -> Iterator[Finding]:
    first, second = node.shape("fc1"), node.shape("fc2")
    if not first or not second or len(first) != 3 or len(second) != 3:
        return
    if first[0] != second[0]:
        yield Finding("MOE209", f"{first[0]} experts in fc1, {second[0]} in fc2")
    wanted = {"fc1_bias": first[:2], "fc2_bias": second[:2]}
    third = node.shape("fc3")
    if third and len(third) == 3:
        wanted["fc3_bias"] = third[:2]
        if node.kind == "MoE" and third != first:
            yield Finding("MOE209", f"fc1 {list(first)} and fc3 {list(third)} differ in shape")
    for slot, shape in wanted.items():
        found = node.shape(slot)
        if found is not None and found != shape:
            yield Finding("MOE209", f"{slot} is {list(found)}, should be {list(shape)}")
    if node.kind == "QMoE":
        block = int(node.attribute("block_size"))
        for slot, weight in (("fc1", first), ("fc2", second)):
            scales = node.shape(f"{slot}_scales")
            groups = (
                [] if block <= 0 else [math.ceil(weight[2] * 8 // int(node.attribute("expert_weight_bits")) / block)]
            )
            if scales is not None and node.attribute("quant_type") == "int" and list(scales) != [*weight[:2], *groups]:
                yield Finding("MOE209", f"{slot}_scales is {list(scales)}, should be {[*weight[:2], *groups]}")


def _router(node: FusedNode) -> Iterator[Finding]:
    if node.router_rank not in (None, 2):
        text = f"router_probs has {node.router_rank} dimensions; the operator takes [tokens, experts] only"
        yield Finding("MOE210", text)


def _packing(node: FusedNode) -> Iterator[Finding]:
    if node.kind != "QMoE" or node.attribute("quant_type") != "int":
        return
    if int(node.attribute("weights_prepacked")) == -1:
        text = "weights_prepacked is not set: CUDA takes the weights as packed for it already; raw ones need 0"
        yield Finding("MOE211", text, "cuda")


def _mixer(node: FusedNode) -> Iterator[Finding]:
    if node.attribute("use_sparse_mixer"):
        yield Finding("MOE212", "use_sparse_mixer=1 is ignored on the CPU, which then routes by softmax", "cpu")


def _activation(node: FusedNode) -> Iterator[Finding]:
    if node.attribute("activation_type") == "gelu":
        text = "gelu is computed in its tanh form on the CPU and seems to be the erf form on CUDA"
        yield Finding("MOE213", text, grave=False)
    if node.kind == "QMoE" and "router_weights" in node.inputs:
        yield Finding("MOE213", "the input router_weights seems to be ignored on CUDA", "cuda")
    if node.kind == "QMoE" and int(node.attribute("expert_weight_bits")) == 8 and int(node.attribute("block_size")) > 0:
        text = "8-bit weights in blocks are multiplied with 8-bit activations on the CPU: errors of 1 to 1.5 %"
        yield Finding("MOE213", text, "cpu", grave=False)


_CHECKS: tuple[Callable[[FusedNode], Iterator[Finding]], ...] = (
    _schema, _legacy, _chosen, _shapes, _router, _third, _halves, _normalise, _types, _mixer, _sizes, _packing,
    _activation,
)  # fmt: skip


@cache
def schema_of(kind: str) -> Any:
    """The schema of an operator of the installed runtime, None if it has none."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # noqa: PLC0415

    found = [s for s in get_all_operator_schema() if s.domain == "com.microsoft" and s.name == kind]
    return max(found, key=lambda s: s.since_version, default=None)
