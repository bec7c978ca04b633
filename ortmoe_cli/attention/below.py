"""From the softmax to the product with the values: only what leaves every weight as it is may stand there."""

import numpy as np

from ortmoe_cli.attention.line import PRODUCTS
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_VIEWS = {"Cast", "CastLike", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"}
_TESTS = {"IsNaN", "IsInf", "Not"}
"""What the guard against rows without any key asks of the weights."""
_TRAINING_INPUT = 2


def find_values(index: Index, probe: Probe, softmax: int, sinks: bool) -> tuple[int, str]:
    """The product of attention weights and values, and the weights' name there. Raises Refused."""
    found: dict[int, str] = {}
    weights, stack = {index.outputs(softmax)[0]}, [index.outputs(softmax)[0]]
    cut = 0
    while stack:
        name = stack.pop()
        for i in dict.fromkeys(index.consumers(name)):
            op = index.op(i)
            if op in PRODUCTS:
                found[i] = name
                continue
            if op in ("Shape", "Size", *_TESTS):
                continue
            cut += op in ("Slice", "Split")
            if not _keeps(index, probe, i, name, weights, sinks):
                raise Refused("GQA108", f"{op} changes the attention weights before they meet the values")
            made = index.outputs(i)[0]
            if made not in weights:
                weights.add(made)
                stack.append(made)
    if len(found) != 1:
        raise Refused("GQA108", f"the attention weights are multiplied with {len(found)} tensors, not one")
    if cut != sinks:
        raise Refused("GQA108", "the attention weights are cut" if cut else "the sinks' column is not cut off")
    return found.popitem()


def _keeps(index: Index, probe: Probe, i: int, name: str, weights: set[str], sinks: bool) -> bool:
    """Whether a node hands on the weights `name` as they are."""
    op, inputs = index.op(i), index.inputs(i)
    if op in _VIEWS:
        return inputs[0] == name
    if op == "Dropout":
        training = inputs[_TRAINING_INPUT] if len(inputs) > _TRAINING_INPUT else ""
        mode = probe.value(training) if training and index.is_constant(training) else None
        return inputs[0] == name and (not training or (mode is not None and not mode.any()))
    if op == "Where":
        return _is_guard(index, probe, inputs, weights)
    return sinks and inputs[0] == name and op in ("Slice", "Split") and _drops_last(index, probe, i, name)


def _is_guard(index: Index, probe: Probe, inputs: tuple[str, ...], weights: set[str]) -> bool:
    """Whether a Where puts zero where weights are not a number, and only there."""
    condition, yes, no = inputs
    negated, test = False, index.producer(condition)
    while test is not None and index.op(test) == "Not":
        negated, test = not negated, index.producer(index.inputs(test)[0])
    if test is None or index.op(test) != "IsNaN" or index.inputs(test)[0] not in weights:
        return False
    kept, zero = (yes, no) if negated else (no, yes)
    value = probe.value(zero)
    return kept in weights and index.is_constant(zero) and value is not None and not value.any()


def _drops_last(index: Index, probe: Probe, i: int, name: str) -> bool:
    """Whether a Slice or Split takes all columns but the last, the sinks', by constants."""
    shape, inputs = probe.shape(name), index.inputs(i)
    if shape is None:
        return False
    if index.op(i) == "Split":
        sizes = probe.value(inputs[1]) if len(inputs) > 1 else None
        return sizes is not None and list(sizes) == [shape[-1] - 1, 1] and not index.consumers(index.outputs(i)[1])
    if any(not index.is_constant(read) for read in inputs[1:] if read):
        return False
    values = [probe.value(read) if read else None for read in inputs[1:]]
    starts, ends, axes, steps = (
        values[k] if k < len(values) and values[k] is not None else index.attribute(i, key, None)
        for k, key in enumerate(("starts", "ends", "axes", "steps"))
    )
    last = len(shape) - 1
    return (
        starts is not None
        and ends is not None
        and [int(n) for n in starts] == [0]
        and [int(n) for n in ends] == [-1]
        and [int(n) for n in (axes if axes is not None else [0])] in ([-1], [last])
        and bool(np.all(np.asarray(steps if steps is not None else 1) == 1))
    )
