"""Finds the Mixture-of-Experts blocks of a model and decides on each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ortmoe_cli.graph.cut import CutError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import Router, find_routers
from ortmoe_cli.moe.bench import Array, Bench, Probes, Unknown
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.direct import choose
from ortmoe_cli.moe.dominators import PostDominators
from ortmoe_cli.moe.emit import Rewrite
from ortmoe_cli.moe.evidence import ahead, shape_of, weigh
from ortmoe_cli.moe.existing import already_fused, reaches_fused
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.identify import identify
from ortmoe_cli.moe.nested import nested
from ortmoe_cli.moe.outcomes import fusion, refusal
from ortmoe_cli.moe.pages import drop_pages
from ortmoe_cli.moe.products import dequantised, find_products
from ortmoe_cli.moe.quantised.check import NodeCheck
from ortmoe_cli.moe.quantised.decide import node_checks, rewrite_of
from ortmoe_cli.moe.quantised.reader import Reader
from ortmoe_cli.moe.quantised.sources import behind
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.region import Cone, Cut, cone_of, cut, exits, next_router
from ortmoe_cli.moe.sampling import Sampler
from ortmoe_cli.moe.scene import Scene, sampler_of
from ortmoe_cli.moe.twin import Known, known
from ortmoe_cli.moe.verify import Verifier
from ortmoe_cli.outcome import Check, Context, Fusion, Outcome

_MOST_EXITS = 6
_SURE = frozenset({"MOE101", "MOE103", "MOE106", "MOE110", "MOE112", "MOE114", "MOE131", "MOE132", "MOE133", "MOE134"})
"""Reasons that are only found in blocks of experts: they need no further evidence."""


def find(context: Context) -> list[Outcome]:
    """Every block of experts, in graph order: fused by the model's exporter, to be fused, or refused."""
    index = context.index
    found: list[Outcome] = list(already_fused(context))
    routers = [
        r for r in find_routers(index, lambda c: shape_of(index, context.cutter, c)) if not reaches_fused(index, r)
    ]
    found += _at_top(context, routers) if routers else []
    return [*found, *nested(context, find, {outcome.name for outcome in found})]


def _at_top(context: Context, routers: Sequence[Router]) -> list[Outcome]:
    """The blocks of the graph itself."""
    found, finder = list[Outcome](), _Finder(context, routers)
    for done, router in enumerate(routers):
        context.progress("experts", done, len(routers))
        outcome = finder.outcome(router)
        if outcome is not None:
            found.append(outcome)
    context.progress("experts", len(routers), len(routers))
    return found


