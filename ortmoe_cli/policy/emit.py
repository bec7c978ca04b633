"""A policy in the terms of other programs: Python, C++, JSON, and the session options of onnxruntime-genai."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ortmoe_cli.policy.model import Bucket, Policy
from ortmoe_cli.runtime.settings import CPU, CUDA, LEVELS, as_text

_SCHEMA_VERSION = 1


def emit(policy: Policy, kind: str) -> str:
    """The policy as text of one of `KINDS`."""
    return KINDS[kind](policy)


def document(policy: Policy) -> dict[str, Any]:
    """The policy in terms of JSON."""
    return {"schema_version": _SCHEMA_VERSION, **asdict(policy)}


def _json(policy: Policy) -> str:
    return json.dumps(document(policy), indent=2)


def _genai(policy: Policy) -> str:
    """What goes into `genai_config.json`. Provider names are short there; shapes are that library's own business."""
    providers = [{"cuda": policy.options_of(CUDA)}] if policy.cuda else []
    options: dict[str, Any] = {"graph_optimization_level": LEVELS[policy.optimization_level]}
    if policy.intra_op_threads:
        options["intra_op_num_threads"] = policy.intra_op_threads
    options |= {key: as_text(value) for key, value in policy.session_config.items()}
    options["provider_options"] = providers
    decoder: dict[str, Any] = {"session_options": options}
    if policy.run_config:
        decoder["run_options"] = {key: as_text(value) for key, value in policy.run_config.items()}
    return json.dumps({"model": {"decoder": decoder}}, indent=2)


def _python(policy: Policy) -> str:
    return "\n".join(_python_lines(policy))


def _python_lines(policy: Policy) -> Iterator[str]:
    bucket = _only(policy)
    yield from ("import onnxruntime as ort", "", "options = ort.SessionOptions()")
    yield f"options.graph_optimization_level = ort.GraphOptimizationLevel.{LEVELS[policy.optimization_level]}"
    if policy.intra_op_threads:
        yield f"options.intra_op_num_threads = {policy.intra_op_threads}"
    for key, value in policy.session_config.items():
        yield f"options.add_session_config_entry({key!r}, {as_text(value)!r})"
    for note in _bucket_notes(policy, bucket):
        yield f"# {note}"
    for name, size in _fixed(policy, bucket).items():
        yield f"options.add_free_dimension_override_by_name({name!r}, {size})"
    providers = [(name, policy.options_of(name)) for name in policy.providers]
    yield f"providers = {providers!r}"
    yield 'session = ort.InferenceSession("model.onnx", options, providers=providers, enable_fallback=0)'
    yield f"assert session.get_providers() == {_expected(policy)!r}  # it falls back to the CPU without an error"
    for key, value in policy.run_config.items():
        yield from ("run = ort.RunOptions()", f"run.add_run_config_entry({key!r}, {as_text(value)!r})")


def _cpp(policy: Policy) -> str:
    return "\n".join(_cpp_lines(policy))


def _cpp_lines(policy: Policy) -> Iterator[str]:
    bucket = _only(policy)
    yield from ("#include <onnxruntime_cxx_api.h>", "", "Ort::SessionOptions options;")
    yield f"options.SetGraphOptimizationLevel(GraphOptimizationLevel::{LEVELS[policy.optimization_level]});"
    if policy.intra_op_threads:
        yield f"options.SetIntraOpNumThreads({policy.intra_op_threads});"
    for key, value in policy.session_config.items():
        yield f"options.AddConfigEntry({_quoted(key)}, {_quoted(as_text(value))});"
    for note in _bucket_notes(policy, bucket):
        yield f"// {note}"
    for name, size in _fixed(policy, bucket).items():
        yield f"Ort::ThrowOnError(Ort::GetApi().AddFreeDimensionOverrideByName(options, {_quoted(name)}, {size}));"
    if policy.cuda:
        pairs = ", ".join(f"{{{_quoted(key)}, {_quoted(value)}}}" for key, value in policy.options_of(CUDA).items())
        yield "Ort::CUDAProviderOptions cuda;  // unknown options and missing libraries throw here"
        yield f"cuda.Update({{{pairs}}});"
        yield "options.AppendExecutionProvider_CUDA_V2(*cuda);"
    for key, value in policy.run_config.items():
        yield f"run_options.AddConfigEntry({_quoted(key)}, {_quoted(as_text(value))});"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _only(policy: Policy) -> Bucket | None:
    """The bucket whose shapes the one session can fix."""
    return policy.buckets[0] if policy.specialise == "sessions" and len(policy.buckets) == 1 else None


def _fixed(policy: Policy, bucket: Bucket | None) -> Mapping[str, int]:
    return policy.overrides(bucket) if bucket else policy.fixed_dimensions


def _bucket_notes(policy: Policy, bucket: Bucket | None) -> Iterator[str]:
    """What one session cannot hold."""
    if bucket or not policy.buckets:
        return
    if policy.specialise == "sessions":
        yield "one session for each of these buckets, with its sizes as overrides (ortmoe_cli.session does it):"
        for each in policy.buckets:
            yield f"  {each}: {', '.join(f'{name}={size}' for name, size in policy.overrides(each).items())}"
        return
    yield "run options of each bucket, with inputs and outputs bound to fixed addresses (ortmoe_cli.session does it):"
    for each in policy.buckets:
        yield f"  {each}: gpu_graph_id = {-1 if each.graph_id is None else each.graph_id}"


def _expected(policy: Policy) -> list[str]:
    return [*policy.providers, *([] if CPU in policy.providers else [CPU])]


KINDS: Mapping[str, Callable[[Policy], str]] = {"python": _python, "json": _json, "genai": _genai, "cpp": _cpp}
"""What a policy can be written as."""
