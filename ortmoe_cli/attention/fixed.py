"""What is the same for every size and every input, by structure: constants, and what only repeats or reshapes them."""

from collections.abc import Sequence

import numpy as np

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Origin, Probe
from ortmoe_cli.graph.types import HALF

BLOCKED = -1e4
"""A bias at or below this keeps a key out."""
_ARRANGES = {
    "Expand", "Tile", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Cast", "CastLike", "Identity",
}  # fmt: skip
"""What repeats or views its first input; its other inputs decide the shape alone."""
_UNIFORM = {"Mul", "Div", "Add", "Sub", "Neg", "Max", "Min"}
_SMOOTH = {
    "Shape", "Gather", "Slice", "Cast", "CastLike", "Sqrt", "Pow", "Div", "Mul", "Reciprocal", "Unsqueeze", "Squeeze",
    "Identity", "Reshape", "Concat", "ConstantOfShape", "Expand", "Add", "ReduceProd",
}  # fmt: skip
"""What computes a scale from the size of a head, with no threshold on the way."""
_STEPS = 60
_HIGHEST, _HIGHEST_HALF = 1e30, 65504.0
"""Nothing that is computed with in earnest lies beyond, in single and in half precision."""


def is_repeated_constant(index: Index, name: str) -> bool:
    """Whether a tensor is a constant in another shape, repeated perhaps as often as the sizes want it."""
    for _ in range(_STEPS):
        if index.is_constant(name):
            return True
        i = index.producer(name)
        if i is None or index.op(i) not in _ARRANGES:
            return False
        name = index.inputs(i)[0]
    return False


def is_uniform(index: Index, name: str) -> bool:
    """Whether a tensor is one constant number (or constant numbers) everywhere, whatever its shape."""
    stack, seen = [name], {name}
    while stack:
        tensor = stack.pop()
        if index.is_constant(tensor):
            continue
        i = index.producer(tensor)
        if i is None or len(seen) > _STEPS:
            return False
        op = index.op(i)
        if op == "ConstantOfShape":
            continue
        if op not in _UNIFORM and op not in _ARRANGES:
            return False
        reads = index.inputs(i) if op in _UNIFORM else index.inputs(i)[:1]
        stack += [read for read in reads if read not in seen]
        seen.update(reads)
    return True


def is_fill(index: Index, probe: Probe, name: str) -> bool:
    """Whether a tensor is a number so low that a score that it replaces has no weight."""
    value = probe.value(name)
    return value is not None and bool(value.size) and bool(value.max() <= BLOCKED) and is_uniform(index, name)


def is_fixed(index: Index, probe: Probe, far: Sequence[Probe], name: str) -> bool:
    """Whether a number is a constant, or made of the size of a head alone (1/√D), by operators without thresholds.

    `far` are ever longer probes, up to more tokens than any model is given: a dimension that depends on them shows.
    """
    if index.is_constant(name):
        return True
    value = probe.value(name)
    there = [known for known in (longer.value(name) for longer in far) if known is not None]
    if value is None or not there or probe.origin(name) is not Origin.NONE:
        return False
    if any(value.shape != known.shape or not np.array_equal(value, known) for known in there):
        return False
    stack, seen = [name], {name}
    while stack:
        tensor = stack.pop()
        i = index.producer(tensor)
        if index.is_constant(tensor):
            continue
        if i is None or index.op(i) not in _SMOOTH or len(seen) > _STEPS:
            return False
        if index.op(i) != "Shape":
            stack += [read for read in index.inputs(i) if read and read not in seen]
            seen.update(index.inputs(i))
    return True


def never_acts(index: Index, probe: Probe, i: int, tensor: str) -> bool:
    """Whether a Max, Min or Clip of scores has bounds that no score reaches: the limits of the type."""
    limit = _HIGHEST_HALF if index.elem_type(tensor) in HALF else _HIGHEST
    op = index.op(i)
    bounds = [index.attribute(i, key, None) for key in ("min", "max")]
    lows, highs = [b for b in bounds[:1] if b is not None], [b for b in bounds[1:] if b is not None]
    for k, name in enumerate(index.inputs(i)):
        if not name or name == tensor:
            continue
        value = probe.value(name)
        if value is None or not is_uniform(index, name):
            return False
        low = op == "Max" or (op == "Clip" and k == 1)
        (lows if low else highs).extend(np.asarray(value, np.float64).reshape(-1).tolist())
    return all(low <= -limit for low in lows) and all(high >= limit for high in highs)
