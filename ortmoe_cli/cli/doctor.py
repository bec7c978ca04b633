"""`ortmoe doctor`: examine this machine's runtime."""

import json
from typing import Annotated, Literal

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import Debug, OutputFormat, Verbose


def doctor(
    ep: Annotated[
        Literal["all", "cpu", "cuda"], typer.Option("--ep", help="Try the facts about one execution provider only.")
    ] = "all",
    output_format: OutputFormat = "text",
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Say which providers really load here, and try every fact about the runtime that this package rests on.

    Exits with 0 if all that can be tried is as expected, 1 if something differs.
    """
    from ortmoe_cli.runtime import render
    from ortmoe_cli.runtime.doctor import examine

    with screen.Bars() as progress:
        found = examine(ep, progress)
    if output_format == "json":
        print(json.dumps(found.document(), indent=2))
    else:
        screen.say(render.text(found, verbose))
    raise typer.Exit(int(bool(found.differs)))
