from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from ortmoe_cli.policy import Bucket, Fusions
from ortmoe_cli.policy.derive import derive
from ortmoe_cli.policy.presets import find
from ortmoe_cli.runtime.settings import CPU, CUDA
from tests.policy.conftest import fixture


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_moe_hit_list", {"batch": "batch", "sequence": "sequence", "total": "total", "past": "past"}),
        ("qwen2_moe_f16", {"batch": "batch", "sequence": "sequence", "total": "total"}),
        ("gpt_oss_gathered", {"s10": "batch", "s70": "sequence", "s43": "batch", "s53": "total", "s69": "past",
                              "s89": "past", "s15": "past", "s81": "past"}),
    ],
)  # fmt: skip
def test_dimensions_get_their_meaning_from_what_they_are_used_for(name: str, expected: dict[str, str]) -> None:
    assert derive(fixture(name)).dimensions == expected


def test_fused_nodes_are_counted(fused: Callable[..., Path]) -> None:
    assert derive(fixture("gpt_oss_gathered")).fusions == Fusions()
    assert derive(fused("gpt_oss_gathered")).fusions == Fusions(moe=2, gqa=2)
    assert derive(fused("gpt_oss_gathered", "moe")).fusions == Fusions(moe=2)


def test_fused_nodes_in_functions_and_branches_count(tmp_path: Path) -> None:
    tensor = helper.make_tensor_value_info
    moe = helper.make_node("MoE", ["x", "r", "a", "", "b"], ["m"], domain="com.microsoft")
    branch = helper.make_graph([moe], "b", [], [tensor("m", TensorProto.FLOAT, None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    inputs = [
        tensor("c", TensorProto.BOOL, []),
        *(tensor(name, TensorProto.FLOAT, None) for name in ("x", "r", "a", "b")),
    ]
    graph = helper.make_graph([node], "g", inputs, [tensor("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    assert derive(tmp_path / "m.onnx").fusions == Fusions(moe=2)


def test_a_preset_lends_its_buckets_on_cuda() -> None:
    policy = derive(fixture("qwen3_moe_hit_list"), "gpt-oss-20b", "cuda")
    assert policy.providers == (CUDA, CPU)
    assert policy.buckets == find("gpt-oss-20b").buckets
    assert policy.overrides(policy.buckets[0]) == {"batch": 1, "sequence": 1, "past": 8191, "total": 8192}


def test_a_bucket_without_a_past_fixes_neither_cache_nor_mask() -> None:
    policy = derive(fixture("qwen3_moe_hit_list"))
    assert policy.overrides(Bucket(2, 4)) == {"batch": 2, "sequence": 4}
