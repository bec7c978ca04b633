"""The plugin in a pytest of its own."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ortmoe_cli.policy.derive import derive
from ortmoe_cli.policy.write import to_toml
from tests.policy.conftest import fixture


def pytest_in(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--rootdir={folder}",
        "-p",
        "no:cacheprovider",
        "-rA",
        "--no-header",
        *arguments,
        str(folder),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def deploy(folder: Path, model: Path) -> None:
    """A folder with a model and the policy that it meets."""
    shutil.copy(model, folder / model.name)
    (folder / "deploy.ortmoe.toml").write_text(to_toml(derive(folder / model.name)), "utf-8")


def test_a_policy_file_is_one_test_for_each_check(tmp_path: Path, fused: Callable[..., Path]) -> None:
    model = fused("gpt_oss_gathered")
    deploy(tmp_path, model)
    code, out = pytest_in(tmp_path, "--ortmoe-runtime")
    assert code == 0, out
    for name in ("level", "moe", "gqa", "dimensions", "session", "kept"):
        assert f"PASSED deploy.ortmoe.toml::{model.name}::{name}\n" in out
    assert "no CUDA graphs in the policy" in out


def test_a_model_that_does_not_meet_it_fails_the_checks_that_it_fails(
    tmp_path: Path, fused: Callable[..., Path]
) -> None:
    deploy(tmp_path, fused("gpt_oss_gathered"))
    code, out = pytest_in(tmp_path, "--ortmoe-model", str(fixture("gpt_oss_gathered")))
    assert code == 1
    failed = {line.split(" - ")[0] for line in out.splitlines() if line.startswith("FAILED")}
    assert failed == {f"FAILED deploy.ortmoe.toml::gpt_oss_gathered.onnx::{name}" for name in ("moe", "gqa")}
    assert "POL111 no MoE node, 2 expected" in out
    assert "Traceback" not in out


def test_a_policy_that_cannot_be_used_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.ortmoe.toml").write_text('[session_config]\n"session.disable_prepacing" = 1\n')
    code, out = pytest_in(tmp_path)
    assert code == 2
    assert "did you mean 'session.disable_prepacking'" in out
    (tmp_path / "a.ortmoe.toml").write_text("")
    assert "names no models" in pytest_in(tmp_path)[1]


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, ortmoe_cli.policy.pytest_plugin;"
    code += "sys.exit(', '.join({'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)) or None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
