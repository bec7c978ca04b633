"""Puts islands in the place of the regions they replace, and drops what nothing reads any more.

Everything else stays: nodes that survive are byte-equal, and so are metadata, functions, names and opset imports.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import NodeProto, helper, numpy_helper

from ortmoe_cli.graph.island import Island
from ortmoe_cli.graph.model import Model
from ortmoe_cli.graph.order import reads_of, topological

_IR_WITH_CONSTANTS = 4
"""Before this version of the format every initializer had to be listed as an input as well."""


def splice(model: Model, islands: Sequence[Island]) -> onnx.ModelProto:
    """A copy of the model's proto with the islands in it. The model itself is left alone.

    Headers of packed weights are not added (the writer does); the big weights of the model stay stripped.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    if not islands:
        return proto
    graph = proto.graph
    outputs = [output.name for output in graph.output]
    before = list(graph.node)
    alive_before = _alive(before, outputs)
    replaced = {name: island.name for island in islands for name in island.outputs}
    for node in before:
        for k, name in enumerate(node.output):
            if name in replaced:
                node.output[k] = f"{replaced[name]}/before/{name}"
    nodes = before + [node for island in islands for node in island.nodes]
    alive = _alive(nodes, outputs)
    gone = {name for i in alive_before - alive for name in nodes[i].output}
    kept = [i for i in range(len(nodes)) if i in alive or (i < len(before) and not _lost(i, nodes, alive_before, gone))]
    old = sum(i < len(before) for i in kept)
    _take(graph.node, topological([nodes[i] for i in kept], old))
    _drop_unread_initializers(model, graph, islands)
    lost = _names(model.proto.graph) - _names(graph)
    _take(graph.value_info, [info for info in graph.value_info if info.name not in lost])
    _take(graph.quantization_annotation, [q for q in graph.quantization_annotation if q.tensor_name not in lost])
    imported = {opset.domain for opset in proto.opset_import}
    for domain, version in sorted({item for island in islands for item in island.opsets.items()}):
        if domain not in imported:
            proto.opset_import.append(helper.make_opsetid(domain, version))
    return proto


def _alive(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> set[int]:
    """The nodes that some graph output depends on."""
    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    alive: set[int] = set()
    stack = [producer[name] for name in outputs if name in producer]
    while stack:
        i = stack.pop()
        if i in alive:
            continue
        alive.add(i)
        stack.extend(producer[name] for name in reads_of(nodes[i]) if name in producer)
    return alive


def _names(graph: onnx.GraphProto) -> set[str]:
    """Every tensor that is made in a graph or comes with it."""
    made = {name for node in graph.node for name in node.output}
    return made | {tensor.name for tensor in graph.initializer}


def _lost(i: int, nodes: Sequence[NodeProto], alive_before: set[int], gone: set[str]) -> bool:
    """Whether a node that no output depends on goes: its region went, or what it reads did. Others stay."""
    if i not in alive_before and not any(name in gone for name in reads_of(nodes[i])):
        return False
    gone.update(name for name in nodes[i].output if name)
    return True


def _drop_unread_initializers(model: Model, graph: onnx.GraphProto, islands: Sequence[Island]) -> None:
    """Initializers that only removed nodes read go; one that is listed as an input stays, for the input must stay."""
    read_before = {name for node in model.proto.graph.node for name in reads_of(node)}
    read = {name for node in graph.node for name in reads_of(node)}
    listed = {info.name for info in (*graph.input, *graph.output)}
    kept = [t for t in graph.initializer if t.name in read or t.name in listed or t.name not in read_before]
    _take(graph.initializer, kept)
    for island in islands:
        for name, value in island.constants.items():
            if name in read:
                graph.initializer.append(numpy_helper.from_array(value, name))
                if model.proto.ir_version < _IR_WITH_CONSTANTS:
                    elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
                    graph.input.append(helper.make_tensor_value_info(name, elem_type, value.shape))


def _take(field: Any, values: Sequence[Message]) -> None:
    """Make a repeated protobuf field hold just these messages."""
    serialised = [value.SerializeToString() for value in values]
    del field[:]
    for message in serialised:
        field.add().MergeFromString(message)
