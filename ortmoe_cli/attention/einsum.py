"""Products written as Einsum, brought into the order of dimensions that a MatMul would have."""

from dataclasses import dataclass

from ortmoe_cli.attention.refuse import Refused

Axes = tuple[int, ...]


@dataclass(frozen=True)
class ScoreAxes:
    """How to transpose the operands of q·k to [.., S, D] and [.., T, D]; which input is the query (0 or 1)."""

    query_input: int
    query: Axes
    key: Axes


@dataclass(frozen=True)
class ContextAxes:
    """How to transpose the values to [.., T, D]. `tokens_first`: the context is [B, S, .., D], not [.., S, D]."""

    value: Axes
    tokens_first: bool


def score_axes(equation: str) -> ScoreAxes:
    """Read the equation of q·k. Raises Refused."""
    left, right, result = _letters(equation)
    tokens = result[-1]
    if (tokens in left) == (tokens in right):
        raise _unsupported(equation)
    query_input, query, key = (0, left, right) if tokens in right else (1, right, left)
    summed = [letter for letter in query if letter in key and letter not in result]
    shared = [letter for letter in result if letter in query and letter in key]
    own = [letter for letter in result[:-1] if letter not in key]
    if len(summed) != 1 or result != [*shared, *own, tokens] or len(key) != len(shared) + 2:
        raise _unsupported(equation)
    return ScoreAxes(query_input, _order(query, [*shared, *own, summed[0]]), _order(key, [*shared, tokens, summed[0]]))


def context_axes(equation: str, weights_input: int) -> ContextAxes:
    """Read the equation of weights·v. Raises Refused."""
    left, right, result = _letters(equation)
    weights, value = (left, right) if weights_input == 0 else (right, left)
    tokens, size = weights[-1], result[-1]
    shared = [letter for letter in weights[:-1] if letter in value]
    if tokens in result or tokens not in value or size in weights or len(value) != len(shared) + 2:
        raise _unsupported(equation)
    rows = weights[:-1]
    axes = _order(value, [*shared, tokens, size])
    if result == [*rows, size]:
        return ContextAxes(axes, tokens_first=False)
    if result == [rows[0], rows[-1], *rows[1:-1], size]:
        return ContextAxes(axes, tokens_first=True)
    raise _unsupported(equation)


def _letters(equation: str) -> tuple[list[str], list[str], list[str]]:
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2 or "." in equation or any(len(set(part)) < len(part) for part in operands):
        raise _unsupported(equation)
    return list(operands[0]), list(operands[1]), list(result)


def _order(letters: list[str], wanted: list[str]) -> Axes:
    if sorted(letters) != sorted(wanted):
        raise Refused("GQA111", f"an Einsum of {''.join(letters)} does not multiply heads")
    return tuple(letters.index(letter) for letter in wanted)


def _unsupported(equation: str) -> Refused:
    return Refused("GQA111", f"the Einsum '{equation}' is not a product of queries and keys, or weights and values")
