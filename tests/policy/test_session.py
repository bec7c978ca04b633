"""Sessions under a policy: nothing falls back silently, shapes go where they belong, addresses stay."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortmoe_cli
from ortmoe_cli.policy import Bucket, CudaGraph, Policy
from ortmoe_cli.policy.derive import derive
from ortmoe_cli.policy.session import SessionError
from ortmoe_cli.runtime.settings import CPU, CUDA
from tests.cli.test_fixtures import samples
from tests.policy.conftest import fixture

NAME = "gpt_oss_gathered"


def policy(*buckets: Bucket, **fields: str) -> Policy:
    return replace(derive(fixture(NAME)), buckets=buckets, **fields)


def bucket_of(inputs: dict[str, np.ndarray]) -> Bucket:
    (batch, new), total = inputs["input_ids"].shape, inputs["attention_mask"].shape[1]
    return Bucket(batch, new, total - new)


def test_each_shape_runs_in_its_session_and_gives_the_same() -> None:
    recorded = samples(NAME)
    buckets = [bucket_of(inputs) for inputs, _ in recorded[1:]]
    made = ortmoe_cli.session(fixture(NAME), policy(*buckets))
    assert list(made.sessions) == [*buckets, None]
    assert made.providers == (CPU,)
    assert made.placement[None][CPU] > made.placement[buckets[0]][CPU]  # fixed shapes fold their arithmetic away
    assert made.bucket_of(recorded[0][0]) is None
    for (inputs, expected), bucket in zip(recorded[1:], buckets, strict=True):
        assert made.bucket_of(inputs) == bucket
        (logits,) = made.run(inputs, ["logits"])
        assert np.abs(logits - expected["logits"]).max() < 1e-3


def test_other_shapes_are_refused_where_the_policy_says_so() -> None:
    inputs = samples(NAME)[0][0]
    refusing = ortmoe_cli.session(fixture(NAME), policy(Bucket(1, 1, 4), other_shapes="refuse"))
    assert None not in refusing.sessions
    with pytest.raises(SessionError, match=r"no bucket for input_ids .* there are: batch 1 × sequence 1 after 4"):
        refusing.run(inputs)
    general = ortmoe_cli.session(fixture(NAME), policy(Bucket(1, 1, 4)))
    assert general.run(inputs)[0].shape[:2] == inputs["input_ids"].shape


def test_bound_inputs_take_new_values_where_the_old_ones_were() -> None:
    first, _ = samples(NAME)[0]
    second = first | {"input_ids": (first["input_ids"] + 1) % 50}
    made = ortmoe_cli.session(fixture(NAME), policy())
    bound = made.bind(first)
    address = bound.inputs["input_ids"].data_ptr()
    assert np.array_equal(bound.run()[0], made.run(first)[0])
    before = first["input_ids"].copy()
    bound.update({"input_ids": second["input_ids"]})
    assert np.array_equal(first["input_ids"], before)  # the caller's array is not the one at the address
    assert bound.inputs["input_ids"].data_ptr() == address
    assert np.array_equal(bound.run()[0], made.run(second)[0])
    assert not np.array_equal(made.run(first)[0], made.run(second)[0])


def test_a_dimension_that_does_not_exist_is_an_error() -> None:
    wrong = replace(policy(), dimensions={"s_70": "batch"})
    with pytest.raises(SessionError, match="no dimension called 's_70'; did you mean 's70'"):
        ortmoe_cli.session(fixture(NAME), wrong)


def test_an_input_that_does_not_exist_is_an_error() -> None:
    made = ortmoe_cli.session(fixture(NAME), policy())
    with pytest.raises(SessionError, match="no input 'ids'"):
        made.run({"ids": np.zeros((1, 1), np.int64)})


def test_a_provider_that_does_not_load_is_an_error() -> None:
    from ortmoe_cli.runtime.probe_cuda import loads

    if loads()[0]:
        pytest.skip("CUDA loads here")
    with pytest.raises(SessionError, match="CUDAExecutionProvider did not load"):
        ortmoe_cli.session(fixture(NAME), Policy(providers=(CUDA, CPU), cuda_graph=CudaGraph(True)))


def test_a_bucket_that_the_model_cannot_have_is_named(tmp_path: Path) -> None:
    kind, tensor = TensorProto.FLOAT, helper.make_tensor_value_info
    node = helper.make_node("Add", ["x", "z"], ["y"])
    graph = helper.make_graph(
        [node], "g", [tensor("x", kind, ["n"]), tensor("z", kind, ["m"])], [tensor("y", kind, None)]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    wrong = Policy(dimensions={"n": "batch", "m": 9}, buckets=(Bucket(2, 3),))
    with pytest.raises(SessionError, match="no session for bucket batch 2 × sequence 3"):
        ortmoe_cli.session(tmp_path / "m.onnx", wrong)


@pytest.mark.parametrize("only", ["moe"])
def test_fused_models_run_in_buckets(only: str, fused: Callable[..., Path]) -> None:
    inputs, expected = samples(NAME)[2]
    made = ortmoe_cli.session(fused(NAME, only), policy(bucket_of(inputs)))
    assert np.abs(made.run(inputs)[0] - expected["logits"]).max() < 1e-3


def test_one_session_serves_all_graphs() -> None:
    graphs = Policy(providers=(CUDA,), specialise="graphs", buckets=(Bucket(2, 1, 5, 1),), cuda_graph=CudaGraph(True))
    from ortmoe_cli.policy.session import _wanted

    assert _wanted(graphs) == (None,)
    assert _wanted(replace(graphs, specialise="sessions")) == (*graphs.buckets, None)
