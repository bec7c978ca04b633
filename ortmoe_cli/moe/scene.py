"""The piece of graph behind a router, and what has to be looked at in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.values import constant_value
from ortmoe_cli.moe.additions import border
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.assemble import input_of
from ortmoe_cli.moe.bench import Bench
from ortmoe_cli.moe.bias import find_bias, wanted
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.sampling import Sampler, gathered_bytes, wanted_outputs

Array = NDArray[Any]

_MOST_SCALARS = 24


@dataclass(frozen=True, eq=False)
class Scene:
    """A router with the piece of graph behind it: the exits in question, nearest first, and the products between.

    constants: what `source` has read so far.
    """

    index: Index
    bench: Bench
    cone: Cone
    exits: tuple[str, ...]
    region: Cut
    products: tuple[Product, ...]
    source: Source
    constants: Mapping[str, Array]

    @property
    def router(self) -> Router:
        return self.bench.router


def sampler_of(scene: Scene) -> Sampler:
    """Runs the scene with everything that identification looks at."""
    inputs = {input_of(scene.index, scene.cone, p.data) for p in scene.products} - {scene.cone.hidden_states}
    edges = border(scene.index, scene.cone, scene.region)
    names = [*scene.exits, *_inner_tensors(scene), *routing_tensors(scene), *edges, *sorted(inputs)]
    return Sampler(
        scene.index,
        scene.bench,
        scene.region,
        wanted_outputs(names),
        chosen_per_token(scene.index, scene.bench, scene.router),
        gathered_bytes(scene.bench, scene.region, scene.products),
    )


def _inner_tensors(scene: Scene) -> list[str]:
    """What goes into products and comes out of them."""
    found: list[str] = []
    for p in scene.products:
        found += [p.data, p.out]
        added = find_bias(scene.index, scene.cone, scene.region, p)
        found += wanted(added) if added else []
    return found


def routing_tensors(scene: Scene) -> list[str]:
    """Small tensors that the router alone decides, in graph order: where ids and weights may be found."""
    index, cone = scene.index, scene.cone
    biases = [find_bias(index, cone, scene.region, p) for p in scene.products]
    weights = {p.base for p in scene.products} | {added.base for added in biases if added}
    at, tokens = scene.bench.typical()
    found = []
    for i in scene.region.nodes:
        outputs = [name for name in index.outputs(i) if name in cone.routed and name not in cone.hidden]
        if any(name in weights for name in index.reads(i)):
            weights.update(outputs)
            continue
        for name in outputs:
            shape = at.shape(name)
            size = None if shape is None else int(np.prod(shape))
            if not size or not tokens or (size % tokens == 0 and size <= tokens * scene.router.experts):
                found.append(name)
    return found


def chosen_per_token(index: Index, bench: Bench, router: Router) -> int:
    """k as far as the selections tell: the largest constant one up to E, else the number of selections."""
    found = []
    for pick in router.picks:
        names = index.inputs(pick)
        if index.op(pick) == "TopK" and len(names) > 1 and index.is_constant(names[1]):
            found.append(int(np.ravel(bench.cutter.constant(names[1]))[0]))
        elif index.op(pick) == "TopK" and index.attribute(pick, "k"):
            found.append(int(index.attribute(pick, "k")))
    found = [k for k in found if 0 < k <= router.experts]
    return max(found) if found else min(len(router.picks), router.experts)


def scalars(index: Index, region: Cut) -> tuple[float, ...]:
    """Constant numbers that the region computes with: what fitted parameters may snap to."""
    found: dict[float, None] = {}
    for i in region.nodes:
        numbers = [index.attribute(i, name) for name in ("alpha", "beta", "min", "max")]
        for name in index.inputs(i):
            producer = index.producer(name)
            if name in index.model.weights and index.model.weights[name].shape in ((), (1,)):
                numbers.append(index.model.array(name).reshape(-1)[0])
            elif producer is not None and index.op(producer) == "Constant":
                value = constant_value(index.node(producer))
                numbers += [value.reshape(-1)[0]] if value.size == 1 and value.dtype.kind in "fV" else []
        for number in numbers:
            if number is not None and np.asarray(number).dtype.kind in "fV" and np.isfinite(float(number)):
                found[abs(float(number))] = None
    return tuple(list(found)[:_MOST_SCALARS])
