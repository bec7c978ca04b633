"""Plans for the weights of the fused node: fc1 [E,2I,H] with gate and up rows interleaved, fc2 [E,H,I], and biases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.experts import Expert, Experts, Matrix, Source, Vector
from ortmoe_cli.weights.pack import ALL, PackedWeight, Piece, Rows

Array = NDArray[Any]

_GATE: Rows = (0, None, 2)
_UP: Rows = (1, None, 2)


@dataclass(frozen=True)
class Plan:
    """The weights of a node. Biases that have no simple plan are `constants` instead."""

    weights: dict[str, PackedWeight]
    constants: dict[str, Array]


def plan(experts: Experts, source: Source, width: int, elem_type: int, full_name: Callable[[str], str]) -> Plan:
    """Weights fc1, fc2, fc1_bias, fc2_bias (biases only if there are any), under the names that `full_name` gives."""
    count, inner = len(experts.members), experts.inner
    rows = inner if experts.layout.kind == "plain" else 2 * inner
    weights = {
        "fc1": PackedWeight(
            full_name("fc1"),
            elem_type,
            (count, rows, width),
            tuple(_matrix_pieces(experts, e) for e in experts.members),
        ),
        "fc2": PackedWeight(
            full_name("fc2"), elem_type, (count, width, inner), tuple((_piece(e.down),) for e in experts.members)
        ),
    }
    constants: dict[str, Array] = {}
    for name, size, vectors in (
        ("fc1_bias", rows, [_first_biases(experts, e) for e in experts.members]),
        ("fc2_bias", width, [((e.down_bias, ALL, ALL),) for e in experts.members]),
    ):
        if all(vector is None for expert in vectors for vector, _, _ in expert):
            continue
        if all(_is_plain(source, vector) for expert in vectors for vector, _, _ in expert):
            pieces = tuple(tuple(_vector_piece(v, s, t) for v, s, t in expert if v) for expert in vectors)
            weights[name] = PackedWeight(full_name(name), elem_type, (count, size), pieces)
        else:
            constants[name] = np.stack([_filled(source, size, expert) for expert in vectors])
    return Plan(weights, constants)


_Part = tuple[Vector | None, Rows, Rows]


def _sides(experts: Experts) -> list[tuple[int, Rows, Rows]]:
    """Which rows of which first product go where: (product, source rows, target rows)."""
    layout, inner = experts.layout, experts.inner
    if layout.kind == "plain":
        return [(0, ALL, ALL)]
    if layout.kind == "interleaved" and not layout.up_first:
        return [(0, ALL, ALL)]
    if layout.kind == "separate":
        parts: list[tuple[int, Rows]] = [(0, ALL), (1, ALL)]
    elif layout.kind == "halves":
        parts = [(0, (0, inner, 1)), (0, (inner, 2 * inner, 1))]
    else:
        parts = [(0, (0, None, 2)), (0, (1, None, 2))]
    gate, up = parts[::-1] if layout.up_first else parts
    return [(*gate, _GATE), (*up, _UP)]


def _matrix_pieces(experts: Experts, expert: Expert) -> tuple[Piece, ...]:
    return tuple(_piece(expert.first[p], source, target) for p, source, target in _sides(experts))


def _first_biases(experts: Experts, expert: Expert) -> tuple[_Part, ...]:
    return tuple((expert.first_bias[p], source, target) for p, source, target in _sides(experts))


def _piece(matrix: Matrix, source: Rows = ALL, target: Rows = ALL) -> Piece:
    rows = _of_these(matrix.rows, source)
    return Piece(matrix.tensor, matrix.expert, matrix.transpose, rows, target, matrix.columns, matrix.shape)


def _vector_piece(vector: Vector, source: Rows, target: Rows) -> Piece:
    return Piece(vector.tensor, vector.row, False, _of_these(vector.part, source), target)


def _of_these(rows: Rows, source: Rows) -> Rows:
    """Rows among rows, as one slice. `rows` have a start and an end, unless they are all."""
    if ALL in (rows, source):
        return source if rows == ALL else rows
    start, stop, step = rows
    assert start is not None
    assert stop is not None
    taken = range(start, stop, step)[slice(*source)]
    return taken.start, taken.stop, taken.step


def _is_plain(source: Source, vector: Vector | None) -> bool:
    return vector is not None and source(vector.tensor).ndim == (1 if vector.row is None else 2)


def _filled(source: Source, size: int, parts: Sequence[_Part]) -> Array:
    """A bias put together here and now, zero where an expert has none."""
    kinds = [source(vector.tensor).dtype for vector, _, _ in parts if vector]
    result = np.zeros(size, kinds[0] if kinds else np.float32)
    for vector, rows, target in parts:
        if vector:
            result[slice(*target)] = vector.take(source)[slice(*rows)]
    return result
