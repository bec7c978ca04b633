"""QMoE nodes: from experts that are quantised in the model, moved as they are, and from float ones, rounded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.anchor import NBITS
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.emit import Emitter, Node, Rewrite, Terms, activation_attributes, build, emit, routing_attributes
from ortmoe_cli.moe.experts import Source
from ortmoe_cli.moe.packing import Plan, plan
from ortmoe_cli.moe.quantised.sources import Place, behind, place
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.outcome import Options
from ortmoe_cli.weights.pack import PackedWeight, Piece
from ortmoe_cli.weights.quantise import Scheme
from ortmoe_cli.weights.recode import Grid, Part, common_block, decoded, recoded
from ortmoe_cli.weights.rounding import rounded
from ortmoe_cli.weights.stored import Matrix, zero_points

ROUNDED_ACTIVATIONS = "rounded-activations"
"""The name under which a user accepts that a kernel rounds activations."""
_ON_CPU = "the CPU kernel of QMoE rounds activations to 8 bits for weights of 8 bits in blocks"
_EXACT_BLOCK = 16
"""The largest block of 2 bits that the CPU kernel does not round activations for."""
_PARTS: tuple[Part, ...] = ("codes", "scales", "zeros")

Tensors = Mapping[Part, PackedWeight]


@dataclass(frozen=True, eq=False)
class Quantised:
    """The tensors of both weights of a node."""

    bits: int
    block: int
    first: Tensors
    second: Tensors

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return tuple(tensors[part] for tensors in (self.first, self.second) for part in _PARTS if part in tensors)


def is_quantised(index: Index, block: Block) -> bool:
    """Whether the experts of a block are quantised. Raises Refused if only some matrices are."""
    tensors = sorted({m.tensor for e in block.experts.members for m in (*e.first, e.down)})
    found = [bool(behind(index, name)) for name in tensors]
    if any(found) and not all(found):
        raise Refused(
            "MOE131", f"{sum(found)} of the {len(found)} weights of the experts are quantised, the others not"
        )
    return all(found)


# --- quantised in the model


def emit_quantised(index: Index, cutter: Cutter, block: Block, source: Source, name: str, options: Options) -> Rewrite:
    """A QMoE node with the codes and scales of the model. Raises Refused where the operator cannot hold them."""
    places = _Places(index, cutter)
    elem_type = _scale_type(index, block, places)
    made = plan(block.experts, source, block.width, elem_type, lambda part: f"{name}/{part}")
    first, second = made.weights["fc1"], made.weights["fc2"]
    matrices = places.of(first) + places.of(second)
    bits = _bits(matrices)
    size = _block(matrices, bits)
    contract, assumes = _rounds(index, matrices, bits, size, options)
    tensors = []
    for weight, inputs in ((first, block.width), (second, block.experts.inner)):
        grid = Grid(bits, size, inputs)
        if inputs * bits % 8:
            raise Refused("MOE131", f"rows of {inputs} codes of {bits} bits do not end with a byte")
        zeros = any(_has_zeros(index, matrix) for matrix in places.of(weight))
        tensors.append(recoded(weight.name, weight, grid, index.model, places.locate, elem_type, zeros))
    node = Quantised(bits, size, *tensors)
    terms = Terms(
        "MOE004",
        f"int{bits} {f'in blocks of {size}' if size else 'per row'}, as in the model",
        contract,
        assumes,
        {"bits": bits, "block": size, "zero points": "zeros" in node.first or "zeros" in node.second},
    )
    return _rewrite(index, block, name, elem_type, made, node, terms)


class _Places:
    """Where the pieces of a plan lie in quantised constants."""

    def __init__(self, index: Index, cutter: Cutter) -> None:
        self._index, self._cutter = index, cutter
        self._places: dict[str, Place] = {}

    def __getitem__(self, tensor: str) -> Place:
        if tensor not in self._places:
            self._places[tensor] = place(self._index, self._cutter, tensor)
        return self._places[tensor]

    def locate(self, piece: Piece) -> Matrix:
        if piece.shape is not None:
            raise Refused("MOE131", "the quantised experts are flat rows of a table")
        return self[piece.tensor].matrix(piece.expert, piece.transpose, slice(*piece.source), slice(*piece.columns))

    def of(self, weight: PackedWeight) -> list[Matrix]:
        return [self.locate(piece) for pieces in weight.pieces for piece in pieces]


def _bits(matrices: Sequence[Matrix]) -> int:
    found = sorted({matrix.stored.bits for matrix in matrices})
    if len(found) > 1:
        raise Refused("MOE131", f"experts of {' and '.join(map(str, found))} bits, the operator takes one width")
    return found[0]


def _block(matrices: Sequence[Matrix], bits: int) -> int:
    unique = {(m.stored.granularity[m.columns.axis], m.columns.places): m for m in matrices}
    size = common_block(list(unique.values()))
    if size is None:
        edges = sorted({m.stored.granularity[m.columns.axis] for m in matrices})
        widths = sorted({len(m.columns.places) for m in matrices})
        raise Refused(
            "MOE131",
            f"a scale for every {' or '.join(map(str, edges))} inputs of {' and '.join(map(str, widths))}: no block of "
            "a power of two from 16 on suits all",
        )
    return min(size, _EXACT_BLOCK) if bits == 2 else size


def _scale_type(index: Index, block: Block, places: _Places) -> int:
    names = {places[m.tensor].stored.scales for e in block.experts.members for m in (*e.first, e.down)}
    types = {index.model.weights[name].elem_type for name in names}
    if len(types) > 1 or not types <= {1, 10, 16}:
        raise Refused("MOE131", f"scales of the element types {sorted(types)}")
    return types.pop()


def _has_zeros(index: Index, matrix: Matrix) -> bool:
    """Whether there are zero points other than the middle code, which needs none."""
    stored = matrix.stored
    if not stored.zeros:
        return stored.zero != stored.half
    return bool((zero_points(stored, index.model) != stored.half).any())


def _rounds(
    index: Index, matrices: Sequence[Matrix], bits: int, block: int, options: Options
) -> tuple[tuple[str, ...], str]:
    """(contract, assumption) for what the CPU kernel rounds by itself. Raises Refused where nobody agreed to that."""
    if bits != 8 or not block:
        return (), ""
    if options.ep != "cpu":
        return (_ON_CPU,), ""
    names = {matrix.stored.codes for matrix in matrices}
    readers = {i for name in names for i in index.consumers(name) if index.op(i) == NBITS}
    alike = bool(readers) and all(index.attribute(i, "accuracy_level", 0) == 4 for i in readers)
    if ROUNDED_ACTIVATIONS not in options.assume:
        raise Refused(
            "MOE132",
            f"experts of 8 bits in blocks of {block}: the CPU kernel of QMoE rounds activations to 8 bits for these",
            f"--assume {ROUNDED_ACTIVATIONS} accepts that, --ep cuda does not need it",
        )
    why = "as the original does (accuracy_level 4)" if alike else "about 1 % of the output"
    return (f"{_ON_CPU}, {why}; ORT_QMOE_CPU_QNBIT_GEMM=0 avoids it",), ROUNDED_ACTIVATIONS


# --- float in the model, rounded


def emit_rounded(index: Index, block: Block, source: Source, name: str, scheme: Scheme) -> tuple[Rewrite, Rewrite]:
    """(a QMoE node with the experts rounded, the float rewrite that it stands for). Raises Refused."""
    plain = emit(index, block, source, name)
    first, second = (next(w for w in plain.weights if w.name == f"{name}/{part}") for part in ("fc1", "fc2"))
    for inputs in (block.width, block.experts.inner):
        if scheme.block and inputs % scheme.block:
            raise Refused(
                "MOE134",
                f"blocks of {scheme.block} do not divide the {inputs} inputs of the experts",
                f"--block-size {_largest(block.width, block.experts.inner)}",
            )
        if inputs * scheme.bits % 8:
            raise Refused("MOE134", f"rows of {inputs} codes of {scheme.bits} bits do not end with a byte")
    made = plan(block.experts, source, block.width, first.elem_type, lambda part: f"{name}/{part}")
    node = Quantised(
        scheme.bits, scheme.block, rounded(first.name, first, scheme), rounded(second.name, second, scheme)
    )
    before, after = (sum(w.nbytes for w in weights) for weights in ((first, second), node.weights))
    terms = Terms(
        "MOE005",
        f"{scheme.describe()}, {before / after:.1f} times smaller",
        (),
        "rounded-experts",
        {"bits": scheme.bits, "block": scheme.block, "bytes before": before, "bytes after": after},
    )
    return _rewrite(index, block, name, first.elem_type, made, node, terms), plain


def _largest(*widths: int) -> int:
    """The largest block that divides all; 0 (one per row) where none does."""
    return next((size for size in (256, 128, 64, 32, 16) if not any(width % size for width in widths)), 0)


# --- the node


def _rewrite(
    index: Index, block: Block, name: str, elem_type: int, made: Plan, node: Quantised, terms: Terms
) -> Rewrite:
    """The QMoE island, with a float one of the same weights, decoded, as its proof."""
    first, second = made.weights["fc1"], made.weights["fc2"]
    biases = tuple(made.weights[part] for part in ("fc1_bias", "fc2_bias") if part in made.weights)
    exact = Plan(
        {
            **made.weights,
            "fc1": decoded(first.name, first, Grid(node.bits, node.block, block.width), node.first),
            "fc2": decoded(second.name, second, Grid(node.bits, node.block, block.experts.inner), node.second),
        },
        made.constants,
    )
    proof = Rewrite(build(index, block, name, elem_type, moe_node(block, exact)), (*exact.weights.values(),))
    island = build(index, block, name, elem_type, qmoe_node(block, made, node))
    return Rewrite(island, (*node.weights, *biases), proof, terms)


def moe_node(block: Block, made: Plan) -> Node:
    """A float node."""
    attributes = {**activation_attributes(block.experts.activation), **routing_attributes(block)}
    return lambda e, x, logits: e.builder.one("MoE", x, logits, *e.weights(made), domain="com.microsoft", **attributes)


def qmoe_node(block: Block, made: Plan, node: Quantised) -> Node:
    """A quantised node. `made`: where the biases are."""
    attributes: dict[str, Any] = {
        **activation_attributes(block.experts.activation),
        **routing_attributes(block),
        "expert_weight_bits": node.bits,
    }
    if node.block:
        attributes["block_size"] = node.block
    if "weights_prepacked" in _attributes_of("QMoE"):
        attributes["weights_prepacked"] = 0

    def add(e: Emitter, x: str, logits: str) -> str:
        biases = dict(
            zip(("fc1", "fc1_bias", "fc2", "fc2_bias"), [*e.weights(_biases_of(made)), *[""] * 4], strict=False)
        )
        inputs = [x, logits]
        for part, tensors in (("fc1", node.first), ("fc2", node.second)):
            inputs += [_read(e, part, tensors, "codes"), _read(e, part, tensors, "scales"), biases[f"{part}_bias"]]
        inputs += ["", "", ""]
        inputs += [_read(e, part, tensors, "zeros") for part, tensors in (("fc1", node.first), ("fc2", node.second))]
        while not inputs[-1]:
            inputs.pop()
        return e.builder.one("QMoE", *inputs, domain="com.microsoft", **attributes)

    return add


def _biases_of(made: Plan) -> Plan:
    return Plan({part: weight for part, weight in made.weights.items() if part.endswith("bias")}, made.constants)


def _read(e: Emitter, part: str, tensors: Tensors, kind: Part) -> str:
    if kind not in tensors:
        return ""
    weight = tensors[kind]
    return e.builder.weight(f"{part}_{kind}", weight.elem_type, weight.shape)


@cache
def _attributes_of(op: str) -> frozenset[str]:
    """The attributes that the installed runtime knows for an operator of its own."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # noqa: PLC0415

    schemas = [s for s in get_all_operator_schema() if s.domain == "com.microsoft" and s.name == op]
    return frozenset(name for schema in schemas for name in schema.attributes)
