"""The last comparison before a fused model is put in place: whole model against whole model, on made-up prompts.

Every block was verified on its own before; this one sees what lies between the blocks. Both models run in the float32
shadow, so it needs no provider that has the model's types, and sees differences that rounding would hide.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

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

_SCENARIOS = {
    "prompt": (Sizes(2, 6), None),
    "left-padded prompt": (Sizes(2, 6), Padding("left", (2, 0))),
    "right-padded prompt": (Sizes(2, 6), Padding("right", (2, 0))),
    "decode": (Sizes(2, 1, 5), None),
    "left-padded decode": (Sizes(2, 1, 5), Padding("left", (2, 0))),
    "chunk after a past": (Sizes(1, 3, 5), None),
}


def compare_models(index: Index, written: Path, progress: Progress) -> list[str]:
    """Compare the model of `index` with the fused one at `written`; ParityError if they differ. Notes for the report."""
    _compare_loading(index.model.path, written)
    if index.model.weight_bytes > MEMORY:
        return [
            f"compared block by block, not as a whole: {index.model.weight_bytes / 1e9:.1f} GB of weights do not fit "
            "into memory twice"
        ]
    original, fused = Cutter(index), Cutter(Index(open_model(written)))
    compared = []
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
            got = fused.run(index.graph_outputs, values)
        except CutError as error:
            raise ParityError(f"{title}: the original runs, the fused model does not: {error.detail}") from error
        _compare(title, expected, got, feeds)
        compared.append(title)
    progress("compare", len(_SCENARIOS), len(_SCENARIOS))
    if not compared:
        return ["not compared as a whole: the original does not run here on any of the made-up inputs"]
    return [f"whole model compared with the original: {', '.join(compared)}"]


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
        want, have = _real_rows(value, feeds), _real_rows(got[name], feeds)
        alike = (want == have) | (np.isnan(want) & np.isnan(have))
        scale = np.abs(want[np.isfinite(want)]).max(initial=0) + 1e-9
        error = np.abs(np.where(alike, 0, want - have)).max(initial=0) / scale
        if not error <= TOLERANCE:
            raise ParityError(
                f"{title}: output '{name}' of the fused model differs from the original by {error:.1e} "
                f"(allowed: {TOLERANCE:.0e}); nothing was written. Please report this; until then --only moe or "
                "--only gqa may help"
            )


def _real_rows(value: np.ndarray, feeds: Feeds) -> np.ndarray:
    """The parts of an output that belong to tokens: what stands at padding is nobody's."""
    batch, total, new = feeds.sizes.batch, feeds.sizes.total, feeds.sizes.new
    numbers: np.ndarray = value.astype(np.float64)
    if value.ndim >= 3 and value.shape[:2] == (batch, new):
        return np.asarray(numbers[feeds.real[:, total - new :]])
    if value.ndim == 4 and value.shape[0] == batch and value.shape[2] == total:
        return np.asarray(numbers.transpose(0, 2, 1, 3)[feeds.real])
    return numbers
