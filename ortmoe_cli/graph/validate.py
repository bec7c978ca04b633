"""Refuses graphs that contradict themselves, before anything is concluded from them."""

from functools import cache

import numpy as np
from onnx import defs

from ortmoe_cli.errors import ModelError
from ortmoe_cli.graph.index import Index


def validate(index: Index) -> None:
    """Raise ModelError unless every tensor is made once, and made before it is read."""
    path = index.model.path
    if _is_sound(index):
        return
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


def _is_sound(index: Index) -> bool:
    """Whether all is well, told from the arrays at once; if not, a closer look says what is wrong and where."""
    nodes = np.arange(len(index))
    (reads, counts), (makes, _) = index.read_by(nodes), index.made_by(nodes)
    sparse = [t.values.name for t in index.model.proto.graph.sparse_initializer]
    given = index.ids({*index.model.weights, *index.graph_inputs, *sparse})
    made = np.concatenate([given, makes])
    if len(np.unique(made)) != len(made) or not index.graph_outputs:
        return False
    since = np.full(int(max(made.max(initial=0), reads.max(initial=0))) + 1, len(index))
    since[given] = -1
    since[makes] = np.repeat(nodes, index.made_by(nodes)[1])
    if (since[reads] >= np.repeat(nodes, counts)).any() or not np.isin(index.ids(index.graph_outputs), made).all():
        return False
    ops = index.ops_of(nodes)
    return all(
        counts[ops == number].min() >= _fewest_inputs(index.op(int(np.argmax(ops == number))), index.opset)
        for number in np.unique(ops).tolist()
    )


@cache
def _fewest_inputs(op: str, opset: int) -> int:
    """How many inputs an operator of the default domain must have; 0 for those that ONNX does not know."""
    if not defs.has(op, opset):
        return 0
    return int(defs.get_schema(op, opset).min_input)


def _called(index: Index, i: int) -> str:
    name = index.node(i).name
    return f"{index.op(i)} '{name}'" if name else f"{index.op(i)} (node {i})"
