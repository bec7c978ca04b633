"""`ortmoe rule`: explain a code."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ortmoe_cli import rules
from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import Debug, OutputFormat
from ortmoe_cli.errors import OrtmoeError

_SCHEMA_VERSION = 1


def rule(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="For example MOE101.", show_default=False),
    ] = None,
    output_format: OutputFormat = "text",
    debug: Debug = False,
) -> None:
    """Explain a code of a report: what it means, why it matters, what to do. Without CODE, list them all."""
    found = rules.all() if code is None else (_find(code),)
    if output_format == "json":
        print(json.dumps({"schema_version": _SCHEMA_VERSION, "rules": [asdict(r) for r in found]}, indent=2))
        return
    from ortmoe_cli.report import rule as pages

    screen.say(pages.index(found) if code is None else pages.page(found[0]))


def _find(code: str) -> rules.Rule:
    try:
        return rules.get(code.upper())
    except KeyError:
        near = rules.nearest(code)
        hint = f"did you mean {near}? " if near else ""
        raise OrtmoeError(f"there is no code '{code}'; {hint}'ortmoe rule' lists all codes") from None
