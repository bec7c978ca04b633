"""What a guard run found, as plain data. Every renderer reads this and nothing else."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1
"""Counts up when a field of the JSON report changes its meaning or goes; new fields do not count."""

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One reason why a model does not meet a policy. `nodes`: what to look at; `action`: what to type or change."""

    code: str
    message: str
    action: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One question that a policy asks of a model, and the answer. `note`: what was seen, or why it was skipped."""

    name: str
    title: str
    findings: tuple[Finding, ...] = ()
    note: str = ""
    skipped: bool = False

    @property
    def status(self) -> Status:
        return "skipped" if self.skipped else "failed" if self.findings else "passed"


@dataclass(frozen=True)
class GuardReport:
    """One model held against one policy."""

    model: str
    policy: str
    checks: tuple[Check, ...]
    runtime: bool = False
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for check in self.checks for finding in check.findings)

    def of(self, status: Status) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == status)

    def fails(self, codes: Collection[str] | None = None) -> bool:
        """Is there a finding, or one of these codes?"""
        return any(codes is None or finding.code in codes for finding in self.findings)


def named(nodes: Collection[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    first = ", ".join(f"'{name}'" for name in list(nodes)[:shown])
    return first if len(nodes) <= shown else f"{first} and {len(nodes) - shown} more"


def passed_or(findings: Iterator[Finding], name: str, title: str, note: str = "") -> Check:
    """A check that fails with what it is given."""
    return Check(name, title, tuple(findings), note)
