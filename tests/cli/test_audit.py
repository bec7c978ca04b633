import json
from pathlib import Path

import pytest

from ortmoe_cli.cli.app import run
from ortmoe_cli.outcome import Options
from tests.cli.conftest import Engine
from tests.report.samples import gqa, moe, refused, report


def test_the_engine_gets_what_was_asked_for(engine: Engine) -> None:
    run(["audit", "folder/m.onnx"])
    run(["audit", "m.onnx", "--only", " gqa "])
    assert [call["model"] for call in engine.calls] == [Path("folder/m.onnx"), Path("m.onnx")]
    assert [call["options"] for call in engine.calls] == [Options(), Options(only=frozenset({"gqa"}))]


@pytest.mark.parametrize(
    ("options", "codes"),
    [  # exit codes for: nothing, fused already, fusable, refused
        ([], [0, 0, 1, 1]),
        (["--fail-on", "fusable,refused"], [0, 0, 1, 1]),
        (["--fail-on", "refused"], [0, 0, 0, 1]),
        (["--fail-on", "fusable"], [0, 0, 1, 0]),
        (["--fail-on", "never"], [0, 0, 0, 0]),
        (["--exit-zero"], [0, 0, 0, 0]),
    ],
)
def test_exit_code(engine: Engine, options: list[str], codes: list[int]) -> None:
    found = []
    for blocks in ((), (moe(0, "already-fused"),), (moe(0, "fusable"),), (refused(0),)):
        engine.answer = report(*blocks)
        found.append(run(["audit", "m.onnx", *options]))
    assert found == codes


def test_text_is_the_default(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = report(moe(0), gqa(0))
    run(["audit", "qwen.onnx"])
    out, err = capsys.readouterr()
    assert out.startswith("qwen.onnx\n41,236 nodes")
    assert out.endswith("next: ortmoe fuse qwen.onnx -o qwen.fused.onnx\n")
    assert err == ""


def test_verbose_shows_the_blocks(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = report(moe(0), moe(1))
    run(["audit", "qwen.onnx"])
    assert "/layers.1/mlp" not in capsys.readouterr().out
    run(["audit", "qwen.onnx", "-v"])
    assert "/layers.1/mlp" in capsys.readouterr().out


def test_json_is_one_object_on_stdout(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = report(moe(0), refused(1))
    assert run(["audit", "qwen.onnx", "--output-format", "json"]) == 1
    out, err = capsys.readouterr()
    assert [block["status"] for block in json.loads(out)["blocks"]] == ["fusable", "refused"]
    assert err == ""
