from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import fake_cuda


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a program that prints JSON on a machine that seems to have a GPU."""
    folder: Path = tmp_path_factory.mktemp("fake-cuda")
    reason = fake_cuda.build(folder)
    if reason:
        pytest.skip(reason)
    return lambda program, *arguments: fake_cuda.run(folder, program, *arguments)
