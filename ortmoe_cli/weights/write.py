"""Writes a model from file to file: the graph as bytes, weights from where they lie, packed ones as they are made.

Memory does not grow with the model, the output appears whole or not at all, and the input is never touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortmoe_cli.errors import OutputError
from ortmoe_cli.graph.model import Model, Span
from ortmoe_cli.weights.files import Replacement, Sink, check_space, check_target
from ortmoe_cli.weights.layout import Part, plan
from ortmoe_cli.weights.pack import PackedWeight, Source, chunks

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

_STEP = 1 << 20
"""Progress is told once for so many bytes."""


@dataclass(frozen=True)
class WriteReport:
    """What was written. `data` is None where everything fits into the .onnx file."""

    target: Path
    data: Path | None
    proto_bytes: int
    data_bytes: int
    packed_bytes: int
    copied_bytes: int
    moved: int
    """Inline weights that had to move to the data file."""
    unused: tuple[Path, ...]
    """After a replacement in place: data files of the input that the output no longer reads. They are left alone."""


def data_path(target: Path) -> Path:
    """The data file of an output."""
    return Path(f"{target}.data")


def check_output(model: Model, target: Path, in_place: bool = False) -> None:
    """Raise OutputError if the target is sure to be refused; to be asked before hours of work, not after."""
    reads = {weight.span.path for weight in model.weights.values() if weight.span}
    check_target(model.path, reads, target, data_path(target), in_place)


def write_model(
    model: Model,
    proto: onnx.ModelProto,
    packed: Sequence[PackedWeight],
    source: Source,
    target: Path,
    *,
    in_place: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> WriteReport:
    """Write `proto` (spliced from `model`) with its weights and the packed ones to `target`.

    `source` gives the tensors that the packed weights are made of. Raises OutputError, and leaves everything as it was,
    if the target cannot be written. `check` is called with the finished model, where it waits; if it raises, nothing
    is put in place. After a replacement in place, `model` describes files that are gone: do not use it.
    """
    data = data_path(target)
    layout = plan(model, proto, packed, data.name)
    spans = [content for content in layout.contents if isinstance(content, Span)]
    inputs = {weight.span.path for weight in model.weights.values() if weight.span} | {span.path for span in spans}
    check_target(model.path, inputs, target, data, in_place)
    total = layout.proto_bytes + layout.data_bytes
    check_space(target.parent, total)
    tell = _Teller(total, progress)
    try:
        with Replacement() as files:
            if layout.data:
                with files.create(data, target) as file:
                    sink = Sink(file, tell)
                    for offset, content in layout.data:
                        sink.pad(offset)
                        _send(sink, content, source)
                    sink.finish(layout.data_bytes)
            with files.create(target, target) as file:
                sink = Sink(file, tell)
                for part in layout.proto:
                    _send(sink, part, source)
                sink.finish(layout.proto_bytes)
            if check is not None:
                check(files.waiting(target))
            files.commit()
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        model.release()
    return WriteReport(
        target=target,
        data=data if layout.data else None,
        proto_bytes=layout.proto_bytes,
        data_bytes=layout.data_bytes,
        packed_bytes=sum(weight.nbytes for weight in packed),
        copied_bytes=sum(span.length for span in spans),
        moved=layout.moved,
        unused=tuple(sorted(inputs - {model.path, data})) if target.absolute() == model.path.absolute() else (),
    )


def _send(sink: Sink, part: Part, source: Source) -> None:
    if isinstance(part, Span):
        sink.copy(part)
    elif isinstance(part, PackedWeight):
        for chunk in chunks(part, source):
            sink.write(chunk)
    else:
        sink.write(part)


class _Teller:
    """Sums up what was moved and tells it, not too often."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress = total, progress
        self.done = self.told = 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress and (self.done - self.told >= _STEP or self.done == self.total):
            self.told = self.done
            self.progress(self.done, self.total)
