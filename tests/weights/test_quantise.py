"""Rounding: bounds that follow from the definition, and that searching pays."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from ortmoe_cli.weights.pack import PackedWeight, Piece, chunks, materialise
from ortmoe_cli.weights.quantise import Scheme, quantise
from ortmoe_cli.weights.recode import Grid, decoded
from ortmoe_cli.weights.rounding import rounded

FLOAT = np.dtype(np.float32)


@settings(max_examples=60)
@given(
    st.sampled_from((4, 8)),
    st.sampled_from((0, 16, 32)),
    st.booleans(),
    st.sampled_from(("rtn", "search")),
    st.sampled_from((np.float32, np.float16, ml_dtypes.bfloat16)),
    st.integers(0, 99),
)
def test_no_number_is_off_by_more_than_the_scheme_allows(bits, block, symmetric, method, kind, seed) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((5, 64)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, (5, 1))
    matrix[2] = 0
    matrix[3] = np.abs(matrix[3]) + 1
    found = quantise(matrix.astype(np.float32), Scheme(bits, block, symmetric, method), np.dtype(kind))
    assert found.scales.dtype == kind
    assert found.codes.max() <= 2**bits - 1
    if symmetric:
        assert (found.zeros == 2 ** (bits - 1)).all()
    assert not found.values()[2].any()
    step = np.repeat(np.abs(found.scales.astype(np.float64)), block or 64, axis=1)
    if method == "rtn":  # half a step, and what rounding the scale or the zero point cost at the ends
        assert (np.abs(found.values() - matrix) <= (0.51 + 2.0**bits / 256 + 0.5 * (not symmetric)) * step).all()


@pytest.mark.parametrize("block", [0, 16, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("heavy", [False, True])
def test_searching_lowers_the_error(block: int, symmetric: bool, heavy: bool) -> None:
    rng = np.random.default_rng(1)
    matrix = (rng.standard_t(4, (64, 256)) if heavy else rng.standard_normal((64, 256))).astype(np.float32)
    errors = [
        np.linalg.norm(quantise(matrix, Scheme(4, block, symmetric, method), FLOAT).values() - matrix)
        for method in ("rtn", "search")
    ]
    assert errors[1] < errors[0] * (0.9 if symmetric else 0.99)


def test_nothing_is_lost_where_the_levels_suffice() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(-7, 8, (4, 64))
    codes[:, ::16] = 7
    matrix = (codes * 0.25).astype(np.float32)
    assert np.array_equal(quantise(matrix, Scheme(4, 16), FLOAT).values(), matrix)


def test_blocks_have_to_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="divide"):
        quantise(np.zeros((2, 48), np.float32), Scheme(4, 32), FLOAT)


@pytest.mark.parametrize("scheme", [Scheme(4, 16), Scheme(4, 0, False, "search"), Scheme(8, 32, False), Scheme(8, 0)])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_rounded_weight_is_streamed_expert_by_expert(scheme: Scheme, kind: int) -> None:
    rng = np.random.default_rng(3)
    dtype = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}[kind]
    tensors = {f"{side}{e}": rng.standard_normal((64, 5)).astype(dtype) for side in "gu" for e in range(3)}
    pieces = tuple(
        tuple(Piece(f"{side}{e}", None, True, target=(k, None, 2)) for k, side in enumerate("gu")) for e in range(3)
    )
    plan = PackedWeight("fc1", kind, (3, 10, 64), pieces)
    parts = rounded("fc1", plan, scheme)
    assert ("zeros" in parts) != scheme.symmetric
    source = tensors.__getitem__
    values = materialise(plan, source)
    found = [quantise(value.astype(np.float32), scheme, np.dtype(dtype)) for value in values]
    for part in parts.values():
        streamed = [bytes(chunk) for chunk in chunks(part, source)]
        assert len(streamed) == 3
        assert b"".join(streamed) == materialise(part, source).tobytes()
        assert len(b"".join(streamed)) == part.nbytes
    assert not parts["codes"].kept.values, "scales are held after they were written"
    again = decoded("fc1", plan, Grid(scheme.bits, scheme.block, 64), parts)
    assert np.allclose(materialise(again, source), np.stack([f.values() for f in found]), rtol=1e-6, atol=0)
