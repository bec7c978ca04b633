"""The report for people: a summary, layers collapsed, exceptions expanded, and what to type next.

qwen.onnx
41,236 nodes · 57.3 GB of weights · opset 18

       fusable  refused
MoE         47        1
GQA         48

layers 0–46  47 × MoE  E=128 k=8 H=2048 I=768 silu      → fusable, exact
layer 47      1 × MoE  E=128 k=8                        → refused MOE101
  experts missing: 2 of 128
…
next: ortmoe fuse qwen.onnx -o qwen.fused.onnx
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ortmoe_cli.report import words
from ortmoe_cli.report.model import KINDS, STATUSES, BlockReport, Report

if TYPE_CHECKING:
    from ortmoe_cli.outcome import Fact

_STYLES = {"fused": "green", "fusable": "cyan", "already-fused": "blue", "refused": "yellow"}
_BRIEF = frozenset(
    {"E", "k", "H", "I", "activation", "heads", "kv_heads", "head_size", "window", "softcap", "sinks", "cache"}
)
"""The facts that tell blocks apart at a glance; -v shows all of them."""

_GAP = 2
_SHOWN_MESSAGES = 4
"""So many different messages of one code are shown; the others need -v."""


def render(report: Report, verbose: bool = False) -> RenderableType:
    """Everything that is said about a run. Print it with crop=False: the last line is meant to be copied whole."""
    parts: list[RenderableType] = [_header(report)]
    if report.blocks:
        parts += [_summary(report), _every_block(report) if verbose else _Collapsed(_alike(report.blocks))]
    else:
        parts.append(Text("No Mixture-of-Experts block and no attention found."))
    parts += filter(None, (_launches(report), _contract(report), _notes(report), _next(report)))
    return Group(*chain.from_iterable((part, Text()) for part in parts[:-1]), parts[-1])


def _header(report: Report) -> RenderableType:
    title = Text(report.model, style="bold")
    if report.output:
        title.append(" → ", "dim").append(report.output)
    elif report.dry_run:
        title.append("  dry run, nothing is written", "dim")
    nodes = words.counted(report.nodes_before, "node")
    if report.nodes_after is not None:
        nodes = f"{report.nodes_before:,} → {words.counted(report.nodes_after, 'node')}"
    items = [nodes, f"{words.size(report.weight_bytes)} of weights"]
    items += [f"opset {report.opset}"] if report.opset else []
    items += [f"in {words.duration(report.seconds)}"] if report.seconds else []
    return Group(title, Text(" · ".join(items), style="dim"))


def _summary(report: Report) -> Table:
    statuses = [status for status in STATUSES if report.of(status=status)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for status in statuses:
        table.add_column(status, justify="right", style=_STYLES[status])
    for kind, label in KINDS.items():
        if report.of(kind):
            counts = [len(report.of(kind, status)) for status in statuses]
            table.add_row(Text(label, style="bold"), *(str(count) if count else "" for count in counts))
    return table


@dataclass(frozen=True)
class _Collapsed:
    """One line for all blocks that are alike; under refused ones, why and what explains it."""

    groups: Sequence[Sequence[BlockReport]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [_row(group) for group in self.groups]
        where, count, facts, verdict = (max(len(row[column]) for row in rows) for column in range(4))
        where = min(where, max(options.max_width // 3, 20))
        facts = min(facts, options.max_width - where - count - verdict - 4 * _GAP)
        for group, row in zip(self.groups, rows, strict=True):
            line = Table.grid(padding=(0, _GAP, 0, 0))
            line.add_column(width=where, overflow="ellipsis", no_wrap=True)
            line.add_column(width=count, justify="right", no_wrap=True)
            line.add_column(width=max(facts, 12), style="dim")
            line.add_column(width=verdict, no_wrap=True)
            line.add_row(*row)
            yield line
            yield from _reasons(group)


def _row(group: Sequence[BlockReport]) -> tuple[Text, Text, Text, Text]:
    count = f"{len(group)} × {KINDS[group[0].kind]}"
    return Text(_where(group)), Text(count), Text(words.facts(_common_facts(group))), _verdict(group[0])


def _alike(blocks: Sequence[BlockReport]) -> list[list[BlockReport]]:
    """Blocks of one kind and end together, in the order in which the first of each comes."""
    groups: dict[tuple[object, ...], list[BlockReport]] = {}
    for block in blocks:
        facts = tuple(_brief(block).items()) if block.status != "refused" else ()
        groups.setdefault((block.kind, block.status, block.code, block.guarantee, facts), []).append(block)
    return list(groups.values())


def _common_facts(group: Sequence[BlockReport]) -> dict[str, Fact]:
    first, *others = group
    return {
        key: value for key, value in _brief(first).items() if all(other.facts.get(key) == value for other in others)
    }


def _brief(block: BlockReport) -> dict[str, Fact]:
    return {key: value for key, value in block.facts.items() if key in _BRIEF}


def _where(group: Sequence[BlockReport]) -> str:
    """'layers 0–47'; blocks without a layer go by their name if there is one only."""
    numbers = [block.layer for block in group if block.layer is not None]
    if not numbers:
        return group[0].name if len(group) == 1 else words.counted(len(group), "block")
    named = ("layer " if len(set(numbers)) == 1 else "layers ") + words.layers(numbers)
    return named if len(numbers) == len(group) else f"{named} and {len(group) - len(numbers)} more"


def _verdict(block: BlockReport) -> Text:
    text = Text("→ ", style="dim").append(block.status, _STYLES[block.status])
    if block.guarantee:
        text.append(f", {block.guarantee}")
    if block.status == "refused":
        text.append(f" {block.code}", "bold yellow")
    return text


def _reasons(group: Sequence[BlockReport]) -> Iterator[RenderableType]:
    """Why these blocks were refused, each message once, with the layers that it holds for."""
    if group[0].status != "refused":
        return
    reasons = [list(same) for _, same in groupby(group, key=lambda block: (block.message, block.nearest))]
    for same in reasons[:_SHOWN_MESSAGES]:
        prefix = f"{_where(same)}: " if len(reasons) > 1 else ""
        yield Padding(Text(prefix + same[0].message), (0, 0, 0, 4))
        if same[0].nearest:
            yield Padding(Text(f"nearest: {same[0].nearest}", style="dim"), (0, 0, 0, 4))
    if len(reasons) > _SHOWN_MESSAGES:
        hidden = words.counted(len(reasons) - _SHOWN_MESSAGES, "more message")
        yield Padding(Text(f"… {hidden}; -v shows every block", style="dim"), (0, 0, 0, 4))
    yield Padding(Text(f"ortmoe rule {group[0].code}", style="dim"), (0, 0, 0, 4))


def _every_block(report: Report) -> RenderableType:
    return Group(*(Padding(_detail(block), (1 if index else 0, 0, 0, 0)) for index, block in enumerate(report.blocks)))


def _detail(block: BlockReport) -> RenderableType:
    title = Text(KINDS[block.kind], style="bold")
    title.append(f"  layer {block.layer}  " if block.layer is not None else "  ").append_text(_verdict(block))
    if block.status != "refused":
        title.append(f"  {block.code}", "dim")
    checks = [Text(f"{check.regime} {check.error:.1e}") for check in block.checks]
    rows: dict[str, str | RenderableType] = {
        "name": block.name,
        "message": block.message,
        "nearest": block.nearest,
        "facts": words.facts(block.facts),
        "contract": "; ".join(block.contract),
        "replaces": words.counted(block.region, "node") if block.region else "",
        "checks": Columns(checks, padding=(0, 3)) if checks else "",
    }
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", width=8)
    table.add_column(ratio=1)
    for key, value in rows.items():
        if value:
            table.add_row(key, Text(value) if isinstance(value, str) else value)
    return Group(title, Padding(table, (0, 0, 0, 4)))


def _launches(report: Report) -> RenderableType | None:
    if not report.launches:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("new tokens", "launches now", "fused", "experts used", "expert bytes read"):
        table.add_column(heading, justify="right")
    for row in report.launches:
        used = f"{row.touched:,.0f} of {row.experts:,}" if row.experts else ""
        read = f"{words.size(row.active_bytes)} of {words.size(row.expert_bytes)}" if row.expert_bytes else ""
        table.add_row(f"{row.tokens:,}", f"{row.before:,}", f"{row.after:,}", used, read)
    title = Text("launches", style="bold").append("  nodes that start kernels, by the graph alone", "not bold dim")
    return Group(title, Padding(table, (0, 0, 0, 2)))


def _contract(report: Report) -> RenderableType | None:
    if not report.contract:
        return None
    return Group(
        Text("contract", style="bold").append("  what the fused model no longer accepts, or rests on", "not bold dim"),
        *(_bullet(sentence) for sentence in report.contract),
    )


def _notes(report: Report) -> RenderableType | None:
    return Group(Text("notes", style="bold"), *map(_bullet, report.notes)) if report.notes else None


def _bullet(sentence: str) -> Table:
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row("  •", Text(sentence))
    return line


def _next(report: Report) -> Text | None:
    """The command that one would type next, whole and unwrapped."""
    command = _next_command(report)
    if command is None:
        return Text("Every block is fused already, nothing to do.") if report.blocks else None
    return Text("next: ", style="dim", no_wrap=True, overflow="ignore").append(shlex.join(command), "not dim bold")


def _next_command(report: Report) -> list[str] | None:
    refused = report.of(status="refused")
    if report.of(status="fusable"):
        source = Path(report.model)
        return ["ortmoe", "fuse", report.model, "-o", str(source.with_name(f"{source.stem}.fused.onnx"))]
    if refused:
        return ["ortmoe", "rule", refused[0].code]
    return ["ortmoe", "audit", report.output] if report.of(status="fused") and report.output else None
