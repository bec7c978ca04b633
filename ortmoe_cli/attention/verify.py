"""Proof by running both: the block as it stands and the island that would take its place, in ONNX Runtime."""

from collections.abc import Mapping, Sequence

import numpy as np

from ortmoe_cli.attention.block import Block, Core
from ortmoe_cli.attention.layout import heads_first
from ortmoe_cli.attention.mask import Sight
from ortmoe_cli.attention.reference import attend
from ortmoe_cli.attention.refuse import Refused
from ortmoe_cli.attention.scores import noise, place
from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.probe import Probe
from ortmoe_cli.outcome import Check

TOLERANCE = 1e-4
"""Largest difference over the largest value, in single precision."""
_LOUD = 2.0


def check_reference(probe: Probe, block: Block, sight: Sight) -> float:
    """How far the block, evaluated in numpy, is from attention with its parameters. Raises Refused."""
    heads = block.heads
    queries = noise(probe, heads.query, heads, 3) * np.float32(_LOUD)
    keys, values = noise(probe, heads.all_keys, heads, 4), noise(probe, heads.all_values, heads, 5)
    given = probe.given(
        {
            core.tensor: place(probe, core, array)
            for core, array in ((heads.query, queries), (heads.all_keys, keys), (heads.all_values, values))
        }
    )
    found = given.value(block.merged.tensor)
    if found is None:
        raise Refused("GQA107", "the context could not be evaluated from queries, keys and values")
    merged = heads_first(found, block.merged.layout, probe.sizes.batch, heads.size)
    if merged is None:
        raise Refused("GQA111", f"the merged heads are {list(found.shape)}")
    wanted = attend(queries, keys, values, sight.bias.values, block.scoring)
    live = np.broadcast_to(sight.live[:, None, :], merged.shape[:3])
    error = _difference(wanted[live], merged[live])
    if not error <= TOLERANCE:
        raise Refused("GQA109", f"in a {sight.regime.name} the context differs from attention by {error:.1e}")
    return error


def check_island(
    index: Index, cutter: Cutter, block: Block, island: Island, sights: Sequence[Sight]
) -> tuple[Check, ...]:
    """Compare the block with its island in every situation in which the original runs. Raises Refused."""
    checks, failures = [], []
    for sight in sights:
        feeds = _feeds(index, block, island, sight.probe)
        outputs = [name for name in (block.merged.tensor, *_presents(block)) if name in island.outputs]
        try:
            original = cutter.run([*outputs, *(name for name in island.inputs if name not in feeds)], feeds)
        except CutError as error:
            failures.append(f"in a {sight.regime.name}: {error.detail}")
            continue
        try:
            fused = cutter.run_island(island, {n: feeds[n] if n in feeds else original[n] for n in island.inputs}, {})
        except CutError as error:
            raise Refused("GQA109", f"in a {sight.regime.name} the fused operator fails: {error.detail}") from error
        error_now = _compare(block, sight, original, fused, outputs)
        checks.append(Check(sight.regime.name, error_now))
        if not error_now <= TOLERANCE:
            raise Refused("GQA109", f"in a {sight.regime.name} the fused operator differs by {error_now:.1e}")
    if not checks:
        raise Refused("GQA107", f"the block runs in no situation ({failures[0] if failures else 'none fits'})")
    return tuple(checks)


def _presents(block: Block) -> list[str]:
    caches = (block.heads.key_cache, block.heads.value_cache)
    return [cache.present.tensor for cache in caches if cache is not None]


def _feeds(index: Index, block: Block, island: Island, probe: Probe) -> dict[str, np.ndarray]:
    """What a block needs: random queries, keys, values and caches; masks and positions of the probe; sizes."""
    heads = block.heads
    cores: list[Core] = [heads.query, heads.key, heads.value]
    cores += [cache.past for cache in (heads.key_cache, heads.value_cache) if cache is not None]
    rng = np.random.default_rng(11)
    feeds: dict[str, np.ndarray] = {}
    for core in cores:
        shape = probe.shape(core.tensor)
        if shape is None:
            raise Refused("GQA107", f"the shape of '{core.tensor}' could not be derived")
        loud = np.float32(_LOUD if core is heads.query else 1)
        feeds[core.tensor] = rng.standard_normal(shape).astype(np.float32) * loud
    wanted = [block.merged.tensor, *_presents(block), *island.inputs]
    return feeds | _surroundings(index, probe, wanted, feeds)


def _surroundings(
    index: Index, probe: Probe, outputs: Sequence[str], given: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The graph inputs that a cut needs, and the sizes of data outside it."""
    feeds: dict[str, np.ndarray] = {}
    seen, stack = set(given), [name for name in outputs if name not in given]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        i = index.producer(name)
        if i is None:
            value = probe.value(name)
            if name in index.graph_inputs and value is not None:
                feeds[name] = value
        elif index.op(i) in ("Shape", "Size") and probe.value(name) is not None:
            feeds[name] = np.asarray(probe.value(name))
        else:
            stack.extend(index.reads(i))
    return feeds


def _compare(
    block: Block, sight: Sight, original: Mapping[str, np.ndarray], fused: Mapping[str, np.ndarray],
    outputs: Sequence[str],
) -> float:  # fmt: skip
    worst = 0.0
    for name in outputs:
        want, got = original[name], fused[name]
        if want.shape != got.shape:
            return float("inf")
        if name == block.merged.tensor:
            size, batch, layout = block.heads.size, sight.probe.sizes.batch, block.merged.layout
            seen = [heads_first(array, layout, batch, size) for array in (want, got)]
            if seen[0] is None or seen[1] is None:
                return float("inf")
            live = np.broadcast_to(sight.live[:, None, :], seen[0].shape[:3])
            want, got = seen[0][live], seen[1][live]
        worst = max(worst, _difference(want, got))
    return worst


def _difference(want: np.ndarray, got: np.ndarray) -> float:
    """The largest difference over the largest value; infinite where something is not a number."""
    if not want.size:
        return 0.0
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(want.astype(np.float64) - got).max() / (np.abs(want).max() + 1e-9))
