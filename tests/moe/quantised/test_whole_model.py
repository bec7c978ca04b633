"""`fuse` on whole models whose experts are or become quantised."""

from pathlib import Path

import onnx
import pytest

from ortmoe_cli.engine import fuse, proof
from ortmoe_cli.errors import ParityError
from ortmoe_cli.outcome import Options
from ortmoe_cli.weights.quantise import Scheme

FIXTURES = Path(__file__).parents[3] / "fixtures"
OPTIONS = Options(only=frozenset({"moe"}), rounding=Scheme(4, 16, True, "search"))


def test_the_model_before_rounding_is_compared_and_the_rest_is_told(tmp_path: Path) -> None:
    target = tmp_path / "f.onnx"
    report = fuse(FIXTURES / "mixtral_gathered_dynamo.onnx", target, OPTIONS)
    assert [b.code for b in report.blocks] == ["MOE005"]
    assert report.notes[0].startswith("experts quantised: 24.6 kB → 4.6 kB, relative error ")
    assert "before rounding compared" in report.notes[1]
    assert "after rounding: outputs differ by up to" in report.notes[2]
    assert [n.op_type for n in onnx.load(target).graph.node].count("QMoE") == 1
    assert list(tmp_path.iterdir()) == [target]


def test_two_layers_each_with_their_own_error(tmp_path: Path) -> None:
    report = fuse(FIXTURES / "gpt_oss_gathered.onnx", tmp_path / "f.onnx", OPTIONS)
    errors = [b.facts["relative error"] for b in report.blocks]
    assert len(set(errors)) == 2
    assert all(f"relative error {e:.2%}" in " ".join(b.contract) for e, b in zip(errors, report.blocks, strict=True))


def test_a_wrong_model_before_rounding_is_no_excuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof.write_model

    def wrong(model, proto, packed, source, target):
        reads = {name for node in proto.graph.node if node.op_type == "MoE" for name in node.input}
        for node in proto.graph.node:
            if node.op_type == "Log" and reads:
                node.op_type = "Exp"
        return right(model, proto, packed, source, target)

    monkeypatch.setattr(proof, "write_model", wrong)
    with pytest.raises(ParityError):
        fuse(FIXTURES / "mixtral_gathered_dynamo.onnx", tmp_path / "f.onnx", OPTIONS)
    assert not list(tmp_path.iterdir())


def test_quantised_models_are_compared_as_they_are(tmp_path: Path) -> None:
    report = fuse(FIXTURES / "nbits4_static_loop.onnx", tmp_path / "f.onnx", Options(only=frozenset({"moe"})))
    assert [(b.code, b.guarantee) for b in report.blocks] == [("MOE004", "exact")]
    assert report.notes[0].startswith("whole model compared with the original")


def test_half_precision(tmp_path: Path) -> None:
    report = fuse(FIXTURES / "qwen2_moe_f16.onnx", tmp_path / "f.onnx", OPTIONS)
    assert {b.code for b in report.blocks if b.status == "fused"} == {"MOE005"}
    proto = onnx.load(tmp_path / "f.onnx")
    (scales,) = [t for t in proto.graph.initializer if t.name.endswith("fc1_scales")]
    assert scales.data_type == onnx.TensorProto.FLOAT16
