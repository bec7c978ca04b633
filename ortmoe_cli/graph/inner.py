"""Graphs inside a graph, as models of their own to look at: bodies of If, Loop and Scan, and calls of functions written
out. These are working copies; nothing of them is ever written to a file."""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper

from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.model import Model, Weight, external_span, tensor_bytes
from ortmoe_cli.graph.order import captures

_MOST_DEPTH = 16

Key = tuple[str, str, str]


def bodies(index: Index, i: int) -> Iterator[tuple[str, GraphProto]]:
    """The graphs of a node, with the names of the attributes that hold them."""
    for attribute in index.node(i).attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        for graph in attribute.graphs:
            yield attribute.name, graph


def body_model(index: Index, graph: GraphProto) -> Model:
    """A body as a model. Outer constants that it reads come along; other outer tensors become inputs too."""
    outer = captures(helper.make_node("If", [], [], name="", body=graph))
    proto = onnx.ModelProto()
    proto.CopyFrom(onnx.ModelProto(ir_version=index.model.proto.ir_version))
    proto.opset_import.extend(index.model.proto.opset_import)
    proto.functions.extend(index.model.proto.functions)
    proto.graph.CopyFrom(graph)
    tensors: dict[str, TensorProto] = {}
    weights: dict[str, Weight] = {}
    nodes, stack, seen = set[int](), list(outer), set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if index.is_initializer(name):
            tensors[name], weights[name] = index.model.tensor(name), index.model.weights[name]
        elif index.is_constant(name) and (i := index.producer(name)) is not None:
            nodes.add(i)
            stack.extend(index.reads(i))
        else:
            proto.graph.input.append(helper.make_tensor_value_info(name, index.elem_type(name), None))
    for tensor in graph.initializer:
        tensors[tensor.name] = tensor
        weights[tensor.name] = _weight(index.model, tensor)
    del proto.graph.node[:]
    proto.graph.node.extend([*(index.node(i) for i in sorted(nodes)), *graph.node])
    return Model(index.model.path, proto, weights, tensors)


def _weight(model: Model, tensor: TensorProto) -> Weight:
    """The header of a body's initializer: its values are in the proto, or in a file."""
    shape = tuple(tensor.dims)
    external = tensor.data_location == TensorProto.EXTERNAL
    span = external_span(model.path, tensor, tensor_bytes(tensor.data_type, shape)) if external else None
    return Weight(tensor.name, tensor.data_type, shape, span, external)


def written_out(model: Model) -> Model:
    """A model without functions: every call is replaced by the nodes of the function, under the name of the call."""
    functions = {_key(f.domain, f.name, f.overload): f for f in model.proto.functions}
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.functions[:]
    del proto.graph.node[:]
    proto.graph.node.extend(_expanded(model.proto.graph.node, functions, 0))
    known = {o.domain for o in proto.opset_import}
    for function in functions.values():
        for opset in function.opset_import:
            if opset.domain not in known:
                known.add(opset.domain)
                proto.opset_import.append(opset)
    return Model(model.path, proto, model.weights, {name: model.tensor(name) for name in model.weights})


def _key(domain: str, name: str, overload: str) -> Key:
    return ("" if domain == "ai.onnx" else domain, name, overload)


def _expanded(nodes: Sequence[NodeProto], functions: Mapping[Key, FunctionProto], depth: int) -> Iterator[NodeProto]:
    for node in nodes:
        function = functions.get(_key(node.domain, node.op_type, node.overload))
        if function is None or depth > _MOST_DEPTH:
            yield node
        else:
            yield from _expanded(_called(node, function), functions, depth + 1)


def _called(call: NodeProto, function: FunctionProto) -> list[NodeProto]:
    """The nodes of a function with the tensors and attributes of one call."""
    prefix = call.name or call.output[0]
    names = dict.fromkeys(function.input, "")
    names |= dict(zip(function.input, call.input, strict=False))
    names |= {formal: actual for formal, actual in zip(function.output, call.output, strict=False) if actual}
    given = {a.name: a for a in function.attribute_proto} | {a.name: a for a in call.attribute}
    return [_renamed(node, names, given, prefix) for node in function.node]


def _renamed(node: NodeProto, names: Mapping[str, str], given: Mapping[str, AttributeProto], prefix: str) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{prefix}/{node.name or node.output[0]}"
    for field in (copy.input, copy.output):
        field[:] = [names.get(name, f"{prefix}/{name}") if name else "" for name in field]
    del copy.attribute[:]
    for attribute in node.attribute:
        filled = AttributeProto()
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue
            filled.CopyFrom(given[attribute.ref_attr_name])
            filled.name = attribute.name
        else:
            filled.CopyFrom(attribute)
        graphs = [filled.g, *filled.graphs] if filled.type == AttributeProto.GRAPH else list(filled.graphs)
        for graph in graphs:
            _rename_body(graph, names, given, prefix)
        copy.attribute.append(filled)
    return copy


def _rename_body(graph: GraphProto, names: Mapping[str, str], given: Mapping[str, AttributeProto], prefix: str) -> None:
    for info in (*graph.input, *graph.output):
        info.name = names.get(info.name, f"{prefix}/{info.name}")
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, f"{prefix}/{tensor.name}")
    nodes = [_renamed(node, names, given, prefix) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
