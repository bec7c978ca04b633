"""Codes of 2, 4 or 8 bits in bytes, the lower bits first: how every quantised operator here stores a row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def packed_length(count: int, bits: int) -> int:
    """How many bytes so many codes take; the last byte may be filled up."""
    return -(-count * bits // 8)


def unpack(data: Array, bits: int, count: int) -> Array:
    """Bytes (…, n) as codes (…, count), each in its own byte, by rows along the last axis."""
    if bits == 8:
        return data[..., :count]
    per = 8 // bits
    codes = np.empty((*data.shape, per), np.uint8)
    for place in range(per):
        codes[..., place] = (data >> (bits * place)) & (2**bits - 1)
    return codes.reshape(*data.shape[:-1], data.shape[-1] * per)[..., :count]


def pack(codes: Array, bits: int) -> Array:
    """Codes (…, count) as bytes (…, n), by rows along the last axis; what is left of the last byte is zero."""
    if bits == 8:
        return np.ascontiguousarray(codes, np.uint8)
    per = 8 // bits
    count = codes.shape[-1]
    length = packed_length(count, bits)
    if count % per:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], length * per - count), np.uint8)], axis=-1)
    parts = codes.astype(np.uint8, copy=False).reshape(*codes.shape[:-1], length, per)
    data = parts[..., 0].copy()
    for place in range(1, per):
        data |= parts[..., place] << (bits * place)
    return data


def flipped(data: Array, bits: int) -> Array:
    """Packed signed codes as packed unsigned ones, or back: the highest bit of each code changes."""
    mask = {2: 0xAA, 4: 0x88, 8: 0x80}[bits]
    return data ^ np.uint8(mask)
