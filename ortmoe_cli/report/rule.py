"""The explanation of a code as a page, and the list of all codes."""

import re
from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ortmoe_cli import rules
from ortmoe_cli.rules import Rule

_SECTIONS = {
    "what": "What it means",
    "why": "Why it matters",
    "example": "Example",
    "action": "What to do",
    "safety": "Safety",
}
_WIDTH = 96


def page(rule: Rule) -> RenderableType:
    """Everything about one code."""
    parts: list[RenderableType] = [_title(rule)]
    for field, heading in _SECTIONS.items():
        text = getattr(rule, field)
        body = _verbatim(text) if field == "example" else Padding(prose(text), (0, 0, 0, 2), expand=False)
        parts += [Text(), Text(heading, style="bold"), body]
    return Group(*parts)


def index(found: Sequence[Rule]) -> RenderableType:
    """All codes with their titles, by family."""
    parts: list[RenderableType] = []
    for family, members in groupby(found, key=lambda rule: rule.family):
        table = Table.grid(padding=(0, 2, 0, 0))
        for rule in members:
            table.add_row(Text(f"  {rule.code}", style=_style(rule)), Text(rule.title))
        parts += [Text(rules.FAMILIES[family], style="bold"), table, Text()]
    return Group(*parts, Text("ortmoe rule CODE explains one of them", style="dim"))


def prose(text: str) -> RenderableType:
    """Paragraphs of a readable width, `code` in colour."""
    body = Text(text)
    body.highlight_regex(re.compile(r"`[^`]+`"), "cyan")
    table = Table.grid()
    table.add_column(max_width=_WIDTH)
    table.add_row(body)
    return table


def _verbatim(text: str) -> Text:
    """Lines that are never broken, whatever the width."""
    return Text("\n".join(f"  {line}" for line in text.splitlines()), style="cyan", no_wrap=True, overflow="ignore")


def _title(rule: Rule) -> Text:
    return Text(rule.code, style=f"bold {_style(rule)}").append(f"  {rule.title}", "not dim bold white")


def _style(rule: Rule) -> str:
    return "green" if rule.code.removeprefix(rule.family).startswith("0") else "yellow"
