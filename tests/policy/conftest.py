"""Fused models, made once from the shipped exports."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ortmoe_cli import engine
from ortmoe_cli.outcome import Options

FOLDER = Path(__file__).parents[2] / "fixtures"


def fixture(name: str) -> Path:
    """A shipped export."""
    return FOLDER / f"{name}.onnx"


@pytest.fixture(scope="session")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Fuses a shipped export: all of it, or some kinds of blocks."""
    folder, made = tmp_path_factory.mktemp("fused"), dict[tuple[str, str], Path]()

    def make(name: str, only: str = "moe,gqa") -> Path:
        if (name, only) not in made:
            made[name, only] = folder / f"{name}-{only.replace(',', '-')}.onnx"
            options = Options(verify="none", only=frozenset(only.split(",")))
            engine.fuse(fixture(name), made[name, only], options)
        return made[name, only]

    return make
