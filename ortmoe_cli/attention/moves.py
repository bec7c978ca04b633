"""The way from an operand of a product up to the tensor with its heads: what moves them without losing anything.

A step counts only if structure says that it works alike at every size. A factor that is no constant of the graph, or a
slice that cuts when there are more tokens, is not climbed: the core stays below it, and the graph goes on computing it.
"""

from collections.abc import Sequence
from itertools import pairwise

from ortmoe_cli.attention.anchor import data_inputs
from ortmoe_cli.attention.fixed import is_fixed
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.probe import Probe

_VIEWS = {
    "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Tile", "Identity", "Cast", "CastLike", "Flatten",
}  # fmt: skip
_OTHERS = {"Dropout", "Slice", "Split", "Concat", "Gather", "Mul", "Div"}
_CHAIN = 24


class Moves:
    """Chains of moves of one graph, at one probe and `far` longer ones."""

    def __init__(self, index: Index, probe: Probe, far: Sequence[Probe]) -> None:
        self._index, self._probe, self._far = index, probe, far

    def chain(self, tensor: str) -> list[str]:
        """The tensors that an operand is moved from, nearest first, up to a cache or a computation."""
        chain, index = [tensor], self._index
        while len(chain) < _CHAIN:
            i = index.producer(chain[-1])
            if i is None or index.op(i) not in _VIEWS | _OTHERS:
                break
            data = list(dict.fromkeys(data_inputs(index, self._probe, i)))
            if len(data) != 1 or (index.op(i) == "Div" and index.inputs(i)[0] != data[0]):
                break
            chain.append(data[0])
        return chain

    def clean(self, tensor: str) -> list[str]:
        """As much of the chain as works alike at every size."""
        chain = self.chain(tensor)
        for k, (made, read) in enumerate(pairwise(chain)):
            if not self._is_clean(made, read):
                return chain[: k + 1]
        return chain

    def first_odd(self, tensor: str) -> str:
        """The operator at which `clean` ends before the chain does, '' if it does not."""
        chain = self.chain(tensor)
        return next((self._op(made) for made, read in pairwise(chain) if not self._is_clean(made, read)), "")

    def _op(self, tensor: str) -> str:
        i = self._index.producer(tensor)
        return "" if i is None else self._index.op(i)

    def _is_clean(self, made: str, read: str) -> bool:
        index = self._index
        i = index.producer(made)
        assert i is not None
        op, inputs = index.op(i), index.inputs(i)
        others = [name for name in inputs if name and name != read]
        if op in _VIEWS:
            return inputs[0] == read
        if op in ("Mul", "Div"):
            return all(is_fixed(index, self._probe, self._far, name) for name in others)
        if op == "Slice":
            return inputs[0] == read and self._keeps_all(made, read) and self._is_constant(*inputs[4:])
        if op == "Gather":
            return inputs[0] == read and self._is_constant(*others)
        if op == "Concat":
            return not others
        return op == "Dropout" and inputs[0] == read and len([name for name in inputs if name]) < 3

    def _keeps_all(self, made: str, read: str) -> bool:
        """Whether a slice is as long as what it is cut from, for few tokens and for very many."""
        return keeps_all(made, read, (self._probe, *self._far))

    def _is_constant(self, *names: str) -> bool:
        return all(not name or self._index.is_constant(name) for name in names)


def keeps_all(made: str, read: str, probes: Sequence[Probe]) -> bool:
    """Whether `made` is as long as `read`, at the first of these probes and wherever the graph can be evaluated."""
    shapes = [(probe.shape(made), probe.shape(read)) for probe in probes]
    known = [(after, before) for after, before in shapes if after is not None or before is not None]
    return len(known) > 1 and known[0] == shapes[0] and all(after == before for after, before in known)
