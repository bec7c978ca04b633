"""Attention in numpy: what a block must compute once its parameters are known."""

import numpy as np

from ortmoe_cli.attention.block import Scoring
from ortmoe_cli.graph.operators import softmax


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, scoring: Scoring) -> np.ndarray:
    """The context [B, H, S, D] of q [B, H, S, D], k and v [B, N, T, D] under a bias [B, H, S, T], in doubles."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
    scores = scoring.scale * (q.astype(np.float64) @ k.swapaxes(-1, -2))
    if scoring.softcap:
        scores = scoring.softcap * np.tanh(scores / scoring.softcap)
    scores = scores + bias
    if scoring.sinks is not None:
        sinks = np.broadcast_to(scoring.sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sinks], -1)
    with np.errstate(all="ignore"):
        weights = softmax(scores)[..., : k.shape[2]]
    return np.asarray(np.nan_to_num(weights) @ v)


def future(new: int, total: int) -> np.ndarray:
    """Which keys lie in the future of which query, [S, T]: the last query sees everything."""
    return np.arange(total)[None] > np.arange(total - new, total)[:, None]
