import tomllib
from pathlib import Path
from typing import Any

import onnx
import pytest

from ortmoe_cli import engine
from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.engine.launch import expected_share, launches
from ortmoe_cli.outcome import Options

FOLDER = Path(__file__).parents[2] / "fixtures"
MANIFEST: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "manifest.toml").read_text("utf-8"))["fixture"]


def test_nothing_is_counted_unless_asked_for() -> None:
    assert engine.audit(FOLDER / "dense_bmm.onnx").launches == ()


@pytest.mark.parametrize("name", ["gpt_oss_gathered", "olmoe_static_loop_torchscript", "qwen2_moe_grouped"])
def test_what_is_promised_before_fusing_is_counted_after(name: str, tmp_path: Path) -> None:
    source, target = FOLDER / f"{name}.onnx", tmp_path / "fused.onnx"
    (row,) = engine.audit(source, tokens=(1,)).launches
    engine.fuse(source, target, Options(verify="none"))
    assert (row.before, row.after) == (launches(open_index(source)), launches(open_index(target)))
    assert row.after < row.before < len(open_index(source))


def test_experts_and_their_bytes() -> None:
    one, many = engine.audit(FOLDER / "gpt_oss_gathered.onnx", tokens=(1, 1000)).launches
    assert (one.tokens, one.touched, one.experts) == (1, 4.0, 8)  # two blocks, two of four experts each
    assert one.active_bytes == one.expert_bytes // 2
    assert (many.touched, many.active_bytes) == (8.0, many.expert_bytes)
    inner, hidden, biases = 16, 32, 2 * 16 + 32
    assert one.expert_bytes == 2 * 4 * 4 * (3 * inner * hidden + biases)


def test_a_fused_model_knows_its_experts(tmp_path: Path) -> None:
    source, target = FOLDER / "gpt_oss_gathered.onnx", tmp_path / "fused.onnx"
    engine.fuse(source, target, Options(verify="none"))
    (before,), (after,) = (engine.audit(path, tokens=(3,)).launches for path in (source, target))
    assert (after.touched, after.expert_bytes) == (before.touched, before.expert_bytes)
    assert after.before == after.after


def test_expected_share() -> None:
    assert expected_share(1, 128, 8) == 8 / 128
    assert expected_share(2, 4, 2) == 1 - 0.5**2
    assert expected_share(10, 2, 5) == 1.0


def test_views_constants_and_shape_arithmetic_start_nothing(tmp_path: Path) -> None:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Mul", ["shape", "two"], ["twice"]),
        helper.make_node("Neg", ["two_f"], ["constant"]),
        helper.make_node("Expand", ["x", "twice"], ["wide"]),
        helper.make_node("Reshape", ["wide", "two"], ["flat"]),
        helper.make_node("Mul", ["flat", "constant"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, ["n"])], [helper.make_tensor_value_info("y", kind, None)],
        [helper.make_tensor("two", onnx.TensorProto.INT64, [1], [2]), helper.make_tensor("two_f", kind, [1], [2.0])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    assert launches(open_index(tmp_path / "m.onnx")) == 2  # Expand and Mul
