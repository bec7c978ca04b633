"""A policy in words: each setting, what it does, and what it needs."""

from collections.abc import Iterator, Mapping

from ortmoe_cli.policy.model import Policy
from ortmoe_cli.runtime.settings import CUDA, LEVELS, PROVIDER_OPTIONS, RUN_KEYS, SESSION_KEYS, Scalar, Setting, as_text


def describe(policy: Policy) -> str:
    """One line for each setting."""
    return "\n".join(_lines(policy))


def rows(policy: Policy) -> Iterator[tuple[str, str, str, str]]:
    """(setting, value, what it does, what it needs) for everything that the policy sets."""
    level = f"{policy.optimization_level} ({LEVELS[policy.optimization_level]})"
    yield "optimization_level", level, "which rewrites of the graph the runtime may do", ""
    yield (
        "providers",
        ", ".join(policy.providers),
        "asserted after the session is made: it never falls back silently",
        "",
    )
    for provider in policy.providers:
        yield from _settings(provider, policy.options_of(provider), PROVIDER_OPTIONS.get(provider, {}))
    yield from _settings("session", policy.session_config, SESSION_KEYS)
    yield from _settings("run", policy.run_config, RUN_KEYS)
    for name, role in policy.dimensions.items():
        yield f"dimension {name}", as_text(role), "a size, or what the buckets give it", "a dimension of this name"
    for bucket in policy.buckets:
        yield "bucket", str(bucket), _served(policy, bucket.graph_id), ""
    if policy.buckets:
        other = "run by a session without fixed shapes" if policy.other_shapes == "general" else "refused"
        yield "other_shapes", policy.other_shapes, f"shapes that have no bucket are {other}", ""
    yield from _demands(policy)


def _served(policy: Policy, graph: int | None) -> str:
    if policy.specialise == "sessions":
        return "a session of its own, with these shapes fixed"
    return "run without a CUDA graph (gpu_graph_id -1)" if graph in (None, -1) else f"recorded as gpu_graph_id {graph}"


def _demands(policy: Policy) -> Iterator[tuple[str, str, str, str]]:
    labels = {"moe": "Mixture-of-Experts blocks", "qmoe": "quantised expert blocks", "gqa": "attention blocks"}
    for name, label in labels.items():
        count = getattr(policy.fusions, name)
        if count is not None:
            yield f"fusions.{name}", str(count), f"so many {label} must be single nodes", "'ortmoe fuse'"
    if policy.experts:
        size = f" in blocks of {policy.experts.block_size}" if policy.experts.block_size else ""
        yield "experts", f"{policy.experts.bits} bits{size}", "expert weights must be quantised like this", "QMoE nodes"
    if policy.assume:
        yield "assume", ", ".join(policy.assume), "the model may have been fused under these promises", ""


def _settings(
    where: str, values: Mapping[str, Scalar], known: Mapping[str, Setting]
) -> Iterator[tuple[str, str, str, str]]:
    prefix = "cuda" if where == CUDA else where
    for name, value in values.items():
        setting = known.get(name)
        yield f"{prefix} {name}", as_text(value), setting.meaning if setting else "", setting.needs if setting else ""


def _lines(policy: Policy) -> Iterator[str]:
    yield f"{policy.name}"
    for name, value, meaning, needs in rows(policy):
        line = f"  {name} = {value}: {meaning}"
        yield f"{line} (needs {needs})" if needs else line
