"""Options that several commands share, and the lists that some of them hold."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["text", "json"]

ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="The .onnx file.", show_default=False)]

OutputFormat = Annotated[
    Format,
    typer.Option("--output-format", help="How to print the report on stdout.", rich_help_panel="Report"),
]

Only = Annotated[
    str,
    typer.Option("--only", metavar="KINDS", help="Kinds of blocks to look at, separated by commas."),
]

Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show every block with its facts and checks.", rich_help_panel="Report"),
]

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of a failure.", rich_help_panel="Report"),
]

KINDS = ("moe", "gqa")
ALL_KINDS = ",".join(KINDS)


def choices(given: str | Iterable[str], allowed: Iterable[str], option: str) -> frozenset[str]:
    """The items of comma-separated lists. Raises BadParameter for one that is not allowed, or if there is none."""
    lists = [given] if isinstance(given, str) else list(given)
    items = frozenset(filter(None, (item.strip() for text in lists for item in text.split(","))))
    names = list(allowed)
    for item in sorted(items):
        if item not in names:
            raise typer.BadParameter(f"'{item}' is none of {', '.join(names)}", param_hint=f"'{option}'")
    if lists and not items:
        raise typer.BadParameter(f"name at least one of {', '.join(names)}", param_hint=f"'{option}'")
    return items


def numbers(given: str, option: str) -> tuple[int, ...]:
    """The positive integers of a comma-separated list. Raises BadParameter for anything else."""
    items = [item.strip() for item in given.split(",") if item.strip()]
    for item in items:
        if not item.isdecimal() or not int(item):
            raise typer.BadParameter(f"'{item}' is no number above 0", param_hint=f"'{option}'")
    return tuple(map(int, items))
