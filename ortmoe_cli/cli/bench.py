"""`ortmoe bench`: measure models."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import Debug


def bench(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="The .onnx files; the first is what others are compared with."),
    ],
    batch: Annotated[int, typer.Option(min=1, help="How many sequences at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    decode: Annotated[int, typer.Option(min=0, help="Steps of one token after it, with the cache fed back.")] = 16,
    warmup: Annotated[int, typer.Option(min=0, help="Runs that are not counted.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs that are.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="How often all models are measured in turn.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the runtime; 0 lets it choose.")] = 0,
    ep: Annotated[Literal["cpu", "cuda"], typer.Option("--ep", help="The execution provider.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Report")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table.", rich_help_panel="Report")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure each MODEL: session creation, first run, prefill, decoding, nodes per run, memory; and their ratios."""
    if as_json and as_markdown:
        raise typer.BadParameter("give one of --json and --markdown", param_hint="'--markdown'")
    from ortmoe_cli.bench import render
    from ortmoe_cli.bench.measure import measure
    from ortmoe_cli.bench.result import Workload, document

    work = Workload(batch, prompt, decode, warmup, repeats, ep, threads, rounds)
    with screen.Bars() as progress:
        found = measure(models, work, progress)
    if as_json:
        print(json.dumps(document(found), indent=2))
    elif as_markdown:
        print(render.markdown(found))
    else:
        screen.say(render.text(found))
