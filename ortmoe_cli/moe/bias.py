"""Biases: what is added to a product before anything else happens to it, also behind a concatenation of experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import VIEWS
from ortmoe_cli.moe.experts import Source, Vector
from ortmoe_cli.moe.products import Product, constant_behind
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.samples import Samples

_PASSING = VIEWS | {"Transpose"}


@dataclass(frozen=True)
class Added:
    """A bias was added to a product: `post` is the sum, `base` the constant that the bias comes from.

    `before`, `own`: if experts were concatenated first, the parts ahead of this product's and that part itself.
    """

    post: str
    base: str
    before: tuple[str, ...] = ()
    own: str = ""


def find_bias(index: Index, cone: Cone, region: Cut, product: Product) -> Added | None:
    """The addition that follows a product, if the next thing that happens to it is one."""
    if product.bias:
        base = constant_behind(index, cone, product.bias)
        return Added(product.out, base) if base else None
    inside = frozenset(region.nodes)
    tensor, own = product.out, ""
    before: tuple[str, ...] = ()
    while True:
        readers = {i for i in index.consumers(tensor) if i in inside and index.op(i) not in ("Shape", "Size")}
        if len(readers) != 1:
            return None
        (i,) = readers
        op = index.op(i)
        if op == "Add":
            (other,) = [name for name in index.inputs(i) if name != tensor] or [tensor]
            base = constant_behind(index, cone, other)
            return Added(index.outputs(i)[0], base, before, own) if base else None
        if op == "Concat" and not own:
            parts = index.inputs(i)
            own, before = tensor, parts[: parts.index(tensor)]
        elif op not in _PASSING:
            return None
        tensor = index.outputs(i)[0]


def wanted(added: Added) -> Iterator[str]:
    """The tensors whose values a bias is read from."""
    yield added.post
    yield from added.before
    if added.own:
        yield added.own


def vector(source: Source, samples: Samples, product: Product, added: Added, width: int, entries: int) -> Vector | None:
    """The bias of a product that belongs to a single expert: the constant itself, or the entry of it that was added.

    None if the constant is of another width. `entries`: how many experts it may hold a bias for.
    """
    table = source(added.base)
    if table.size == width:
        return Vector(added.base, None)
    if table.size != entries * width or table.shape[0] != entries:
        return None
    post = samples.rows_of(added.post, width, added.before, added.own)
    if not len(post):
        return None
    difference = post[0].astype(np.float64) - samples.out(product)[0]
    distance = np.abs(table.reshape(entries, width).astype(np.float64) - difference).max(axis=1)
    return Vector(added.base, int(distance.argmin()))
