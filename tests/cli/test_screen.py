import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortmoe_cli.cli import screen

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

PROGRAM = """
import sys, types
import ortmoe_cli
from ortmoe_cli.cli.app import main
from ortmoe_cli.report.model import BlockReport, Report

def audit(model, options, progress):
    for stage in ("experts", "write", "new stage"):
        progress(stage, 0, 0)
        progress(stage, 1, 2)
        progress(stage, 2, 2)
    block = BlockReport("moe", "n", 0, "fusable", "MOE001", "m", "exact")
    return Report(str(model), "audit", (block,), 1)

ortmoe_cli.engine = sys.modules["ortmoe_cli.engine"] = types.SimpleNamespace(audit=audit)
sys.argv = ["ortmoe", "audit", "m.onnx", *sys.argv[1:]]
main()
"""


def on_terminal(*arguments: str, stdout: bool, **environment: str) -> tuple[str, str]:
    """Run with stderr, and stdout if wished, on a pseudo terminal; (stdout if it is a pipe, what the terminal got)."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    inherited = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=slave if stdout else subprocess.PIPE,
        stderr=slave,
        env=inherited | {"TERM": "xterm"} | environment,
    )
    os.close(slave)
    piped = running.communicate(timeout=60)[0] or b""
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    return piped.decode(), seen.decode()


def test_bars_go_to_stderr_and_leave_stdout_clean() -> None:
    out, terminal = on_terminal("--output-format", "json", stdout=False)
    assert json.loads(out)["blocks"][0]["code"] == "MOE001"
    assert all(title in terminal for title in ("looking for experts", "writing", "new stage", "100%"))


def test_no_bars_on_a_dumb_terminal() -> None:
    assert on_terminal(stdout=False, TERM="dumb")[1] == ""


def test_colour_on_a_terminal_unless_it_is_not_wanted() -> None:
    assert "\x1b[36m" in on_terminal(stdout=True)[1]
    plain = on_terminal(stdout=True, NO_COLOR="1")[1]
    assert not re.search(r"\x1b\[(?:\d+;)*3[0-7]", plain)
    assert "next: ortmoe fuse m.onnx -o m.fused.onnx" in ANSI.sub("", plain)


def test_neither_bars_nor_colour_off_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_width_off_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    screen.say("word " * 40)
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(90, 101)
    monkeypatch.setenv("COLUMNS", "40")
    screen.say("word " * 40)
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(30, 41)


def test_brackets_and_colons_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say("[bold]x[/bold] :smile:")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile:\n"


def test_a_complaint_is_one_line_with_everything_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen.complain("[bold] :smile: " + str(Path("x") / ("y" * 200)) + "\nsecond")
    assert capsys.readouterr().err == f"ortmoe: error: [bold] :smile: x/{'y' * 200} second\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_report_that_cannot_be_printed(tmp_path: Path, output_format: str) -> None:
    """`audit` fails with one line; `fuse` has done its work, and its exit code says what became of the blocks."""
    fixture = Path(__file__).parents[2] / "fixtures/dense_bmm.onnx"
    commands = {
        "audit": ([str(fixture)], 2, "the report cannot be printed: No space left on device"),
        "fuse": ([str(fixture), "-o", str(tmp_path / "out.onnx")], 0, "out.onnx is written all the same"),
    }
    for command, (arguments, code, words) in commands.items():
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "ortmoe_cli.cli.app", command, *arguments, "--output-format", output_format],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == code
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "out.onnx").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_closed_streams(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[2] / "fixtures/dense_bmm.onnx"
    line = f"{sys.executable} -m ortmoe_cli.cli.app fuse {fixture} -o {tmp_path}/out.onnx >&- 2>&-"
    assert subprocess.run(line, shell=True, check=False).returncode == 0
    assert (tmp_path / "out.onnx").exists()
