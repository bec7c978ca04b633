"""Blocks of experts inside control flow and functions. They are found and named, and left alone: what is written back
would no longer be the file that came in."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from onnx import NodeProto

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.inner import bodies, body_model, written_out
from ortmoe_cli.graph.model import Model
from ortmoe_cli.graph.order import subgraphs
from ortmoe_cli.moe.anchor import PRODUCTS, SELECTIONS
from ortmoe_cli.moe.region import Cone
from ortmoe_cli.outcome import Already, Context, Fusion, Outcome, Refusal, silent

CONTROL = ("If", "Loop", "Scan", "SequenceMap")

_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "MatMulNBits", "FusedMatMul", "FusedGemm", "MatMulInteger"})
_MOST_DEPTH = 16

Find = Callable[[Context], list[Outcome]]


def nested(context: Context, find: Find, found: Collection[str]) -> Iterator[Refusal]:
    """Blocks that `find` finds in bodies and functions, beside those named `found`, that the graph itself shows."""
    index = context.index
    for i in index.nodes_of(*CONTROL):
        node = index.node(i)
        for attribute, graph in bodies(index, i):
            if _selects(graph.node):
                where = f"the {attribute} of {node.op_type} '{node.name or node.output[0]}'"
                yield from _inside(context, body_model(index, graph), find, where, set())
    functions = index.model.proto.functions
    if functions and any(_selects(f.node) for f in functions):
        calls = {f"{f.domain}.{f.name}" if f.domain else f.name for f in functions}
        names = [index.node(i).name or index.outputs(i)[0] for i in index.nodes_of(*calls)]
        for outcome in _inside(context, written_out(index.model), find, "", found):
            call = max((name for name in names if outcome.name.startswith(f"{name}/")), key=len, default="")
            function = next((index.node(i) for i in index.nodes_of(*calls) if call and call in _named(index, i)), None)
            where = f"function '{function.op_type}', called by '{call}'" if function else "functions"
            yield replace(outcome, message=f"part of the block lies inside {where}")


def _named(index: Index, i: int) -> tuple[str, ...]:
    return (index.node(i).name, index.outputs(i)[0])


def _inside(context: Context, model: Model, find: Find, where: str, found: Collection[str]) -> Iterator[Refusal]:
    """The blocks of a model that is part of another, as refusals."""
    index = Index(model)
    options = replace(context.options, verify="none")
    for outcome in find(Context(index, Cutter(index, context.cutter.byte_budget), options, silent)):
        if isinstance(outcome, Already) or outcome.name in found:
            continue
        if outcome.code == "MOE115" and isinstance(outcome, Refusal):
            yield outcome  # deeper inside
            continue
        nearest = outcome.message if isinstance(outcome, Fusion) else f"{outcome.code}: {outcome.message}"
        facts = outcome.facts
        yield Refusal("moe", outcome.name, outcome.layer, "MOE115", f"the block lies inside {where}", nearest, facts)


def _selects(nodes: Collection[NodeProto]) -> bool:
    """Whether something is chosen here, at any depth."""
    return any(node.op_type in SELECTIONS or any(_selects(graph.node) for graph in subgraphs(node)) for node in nodes)


def holds_products(index: Index, cone: Cone, i: int) -> bool:
    """Whether a node has matrix products inside, in a body or function, that hidden states go into."""
    if not any(name in cone.hidden for name in index.reads(i)):
        return False
    functions = {(f.domain, f.name): f.node for f in index.model.proto.functions}
    return index.op(i) not in (*PRODUCTS, "Einsum") and _multiplies(index.node(i), functions, 0)


def _multiplies(node: NodeProto, functions: Mapping[tuple[str, str], Iterable[NodeProto]], depth: int) -> bool:
    if node.op_type in _PRODUCTS:
        return True
    inside = [child for graph in subgraphs(node) for child in graph.node]
    inside += functions.get((node.domain, node.op_type), ())
    return depth < _MOST_DEPTH and any(_multiplies(child, functions, depth + 1) for child in inside)
