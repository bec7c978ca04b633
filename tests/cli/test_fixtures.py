"""Every shipped export through the command line: what is found, what is written, and what it then computes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from ortmoe_cli.cli.app import run

FOLDER = Path(__file__).parents[2] / "fixtures"
MANIFEST: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "manifest.toml").read_text("utf-8"))["fixture"]
OPERATORS = {"moe": ("MoE", "QMoE"), "gqa": ("GroupQueryAttention",)}
TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 3e-2}

Samples = list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


def samples(name: str) -> Samples:
    """The recorded inputs and outputs of the framework, sample by sample."""
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    with np.load(FOLDER / f"{name}.npz") as data:
        for key in data.files:
            number, way, tensor = key.split("/", 2)
            found.setdefault(number, {"in": {}, "out": {}})[way][tensor] = data[key]
    return [(sample["in"], sample["out"]) for _, sample in sorted(found.items())]


def real_rows(values: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The rows of an output that belong to real tokens: those of padding may hold anything."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or values.shape[:1] != mask.shape[:1]:
        return values.reshape(-1, values.shape[-1])
    if values.ndim == 3 and values.shape[1] <= mask.shape[1]:  # [B, S, …]
        return values[mask[:, -values.shape[1] :].astype(bool)]
    if values.ndim == 4 and values.shape[2] == mask.shape[1]:  # [B, heads, T, D]
        return values.transpose(0, 2, 1, 3)[mask.astype(bool)].reshape(-1, values.shape[-1])
    return values.reshape(-1, values.shape[-1])


@pytest.mark.parametrize("name", MANIFEST)
def test_fuse(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, target = MANIFEST[name], tmp_path / "fused.onnx"
    code = run(["fuse", str(FOLDER / entry["file"]), "-o", str(target), "--output-format", "json"])
    out, err = capsys.readouterr()
    assert err == ""
    blocks = json.loads(out)["blocks"]
    for kind in OPERATORS:
        statuses = [block["status"] for block in blocks if block["kind"] == kind]
        if entry[kind] == "refuse":
            assert "refused" in statuses
            assert "fused" not in statuses
        else:
            assert statuses.count("fused") == entry[kind]
    assert code == int(any(block["status"] == "refused" for block in blocks))
    assert_fused_nodes(target, blocks)
    if entry.get("agrees", "everywhere") == "everywhere" or any(block["guarantee"] == "repaired" for block in blocks):
        assert_outputs(target, name, any(block["guarantee"] == "narrowed" for block in blocks))


def assert_fused_nodes(target: Path, blocks: list[dict[str, Any]]) -> None:
    """The report tells the truth: the file holds as many fused nodes as it says."""
    nodes = [node.op_type for node in onnx.load(target, load_external_data=False).graph.node]
    for kind, operators in OPERATORS.items():
        said = sum(b["kind"] == kind and b["status"] in {"fused", "already-fused"} for b in blocks)
        assert sum(nodes.count(operator) for operator in operators) == said


def outside_contract(inputs: dict[str, np.ndarray]) -> bool:
    """Several new tokens and a past for more than one sequence: what GroupQueryAttention refuses."""
    past = any(len(value.shape) == 4 and value.shape[2] > 0 for value in inputs.values())
    return past and min(inputs["input_ids"].shape) > 1


def assert_outputs(target: Path, name: str, narrowed: bool) -> None:
    """The fused model computes what the framework did; where it is narrowed, loudly refused or one by one."""
    session = ort.InferenceSession(target, providers=["CPUExecutionProvider"])
    for inputs, expected in samples(name):
        if not narrowed or not outside_contract(inputs):
            assert_equal(session, inputs, expected)
            continue
        with pytest.raises(InvalidArgument, match="batch_size must be 1"):
            session.run(None, inputs)
        for row in range(inputs["input_ids"].shape[0]):
            assert_equal(
                session, *({key: value[row : row + 1] for key, value in way.items()} for way in (inputs, expected))
            )


def assert_equal(session: ort.InferenceSession, inputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, inputs), strict=True))
    for tensor, wanted in expected.items():
        got = results[tensor]
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        if wanted.dtype.kind != "f":
            assert np.array_equal(got, wanted)
            continue
        a, b = real_rows(wanted.astype(np.float64), inputs), real_rows(got.astype(np.float64), inputs)
        assert np.abs(a - b).max() <= TOLERANCE[wanted.dtype] * np.abs(a).max()


@pytest.mark.parametrize("name", MANIFEST)
def test_audit_and_dry_run_say_the_same_as_fuse_and_write_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FOLDER / MANIFEST[name]["file"]
    reports = []
    for arguments in (["audit"], ["fuse", "--dry-run"], ["fuse", "-o", str(tmp_path / "f.onnx")]):
        run([arguments[0], str(source), *arguments[1:], "--output-format", "json"])
        reports.append(json.loads(capsys.readouterr().out))
    audit, dry, fused = (
        [{**block, "status": block["status"].replace("fusable", "fused")} for block in found["blocks"]]
        for found in reports
    )
    assert audit == dry == fused
    assert [found["output"] for found in reports] == [None, None, str(tmp_path / "f.onnx")]
    assert reports[1]["nodes_after"] == reports[2]["nodes_after"]


@pytest.mark.parametrize("name", MANIFEST)
def test_a_fused_model_has_nothing_left_to_fuse(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "fused.onnx"
    run(["fuse", str(FOLDER / MANIFEST[name]["file"]), "-o", str(target)])
    capsys.readouterr()
    run(["audit", str(target), "--output-format", "json"])
    statuses = {block["status"] for block in json.loads(capsys.readouterr().out)["blocks"]}
    assert statuses <= {"already-fused", "refused"}
