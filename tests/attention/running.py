"""Fusing a test model and running it against the original."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ortmoe_cli.attention.find import find
from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import open_model
from ortmoe_cli.graph.splice import splice
from ortmoe_cli.outcome import Context, Fusion, Options, Outcome


@dataclass(frozen=True)
class Result:
    outcomes: list[Outcome]
    original: onnx.ModelProto
    fused: onnx.ModelProto

    @property
    def codes(self) -> list[str]:
        return [outcome.code for outcome in self.outcomes]


def fuse(proto: onnx.ModelProto, folder: Path, options: Options | None = None) -> Result:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    index = Index(open_model(path))
    outcomes = find(Context(index, Cutter(index), options or Options()))
    islands = [outcome.island for outcome in outcomes if isinstance(outcome, Fusion)]
    return Result(outcomes, proto, _filled(splice(index.model, islands), proto))


def _filled(stripped: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """With the weights in it again that an opened model leaves in its file."""
    whole = {tensor.name: tensor for tensor in original.graph.initializer}
    for tensor in stripped.graph.initializer:
        if tensor.name in whole:
            tensor.CopyFrom(whole[tensor.name])
    return stripped


SITUATIONS = {
    "prompt": (2, 9, 0, None),
    "left-padded prompt": (2, 9, 0, "left"),
    "right-padded prompt": (2, 9, 0, "right"),
    "decode": (3, 1, 7, None),
    "left-padded decode": (2, 1, 7, "left"),
    "chunk": (1, 4, 7, None),
}
LONG = SITUATIONS | {
    "long prompt": (1, 70, 0, None),
    "very long prompt": (1, 300, 0, None),
    "left-padded long prompt": (2, 50, 0, "left"),
    "long decode": (2, 1, 90, None),
    "long chunk": (1, 20, 60, None),
}


def largest_difference(
    result: Result, situations: dict[str, tuple[int, int, int, str | None]] = SITUATIONS
) -> dict[str, float]:
    """Original against fused in ONNX Runtime, over real tokens and whole caches, by situation."""
    sessions = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
        for m in (result.original, result.fused)
    ]
    inputs = {i.name: i for i in sessions[0].get_inputs()}
    rng, differences = np.random.default_rng(1), {}
    for title, (batch, new, past, side) in situations.items():
        if (past and "past.key" not in inputs) or (side and "attention_mask" not in inputs):
            continue
        mask = np.ones((batch, past + new), np.int64)
        if side:
            mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
        feeds = {
            "input_ids": rng.integers(0, 30, (batch, new)),
            "attention_mask": mask,
            "mode": np.array(1),
            "position_ids": np.tile(np.arange(past, past + new), (batch, 1)),
        }
        for name in ("past.key", "past.value"):
            if name in inputs:
                shape = [{"b": batch, "p": past}.get(d, d) for d in inputs[name].shape]
                feeds[name] = rng.standard_normal(shape).astype(np.float16 if "16" in inputs[name].type else np.float32)
        feeds = {name: value for name, value in feeds.items() if name in inputs}
        names = [o.name for o in sessions[0].get_outputs()]
        want, got = (dict(zip(names, s.run(names, feeds), strict=True)) for s in sessions)
        rows = mask[:, past:].astype(bool)
        pairs = [(want["logits"][rows], got["logits"][rows])] + [(want[n], got[n]) for n in names[1:]]
        for a, b in pairs:
            assert a.shape == b.shape
            error = np.abs(a.astype(np.float64) - b).max() / (np.abs(a).max() + 1e-9)
            differences[title] = max(differences.get(title, 0.0), float(error))
    return differences
