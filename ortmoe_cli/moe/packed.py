"""Values of packed weights for verification, as float32, no more experts at a time than the budget allows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.weights.pack import PackedWeight, materialise

Array = NDArray[Any]


class PackedValues:
    """The packed weights of one block with the experts filled in that were asked for. The arrays are as large as the
    whole, but pages that nobody writes or reads take no memory."""

    def __init__(self, weights: Sequence[PackedWeight], source: Source, budget: int) -> None:
        self._weights, self._source, self._budget = tuple(weights), source, budget
        self._values: dict[str, Array] = {}
        self._filled: set[int] = set()

    def _per_expert(self) -> int:
        return max(1, sum(4 * int(np.prod(w.shape[1:])) for w in self._weights))

    def room(self) -> int:
        """How many experts fit into the budget."""
        return self._budget // self._per_expert()

    def of(self, experts: Sequence[int]) -> dict[str, Array]:
        """Every weight, with at least these experts in it."""
        per_expert = self._per_expert()
        missing = sorted(set(experts) - self._filled)
        if not self._values or ((len(self._filled) + len(missing)) * per_expert > self._budget and missing):
            self._values = {w.name: np.zeros(w.shape, widen(np.empty(0, w.dtype)).dtype) for w in self._weights}
            self._filled, missing = set(), sorted(set(experts))
        for expert in missing:
            for weight in self._weights:
                self._values[weight.name][expert] = widen(materialise(weight, self._source, [expert])[0])
        self._filled.update(missing)
        return self._values
