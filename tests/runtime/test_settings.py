"""Every setting that a policy accepts is real: the installed runtime's binaries hold it, and its parser takes it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ortmoe_cli.runtime.binaries import cuda_library, libraries, missing
from ortmoe_cli.runtime.settings import (
    BOOL,
    CUDA_OPTIONS,
    FOLKLORE,
    INT,
    LEVELS,
    POINTERS,
    RUN_KEYS,
    SESSION_KEYS,
    as_text,
    explain,
    nearest,
)

VALUES = {INT: ["0", "1"], "text": ["x"]}
PARSE = """
import json, sys
import onnxruntime as ort
from onnx import TensorProto, helper
tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", tensors[:1], tensors[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
ort.set_default_logger_severity(4)
answers = []
for options in json.loads(sys.argv[1]):
    session = ort.SessionOptions()
    session.log_severity_level = 4
    try:
        made = ort.InferenceSession(model, session, providers=[("CUDAExecutionProvider", options)], enable_fallback=0)
        answers.append(made.get_providers()[0])
    except Exception as error:
        answers.append(str(error)[-200:])
print(json.dumps(answers))
"""


def needs_cuda_library() -> None:
    if cuda_library() is None:
        pytest.skip("the installed runtime has no CUDA provider")


def test_the_binaries_hold_every_option_of_the_cuda_provider() -> None:
    needs_cuda_library()
    library = cuda_library()
    assert library is not None
    assert missing({*CUDA_OPTIONS, *POINTERS}, [library]) == frozenset()


def test_the_binaries_hold_every_key() -> None:
    needs_cuda_library()  # some keys are read by the CUDA provider only
    assert missing({*SESSION_KEYS, *RUN_KEYS}, libraries()) == frozenset()


def test_folklore_is_not_in_the_binaries() -> None:
    invented = {"cuda_graph_enable_partial", "cuda_graph_partial", "max_batch_size", "gpu_graph_capture"}
    assert invented <= set(FOLKLORE)
    assert missing(invented, libraries()) == invented


def test_the_parser_takes_every_value_that_a_policy_may_hold(cuda: Callable[..., Any]) -> None:
    cases = [
        {name: value}
        for name, setting in CUDA_OPTIONS.items()
        for value in (setting.values if isinstance(setting.values, tuple) else VALUES[setting.values])
        if (name, value) != ("device_id", "1")  # there is one device only
    ]
    answers = cuda(PARSE, json.dumps(cases))
    assert [case for case, answer in zip(cases, answers, strict=True) if answer != "CUDAExecutionProvider"] == []


def test_the_parser_refuses_what_a_policy_refuses(cuda: Callable[..., Any]) -> None:
    wrong = [{"cuda_graph_enable_partial": "1"}, {"max_batch_size": "64"}, {"cuda_mem_limit": "1"}]
    wrong += [{name: "maybe"} for name, s in CUDA_OPTIONS.items() if s.values in (BOOL, INT)]
    wrong += [{"arena_extend_strategy": "kDouble"}, {"cudnn_conv_algo_search": "FAST"}]
    answers = cuda(PARSE, json.dumps(wrong))
    assert all("Unknown provider option" in a or "Failed to parse" in a for a in answers), answers
    assert all("Unknown provider option" in answer for answer in answers[:3])


def test_levels_exist() -> None:
    import onnxruntime as ort

    assert all(hasattr(ort.GraphOptimizationLevel, name) for name in LEVELS.values())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("use_tf23", "use_tf32"),
        ("enable_cudagraph", "enable_cuda_graph"),
        ("session.disable_prepacing", "session.disable_prepacking"),
        ("disable_cpu_ep_fallback", "session.disable_cpu_ep_fallback"),
        ("gpu_graph_ids", "gpu_graph_id"),
    ],
)
def test_a_slip_names_what_was_meant(name: str, meant: str) -> None:
    assert nearest(name, {**CUDA_OPTIONS, **SESSION_KEYS, **RUN_KEYS}) == meant


def test_nonsense_has_no_nearest() -> None:
    assert nearest("qqqq", CUDA_OPTIONS) is None
    assert explain("qqqq", CUDA_OPTIONS) == "the runtime does not know it"
    assert "address" in explain("user_compute_stream", CUDA_OPTIONS)


def test_values() -> None:
    assert as_text(True) == "1"
    assert as_text(12) == "12"
    assert CUDA_OPTIONS["use_tf32"].problem(True) is None
    assert CUDA_OPTIONS["use_tf32"].problem("yes") == "'yes' is none of 0, 1"
    assert CUDA_OPTIONS["sdpa_kernel"].problem("flash") == "'flash' is no integer"
    assert RUN_KEYS["gpu_graph_id"].problem(-1) is None
