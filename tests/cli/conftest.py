"""An engine that answers at once, so that the command line is tested alone."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ortmoe_cli
from ortmoe_cli.report.model import Report


@dataclass
class Engine:
    """Records how it was called, then returns `answer` or raises it."""

    answer: Report | BaseException | Callable[[], Report] = field(
        default_factory=lambda: Report("m.onnx", "audit", (), 1)
    )
    calls: list[dict[str, Any]] = field(default_factory=list)

    def audit(self, model: Path, options: Any, progress: Any) -> Report:
        return self._called(model=model, options=options, progress=progress)

    def fuse(self, model: Path, target: Path | None, options: Any, progress: Any, **flags: bool) -> Report:
        return self._called(model=model, target=target, options=options, progress=progress, **flags)

    def _called(self, **arguments: Any) -> Report:
        self.calls.append(arguments)
        arguments["progress"]("experts", 1, 2)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if isinstance(self.answer, Report) else self.answer()


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the width nor the colours of whoever runs the tests."""
    for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Takes the place of `ortmoe_cli.engine`."""
    stand_in = Engine()
    module = ModuleType("ortmoe_cli.engine")
    module.audit = stand_in.audit  # type: ignore[attr-defined]
    module.fuse = stand_in.fuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ortmoe_cli.engine", module)
    monkeypatch.setattr(ortmoe_cli, "engine", module, raising=False)
    return stand_in
