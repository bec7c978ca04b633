"""Reads an ONNX file without its weights: finds big `raw_data` on the wire and leaves it where it lies.

Protobuf's own parser copies every byte into memory. A model of 2 GB would cost 2 GB before the first question is asked.
Only three message types are walked here (ModelProto, GraphProto, TensorProto); all other bytes, unknown fields
included, are passed to protobuf unchanged, so that what is written back later is what was read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

BIG = 1024
"""Raw data of at least so many bytes is left in the file."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = 7, 5, 9


class WireError(ValueError):
    """The bytes are not a protobuf message."""


@dataclass(frozen=True)
class Stripped:
    """A serialised ModelProto without its big weights.

    `raw` maps the position of an initializer within the graph to the (offset, length) of its raw data in the file.
    """

    message: bytes
    raw: dict[int, tuple[int, int]]


def strip(data: memoryview) -> Stripped:
    """The model's bytes without big weights, and where those weights lie. `data` is the whole file."""
    raw: dict[int, tuple[int, int]] = {}
    pieces: list[bytes | memoryview] = []
    kept = count = 0
    for field, start, body, end in fields(data, 0, len(data)):
        if field == _MODEL_GRAPH:
            graph, count = _strip_graph(data, body, end, count, raw)
            pieces += [data[kept:start], tag(_MODEL_GRAPH, sum(map(len, graph))), *graph]
            kept = end
    pieces.append(data[kept:])
    return Stripped(b"".join(pieces), raw)


def _strip_graph(
    data: memoryview, begin: int, stop: int, count: int, raw: dict[int, tuple[int, int]]
) -> tuple[list[bytes | memoryview], int]:
    pieces: list[bytes | memoryview] = []
    kept = begin
    for field, start, body, end in fields(data, begin, stop):
        if field != _GRAPH_INITIALIZER:
            continue
        if end - body >= BIG:
            tensor = _strip_tensor(data, body, end, count, raw)
            if tensor is not None:
                pieces += [data[kept:start], tag(_GRAPH_INITIALIZER, sum(map(len, tensor))), *tensor]
                kept = end
        count += 1
    pieces.append(data[kept:stop])
    return pieces, count


def _strip_tensor(
    data: memoryview, begin: int, stop: int, position: int, raw: dict[int, tuple[int, int]]
) -> list[memoryview] | None:
    for field, start, body, end in fields(data, begin, stop):
        if field == _TENSOR_RAW_DATA and end - body >= BIG:
            raw[position] = (body, end - body)
            return [data[begin:start], data[end:stop]]
    return None


def fields(data: memoryview, position: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, start of the tag, start of the body, end of the body) of each length-delimited field."""
    while position < stop:
        start = position
        tag, position = _varint(data, position, stop)
        kind = tag & 7
        if kind == _BYTES:
            length, position = _varint(data, position, stop)
            if length > stop - position:
                raise WireError("a field runs past the end")
            yield tag >> 3, start, position, position + length
            position += length
        elif kind == _VARINT:
            _, position = _varint(data, position, stop)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"unknown wire type {kind}")
    if position != stop:
        raise WireError("a field runs past the end")


def _varint(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while position < stop and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise WireError("a number runs past the end")


def tag(field: int, length: int) -> bytes:
    """The bytes that open a length-delimited field."""
    return encode_varint(field << 3 | _BYTES) + encode_varint(length)


def encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
