"""Gives memory-mapped pages back: pages once read count as our memory while a view is held."""

import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def drop_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Forget the pages of the files behind these arrays. They are read again when needed."""
    for base in {id(base): base for array in arrays if (base := _mapping(array)) is not None}.values():
        if hasattr(mmap, "MADV_DONTNEED"):
            base.madvise(mmap.MADV_DONTNEED)


def _mapping(array: NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None
