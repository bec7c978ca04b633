"""Float experts rounded on the way to QMoE: plans like any other, carried out one expert at a time."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ortmoe_cli.graph.shadow import widen
from ortmoe_cli.weights.bits import pack
from ortmoe_cli.weights.pack import ComputedWeight, PackedWeight, Source, materialise
from ortmoe_cli.weights.quantise import Rounded, Scheme, quantise
from ortmoe_cli.weights.recode import Grid, Part

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class _Kept:
    """Scales and zero points of experts whose codes were asked for: they will be asked for next. The last that takes
    them lets go of them, so no more than those of one weight are ever held."""

    values: dict[int, tuple[Array, Array]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundedWeight(ComputedWeight):
    """One tensor of a weight that is rounded: `of` lays out its float rows."""

    part: Part
    of: PackedWeight
    scheme: Scheme
    scale_type: int
    last: bool
    kept: _Kept = field(repr=False, compare=False)

    @property
    def grid(self) -> Grid:
        return Grid(self.scheme.bits, self.scheme.block, self.of.shape[-1])

    def slot(self, expert: int, source: Source) -> Array:
        if self.part == "codes":
            found = self._rounded(expert, source)
            self.kept.values[expert] = found.scales, found.zeros
            return pack(found.codes, self.scheme.bits)
        if expert not in self.kept.values:
            found = self._rounded(expert, source)
            self.kept.values[expert] = found.scales, found.zeros
        scales, zeros = self.kept.values.pop(expert) if self.last else self.kept.values[expert]
        return (scales if self.part == "scales" else self.grid.packed_zeros(zeros)).reshape(self.shape[1:])

    def _rounded(self, expert: int, source: Source) -> Rounded:
        values = widen(materialise(self.of, source, [expert])[0])
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(self.scale_type))
        return quantise(np.asarray(values, np.float32), self.scheme, kind)


def rounded(name: str, plan: PackedWeight, scheme: Scheme) -> dict[Part, RoundedWeight]:
    """The tensors of a weight whose float rows are laid out as in `plan`; the scales get its type."""
    experts, rows, inputs = plan.shape
    grid, kept = Grid(scheme.bits, scheme.block, inputs), _Kept()
    types: dict[Part, int] = {"codes": TensorProto.UINT8, "scales": plan.elem_type}
    if not scheme.symmetric:
        types["zeros"] = TensorProto.UINT8
    last = list(types)[-1]
    return {
        part: RoundedWeight(
            f"{name}_{part}",
            elem_type,
            grid.shape(part, experts, rows),
            plan.pieces,
            part=part,
            of=plan,
            scheme=scheme,
            scale_type=plan.elem_type,
            last=part == last,
            kept=kept,
        )
        for part, elem_type in types.items()
    }
