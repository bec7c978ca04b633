"""What was measured, as a table for people and for documents."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ortmoe_cli.bench.result import Bench, Measured, Samples
from ortmoe_cli.report.words import size

Row = tuple[str, Callable[[Bench, Measured], str], str]


def _time(samples: Samples) -> str:
    if not samples:
        return "–"
    median = samples.median
    text = f"{median * 1000:.1f} ms" if median < 1 else f"{median:.2f} s"
    return f"{text} ±{samples.spread:.0%}"


def _speed(name: str) -> Callable[[Bench, Measured], str]:
    def cell(bench: Bench, model: Measured) -> str:
        speed = bench.tokens_per_second(model)[name]
        return "–" if speed is None else f"{speed:,.1f}"

    return cell


_ROWS: tuple[Row, ...] = (
    ("nodes in the file", lambda _, m: f"{m.nodes:,}", "nodes"),
    ("session creation", lambda _, m: _time(m.creation), "creation"),
    ("first run", lambda _, m: _time(Samples((m.first_run,))).split(" ±")[0], "first_run"),
    ("prefill", lambda _, m: _time(m.prefill), "prefill"),
    ("prefill tokens/s", _speed("prefill"), ""),
    ("decode step", lambda _, m: _time(m.decode), "decode"),
    ("decode tokens/s", _speed("decode"), ""),
    ("nodes run per prefill", lambda _, m: f"{m.prefill_nodes:,}", "prefill_nodes"),
    ("nodes run per step", lambda _, m: f"{m.decode_nodes:,}" if m.decode_nodes else "–", "decode_nodes"),
    ("launches by the graph", lambda _, m: f"{m.launches:,}", "launches"),
    ("peak memory", lambda _, m: size(m.peak_bytes), "memory"),
)


def title(bench: Bench) -> str:
    """What was run where. Numbers of a CPU say so."""
    work = bench.workload
    where = "on the CPU, which says nothing about a GPU" if work.ep == "cpu" else "on CUDA"
    repeats = f"{work.rounds} × {work.repeats} repeats"
    return (
        f"batch {work.batch}, prompt {work.prompt}, {work.decode} decode steps, {repeats}; {where} "
        f"({bench.machine}, onnxruntime {bench.versions.get('onnxruntime', '?')})"
    )


def cells(bench: Bench) -> list[list[str]]:
    """The table: a heading, then a row for each quantity, with ratios to the first model in brackets."""
    rows = [["", *(model.model for model in bench.models)]]
    for name, cell, ratio in _ROWS:
        row = [name]
        for number, model in enumerate(bench.models):
            value = bench.ratios(model).get(ratio)
            row.append(cell(bench, model) + (f" ({value:.2f} ×)" if number and value else ""))
        rows.append(row)
    return rows


def text(bench: Bench) -> RenderableType:
    heading, *rows = cells(bench)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(heading):
        table.add_column(Text(name, overflow="fold"), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    notes = [Text(f"{m.model}: {note}", style="dim") for m in bench.models for note in m.notes]
    brackets = [Text("(…) times better than the first model; ± half of the runs", style="dim")]
    return Group(Text(title(bench), style="dim"), Text(), table, Text(), *brackets, *notes)


def markdown(bench: Bench) -> str:
    heading, *rows = cells(bench)
    lines = [title(bench), "", f"| {' | '.join(heading)} |", "|---|" + "---:|" * len(bench.models)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
