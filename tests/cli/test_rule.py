import json
from dataclasses import asdict

import pytest

from ortmoe_cli import rules
from ortmoe_cli.cli.app import run


@pytest.mark.parametrize("code", ["MOE101", "moe101"])
def test_a_code_is_explained(capsys: pytest.CaptureFixture[str], code: str) -> None:
    assert run(["rule", code]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("MOE101  experts missing from the export\n\nWhat it means\n  The router chooses")
    assert err == ""


def test_without_a_code_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule"]) == 0
    out = capsys.readouterr().out
    assert all(rule.title in out for rule in rules.all())


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule", "GQA003", "--output-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "rules": [asdict(rules.get("GQA003"))]}
    assert run(["rule", "--output-format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == len(rules.all())


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("MOE1011", "there is no code 'MOE1011'; did you mean MOE101? 'ortmoe rule' lists all codes"),
        ("hello", "there is no code 'hello'; 'ortmoe rule' lists all codes"),
    ],
)
def test_an_unknown_code_is_a_usage_error(capsys: pytest.CaptureFixture[str], code: str, complaint: str) -> None:
    assert run(["rule", code]) == 2
    assert capsys.readouterr() == ("", f"ortmoe: error: {complaint}\n")
