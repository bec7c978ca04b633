"""Which of the tensors that may hold the routing does: the one that comes nearest to what was solved for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.routing import Dense, Routing

Array = NDArray[Any]

MATCH = 1e-3
"""Weights that differ by less than this share of the largest are the same; verification is stricter."""


def sought(
    candidates: Iterable[tuple[Routing, Array]],
    compare: Callable[[Array], Routing | None],
    weights: Array,
    certain: bool,
) -> Routing:
    """The best candidate. `compare` tells how well its weights (T,E) do; `certain`: only a match will do, because no
    other weights than the solved ones (T,E) are possible. Raises Refused."""
    best: Routing | None = None
    varying = False
    for routing, given in candidates:
        found = compare(given)
        if found is None or (certain and found.error > MATCH):
            continue
        if isinstance(routing.source, Dense) and varies(given):
            varying = True
            continue
        if best is None or (found.error < 0.5 * best.error and best.error > MATCH / 100):
            best = replace(found, source=routing.source)
    counts = (clean(weights) != 0).sum(axis=1)
    if best is None and varying:
        raise Refused("MOE116", f"tokens use {counts.min()} to {counts.max()} experts")
    if best is None:
        nearest = f"{counts.min(initial=0)} to {counts.max(initial=0)} experts per token"
        raise Refused("MOE110", "no tensor of the graph holds the weights of the experts", nearest)
    return best


def varies(given: Array) -> bool:
    """Whether tokens use different numbers of experts: weights (T,E)."""
    counts = (given != 0).sum(axis=1)
    return bool(counts.min() != counts.max() and counts.max() < given.shape[1])


def clean(weights: Array) -> Array:
    """Weights without the noise of the solution."""
    return np.where(np.abs(weights) < MATCH * np.abs(weights).max(initial=0.0), 0.0, weights)
