"""How far a model that rounds its own activations moves when a number within changes in its last digits.

Two orders of summation give results that differ by 1e-7. Where activations are quantised afterwards, such a difference
now and then tips a rounding, and outputs move by a thousandth. No fused model can be nearer to the original than the
original is to itself; how near that is can be measured.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index

ROUNDING = (
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    "com.microsoft.DynamicQuantizeMatMul",
    "com.microsoft.DynamicQuantizeLSTM",
    "com.microsoft.QuantizeLinear",
)
"""Operators that round activations."""
_CHANGE = 1e-6
"""The largest relative change; blocks were verified to be nearer than this to the original."""
_DRAWS = 8
_MARGIN = 3.0


def own_movement(
    index: Index,
    original: Cutter,
    values: Mapping[str, np.ndarray],
    exits: Sequence[str],
    movement: Callable[[Mapping[str, np.ndarray]], float],
) -> float:
    """The largest movement of the outputs, with a margin, when the tensors `exits` change in their last digits; 0 for a
    model that does not round activations."""
    if not exits or not index.nodes_of(*ROUNDING):
        return 0.0
    worst = 0.0
    try:
        inner = original.run(exits, values)
        for seed in range(_DRAWS):
            rng = np.random.default_rng(seed)
            changed = {
                name: (value * (1 + _CHANGE * rng.uniform(-1, 1, value.shape))).astype(value.dtype)
                for name, value in inner.items()
                if value.dtype.kind == "f"
            }
            worst = max(worst, movement(original.run(index.graph_outputs, {**values, **changed})))
    except CutError:
        return 0.0
    return _MARGIN * worst
