"""A model without its weights: the graph in memory, the weights where they lie."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from ortmoe_cli.errors import ModelError
from ortmoe_cli.graph.wire import WireError, strip

_BITS = {
    getattr(TensorProto, name): bits
    for bits, names in {
        2: ("INT2", "UINT2"),
        4: ("INT4", "UINT4", "FLOAT4E2M1"),
    }.items()
    for name in names
    if hasattr(TensorProto, name)
}
"""Element types that are narrower than a byte."""


@dataclass(frozen=True)
class Span:
    """Bytes in a file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Weight:
    """A top-level initializer. `span` is where its bytes lie; None when the values are small and inside the proto."""

    name: str
    elem_type: int
    shape: tuple[int, ...]
    span: Span | None
    external: bool

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.elem_type, self.shape)


@dataclass(frozen=True, eq=False)
class Model:
    """An opened model. `proto` lacks the big inline weights (see `wire`) and must never be changed."""

    path: Path
    proto: onnx.ModelProto
    weights: Mapping[str, Weight]
    _tensors: Mapping[str, TensorProto] = field(repr=False)
    _maps: dict[Path, np.ndarray] = field(default_factory=dict, repr=False)

    def tensor(self, name: str) -> TensorProto:
        """The initializer's header as it stands in the file, without big data."""
        return self._tensors[name]

    def array(self, name: str) -> np.ndarray:
        """The values of an initializer, read-only; a view of the memory-mapped file where they are big."""
        weight = self.weights[name]
        if weight.span is None:
            return numpy_helper.to_array(self._tensors[name])
        data = self.raw(name)
        if weight.elem_type in _BITS:
            packed = TensorProto(data_type=weight.elem_type, dims=weight.shape, raw_data=data.tobytes())
            return numpy_helper.to_array(packed)
        return data.view(helper.tensor_dtype_to_np_dtype(weight.elem_type)).reshape(weight.shape)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of an initializer as a flat array, elements narrower than a byte still packed."""
        span = self.weights[name].span
        if span is None:
            tensor = self._tensors[name]
            if self.weights[name].elem_type in _BITS:
                tensor = numpy_helper.from_array(numpy_helper.to_array(tensor))
                return np.frombuffer(tensor.raw_data, np.uint8)
            return np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(-1).view(np.uint8)
        if span.path not in self._maps:
            self._maps[span.path] = np.memmap(span.path, np.uint8, "r")
        return self._maps[span.path][span.offset : span.offset + span.length]

    def release(self) -> None:
        """Let go of the memory maps; they are made again when a weight is read next."""
        self._maps.clear()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


def tensor_bytes(elem_type: int, shape: tuple[int, ...]) -> int:
    """Size of a tensor's raw data in bytes; sub-byte elements are packed."""
    count = math.prod(shape)
    if elem_type in _BITS:
        return -(-count * _BITS[elem_type] // 8)
    return count * _itemsize(elem_type)


@cache
def _itemsize(elem_type: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


def open_model(path: Path) -> Model:
    """Open an ONNX file. Raises ModelError if it is missing, not ONNX, or its external data does not fit."""
    if not path.exists():
        raise ModelError(f"{path}: no such file", "EXT101")
    if path.is_dir():
        raise ModelError(f"{path} is a folder; give the .onnx file inside it", "EXT101")
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        stripped = strip(data.data)
        proto = onnx.ModelProto.FromString(stripped.message)
    except (WireError, DecodeError) as error:
        raise ModelError(f"{path} is not an ONNX model: {error}", "EXT101") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "EXT101") from error
    if not proto.HasField("graph") or (not proto.opset_import and not proto.ir_version):
        raise ModelError(f"{path} is not an ONNX model: it holds no graph", "EXT101")
    if not proto.graph.node:
        raise ModelError(f"{path}: the graph is empty, there is nothing to look at", "EXT105")
    tensors, weights, seen = {}, {}, dict[str, tuple[Path, int]]()
    for position, tensor in enumerate(proto.graph.initializer):
        if tensor.name in tensors:
            raise ModelError(f"{path}: two initializers are called '{tensor.name}'", "EXT105")
        tensors[tensor.name] = tensor
        weights[tensor.name] = _weight(path, tensor, stripped.raw.get(position), seen)
    return Model(path, proto, weights, tensors)


def _weight(path: Path, tensor: TensorProto, raw: tuple[int, int] | None, seen: dict[str, tuple[Path, int]]) -> Weight:
    shape = tuple(tensor.dims)
    where = f"{path}: weight '{tensor.name}'"
    if tensor.data_type == TensorProto.STRING:
        return Weight(tensor.name, tensor.data_type, shape, None, False)
    try:
        expected = tensor_bytes(tensor.data_type, shape)
    except KeyError as error:
        raise ModelError(f"{where} has the unknown element type {tensor.data_type}", "EXT105") from error
    external = tensor.data_location == TensorProto.EXTERNAL
    span = external_span(path, tensor, expected, seen) if external else Span(path, *raw) if raw else None
    stored = span.length if span else _stored_bytes(tensor, expected)
    if stored != expected:
        raise ModelError(
            f"{where} should be {expected} bytes long by its type and shape {list(shape)}, but {stored} are stored",
            "EXT103",
        )
    return Weight(tensor.name, tensor.data_type, shape, span, external)


_TYPED_DATA: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("float_data", 1),
    TensorProto.DOUBLE: ("double_data", 1),
    TensorProto.INT64: ("int64_data", 1),
    TensorProto.UINT32: ("uint64_data", 1),
    TensorProto.UINT64: ("uint64_data", 1),
    TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.COMPLEX128: ("double_data", 2),
}
"""Where values stand that are not raw: (field, numbers per element); all other types use int32_data."""


