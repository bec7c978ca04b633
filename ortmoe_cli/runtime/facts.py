"""Facts about the runtime that this package rests on, each as something that can be tried."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["as expected", "differs", "cannot be tested here"]
SAME: Verdict = "as expected"
DIFFERS: Verdict = "differs"
UNTESTED: Verdict = "cannot be tested here"


class Untestable(Exception):
    """The probe needs something that this machine lacks."""


@dataclass(frozen=True)
class Fact:
    """A claim about the runtime. `probe` says whether it holds, and what was seen."""

    name: str
    claim: str
    probe: Callable[[], tuple[bool, str]]
    ep: str = "cpu"


@dataclass(frozen=True)
class Tried:
    """What became of a fact."""

    name: str
    claim: str
    ep: str
    verdict: Verdict
    seen: str


def attempt(fact: Fact) -> Tried:
    """Run a probe. One that fails in an unforeseen way differs from what was expected."""
    try:
        holds, seen = fact.probe()
    except Untestable as reason:
        return Tried(fact.name, fact.claim, fact.ep, UNTESTED, str(reason))
    except Exception as error:
        return Tried(fact.name, fact.claim, fact.ep, DIFFERS, " ".join(str(error).split())[:160])
    return Tried(fact.name, fact.claim, fact.ep, SAME if holds else DIFFERS, seen)


def refused(action: Callable[[], object], *words: str) -> tuple[bool, str]:
    """Whether the runtime refuses something, with one of these words in its reason."""
    try:
        action()
    except Exception as error:
        text = " ".join(str(error).split())
        return any(word in text for word in words) or not words, text[-140:]
    return False, "accepted"
