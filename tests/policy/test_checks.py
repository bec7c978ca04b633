"""Each reason why a model does not meet a policy: a model that shows it, and the nearest one that does not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.policy import Bucket, CudaGraph, Experts, Fusions, Policy, find
from ortmoe_cli.policy.checks import Subject, moe
from ortmoe_cli.policy.derive import derive
from ortmoe_cli.policy.facts import ASSUMED_KEY
from ortmoe_cli.policy.guard import guard
from ortmoe_cli.report.model import BlockReport, Report
from ortmoe_cli.runtime.settings import CPU, CUDA
from tests.policy.conftest import fixture

Fuse = Callable[..., Path]
GRAPHS = Policy(providers=(CUDA, CPU), cuda_graph=CudaGraph(True), dimensions={"n": "batch"}, buckets=(Bucket(2, 1),))


def codes(model: Path, policy: Policy, **flags: bool) -> list[str]:
    return [finding.code for finding in guard(model, policy, **flags).findings]


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    weights: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A model whose output is that of its last node."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    return path


def plain(path: Path, dims: list[Any] | None = None, **options: Any) -> Path:
    return save(path, [helper.make_node("Neg", ["x"], ["y"])], {"x": (TensorProto.FLOAT, dims or ["n", 4])}, **options)


def product(path: Path, dtype: type = np.float32) -> Path:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return save(
        path, [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (kind, ["n", 4])}, {"w": np.ones((4, 4), dtype)}
    )


def quantised(path: Path, bits: int = 4, **attributes: Any) -> Path:
    names = ["x", "router", "w1", "s1", "", "w2", "s2"]
    node = helper.make_node(
        "QMoE", names, ["y"], "qmoe", domain="com.microsoft", k=1, expert_weight_bits=bits, **attributes
    )
    inputs = {"x": (TensorProto.FLOAT, [2, 32]), "router": (TensorProto.FLOAT, [2, 2])}
    weights = {name: np.zeros((2, 32, 32 * bits // 8), np.uint8) for name in ("w1", "w2")}
    weights |= {name: np.ones((2, 32), np.float32) for name in ("s1", "s2")}
    return save(path, [node], inputs, weights)


def attention(path: Path, op: str = "com.microsoft") -> Path:
    half = TensorProto.FLOAT16
    inputs = {name: (half, [1, 4, 32]) for name in ("q", "k", "v")}
    inputs |= {"p": (TensorProto.INT64, [1, 4]), "lengths": (TensorProto.INT32, [1]), "total": (TensorProto.INT32, [1])}
    tables = {name: np.ones((8, 8), np.float16) for name in ("cos", "sin")}
    names = ["r", "k", "v", "", "", "lengths", "total"]
    nodes = [
        helper.make_node("RotaryEmbedding", ["q", "p", "cos", "sin"], ["r"], domain=op),
        helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", num_heads=2, kv_num_heads=2),
    ]
    return save(path, nodes, inputs, tables)


def test_level(tmp_path: Path) -> None:
    model = plain(tmp_path / "m.onnx")
    assert codes(model, Policy(optimization_level="extended")) == ["POL101"]
    assert codes(model, Policy()) == []


def test_tf32(tmp_path: Path) -> None:
    off = Policy(providers=(CUDA, CPU), provider_options={CUDA: {"use_tf32": 0}}, cuda_graph=CudaGraph(True),
                 dimensions={"n": 2})  # fmt: skip
    assert codes(product(tmp_path / "m.onnx"), off) == ["POL102"]
    assert codes(product(tmp_path / "h.onnx", np.float16), off) == []
    assert codes(tmp_path / "m.onnx", replace(off, provider_options={})) == []


def test_graphs_off(tmp_path: Path) -> None:
    model = plain(tmp_path / "m.onnx")
    assert codes(model, replace(GRAPHS, cuda_graph=CudaGraph(False))) == ["POL103"]
    assert codes(model, GRAPHS) == []
    assert codes(model, Policy()) == []


def test_control_flow(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["b"])], "b", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)]
    )
    node = helper.make_node("If", ["c"], ["y"], "choose", then_branch=branch, else_branch=branch)
    inputs = {"x": (TensorProto.FLOAT, ["n", 4]), "c": (TensorProto.BOOL, [])}
    model = save(tmp_path / "m.onnx", [node], inputs)
    (finding,) = guard(model, GRAPHS).findings
    assert (finding.code, finding.nodes) == ("POL104", ("choose",))


def test_shapes_that_depend_on_values(tmp_path: Path) -> None:
    inputs = {"x": (TensorProto.FLOAT, ["n", 4])}
    model = save(tmp_path / "m.onnx", [helper.make_node("NonZero", ["x"], ["y"], "hit")], inputs)
    (finding,) = guard(model, GRAPHS).findings
    assert (finding.code, finding.nodes) == ("POL105", ("hit",))


def test_no_kernel(tmp_path: Path) -> None:
    inputs = {"x": (TensorProto.FLOAT, ["n", 4, 4])}
    model = save(tmp_path / "m.onnx", [helper.make_node("Det", ["x"], ["y"], "det")], inputs)
    (finding,) = guard(model, GRAPHS).findings
    assert (finding.code, finding.nodes) == ("POL106", ("det",))


def test_copies(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Cast", ["size"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "count"], ["y"], "div"),
    ]
    model = save(tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT, ["n", 4])})
    assert codes(model, GRAPHS) == []  # the bucket fixes n
    one_session = replace(GRAPHS, specialise="graphs", buckets=(Bucket(2, 1, graph_id=1),))
    (finding,) = guard(model, one_session).findings
    assert (finding.code, finding.nodes) == ("POL107", ("div",))


def test_dimensions(tmp_path: Path) -> None:
    model = plain(tmp_path / "m.onnx", ["n", "width"])
    covered = Policy(dimensions={"n": "batch", "width": 4}, buckets=(Bucket(2, 1),))
    assert codes(model, covered) == []
    assert codes(model, replace(covered, dimensions={"n": "batch"})) == ["POL108"]
    (finding,) = guard(model, replace(covered, dimensions={"n": "batch", "width": 4, "widht": 4})).findings
    assert finding.code == "POL109"
    assert "'widht' → 'width'" in finding.message
    assert codes(plain(tmp_path / "fixed.onnx", [2, 4]), Policy(buckets=(Bucket(2, 1),))) == []


def test_a_bucket_that_leaves_the_cache_open(tmp_path: Path) -> None:
    model = plain(tmp_path / "m.onnx", ["n", "past"])
    policy = replace(GRAPHS, dimensions={"n": "batch", "past": "past"})
    (finding,) = guard(model, policy).findings
    assert finding.code == "POL110"
    assert "'past'" in finding.message
    assert codes(model, replace(policy, buckets=(Bucket(2, 1, 7),))) == []


def test_graphs_without_buckets(tmp_path: Path) -> None:
    policy = replace(GRAPHS, dimensions={}, buckets=())
    assert codes(plain(tmp_path / "m.onnx"), policy) == ["POL110"]
    assert codes(plain(tmp_path / "fixed.onnx", [2, 4]), policy) == []


@pytest.mark.parametrize("kind", ["moe", "gqa"])
def test_fused_nodes(kind: str, fused: Fuse) -> None:
    every = Policy(fusions=Fusions(**{kind: "all"}))
    name = "gpt_oss_gathered"
    (finding,) = guard(fixture(name), every).findings
    assert (finding.code, len(finding.nodes)) == ("POL111", 2)
    assert finding.action.startswith("ortmoe fuse ")
    assert codes(fused(name), every) == []
    assert codes(fused(name), Policy(fusions=Fusions(**{kind: 2}))) == []
    assert codes(fused(name), Policy(fusions=Fusions(**{kind: 3}))) == ["POL112"]
    assert codes(fused(name, "gqa" if kind == "moe" else "moe"), every) == ["POL111"]


def test_all_means_every_block_that_is_found(fused: Fuse) -> None:
    left = BlockReport("moe", "/layers.7/mlp", 7, "fusable", "MOE001", "")
    index, policy = open_index(fused("gpt_oss_gathered")), Policy(fusions=Fusions(moe="all"))
    (finding,) = moe(Subject(index, policy, Report("m.onnx", "audit", (left,), 1)))
    assert (finding.code, finding.nodes) == ("POL112", ("/layers.7/mlp",))
    assert finding.message == "2 of 3 blocks are MoE nodes; left: '/layers.7/mlp'"
    assert list(moe(Subject(index, policy, Report("m.onnx", "audit", (), 1)))) == []


def test_a_refused_block_is_explained() -> None:
    (finding,) = guard(fixture("mixtral_experts_missing"), Policy(fusions=Fusions(moe="all"))).findings
    assert (finding.code, finding.action) == ("POL111", "ortmoe rule MOE101")


def test_experts(tmp_path: Path, fused: Fuse) -> None:
    wanted = Policy(experts=Experts(4))
    assert codes(fused("gpt_oss_gathered"), wanted) == ["POL113"]
    assert codes(fixture("gpt_oss_gathered"), wanted) == ["POL113"]
    assert codes(quantised(tmp_path / "q.onnx"), wanted) == []
    assert codes(quantised(tmp_path / "q8.onnx", bits=8), wanted) == ["POL114"]
    assert codes(tmp_path / "q.onnx", Policy(experts=Experts(4, 32))) == ["POL114"]
    assert codes(quantised(tmp_path / "b.onnx", block_size=32), Policy(experts=Experts(4, 32))) == []
    assert codes(tmp_path / "q.onnx", Policy(fusions=Fusions(moe=1, qmoe=1))) == []


def test_assumptions(tmp_path: Path) -> None:
    model = plain(tmp_path / "m.onnx", metadata={ASSUMED_KEY: "right-padding"})
    assert codes(model, Policy()) == ["POL115"]
    assert codes(model, Policy(assume=("right-padding",))) == []


def test_an_optimiser_that_breaks_attention(tmp_path: Path) -> None:
    policy = Policy(providers=(CUDA, CPU), cuda_graph=CudaGraph(True))
    model = attention(tmp_path / "m.onnx")
    assert codes(model, policy) == ["POL116"]
    assert codes(model, Policy()) == []
    key = "optimization.disable_specified_optimizers"
    assert codes(model, replace(policy, session_config={key: "GroupQueryAttentionFusion"})) == []


def test_the_preset_against_an_unfused_model_has_one_code_for_each_reason() -> None:
    report = guard(fixture("gpt_oss_gathered"), find("gpt-oss-20b"))
    found = [finding.code for finding in report.findings]
    assert found == ["POL111", "POL111", "POL113", "POL108", "POL109", "POL107"]
    assert [check.name for check in report.of("failed")][:3] == ["moe", "gqa", "experts"]


def test_a_derived_policy_is_met_by_its_model(fused: Fuse) -> None:
    model = fused("gpt_oss_gathered")
    policy = derive(model)
    assert policy.fusions == Fusions(moe=2, gqa=2)
    report = guard(model, policy, runtime=True)
    assert report.findings == ()
    (session,) = [check for check in report.checks if check.name == "session"]
    assert "2 MoE" in session.note
    assert "2 GroupQueryAttention" in session.note


def test_a_fused_half_precision_model_can_be_recorded(fused: Fuse) -> None:
    policy = Policy(
        providers=(CUDA, CPU),
        cuda_graph=CudaGraph(True),
        dimensions={"batch": "batch", "sequence": "sequence", "total": "total"},
        buckets=(Bucket(1, 8, 0),),
        fusions=Fusions(moe="all"),
    )
    assert codes(fixture("qwen2_moe_f16"), policy) == ["POL111"]
    assert codes(fused("qwen2_moe_f16"), policy) == []


def test_a_provider_that_does_not_load_is_a_finding(tmp_path: Path) -> None:
    from ortmoe_cli.runtime.probe_cuda import loads

    if loads()[0]:
        pytest.skip("CUDA loads here")
    policy = Policy(providers=(CUDA, CPU), cuda_graph=CudaGraph(True))
    assert codes(plain(tmp_path / "m.onnx", [2, 4]), policy, runtime=True) == ["POL152"]


def test_a_session_that_cannot_be_made_is_a_finding(tmp_path: Path) -> None:
    inputs = {"x": (TensorProto.BFLOAT16, [2, 4])}
    model = save(tmp_path / "m.onnx", [helper.make_node("Elu", ["x"], ["y"])], inputs)
    report = guard(model, Policy(), runtime=True)
    assert [finding.code for finding in report.findings] == ["POL151"]
    assert {check.name for check in report.of("skipped")} >= {"providers", "kept"}
