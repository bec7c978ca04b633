import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from ortmoe_cli.cli.app import run
from ortmoe_cli.errors import ModelError, OutputError, ParityError
from tests.cli.conftest import Engine

COMMAND = [sys.executable, "-m", "ortmoe_cli.cli.app"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["audit", "--help"], ["fuse", "-h"], ["rule"], ["rule", "MOE101"], ["--version"]]
)
def test_help_and_rules_do_not_pay_for_the_runtime(arguments: list[str]) -> None:
    heavy = ("onnx", "onnxruntime", "onnx_graphsurgeon", "numpy", "ml_dtypes", "rich.progress")
    code = (
        "import sys; from ortmoe_cli.cli.app import run; code = run(sys.argv[1:]);"
        f"sys.exit(code or ', '.join(name for name in {heavy} if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_help_names_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("audit", "fuse", "rule", "Exit codes"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"ortmoe {version('ortmoe')}\n", "")


def test_no_command_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage: ortmoe" in re.sub(r"\x1b\[[\d;]*m", "", err)  # in CI, typer takes any log for a terminal


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fues", "m.onnx"], "No such command 'fues'"),
        (["audit"], "Missing argument 'MODEL'; see 'ortmoe audit --help'"),
        (["audit", "m.onnx", "--colour"], "No such option: --colour"),
        (["audit", "m.onnx", "--output-format", "xml"], "'--output-format': 'xml' is not one of 'text', 'json'; see"),
        (["audit", "m.onnx", "--only", "moe,mha"], "'--only': 'mha' is none of moe, gqa"),
        (["audit", "m.onnx", "--only", ""], "'--only': name at least one of moe, gqa"),
        (["audit", "m.onnx", "--fail-on", "never,refused"], "'never' stands alone"),
        (["fuse", "m.onnx", "-o"], "requires an argument"),
        (["fuse", "m.onnx"], "no output file: give one with -o OUT"),
        (["fuse", "m.onnx", "-o", "a.onnx", "--in-place"], "-o names another file"),
        (["fuse", "m.onnx", "-o", "a.onnx", "--assume", "luck"], "'luck' is none of right-padding"),
    ],
)
def test_a_usage_error_is_one_line(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ortmoe: error: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert engine.calls == []


@pytest.mark.parametrize(("kind", "code"), [(ModelError, 2), (OutputError, 2), (ParityError, 3)])
def test_an_expected_failure_is_one_line_and_its_exit_code(
    engine: Engine, capsys: pytest.CaptureFixture[str], kind: type[ModelError], code: int
) -> None:
    message = "m.onnx: " + "a long explanation\nwith a line feed " * 10
    engine.answer = kind(message)
    assert run(["fuse", "m.onnx", "-o", "out.onnx"]) == code
    assert capsys.readouterr() == ("", f"ortmoe: error: {' '.join(message.splitlines())}\n")


def test_an_unexpected_failure_is_one_line_and_a_hint(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = ZeroDivisionError("by\nzero")
    assert run(["audit", "m.onnx"]) == 2
    assert capsys.readouterr() == (
        "",
        "ortmoe: error: unexpected ZeroDivisionError: by zero (use --debug to see the traceback)\n",
    )


@pytest.mark.parametrize("arguments", [["--debug", "audit", "m.onnx"], ["audit", "m.onnx", "--debug"]])
@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ModelError("m.onnx: no such file")])
def test_debug_shows_the_traceback(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], error: Exception
) -> None:
    engine.answer = error
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert "_called" in err
    assert str(error) in err.splitlines()[-1]
    assert "--debug" not in err.splitlines()[-1]


def test_an_interrupt_is_one_line(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = KeyboardInterrupt()
    assert run(["audit", "m.onnx"]) == 130
    assert capsys.readouterr() == ("", "ortmoe: error: interrupted\n")


def test_an_error_that_has_a_code_names_it(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = ModelError("m.onnx: the graph is empty")
    engine.answer.code = "EXT105"  # type: ignore[attr-defined]
    run(["audit", "m.onnx"])
    assert capsys.readouterr().err == "ortmoe: error: m.onnx: the graph is empty [EXT105]\n"


def test_a_closed_pipe_is_no_failure() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m ortmoe_cli.cli.app rule | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_arrows_still_gets_the_text(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([*COMMAND, "rule", "MOE001"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"com.microsoft.MoE" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_writer_clean_up(tmp_path: Path, number: int, code: int) -> None:
    program = f"""
import sys, time, types
from pathlib import Path
import ortmoe_cli
from ortmoe_cli.cli.app import main

def fuse(*arguments, **flags):
    unfinished = Path({str(tmp_path / "unfinished")!r})
    try:
        unfinished.write_text("")
        time.sleep(60)
    finally:
        unfinished.unlink()

ortmoe_cli.engine = sys.modules["ortmoe_cli.engine"] = types.SimpleNamespace(fuse=fuse)
sys.argv = ["ortmoe", "fuse", "m.onnx", "-o", "f.onnx"]
main()
"""
    running = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "unfinished").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code
    assert not (tmp_path / "unfinished").exists()
    assert err.count("\n") <= 1
