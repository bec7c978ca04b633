"""Look at a model and say what is there."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from onnx import TensorProto

from ortmoe_cli.engine.inspect import Inspection, inspect, open_index
from ortmoe_cli.engine.launch import model_launches
from ortmoe_cli.outcome import Options, Progress, silent
from ortmoe_cli.report.model import BlockReport, Report, Status

_PACKAGES = ("ortmoe", "onnx", "onnx-graphsurgeon", "numpy")


def audit(
    model: Path, options: Options | None = None, progress: Progress = silent, tokens: Sequence[int] = ()
) -> Report:
    """Find the blocks of a model and prove what can be fused. Raises ModelError; writes nothing.

    `tokens`: numbers of new tokens for which the report says how many launches and experts a run takes.
    """
    started = time.monotonic()
    found = inspect(open_index(model), options or Options(), progress)
    return describe(found, "fusable", started, command="audit", launches=model_launches(found, tokens))


def describe(
    found: Inspection, fusion_status: Status, started: float, notes: Sequence[str] = (), **fields: object
) -> Report:
    """The report of an inspection; `fields` and `notes` are what only the caller knows."""
    return Report(
        model=str(found.model.path),
        blocks=tuple(BlockReport.from_outcome(outcome, fusion_status) for outcome in found.outcomes),
        nodes_before=len(found.index),
        weight_bytes=found.model.weight_bytes,
        opset=found.index.opset,
        seconds=round(time.monotonic() - started, 3),
        versions=versions(),
        input_sha256=found.sha256,
        notes=(*_notes(found), *notes),
        **fields,  # type: ignore[arg-type]
    )


def _notes(found: Inspection) -> tuple[str, ...]:
    """What concerns the whole model."""
    notes = []
    if overridable := len(found.index.overridable):
        notes.append(
            f"{overridable} weights are listed as inputs too, so a caller may feed others: nothing that depends on "
            "them can be fused; export without initializers as inputs, or remove them from the inputs"
        )
    if "right-padding" in found.options.assume:
        notes.append("right-padding was not needed: every block of attention is exact for any padding as it is")
    types = [found.index.elem_type(f.island.outputs[0]) for f in found.fusions if f.kind == "gqa"]
    if found.options.ep == "cuda" and (count := types.count(TensorProto.FLOAT)):
        notes.append(f"{count} GroupQueryAttention nodes are float32, for which CUDA has no kernel: export as float16")
    if found.options.verify == "none" and found.fusions:
        notes.append("nothing was verified (--verify none): the guarantees are what the graph looks like, not proven")
    return tuple(notes)


def versions() -> dict[str, str]:
    """What produced a report: the versions of this package and of what it rests on."""
    import onnxruntime  # noqa: PLC0415  its distribution has one of two names

    found = {name: version(name) for name in _PACKAGES}
    return found | {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
