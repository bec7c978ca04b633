import json
from pathlib import Path

import pytest

from ortmoe_cli.cli.app import run
from ortmoe_cli.outcome import Options
from tests.cli.conftest import Engine
from tests.report.samples import moe, refused, report

BOTH = frozenset({"moe", "gqa"})


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], Options(BOTH, frozenset(), "cpu", "full")),
        (["--only", "moe"], Options(frozenset({"moe"}))),
        (["--only", "gqa,moe", "--verify", "sample"], Options(verify="sample")),
        (["--verify", "none", "--ep", "cuda"], Options(verify="none", ep="cuda")),
        (["--assume", "right-padding"], Options(assume=frozenset({"right-padding"}))),
    ],
)
def test_the_engine_gets_what_was_asked_for(engine: Engine, arguments: list[str], options: Options) -> None:
    run(["fuse", "m.onnx", "-o", "out/f.onnx", *arguments])
    (call,) = engine.calls
    assert call.pop("progress")
    assert call == {
        "model": Path("m.onnx"),
        "target": Path("out/f.onnx"),
        "options": options,
        "dry_run": False,
        "in_place": False,
    }


@pytest.mark.parametrize(
    ("arguments", "target", "dry_run", "in_place"),
    [
        (["-o", "f.onnx"], Path("f.onnx"), False, False),
        (["--output", "f.onnx"], Path("f.onnx"), False, False),
        (["--in-place"], Path("m.onnx"), False, True),
        (["--in-place", "-o", "./m.onnx"], Path("m.onnx"), False, True),
        (["--dry-run"], None, True, False),
        (["--dry-run", "-o", "f.onnx"], Path("f.onnx"), True, False),
    ],
)
def test_where_the_output_goes(
    engine: Engine, arguments: list[str], target: Path | None, dry_run: bool, in_place: bool
) -> None:
    assert run(["fuse", "m.onnx", *arguments]) == 0
    (call,) = engine.calls
    assert (call["target"], call["dry_run"], call["in_place"]) == (target, dry_run, in_place)


@pytest.mark.parametrize(
    ("blocks", "code"),
    [((), 0), ((moe(0, "fused"), moe(1, "already-fused")), 0), ((moe(0, "fused"), refused(1)), 1), ((refused(1),), 1)],
)
def test_exit_code(engine: Engine, blocks: tuple[object, ...], code: int) -> None:
    engine.answer = report(*blocks, command="fuse", output="f.onnx")  # type: ignore[arg-type]
    assert run(["fuse", "m.onnx", "-o", "f.onnx"]) == code


def test_text_and_json_on_stdout(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = report(moe(0, "fused"), command="fuse", output="f.onnx", nodes_after=9)
    run(["fuse", "m.onnx", "-o", "f.onnx"])
    out, err = capsys.readouterr()
    assert out.startswith("qwen.onnx → f.onnx\n41,236 → 9 nodes")
    assert err == ""
    run(["fuse", "m.onnx", "-o", "f.onnx", "--output-format", "json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["output"] == "f.onnx"
    assert err == ""
