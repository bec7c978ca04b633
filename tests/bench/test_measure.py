import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from ortmoe_cli import engine
from ortmoe_cli.bench.decode import loop_of
from ortmoe_cli.bench.measure import measure
from ortmoe_cli.bench.render import cells, markdown, title
from ortmoe_cli.bench.result import Bench, Measured, Samples, Workload, document
from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.outcome import Options

FOLDER = Path(__file__).parents[2] / "fixtures"
CACHED = ("gpt_oss_gathered", "qwen3_moe_hit_list", "phi3_packed_qkv", "stablelm_partial_rotary")


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_token_by_token_gives_what_a_whole_prompt_gives(name: str, fuse: bool, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.onnx"
    if name == "qwen3_moe_hit_list" and not fuse:
        pytest.skip("the export runs for the routing that it was traced with only")
    if fuse:
        engine.fuse(path, tmp_path / "fused.onnx", Options(verify="none"))
        path = tmp_path / "fused.onnx"
    loop = loop_of(open_index(path))
    assert loop.decodes
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    whole = loop.inputs(1, 12)
    expected = session.run(None, whole)[0]
    outputs = session.run(None, loop.inputs(1, 11) | {"input_ids": whole["input_ids"][:, :11]})
    step = loop.inputs(1, 1, 11, loop.kept(outputs)) | {"input_ids": whole["input_ids"][:, 11:]}
    got = session.run(None, step)[0]
    assert np.abs(got[:, -1] - expected[:, -1]).max() < 1e-4 * np.abs(expected).max()


def test_a_model_without_a_cache_does_not_decode() -> None:
    assert not loop_of(open_index(FOLDER / "qwen2_moe_f16.onnx")).decodes


def test_two_models_in_one_run(tmp_path: Path) -> None:
    source, target = FOLDER / "gpt_oss_gathered.onnx", tmp_path / "fused.onnx"
    engine.fuse(source, target, Options(verify="none"))
    bench = measure([source, target], Workload(prompt=8, decode=2, repeats=1, threads=1, rounds=2))
    one, two = bench.models
    assert len(one.prefill.values) == 2
    assert len(one.decode.values) == 4
    assert 0 < two.decode_nodes < one.decode_nodes
    assert two.launches < one.launches <= one.prefill_nodes
    assert one.peak_bytes > 10_000_000
    assert bench.ratios(one)["decode_nodes"] == 1.0
    assert bench.ratios(two)["decode_nodes"] == round(one.decode_nodes / two.decode_nodes, 3)
    assert json.loads(json.dumps(document(bench)))["models"][1]["tokens_per_second"]["decode"] > 0


def test_a_model_that_cannot_be_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(OrtmoeError, match=r"none\.onnx: no such file"):
        measure([tmp_path / "none.onnx"], Workload())


def sample(model: str, prefill: float, nodes: int) -> Measured:
    times = Samples((prefill, prefill * 1.1, prefill * 0.9))
    return Measured(model, ("CPUExecutionProvider",), nodes, times, 0.1, times, Samples(), nodes, 0, nodes, 10**8)


def test_ratios_are_above_one_where_the_second_is_better() -> None:
    bench = Bench(Workload(prompt=100), (sample("a", 0.2, 50), sample("b", 0.1, 10)))
    assert bench.ratios(bench.models[1]) == {
        "creation": 2.0, "first_run": 1.0, "prefill": 2.0, "nodes": 5.0, "prefill_nodes": 5.0, "launches": 5.0,
        "memory": 1.0,
    }  # fmt: skip
    assert bench.tokens_per_second(bench.models[0]) == {"prefill": 500.0, "decode": None}


def test_spread_is_where_half_of_the_runs_were() -> None:
    assert Samples((1.0,)).spread == 0.0
    assert Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1 / 3)
    assert not Samples()


def test_tables_say_that_a_cpu_is_a_cpu() -> None:
    bench = Bench(Workload(), (sample("a", 0.2, 50), sample("b", 0.1, 10)))
    assert "says nothing about a GPU" in title(bench)
    assert "says nothing" not in title(Bench(Workload(ep="cuda"), bench.models))
    table = {row[0]: row[1:] for row in cells(bench)}
    assert table["prefill"] == ["200.0 ms ±5%", "100.0 ms ±5% (2.00 ×)"]
    assert table["decode tokens/s"] == ["–", "–"]
    assert markdown(bench).count("\n| ") == len(table)
