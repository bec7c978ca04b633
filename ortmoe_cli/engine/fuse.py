"""Rewrite a model: find, splice, write beside the target, compare, and only then put it there."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from ortmoe_cli.engine.audit import describe
from ortmoe_cli.engine.inspect import inspect, open_index
from ortmoe_cli.engine.proof import compare, rounding_notes
from ortmoe_cli.errors import OutputError
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import ASSUMED_KEY, Options, Progress, silent
from ortmoe_cli.report.model import Report
from ortmoe_cli.weights.store import lookup
from ortmoe_cli.weights.write import check_output, write_model


def fuse(
    model: Path,
    target: Path | None,
    options: Options | None = None,
    progress: Progress = silent,
    *,
    dry_run: bool = False,
    in_place: bool = False,
) -> Report:
    """Fuse the blocks of a model and write the result to `target`.

    With `dry_run` everything happens but the writing. With `in_place` the target may be the model itself.
    Raises ModelError, OutputError, and ParityError when the fused model differs from the original as a whole; nothing
    is written then.
    """
    options = options or Options()
    started = time.monotonic()
    index = open_index(model)
    if not dry_run:
        if target is None:
            raise OutputError("no output file given")
        check_output(index.model, target, in_place)
    found = inspect(index, options, progress)
    proto = splice(found.model, [fusion.island for fusion in found.fusions])
    _record(proto, sorted({name for fusion in found.fusions for name in fusion.assumes}))
    fields: dict[str, Any] = {"command": "fuse", "nodes_after": len(proto.graph.node), "dry_run": dry_run}
    notes = rounding_notes(found)
    if dry_run or target is None:
        return describe(found, "fusable", started, notes, **fields)

    def check(written: Path) -> None:
        if options.verify != "none" and found.fusions:
            notes.extend(compare(found, written, progress))

    written = write_model(
        found.model,
        proto,
        [weight for fusion in found.fusions for weight in fusion.weights],
        lambda name: lookup(found.index, found.cutter, name),
        target,
        in_place=in_place,
        progress=lambda done, total: progress("write", done, total),
        check=check,
    )
    fields |= {"output": str(target), "output_bytes": written.proto_bytes + written.data_bytes}
    return describe(found, "fused", started, notes, **fields)


def _record(proto: onnx.ModelProto, assumptions: Sequence[str]) -> None:
    """Write into the model's metadata what it rests on, beside what stood there from an earlier run."""
    if not assumptions:
        return
    entry = next((entry for entry in proto.metadata_props if entry.key == ASSUMED_KEY), None)
    if entry is None:
        entry = proto.metadata_props.add(key=ASSUMED_KEY)
    entry.value = ",".join(dict.fromkeys((*filter(None, entry.value.split(",")), *assumptions)))
