"""Whether what stands behind a selection looks like experts: then it must be reported, fused or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.assemble import routing_inside
from ortmoe_cli.moe.bodies import Feeding, feedings
from ortmoe_cli.moe.dominators import PostDominators
from ortmoe_cli.moe.experts import rows_like
from ortmoe_cli.moe.nested import holds_products
from ortmoe_cli.moe.products import QUANTISED, Product, dequantised, find_products
from ortmoe_cli.moe.quantised.sources import shape_of as stored_shape
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.region import Cone, Cut, cone_of
from ortmoe_cli.weights.store import lookup

_MOST_CHAIN = 12
_MOST_NODES = 600


@dataclass(frozen=True)
class Evidence:
    """What was seen between the logits and the first tensor that all of them pass together with hidden states.

    bodies: feed-forward networks side by side; stacked: weights with one entry per expert, or all experts folded into
    one; quantised: operators on quantised weights; control: a node with matrix products in a body or function that
    hidden states go into; frozen: constant piece sizes of routed tokens.
    """

    bodies: int
    stacked: bool
    quantised: str
    control: str
    frozen: bool

    @property
    def convinces(self) -> bool:
        return self.bodies > 1 or self.stacked or bool(self.quantised) or bool(self.control)

    def reason(self, found: Refused) -> Refused:
        """The refusal with the code that names the real cause."""
        vague = found.code in ("MOE107", "MOE108", "MOE109", "MOE111")
        if vague and self.quantised:
            return Refused("MOE112", f"experts are quantised ({self.quantised})", found.message)
        if self.frozen and (vague or found.code in ("MOE101", "MOE110", "MOE114")):
            return Refused("MOE102", "the number of tokens of each expert is a constant from the traced example")
        if self.control and (vague or found.code in ("MOE101", "MOE110")):
            return Refused("MOE115", f"part of the block lies inside {self.control}", found.message)
        return found


def weigh(index: Index, cutter: Cutter, router: Router, where: tuple[Cone, Cut]) -> Evidence:
    """Look at the piece of graph behind a router."""
    cone, piece = where
    products = find_products(index, cone, piece)
    feeds = feedings(index, cone, piece, products)
    shapes: dict[tuple[int, ...], list[Feeding]] = {}
    for f in feeds:
        shapes.setdefault(_shape(index, cutter, f.down), []).append(f)
    folded = any(routing_inside(cone, f.first, f.down) for f in feeds)
    stacked = folded or any(_stacked(index, cutter, router, p) for f in feeds for p in (f.down, *f.first))
    quantised = [index.op(i) for i in piece.nodes if index.op(i) in QUANTISED]
    quantised += [op for p in products if (op := dequantised(index, p.base))]
    control = [i for i in piece.nodes if holds_products(index, cone, i)]
    return Evidence(
        max((_side_by_side(alike) for shape, alike in shapes.items() if len(shape) == 2), default=0),
        stacked,
        quantised[0] if len(quantised) > 1 else "",
        f"{index.op(control[0])} '{index.node(control[0]).name or index.outputs(control[0])[0]}'" if control else "",
        any(_is_frozen(index, cutter, cone, i) for i in piece.nodes),
    )


def _side_by_side(feeds: Sequence[Feeding]) -> int:
    """How many networks these are: those that share their first products count once, unless these read different rows
    (experts whose results were concatenated in between)."""
    rows = {p.data for f in feeds for p in f.first}
    return max(len({frozenset(p.node for p in f.first) for f in feeds}), min(len(feeds), len(rows)))


def ahead(index: Index, tree: PostDominators, router: Router) -> tuple[Cone, Cut]:
    """What is made of hidden states and logits up to the node where everything made from the logits has met hidden
    states, or so many nodes down."""
    end = min(len(index) - 1, router.node + _MOST_NODES * 4)
    cone = cone_of(index, router.hidden, router.logits, end)
    last = min(end, router.node + _MOST_NODES)
    for i in islice(tree.chain(router.logits), _MOST_CHAIN):
        if any(name in cone.hidden for name in index.outputs(i)) or i > end:
            last = i
            break
    made = {index.producer(name) for name in cone.hidden | cone.routed}
    return cone, Cut(tuple(sorted(n for n in made if n is not None and router.node < n <= last)), frozenset())


def shape_of(index: Index, cutter: Cutter, constant: str) -> tuple[int, ...] | None:
    """The shape of a constant, evaluated if need be; None where the runtime cannot."""
    shape = index.constant_shape(constant)
    if shape is None:
        try:
            shape = lookup(index, cutter, constant).shape
        except CutError:
            return None
    return shape


def _shape(index: Index, cutter: Cutter, product: Product) -> tuple[int, ...]:
    return rows_like(stored_shape(index, product.base) or shape_of(index, cutter, product.base) or ())


def _stacked(index: Index, cutter: Cutter, router: Router, product: Product) -> bool:
    shape = _shape(index, cutter, product)
    return len(shape) >= (2 if product.routed else 3) and shape[0] == router.experts


def _is_frozen(index: Index, cutter: Cutter, cone: Cone, i: int) -> bool:
    """A split of routed tokens into pieces of constant sizes."""
    names = index.inputs(i)
    if index.op(i) != "Split" or names[0] not in cone.routed or names[0] not in cone.hidden:
        return False
    sizes = index.attribute(i, "split")
    if len(names) > 1 and index.is_constant(names[1]):
        sizes = cutter.constant(names[1])
    return sizes is not None and index.attribute(i, "axis", 0) == 0 and np.size(sizes) > 1
