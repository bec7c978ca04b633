"""The last comparison before a fused model is put in place: whole model against whole model, on made-up prompts.

Every block was verified on its own before; this one sees what lies between the blocks. Both models run in the float32
shadow, so it needs no provider that has the model's types, and sees differences that rounding would hide.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort

from ortmoe_cli.engine.caches import cache_outputs, empty_caches, loop_feeds
from ortmoe_cli.engine.sensitivity import own_movement
from ortmoe_cli.errors import ParityError
from ortmoe_cli.graph.cut import CutError, Cutter
from ortmoe_cli.graph.feeds import Feeds, Padding, Sizes, make_feeds
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.operators import numpy_type
from ortmoe_cli.graph.roles import Role, roles
from ortmoe_cli.outcome import Progress

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value of an output. Fused kernels sum in another order, no more."""
MEMORY = 256 << 20
"""Models with more weights than this are compared block by block only: both would have to be in memory at once."""

_PADDINGS = 3
_SCENARIOS = {
    "prompt": (Sizes(2, 6), None),
    "left-padded prompt": (Sizes(2, 6), Padding("left", (2, 0))),
    "right-padded prompt": (Sizes(2, 6), Padding("right", (2, 0))),
    "decode": (Sizes(2, 1, 5), None),
    "left-padded decode": (Sizes(2, 1, 5), Padding("left", (2, 0))),
    "chunk after a past": (Sizes(1, 3, 5), None),
    "long prompt": (Sizes(1, 40), None),
    "decode after a long past": (Sizes(2, 1, 70), None),
}


def compare_models(
    index: Index, written: Path, progress: Progress, rounded: Path | None = None, exits: Sequence[str] = ()
) -> list[str]:
    """Compare the model of `index` with the fused one at `written`; ParityError if they differ. Notes for the report.

    `rounded`: what will be put in place instead of `written` where that is only the proof; how far it is off is told.
    `exits`: the tensors that the fused model computes in another way.
    """
    _compare_loading(index.model.path, written)
    if index.model.weight_bytes > MEMORY:
        return [
            f"compared block by block, not as a whole: {index.model.weight_bytes / 1e9:.1f} GB of weights do not fit "
            "into memory twice"
        ]
    original, fused = Cutter(index), Cutter(Index(open_model(written)))
    final = Cutter(Index(open_model(rounded))) if rounded else None
    compared, off, notes = [], 0.0, list[str]()
    found = roles(index)
    for done, (title, (sizes, padding)) in enumerate(_SCENARIOS.items()):
        progress("compare", done, len(_SCENARIOS))
        feeds = make_feeds(index, found, sizes, padding, seed=done)
        if feeds.sizes != sizes or (padding and Role.MASK not in found.values()):
            continue
        values = _filled(index, found, feeds)
        if values is None:
            continue
        try:
            expected = original.run(index.graph_outputs, values)
        except CutError:
            continue  # the export itself does not run on this; it proves nothing
        try:
            _compare(title, expected, _run_fused(fused, index, title, values), feeds)
        except ParityError:
            if padding and _padding_matters(index, original, found, values, expected, feeds):
                notes.append(f"{title} not compared: in the original, too, results depend on what stands at padding")
                continue
            movement = partial(_largest, expected, feeds=feeds)
            moves = own_movement(index, original, values, exits, movement)
            error = _largest(expected, _run_fused(fused, index, title, values), feeds)
            if not error <= moves:
                raise
            notes.append(
                f"{title}: outputs differ by {error:.1e}; the model rounds activations, and by itself moves as far "
                "when a number within changes by a millionth"
            )
        compared.append(title)
        if final is not None:
            off = max(off, _largest(expected, final.run(index.graph_outputs, values), feeds))
    if _compare_loop(index, original, fused, found):
        compared.append("prompt and decode steps with the cache fed back")
    progress("compare", len(_SCENARIOS), len(_SCENARIOS))
    if not compared:
        return [*notes, "not compared as a whole: the original does not run here on any of the made-up inputs"]
    if final is not None:
        return [
            *notes,
            f"whole model before rounding compared with the original: {', '.join(compared)}",
            f"whole model after rounding: outputs differ by up to {off:.2%} of their largest value on made-up inputs",
        ]
    return [*notes, f"whole model compared with the original: {', '.join(compared)}"]


