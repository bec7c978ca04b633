"""Experts as data: which rows of which constants make up each of them, and what they compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.moe.activation import Activation, Layout
from ortmoe_cli.weights.pack import ALL, Rows

Array = NDArray[Any]
Source = Callable[[str], Array]


@dataclass(frozen=True)
class Matrix:
    """A matrix [outputs, inputs]: a constant of the graph, one entry of it if `expert` is given, perhaps transposed.

    rows, columns: the part of it (after transposing) that is this expert's; shape: what a flat entry is.
    """

    tensor: str
    expert: int | None
    transpose: bool
    rows: Rows = ALL
    columns: Rows = ALL
    shape: tuple[int, int] | None = None

    def read(self, source: Source) -> Array:
        array = source(self.tensor)
        array = array if self.expert is None else array[self.expert]
        array = array if self.shape is None else array.reshape(self.shape)
        return widen((array.T if self.transpose else array)[slice(*self.rows), slice(*self.columns)])


@dataclass(frozen=True)
class Vector:
    """A bias: a constant of the graph, or its entry `row`, or the elements `part` of that."""

    tensor: str
    row: int | None
    part: Rows = ALL

    def take(self, source: Source) -> Array:
        """The elements, in their own type."""
        array = source(self.tensor)
        return (array if self.row is None else array[self.row]).reshape(-1)[slice(*self.part)]

    def read(self, source: Source) -> Array:
        return widen(self.take(source))


@dataclass(frozen=True)
class Expert:
    """down · act(first · x + first_bias) + down_bias, with one or two first products."""

    first: tuple[Matrix, ...]
    first_bias: tuple[Vector | None, ...]
    down: Matrix
    down_bias: Vector | None


@dataclass(frozen=True)
class Experts:
    """The experts of a block (n of them, inner width I), all with one activation and layout."""

    members: tuple[Expert, ...]
    activation: Activation
    layout: Layout
    inner: int

    def outputs(self, source: Source, x: Array) -> Array:
        """What every expert makes of every token: X (T,H) to (T,n,H), float32, one expert in memory at a time."""
        result = np.empty((len(x), len(self.members), x.shape[1]), np.float32)
        x = np.ascontiguousarray(x, np.float32)
        for e, expert in enumerate(self.members):
            result[:, e] = self._output(source, expert, x)
        return result

    def scaled_outputs(self, source: Source, x: Array, scale: Array) -> Array:
        """What every expert makes of every token times its own number: X (T,H), scale (T,n) to (T,n,H)."""
        result = np.empty((len(x), len(self.members), x.shape[1]), np.float32)
        for e, expert in enumerate(self.members):
            result[:, e] = self._output(source, expert, (x * scale[:, e : e + 1]).astype(np.float32))
        return result

    def _output(self, source: Source, expert: Expert, x: Array) -> Array:
        first = [_affine(source, x, matrix, bias) for matrix, bias in zip(expert.first, expert.first_bias, strict=True)]
        with np.errstate(over="ignore"):
            inner = self.activation(*self.layout.split(first))
        return _affine(source, np.asarray(inner, np.float32), expert.down, expert.down_bias)


def _affine(source: Source, x: Array, matrix: Matrix, bias: Vector | None) -> Array:
    result = x @ matrix.read(source).T
    return result if bias is None else np.asarray(result + bias.read(source))


def rows_like(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without leading ones."""
    shape = tuple(shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
