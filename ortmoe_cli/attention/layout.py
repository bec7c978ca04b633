"""How a tensor holds heads: its dimensions in terms of B (batch), N (heads), L (tokens) and D (head size)."""

from enum import Enum

import numpy as np


class Layout(Enum):
    """The order of dimensions. Attention is defined on BNLD; the fused operator takes BLW for new tokens."""

    BNLD = "[B, N, L, D] or [B*N, L, D]"
    BLND = "[B, L, N, D]"
    BLW = "[B, L, N*D]"
    RW = "[B*L, N*D]"


def heads_first(array: np.ndarray, layout: Layout, batch: int, size: int) -> np.ndarray | None:
    """The array as [B, N, L, D], None if it cannot have this layout."""
    shape = array.shape
    if 0 in shape or batch <= 0 or size <= 0:
        return None
    if layout is Layout.BNLD:
        if len(shape) < 3 or shape[-1] != size or array.size % (batch * shape[-2] * size):
            return None
        return array.reshape(batch, -1, shape[-2], size)
    if layout is Layout.BLND:
        if len(shape) != 4 or shape[0] != batch or shape[-1] != size:
            return None
        return array.transpose(0, 2, 1, 3)
    if shape[-1] % size:
        return None
    if layout is Layout.BLW:
        if len(shape) != 3 or shape[0] != batch:
            return None
    elif len(shape) != 2 or shape[0] % batch:
        return None
    return array.reshape(batch, -1, shape[-1] // size, size).transpose(0, 2, 1, 3)


def arranged(array: np.ndarray, layout: Layout) -> np.ndarray:
    """[B, N, L, D] in another layout; the inverse of `heads_first` for BNLD of rank 4."""
    batch, heads, tokens, size = array.shape
    if layout is Layout.BNLD:
        return array
    swapped = array.transpose(0, 2, 1, 3)
    if layout is Layout.BLND:
        return swapped
    return swapped.reshape((batch, tokens, heads * size) if layout is Layout.BLW else (batch * tokens, heads * size))


def token_axis(layout: Layout) -> int:
    """Where BNLD of rank 4, BLND and BLW keep the tokens."""
    return 2 if layout is Layout.BNLD else 1
