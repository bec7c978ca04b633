"""A diagnosis for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ortmoe_cli.runtime.doctor import Diagnosis
from ortmoe_cli.runtime.facts import DIFFERS, SAME

_STYLES = {SAME: "green", DIFFERS: "yellow"}


def text(diagnosis: Diagnosis, verbose: bool = False) -> RenderableType:
    """Versions, providers, and each fact; what was seen where it differs, or everywhere with `verbose`."""
    parts: list[RenderableType] = [_pairs({**diagnosis.versions}), Text()]
    parts += [_provider(p.name, p.loads, p.reason) for p in diagnosis.providers]
    if diagnosis.unknown:
        parts.append(Text(f"settings that this runtime does not know: {', '.join(diagnosis.unknown)}", "yellow"))
    parts.append(Text())
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for fact in diagnosis.facts:
        claim = Text(fact.claim)
        if verbose or fact.verdict != SAME:
            claim.append(f"\n{fact.seen}", "dim")
        table.add_row(Text(fact.verdict, style=_STYLES.get(fact.verdict, "dim")), Text(fact.name, "bold"), claim)
    parts += [table, Text(), _summary(diagnosis)]
    return Group(*parts)


def _pairs(values: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for key, value in values.items():
        table.add_row(Text(key, style="dim"), Text(value))
    return table


def _provider(name: str, loads: bool, reason: str) -> Text:
    if loads:
        return Text("loads      ", style="green").append(name, "not green")
    word = "not tried  " if reason == "not tried" else "not here   "
    line = Text(word, style="yellow").append(name, "not yellow")
    return line if reason == "not tried" else line.append(f"  {reason}", "not yellow dim")


def _summary(diagnosis: Diagnosis) -> Text:
    counts: dict[str, int] = {}
    for fact in diagnosis.facts:
        counts[fact.verdict] = counts.get(fact.verdict, 0) + 1
    return Text(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), style="dim")
