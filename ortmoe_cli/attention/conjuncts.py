"""A mask taken apart: each part alone keeps keys out, so one that hides the future does so for the whole mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ortmoe_cli.attention.fixed import BLOCKED, is_fill
from ortmoe_cli.attention.line import Term
from ortmoe_cli.attention.moves import keeps_all
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_PASSES = {"Cast", "CastLike", "Identity", "Unsqueeze", "Expand"}
_DEPTH = 40


@dataclass(frozen=True)
class Conjunct:
    """Keeps a key out where `tensor` is very negative (add), very large (sub), false (allow) or true (block)."""

    kind: Literal["add", "sub", "allow", "block"]
    tensor: str

    def blocked(self, value: np.ndarray) -> np.ndarray:
        """Where keys are kept out, bool."""
        if self.kind == "add":
            return np.asarray(value <= BLOCKED)
        if self.kind == "sub":
            return np.asarray(value >= -BLOCKED)
        return np.asarray(value != 0) if self.kind == "block" else np.asarray(value == 0)


def conjuncts(index: Index, probes: Sequence[Probe], terms: tuple[Term, ...]) -> tuple[Conjunct, ...]:
    """The parts of a mask, from the whole terms down to single comparisons. `probes` get longer and longer."""
    found: dict[Conjunct, None] = {}
    stack = [(Conjunct(term.kind, term.tensor), _DEPTH) for term in terms]
    while stack:
        conjunct, depth = stack.pop()
        if conjunct in found or not depth:
            continue
        found[conjunct] = None
        stack += [(part, depth - 1) for part in _parts(index, probes, conjunct)]
    return tuple(reversed(found))


def _parts(index: Index, probes: Sequence[Probe], conjunct: Conjunct) -> Iterator[Conjunct]:
    """What alone would keep a key out as well."""
    kind, tensor = conjunct.kind, conjunct.tensor
    i = index.producer(tensor)
    if i is None:
        return
    op, inputs, probe = index.op(i), index.inputs(i), probes[0]
    if op in _PASSES or (op in ("Reshape", "Slice") and keeps_all(tensor, inputs[0], probes)):
        yield Conjunct(kind, inputs[0])
    elif kind == "add":
        yield from _parts_of_sum(index, probe, op, inputs)
    elif op == "Not":
        yield Conjunct("block" if kind == "allow" else "allow", inputs[0])
    elif op in {"allow": ("And", "BitwiseAnd", "Mul"), "block": ("Or", "BitwiseOr"), "sub": ()}[kind]:
        yield from (Conjunct(kind, name) for name in inputs)


def _parts_of_sum(index: Index, probe: Probe, op: str, inputs: tuple[str, ...]) -> Iterator[Conjunct]:
    if op in ("Add", "Min"):
        yield from (Conjunct("add", name) for name in inputs)
    elif op == "Where":
        condition, yes, no = inputs
        if is_fill(index, probe, no):
            yield Conjunct("allow", condition)
            yield Conjunct("add", yes)
        elif is_fill(index, probe, yes):
            yield Conjunct("block", condition)
            yield Conjunct("add", no)
