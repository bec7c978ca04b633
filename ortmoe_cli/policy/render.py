"""A guard run for people and for programs."""

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ortmoe_cli.policy.findings import SCHEMA_VERSION, Check, GuardReport
from ortmoe_cli.policy.model import Policy
from ortmoe_cli.report.words import counted, duration

_STYLES = {"passed": "green", "failed": "yellow", "skipped": "dim"}
_MARKS = {"passed": "ok", "failed": "failed", "skipped": "–"}


def text(report: GuardReport, verbose: bool = False) -> RenderableType:
    """Each failed check with its reasons, the passed ones in one line (all of them with `verbose`)."""
    title = Text(report.model, style="bold").append("  against policy ", "not bold dim").append(report.policy)
    tally = ", ".join(
        f"{len(report.of(status))} {status}" for status in ("passed", "failed", "skipped") if report.of(status)
    )
    parts: list[RenderableType] = [title, Text(f"{tally} · in {duration(report.seconds)}", style="dim"), Text()]
    failed = report.of("failed")
    if verbose:
        parts += [_line(check) for check in report.checks if check.status != "failed"]
    else:
        parts += [_line(check) for check in report.of("passed") if check.note]
    for check in failed:
        parts += [_line(check), *(_finding(f.code, f.message, f.nodes if verbose else ()) for f in check.findings)]
    if failed:
        parts += [Text(), _next(failed[0].findings[0].action, failed[0].findings[0].code)]
    elif not verbose:
        parts.append(Text(f"The model meets the policy: {counted(len(report.of('passed')), 'check')} passed."))
    return Group(*parts)


def _line(check: Check) -> Text:
    line = Text(f"{_MARKS[check.status]:>6}  ", style=_STYLES[check.status]).append(check.name, "not dim bold")
    line.append(f"  {check.title}", "not bold dim")
    return line.append(f": {check.note}", "not bold") if check.note else line


def _finding(code: str, message: str, nodes: tuple[str, ...]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text(code, style="bold yellow"), Text(message))
    for node in nodes:
        table.add_row("", Text(node, style="dim"))
    return Padding(table, (0, 0, 0, 8))


def _next(action: str, code: str) -> Text:
    line = Text("next: ", style="dim", no_wrap=True, overflow="ignore")
    return line.append(action if action.startswith("ortmoe") else f"ortmoe rule {code}", "not dim bold")


def document(report: GuardReport) -> dict[str, Any]:
    """The run in terms of JSON. Keys are only ever added; a change of meaning counts up `schema_version`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "check",
        "model": report.model,
        "policy": report.policy,
        "runtime": report.runtime,
        "passed": not report.fails(),
        "seconds": report.seconds,
        "versions": dict(sorted(report.versions.items())),
        "checks": [
            {
                "name": check.name,
                "title": check.title,
                "status": check.status,
                "note": check.note,
                "findings": [
                    {"code": f.code, "message": f.message, "action": f.action, "nodes": list(f.nodes)}
                    for f in check.findings
                ],
            }
            for check in report.checks
        ],
    }


def as_json(report: GuardReport) -> str:
    """The run as one JSON document."""
    return json.dumps(document(report), indent=2)


def policy_table(policy: Policy, rows: list[tuple[str, str, str, str]]) -> RenderableType:
    """Every setting of a policy with what it does and what it needs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("setting", "value", "what it does", "what it needs"):
        table.add_column(heading, overflow="fold")
    for name, value, meaning, needs in rows:
        table.add_row(Text(name, style="bold"), Text(value, style="cyan"), Text(meaning), Text(needs, style="dim"))
    return Group(Text(policy.name, style="bold"), Text(), table)
