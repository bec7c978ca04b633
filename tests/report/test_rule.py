import io
from inspect import cleandoc

import pytest
from rich.console import Console, RenderableType

from ortmoe_cli import rules
from ortmoe_cli.report.rule import index, page
from ortmoe_cli.rules import Rule


def printed(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_page_shows_every_section() -> None:
    rule = Rule("MOE999", "a title", "First.\n\nSecond `code`.", "Why.", "\nbefore\n  after", "Do [x].", "Safe.")
    assert printed(page(rule)) == cleandoc("""
        MOE999  a title

        What it means
          First.

          Second `code`.

        Why it matters
          Why.

        Example
          before
            after

        What to do
          Do [x].

        Safety
          Safe.
    """)


@pytest.mark.parametrize("rule", rules.all(), ids=lambda rule: rule.code)
@pytest.mark.parametrize("width", [40, 100])
def test_prose_wraps_and_examples_stay_whole(rule: Rule, width: int) -> None:
    lines = printed(page(rule), width).splitlines()
    example = [f"  {line}".rstrip() for line in rule.example.splitlines()]
    assert all(line in lines for line in example)
    assert all(len(line) <= width for line in lines[2:] if line not in example)


def test_index_lists_every_code_once() -> None:
    text = printed(index(rules.all()))
    assert all(text.count(f"  {rule.code}  {rule.title}\n") == 1 for rule in rules.all())
    assert [line for line in text.splitlines() if line in rules.FAMILIES.values()] == list(rules.FAMILIES.values())
