"""`ortmoe fuse`: rewrite a model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import ALL_KINDS, KINDS, Debug, ModelFile, Only, OutputFormat, Verbose, choices
from ortmoe_cli.errors import OrtmoeError, OutputError

_ASSUMPTIONS = ("right-padding",)


def fuse(
    model: ModelFile,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Where to write the fused model."),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace MODEL by the fused model.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Find and verify as usual, but write nothing."),
    ] = False,
    only: Only = ALL_KINDS,
    verify: Annotated[
        Literal["full", "sample", "none"],
        typer.Option(help="How thoroughly the fused blocks are compared with the original before anything is written."),
    ] = "full",
    ep: Annotated[Literal["cpu", "cuda"], typer.Option("--ep", help="The execution provider to fuse for.")] = "cpu",
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Take something for granted that the graph cannot show: right-padding. Recorded in report and model.",
        ),
    ] = None,
    output_format: OutputFormat = "text",
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Fuse every block of MODEL that can be fused, compare with the original, and write the result to OUT.

    Exits with 0 if all blocks are fused, 1 if some were refused (OUT is written), 3 if results differ (nothing is).
    """
    kinds = choices(only, KINDS, "--only")
    assumptions = choices(assume or (), _ASSUMPTIONS, "--assume")
    target = _target(model, output, in_place, dry_run)
    from ortmoe_cli import engine
    from ortmoe_cli.outcome import Options

    options = Options(only=kinds, assume=assumptions, ep=ep, verify=verify)
    with screen.Bars() as progress:
        report = engine.fuse(model, target, options, progress, dry_run=dry_run, in_place=in_place)
    try:
        screen.show(report, output_format, verbose)
    except OutputError as error:
        if report.output is None:
            raise
        screen.complain(f"{error.message}; {report.output} is written all the same")
    raise typer.Exit(report.exit_code)


def _target(model: Path, output: Path | None, in_place: bool, dry_run: bool) -> Path | None:
    """The file to write. Raises OrtmoeError where the options do not name exactly one."""
    if in_place and output is not None and output.absolute() != model.absolute():
        raise OrtmoeError("--in-place replaces MODEL, but -o names another file; give one of them")
    if in_place:
        return model
    if output is None and not dry_run:
        raise OrtmoeError("no output file: give one with -o OUT, or --in-place to replace MODEL, or --dry-run")
    return output
