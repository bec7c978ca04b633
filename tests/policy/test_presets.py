import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import ortmoe_cli
from ortmoe_cli import OrtGptOssThroughputPolicy, OrtQwenThroughputPolicy, build_session_options
from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.policy import Bucket, Experts, Policy, PolicyError, find
from ortmoe_cli.policy.emit import KINDS, emit
from ortmoe_cli.policy.options import build_providers, build_run_options
from ortmoe_cli.policy.presets import PRESETS, ThroughputPolicy, ladder
from ortmoe_cli.runtime.settings import CPU, CUDA, CUDA_OPTIONS, FOLKLORE

FIELDS = {
    "optimization_level", "enable_cuda_graph", "use_tf32", "cuda_graph_partial", "free_dim_overrides",
    "keep_moe_subgraph", "keep_gqa_node", "qmoe_block_quant", "model_kind",
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "kind", "batch", "sequence"),
    [
        (OrtGptOssThroughputPolicy(), "gpt-oss-20b", 64, 8192),
        (OrtQwenThroughputPolicy(), "qwen3.6-35b-a3b", 128, 32768),
    ],
)
def test_the_public_presets(preset: ThroughputPolicy, kind: str, batch: int, sequence: int) -> None:
    assert {field.name for field in dataclasses.fields(preset)} == FIELDS
    assert preset.model_kind == kind
    assert [override[1:] for override in preset.free_dim_overrides] == [(1, batch), (1, sequence)]
    policy = preset.policy()
    assert max(bucket.batch for bucket in policy.buckets) == batch
    assert max(bucket.sequence for bucket in policy.buckets) == sequence
    assert all((bucket.past or 0) + bucket.sequence == sequence for bucket in policy.buckets)
    assert find(kind) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.use_tf32 = False  # type: ignore[misc]


def test_invented_names_never_reach_the_runtime() -> None:
    for preset in PRESETS.values():
        options = preset.cuda_provider_options()
        assert set(options) <= set(CUDA_OPTIONS)
        assert not set(FOLKLORE) & {*options, *preset.policy().session_config, *preset.policy().run_config}


def test_settings_become_options() -> None:
    on, off = OrtGptOssThroughputPolicy(), OrtGptOssThroughputPolicy(enable_cuda_graph=False, use_tf32=False)
    assert on.cuda_provider_options() == {"use_tf32": "1", "enable_cuda_graph": "1"}
    assert off.cuda_provider_options() == {"use_tf32": "0", "enable_cuda_graph": "0"}


def test_partial_graphs_become_graph_ids() -> None:
    policy = OrtGptOssThroughputPolicy().policy()
    ids = {(bucket.batch, bucket.sequence): bucket.graph_id for bucket in policy.buckets}
    assert ids == {(1, 1): 1, (8, 1): 2, (64, 1): 3, (1, 8192): -1}
    whole = OrtGptOssThroughputPolicy(cuda_graph_partial=False).policy()
    assert {bucket.graph_id for bucket in whole.buckets} == {None}
    assert whole.specialise == "sessions"


def test_what_must_be_kept_becomes_what_must_be_fused() -> None:
    policy = OrtQwenThroughputPolicy().policy()
    assert (policy.fusions.moe, policy.fusions.gqa, policy.experts) == ("all", "all", Experts(4, 32))
    loose = OrtQwenThroughputPolicy(keep_moe_subgraph=False, keep_gqa_node=False, qmoe_block_quant=False).policy()
    assert (loose.fusions.moe, loose.fusions.gqa, loose.experts) == (None, None, None)


def test_a_level_or_range_that_cannot_be_had() -> None:
    with pytest.raises(OrtmoeError, match="did you mean 'ORT_ENABLE_ALL'"):
        OrtGptOssThroughputPolicy(optimization_level="ORT_ENABLE_AL").policy()
    with pytest.raises(OrtmoeError, match="'frames' cannot have a range"):
        OrtGptOssThroughputPolicy(free_dim_overrides=(("frames", 1, 4),)).policy()
    fixed = OrtGptOssThroughputPolicy(free_dim_overrides=(("frames", 4, 4),)).policy()
    assert fixed.dimensions == {"frames": 4}


