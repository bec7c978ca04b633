"""Opens a model and finds its blocks. Changes nothing."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from ortmoe_cli import attention, moe
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Model, open_model
from ortmoe_cli.graph.validate import validate
from ortmoe_cli.outcome import Context, Fusion, Options, Outcome, Progress

_FINDERS = {"moe": moe.find, "gqa": attention.find}


@dataclass(frozen=True, eq=False)
class Inspection:
    """A model with everything that was found in it. `sha256` is of the .onnx file alone."""

    index: Index
    cutter: Cutter
    options: Options
    sha256: str
    outcomes: tuple[Outcome, ...]

    @property
    def model(self) -> Model:
        return self.index.model

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Fusion))


def open_index(path: Path) -> Index:
    """Open and index the model at `path`. Raises ModelError if it cannot be read or contradicts itself."""
    index = Index(open_model(path))
    validate(index)
    return index


def inspect(index: Index, options: Options, progress: Progress) -> Inspection:
    """Find the blocks of an opened model."""
    ort.set_default_logger_severity(4)  # refusals of the runtime are results here, not news for the terminal
    with index.model.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    cutter = Cutter(index)
    context = Context(index, cutter, options, progress)
    outcomes = [outcome for kind, find in _FINDERS.items() if kind in options.only for outcome in find(context)]
    cutter.release()
    return Inspection(index, cutter, options, sha256, tuple(outcomes))
