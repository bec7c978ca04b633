"""Codes in bytes, against sums of powers of two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortmoe_cli.weights.bits import flipped, pack, packed_length, unpack


@given(st.sampled_from((2, 4, 8)), st.integers(1, 3), st.integers(1, 19), st.integers(0, 99))
def test_what_is_packed_comes_out_again(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count)).astype(np.uint8)
    data = pack(codes, bits)
    assert data.shape == (rows, packed_length(count, bits))
    assert np.array_equal(unpack(data, bits, count), codes)


def test_the_first_code_is_in_the_lowest_bits() -> None:
    assert pack(np.array([[1, 2, 3]], np.uint8), 4).tolist() == [[1 + 2 * 16, 3]]
    assert pack(np.array([[3, 0, 1, 2, 1]], np.uint8), 2).tolist() == [[3 + 1 * 16 + 2 * 64, 1]]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_flipping_turns_signed_codes_into_unsigned_ones(bits: int) -> None:
    half = 2 ** (bits - 1)
    signed = np.arange(-half, half)
    data = pack((signed & (2**bits - 1)).astype(np.uint8)[None], bits)
    assert np.array_equal(unpack(flipped(data, bits), bits, 2**bits)[0], signed + half)
