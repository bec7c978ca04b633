"""Bodies of experts in a region: which first products feed which down product."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.activation import TOLERANCE, Fit, fit
from ortmoe_cli.moe.bias import Added
from ortmoe_cli.moe.products import Array, Product
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.samples import Samples

_FEW = 2


@dataclass(frozen=True)
class Body:
    """One feed-forward network of the graph: first products (one, or gate and up), the down product, and how the
    rows of one become the rows of the other (None if no token came here)."""

    first: tuple[Product, ...]
    down: Product
    fit: Fit | None


@dataclass(frozen=True)
class Feeding:
    """A down product and the first products that its data may come from."""

    down: Product
    first: tuple[Product, ...]


def feedings(index: Index, cone: Cone, region: Cut, products: Sequence[Product]) -> list[Feeding]:
    """Every product that other products feed, those fed by none themselves: the shape of a feed-forward network."""
    behind: dict[str, frozenset[int]] = {}
    by_node = {p.node: p for p in products}
    data_behind: dict[int, frozenset[int]] = {}
    for i in region.nodes:
        reads = [name for name in index.reads(i) if name in cone.hidden and name != cone.hidden_states]
        union = frozenset[int]().union(*(behind.get(name, frozenset()) for name in reads))
        if i in by_node:
            data_behind[i] = behind.get(by_node[i].data, frozenset())
            union = frozenset({i})
        for name in index.outputs(i):
            behind[name] = union
    found = []
    for p in products:
        first = [by_node[i] for i in sorted(data_behind[p.node])]
        if first and not any(data_behind[f.node] for f in first):
            found.append(Feeding(p, tuple(first)))
    return found


class Rows:
    """The rows that go into and come out of products, with biases, over all samples."""

    def __init__(self, samples: Samples, biases: dict[int, Added | None]) -> None:
        self._samples, self._biases = samples, biases

    def into(self, product: Product) -> Array:
        """(n, inputs)"""
        return self._samples.data(product)

    def after(self, product: Product) -> Array:
        """(n, outputs), bias added."""
        added, out = self._biases.get(product.node), self._samples.out(product)
        if added is None or added.post == product.out:
            return out
        return self._samples.rows_of(added.post, out.shape[1], added.before, added.own)


def pair(feeding: Feeding, ordinal: int, rows: Rows, scalars: Sequence[float], guess: Fit | None = None) -> Body | None:
    """The body of a down product: of all first products behind it (after a concatenation, those of every expert), the
    ones whose values explain its data. `ordinal`: which feeding this is, a hint where to look first; `guess`: the
    fit of another body."""
    down = rows.into(feeding.down)
    best: Body | None = None
    for first in _groups(feeding.first, ordinal):
        after = [rows.after(p) for p in first]
        if any(len(rows_) != len(down) for rows_ in after):
            continue
        if not len(down):
            best = best or Body(first, feeding.down, None)
            continue
        try:
            found = fit(down, after, scalars, guess)
        except ValueError:
            continue
        if best is None or best.fit is None or found.error < best.fit.error:
            best = Body(first, feeding.down, found)
        if found.error <= TOLERANCE:
            break
    return best


def _groups(first: Sequence[Product], ordinal: int) -> Iterator[tuple[Product, ...]]:
    """Products that may belong together: all of them if few, else those with the same data, the likeliest first."""
    if len(first) <= _FEW:
        yield tuple(first)
    groups: dict[str, list[Product]] = {}
    for p in first:
        groups.setdefault(p.data, []).append(p)
    ordered = [tuple(g) for g in groups.values() if len(g) <= _FEW]
    if len(ordered) == 1 and len(first) <= _FEW:
        return
    start = ordinal % len(ordered) if ordered else 0
    yield from ordered[start:]
    yield from ordered[:start]
