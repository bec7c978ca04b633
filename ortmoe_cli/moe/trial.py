"""One exit on trial: is it a weighted sum of the experts, with weights that the graph holds?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortmoe_cli.moe.assemble import Assembly
from ortmoe_cli.moe.block import Addition, Block
from ortmoe_cli.moe.coefficients import RESIDUAL, Solution, solve
from ortmoe_cli.moe.direct import recognise
from ortmoe_cli.moe.experts import Experts
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.region import cut
from ortmoe_cli.moe.routing import Dense, Routing, describe, explain, match, sources
from ortmoe_cli.moe.samples import Run, Samples
from ortmoe_cli.moe.sampling import Hits, Sampler, wanted_outputs
from ortmoe_cli.moe.scene import Scene
from ortmoe_cli.moe.sought import MATCH, clean, sought, varies
from ortmoe_cli.moe.supposed import seen_by

Array = NDArray[Any]

_SPARE = 4
"""So many more equations than unknowns are wanted."""
_USUAL_CHOSEN = 8


@dataclass(frozen=True, eq=False)
class Trial:
    """An exit with all that was sampled. names: tensors that may hold the routing; edges: tensors made of X0 alone
    that meet it."""

    scene: Scene
    sampler: Sampler
    samples: Samples
    assembly: Assembly
    hits: Hits
    exit: str
    names: tuple[str, ...]
    edges: tuple[str, ...]

    @property
    def width(self) -> int:
        return self.scene.bench.width

    def block(self) -> Block:
        """The block, if the exit is one. Raises Refused."""
        added = self._added()
        found = self._supposed(added)
        if found is not None:
            return found
        solution, added = self._solve(added)
        if solution.worst > RESIDUAL:
            scaled = self._input_scaled(self._added())
            if scaled is not None:
                routing, additions = scaled
                experts = self.assembly.experts
                return self._finished(experts, routing, additions, self._given(routing), input_scale=True)
            remainder = f"remainder {solution.worst:.1e} of the output"
            raise Refused("MOE109", "the output is no weighted sum of the experts", remainder)
        additions, keep = self._additions(solution.weights, added)
        weights = solution.weights[:, keep]
        routed = self.scene.router.experts
        if len(keep) < routed:
            raise Refused("MOE101", f"{len(keep)} of {routed} experts are in the file")
        if len(keep) > routed:
            raise Refused("MOE108", f"{len(keep)} bodies of experts for a router of {routed}")
        if weights.min(initial=0.0) < -MATCH * np.abs(weights).max(initial=0.0):
            raise Refused("MOE106", f"routing weights go down to {weights.min():.2g}")
        rest = None if solution.unique or not self.assembly.stacked else self._without(additions)
        routing = self._routing(weights, solution.unique, rest)
        members = [self.assembly.experts.members[b] for b in keep]
        experts = replace(self.assembly.experts, members=tuple(members[b] for b in routing.order))
        return self._finished(experts, routing, additions, clean(weights[:, list(routing.order)]))

    def _finished(
        self,
        experts: Experts,
        routing: Routing,
        additions: tuple[Addition, ...],
        weights: Array,
        input_scale: bool = False,
    ) -> Block:
        scene = self.scene
        return Block(
            scene.router,
            scene.cone,
            cut(scene.index, scene.cone, [self.exit]),
            self.exit,
            self.assembly.input,
            self.width,
            experts,
            routing.source,
            routing.scale,
            additions,
            self.hits.count,
            self._shape_source(),
            describe(self.samples.logits.astype(np.float64), weights),
            self.sampler.row_bytes,
            input_scale,
            recognise(self.samples.logits.astype(np.float64), self._given(routing) * routing.scale),
        )

    def _supposed(self, added: Sequence[str]) -> Block | None:
        """The block, where stacked experts are too many to solve for their weights from one token: the routing that the
        graph holds, put to the test. None if there are few, or if no routing passes."""
        assembly, routed = self.assembly, self.scene.router.experts
        members = assembly.experts.members
        few = len(members) + len(added) + _SPARE <= self.width
        if few or not assembly.stacked or len(members) != routed or len(added) + 1 + _SPARE > self.width:
            return None
        x, y = self._inputs(self.samples), self._outputs(self.samples)
        outputs = assembly.experts.outputs(self.scene.source, x)
        extra = [self._value(self.samples, name) for name in added]
        for routing, given in self._sources(None):
            if given.min() < 0 or (isinstance(routing.source, Dense) and varies(given)):
                continue
            routed_sum = np.einsum("te,teh->th", given, outputs)
            solution = solve([np.stack([routed_sum, *extra], axis=1)], [y])
            factors = solution.weights[:, 0]
            scale = float(np.median(factors))
            if solution.worst > RESIDUAL or scale <= 0 or np.ptp(factors) > 10 * MATCH * scale:
                continue
            additions = self._constant(solution.weights[:, 1:], added)
            scaled = replace(routing, scale=_plain(scale))
            return self._finished(assembly.experts, scaled, additions, given * scaled.scale)
        return None

    # --- the sum

    def _inputs(self, samples: Samples) -> Array:
        """What the experts read, (T,H)."""
        name = self.assembly.input
        x = samples.hidden if name == self.scene.cone.hidden_states else samples.per_token(name, self.width)
        if x is None:
            raise Refused("MOE108", "the experts do not read one row per token")
        return x

    def _outputs(self, samples: Samples) -> Array:
        y = samples.per_token(self.exit, self.width)
        assert y is not None
        return y

    def _added(self) -> tuple[str, ...]:
        """Tensors (T,H) that may be added: made of X0 alone, read on the way to the exit, and no body's own result."""
        own = frozenset[str]().union(*self.assembly.own)
        nodes = cut(self.scene.index, self.scene.cone, [self.exit]).nodes
        read = {name for i in nodes for name in self.scene.index.reads(i)} | {self.scene.cone.hidden_states}
        return tuple(
            name for name in self.edges if name in read and name not in own and self._value(self.samples, name).size
        )

    def _value(self, samples: Samples, name: str) -> Array:
        """A tensor (T,H), empty if it is not one."""
        found = samples.hidden if name == self.scene.cone.hidden_states else samples.per_token(name, self.width)
        return np.zeros((0, 0)) if found is None else found

    def _solve(self, added: tuple[str, ...]) -> tuple[Solution, tuple[str, ...]]:
        """The weights of the experts alone, or if these leave a remainder, with what may be added."""
        count = len(self.assembly.experts.members)
        all_samples, among = [self.samples], self._among(count + len(added))
        unknown = count if among is None else int(among.sum(axis=1).max(initial=0))
        for _ in range(-(-(unknown + len(added) + _SPARE) // self.width) - 1):
            all_samples.append(self._again(len(all_samples), added))
        columns = [self.assembly.experts.outputs(self.scene.source, self._inputs(s)) for s in all_samples]
        outputs = [self._outputs(s) for s in all_samples]
        solution = solve(columns, outputs, among)
        if solution.worst <= RESIDUAL or not added:
            return solution, ()
        extra = [np.stack([self._value(s, name) for name in added], axis=1) for s in all_samples]
        wider = [np.concatenate([c, e], axis=1) for c, e in zip(columns, extra, strict=True)]
        if among is not None:
            among = np.concatenate([among, np.ones((len(among), len(added)), bool)], axis=1)
        return solve(wider, outputs, among), added

    def _among(self, unknown: int) -> Array | None:
        """Which bodies a token's output may come from (T,n), where it has too few numbers to tell all apart."""
        if self.assembly.stacked or unknown + _SPARE <= self.width:
            return None
        members = self.assembly.experts.members
        return seen_by(self.samples, self.scene.products, members, self._inputs(self.samples))

    def _again(self, seed: int, added: Sequence[str]) -> Samples:
        """More equations: other hidden states with the same logits."""
        rng, runs = np.random.default_rng(seed), []
        names = wanted_outputs([self.exit, *added, self.assembly.input])
        for run in self.samples.runs:
            hidden = rng.standard_normal(run.hidden.shape).astype(np.float32)
            setting = next(s for s in self.sampler.settings(len(run.hidden)) if s.tokens == len(run.hidden))
            runs.append(Run(hidden, run.logits, self.scene.bench.run(setting, names, hidden, run.logits)))
        return Samples(tuple(runs))

    def _additions(self, weights: Array, added: Sequence[str]) -> tuple[tuple[Addition, ...], list[int]]:
        """What is added whatever the routing, and which bodies are routed."""
        count = len(self.assembly.experts.members)
        largest = float(np.abs(weights).max(initial=0.0))
        keep, found = list(range(count)), []
        if self.assembly.unrouted and not self.assembly.stacked and count > self.scene.router.experts:
            for b in range(count):
                column = weights[:, b]
                tensor = min(self.assembly.own[b] & set(self.edges), default="")
                if tensor and np.ptp(column) < MATCH * largest and abs(column.mean()) > MATCH * largest:
                    keep.remove(b)
                    found.append(Addition(tensor, _plain(float(column.mean()))))
        return (*found, *self._constant(weights[:, count:], added)), keep

    def _constant(self, weights: Array, added: Sequence[str]) -> tuple[Addition, ...]:
        """The tensors that are added with the same factor for every token: weights (T,n). Tokens for which a tensor is
        too small to matter do not count."""
        found = []
        size = np.abs(self._outputs(self.samples)).max(axis=1)
        for name, column in zip(added, weights.T, strict=False):
            seen = column[np.abs(self._value(self.samples, name)).max(axis=1) > MATCH * size]
            if np.abs(seen).max(initial=0.0) < MATCH:
                continue
            if np.ptp(seen) > 10 * MATCH * np.abs(seen).max():
                raise Refused("MOE109", f"'{name}' is added with a factor that depends on the token")
            found.append(Addition(name, _plain(float(np.median(seen)))))
        return tuple(found)

    # --- the routing

    def _sources(self, weights: Array | None) -> Iterable[tuple[Routing, Array]]:
        """Every source of routing in the graph, with its weights (T,E)."""
        routed = self.scene.router.experts
        least = 1 if weights is None else max(1, int((clean(weights) != 0).sum(axis=1).max(initial=1)))
        counts = range(least, min(routed, max(least, _USUAL_CHOSEN)) + 1)
        for source, given in sources(self.samples, self.names, routed, counts):
            yield Routing(source, tuple(range(routed)), 1.0, 0.0), given

    def _routing(self, weights: Array, unique: bool, routed: Array | None) -> Routing:
        """The tensors of the graph that hold these weights (T,E). Raises Refused.

        Experts that are alike, or that always give zero, leave many weights possible: then the tensors are wanted that
        make `routed` (T,H), the output without additions.
        """
        if routed is None:
            stacked = self.assembly.stacked
            return sought(self._sources(weights), lambda given: match(weights, given, stacked), weights, unique)
        each = self.assembly.experts.outputs(self.scene.source, self._inputs(self.samples))
        return sought(self._sources(None), lambda given: explain(routed, given, each), weights, True)

    def _without(self, additions: Sequence[Addition]) -> Array:
        """The output (T,H) without what is added to the routed experts."""
        y = self._outputs(self.samples).astype(np.float64)
        for addition in additions:
            y = y - addition.factor * self._value(self.samples, addition.tensor)
        return y

    def _given(self, routing: Routing) -> Array:
        return next(given for found, given in self._sources(None) if found.source == routing.source)

    def _input_scaled(self, added: Sequence[str]) -> tuple[Routing, tuple[Addition, ...]] | None:
        """The routing, if it scales what the experts read: y = Σ expert_e(w_e · x) + additions. Raises Refused for
        k > 1."""
        x, y = self._inputs(self.samples), self._outputs(self.samples).astype(np.float64)
        if not self.assembly.stacked:
            return None
        extra = [self._value(self.samples, name) for name in added] or [np.zeros_like(x)]
        for routing, given in self._sources(None):
            scaled = self.assembly.experts.scaled_outputs(self.scene.source, x, given).sum(axis=1)
            columns = np.stack([scaled, *extra], axis=1)
            solution = solve([columns], [y])
            if solution.worst > RESIDUAL or np.abs(solution.weights[:, 0] - 1).max(initial=0.0) > MATCH:
                continue
            if routing.source.chosen > 1:
                raise Refused("MOE104", f"routing scales the input of {routing.source.chosen} experts per token")
            return routing, self._constant(solution.weights[:, 1:], added)
        return None

    def _shape_source(self) -> str:
        """A tensor that has the exit's shape: X0, or '' where the exit is (T,H)."""
        shape = self.samples.first(self.exit).shape
        if len(shape) == 2:
            return ""
        setting = next(s for s in self.sampler.settings(len(self.samples.runs[0].hidden)))
        for name in (self.scene.cone.hidden_states, self.assembly.input):
            have = setting.hidden_shape if name == self.scene.cone.hidden_states else self.samples.first(name).shape
            if tuple(have) == tuple(shape):
                return name
        raise Refused("MOE107", f"the exit has the shape {list(shape)}, which nothing at hand has")


def _plain(factor: float) -> float:
    return 1.0 if abs(factor - 1) < MATCH else factor
