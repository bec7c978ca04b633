"""Experts that are folded into one network: one product makes the inner values of all, the routing scales these, and
one product sums up what all make of them. Which inner value belongs to which expert is told by value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ortmoe_cli.moe.activation import TOLERANCE, Fit, fit
from ortmoe_cli.moe.bias import Added
from ortmoe_cli.moe.bodies import Body, Rows
from ortmoe_cli.moe.experts import Expert, Source, Vector
from ortmoe_cli.moe.matrices import bias, matrix
from ortmoe_cli.moe.products import Array
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.samples import Samples
from ortmoe_cli.weights.pack import Rows as Part


@dataclass(frozen=True)
class _Fold:
    """Expert e has the elements `down[e]` of what enters the down product, and of product p's results `first[e]` =
    ((p, elements), …): one, or gate and up."""

    down: tuple[Part, ...]
    first: tuple[tuple[tuple[int, Part], ...], ...]


@dataclass(frozen=True)
class Unfolded:
    """The experts of a folded network, their inner width, and what they have in common."""

    experts: tuple[Expert, ...]
    inner: int
    fit: Fit


def unfold(
    source: Source,
    samples: Samples,
    body: Body,
    biases: dict[int, Added | None],
    scalars: Sequence[float],
    count: int,
) -> Unfolded:
    """Take a folded network of `count` experts apart. Raises Refused."""
    rows = Rows(samples, biases)
    down, first = rows.into(body.down), [rows.after(p) for p in body.first]
    inner, rest = divmod(down.shape[1], count)
    if rest or any(len(values) != len(down) for values in first):
        raise Refused("MOE108", f"an inner width of {down.shape[1]} does not hold {count} experts")
    nearest: Fit | None = None
    for fold in _folds(inner, count, [values.shape[1] for values in first]):
        found = _explains(fold, down, first, scalars)
        if found is not None and found.error <= TOLERANCE:
            return Unfolded(tuple(_experts(source, samples, body, biases, fold)), inner, found)
        nearest = found if nearest is None or (found and found.error < nearest.error) else nearest
    closest = f"closest: {nearest.activation.describe()}, off by {nearest.error:.1e}" if nearest else ""
    raise Refused("MOE108", "the experts are folded into one matrix, in an order that is none that is known", closest)


def _folds(inner: int, count: int, widths: Sequence[int]) -> Iterator[_Fold]:
    """How E experts may lie in one axis: one after the other, or element by element in turn; gate and up inside an
    expert, or those of all experts apart."""
    every = range(count)
    for down in (_blocks(inner, count), _turns(inner, count)):
        if len(widths) == 2 or widths[0] == inner * count:
            for parts in (_blocks(inner, count), _turns(inner, count)):
                yield _Fold(down, tuple(tuple((p, parts[e]) for p in range(len(widths))) for e in every))
        elif widths[0] == 2 * inner * count:
            for parts in (_blocks(2 * inner, count), _turns(2 * inner, count)):
                yield _Fold(down, tuple(((0, parts[e]),) for e in every))
            for one, two in (
                (_blocks(inner, count), _blocks(inner, count, inner * count)),
                (_turns(inner, count), _turns(inner, count, inner * count)),
            ):
                yield _Fold(down, tuple(((0, one[e]), (0, two[e])) for e in every))


def _blocks(size: int, count: int, start: int = 0) -> tuple[Part, ...]:
    return tuple((start + e * size, start + (e + 1) * size, 1) for e in range(count))


def _turns(size: int, count: int, start: int = 0) -> tuple[Part, ...]:
    return tuple((start + e, start + size * count, count) for e in range(count))


def _explains(fold: _Fold, down: Array, first: Sequence[Array], scalars: Sequence[float]) -> Fit | None:
    """The fit of the worst expert under this order; None if no expert was at work."""
    worst: Fit | None = None
    for part, parts in zip(fold.down, fold.first, strict=True):
        values = down[:, slice(*part)]
        used = np.flatnonzero(np.abs(values).max(axis=1))
        if not len(used):
            continue
        before = [first[p][:, slice(*taken)][used] for p, taken in parts]
        try:
            found = fit(values[used], before, scalars, worst)
        except ValueError:
            return None
        if worst is not None and (found.activation, found.layout) != (worst.activation, worst.layout):
            return replace(found, error=max(found.error, 2 * TOLERANCE))
        worst = found if worst is None or found.error > worst.error else worst
        if worst.error > TOLERANCE:
            return worst
    return worst


def _experts(
    source: Source, samples: Samples, body: Body, biases: dict[int, Added | None], fold: _Fold
) -> Iterator[Expert]:
    firsts = [matrix(source, samples, p, None) for p in body.first]
    first_biases = [bias(source, samples, p, biases[p.node], None, 1) for p in body.first]
    whole = matrix(source, samples, body.down, None)
    down_bias = bias(source, samples, body.down, biases[body.down.node], None, 1)
    for part, parts in zip(fold.down, fold.first, strict=True):
        yield Expert(
            tuple(replace(firsts[p], rows=taken) for p, taken in parts),
            tuple(_part(first_biases[p], taken) for p, taken in parts),
            replace(whole, columns=part),
            down_bias,
        )


def _part(vector: Vector | None, taken: Part) -> Vector | None:
    return None if vector is None else replace(vector, part=taken)
