"""Every code that a report can hold, with its explanation. One file per family; `get` and `all` are the registry."""

from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile

from ortmoe_cli.rules import gqa, model, moe, moe_existing, moe_quantised, moe_refused, policy
from ortmoe_cli.rules.rule import Rule

__all__ = ["FAMILIES", "Rule", "all", "get", "nearest"]

FAMILIES: Mapping[str, str] = {
    "MOE": "Mixture-of-Experts blocks",
    "GQA": "Grouped-query attention",
    "EXT": "Files and inputs",
    "POL": "Throughput policies",
}
"""What the letters of a code stand for, in the order in which they are listed."""


def _register(*families: tuple[Rule, ...]) -> dict[str, Rule]:
    registry: dict[str, Rule] = {}
    for rule in (rule for family in families for rule in family):
        if rule.code in registry:
            raise ValueError(f"the code {rule.code} is taken twice")
        registry[rule.code] = rule
    return registry


_RULES = _register(
    moe.RULES,
    moe_quantised.FUSED,
    moe_refused.RULES,
    moe_quantised.REFUSED,
    moe_existing.RULES,
    gqa.RULES,
    model.RULES,
    policy.RULES,
)


def all() -> tuple[Rule, ...]:
    """Every rule: by family, then by number."""
    return tuple(_RULES.values())


def get(code: str) -> Rule:
    """The rule of a code. Raises KeyError where there is none."""
    return _RULES[code]


def nearest(code: str) -> str | None:
    """The known code that an unknown one was probably meant to be."""
    typed = code.upper()
    close = get_close_matches(typed, _RULES, n=len(_RULES), cutoff=0.5)
    return max(close, key=lambda known: _common(known, typed), default=None)


def _common(one: str, other: str) -> int:
    """How many characters two strings begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
