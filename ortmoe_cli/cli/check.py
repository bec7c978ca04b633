"""`ortmoe check`: hold a model against a policy."""

from typing import Annotated

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import Debug, ModelFile, OutputFormat, Verbose

_ALL = "all"
_NEVER = "never"


def check(
    model: ModelFile,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="POLICY", help="A policy file (TOML) or the name of a preset.", show_default=False
        ),
    ],
    runtime: Annotated[
        bool, typer.Option("--runtime", help="Start the sessions too, and look at what the runtime really runs.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="CODES",
            help="Which findings lead to exit code 1: all, never, or codes separated by commas.",
            rich_help_panel="Report",
        ),
    ] = _ALL,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 whatever is found.", rich_help_panel="Report")
    ] = False,
    output_format: OutputFormat = "text",
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Say whether MODEL meets POLICY, and what is missing. Writes nothing.

    Exits with 0 if it does, 1 if there are findings, 2 if the policy asks for settings that the runtime lacks.
    """
    codes = _codes(fail_on)
    from ortmoe_cli.policy import find, render
    from ortmoe_cli.policy.guard import guard

    wanted = find(policy)
    with screen.Bars() as progress:
        report = guard(model, wanted, runtime=runtime, progress=progress)
    if output_format == "json":
        print(render.as_json(report))
    else:
        screen.say(render.text(report, verbose))
    raise typer.Exit(int(report.fails(codes) and not exit_zero))


def _codes(given: str) -> frozenset[str] | None:
    """The codes that fail a run; None for all of them."""
    items = frozenset(filter(None, (item.strip().upper() for item in given.split(","))))
    if items == {_ALL.upper()}:
        return None
    if items == {_NEVER.upper()}:
        return frozenset()
    from ortmoe_cli import rules

    known = {rule.code for rule in rules.all() if rule.family == "POL"}
    if not items or not items <= known:
        wrong = ", ".join(sorted(items - known)) or "nothing"
        raise typer.BadParameter(f"'{wrong}' is not all, never, or a code of this command", param_hint="'--fail-on'")
    return items
