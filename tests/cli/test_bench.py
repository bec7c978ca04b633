import json
from pathlib import Path

import pytest

from ortmoe_cli.cli.app import run

FIXTURE = str(Path(__file__).parents[2] / "fixtures/gpt_oss_gathered.onnx")
SHORT = ["--prompt", "4", "--decode", "1", "--repeats", "1", "--warmup", "0", "--threads", "1"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", FIXTURE, *SHORT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["prompt"] == 4
    assert found["models"][0]["decode"]["median"] > 0


@pytest.mark.parametrize(("options", "words"), [([], "nodes run per step"), (["--markdown"], "|---|---:|")])
def test_tables(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", FIXTURE, *SHORT, *options]) == 0
    out, err = capsys.readouterr()
    assert words in out
    assert "on the CPU, which says nothing about a GPU" in " ".join(out.split())
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([FIXTURE, "--json", "--markdown"], "one of --json and --markdown"),
        (["none.onnx"], "no such file"),
        ([], "Missing argument"),
        ([FIXTURE, "--prompt", "0"], "--prompt"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_audit_counts_launches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", FIXTURE, "--tokens", "1,128", "--output-format", "json"]) == 1
    rows = json.loads(capsys.readouterr().out)["launches"]
    assert [row["tokens"] for row in rows] == [1, 128]
    assert rows[0]["after"] < rows[0]["before"]
    assert run(["audit", FIXTURE, "--tokens", "1"]) == 1
    out = capsys.readouterr().out
    assert "launches now" in out
    assert "4 of 8" in out
    assert run(["audit", FIXTURE, "--tokens", "0"]) == 2
    assert "'0' is no number above 0" in capsys.readouterr().err
