"""The weights of a sum: which c solve y = Σ c_j · column_j, token by token, and what they leave unexplained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

RESIDUAL = 1e-4
"""A remainder below this share of the output is rounding."""
_RANK = 1e-6
_TALL, _PERPENDICULAR = 4, 0.1


@dataclass(frozen=True, eq=False)
class Solution:
    """C (T,n), the remainder of each token (T,) as a share of its output, and whether no other C does as well."""

    weights: Array
    residual: Array
    unique: bool

    @property
    def worst(self) -> float:
        return float(self.residual.max(initial=0.0))


def solve(columns: Sequence[Array], outputs: Sequence[Array], among: Array | None = None) -> Solution:
    """Least squares for each token. Every entry of `columns` (T,n,H) and `outputs` (T,H) is one probe of the same
    logits with other hidden states, so C is the same in all of them: more equations where H is small. `among` (T,n):
    all other weights are zero."""
    tokens, count, _ = columns[0].shape
    weights, residual, unique = np.zeros((tokens, count)), np.zeros(tokens), True
    for t in range(tokens):
        use = np.arange(count) if among is None else np.flatnonzero(among[t])
        matrix = np.concatenate([_scaled(c[t, use], y[t]) for c, y in zip(columns, outputs, strict=True)], axis=1).T
        wanted = np.concatenate([_unit(y[t]) for y in outputs])
        size = np.linalg.norm(matrix, axis=0)
        size[size == 0] = 1
        factors, certain = _least_squares(matrix / size, wanted)
        unique &= certain
        weights[t, use] = factors / size
        residual[t] = np.abs(matrix @ weights[t, use] - wanted).max(initial=0.0)
    return Solution(weights, residual, unique)


def _least_squares(matrix: Array, wanted: Array) -> tuple[Array, bool]:
    """The solution, and whether it is the only one."""
    if matrix.shape[0] > _TALL * matrix.shape[1]:
        found = _by_squares(matrix, wanted)
        if found is not None:
            return found, True
    if matrix.shape[0] >= matrix.shape[1]:
        q, r = np.linalg.qr(matrix)
        diagonal = np.abs(np.diag(r))
        if diagonal.min(initial=1.0) > _RANK:
            return np.linalg.solve(r, q.T @ wanted), True
    return np.linalg.lstsq(matrix, wanted, rcond=_RANK)[0], False


def _by_squares(matrix: Array, wanted: Array) -> Array | None:
    """The solution by the normal equations, with one refinement; None unless the columns (of length 1) are nearly
    perpendicular. Much cheaper where equations are many."""
    squares = matrix.T @ matrix
    try:
        factor = np.linalg.cholesky(squares)
    except np.linalg.LinAlgError:
        return None
    if np.diag(factor).min(initial=1.0) < _PERPENDICULAR:
        return None
    found = np.linalg.solve(squares, matrix.T @ wanted)
    return np.asarray(found + np.linalg.solve(squares, matrix.T @ (wanted - matrix @ found)))


def _largest(y: Array) -> float:
    return float(np.abs(y).max(initial=0.0)) or 1.0


def _unit(y: Array) -> Array:
    return y.astype(np.float64) / _largest(y)


def _scaled(column: Array, y: Array) -> Array:
    """Each probe counts the same, whatever the size of its hidden states."""
    return column.astype(np.float64) / _largest(y)
