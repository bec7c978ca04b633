"""The proof must be able to fail: wrong parameters, wrong carriers and wrong islands do not pass."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ortmoe_cli.attention.block import Block
from ortmoe_cli.attention.carrier import NOTHING, Carrier
from ortmoe_cli.attention.emit import Plan
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island
from ortmoe_cli.outcome import Fusion, Options, Refusal
from tests.attention.decoders import Decoder
from tests.attention.running import fuse

module = importlib.import_module("ortmoe_cli.attention.find")


def with_block(**scoring: float) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        block: Block = replace(plan.block, scoring=replace(plan.block.scoring, **scoring))
        return replace(plan, block=block)

    return change


def with_carrier(carrier: Carrier) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, carrier=carrier)


def swapped_values(plan: Plan) -> Plan:
    heads = plan.block.heads
    return replace(plan, block=replace(plan.block, heads=replace(heads, value=heads.key)))


@pytest.mark.parametrize(
    "wrong",
    [with_block(scale=0.31), with_block(softcap=2.0), with_carrier(NOTHING), swapped_values],
    ids=["scale", "softcap", "no mask", "values"],
)
@pytest.mark.parametrize("verify", ["full", "sample"])
def test_a_wrong_island_is_refused(
    wrong: Callable[[Plan], Plan], verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[[Index, Plan], Island] = module.emit
    monkeypatch.setattr(module, "emit", lambda index, plan: right(index, wrong(plan)))
    result = fuse(Decoder(window=4).build(), tmp_path, Options(verify=verify))  # type: ignore[arg-type]
    (outcome,) = result.outcomes
    assert isinstance(outcome, Refusal)
    assert outcome.code == "GQA109"


def test_a_wrong_scale_shows_against_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.find_scoring
    monkeypatch.setattr(module, "find_scoring", lambda *args: replace(right(*args), scale=0.301))
    assert fuse(Decoder().build(), tmp_path).codes == ["GQA109"]


def test_without_verification_nothing_is_run(tmp_path: Path) -> None:
    (outcome,) = fuse(Decoder().build(), tmp_path, Options(verify="none")).outcomes
    assert isinstance(outcome, Fusion)
    assert outcome.checks == ()
