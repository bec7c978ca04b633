from collections.abc import Callable
from typing import Any

import pytest

from ortmoe_cli.runtime import probe_cuda, probe_gqa, probe_moe, probe_session
from ortmoe_cli.runtime.doctor import FACTS, examine
from ortmoe_cli.runtime.facts import DIFFERS, SAME, UNTESTED, Fact, Untestable, attempt, refused

RELEASED = ("1.31.0", "1.31.1")
MENDED_LATER = {"moe-in-place"}
"""Facts that describe a defect, which a later release may mend."""

LOADING = ("cuda-unknown-option", "cuda-gqa-float32", "cuda-gqa-fusion", "cuda-gqa-no-fusion")
TRY = """
import json, sys
from ortmoe_cli.runtime.facts import attempt
from ortmoe_cli.runtime.probe_cuda import FACTS
names = json.loads(sys.argv[1])
print(json.dumps({fact.name: attempt(fact).verdict for fact in FACTS if fact.name in names}))
"""


@pytest.mark.parametrize("fact", [*probe_moe.FACTS, *probe_gqa.FACTS, *probe_session.FACTS], ids=lambda fact: fact.name)
def test_the_facts_about_the_cpu_hold_here(fact: Fact) -> None:
    import onnxruntime as ort

    tried = attempt(fact)
    if fact.name in MENDED_LATER and ort.__version__ not in RELEASED:
        pytest.skip("mended in later releases")
    if tried.verdict == UNTESTED:
        pytest.skip(tried.seen)
    assert tried.verdict == SAME, tried.seen


def test_cuda_facts_say_that_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_cuda, "loads", lambda: (False, "libcuda.so.1 is missing"))
    for fact in probe_cuda.FACTS:
        tried = attempt(fact)
        assert (tried.verdict, tried.seen) == (UNTESTED, "no CUDA here: libcuda.so.1 is missing")


def test_the_facts_about_loading_on_cuda_hold(cuda: Callable[..., Any]) -> None:
    import json

    assert cuda(TRY, json.dumps(LOADING)) == dict.fromkeys(LOADING, SAME)


def test_verdicts() -> None:
    def raises(error: Exception) -> tuple[bool, str]:
        raise error

    assert attempt(Fact("a", "", lambda: (True, "seen"))).verdict == SAME
    assert attempt(Fact("a", "", lambda: (False, "seen"))).verdict == DIFFERS
    assert attempt(Fact("a", "", lambda: raises(Untestable("no")))).verdict == UNTESTED
    crashed = attempt(Fact("a", "", lambda: raises(ValueError("one\ntwo"))))
    assert (crashed.verdict, crashed.seen) == (DIFFERS, "one two")


def test_a_refusal_needs_its_reason() -> None:
    assert refused(lambda: int("x"), "invalid literal")[0]
    assert not refused(lambda: int("x"), "out of memory")[0]
    assert refused(lambda: int("1")) == (False, "accepted")


def test_names_are_unique() -> None:
    assert len({fact.name for fact in FACTS}) == len(FACTS)


def test_a_diagnosis_tells_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = (Fact("good", "g", lambda: (True, "")), Fact("bad", "b", lambda: (False, "seen")),
             Fact("other", "o", lambda: (False, ""), "cuda"))  # fmt: skip
    monkeypatch.setattr("ortmoe_cli.runtime.doctor.FACTS", facts)
    found = examine("cpu")
    assert [tried.name for tried in found.facts] == ["good", "bad"]
    assert [tried.name for tried in found.differs] == ["bad"]
    assert found.unknown == ()
    assert {provider.name: provider.loads for provider in found.providers}["CPUExecutionProvider"]
    assert found.document()["facts"][1]["verdict"] == DIFFERS
