import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ortmoe_cli
from ortmoe_cli import rules
from ortmoe_cli.rules import Rule

PACKAGE = Path(ortmoe_cli.__file__).parent
CODE = re.compile(r"""["']((?:MOE|GQA|EXT|POL)\d{3})["']""")


def emitted() -> set[str]:
    """The codes that the package can put into a report or a message, read off its source."""
    sources = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "rules")
    return {code for path in sources for code in CODE.findall(path.read_text("utf-8"))}


def test_every_code_that_can_be_emitted_is_explained() -> None:
    assert emitted() <= {rule.code for rule in rules.all()}


@pytest.mark.parametrize("rule", rules.all(), ids=lambda rule: rule.code)
def test_a_rule_is_complete_and_in_its_family(rule: Rule) -> None:
    assert all(asdict(rule).values())
    assert re.fullmatch(r"[A-Z]{3}\d{3}", rule.code)
    assert rule.family in rules.FAMILIES
    assert rule.title[-1] not in ".:"
    for field in ("what", "why", "action", "safety"):
        text = getattr(rule, field)
        assert text.endswith("."), field
        assert text.count("`") % 2 == 0, field
        assert "  " not in text, field


@pytest.mark.parametrize("rule", rules.all(), ids=lambda rule: rule.code)
def test_a_refusal_says_that_the_block_is_left_as_it_was(rule: Rule) -> None:
    assert rule.refusal == (100 <= int(rule.code[3:]) < 200)
    if rule.refusal and rule.family != "EXT":
        assert rule.safety.startswith("Left as it was")


@pytest.mark.parametrize("rule", rules.all(), ids=lambda rule: rule.code)
def test_an_example_fits_a_terminal(rule: Rule) -> None:
    assert max(map(len, rule.example.splitlines())) <= 110


def test_rules_are_listed_by_family_and_number() -> None:
    families = list(rules.FAMILIES)
    codes = [rule.code for rule in rules.all()]
    assert codes == sorted(codes, key=lambda code: (families.index(code[:3]), code))


def test_codes_other_than_its_own_that_a_rule_mentions_exist() -> None:
    for rule in rules.all():
        for code in re.findall(r"\b[A-Z]{3}\d{3}\b", " ".join(asdict(rule).values())):
            assert rules.get(code)


def test_get_knows_no_unknown_code() -> None:
    with pytest.raises(KeyError):
        rules.get("MOE999")


@pytest.mark.parametrize(("typed", "meant"), [("moe101x", "MOE101"), ("GQ112", "GQA112"), ("MOE0001", "MOE001")])
def test_nearest_finds_what_was_meant(typed: str, meant: str) -> None:
    assert rules.nearest(typed) == meant


def test_nearest_makes_nothing_up() -> None:
    assert rules.nearest("hello") is None


@given(st.text(max_size=12))
def test_nearest_takes_anything(typed: str) -> None:
    found = rules.nearest(typed)
    assert found is None or rules.get(found)


def test_a_code_cannot_be_given_twice() -> None:
    with pytest.raises(ValueError, match="MOE001 is taken twice"):
        rules._register(rules.all(), (rules.get("MOE001"),))