def test_ladder() -> None:
    assert ladder(1, 64) == (1, 8, 64)
    assert ladder(1, 128) == (1, 8, 64, 128)
    assert ladder(4, 4) == (4,)


def test_describe_says_what_each_setting_needs() -> None:
    text = OrtGptOssThroughputPolicy().describe()
    assert "enable_cuda_graph = 1" in text
    assert "IOBinding" in text
    assert "gpu_graph_id -1" in text


def test_find_knows_no_other_name(tmp_path: Path) -> None:
    with pytest.raises(OrtmoeError, match="did you mean 'gpt-oss-20b'"):
        find("gpt-oss-20")
    with pytest.raises(OrtmoeError, match="cannot be read"):
        find(str(tmp_path / "none.toml"))


def test_session_options_hold_what_the_policy_says() -> None:
    import onnxruntime as ort

    policy = Policy(
        optimization_level="basic",
        session_config={"session.disable_prepacking": True},
        intra_op_threads=3,
        dimensions={"b": "batch", "n": 4},
    )
    options = build_session_options(policy, Bucket(2, 1))
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.intra_op_num_threads == 3
    gpt = build_session_options(OrtGptOssThroughputPolicy())
    assert gpt.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    with pytest.raises(PolicyError):
        build_session_options(Policy(session_config={"session.no_such_key": 1}))


def test_run_options_choose_the_graph() -> None:
    policy = OrtGptOssThroughputPolicy().policy()
    assert build_run_options(policy, policy.buckets[1]).get_run_config_entry("gpu_graph_id") == "2"
    assert build_run_options(policy, None).get_run_config_entry("gpu_graph_id") == "-1"
    assert build_providers(policy) == [(CUDA, policy.options_of(CUDA)), (CPU, {})]


def test_emitted_python_builds_a_session(tmp_path: Path) -> None:
    from tests.policy.conftest import fixture

    policy = Policy(
        session_config={"session.disable_prepacking": 1}, dimensions={"batch": "batch"}, buckets=(Bucket(2, 8),)
    )
    code = emit(policy, "python").replace("model.onnx", str(fixture("qwen2_moe_f16")))
    assert "enable_fallback=0)" in code
    found: dict[str, object] = {}
    exec(code, found)
    session = found["session"]
    assert session.get_inputs()[0].shape[0] == 2  # type: ignore[attr-defined]


def test_emitted_genai_configuration_has_entries_where_they_are_read() -> None:
    import json

    policy = dataclasses.replace(
        OrtGptOssThroughputPolicy().policy(), session_config={"session.disable_prepacking": True}, intra_op_threads=2
    )
    decoder = json.loads(emit(policy, "genai"))["model"]["decoder"]
    assert decoder["session_options"] == {
        "graph_optimization_level": "ORT_ENABLE_ALL",
        "intra_op_num_threads": 2,
        "session.disable_prepacking": "1",
        "provider_options": [{"cuda": {"use_tf32": "1", "enable_cuda_graph": "1"}}],
    }


def test_emitted_cpp_names_every_option_and_bucket() -> None:
    text = emit(OrtGptOssThroughputPolicy().policy(), "cpp")
    assert 'cuda.Update({{"use_tf32", "1"}, {"enable_cuda_graph", "1"}});' in text
    assert "batch 64 × sequence 1 after 8191: gpu_graph_id = 3" in text


@pytest.mark.parametrize("kind", KINDS)
def test_everything_can_be_emitted(kind: str) -> None:
    assert all(emit(preset.policy(), kind) for preset in PRESETS.values())


def test_policies_do_not_pay_for_the_runtime() -> None:
    code = (
        "import sys, ortmoe_cli; p = ortmoe_cli.OrtGptOssThroughputPolicy(); p.describe(); p.cuda_provider_options();"
        "sys.exit(', '.join({'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        _ = ortmoe_cli.sesion  # type: ignore[attr-defined]
