import json
import tomllib
from pathlib import Path

import pytest

from ortmoe_cli.cli.app import run

FIXTURE = Path(__file__).parents[2] / "fixtures/qwen3_moe_hit_list.onnx"


def test_show_explains_each_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["policy", "show", "gpt-oss-20b"]) == 0
    out = capsys.readouterr().out
    assert "cuda enable_cuda_graph" in out
    assert "IOBinding" in out


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "show", "qwen3.6-35b-a3b", "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["experts"]) == (1, {"bits": 4, "block_size": 32})


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "list"]) == 0
    assert capsys.readouterr().out.split() == ["gpt-oss-20b", "qwen3.6-35b-a3b", "generic-moe"]


def test_init_writes_what_validate_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.toml"
    assert run(["policy", "init", str(FIXTURE), "--preset", "gpt-oss-20b", "--ep", "cuda", "-o", str(target)]) == 0
    assert tomllib.loads(target.read_text("utf-8"))["dimensions"]["past"] == "past"
    assert run(["policy", "validate", str(target)]) == 0
    assert "is valid" in capsys.readouterr().out
    assert run(["policy", "init", str(FIXTURE)]) == 0
    assert tomllib.loads(capsys.readouterr().out)["models"] == [FIXTURE.name]


def test_validate_names_everything_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.toml"
    target.write_text(
        'optimization_level = "ALL"\n[session_config]\ngpu_graph_capture = 1\n"session.disable_prepacing" = 1\n'
    )
    assert run(["policy", "validate", str(target)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["POL203", "POL202", "POL201"]
    assert lines[-1] == "next: ortmoe rule POL203"
    assert run(["policy", "validate", str(target), "--output-format", "json"]) == 1
    assert [problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]] == [
        "POL203",
        "POL202",
        "POL201",
    ]


@pytest.mark.parametrize("kind", ["python", "json", "genai", "cpp"])
def test_emit(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "emit", "gpt-oss-20b", "--as", kind]) == 0
    out = capsys.readouterr().out
    assert "use_tf32" in out
    assert "cuda_graph_partial" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nothing"], "no policy 'nothing'"),
        (["init", "none.onnx"], "no such file"),
        (["init", "m.onnx", "--preset", "gpt"], "'gpt' is none of gpt-oss-20b"),
        (["emit", "gpt-oss-20b", "--as", "rust"], "'rust' is not one of"),
        (["validate", "none.toml"], "cannot be read as a policy"),
        (["init", str(FIXTURE), "-o", "/no/such/folder/p.toml"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
