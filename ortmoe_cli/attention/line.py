"""The way of the scores from the product of queries and keys to the softmax, node by node.

Only what the fused operator can say may stand on it: constant factors, a softcap, known numbers that are added, known
conditions that keep keys out, sinks, the maximum that is taken away, casts and other shapes. Whether a factor is
constant is a question of structure: one that grows with the position looks like 1 as long as the probes are short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ortmoe_cli.attention.fixed import is_fill, is_fixed, is_repeated_constant, never_acts
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

PRODUCTS = ("MatMul", "com.microsoft.FusedMatMul", "Einsum")
VIEWS = {"Cast", "CastLike", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand"}
"""What leaves every score as it is."""
SHAPELESS = {"Cast", "CastLike", "Identity"}


@dataclass(frozen=True)
class Term:
    """What is known and decides which keys are seen: added, subtracted, or a condition that lets in or keeps out."""

    kind: Literal["add", "sub", "allow", "block"]
    tensor: str


@dataclass(frozen=True)
class Line:
    """`product` makes the scores, `nodes` lead from it to `biased`, the scores with all `terms`.

    Sinks join the biased scores, and their maximum is taken away from them, further down. `scaled`: factors come after
    a term. `plain_shape`: every node on the way works on each score alone, in the product's shape.
    """

    product: int
    nodes: tuple[int, ...]
    biased: str
    terms: tuple[Term, ...] = ()
    sinks: str = ""
    scaled: bool = False
    plain_shape: bool = True


def read_line(index: Index, probe: Probe, far: Sequence[Probe], entering: str) -> Line:
    """The line that ends in the softmax input `entering`. Raises Refused."""
    return _Reader(index, probe, far).read(entering)


class _Reader:
    """Walks upwards, so that what is met first comes last in the computation."""

    def __init__(self, index: Index, probe: Probe, far: Sequence[Probe]) -> None:
        self._index, self._probe, self._far = index, probe, far
        self._nodes: list[int] = []
        self._terms: list[Term] = []
        self._sinks = ""
        self._scaled_below = False
        """Whether a factor was met that works on all that is above."""
        self._scaled = False
        self._capped = False
        self._plain_shape = True
        self._restart = False
        """Whether the node just read stands after the biased scores, so that it is no part of the line."""

    def read(self, entering: str) -> Line:
        tensor, biased = entering, entering
        while True:
            i = self._index.producer(tensor)
            if i is None:
                raise self._unknown("an input of the graph")
            if self._index.op(i) in PRODUCTS and len(self._data(i)) == 2:
                break
            above = self._step(i, tensor)
            if self._restart:
                self._restart = False
                biased, self._nodes, self._plain_shape = above, [], True
            else:
                self._nodes.append(i)
            tensor = above
        return Line(
            i, tuple(reversed(self._nodes)), biased, tuple(reversed(self._terms)), self._sinks, self._scaled,
            self._plain_shape,
        )  # fmt: skip

    def _data(self, i: int) -> list[str]:
        index, probe = self._index, self._probe
        return [n for n in index.inputs(i) if n and not index.is_constant(n) and probe.value(n) is None]

    def _step(self, i: int, tensor: str) -> str:
        """The scores before node `i`."""
        op, inputs, data = self._index.op(i), self._index.inputs(i), self._data(i)
        if op == "Sub" and len(data) == 2:
            return self._without_maximum(inputs)
        if len(data) != 1:
            raise self._unknown(op)
        (scores,) = data
        others = [name for name in inputs if name and name != scores]
        if op in VIEWS and inputs[0] == scores:
            self._plain_shape &= op in SHAPELESS
        elif op in ("Mul", "Div", "Neg"):
            self._factor(op, inputs, scores, others)
        elif op == "Tanh":
            self._cap()
        elif op in ("Add", "Sub", "Where"):
            self._term(op, inputs, scores, others)
        elif op in ("Max", "Min", "Clip"):
            if not never_acts(self._index, self._probe, i, scores):
                raise Refused("GQA108", f"{op} limits the scores before the softmax; the operator does not")
        elif op == "Concat":
            self._join_sinks(i, tensor, inputs, scores)
        else:
            raise self._unknown(op)
        return scores

    def _without_maximum(self, inputs: tuple[str, ...]) -> str:
        """The scores before their maximum is taken away, which a softmax does not notice."""
        index, (scores, subtracted) = self._index, inputs
        maximum = index.producer(subtracted)
        rank = len(self._probe.shape(scores) or ())
        if maximum is None or index.op(maximum) != "ReduceMax" or index.inputs(maximum)[0] != scores:
            raise self._unknown("a difference of two computed tensors")
        reads = index.inputs(maximum)
        axes = self._probe.value(reads[1]) if len(reads) > 1 else index.attribute(maximum, "axes", None)
        numbers = [] if axes is None else [int(axis) for axis in axes]
        if numbers not in ([-1], [rank - 1]) or not index.attribute(maximum, "keepdims", 1):
            raise self._unknown("a maximum over other dimensions than the keys")
        self._only_before_softmax("the maximum is taken away")
        self._restart = True
        return scores

    def _factor(self, op: str, inputs: tuple[str, ...], scores: str, others: list[str]) -> None:
        if op == "Div" and inputs[0] != scores:
            raise self._unknown("a division by the scores")
        for name in others:
            if not is_fixed(self._index, self._probe, self._far, name):
                verb = "multiplied with" if op == "Mul" else "divided by"
                raise Refused("GQA108", f"the scores are {verb} '{name}', which is not a constant of the graph")
        self._scaled_below = True

    def _cap(self) -> None:
        if self._capped:
            raise self._unknown("a second Tanh")
        self._capped = True

    def _term(self, op: str, inputs: tuple[str, ...], scores: str, others: list[str]) -> None:
        """Something known that is added, or a condition."""
        if self._capped:
            raise Refused("GQA108", f"{op} changes the scores before they are capped (Tanh)")
        if op == "Where":
            condition, yes, no = inputs
            fill = no if yes == scores else yes
            if condition == scores or not is_fill(self._index, self._probe, fill):
                raise Refused(
                    "GQA108", f"a Where puts '{fill}' in place of scores; only a very negative constant keeps keys out"
                )
            term = Term("allow" if yes == scores else "block", condition)
        elif op == "Sub":
            if inputs[0] != scores:
                raise self._unknown("a difference from the scores")
            term = Term("sub", others[0])
        elif len(others) != 1:
            raise self._unknown("a sum of the scores with themselves")
        else:
            term = Term("add", others[0])
        self._scaled |= self._scaled_below
        self._terms.append(term)

    def _join_sinks(self, i: int, tensor: str, inputs: tuple[str, ...], scores: str) -> None:
        rank = len(self._probe.shape(tensor) or ())
        axis = self._index.attribute(i, "axis", 0)
        if len(inputs) != 2 or inputs[0] != scores or axis not in (-1, rank - 1) or self._sinks:
            raise self._unknown("Concat")
        if not is_repeated_constant(self._index, inputs[1]):
            raise Refused("GQA108", f"the additional column of the softmax, '{inputs[1]}', is not a constant per head")
        self._only_before_softmax("sinks join the scores")
        self._sinks, self._restart = inputs[1], True

    def _only_before_softmax(self, what: str) -> None:
        """Below it, nearer to the softmax, there may be casts and shapes only."""
        if self._terms or self._scaled_below or self._capped:
            raise self._unknown(f"more arithmetic after {what}")

    def _unknown(self, what: str) -> Refused:
        return Refused("GQA108", f"{what} between the scores and the softmax is not recognised")
