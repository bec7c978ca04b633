"""Shapes that the file itself declares, with its symbols replaced by sizes."""

import ast
from collections.abc import Mapping

from ortmoe_cli.graph.index import Index


def declared_shapes(index: Index, symbols: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The declared shapes of inner tensors, where every dimension is a number or a formula of known symbols."""
    shapes = {}
    for info in index.model.proto.graph.value_info:
        if not info.type.tensor_type.HasField("shape"):
            continue
        dims = [
            dim.dim_value if dim.HasField("dim_value") else evaluate(dim.dim_param, symbols)
            for dim in info.type.tensor_type.shape.dim
        ]
        known = tuple(dim for dim in dims if dim is not None)
        if len(known) == len(dims):
            shapes[info.name] = known
    return shapes


def evaluate(expression: str, symbols: Mapping[str, int]) -> int | None:
    """A sum or product of symbols and numbers, as exporters write them ('2*s54', 'past + seq'); None for all else."""
    if expression in symbols:
        return symbols[expression]
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, symbols)
    except (SyntaxError, ValueError, KeyError, RecursionError):
        return None


def _evaluate(node: ast.expr, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, symbols), _evaluate(node.right, symbols)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
    raise ValueError("not a sum or product")
