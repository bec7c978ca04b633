"""The part of the graph between a router and the exit of its block, cut at the hidden states X0 and the logits L."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.dominators import PostDominators

_MOST_EXITS = 40
_MOST_ROUTERS = 4
_SHAPE_OPS = ("Shape", "Size")


@dataclass(frozen=True, eq=False)
class Cone:
    """What a router and its hidden states reach, up to the node `last`.

    hidden: tensors that hold values of X0, not only through L; routed: tensors that hold values of L;
    touched: all of these, and what depends on their shapes.
    """

    hidden_states: str
    logits: str
    last: int
    hidden: frozenset[str]
    routed: frozenset[str]
    touched: frozenset[str]


@dataclass(frozen=True, eq=False)
class Cut:
    """The nodes between (X0, L) and some tensors, in graph order, and what they read from elsewhere."""

    nodes: tuple[int, ...]
    outside: frozenset[str]


def exits(index: Index, tree: PostDominators, router: Router, end: int) -> list[str]:
    """Tensors that everything computed from L passes, nearest first; those made before the node `end`, if any are."""
    found = list(islice(tree.chain(router.logits), _MOST_EXITS))
    return [
        name
        for i in [i for i in found if i < end] or found
        for name in index.outputs(i)
        if name and (index.consumers(name) or name in index.graph_outputs)
    ]


def next_router(index: Index, router: Router, routers: Iterable[Router]) -> int:
    """The node of the first router that this one's logits lead to, or the number of nodes. No block goes beyond it."""
    later = sorted((r for r in routers if r.node > router.node), key=lambda r: r.node)
    for other in later[:_MOST_ROUTERS]:
        if other.logits in _Reach(index, other.node).forward([router.logits], _SHAPE_OPS):
            return other.node
    return len(index)


def cone_of(index: Index, hidden_states: str, logits: str, last: int) -> Cone:
    """The cone of X0 and L up to a node."""
    reach = _Reach(index, last)
    hidden = reach.forward([hidden_states], _SHAPE_OPS, stop=(logits,))
    routed = reach.forward([logits], _SHAPE_OPS)
    touched = reach.forward([hidden_states, logits], ())
    return Cone(hidden_states, logits, last, hidden, routed, touched)


def cut(index: Index, cone: Cone, outputs: Iterable[str]) -> Cut:
    """What has to be computed for `outputs` from X0 and L."""
    nodes, outside, seen = set[int](), set[str](), set[str]()
    stack = list(outputs)
    while stack:
        name = stack.pop()
        if name in seen or name in (cone.hidden_states, cone.logits):
            continue
        seen.add(name)
        if index.is_constant(name):
            continue
        i = index.producer(name)
        if name not in cone.touched or i is None:
            outside.add(name)
        elif i not in nodes:
            nodes.add(i)
            stack.extend(index.reads(i))
    return Cut(tuple(sorted(nodes)), frozenset(outside))


@dataclass(frozen=True)
class _Reach:
    index: Index
    last: int

    def forward(self, starts: Iterable[str], skip: Collection[str], stop: Collection[str] = ()) -> frozenset[str]:
        """Every tensor made from `starts` by nodes up to `last`."""
        found = set(starts)
        stack = list(found)
        while stack:
            for name in self._after(stack.pop(), skip):
                if name not in found and name not in stop:
                    found.add(name)
                    stack.append(name)
        return frozenset(found)

    def _after(self, name: str, skip: Collection[str]) -> Iterator[str]:
        for i in self.index.consumers(name):
            if i <= self.last and self.index.op(i) not in skip:
                yield from (output for output in self.index.outputs(i) if output)
