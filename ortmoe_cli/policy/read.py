"""From TOML to a policy. Every key that is unknown or misspelt is named, with the nearest real one."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args

from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.policy.model import ROLES, Bucket, CudaGraph, Experts, Fusions, Level, Policy
from ortmoe_cli.policy.problems import PolicyError, Problem
from ortmoe_cli.runtime.settings import (
    CUDA,
    FOLKLORE,
    PROVIDER_OPTIONS,
    RUN_KEYS,
    SESSION_KEYS,
    Scalar,
    Setting,
    as_text,
    explain,
)

UNKNOWN = "POL201"
FOLK = "POL202"
VALUE = "POL203"
CONFLICT = "POL204"

_TABLES: Mapping[str, type] = {"cuda_graph": CudaGraph, "fusions": Fusions, "experts": Experts}
_ASSUMPTIONS = ("right-padding", "rounded-activations", "rounded-experts", "raw-logits")
_CHOICES = {
    "optimization_level": get_args(Level),
    "specialise": ("sessions", "graphs"),
    "other_shapes": ("refuse", "general"),
}
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "intra_op_threads": int,
    "providers": list,
    "assume": list,
    "models": list,
    "buckets": list,
    "provider_options": dict,
    "session_config": dict,
    "run_config": dict,
    "dimensions": dict,
    **dict.fromkeys(_TABLES, dict),
}


def read(path: Path) -> Policy:
    """The policy in a TOML file. Raises PolicyError with all that is wrong, OrtmoeError if there is no such file."""
    return from_mapping(load(path), path)


def load(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as they stand there."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise OrtmoeError(f"{path} cannot be read as a policy: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise OrtmoeError(f"{path} is not TOML: {error}") from error


def from_mapping(data: Mapping[str, Any], source: str | Path = "policy") -> Policy:
    """A policy from plain tables. Raises PolicyError."""
    problems = tuple(_problems(data))
    if problems:
        raise PolicyError(source, problems)
    policy = _build(data)
    problems = tuple(contradictions(policy))
    if problems:
        raise PolicyError(source, problems)
    return policy


def check(policy: Policy) -> None:
    """Raise PolicyError if a policy that was made in code asks for what the runtime lacks, or contradicts itself."""
    problems = (*_settings(policy.provider_options, policy.session_config, policy.run_config), *contradictions(policy))
    if problems:
        raise PolicyError(policy.name, problems)


def _problems(data: Mapping[str, Any]) -> Iterable[Problem]:
    known = {field.name for field in fields(Policy)}
    for key, value in data.items():
        if key not in known:
            yield _unknown(key, key, dict.fromkeys(known))
        elif key in _CHOICES and value not in _CHOICES[key]:
            yield Problem(VALUE, key, f"'{value}' is none of {', '.join(_CHOICES[key])}")
        elif key in _KINDS and (not isinstance(value, _KINDS[key]) or isinstance(value, bool)):
            yield Problem(VALUE, key, f"should be {_called(_KINDS[key])}")
        elif key in _TABLES:
            yield from _table_problems(key, value, _TABLES[key])
        elif key == "buckets":
            yield from _bucket_problems(value)
        elif key == "dimensions":
            yield from _dimension_problems(value)
        elif key in ("providers", "assume", "models") and not all(isinstance(item, str) for item in value):
            yield Problem(VALUE, key, "should be a list of texts")
    options = data.get("provider_options", {})
    tables = [data.get(name, {}) for name in ("session_config", "run_config")]
    if all(isinstance(table, Mapping) for table in (options, *tables)):
        yield from _settings(options, *tables)


def _called(kind: type | tuple[type, ...]) -> str:
    return {str: "a text", int: "a number", list: "a list", dict: "a table"}[cast(type, kind)]


def _settings(
    options: Mapping[str, Any], session: Mapping[str, Scalar], run: Mapping[str, Scalar]
) -> tuple[Problem, ...]:
    found = []
    for provider, values in options.items():
        where = f"provider_options.{provider}"
        if provider not in PROVIDER_OPTIONS:
            found.append(_unknown(where, provider, PROVIDER_OPTIONS))
        elif isinstance(values, Mapping):
            found += _setting_problems(where, values, PROVIDER_OPTIONS[provider])
        else:
            found.append(Problem(VALUE, where, "should be a table"))
    found += _setting_problems("session_config", session, SESSION_KEYS)
    return (*found, *_setting_problems("run_config", run, RUN_KEYS))


def _setting_problems(where: str, values: Mapping[str, Any], known: Mapping[str, Setting]) -> Iterable[Problem]:
    for name, value in values.items():
        if name not in known:
            yield _unknown(f"{where}.{name}", name, known)
        elif not isinstance(value, str | int):
            yield Problem(VALUE, f"{where}.{name}", "should be a text, a number or true or false")
        elif reason := known[name].problem(value):
            yield Problem(VALUE, f"{where}.{name}", reason)


def _unknown(where: str, name: str, known: Mapping[str, Any]) -> Problem:
    if name in FOLKLORE:
        return Problem(FOLK, where, FOLKLORE[name])
    return Problem(UNKNOWN, where, f"unknown setting; {explain(name, known)}")


def _table_problems(where: str, table: Mapping[str, Any], kind: type) -> Iterable[Problem]:
    known = {field.name: field for field in fields(kind)}
    for key, value in table.items():
        if key not in known:
            yield _unknown(f"{where}.{key}", key, known)
        elif kind is CudaGraph and key == "enabled":
            if not isinstance(value, bool):
                yield Problem(VALUE, f"{where}.{key}", "should be true or false")
        elif not (_natural(value) or (kind is Fusions and value == "all")):
            yield Problem(VALUE, f"{where}.{key}", 'should be a number or "all"' if kind is Fusions else "is no number")
    if kind is Experts and "bits" not in table:
        yield Problem(VALUE, where, "bits are missing")


def _bucket_problems(buckets: list[Any]) -> Iterable[Problem]:
    known = {field.name: field for field in fields(Bucket)}
    for number, bucket in enumerate(buckets):
        where = f"buckets[{number}]"
        if not isinstance(bucket, Mapping):
            yield Problem(VALUE, where, "should be a table")
            continue
        for key in bucket:
            if key not in known:
                yield _unknown(f"{where}.{key}", key, known)
        for key in ("batch", "sequence"):
            if not _natural(bucket.get(key)) or not bucket[key]:
                yield Problem(VALUE, f"{where}.{key}", "should be a number above 0")
        if "past" in bucket and not _natural(bucket["past"]):
            yield Problem(VALUE, f"{where}.past", "should be a number")
        graph = bucket.get("graph_id", 1)
        if not isinstance(graph, int) or isinstance(graph, bool) or graph < -1 or graph == 0:
            yield Problem(VALUE, f"{where}.graph_id", "should be above 0, or -1 for no graph")


def _dimension_problems(dimensions: Mapping[str, Any]) -> Iterable[Problem]:
    for name, role in dimensions.items():
        if isinstance(role, list | tuple):
            yield Problem(
                FOLK,
                f"dimensions.{name}",
                "the runtime fixes a dimension to one size and knows no ranges (an override is a name and a number); "
                "give it a role and list the shapes as buckets",
            )
        elif role not in ROLES and not (_natural(role) and role):
            yield Problem(VALUE, f"dimensions.{name}", f"should be one of {', '.join(ROLES)}, or a size")


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _build(data: Mapping[str, Any]) -> Policy:
    values = dict(data)
    for key, kind in _TABLES.items():
        if key in values:
            values[key] = kind(**values[key])
    for key in ("providers", "assume", "models"):
        if key in values:
            values[key] = tuple(values[key])
    values["buckets"] = tuple(Bucket(**bucket) for bucket in values.get("buckets", ()))
    return Policy(**values)


def contradictions(policy: Policy) -> Iterable[Problem]:
    """What a policy asks for that cannot be had together."""
    if not policy.providers:
        yield Problem(VALUE, "providers", "at least one provider is needed")
    for name in policy.assume:
        if name not in _ASSUMPTIONS:
            yield Problem(VALUE, "assume", f"'{name}' is none of {', '.join(_ASSUMPTIONS)}")
    for provider in policy.provider_options:
        if provider not in policy.providers:
            yield Problem(CONFLICT, f"provider_options.{provider}", "the provider is not among the providers")
    graph = policy.provider_options.get(CUDA, {}).get("enable_cuda_graph")
    if graph is not None and as_text(graph) != as_text(policy.cuda_graph.enabled):
        yield Problem(CONFLICT, f"provider_options.{CUDA}.enable_cuda_graph", "contradicts cuda_graph.enabled")
    if policy.cuda_graph.enabled and not policy.cuda:
        yield Problem(CONFLICT, "cuda_graph.enabled", f"needs {CUDA} among the providers")
    if policy.cuda_graph.warmup_runs < 2:
        yield Problem(VALUE, "cuda_graph.warmup_runs", "a graph is recorded after two runs at the earliest")
    if "gpu_graph_id" in policy.run_config and policy.buckets:
        yield Problem(CONFLICT, "run_config.gpu_graph_id", "each bucket has its own graph_id")
    ids = [bucket.graph_id for bucket in policy.buckets if bucket.graph_id not in (None, -1)]
    if policy.specialise == "graphs" and len(ids) != len(set(ids)):
        yield Problem(CONFLICT, "buckets", "two buckets share a graph_id: one would replay the other's shapes")
    if policy.specialise == "graphs" and not policy.cuda_graph.enabled:
        yield Problem(CONFLICT, "specialise", '"graphs" needs cuda_graph.enabled')
