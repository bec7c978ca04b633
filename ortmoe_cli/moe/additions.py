"""What a block adds to its routed experts without asking the router: shared experts, residuals."""

from collections.abc import Iterable

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import VIEWS, behind_views
from ortmoe_cli.moe.bias import find_bias
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.region import Cone, Cut


def border(index: Index, cone: Cone, region: Cut) -> list[str]:
    """Tensors made from X0 alone that meet something routed, in graph order; one for all views of the same."""
    found: dict[str, str] = {}
    for i in region.nodes:
        if not any(name in cone.routed for name in index.outputs(i)):
            continue
        for name in index.reads(i):
            if name in cone.hidden and name not in cone.routed:
                found.setdefault(behind_views(index, name), name)
    return list(found.values())


def outcome_of(index: Index, cone: Cone, region: Cut, down: Product) -> set[str]:
    """A product's result, also with its bias, in all its views, also stacked with those of others."""
    found = set(_views(index, region, down.out))
    added = find_bias(index, cone, region, down)
    if added is not None:
        found |= set(_views(index, region, added.post))
    return found


def _views(index: Index, region: Cut, tensor: str) -> Iterable[str]:
    inside, stack = frozenset(region.nodes), [tensor]
    while stack:
        name = stack.pop()
        yield name
        stack += [
            index.outputs(i)[0] for i in index.consumers(name) if i in inside and index.op(i) in VIEWS | {"Concat"}
        ]
