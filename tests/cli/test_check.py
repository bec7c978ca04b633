import json
from pathlib import Path

import pytest

from ortmoe_cli import engine
from ortmoe_cli.cli.app import run
from ortmoe_cli.outcome import Options
from ortmoe_cli.policy.derive import derive
from ortmoe_cli.policy.write import to_toml

FIXTURE = Path(__file__).parents[2] / "fixtures/gpt_oss_gathered.onnx"


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fused") / "fused.onnx"
    engine.fuse(FIXTURE, target, Options(verify="none"))
    target.with_suffix(".toml").write_text(to_toml(derive(target)), "utf-8")
    return target


def test_a_preset_against_an_unfused_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(FIXTURE), "--policy", "gpt-oss-20b"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "POL111 no MoE node, 2 expected" in out
    assert out.endswith(f"next: ortmoe fuse {FIXTURE} -o FUSED\n")


def test_a_satisfied_policy(fused: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(fused), "--policy", str(fused.with_suffix(".toml"))]) == 0
    assert "The model meets the policy: 10 checks passed." in capsys.readouterr().out


def test_runtime_says_what_really_runs(fused: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(fused), "--policy", str(fused.with_suffix(".toml")), "--runtime"]) == 0
    assert "2 MoE, 2 GroupQueryAttention" in capsys.readouterr().out


def test_json_holds_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(FIXTURE), "--policy", "gpt-oss-20b", "--output-format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["command"], found["passed"]) == (1, "check", False)
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["level"]["status"] == "passed"
    assert by_name["moe"]["findings"][0]["code"] == "POL111"
    assert len(by_name["moe"]["findings"][0]["nodes"]) == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--exit-zero"], 0),
        (["--fail-on", "never"], 0),
        (["--fail-on", "all"], 1),
        (["--fail-on", "POL113"], 1),
        (["--fail-on", "pol101,POL103"], 0),
        (["--fail-on", "MOE101"], 2),
    ],
)
def test_exit_codes(options: list[str], code: int) -> None:
    assert run(["check", str(FIXTURE), "--policy", "gpt-oss-20b", *options]) == code


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.toml").write_text("max_batch_size = 64\n")
    for arguments, words in (
        ([str(tmp_path / "none.onnx"), "--policy", "gpt-oss-20b"], "no such file"),
        ([str(FIXTURE), "--policy", "gpt-oss"], "no policy 'gpt-oss'"),
        ([str(FIXTURE), "--policy", str(tmp_path / "p.toml")], "no such provider option"),
        ([str(FIXTURE)], "Missing option '--policy'"),
    ):
        assert run(["check", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err


def test_verbose_names_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    run(["check", str(FIXTURE), "--policy", "gpt-oss-20b", "-v"])
    out = capsys.readouterr().out
    assert "node_linear_9\n" in out
    assert "no CUDA graphs" not in out
