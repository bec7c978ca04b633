"""Blocks of equal structure: what was identified in one layer is carried over to the next, which is then verified with
its own weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from ortmoe_cli.graph.twins import Piece
from ortmoe_cli.moe.activation import Activation, Layout
from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.bench import Array, Bench, Setting
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.sampling import Sampler

_WORDS = frozenset({"kind", "name", "router_kind"})
"""Fields whose text is no tensor."""


class TwinBench(Bench):
    """Runs a block as the one that it is a twin of, with its own weights: one session serves all layers."""

    def __init__(self, original: Bench, router: Router, hidden: str, names: Mapping[str, str]) -> None:
        super().__init__(original.cutter, original.probes, router, hidden, original.width)
        self._names, self._back = names, {there: here for here, there in names.items()}

    def run(self, setting: Setting, outputs: Sequence[str], hidden: Array, logits: Array) -> dict[str, Array]:
        feeds = {self._back.get(name, name): value for name, value in self.feeds(setting, hidden, logits).items()}
        here = [self._back.get(name, name) for name in outputs]
        found = self.cutter.run(here, feeds, self._names)
        return {name: found[known] for name, known in zip(outputs, here, strict=True)}


@dataclass(frozen=True, eq=False)
class Known:
    """A block that was identified and verified."""

    piece: Piece
    bench: Bench
    sampler: Sampler
    block: Block

    def twin(self, router: Router) -> tuple[Bench, Sampler, Block] | None:
        """The block of another router, if it has the same structure; not verified yet."""
        own = self.block.router
        if (own.width, own.experts) != (router.width, router.experts):
            return None
        names = self.piece.twin(router.node - own.node)
        if names is None or names.get(own.logits) != router.logits:
            return None
        bench = TwinBench(self.bench, router, names.get(self.bench.hidden, ""), names)
        if not bench.hidden or not self._same_sizes(bench, names):
            return None
        region = Cut(
            tuple((self.piece.nodes + router.node - own.node).tolist()),
            frozenset(names[name] for name in self.block.region.outside),
        )
        cone = self.block.cone
        block = replace(
            _renamed(replace(self.block, region=region, cone=_NO_CONE, router=router), names),
            region=region,
            router=router,
            cone=Cone(
                bench.hidden,
                router.logits,
                region.nodes[-1],
                *(_all_renamed(tensors, names) for tensors in (cone.hidden, cone.routed, cone.touched)),
            ),
        )
        return bench, replace(self.sampler, bench=bench, region=region), block

    def _same_sizes(self, bench: Bench, names: Mapping[str, str]) -> bool:
        """Whether hidden states and logits come in the same shapes."""
        (at, _), (other, _) = self.bench.typical(), bench.typical()
        pairs = ((self.bench.hidden, bench.hidden), (self.bench.router.logits, bench.router.logits))
        return all((shape := at.shape(a)) is not None and shape == other.shape(b) for a, b in pairs)


_NO_CONE = Cone("", "", 0, frozenset(), frozenset(), frozenset())


def known(bench: Bench, sampler: Sampler, block: Block) -> Known:
    """A block that others may equal. Of what it reaches only that within counts."""
    index, cone = bench.cutter.index, block.cone
    inside = {name for i in block.region.nodes for name in (*index.reads(i), *index.outputs(i))}
    cone = replace(cone, hidden=cone.hidden & inside, routed=cone.routed & inside, touched=cone.touched & inside)
    block = replace(block, cone=cone)
    return Known(Piece(bench.cutter.index, block.region.nodes), bench, sampler, block)


def _all_renamed(tensors: frozenset[str], names: Mapping[str, str]) -> frozenset[str]:
    return frozenset(names[name] for name in tensors if name in names)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Frozen data with other tensors."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(item, names) for item in value) if value else value
    if isinstance(value, frozenset):
        return frozenset(_renamed(item, names) for item in value)
    if not is_dataclass(value) or isinstance(value, type | Activation | Layout | Router):
        return value
    changed = {}
    for field in _texts(type(value)):
        old = getattr(value, field)
        if old.__class__ not in _PLAIN:
            changed[field] = _renamed(old, names)
    return replace(value, **changed)


_PLAIN = frozenset({int, float, bool, type(None)})


@cache
def _texts(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that may hold tensors."""
    return tuple(field.name for field in fields(kind) if field.init and field.name not in _WORDS)
