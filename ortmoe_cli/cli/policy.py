"""`ortmoe policy`: show, derive, validate and translate throughput policies."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ortmoe_cli.cli import screen
from ortmoe_cli.cli.options import Debug, ModelFile, OutputFormat
from ortmoe_cli.errors import OutputError

app = typer.Typer(name="policy", help="Show, derive, validate and translate throughput policies.", no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(metavar="POLICY", help="A policy file (TOML) or the name of a preset.", show_default=False)
]


@app.command()
def show(source: Source, output_format: OutputFormat = "text", debug: Debug = False) -> None:
    """Explain each setting of POLICY: what it does and what it needs."""
    from ortmoe_cli.policy import describe, emit, presets, render

    policy = presets.find(source)
    if output_format == "json":
        print(emit.emit(policy, "json"))
    else:
        screen.say(render.policy_table(policy, list(describe.rows(policy))))


@app.command(name="list")
def list_(debug: Debug = False) -> None:
    """List the presets."""
    from ortmoe_cli.policy.presets import PRESETS

    for name in PRESETS:
        print(name)


@app.command()
def init(
    model: ModelFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; on stdout without this.")
    ] = None,
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="The preset to start from.")] = "generic-moe",
    ep: Annotated[Literal["cpu", "cuda"], typer.Option("--ep", help="The execution provider to deploy on.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Write a policy for MODEL: its dimensions with their meaning, and as many fused nodes as it holds now."""
    from ortmoe_cli.policy import write
    from ortmoe_cli.policy.derive import derive
    from ortmoe_cli.policy.presets import PRESETS

    if preset not in PRESETS:
        raise typer.BadParameter(f"'{preset}' is none of {', '.join(PRESETS)}", param_hint="'--preset'")
    text = write.to_toml(derive(model, preset, ep))
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from error


@app.command()
def validate(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file (TOML).", show_default=False)],
    output_format: OutputFormat = "text",
    debug: Debug = False,
) -> None:
    """Name every setting in FILE that the runtime lacks, with the nearest real one. Exits with 1 if there are any."""
    import json

    from ortmoe_cli.policy.problems import PolicyError, Problem
    from ortmoe_cli.policy.read import read

    try:
        name, problems = read(source).name, list[Problem]()
    except PolicyError as error:
        name, problems = str(source), list(error.problems)
    if output_format == "json":
        rows = [{"code": p.code, "where": p.where, "message": p.message} for p in problems]
        print(json.dumps({"schema_version": 1, "policy": str(source), "problems": rows}, indent=2))
    elif problems:
        for problem in problems:
            print(f"{source}: {problem.code} {problem}")
        print(f"next: ortmoe rule {problems[0].code}")
    else:
        print(f"{source}: the policy '{name}' is valid")
    raise typer.Exit(int(bool(problems)))


@app.command()
def emit(
    source: Source,
    kind: Annotated[
        Literal["python", "json", "genai", "cpp"],
        typer.Option("--as", help="Code for ONNX Runtime, plain JSON, or session options for genai_config.json."),
    ] = "python",
    debug: Debug = False,
) -> None:
    """Print POLICY in the terms of another program."""
    from ortmoe_cli.policy import emit as translations
    from ortmoe_cli.policy import presets

    print(translations.emit(presets.find(source), kind))
