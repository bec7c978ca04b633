"""Probes: hidden states and logits that bring out what a block does with them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SCALES = (1.0, 20.0, 1.0, 100.0)
"""Sizes of hidden states, token by token: clamps of the activation show from 20 on."""

_MANY = 32


def hidden_states(rng: np.random.Generator, tokens: int, width: int, scales: tuple[float, ...] = SCALES) -> Array:
    """X (T,H), token t of the size scales[t mod len]."""
    x = rng.standard_normal((tokens, width))
    return (x * np.resize(np.array(scales), tokens)[:, None]).astype(np.float32)


def spread_logits(rng: np.random.Generator, tokens: int, experts: int, chosen: int, start: int = 0) -> Array:
    """L (T,E) that favours `chosen` neighbouring experts per token, going round, so that all experts are hit.

    Neighbours, because group-limited routers choose groups first; not by much, because large logits hide whether the
    weights are normalised.
    """
    logits = rng.standard_normal((tokens, experts))
    favoured = (start + np.arange(tokens)[:, None] * chosen + np.arange(chosen)) % experts
    raised = np.take_along_axis(logits, favoured, 1) + 3
    np.put_along_axis(logits, favoured, -np.inf, 1)
    if experts > _MANY:  # one of the others is often higher still: some of these would never be hit
        floor = logits.max(axis=1, keepdims=True)
        raised = np.where(raised > floor, raised, floor + rng.uniform(0.05, 1.0, raised.shape))
    np.put_along_axis(logits, favoured, raised, 1)
    return logits.astype(np.float32)


def restricted_logits(rng: np.random.Generator, tokens: int, experts: int, chosen: int, active: Array) -> Array:
    """L (T,E) by which tokens go to the experts `active` only, and to each of them."""
    logits = rng.standard_normal((tokens, experts))
    favoured = active[(np.arange(tokens)[:, None] * chosen + np.arange(chosen)) % len(active)]
    np.put_along_axis(logits, favoured, np.take_along_axis(logits, favoured, 1) + 3, 1)
    others = np.setdiff1d(np.arange(experts), active)
    floor = logits[:, active].min(axis=1, keepdims=True)
    logits[:, others] = floor - rng.uniform(0.05, 0.8, (tokens, len(others)))
    return logits.astype(np.float32)


def tied_logits(rng: np.random.Generator, tokens: int, experts: int) -> Array:
    """L (T,E) of few different numbers, so that there are many exact ties."""
    return np.round(rng.standard_normal((tokens, experts)) * 1.2).astype(np.float32)


def skewed_logits(rng: np.random.Generator, tokens: int, experts: int) -> Array:
    """L (T,E) by which nearly all tokens want expert 1: a capacity shows here only."""
    logits = rng.standard_normal((tokens, experts))
    logits[min(2 * experts, tokens // 8) :, 1 % experts] += 6
    return logits.astype(np.float32)
