"""Constants as numbers, quantised ones dequantised: what identification works on."""

import itertools
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.quantised.sources import stored
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.weights.store import SPILL, lookup
from ortmoe_cli.weights.stored import Lines, Matrix, Stored

Array = NDArray[Any]


class Reader:
    """Gives the values of constants, each made once; dequantised ones are float32, large ones of them lie in a file."""

    def __init__(self, index: Index, cutter: Cutter, values: dict[str, Array]) -> None:
        """What is made is kept in `values`."""
        self._index, self._cutter, self.values = index, cutter, values
        self._roots: dict[str, Array | None] = {}

    def __call__(self, name: str) -> Array:
        if name not in self.values:
            self.values[name] = lookup(self._index, self._cutter, name, self._root)
        return self.values[name]

    def _root(self, name: str) -> Array | None:
        if name not in self._roots:
            try:
                found = stored(self._index, name)
            except Refused:
                found = None
            readable = found is not None and len(found.shape) >= 2
            self._roots[name] = self._dequantised(found) if found is not None and readable else None
        return self._roots[name]

    def _dequantised(self, found: Stored) -> Array:
        model, shape = self._index.model, found.shape
        result = _room(shape)
        rows, columns = len(shape) - 2, len(shape) - 1
        for entry in itertools.product(*map(range, shape[:-2])):
            fixed = dict(enumerate(entry))
            matrix = Matrix(found, Lines(rows, range(shape[-2])), Lines(columns, range(shape[-1])), fixed)
            result[entry] = matrix.dequantised(model)
        return result


def _room(shape: tuple[int, ...]) -> Array:
    """An empty float32 array; a large one lies in a file, so that its pages do not count as our memory."""
    if 4 * int(np.prod(shape, dtype=np.int64)) < SPILL:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)
