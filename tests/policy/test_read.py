from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.policy import Bucket, CudaGraph, Experts, Fusions, Policy, PolicyError
from ortmoe_cli.policy.presets import PRESETS
from ortmoe_cli.policy.read import check, from_mapping, read
from ortmoe_cli.policy.write import to_toml
from ortmoe_cli.runtime.settings import CPU, CUDA, CUDA_OPTIONS, SESSION_KEYS


def problems(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(PolicyError) as caught:
        from_mapping(data)
    return [(problem.code, problem.where, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("data", "code", "where", "words"),
    [
        ({"optimisation_level": "all"}, "POL201", "optimisation_level", "did you mean 'optimization_level'?"),
        ({"session_config": {"session.disable_prepacing": 1}}, "POL201", "session_config.session.disable_prepacing",
         "'session.disable_prepacking'"),
        ({"providers": [CUDA, CPU], "provider_options": {CUDA: {"use_tf23": 1}}}, "POL201",
         f"provider_options.{CUDA}.use_tf23", "'use_tf32'"),
        ({"provider_options": {"CudaExecutionProvider": {}}}, "POL201", "provider_options.CudaExecutionProvider",
         "'CUDAExecutionProvider'"),
        ({"cuda_graph": {"enable": True}}, "POL201", "cuda_graph.enable", "'enabled'"),
        ({"buckets": [{"batch": 1, "sequence": 1, "graph": 1}]}, "POL201", "buckets[0].graph", "'graph_id'"),
        ({"provider_options": {CUDA: {"user_compute_stream": 1}}}, "POL201",
         f"provider_options.{CUDA}.user_compute_stream", "address"),
        ({"provider_options": {CUDA: {"cuda_graph_enable_partial": 1}}}, "POL202",
         f"provider_options.{CUDA}.cuda_graph_enable_partial", "graph_id"),
        ({"provider_options": {CUDA: {"max_batch_size": 64}}}, "POL202", f"provider_options.{CUDA}.max_batch_size",
         "largest bucket"),
        ({"session_config": {"gpu_graph_capture": 1}}, "POL202", "session_config.gpu_graph_capture", "gpu_graph_id"),
        ({"max_batch_size": 64}, "POL202", "max_batch_size", "no such provider option"),
        ({"dimensions": {"batch": [1, 64]}}, "POL202", "dimensions.batch", "knows no ranges"),
        ({"optimization_level": "ALL"}, "POL203", "optimization_level", "none of all, layout"),
        ({"provider_options": {CUDA: {"use_tf32": "yes"}}}, "POL203", f"provider_options.{CUDA}.use_tf32",
         "none of 0, 1"),
        ({"dimensions": {"batch": "rows"}}, "POL203", "dimensions.batch", "one of batch, sequence, past, total"),
        ({"buckets": [{"batch": 0, "sequence": 1}]}, "POL203", "buckets[0].batch", "above 0"),
        ({"buckets": [{"batch": 1, "sequence": 1, "graph_id": 0}]}, "POL203", "buckets[0].graph_id", "-1"),
        ({"fusions": {"moe": "some"}}, "POL203", "fusions.moe", '"all"'),
        ({"experts": {"block_size": 32}}, "POL203", "experts", "bits"),
        ({"cuda_graph": {"enabled": 1}}, "POL203", "cuda_graph.enabled", "true or false"),
        ({"providers": CPU}, "POL203", "providers", "a list"),
        ({"providers": []}, "POL203", "providers", "at least one"),
        ({"assume": ["luck"]}, "POL203", "assume", "right-padding"),
        ({"cuda_graph": {"enabled": True}}, "POL204", "cuda_graph.enabled", CUDA),
        ({"provider_options": {CUDA: {"use_tf32": 1}}}, "POL204", f"provider_options.{CUDA}", "not among"),
        ({"providers": [CUDA], "provider_options": {CUDA: {"enable_cuda_graph": 1}}}, "POL204",
         f"provider_options.{CUDA}.enable_cuda_graph", "contradicts"),
        ({"specialise": "graphs"}, "POL204", "specialise", "cuda_graph.enabled"),
        ({"providers": [CUDA], "specialise": "graphs", "cuda_graph": {"enabled": True},
          "buckets": [{"batch": b, "sequence": 1, "graph_id": 4} for b in (1, 2)]}, "POL204", "buckets", "share"),
        ({"run_config": {"gpu_graph_id": 1}, "buckets": [{"batch": 1, "sequence": 1}]}, "POL204",
         "run_config.gpu_graph_id", "graph_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data: dict[str, Any], code: str, where: str, words: str) -> None:
    found = problems(data)
    assert (code, where) in [(c, w) for c, w, _ in found]
    assert words in " ".join(message for _, w, message in found if w == where)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    found = problems({"nme": "x", "optimization_level": "most", "session_config": {"a": 1}})
    assert [where for _, where, _ in found] == ["nme", "optimization_level", "session_config.a"]


def test_a_policy_of_code_is_held_to_the_same() -> None:
    check(Policy())
    with pytest.raises(PolicyError, match="did you mean 'use_tf32'"):
        check(Policy(providers=(CUDA,), provider_options={CUDA: {"use_tf23": 1}}))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(OrtmoeError, match="is not TOML"):
        read(tmp_path / "bad.toml")
    with pytest.raises(OrtmoeError, match="cannot be read as a policy"):
        read(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OrtmoeError, match="is not text"):
        read(tmp_path / "bytes.toml")


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
buckets = st.builds(Bucket, st.integers(1, 64), st.integers(1, 9000), st.none() | st.integers(0, 9000))
policies = st.builds(
    Policy,
    name=names,
    optimization_level=st.sampled_from(["all", "basic"]),
    providers=st.just((CUDA, CPU)),
    provider_options=st.dictionaries(
        st.just(CUDA), st.dictionaries(st.sampled_from(["use_tf32", "prefer_nhwc"]), st.booleans())
    ),
    session_config=st.dictionaries(st.just("session.disable_prepacking"), st.sampled_from(["0", "1", 1])),
    dimensions=st.dictionaries(names, st.sampled_from(["batch", "sequence", "past", "total", 7])),
    buckets=st.lists(buckets, max_size=3).map(tuple),
    cuda_graph=st.builds(CudaGraph, st.booleans(), st.integers(2, 5)),
    fusions=st.builds(Fusions, moe=st.sampled_from([None, "all", 3])),
    experts=st.none() | st.builds(Experts, st.just(4), st.sampled_from([None, 32])),
    assume=st.sampled_from([(), ("right-padding",)]),
    models=st.lists(names, max_size=2).map(tuple),
)


@given(policies)
def test_a_file_gives_back_the_policy_that_it_was_made_of(policy: Policy) -> None:
    import tomllib

    written = tomllib.loads(to_toml(policy))
    back = from_mapping(written)
    empty = {name: values for name, values in policy.provider_options.items() if values}
    assert back == Policy(**{**vars(policy), "provider_options": empty})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_can_be_written(name: str, tmp_path: Path) -> None:
    policy = PRESETS[name].policy()
    check(policy)
    (tmp_path / "p.toml").write_text(to_toml(policy), "utf-8")
    assert read(tmp_path / "p.toml") == policy


def test_a_written_policy_explains_its_settings() -> None:
    text = to_toml(Policy(providers=(CUDA,), provider_options={CUDA: {"use_tf32": True}}))
    assert f"# {CUDA_OPTIONS['use_tf32'].meaning}\nuse_tf32 = true" in text
    key = "session.use_env_allocators"
    assert f'# {SESSION_KEYS[key].meaning}\n"{key}" = "1"' in to_toml(Policy(session_config={key: "1"}))
