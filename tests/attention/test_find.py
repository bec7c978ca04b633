"""Decoders as exporters write them: fused with equal outputs, or refused for the right reason."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from ortmoe_cli.outcome import Fusion, Refusal
from tests.attention.decoders import Decoder
from tests.attention.running import fuse, largest_difference

EXACT = 1e-5


def fused(decoder: Decoder, folder: Path) -> Fusion:
    """The single fusion of a decoder, its outputs compared in the runtime."""
    result = fuse(decoder.build(), folder)
    assert result.codes in (["GQA001"], ["GQA003"]), result.outcomes
    differences = largest_difference(result)
    assert differences
    assert max(differences.values()) <= (3e-3 if decoder.half else EXACT), differences
    ops = [node.op_type for node in result.fused.graph.node]
    assert ops.count("GroupQueryAttention") == 1
    assert "Softmax" not in ops
    (outcome,) = result.outcomes
    assert isinstance(outcome, Fusion)
    return outcome


def refused(decoder: Decoder, folder: Path) -> Refusal:
    result = fuse(decoder.build(), folder)
    (outcome,) = result.outcomes
    assert isinstance(outcome, Refusal), outcome
    assert result.fused.graph.node == result.original.graph.node
    return outcome


def test_with_a_cache_it_is_narrowed_and_says_so(tmp_path: Path) -> None:
    outcome = fused(Decoder(), tmp_path)
    assert (outcome.code, outcome.guarantee) == ("GQA003", "narrowed")
    assert "one sequence at a time" in outcome.contract[0]
    assert "no sequences" in outcome.contract[1]
    assert (outcome.facts["heads"], outcome.facts["kv_heads"], outcome.facts["head_size"]) == (4, 2, 8)
    assert outcome.facts["scale"] == pytest.approx(0.3, rel=1e-5)
    regimes = {check.regime for check in outcome.checks}
    assert {"prompt", "decode", "chunk", "left-padded decode", "right-padded prompt"} <= regimes


def test_without_a_cache_only_empty_inputs_are_lost(tmp_path: Path) -> None:
    outcome = fused(Decoder(cache=False), tmp_path)
    assert (outcome.code, outcome.guarantee) == ("GQA003", "narrowed")
    assert ["no sequences" in line or "without new tokens" in line for line in outcome.contract] == [True, True]


def test_with_fixed_sizes_it_is_exact(tmp_path: Path) -> None:
    proto = Decoder(cache=False).build()
    for value in proto.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, (2, 9), strict=True):
            dim.dim_value = size
    (outcome,) = fuse(proto, tmp_path).outcomes
    assert isinstance(outcome, Fusion)
    assert (outcome.code, outcome.guarantee, outcome.contract) == ("GQA001", "exact", ())


def test_the_presents_keep_their_names_and_no_copy_of_the_cache_stays(tmp_path: Path) -> None:
    result = fuse(Decoder().build(), tmp_path)
    made = {name: node.op_type for node in result.fused.graph.node for name in node.output}
    assert made["present.key"] == made["present.value"] == "GroupQueryAttention"
    assert not any(n.op_type == "Expand" and "Unsqueeze" in n.input[0] for n in result.fused.graph.node)


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_windows_are_kept_to_the_token(window: int, tmp_path: Path) -> None:
    assert fused(Decoder(window=window), tmp_path).facts["window"] == window


def test_a_window_wider_than_any_probe_is_carried_all_the_same(tmp_path: Path) -> None:
    outcome = fused(Decoder(window=4096, mask="none", cache=False), tmp_path)
    assert outcome.facts["bias"] != "none"


def test_a_mask_that_only_hides_the_future_needs_no_bias(tmp_path: Path) -> None:
    assert fused(Decoder(mask="none"), tmp_path).facts["bias"] == "none"


def test_softcap_and_sinks_are_measured(tmp_path: Path) -> None:
    outcome = fused(Decoder(softcap=5.0, sinks=True), tmp_path)
    assert outcome.facts["softcap"] == pytest.approx(5.0, rel=1e-5)
    assert outcome.facts["sinks"] is True


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("repeat", ["expand", "fold"])
def test_slopes_and_mask_added_apart_are_carried_together(cache: bool, repeat: str, tmp_path: Path) -> None:
    assert fused(Decoder(slopes=True, cache=cache, repeat=repeat), tmp_path).facts["bias"] == "copy"


@pytest.mark.parametrize("repeat", ["expand", "concat", "fold", "stacked"])
@pytest.mark.parametrize("mask", ["add", "where"])
def test_every_way_to_repeat_heads(repeat: str, mask: str, tmp_path: Path) -> None:
    fused(Decoder(repeat=repeat, mask=mask), tmp_path)


@pytest.mark.parametrize("layout", ["bnsd", "bsnd"])
def test_every_order_of_the_cache(layout: str, tmp_path: Path) -> None:
    fused(Decoder(cache_layout=layout), tmp_path)


def test_half_precision_is_emitted_in_its_own_type(tmp_path: Path) -> None:
    fused(Decoder(half=True), tmp_path)


def test_old_opsets_without_shape_slices(tmp_path: Path) -> None:
    fused(Decoder(opset=14), tmp_path)


@pytest.mark.parametrize(
    ("decoder", "code", "words"),
    [
        (Decoder(repeat="tile"), "GQA106", "in turn"),
        (Decoder(mask="padding", cache=False), "GQA101", "bidirectional"),
        (Decoder(mask="prefix", cache=False), "GQA105", "future"),
        (Decoder(value_size=16), "GQA102", "8, value heads 16"),
        (Decoder(size=12), "GQA104", "size 12"),
        (Decoder(mask="positions"), "GQA105", "odd positions"),
        (Decoder(mask="data", cache=False, opset=17), "GQA105", "data"),
        (Decoder(mask="tokens", cache=False), "GQA105", ""),
    ],
    ids=lambda value: value.mask if isinstance(value, Decoder) else None,
)
def test_what_must_not_be_fused(decoder: Decoder, code: str, words: str, tmp_path: Path) -> None:
    outcome = refused(decoder, tmp_path)
    assert outcome.code == code, outcome
    assert words in outcome.message


def test_a_router_is_no_attention(tmp_path: Path) -> None:
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in (("r", (8, 4)), ("e", (4, 8)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "r"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "e"], ["y"]),
    ]
    value = [helper.make_tensor_value_info(name, 1, ["b", "s", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "router", value[:1], value[1:], weights)
    assert fuse(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path).outcomes == []


def cross_attention() -> onnx.ModelProto:
    """Queries of one sequence on keys of another."""
    nodes, weights = [], []
    for name, source in (("q", "x"), ("k", "memory"), ("v", "memory")):
        weights.append(numpy_helper.from_array(np.eye(16, dtype=np.float32), f"w{name}"))
        nodes.append(helper.make_node("MatMul", [source, f"w{name}"], [f"{name}p"]))
        nodes.append(helper.make_node("Reshape", [f"{name}p", "split"], [f"{name}s"]))
        nodes.append(
            helper.make_node("Transpose", [f"{name}s"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])
        )
    weights.append(numpy_helper.from_array(np.array([0, 0, 2, 8]), "split"))
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    shapes = {"x": ["b", "s", 16], "memory": ["b", "m", 16], "y": None}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(nodes, "cross", [values["x"], values["memory"]], [values["y"]], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_cross_attention_has_its_own_code(tmp_path: Path) -> None:
    assert fuse(cross_attention(), tmp_path).codes == ["GQA103"]


decoders = st.builds(
    Decoder,
    heads=st.sampled_from([4, 6]),
    kv_heads=st.sampled_from([1, 2]),
    size=st.sampled_from([8, 16]),
    cache=st.booleans(),
    mask=st.sampled_from(["add", "where", "none"]),
    window=st.sampled_from([0, 2, 5]),
    softcap=st.sampled_from([0.0, 3.0, 50.0]),
    sinks=st.booleans(),
    slopes=st.booleans(),
    scale=st.floats(0.05, 1.5),
    repeat=st.sampled_from(["expand", "concat", "fold", "stacked"]),
    opset=st.sampled_from([14, 17]),
    seed=st.integers(0, 99),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decoder=decoders)
def test_any_decoder_is_fused_with_equal_outputs(decoder: Decoder, tmp_path: Path) -> None:
    outcome = fused(decoder, tmp_path)
    assert outcome.facts["scale"] == pytest.approx(decoder.scale, rel=1e-4)
    assert outcome.facts.get("window", 0) == decoder.window
    assert outcome.facts.get("softcap", 0.0) == pytest.approx(decoder.softcap, rel=1e-4)
