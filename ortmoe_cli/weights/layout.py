"""Where each byte of the output comes from, worked out before the first is written.

A protobuf message is a string of fields in any order. So a model of any size can be written without ever being in
memory: its own bytes are sent as they are, and where a weight belongs, its raw data is sent from where it lies. Only
initializers whose data is elsewhere are touched; every other byte, unknown fields included, passes through unread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx
from google.protobuf.message import EncodeError, Message
from onnx import FunctionProto, NodeProto, SparseTensorProto, TensorProto, TrainingInfoProto, helper

from ortmoe_cli.errors import OutputError
from ortmoe_cli.graph.model import Model, Span, external_span, tensor_bytes
from ortmoe_cli.graph.wire import fields, tag
from ortmoe_cli.weights.pack import PackedWeight

INLINE_PACKED = 64 << 20
"""Packed weights of more bytes than this leave the .onnx file, even if the model had no data file."""

INLINE_TOTAL = 1_900_000_000
"""Protobuf ends at 2 GiB; a model that would come near it gets a data file."""

ALIGNMENT = 4096
"""Each weight of the data file starts on a page, so that runtimes can map it."""

_GRAPH, _INITIALIZER, _INPUT, _RAW_DATA = 7, 5, 11, 9
_IR_UNLISTED = 4
"""Before this version of the format, every initializer has to be listed as an input too."""

_IN_MODEL: dict[int, type[Message]] = {20: TrainingInfoProto, 25: FunctionProto}
_IN_GRAPH: dict[int, type[Message]] = {1: NodeProto, 15: SparseTensorProto}
_LOCATION = b"\x0a\x08location"
"""The key of an external data entry on the wire: what does not hold these bytes refers to no file."""

Content = Span | PackedWeight
Part = bytes | memoryview | Span | PackedWeight


@dataclass(frozen=True)
class Layout:
    """The parts of the .onnx file in order, and what the data file holds at which offset, ascending."""

    proto: tuple[Part, ...]
    data: tuple[tuple[int, Content], ...]
    moved: int
    """How many inline weights had to leave the .onnx file."""

    @property
    def proto_bytes(self) -> int:
        return sum(map(size_of, self.proto))

    @property
    def data_bytes(self) -> int:
        return self.data[-1][0] + size_of(self.data[-1][1]) if self.data else 0

    @property
    def contents(self) -> Iterator[Content]:
        yield from (content for _, content in self.data)
        yield from (part for part in self.proto if isinstance(part, Span | PackedWeight))


def size_of(part: Part) -> int:
    if isinstance(part, Span):
        return part.length
    return part.nbytes if isinstance(part, PackedWeight) else len(part)


def plan(model: Model, proto: onnx.ModelProto, packed: Sequence[PackedWeight], location: str) -> Layout:
    """The layout of `proto` with its weights and the packed ones; `location` is the name of the data file."""
    taken = {tensor.name for tensor in proto.graph.initializer}
    for weight in packed:
        if weight.name in taken:
            raise ValueError(f"there are two initializers called '{weight.name}'")
        taken.add(weight.name)
    try:
        message = proto.SerializeToString()
    except EncodeError as error:
        raise OutputError(f"the model's graph does not fit into a protobuf message: {error}") from error
    inline = sum(_inline_span(model, tensor).length for tensor in proto.graph.initializer if _is_inline(model, tensor))
    extra = sum(weight.nbytes for weight in packed)
    move = len(message) + inline > INLINE_TOTAL
    separate = (
        move
        or any(weight.external for weight in model.weights.values())
        or _LOCATION in message
        or extra > INLINE_PACKED
        or len(message) + inline + extra > INLINE_TOTAL
    )
    layout = _Planner(model, proto, message, _DataFile(location), move, separate).layout(packed)
    if layout.proto_bytes >= 1 << 31:
        raise OutputError(f"the model's graph takes {layout.proto_bytes} bytes without weights; ONNX ends at 2 GiB")
    return layout


def _is_inline(model: Model, tensor: TensorProto) -> bool:
    """Whether an initializer's values were left in the input's .onnx file when it was opened."""
    weight = model.weights.get(tensor.name)
    if weight is None or weight.span is None or weight.external:
        return False
    return tensor.data_location != TensorProto.EXTERNAL and not tensor.HasField("raw_data")


def _inline_span(model: Model, tensor: TensorProto) -> Span:
    span = model.weights[tensor.name].span
    assert span is not None
    return span


@dataclass
class _DataFile:
    """The data file while it is being laid out. What lies at the same place in the input is stored once."""

    location: str
    placed: list[tuple[int, Content]] = field(default_factory=list)
    end: int = 0
    known: dict[Span, int] = field(default_factory=dict)

    def refer(self, tensor: TensorProto, content: Content) -> None:
        """Give the content a place and make the tensor point there."""
        offset = self.known.get(content) if isinstance(content, Span) else None
        if offset is None:
            offset = -(-self.end // ALIGNMENT) * ALIGNMENT
            self.placed.append((offset, content))
            self.end = offset + size_of(content)
            if isinstance(content, Span):
                self.known[content] = offset
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (("location", self.location), ("offset", offset), ("length", size_of(content))):
            tensor.external_data.add(key=key, value=str(value))


@dataclass
class _Planner:
    model: Model
    proto: onnx.ModelProto
    message: bytes
    data: _DataFile
    move: bool
    separate: bool
    moved: int = 0

    def layout(self, packed: Sequence[PackedWeight]) -> Layout:
        view, kept = memoryview(self.message), 0
        parts: list[Part] = []
        for number, start, body, end in fields(view, 0, len(view)):
            if number == _GRAPH:
                new: Sequence[Part] | None = self._graph(view, body, end, packed)
            else:
                new = self._nested(_IN_MODEL.get(number), body, end)
            if new is not None:
                parts += [view[kept:start], *_field(number, new)]
                kept = end
        parts.append(view[kept:])
        return Layout(tuple(part for part in parts if size_of(part)), tuple(self.data.placed), self.moved)

    def _graph(self, view: memoryview, begin: int, stop: int, packed: Sequence[PackedWeight]) -> list[Part]:
        initializers = iter(self.proto.graph.initializer)
        parts: list[Part] = []
        kept = begin
        for number, start, body, end in fields(view, begin, stop):
            if number == _INITIALIZER:
                new = self._initializer(next(initializers), view[body:end])
            else:
                new = self._nested(_IN_GRAPH.get(number), body, end)
            if new is not None:
                parts += [view[kept:start], *_field(number, new)]
                kept = end
        parts.append(view[kept:stop])
        for weight in packed:
            header = TensorProto(name=weight.name, data_type=weight.elem_type, dims=weight.shape)
            parts += _field(_INITIALIZER, self._filled(header, weight, self.separate))
            if self.proto.ir_version < _IR_UNLISTED:
                info = helper.make_tensor_value_info(weight.name, weight.elem_type, weight.shape)
                parts += _field(_INPUT, [info.SerializeToString()])
        return parts

    def _initializer(self, tensor: TensorProto, header: memoryview) -> list[Part] | None:
        """The new bytes of an initializer; None if it stays as it is."""
        if tensor.data_location == TensorProto.EXTERNAL:
            weight = self.model.weights.get(tensor.name)
            span = weight.span if weight and weight.external else None
            return self._filled(_copy(tensor), span or self._outside(tensor), True)
        if not _is_inline(self.model, tensor):
            return None
        span = _inline_span(self.model, tensor)
        if self.move:
            self.moved += 1
            return self._filled(_copy(tensor), span, True)
        return [header, *_field(_RAW_DATA, [span])]

    def _filled(self, header: TensorProto, content: Content, separate: bool) -> list[Part]:
        if separate:
            self.data.refer(header, content)
            return [header.SerializeToString()]
        return [header.SerializeToString(), *_field(_RAW_DATA, [content])]

    def _nested(self, kind: type[Message] | None, begin: int, stop: int) -> list[Part] | None:
        """External tensors within nodes, functions and the like move to the new data file as well."""
        if kind is None or self.message.find(_LOCATION, begin, stop) < 0:
            return None
        message = kind.FromString(self.message[begin:stop])
        tensors = [tensor for tensor in _tensors(message) if tensor.data_location == TensorProto.EXTERNAL]
        for tensor in tensors:
            self.data.refer(tensor, self._outside(tensor))
        return [message.SerializeToString()] if tensors else None

    def _outside(self, tensor: TensorProto) -> Span:
        return external_span(self.model.path, tensor, tensor_bytes(tensor.data_type, tuple(tensor.dims)))


def _field(number: int, parts: Sequence[Part]) -> list[Part]:
    return [tag(number, sum(map(size_of, parts))), *parts]


def _copy(tensor: TensorProto) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    return copy


def _tensors(message: Message) -> Iterator[TensorProto]:
    """Every tensor within a message, however deep."""
    if isinstance(message, TensorProto):
        yield message
        return
    for _, value in message.ListFields():
        for child in (value,) if isinstance(value, Message | str | bytes | int | float) else value:
            if isinstance(child, Message):
                yield from _tensors(child)
