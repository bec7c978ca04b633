"""Refuses graphs that contradict themselves, before anything is concluded from them."""

from functools import cache

from onnx import defs

from ortmoe_cli.errors import ModelError
from ortmoe_cli.graph.index import Index


def validate(index: Index) -> None:
    """Raise ModelError unless every tensor is made once, and made before it is read."""
    path = index.model.path
    made = {*index.model.weights, *index.graph_inputs}
    made |= {sparse.values.name for sparse in index.model.proto.graph.sparse_initializer}
    for i in range(len(index)):
        if len(index.inputs(i)) < _fewest_inputs(index.op(i), index.opset):
            raise ModelError(f"{path}: invalid graph: {_called(index, i)} lacks inputs", "EXT105")
        for name in index.reads(i):
            if name not in made:
                problem = "is not made by anything" if index.producer(name) is None else "depends on it: a cycle"
                raise ModelError(
                    f"{path}: invalid graph: {_called(index, i)} reads '{name}', which {problem}", "EXT105"
                )
        for name in index.outputs(i):
            if name and name in made:
                raise ModelError(f"{path}: invalid graph: '{name}' is made twice, now by {_called(index, i)}", "EXT105")
            made.add(name)
    if not index.graph_outputs:
        raise ModelError(f"{path}: invalid graph: it has no outputs", "EXT105")
    for name in index.graph_outputs:
        if name not in made:
            raise ModelError(f"{path}: invalid graph: nothing makes the output '{name}'", "EXT105")


@cache
def _fewest_inputs(op: str, opset: int) -> int:
    """How many inputs an operator of the default domain must have; 0 for those that ONNX does not know."""
    if not defs.has(op, opset):
        return 0
    return int(defs.get_schema(op, opset).min_input)


def _called(index: Index, i: int) -> str:
    name = index.node(i).name
    return f"{index.op(i)} '{name}'" if name else f"{index.op(i)} (node {i})"