def _stored_bytes(tensor: TensorProto, expected: int) -> int:
    """How many bytes of values stand in the tensor itself, raw or as numbers."""
    if tensor.raw_data or not expected:
        return len(tensor.raw_data)
    field, numbers = _TYPED_DATA.get(tensor.data_type, ("int32_data", 1))
    elements = math.prod(tensor.dims)
    packed = _BITS.get(tensor.data_type, 8)
    wanted = -(-elements * packed // 8) if packed < 8 else elements * numbers
    return expected if len(getattr(tensor, field)) == wanted else len(getattr(tensor, field))


def external_span(
    path: Path, tensor: TensorProto, expected: int, seen: dict[str, tuple[Path, int]] | None = None
) -> Span:
    """Where a tensor's external data lies. Raises ModelError where it is missing, too short or out of bounds.

    `seen`: the data files of this model that were looked at before, with their sizes.
    """
    seen = {} if seen is None else seen
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{path}: the external data of weight '{tensor.name}'"
    try:
        file, size = _data_file(path, location, seen)
    except ModelError as error:
        raise ModelError(f"{where} {error.message}", error.code) from error
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError as error:
        raise ModelError(f"{where} has an offset or length that is not a number", "EXT105") from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"{where} is cut short: '{location}' has {size} bytes, {offset + length} are needed; copy the file again",
            "EXT103",
        )
    return Span(file, offset, length)


def _data_file(path: Path, location: str, seen: dict[str, tuple[Path, int]]) -> tuple[Path, int]:
    """A data file beside the model, and its size."""
    if location in seen:
        return seen[location]
    parts = (PurePosixPath(location), PureWindowsPath(location))
    if not location or any(p.is_absolute() or ".." in p.parts or getattr(p, "drive", "") for p in parts):
        raise ModelError(f"lies outside the model's folder ('{location}'); move it there and fix the path", "EXT104")
    file = path.parent / location
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", "EXT102") from error
    if size is None:
        raise ModelError(f"is missing: no file '{location}' beside the model; copy it there", "EXT102")
    seen[location] = file, size
    return file, size
