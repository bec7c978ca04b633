import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortmoe_cli.outcome import Fact
from ortmoe_cli.report import words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (57_300_000_000, "57.3 GB"), (5 * 10**21, "5000000.0 PB")],
)
def test_size(count: int, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (83.2, "83 s"), (754, "13 min")])
def test_duration(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_counted() -> None:
    assert [words.counted(n, "node") for n in (0, 1, 4412)] == ["0 nodes", "1 node", "4,412 nodes"]


def test_facts_say_what_is_there_and_nothing_else() -> None:
    values: dict[str, Fact] = {
        "E": 8,
        "activation": "silu",
        "qk_norm": True,
        "sinks": False,
        "softcap": 50.0,
        "window": "none",
    }
    assert words.facts(values) == "E=8 silu qk-norm softcap=50"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0, 1"),
        (range(48), "0–47"),
        (range(0, 48, 2), "0, 2, …, 46"),
        ([0, 1, 2, 3, 7, 9], "0–3, 7, 9"),
        ([3, 1, 2, 2], "1–3"),
        ([0, 6, 12], "0, 6, 12"),
    ],
)
def test_layers(numbers: list[int], text: str) -> None:
    assert words.layers(numbers) == text


@given(st.sets(st.integers(0, 300)))
def test_layers_name_exactly_the_given_numbers(numbers: set[int]) -> None:
    assert set(_read(words.layers(numbers))) == numbers


def _read(text: str) -> list[int]:
    found: list[int] = []
    text = re.sub(r"(\d+), (\d+), …, (\d+)", r"\1/\2/\3", text)
    for part in filter(None, text.split(", ")):
        if "/" in part:
            first, second, last = map(int, part.split("/"))
            found += range(first, last + 1, second - first)
        else:
            ends = list(map(int, part.split("–")))
            found += range(ends[0], ends[-1] + 1)
    return found
