"""Packing is compared with plain numpy, bit for bit."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortmoe_cli.weights import pack
from ortmoe_cli.weights.pack import PackedWeight, Piece, PlanError, chunks, materialise

TYPES = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.UINT8: np.uint8,
    TensorProto.INT8: np.int8,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.DOUBLE: np.float64,
}


def noise(seed, shape, elem_type):
    """Random bits, so that there are NaNs with payloads, infinities and denormals."""
    dtype = np.dtype(TYPES[elem_type])
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return bits.view(dtype)[..., 0]


def joined(packed, source):
    return b"".join(bytes(chunk) for chunk in chunks(packed, source))


@st.composite
def gate_up(draw):
    """A plan for gate and up projections in one of the layouts that exporters and operators use, and its result."""
    elem_type = draw(st.sampled_from(list(TYPES)))
    experts, inner, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    transpose, stacked, fused = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    interleaved, vector = draw(st.booleans()), draw(st.booleans())
    seed = draw(st.integers(0, 99))
    tail = () if vector else (hidden,)
    gate, up = (noise(seed + k, (experts, inner, *tail), elem_type) for k in (0, 1))
    places = ((0, None, 2), (1, None, 2)) if interleaved else ((None, inner, 1), (inner, None, 1))
    expected = np.empty((experts, 2 * inner, *tail), gate.dtype)
    expected[:, slice(*places[0])], expected[:, slice(*places[1])] = gate, up

    if fused:  # one tensor holds both, one after the other or alternating
        together = draw(st.booleans())
        whole = np.stack([gate, up], 2).reshape(expected.shape) if together else np.concatenate([gate, up], 1)
        takes = ((0, None, 2), (1, None, 2)) if together else ((0, inner, 1), (inner, None, 1))
        parts = {"gate": (whole, takes[0]), "up": (whole, takes[1])}
    else:
        parts = {"gate": (gate, pack.ALL), "up": (up, pack.ALL)}

    tensors, pieces = {}, []
    for e in range(experts):
        row = []
        for (key, (values, take)), place in zip(parts.items(), places, strict=True):
            stored = np.ascontiguousarray(values.swapaxes(1, -1) if transpose and not vector else values)
            name = ("w" if fused else key) + ("" if stacked else f".{e}")
            tensors[name] = stored if stacked else stored[e]
            row.append(Piece(name, e if stacked else None, transpose, take, place))
        pieces.append(tuple(row))
    return PackedWeight("packed", elem_type, expected.shape, tuple(pieces)), tensors, expected


@given(gate_up())
def test_every_layout_equals_numpy(case):
    packed, tensors, expected = case
    result = materialise(packed, tensors.__getitem__)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()
    assert joined(packed, tensors.__getitem__) == expected.tobytes()
    assert packed.nbytes == expected.nbytes


@given(gate_up(), st.data())
def test_some_experts(case, data):
    packed, tensors, expected = case
    chosen = data.draw(st.lists(st.integers(0, packed.shape[0] - 1), max_size=5))
    assert materialise(packed, tensors.__getitem__, chosen).tobytes() == expected[chosen].tobytes()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.FLOAT]),
    st.integers(200, 1100),
    st.integers(200, 1100),
    st.sampled_from([1, 2]),
)
def test_transposing_in_tiles(elem_type, rows, cols, step):
    """Larger than a tile, with odd edges, and into every other row."""
    weight = noise(rows, (cols, rows), elem_type)
    pieces = [Piece("w", None, True, pack.ALL, (k, None, step)) for k in range(step)]
    packed = PackedWeight("packed", elem_type, (1, rows * step, cols), (tuple(pieces),))
    expected = np.repeat(weight.T, step, 0)
    assert joined(packed, lambda _: weight) == expected.tobytes()


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.booleans(), st.booleans(), st.sampled_from([1, 2]))
def test_experts_side_by_side_in_one_matrix(experts, rows, cols, transpose, in_turn, step):
    """Columns of a shared matrix, next to each other or in turn, in every other row of the slot."""
    weight = noise(experts, (rows, experts * cols), TensorProto.FLOAT16)
    pieces, expected = [], np.zeros((experts, rows * step, cols), np.float16)
    for e in range(experts):
        columns = (e, experts * cols, experts) if in_turn else (e * cols, (e + 1) * cols, 1)
        targets = [(k, None, step) for k in range(step)]
        pieces.append(tuple(Piece("w", None, transpose, pack.ALL, target, columns) for target in targets))
        expected[e] = np.repeat(weight[:, slice(*columns)], step, 0)
    packed = PackedWeight("packed", TensorProto.FLOAT16, expected.shape, tuple(pieces))
    stored = np.ascontiguousarray(weight.T) if transpose else weight
    assert joined(packed, lambda _: stored) == expected.tobytes()
    assert materialise(packed, lambda _: stored, [experts - 1]).tobytes() == expected[-1:].tobytes()


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.booleans())
def test_flat_entries_are_matrices(experts, rows, cols, transpose):
    """The rows of a table, as an embedding holds them."""
    expected = noise(experts, (experts, rows, cols), TensorProto.FLOAT)
    stored = np.ascontiguousarray(expected.swapaxes(1, 2) if transpose else expected).reshape(experts, -1)
    shape = (cols, rows) if transpose else (rows, cols)
    pieces = tuple((Piece("w", e, transpose, shape=shape),) for e in range(experts))
    packed = PackedWeight("packed", TensorProto.FLOAT, expected.shape, pieces)
    assert joined(packed, lambda _: stored) == expected.tobytes()


def matrix(**changes):
    plan = PackedWeight("packed", TensorProto.FLOAT, (2, 3, 4), ((Piece("w", 0),), (Piece("w", 1),)))
    return replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": ((Piece("w", 0),), (Piece("w", 1, target=(0, 2, 1)),))}, "row 2 of 3 is not filled"),
        ({"pieces": ((Piece("w", 0),), (Piece("w", 1), Piece("w", 1, target=(1, 2, 1))))}, "row 1 of 3 is filled 2"),
        ({"pieces": ((Piece("w", 0),), ())}, r"row 0 of 3 is not filled \(3 such rows\)"),
        ({"pieces": ((Piece("w", 0),),)}, "2 experts, but pieces for 1"),
        ({"shape": (2, 3, 4, 5)}, r"\[E, rows\]"),
        ({"elem_type": TensorProto.INT4}, "INT4 elements are not whole bytes"),
        ({"elem_type": TensorProto.STRING}, "STRING elements are not whole bytes"),
    ],
)
def test_plans_that_cannot_be_right(changes, message):
    with pytest.raises(PlanError, match=message):
        matrix(**changes)


@pytest.mark.parametrize(
    ("array", "piece", "message"),
    [
        (np.zeros((2, 3, 5), np.float32), Piece("w", 0), r"gives \[3, 5\], the place for it is \[3, 4\]"),
        (np.zeros((2, 4, 3), np.float32), Piece("w", 0), r"gives \[4, 3\]"),
        (np.zeros((2, 3, 4), np.float16), Piece("w", 0), "holds float16, not float32"),
        (np.zeros((2, 3, 4), np.float32), Piece("w", 2), "has no entry 2"),
        (np.zeros((2, 3, 4), np.float32), Piece("w"), "has 3 axes for an expert, 2 are needed"),
        (np.zeros((), np.float32), Piece("w", 0), "has no entry 0"),
        (np.zeros((1, 4), np.float32), Piece("w"), r"gives \[1, 4\]"),
        (np.zeros((2, 12), np.float32), Piece("w", 0, shape=(3, 5)), r"holds 12 elements for an expert, not \[3, 5\]"),
        (np.zeros((3, 8), np.float32), Piece("w", columns=(0, 3, 1)), r"gives \[3, 3\]"),
    ],
)
def test_tensors_that_do_not_fit(array, piece, message):
    """A row that numpy would happily broadcast over all others is refused as well."""
    packed = matrix(pieces=((piece,), (piece,)))
    for carry_out in (materialise, joined):
        with pytest.raises(PlanError, match=message):
            carry_out(packed, lambda _: array)


def per_expert(experts, side=8):
    names = [f"w{e}" for e in range(experts)]
    pieces = tuple((Piece(name, transpose=True),) for name in names)
    return PackedWeight("packed", TensorProto.FLOAT, (experts, side, side), pieces), names


def test_a_stale_chunk_fails_instead_of_lying():
    packed, names = per_expert(3)
    values = {name: noise(k, (8, 8), TensorProto.FLOAT) for k, name in enumerate(names)}
    first, second, last = chunks(packed, values.__getitem__)
    for stale in (first, second, last):
        with pytest.raises(ValueError, match="released"):
            bytes(stale)


def test_an_array_over_a_chunk_stays_right():
    packed, names = per_expert(3)
    values = {name: noise(k, (8, 8), TensorProto.FLOAT) for k, name in enumerate(names)}
    kept = [np.frombuffer(chunk, np.uint8) for chunk in chunks(packed, values.__getitem__)]
    assert b"".join(k.tobytes() for k in kept) == b"".join(v.T.tobytes() for v in values.values())


def test_one_expert_at_a_time():
    """When an expert is asked for, the ones before it are gone."""
    packed, _ = per_expert(6)
    alive = []

    def source(name):
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1
        array = noise(0, (8, 8), TensorProto.FLOAT).copy()
        alive.append(weakref.ref(array))
        return array

    assert sum(len(chunk) for chunk in chunks(packed, source)) == packed.nbytes
    alive.clear()
    materialise(packed, source)
    assert len(alive) == 6


def test_a_stacked_tensor_is_asked_for_once():
    calls = []
    packed = PackedWeight("p", TensorProto.FLOAT, (5, 2, 3), tuple((Piece("w", e),) for e in range(5)))
    stack = noise(0, (5, 2, 3), TensorProto.FLOAT)
    assert joined(packed, lambda name: calls.append(name) or stack) == stack.tobytes()
    assert calls == ["w"]


def test_what_lies_right_is_not_copied(monkeypatch):
    stack = noise(0, (5, 2, 3), TensorProto.FLOAT)
    packed = PackedWeight("p", TensorProto.FLOAT, (5, 2, 3), tuple((Piece("w", e),) for e in range(5)))
    monkeypatch.setattr(pack, "_fill", None)
    assert joined(packed, lambda _: stack) == stack.tobytes()
    reverse = replace(packed, pieces=tuple((Piece("w", e, target=(None, None, -1)),) for e in range(5)))
    monkeypatch.undo()
    assert joined(reverse, lambda _: stack) == stack[:, ::-1].tobytes()


def test_pages_of_a_mapped_file_are_given_back(tmp_path):
    """Else the memory of a process that packs 100 GB would be seen to grow by 100 GB."""
    side = 1024
    path = tmp_path / "weights"
    values = noise(0, (4, side, side), TensorProto.FLOAT)
    path.write_bytes(values.tobytes())
    mapped = np.memmap(path, np.float32, "r", shape=values.shape)
    packed = PackedWeight(
        "p", TensorProto.FLOAT, values.shape, tuple((Piece("w", e, transpose=True),) for e in range(4))
    )
    for e, chunk in enumerate(chunks(packed, lambda _: mapped.view(np.ndarray)[:])):
        assert chunk == values[e].T.tobytes()
        assert resident(path) < 1.5 * values[e].nbytes


def resident(path):
    """Bytes of a mapped file that count as this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return int(next(row for row in lines if row.startswith("Rss:")).split()[1]) << 10
    raise AssertionError("not mapped")


def test_all_byte_sized_types_are_known():
    for elem_type, dtype in TYPES.items():
        assert helper.tensor_dtype_to_np_dtype(elem_type) == np.dtype(dtype)
