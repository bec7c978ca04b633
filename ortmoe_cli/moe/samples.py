"""What a block computed on some probes: the values of its inner tensors, run by run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.products import Product

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One evaluation: X (T,H), L (T,E), and the values of inner tensors."""

    hidden: Array
    logits: Array
    values: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Samples:
    """Several runs of one region."""

    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        return sum(len(run.hidden) for run in self.runs)

    @property
    def hidden(self) -> Array:
        return np.concatenate([run.hidden for run in self.runs])

    @property
    def logits(self) -> Array:
        return np.concatenate([run.logits for run in self.runs])

    def __contains__(self, name: str) -> bool:
        return name in self.runs[0].values

    def first(self, name: str) -> Array:
        """The value in the first run."""
        return self.runs[0].values[name]

    def per_token(self, name: str, width: int) -> Array | None:
        """A tensor of `width` numbers per token as (T, width), all runs together; None if it is not one."""
        parts = []
        for run in self.runs:
            value = run.values[name]
            if value.size != len(run.hidden) * width:
                return None
            parts.append(value.reshape(-1, width))
        return np.concatenate(parts)

    def data(self, product: Product) -> Array:
        """The product's data operand (n, inputs)."""
        return np.concatenate([product.data_rows(run.values[product.data]) for run in self.runs])

    def out(self, product: Product) -> Array:
        """The product's result (n, outputs)."""
        return np.concatenate([product.out_rows(run.values[product.out]) for run in self.runs])

    def rows_of(self, name: str, width: int, before: Sequence[str] = (), own: str = "") -> Array:
        """A tensor as rows of `width`; of a concatenation `before` only those that came from its part `own`."""
        parts = []
        for run in self.runs:
            rows = _rows(run.values[name], width)
            if own:
                start = sum(run.values[part].size // width for part in before)
                rows = rows[start : start + run.values[own].size // width]
            parts.append(rows)
        return np.concatenate(parts)


def _rows(value: Array, width: int) -> Array:
    """The axis of this size moved to the end (the last one if several have it), the others flattened."""
    axes = [axis for axis, size in enumerate(value.shape) if size == width]
    axis = axes[-1] if axes else -1
    return np.moveaxis(value, axis, -1).reshape(-1, width)
