"""From the products of a region to its experts: bodies paired, activation fitted, biases attached."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.activation import TOLERANCE, Fit
from ortmoe_cli.moe.additions import border, outcome_of
from ortmoe_cli.moe.anchor import VIEWS
from ortmoe_cli.moe.bias import Added, find_bias
from ortmoe_cli.moe.bodies import Body, Feeding, Rows, feedings, pair
from ortmoe_cli.moe.experts import Expert, Experts, Source
from ortmoe_cli.moe.folded import unfold
from ortmoe_cli.moe.matrices import bias, entries, matrix
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.samples import Samples

_REPEATS = VIEWS | {"Expand", "Tile", "Transpose", "Gather", "GatherElements", "GatherND"}
"""Operators by which rows of hidden states are laid out for the experts."""


@dataclass(frozen=True, eq=False)
class Piecewise:
    """The parts of a region, and where their values are read."""

    index: Index
    cone: Cone
    region: Cut
    products: tuple[Product, ...]
    source: Source
    scalars: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Assembly:
    """experts: of all routed bodies, in graph or stack order; stacked: they are entries of stacked weights;
    unrouted: the bodies work on every token; input: the tensor (T,H) that they read; own: tensors that hold a body's
    result, by body, where bodies are unrouted and single."""

    experts: Experts
    stacked: bool
    unrouted: bool
    input: str
    own: tuple[frozenset[str], ...]


def assemble(parts: Piecewise, samples: Samples, width: int, routed: int) -> Assembly:
    """The experts of a region, as far as they can be told without the routing among `routed`. Raises Refused."""
    biases = {p.node: find_bias(parts.index, parts.cone, parts.region, p) for p in parts.products}
    rows = Rows(samples, biases)
    usable = [f for f in feedings(parts.index, parts.cone, parts.region, parts.products) if _fits(f, samples, width)]
    if not usable:
        raise Refused("MOE108", "no feed-forward network of two or three products was found behind the router")
    bodies = _bodies(parts, usable, rows)
    bodies = _routed(parts, bodies, routed)
    if len(bodies) == 1 and _is_folded(parts, bodies[0]):
        one = unfold(parts.source, samples, bodies[0], biases, parts.scalars, routed)
        experts = Experts(one.experts, one.fit.activation, one.fit.layout, one.inner)
        return Assembly(experts, True, False, _input(parts.index, parts.cone, bodies), (frozenset(),))
    activation = _common(bodies)
    stacked = entries(parts.source, bodies[0].down) > 1
    members: list[Expert] = []
    for body in bodies:
        members += _experts(parts.source, samples, body, biases, activation, entries(parts.source, body.down))
    widths = {b.down.inputs(samples.first(b.down.data)) for b in bodies}
    if len(widths) > 1:
        raise Refused("MOE113", f"experts have the inner widths {', '.join(map(str, sorted(widths)))}")
    inner = widths.pop()
    unrouted = not any(b.down.out in parts.cone.routed for b in bodies)
    own = [outcome_of(parts.index, parts.cone, parts.region, b.down) for b in bodies] if not stacked else []
    return Assembly(
        Experts(tuple(members), activation.activation, activation.layout, inner),
        stacked,
        unrouted,
        _input(parts.index, parts.cone, bodies),
        tuple(frozenset(names) for names in own),
    )


def _is_folded(parts: Piecewise, body: Body) -> bool:
    """Whether the routing acts on a single network's inner values."""
    return entries(parts.source, body.down) == 1 and routing_inside(parts.cone, body.first, body.down)


def routing_inside(cone: Cone, first: Sequence[Product], down: Product) -> bool:
    """Whether the routing acts between the first products and the down product, not by choosing rows or weights."""
    return down.data in cone.routed and not any(p.data in cone.routed or p.routed for p in first)


def _fits(feeding: Feeding, samples: Samples, width: int) -> bool:
    """Hidden width in and out."""
    return samples.out(feeding.down).shape[1] == width and all(samples.data(p).shape[1] == width for p in feeding.first)


def _bodies(parts: Piecewise, usable: Sequence[Feeding], rows: Rows) -> list[Body]:
    """Paired bodies; of bodies that pick from the same stacked weights, the busiest stands for all."""
    found: dict[tuple[object, ...], Body] = {}
    size: dict[tuple[object, ...], int] = {}
    guess: Fit | None = None
    for ordinal, feeding in enumerate(usable):
        count = len(rows.into(feeding.down))
        stack = entries(parts.source, feeding.down) > 1
        products = (feeding.down, *feeding.first)
        key = tuple(_place(parts.source, p) for p in products) if stack else (feeding.down.node,)
        if size.get(key, -1) >= count:
            continue
        body = pair(feeding, ordinal, rows, parts.scalars, guess)
        if body is not None:
            found[key], size[key] = body, count
            guess = body.fit or guess
    if not found:
        raise Refused("MOE108", "the products behind the router do not form feed-forward networks")
    return list(found.values())


