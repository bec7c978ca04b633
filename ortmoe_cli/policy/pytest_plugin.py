"""A pytest plugin: files called `*.ortmoe.toml` become tests, one for each check of each model that they name.

    [pytest] rootdir/deploy/gpt-oss.ortmoe.toml::model.onnx::moe

Models stand in the file as `models = ["model.onnx"]`, relative to it; `--ortmoe-model` gives others. With
`--ortmoe-runtime`, sessions are started too. Nothing is imported before such a file is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ortmoe_cli.policy.findings import Check, GuardReport

_SUFFIX = ".ortmoe.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ortmoe", "models held against throughput policies")
    group.addoption(
        "--ortmoe-model", action="append", default=[], metavar="MODEL", help="check this .onnx file instead"
    )
    group.addoption("--ortmoe-runtime", action="store_true", help="start the sessions of the models too")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> PolicyFile | None:
    return PolicyFile.from_parent(parent, path=file_path) if file_path.name.endswith(_SUFFIX) else None


class PolicyFile(pytest.File):
    """A policy; its children are models."""

    def collect(self) -> Iterator[ModelChecks]:
        from ortmoe_cli.errors import OrtmoeError  # noqa: PLC0415
        from ortmoe_cli.policy.read import read  # noqa: PLC0415

        try:
            policy = read(self.path)
        except OrtmoeError as error:
            raise self.CollectError(error.message) from error
        given = [Path(model).absolute() for model in self.config.getoption("--ortmoe-model")]
        models = given or [self.path.parent / model for model in policy.models]
        if not models:
            raise self.CollectError(f"{self.path} names no models; add models = [...], or give --ortmoe-model")
        for model in models:
            yield ModelChecks.from_parent(self, name=model.name, model=model, policy=policy)


class ModelChecks(pytest.Collector):
    """A model; its children are the checks."""

    def __init__(self, *, model: Path, policy: Any, **fields: Any) -> None:
        super().__init__(**fields)
        self.model = model
        self.policy = policy

    def collect(self) -> Iterator[CheckItem]:
        from ortmoe_cli.errors import OrtmoeError  # noqa: PLC0415
        from ortmoe_cli.policy.guard import guard  # noqa: PLC0415

        try:
            report: GuardReport = guard(self.model, self.policy, runtime=self.config.getoption("--ortmoe-runtime"))
        except OrtmoeError as error:
            raise self.CollectError(error.message) from error
        for check in report.checks:
            yield CheckItem.from_parent(self, name=check.name, check=check)


class CheckItem(pytest.Item):
    """One check."""

    def __init__(self, *, check: Check, **fields: Any) -> None:
        super().__init__(**fields)
        self.check = check

    def runtest(self) -> None:
        if self.check.skipped:
            pytest.skip(self.check.note)
        if self.check.findings:
            raise Unmet("\n".join(f"{f.code} {f.message}\n  → {f.action}" for f in self.check.findings))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Unmet):
            return f"{self.check.title}: no\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"


class Unmet(Exception):
    """A model does not meet its policy."""
