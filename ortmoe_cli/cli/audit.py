"""`ortmoe audit`: say what could be fused."""

from typing import Annotated

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import ALL_KINDS, KINDS, Debug, ModelFile, Only, OutputFormat, Verbose, choices, numbers

_FAILING = ("fusable", "refused")
_NEVER = "never"


def audit(
    model: ModelFile,
    only: Only = ALL_KINDS,
    output_format: OutputFormat = "text",
    tokens: Annotated[
        str,
        typer.Option(
            metavar="COUNTS",
            help="Also say how many launches and experts a run of so many new tokens takes, for example 1,128,2048.",
        ),
    ] = "",
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="STATUSES",
            help="Which findings lead to exit code 1: fusable, refused (separated by commas), or never.",
            rich_help_panel="Report",
        ),
    ] = ",".join(_FAILING),
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 whatever is found.", rich_help_panel="Report")
    ] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Find every block of MODEL and say whether it can be fused, and if not, why. Writes nothing.

    Exits with 0 if there is nothing to do, 1 if blocks could be fused or had to be refused.
    """
    kinds = choices(only, KINDS, "--only")
    failing = choices(fail_on, (*_FAILING, _NEVER), "--fail-on")
    if _NEVER in failing and len(failing) > 1:
        raise typer.BadParameter("'never' stands alone", param_hint="'--fail-on'")
    counts = numbers(tokens, "--tokens")
    from ortmoe_cli import engine
    from ortmoe_cli.outcome import Options

    with screen.Bars() as progress:
        more = {"tokens": counts} if counts else {}
        report = engine.audit(model, Options(only=kinds), progress, **more)
    screen.show(report, output_format, verbose)
    raise typer.Exit(int(report.fails(failing) and not exit_zero))
