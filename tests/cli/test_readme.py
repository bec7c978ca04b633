"""The README and the explanations of codes are tried, not only read."""

import re
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from ortmoe_cli import rules
from ortmoe_cli.cli.app import run
from tests.cli.conftest import Engine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def command(name: str) -> str:
    """The command under a mark of the README."""
    found = re.search(rf"<!-- command: {name} -->\n```bash\n(.+)\n```\n", README)
    assert found, f"README.md has no command '{name}'"
    return found[1]


@pytest.mark.parametrize("name", ["try", "test"])
def test_ci_runs_the_commands_of_the_readme_word_for_word(name: str) -> None:
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert f"\nstep {name}" in script
    (function,) = re.findall(r"^readme\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f"{function}\nreadme {name}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == command(name) + "\n"


def test_the_commands_start_from_nothing() -> None:
    for name in ("try", "test"):
        assert command(name).startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_the_model_that_the_readme_fuses_is_shipped() -> None:
    words = shlex.split(command("try"))
    assert (ROOT / words[words.index("fuse") + 1]).is_file()


def test_the_output_that_the_readme_shows_is_what_one_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command("try"))
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    assert run(words[words.index("fuse") :]) == 0
    shown = re.search(r"^The report says.*?```text\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert shown
    assert without_times(shown[1]) == without_times(capsys.readouterr().out)


def without_times(text: str) -> str:
    return re.sub(r"in [\d.]+ s$", "in … s", text, flags=re.MULTILINE)


def test_the_tables_name_codes_that_exist() -> None:
    for code in re.findall(r"\b(?:MOE|GQA|EXT|POL)\d{3}\b", README):
        assert rules.get(code)


def spoken() -> list[str]:
    """Command lines that can be typed as they stand in the README or in the explanation of a code."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    texts = [
        blocks,
        *(f"`{part}`" for rule in rules.all() for part in re.findall(r"`([^`]+)`", "\n".join(asdict(rule).values()))),
    ]
    lines = re.findall(r"(?:^|&& |`|/)(ortmoe [^`|#\n]*)", "\n".join(texts), re.MULTILINE)
    return sorted({line.strip() for line in lines})


@pytest.mark.parametrize("line", spoken())
def test_every_command_that_is_named_can_be_typed(engine: Engine, line: str) -> None:
    arguments = ["MOE001" if word == "CODE" else word for word in shlex.split(line)[1:]]
    only_named = arguments in (["audit"], ["fuse"], ["check"], ["bench"], ["policy", "init"])
    assert run([*arguments, "--help"] if only_named else arguments) == 0