def _run_fused(fused: Cutter, index: Index, title: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    try:
        return fused.run(index.graph_outputs, values)
    except CutError as error:
        raise ParityError(f"{title}: the original runs, the fused model does not: {error.detail}") from error


def _padding_matters(
    index: Index,
    original: Cutter,
    found: Mapping[str, Role],
    values: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    feeds: Feeds,
) -> bool:
    """Whether the original's results for real tokens change with what stands at padding, or it then fails.

    Rows of padding that see no key hold other numbers in a fused model. Experts whose sizes were frozen or that drop
    tokens may send real tokens elsewhere because of them, as they do for other padding in the original.
    """
    padding = ~feeds.real[:, feeds.sizes.past :]
    rng = np.random.default_rng(5)
    for _ in range(_PADDINGS):
        changed = dict(values)
        for name, role in found.items():
            value = values.get(name)
            if role in (Role.TOKENS, Role.HIDDEN) and value is not None and value.shape[:2] == padding.shape:
                other = value.copy()
                other[padding] = rng.permutation(value[~padding])[: int(padding.sum())]
                changed[name] = other
        try:
            again = original.run(index.graph_outputs, changed)
        except CutError:
            return True
        if any(not _difference(value, again[name], feeds) <= TOLERANCE for name, value in expected.items()):
            return True
    return False


def _compare_loop(index: Index, original: Cutter, fused: Cutter, found: Mapping[str, Role]) -> bool:
    """Compare a prompt and steps after it, each model on the caches that it returned; whether it could be done."""
    pairs = cache_outputs(index, found)
    caches = empty_caches(index, list(pairs)) if pairs else None
    if caches is None:
        return False
    ours, theirs = caches, dict(caches)
    compared = False
    for feeds in loop_feeds(index, found):
        values = _filled(index, found, feeds)
        if values is None:
            return False
        try:
            expected = original.run(index.graph_outputs, values | theirs)
        except CutError:
            return compared
        title = f"step after {feeds.sizes.past} tokens of its own cache"
        got = _run_fused(fused, index, title, values | ours)
        _compare(title, expected, got, feeds)
        ours, theirs = ({name: run[made] for name, made in pairs.items()} for run in (got, expected))
        compared = True
    return compared


def _compare_loading(original: Path, written: Path) -> None:
    """Where the runtime accepts the original, it must accept what was made of it."""
    problem = _loading_problem(written)
    if problem and not _loading_problem(original):
        raise ParityError(f"ONNX Runtime loads the original but not the fused model: {problem}")


def _loading_problem(path: Path) -> str | None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).replace("\n", " ")[:300]
    return None


def _filled(index: Index, found: Mapping[str, Role], feeds: Feeds) -> dict[str, np.ndarray] | None:
    """Values for every input: those that are known, and noise for data. None if an input's shape is unknown."""
    rng = np.random.default_rng(1)
    values = dict(feeds.values) | {name: index.model.array(name) for name in index.overridable}
    for name, info in index.graph_inputs.items():
        shape = feeds.shapes[name]
        if name in values:
            continue
        if shape is None or numpy_type(info.elem_type).kind not in "fV":
            return None
        values[name] = (rng.standard_normal(shape) * 0.7).astype(np.float32)
    return values


def _compare(title: str, expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], feeds: Feeds) -> None:
    for name, value in expected.items():
        if value.shape != got[name].shape:
            raise ParityError(f"{title}: output '{name}' has shape {got[name].shape} instead of {value.shape}")
        error = _difference(value, got[name], feeds)
        if not error <= TOLERANCE:
            raise ParityError(
                f"{title}: output '{name}' of the fused model differs from the original by {error:.1e} "
                f"(allowed: {TOLERANCE:.0e}); nothing was written. Please report this; until then --only moe or "
                "--only gqa may help"
            )


def _difference(value: np.ndarray, other: np.ndarray, feeds: Feeds) -> float:
    """The largest difference relative to the largest value."""
    want, have = _real_rows(value, feeds), _real_rows(other, feeds)
    alike = (want == have) | (np.isnan(want) & np.isnan(have))
    scale = np.abs(want[np.isfinite(want)]).max(initial=0) + 1e-9
    return float(np.abs(np.where(alike, 0, want - have)).max(initial=0) / scale)


def _largest(expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], feeds: Feeds) -> float:
    return max((_difference(value, got[name], feeds) for name, value in expected.items()), default=0.0)


def _real_rows(value: np.ndarray, feeds: Feeds) -> np.ndarray:
    """The parts of an output that belong to tokens: what stands at padding is nobody's."""
    batch, total, new = feeds.sizes.batch, feeds.sizes.total, feeds.sizes.new
    numbers: np.ndarray = value.astype(np.float64)
    if value.ndim >= 3 and value.shape[:2] == (batch, new):
        return np.asarray(numbers[feeds.real[:, total - new :]])
    if value.ndim == 4 and value.shape[0] == batch and value.shape[2] == total:
        return np.asarray(numbers.transpose(0, 2, 1, 3)[feeds.real])
    return numbers
