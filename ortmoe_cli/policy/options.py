"""A policy as what the runtime takes: SessionOptions, providers, RunOptions."""

from typing import Any

from ortmoe_cli.policy.model import Bucket, Policy
from ortmoe_cli.policy.presets import ThroughputPolicy, as_policy
from ortmoe_cli.policy.read import check
from ortmoe_cli.runtime.settings import LEVELS, as_text


def build_session_options(policy: Policy | ThroughputPolicy, bucket: Bucket | None = None) -> Any:
    """An `onnxruntime.SessionOptions` with all that the policy says; with a bucket, its shapes are fixed.

    Raises PolicyError for a setting that the runtime lacks: it would ignore it without a word.
    """
    import onnxruntime as ort  # noqa: PLC0415  policies are shown without it

    policy = as_policy(policy)
    check(policy)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[policy.optimization_level])
    options.intra_op_num_threads = policy.intra_op_threads
    for key, value in policy.session_config.items():
        options.add_session_config_entry(key, as_text(value))
    overrides = policy.overrides(bucket) if bucket else policy.fixed_dimensions
    for name, size in overrides.items():
        options.add_free_dimension_override_by_name(name, size)
    return options


def build_providers(policy: Policy | ThroughputPolicy) -> list[tuple[str, dict[str, str]]]:
    """The providers with their options, as `InferenceSession` takes them."""
    policy = as_policy(policy)
    return [(name, policy.options_of(name)) for name in policy.providers]


def build_run_options(policy: Policy | ThroughputPolicy, bucket: Bucket | None = None) -> Any:
    """An `onnxruntime.RunOptions` for a bucket: its CUDA graph, or none for a shape that has no bucket."""
    import onnxruntime as ort  # noqa: PLC0415

    policy = as_policy(policy)
    options = ort.RunOptions()
    for key, value in policy.run_config.items():
        options.add_run_config_entry(key, as_text(value))
    if policy.cuda_graph.enabled and "gpu_graph_id" not in policy.run_config:
        graph = bucket.graph_id if bucket else -1
        if graph is not None:
            options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
