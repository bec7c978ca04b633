import json

import pytest

from ortmoe_cli.cli.app import run
from ortmoe_cli.runtime.facts import Fact, Untestable


def untestable() -> tuple[bool, str]:
    raise Untestable("no CUDA here: libcuda.so.1 is missing")


GOOD = Fact("good", "the runtime is kind", lambda: (True, "it was"))
BAD = Fact("bad", "the runtime is fast", lambda: (False, "it was slow"))
FAR = Fact("far", "the moon is near", untestable, "cuda")


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr("ortmoe_cli.runtime.doctor.FACTS", request.param)


@pytest.mark.parametrize(("facts", "code"), [((GOOD, FAR), 0), ((GOOD, BAD), 1)], indirect=["facts"])
def test_exit_code(facts: None, code: int) -> None:
    assert run(["doctor"]) == code


@pytest.mark.parametrize("facts", [(GOOD, BAD, FAR)], indirect=True)
def test_text(facts: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor"])
    out = capsys.readouterr().out
    assert "as expected" in out
    assert "it was slow" in out
    assert "it was\n" not in out
    assert "no CUDA here: libcuda.so.1 is missing" in out
    assert "CPUExecutionProvider" in out
    assert "1 as expected, 1 differs, 1 cannot be tested here" in out
    run(["doctor", "-v"])
    assert "it was\n" in capsys.readouterr().out


@pytest.mark.parametrize("facts", [(GOOD, BAD, FAR)], indirect=True)
def test_one_provider_as_json(facts: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--ep", "cuda", "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(fact["name"], fact["verdict"]) for fact in found["facts"]] == [("far", "cannot be tested here")]
    assert found["versions"]["onnxruntime"]
