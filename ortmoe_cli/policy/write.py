"""From a policy to TOML, with a line above each setting that says what it does."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from ortmoe_cli.policy.model import Policy
from ortmoe_cli.runtime.settings import PROVIDER_OPTIONS, RUN_KEYS, SESSION_KEYS, Scalar, Setting

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(policy: Policy) -> str:
    """The policy as a file that `read` takes back unchanged."""
    return "\n".join(_lines(policy)) + "\n"


def _lines(policy: Policy) -> Iterator[str]:
    default = Policy()
    for name in ("name", "optimization_level", "providers", "specialise", "other_shapes"):
        yield _pair(name, getattr(policy, name))
    for name in ("intra_op_threads", "assume", "models"):
        if getattr(policy, name) != getattr(default, name):
            yield _pair(name, getattr(policy, name))
    for provider, options in policy.provider_options.items():
        yield from _table(f"provider_options.{_key(provider)}", options, PROVIDER_OPTIONS.get(provider, {}))
    yield from _table("session_config", policy.session_config, SESSION_KEYS)
    yield from _table("run_config", policy.run_config, RUN_KEYS)
    yield from _table("dimensions", policy.dimensions, {})
    for name in ("cuda_graph", "fusions", "experts"):
        part = getattr(policy, name)
        if part is not None and part != getattr(default, name):
            yield from _table(name, {f.name: getattr(part, f.name) for f in fields(part)}, {})
    for bucket in policy.buckets:
        yield from ("", "[[buckets]]")
        yield from _pairs({f.name: getattr(bucket, f.name) for f in fields(bucket)})


def _table(name: str, values: Mapping[str, Scalar | None], known: Mapping[str, Setting]) -> Iterator[str]:
    if not values:
        return
    yield from ("", f"[{name}]")
    for key, value in values.items():
        if key in known:
            yield f"# {known[key].meaning}"
        yield from _pairs({key: value})


def _pairs(values: Mapping[str, Scalar | None]) -> Iterator[str]:
    return (_pair(key, value) for key, value in values.items() if value is not None)


def _pair(key: str, value: Scalar | Iterable[str]) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: Scalar | Iterable[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"[{', '.join(map(_value, value))}]"
