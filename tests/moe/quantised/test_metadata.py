"""What a model rests on travels with it."""

from pathlib import Path

import onnx

from ortmoe_cli.engine import fuse
from ortmoe_cli.outcome import ASSUMED_KEY, Options
from ortmoe_cli.weights.rounding import Scheme

FIXTURE = Path(__file__).parents[3] / "fixtures/dense_expert_loop.onnx"


def assumptions(path: Path) -> list[str]:
    return [entry.value for entry in onnx.load(path).metadata_props if entry.key == ASSUMED_KEY]


def test_an_exact_fusion_assumes_nothing(tmp_path: Path) -> None:
    fuse(FIXTURE, tmp_path / "out.onnx")
    assert assumptions(tmp_path / "out.onnx") == []


def test_rounding_is_recorded_and_kept(tmp_path: Path) -> None:
    fuse(FIXTURE, tmp_path / "out.onnx", Options(rounding=Scheme(8, 16)))
    assert assumptions(tmp_path / "out.onnx") == ["rounded-experts"]
    fuse(tmp_path / "out.onnx", tmp_path / "again.onnx")
    assert assumptions(tmp_path / "again.onnx") == ["rounded-experts"]