def _place(source: Source, product: Product) -> tuple[object, ...]:
    """Where a product's weight lies: the same values in the same order, whatever the tensor is called."""
    value = source(product.base)
    return value.__array_interface__["data"][0], value.strides, value.shape


def _routed(parts: Piecewise, bodies: Sequence[Body], count: int) -> list[Body]:
    """Without what is shared: a body that no routing touches, next to bodies that it does, or one whose result is
    changed before it meets the routing, unless fewer than `count` experts were left then."""
    stacks = [b for b in bodies if entries(parts.source, b.down) > 1]
    if stacks:
        bases = {tuple(_place(parts.source, p) for p in (b.down, *b.first)) for b in stacks}
        if len(bases) > 1:
            raise Refused("MOE108", f"{len(bases)} sets of stacked experts behind one router")
        return stacks
    chosen = [b for b in bodies if b.down.out in parts.cone.routed]
    if chosen:
        return chosen
    meets = set(border(parts.index, parts.cone, parts.region))
    meets |= {view for name in meets for view in _behind(parts.index, name)}
    plain = [b for b in bodies if outcome_of(parts.index, parts.cone, parts.region, b.down) & meets]
    return plain if len(plain) >= min(count, len(bodies)) else list(bodies)


def _behind(index: Index, tensor: str) -> list[str]:
    found = [tensor]
    while (i := index.producer(tensor)) is not None and index.op(i) in VIEWS:
        tensor = index.inputs(i)[0]
        found.append(tensor)
    return found


def _common(bodies: Sequence[Body]) -> Fit:
    """The activation that all bodies share."""
    fits = [b.fit for b in bodies if b.fit is not None]
    if not fits:
        raise Refused("MOE108", "no expert could be brought to work on a token")
    worst = max(fits, key=lambda f: f.error)
    if worst.error > TOLERANCE:
        raise Refused(
            "MOE105",
            "the activation of the experts is none that is known",
            f"closest: {worst.activation.describe()}, off by {worst.error:.1e}",
        )
    widths = Counter((f.activation.name, f.activation.gated, f.layout) for f in fits)
    if len(widths) > 1:
        kinds = sorted({f"{f.activation.describe()} ({f.layout.kind})" for f in fits})
        raise Refused("MOE113", f"experts differ: {', '.join(kinds)}")
    return max(fits, key=lambda f: f.activation.limit if f.activation.limit < float("inf") else -1.0)


def _experts(
    source: Source, samples: Samples, body: Body, biases: dict[int, Added | None], fit: Fit, count: int
) -> list[Expert]:
    for product in body.first:
        if entries(source, product) != count:
            raise Refused("MOE113", f"{entries(source, product)} first and {count} second matrices of experts")
    made = []
    for e in range(count):
        which = e if count > 1 else None
        made.append(
            Expert(
                tuple(matrix(source, samples, p, which) for p in body.first),
                tuple(bias(source, samples, p, biases[p.node], which, count) for p in body.first),
                matrix(source, samples, body.down, which),
                bias(source, samples, body.down, biases[body.down.node], which, count),
            )
        )
    return made


def _input(index: Index, cone: Cone, bodies: Sequence[Body]) -> str:
    """The tensor of hidden states that the experts read."""
    found = {input_of(index, cone, p.data) for b in bodies for p in b.first}
    if len(found) != 1:
        raise Refused("MOE108", f"the experts read {len(found)} different tensors")
    return found.pop()


def input_of(index: Index, cone: Cone, tensor: str) -> str:
    """What an expert's data was picked, repeated or reshaped from."""
    while tensor != cone.hidden_states:
        i = index.producer(tensor)
        if i is None or not (tensor in cone.routed or index.op(i) in _REPEATS):
            break
        sources = [name for name in index.inputs(i) if name in cone.hidden]
        if not sources:
            break
        tensor = sources[0]
    return tensor


def reads_chosen_rows(index: Index, cone: Cone, products: Sequence[Product]) -> bool:
    """Whether what products read are hidden states that were only picked: the routing adds nothing to them."""
    stack, seen = [p.data for p in products if p.data in cone.routed], set[str]()
    while stack:
        name = stack.pop()
        i = index.producer(name)
        if name in seen or i is None or name == cone.hidden_states or name not in cone.routed:
            continue
        seen.add(name)
        parts = [n for n in index.inputs(i) if n]
        if index.op(i) in ("Add", "Sub", "Sum") and any(n in cone.routed and n not in cone.hidden for n in parts):
            return False
        if any(name in index.outputs(p.node) for p in products):
            continue
        stack += [n for n in parts if n in cone.hidden]
    return True
