"""Einsum equations of attention, and those that are something else."""

import numpy as np
import pytest

from ortmoe_cli.attention.einsum import context_axes, score_axes
from ortmoe_cli.attention.refuse import Refused

SIZES = {"b": 2, "h": 3, "k": 3, "g": 2, "q": 4, "t": 5, "d": 8}


def noise(letters: str) -> np.ndarray:
    return np.random.default_rng(len(letters)).standard_normal([SIZES[letter] for letter in letters])


@pytest.mark.parametrize("equation", ["bhqd,bhtd->bhqt", "bqhd,bthd->bhqt", "bthd,bqhd->bhqt", "bkgqd,bktd->bkgqt"])
def test_scores_are_a_plain_product_once_transposed(equation: str) -> None:
    operands = [noise(part) for part in equation.split("->", maxsplit=1)[0].split(",")]
    axes = score_axes(equation)
    query, key = (operands[axes.query_input].transpose(axes.query), operands[1 - axes.query_input].transpose(axes.key))
    if query.ndim > key.ndim:
        key = key[:, :, None]
    np.testing.assert_allclose(query @ key.swapaxes(-1, -2), np.einsum(equation, *operands))


@pytest.mark.parametrize(("equation", "first"), [("bhqt,bhtd->bhqd", False), ("bhqt,bthd->bqhd", True)])
def test_context_is_a_plain_product_once_transposed(equation: str, first: bool) -> None:
    weights, value = (noise(part) for part in equation.split("->", maxsplit=1)[0].split(","))
    axes = context_axes(equation, 0)
    assert axes.tokens_first is first
    context = weights @ value.transpose(axes.value)
    np.testing.assert_allclose(context.transpose(0, 2, 1, 3) if first else context, np.einsum(equation, weights, value))


@pytest.mark.parametrize(
    "equation", ["bhqd,bhtd", "bhqd,bhqd->bhq", "bhqd,bhtd->bhtq d".replace(" ", ""), "...qd,...td->...qt"]
)
def test_other_products_are_refused(equation: str) -> None:
    with pytest.raises(Refused, match="GQA111"):
        score_axes(equation)
