"""Quantised constants read in place, against the definition with one number at a time."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.graph.model import Model, open_model
from ortmoe_cli.weights.bits import unpack
from ortmoe_cli.weights.stored import Lines, Matrix, Stored, zero_points

TYPES = {(4, True): ml_dtypes.int4, (4, False): ml_dtypes.uint4, (8, True): np.int8, (8, False): np.uint8}


def opened(folder: Path, **arrays: np.ndarray) -> Model:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return open_model(path)


@pytest.mark.parametrize(("bits", "signed"), TYPES)
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(
    ("granularity", "fixed_axis", "rows", "columns"),
    [
        ((1, 1, 4), 0, 1, 2),
        ((1, 4, 1), 0, 2, 1),
        ((3, 6, 8), 0, 1, 2),
        ((3, 1, 8), 0, 1, 2),
        ((1, 6, 8), 0, 2, 1),
        ((1, 1, 4), 1, 0, 2),
    ],
)
def test_a_matrix_is_read_as_defined(
    tmp_path: Path,
    bits: int,
    signed: bool,
    zeros: bool,
    granularity: tuple[int, ...],
    fixed_axis: int,
    rows: int,
    columns: int,
) -> None:
    rng, shape = np.random.default_rng(5), (3, 6, 8)
    low = -(2 ** (bits - 1)) if signed else 0
    boxes = tuple(-(-size // edge) for size, edge in zip(shape, granularity, strict=True))
    q = rng.integers(low, low + 2**bits, shape)
    z = rng.integers(low, low + 2**bits, boxes)
    s = rng.standard_normal(boxes).astype(np.float32)
    kind = TYPES[bits, signed]
    arrays = {"q": q.astype(np.int16).astype(kind), "s": s}
    if zeros:
        arrays["z"] = z.astype(np.int16).astype(kind)
    model = opened(tmp_path, **arrays)
    stored = Stored("q", "s", "z" if zeros else "", bits, signed, shape, granularity, 2 ** (bits - 1) if signed else 0)
    matrix = Matrix(
        stored, Lines(rows, range(1, shape[rows], 2)), Lines(columns, range(shape[columns])), {fixed_axis: 2}
    )
    want = np.zeros(matrix.shape)
    for i, j in itertools.product(*map(range, matrix.shape)):
        place = [0, 0, 0]
        place[fixed_axis], place[rows], place[columns] = 2, 1 + 2 * i, j
        box = tuple(p // edge for p, edge in zip(place, granularity, strict=True))
        want[i, j] = (q[tuple(place)] - (z[box] if zeros else 0)) * s[box]
    assert np.allclose(matrix.dequantised(model), want, rtol=1e-6, atol=0)
    assert np.array_equal(unpack(matrix.packed_codes(model), bits, matrix.shape[1]), matrix.codes(model))
    starts = range(0, matrix.shape[1], 4)
    assert np.array_equal(matrix.scales(model, starts), matrix.scales(model, range(matrix.shape[1]))[:, ::4])


def test_rows_of_whole_bytes_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, (6, 2, 8)).astype(np.uint8)
    model = opened(tmp_path, q=data, s=np.ones((6, 2), np.float32))
    stored = Stored("q", "s", "", 4, False, (6, 32), (1, 16), 8, padded=True)
    monkeypatch.setattr("ortmoe_cli.weights.stored.unpack", None)
    matrix = Matrix(stored, Lines(0, range(0, 6, 2)), Lines(1, range(32)), {})
    assert matrix.packed_codes(model).tobytes() == data[::2].tobytes()


def test_a_padded_last_block_is_cut_off(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (6, 2, 16)).astype(np.uint8)
    model = opened(tmp_path, q=data, s=np.ones((6, 2), np.float32))
    stored = Stored("q", "s", "", 4, False, (6, 48), (1, 32), 8, padded=True)
    matrix = Matrix(stored, Lines(0, range(6)), Lines(1, range(48)), {})
    assert np.array_equal(matrix.packed_codes(model), data.reshape(6, 32)[:, :24])


def test_float_zero_points_have_to_be_codes(tmp_path: Path) -> None:
    model = opened(tmp_path, good=np.array([[3.0, 8.0]], np.float32), bad=np.array([[3.5, 8.0]], np.float32))
    stored = Stored("", "", "good", 4, False, (1, 32), (1, 16), 8, padded=True)
    assert zero_points(stored, model).tolist() == [[3, 8]]
    with pytest.raises(ValueError, match="between"):
        zero_points(Stored("", "", "bad", 4, False, (1, 32), (1, 16), 8, padded=True), model)
