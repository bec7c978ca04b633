"""Deployments fix dimensions (CUDA graphs need it). Fused models must load then, though sizes become constants."""

from pathlib import Path

import onnxruntime as ort
import pytest

from ortmoe_cli.engine import fuse

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("name", ["gpt_oss_gathered", "gemma2_softcap_window", "phi3_packed_qkv"])
def test_a_fused_model_loads_with_fixed_dimensions(tmp_path: Path, name: str) -> None:
    target = tmp_path / "fused.onnx"
    assert any(
        block.kind == "gqa" and block.status == "fused" for block in fuse(FIXTURES / f"{name}.onnx", target).blocks
    )
    free = ort.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    symbols = {dim for info in free.get_inputs() for dim in info.shape if isinstance(dim, str)}
    assert symbols
    options = ort.SessionOptions()
    for symbol in symbols:
        options.add_free_dimension_override_by_name(symbol, 4)
    fixed = ort.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
    assert all(isinstance(dim, int) for info in fixed.get_inputs() for dim in info.shape)
