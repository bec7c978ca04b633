"""The pieces that identification rests on."""

import numpy as np
import pytest

from ortmoe_cli.moe.activation import FUNCTIONS, TOLERANCE, Activation, Layout, fit
from ortmoe_cli.moe.coefficients import RESIDUAL, solve
from ortmoe_cli.moe.routing import dense_of_pair, match
from ortmoe_cli.moe.verify import token_errors

RNG = np.random.default_rng(0)
SCALES = np.resize(np.array([1.0, 5.0, 20.0]), 30)[:, None]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_activation_without_gate(name: str) -> None:
    gate = RNG.standard_normal((30, 16)) * SCALES
    found = fit(FUNCTIONS[name](gate), [gate])
    assert found.error <= TOLERANCE
    assert found.activation == Activation(name, False)


@pytest.mark.parametrize("kind", ["halves", "interleaved", "separate"])
@pytest.mark.parametrize("up_first", [False, True])
def test_layout(kind: str, up_first: bool) -> None:
    first = [RNG.standard_normal((30, 16))] * 1 if kind != "separate" else list(RNG.standard_normal((2, 30, 8)))
    layout = Layout(kind, up_first)
    gate, up = layout.split(first)
    found = fit(Activation("swiglu", True)(gate, up), first)
    assert (found.layout, found.activation) == (layout, Activation("swiglu", True))


def test_half_precision_alpha_and_limit() -> None:
    first = [RNG.standard_normal((30, 16)) * SCALES]
    gate, up = Layout("halves").split(first)
    want = Activation("swiglu", True, 1.703125, 1.0, 7.0)
    found = fit(want(gate, up), first, scalars=(1.703125, 7.0))
    assert (found.activation, found.error < TOLERANCE) == (want, True)


def test_limit_is_found_without_a_hint() -> None:
    first = [RNG.standard_normal((30, 16)) * SCALES]
    want = Activation("swiglu", True, 1.3, 1.0, 4.5)
    gate, up = Layout("interleaved").split(first)
    found = fit(want(gate, up), first).activation
    assert found.alpha == pytest.approx(1.3, rel=1e-6)
    assert found.limit == pytest.approx(4.5, rel=1e-6)


def test_erf_and_tanh_gelu_are_told_apart() -> None:
    gate = RNG.standard_normal((30, 16)) * 2
    assert fit(FUNCTIONS["gelu"](gate), [gate]).activation.name == "gelu"
    assert fit(FUNCTIONS["gelu_tanh"](gate), [gate]).activation.name == "gelu_tanh"


def test_weights_before_the_down_product() -> None:
    gate = RNG.standard_normal((30, 16))
    found = fit(FUNCTIONS["silu"](gate) * RNG.uniform(0.1, 1, (30, 1)), [gate])
    assert found.scaled
    assert found.activation.name == "silu"


def test_solve_finds_the_weights_and_the_remainder() -> None:
    columns = RNG.standard_normal((5, 4, 20))
    weights = RNG.uniform(0, 1, (5, 4))
    y = np.einsum("tn,tnh->th", weights, columns)
    solution = solve([columns], [y])
    assert solution.unique
    assert solution.worst < RESIDUAL
    assert np.allclose(solution.weights, weights, atol=1e-6)
    y[3] += 0.01 * RNG.standard_normal(20)
    assert solve([columns], [y]).residual[3] > RESIDUAL


def test_twin_experts_have_no_unique_weights() -> None:
    columns = RNG.standard_normal((5, 4, 20))
    columns[:, 1] = columns[:, 0]
    assert not solve([columns], [columns.sum(axis=1)]).unique


def test_match_finds_order_and_scale() -> None:
    ids = np.array([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]])
    given = dense_of_pair(ids, RNG.uniform(0.1, 1, (5, 2)), 4)
    order = [2, 0, 3, 1]
    solved = np.zeros_like(given)
    solved[:, order] = 2.5 * given
    found = match(solved, given, in_order=False)
    assert found is not None
    assert found.order == tuple(order)
    assert found.scale == pytest.approx(2.5)
    assert found.error < 1e-9


def test_token_errors_ignore_what_the_original_cannot_compute() -> None:
    before = np.ones((3, 4))
    before[1, 2] = np.nan
    after = before.copy()
    after[2, 0] = np.inf
    errors = token_errors(before, after)
    assert errors[0] == 0
    assert np.isnan(errors[1])
    assert errors[2] == np.inf
