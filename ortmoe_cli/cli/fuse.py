"""`ortmoe fuse`: rewrite a model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import ALL_KINDS, KINDS, Debug, ModelFile, Only, OutputFormat, Verbose, choices
from ortmoe_cli.errors import OrtmoeError, OutputError

_ASSUMPTIONS = ("right-padding", "rounded-activations")
_BITS = {"int4": 4, "int8": 8}
_LARGEST_BLOCK = 4096
_QUANTISE = "Quantisation"


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
            help="Take something for granted that the graph cannot show: right-padding, rounded-activations. Recorded "
            "in report and model.",
        ),
    ] = None,
    router: Annotated[
        Literal["auto", "logits", "weights"],
        typer.Option(
            help="Feed MoE nodes with the router's weights (exact on ties, too), or with the raw logits where the node "
            "can do the router's work (fewer nodes). auto: weights for the CPU, logits for CUDA.",
        ),
    ] = "auto",
    repair: Annotated[
        Literal["auto", "all", "none"],
        typer.Option(
            help="Rewrite MoE nodes of MODEL that do not run, or compute something else, on the CPU. auto: those in "
            "float32. See `ortmoe rule MOE203`."
        ),
    ] = "auto",
    experts: Annotated[
        Literal["int4", "int8"] | None,
        typer.Option(help="Quantise float experts on the way. Results change.", rich_help_panel=_QUANTISE),
    ] = None,
    block_size: Annotated[
        int,
        typer.Option(
            help="Inputs that share a scale: a power of two from 16 on, or 0 for one scale per row.",
            rich_help_panel=_QUANTISE,
        ),
    ] = 32,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="With zero points.", rich_help_panel=_QUANTISE)
    ] = False,
    quantiser: Annotated[
        Literal["rtn", "search"],
        typer.Option(
            help="Round to the nearest, or search for the scales with the least error.", rich_help_panel=_QUANTISE
        ),
    ] = "rtn",
    max_error: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="Leave a block alone whose relative error is above this, e.g. 0.05.",
            rich_help_panel=_QUANTISE,
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
    from ortmoe_cli.weights.quantise import Scheme

    if experts is None and (asymmetric or max_error is not None):
        raise OrtmoeError("--asymmetric and --max-error say how to quantise experts; give --experts int4 or int8 too")
    rounding = Scheme(_BITS[experts], _block(block_size), not asymmetric, quantiser) if experts else None
    options = Options(
        only=kinds,
        assume=assumptions,
        ep=ep,
        verify=verify,
        rounding=rounding,
        max_error=max_error,
        router=router,
        repair=repair,
    )
    with screen.Bars() as progress:
        report = engine.fuse(model, target, options, progress, dry_run=dry_run, in_place=in_place)
    try:
        screen.show(report, output_format, verbose)
    except OutputError as error:
        if report.output is None:
            raise
        screen.complain(f"{error.message}; {report.output} is written all the same")
    raise typer.Exit(report.exit_code)


def _block(size: int) -> int:
    """A block size that the operator takes. Raises BadParameter."""
    if size and (size < 16 or size > _LARGEST_BLOCK or size & (size - 1)):
        raise typer.BadParameter(f"{size} is neither 0 nor a power of two from 16 on", param_hint="'--block-size'")
    return size


def _target(model: Path, output: Path | None, in_place: bool, dry_run: bool) -> Path | None:
    """The file to write. Raises OrtmoeError where the options do not name exactly one."""
    if in_place and output is not None and output.absolute() != model.absolute():
        raise OrtmoeError("--in-place replaces MODEL, but -o names another file; give one of them")
    if in_place:
        return model
    if output is None and not dry_run:
        raise OrtmoeError("no output file: give one with -o OUT, or --in-place to replace MODEL, or --dry-run")
    return output