class _Finder:
    def __init__(self, context: Context, routers: Sequence[Router]) -> None:
        self.context, self.index, self._routers = context, context.index, routers
        self.probes = Probes(context.index)
        self.tree = PostDominators(context.index)
        self._known: list[Known] = []

    def outcome(self, router: Router) -> Outcome | None:
        """What becomes of one router; None if it has nothing to do with experts."""
        try:
            return self._twin(router) or self._fusion(router)
        except Refused as reason:
            found = reason
        except CutError as error:
            found = Refused("MOE111", f"the block does not run on its own ({error.detail})")
        except (ValueError, IndexError, KeyError) as error:  # shapes that nobody thought of: no reason to stop
            found = Refused("MOE111", f"the block has an unforeseen form ({type(error).__name__}: {error})")
        evidence = weigh(self.index, self.context.cutter, router, self._piece(router))
        if not evidence.convinces and found.code not in _SURE:
            return None
        better = evidence.reason(found)
        return refusal(self.index, router, better)

    def _twin(self, router: Router) -> Fusion | None:
        """The block as one that equals another but for its weights, verified with its own; None if it is not."""
        verify = self.context.options.verify
        for known_ in self._known:
            constants: dict[str, Array] = {}
            try:
                found = known_.twin(router)
                if found is None:
                    continue
                bench, sampler, block = found
                source = self._reader(constants)
                rewrite = self._rewrite(router, block, source)
                checks: tuple[Check, ...] = ()
                if verify != "none":
                    proof = rewrite.proof or rewrite
                    verifier = Verifier(self.index, bench, block, proof, sampler, source, again=verify == "sample")
                    checks = verifier.verify(full=True) if verify == "full" else verifier.sample()
                rewrite, more = self._checked_node(bench, block, rewrite, sampler, source)
            except (Refused, CutError, ValueError, IndexError, KeyError):
                continue  # equal structure was only a hint: look at it as at any other
            finally:
                drop_pages(constants.values())
            self._settle(block)
            return fusion(self.index, block, rewrite, (*checks, *more), self.context.options, like=known_.block)
        return None

    def _settle(self, block: Block) -> None:
        self.probes.settle(block.exit, block.reshape, block.cone.hidden_states, block.width)

    def _reader(self, constants: dict[str, Array]) -> Source:
        """Reads constants, and keeps them there."""
        return Reader(self.index, self.context.cutter, constants)

    def _rewrite(self, router: Router, block: Block, source: Source) -> Rewrite:
        name = self.index.unused_prefix(f"moe_{router.node}")
        return rewrite_of(self.index, self.context.cutter, block, source, name, self.context.options)

    def _checked_node(
        self, bench: Bench, block: Block, rewrite: Rewrite, sampler: Sampler, source: Source
    ) -> tuple[Rewrite, tuple[Check, ...]]:
        check = NodeCheck(self.index, bench, block, sampler, source)
        return node_checks(self.index, self.context.cutter, block, rewrite, check, source, self.context.options)

    def _fusion(self, router: Router) -> Outcome:
        scene = self._scene(router)
        try:
            return self._proven(router, scene)
        finally:
            drop_pages(scene.constants.values())

    def _proven(self, router: Router, scene: Scene) -> Outcome:
        for product in scene.products:
            operator = dequantised(self.index, product.base)
            if operator and not behind(self.index, product.base):
                raise Refused("MOE112", f"experts are quantised ({operator})")
        sampler = sampler_of(scene)
        block = identify(scene, sampler)
        rewrite, checks = None, tuple[Check, ...]()
        for direct in (True, False) if choose(self.index, block, self.context.options).direct else (False,):
            block = replace(block, direct=direct)
            try:
                rewrite, checks = self._verified(scene, sampler, block)
                break
            except Refused:
                if not direct:
                    raise
        assert rewrite is not None
        rewrite, more = self._checked_node(scene.bench, block, rewrite, sampler, scene.source)
        self._settle(block)
        self._known.append(known(scene.bench, sampler, block))
        return fusion(self.index, block, rewrite, (*checks, *more), self.context.options)

    def _verified(self, scene: Scene, sampler: Sampler, block: Block) -> tuple[Rewrite, tuple[Check, ...]]:
        """The replacement of a block, compared with it."""
        rewrite = self._rewrite(scene.router, block, scene.source)
        if self.context.options.verify == "none":
            return rewrite, ()
        verifier = Verifier(self.index, scene.bench, block, rewrite.proof or rewrite, sampler, scene.source)
        return rewrite, verifier.verify(full=True)

    def _scene(self, router: Router) -> Scene:
        """The piece of graph behind a router that can be evaluated from hidden states and logits alone."""
        for hidden, width in self._hidden_states(router):
            for tree in self._trees():
                scene = self._scene_from(router, hidden, width, tree)
                if scene is not None:
                    return scene
        raise Refused("MOE111", "nothing behind the router can be computed from the hidden states and the logits alone")

    def _trees(self) -> Iterator[PostDominators]:
        yield self.tree
        if len(self.index.graph_outputs) > 1:
            yield self._main_tree

    @cached_property
    def _main_tree(self) -> PostDominators:
        """Outputs on the side, losses over the router's logits for instance, do not count as ways out."""
        return PostDominators(self.index, {main_output(self.index)})

    def _hidden_states(self, router: Router) -> Iterator[tuple[str, int]]:
        """The tensor that the router reads, then those that it was made from: experts may see it before a norm."""
        yield router.hidden, router.width
        at = self.probes.at(1, 16)
        stack, seen = [router.hidden], {router.hidden}
        while stack and len(seen) < 16:
            i = self.index.producer(stack.pop(0))
            for name in self.index.reads(i) if i is not None else ():
                shape = at.shape(name)
                if name in seen or self.index.is_constant(name) or not shape or len(shape) < 2 or shape[-1] < 2:
                    continue
                seen.add(name)
                stack.append(name)
                yield name, shape[-1]

    def _scene_from(self, router: Router, hidden: str, width: int, tree: PostDominators) -> Scene | None:
        index = self.index
        ways_out = exits(index, tree, router, next_router(index, router, self._routers))
        if not ways_out:
            return None
        last = max(i for name in ways_out if (i := index.producer(name)) is not None)
        cone = cone_of(index, hidden, router.logits, last)
        bench = Bench(self.context.cutter, self.probes, router, hidden, width)
        good: list[str] = []
        for name in ways_out:
            if not self._evaluates(bench, cut(index, cone, [name]).outside):
                break
            if name in cone.hidden and self._may_be_exit(bench, name):
                good.append(name)
            if len(good) == _MOST_EXITS:
                break
        if not good:
            return None
        region = cut(index, cone, good)
        products = tuple(find_products(index, cone, region))
        if not products:
            return None
        constants: dict[str, Array] = {}
        return Scene(index, bench, cone, tuple(good), region, products, self._reader(constants), constants)

    def _may_be_exit(self, bench: Bench, name: str) -> bool:
        at, tokens = bench.typical()
        shape = at.shape(name)
        if shape is None or not tokens:
            return True
        return shape[-1:] == (bench.width,) and math.prod(shape) == tokens * bench.width

    def _evaluates(self, bench: Bench, outside: frozenset[str]) -> bool:
        try:
            bench.setting(1, 16, outside)
        except Unknown:
            return False
        return True

    def _piece(self, router: Router) -> tuple[Cone, Cut]:
        """The nodes behind a router that evidence is taken from: the scene, or what lies ahead of the first exit."""
        try:
            scene = self._scene(router)
            return scene.cone, scene.region
        except Refused:
            return ahead(self.index, self.tree, router)


def main_output(index: Index) -> str:
    """The output at the end of the longest way through the graph."""
    depth: dict[str, int] = {}
    for i in range(len(index)):
        deepest = 1 + max((depth.get(name, 0) for name in index.reads(i)), default=0)
        depth.update((name, deepest) for name in index.outputs(i) if name)
    return max(index.graph_outputs, key=lambda name: depth.get(name, 0))
