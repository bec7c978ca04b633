"""The two streams: data on stdout; progress and complaints on stderr."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ortmoe_cli.errors import OutputError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ortmoe_cli.cli.options import Format
    from ortmoe_cli.report.model import Report

_WIDTH = 100
"""Columns of a text that does not go to a terminal."""

_STAGES = {
    "experts": "looking for experts",
    "attention": "looking for attention",
    "write": "writing",
    "compare": "comparing with the original",
}
"""What the stages of the engine are called. Blocks are verified as they are found."""


def _console(stream: Any) -> Console:
    width = None if stream.isatty() else int(os.environ.get("COLUMNS", "0") or 0) or _WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(renderable: Any) -> None:
    """Print something for people on stdout. Lines that must not be broken are not; blanks at their ends are dropped."""
    console = _console(sys.stdout)
    with console.capture() as captured:
        console.print(renderable, crop=False)
    for line in captured.get().splitlines():
        print(line if console.is_terminal else line.rstrip())


def show(report: Report, output_format: Format, verbose: bool) -> None:
    """Print a report on stdout. Raises OutputError where that fails; a reader that has seen enough is no failure."""
    try:
        if output_format == "json":
            from ortmoe_cli.report import json

            print(json.render(report))
        else:
            from ortmoe_cli.report import text

            say(text.render(report, verbose))
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or the interpreter tries again at its end
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"the report cannot be printed: {error.strerror}") from error


def complain(message: str) -> None:
    """Say on stderr, in one line, what went wrong."""
    line = Text("ortmoe: ").append("error: ", "bold red").append(" ".join(message.splitlines()))
    _console(sys.stderr).print(line, soft_wrap=True)


class Bars:
    """Progress bars on stderr, one for each stage, gone when the work is done. Silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
            self._progress = Progress(*columns, console=_console(sys.stderr), transient=True)

    def __enter__(self) -> Bars:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` steps of a stage are over; a total of 0 is not known yet."""
        if self._progress is None:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(_STAGES.get(stage, stage), total=None)
        self._progress.update(self._tasks[stage], completed=done, total=total or None)
