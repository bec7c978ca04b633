"""Which masks may be left to the operator's own causality."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ortmoe_cli.attention.mask import Claims, Sight, judge
from ortmoe_cli.attention.probes import Regime
from ortmoe_cli.attention.reference import future
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.attention.scores import Bias
from ortmoe_cli.graph.probe import Origin, Sizes


@dataclass
class Seen:
    """As much of a probe as a mask looks at."""

    real: np.ndarray


def sight(hidden: np.ndarray, origin: Origin = Origin.NONE, name: str = "prompt") -> Sight:
    """One sequence of which `hidden` [S, T] says what is not seen."""
    values = np.where(hidden, -np.inf, 0).astype(np.float32)[None, None]
    probe: Any = Seen(np.ones((1, hidden.shape[1]), bool))
    return Sight(Regime(name, Sizes(1, hidden.shape[0])), probe, Bias(values, origin))


CAUSAL = future(6, 6)
PLAIN = Claims(plain=True)


def test_causal_in_every_observation_is_plain() -> None:
    assert judge([sight(CAUSAL), sight(future(1, 9))], PLAIN).plain


@pytest.mark.parametrize("origin", [Origin.MASK, Origin.POSITIONS])
def test_a_mask_made_from_inputs_is_carried_however_it_looked(origin: Origin) -> None:
    assert not judge([sight(CAUSAL, origin)], PLAIN).plain


def test_a_mask_with_a_number_in_it_is_carried_however_it_looked() -> None:
    assert not judge([sight(CAUSAL)], Claims(plain=False)).plain


def test_windows_agree_over_observations() -> None:
    back = np.arange(6)[:, None] - np.arange(6)[None]
    assert judge([sight(CAUSAL | (back >= 4)), sight(future(2, 2))], PLAIN).window == 4


def test_a_mask_that_may_show_the_future_at_some_size_is_refused() -> None:
    with pytest.raises(Refused, match="beyond 5000"):
        judge([sight(CAUSAL)], Claims(plain=False, doubt="not shown beyond 5000"))


@pytest.mark.parametrize("origin", [Origin.TOKENS, Origin.OTHER, Origin.TOKENS | Origin.MASK])
def test_a_mask_that_depends_on_tokens_is_refused(origin: Origin) -> None:
    with pytest.raises(Refused, match="GQA105"):
        judge([sight(CAUSAL, origin)], PLAIN)


def test_future_and_blind_queries_are_refused() -> None:
    with pytest.raises(Refused, match="GQA101"):
        judge([sight(np.zeros((6, 6), bool))], PLAIN)
    with pytest.raises(Refused, match="of 6 queries see keys of their future"):
        judge([sight(CAUSAL & (np.arange(6) > 2))], PLAIN)
    with pytest.raises(Refused, match="1 queries see no key"):
        judge([sight(CAUSAL | (np.arange(6) == 0)[:, None])], PLAIN)
    with pytest.raises(Refused, match="GQA107"):
        judge([], PLAIN)
