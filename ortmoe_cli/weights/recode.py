"""Quantised experts of a model in the layout of QMoE: the same codes and scales in other places, nothing rounded.

QMoE wants unsigned codes [E, rows, inputs · bits / 8], scales [E, rows] or [E, rows, blocks], and zero points likewise
in packed codes. A group of the model may be several blocks of the node: then its scale is repeated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ortmoe_cli.graph.model import Model
from ortmoe_cli.weights.bits import pack, packed_length, unpack
from ortmoe_cli.weights.pack import ComputedWeight, PackedWeight, Piece, PlanError, Source, materialise
from ortmoe_cli.weights.stored import Matrix

Array = NDArray[Any]
Locate = Callable[[Piece], Matrix]
"""Gives the quantised matrix [outputs, inputs] that a piece takes its rows from."""
Part = Literal["codes", "scales", "zeros"]


@dataclass(frozen=True)
class Grid:
    """How a matrix of so many inputs is quantised. block 0: one scale per row."""

    bits: int
    block: int
    inputs: int

    @property
    def starts(self) -> range:
        """The first column of each block."""
        return range(0, self.inputs, self.block or self.inputs)

    def shape(self, part: Part, experts: int, rows: int) -> tuple[int, ...]:
        """The shape of one of the tensors of a weight."""
        if part == "codes":
            return experts, rows, packed_length(self.inputs, self.bits)
        if not self.block:
            return experts, rows if part == "scales" else packed_length(rows, self.bits)
        blocks = len(self.starts)
        return experts, rows, blocks if part == "scales" else packed_length(blocks, self.bits)

    def packed_zeros(self, zeros: Array) -> Array:
        """Zero points [rows, blocks], a byte each, as the node wants one expert's."""
        return pack(zeros, self.bits) if self.block else pack(zeros[:, 0], self.bits)


def common_block(matrices: list[Matrix], least: int = 16) -> int | None:
    """The largest block that suits all: 0 where every row of every matrix has a single scale, else a power of two that
    never crosses a border of groups; None if there is none."""
    if all(len(set(matrix.groups())) == 1 for matrix in matrices):
        return 0
    block = 1 << 12
    while block >= least:
        if all(_suits(matrix, block) for matrix in matrices):
            return block
        block //= 2
    return None


def _suits(matrix: Matrix, block: int) -> bool:
    groups = matrix.groups()
    if len(groups) % block:
        return False
    table = np.array(groups).reshape(-1, block)
    return bool((table == table[:, :1]).all())


@dataclass(frozen=True, kw_only=True)
class RecodedWeight(ComputedWeight):
    """One tensor of a quantised weight, made of the codes, scales or zero points of the model."""

    part: Part
    grid: Grid
    rows: int
    model: Model = field(repr=False, compare=False)
    locate: Locate = field(repr=False, compare=False)

    def slot(self, expert: int, source: Source) -> Array:
        wide = {"codes": self.shape[-1], "scales": len(self.grid.starts), "zeros": len(self.grid.starts)}[self.part]
        table = np.zeros((self.rows, wide), self.dtype)
        filled = 0
        for piece in self.pieces[expert]:
            taken = self._taken(piece)
            table[slice(*piece.target)] = taken
            filled += len(taken)
        if filled != self.rows:
            raise PlanError(f"'{self.name}', expert {expert}: {filled} of {self.rows} rows are filled")
        if self.part == "zeros":
            table = self.grid.packed_zeros(table)
        return table.reshape(self.shape[1:])

    def _taken(self, piece: Piece) -> Array:
        matrix = self.locate(piece)
        if self.part == "codes":
            return matrix.packed_codes(self.model)
        if self.part == "scales":
            return matrix.scales(self.model, self.grid.starts)
        return matrix.zeros(self.model, self.grid.starts)


def recoded(
    name: str, plan: PackedWeight, grid: Grid, model: Model, locate: Locate, scale_type: int, zeros: bool
) -> dict[Part, RecodedWeight]:
    """The tensors of a weight whose rows are laid out as in `plan`."""
    experts, rows = plan.shape[:2]
    types: dict[Part, int] = {"codes": TensorProto.UINT8, "scales": scale_type}
    if zeros:
        types["zeros"] = TensorProto.UINT8
    return {
        part: RecodedWeight(
            f"{name}_{part}",
            elem_type,
            grid.shape(part, experts, rows),
            plan.pieces,
            part=part,
            grid=grid,
            rows=rows,
            model=model,
            locate=locate,
        )
        for part, elem_type in types.items()
    }


@dataclass(frozen=True, kw_only=True)
class DecodedWeight(ComputedWeight):
    """What a quantised weight stands for, [E, rows, inputs] in float32: the proof that its bytes are right."""

    grid: Grid
    codes: PackedWeight
    scales: PackedWeight
    zeros: PackedWeight | None

    def slot(self, expert: int, source: Source) -> Array:
        grid, rows = self.grid, self.shape[1]
        blocks = len(grid.starts)
        codes = unpack(materialise(self.codes, source, [expert])[0], grid.bits, grid.inputs).astype(np.float32)
        scales = np.asarray(materialise(self.scales, source, [expert])[0], np.float32).reshape(rows, blocks)
        if self.zeros is None:
            zeros = np.full((rows, blocks), 2 ** (grid.bits - 1), np.float32)
        else:
            data = materialise(self.zeros, source, [expert])[0]
            shape = (rows, blocks) if grid.block else (rows,)
            zeros = unpack(data, grid.bits, shape[-1]).reshape(rows, blocks).astype(np.float32)
        wide = grid.block or grid.inputs
        return (codes - np.repeat(zeros, wide, axis=1)) * np.repeat(scales, wide, axis=1)


def decoded(name: str, plan: PackedWeight, grid: Grid, parts: Mapping[Part, PackedWeight]) -> DecodedWeight:
    """The float form of the tensors of a weight."""
    return DecodedWeight(
        name,
        TensorProto.FLOAT,
        (*plan.shape[:2], grid.inputs),
        plan.pieces,
        grid=grid,
        codes=parts["codes"],
        scales=parts["scales"],
        zeros=parts.get("zeros"),
    )
