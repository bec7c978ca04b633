"""Routers that the node can do itself: then it may be fed with the raw logits, and most of the router's nodes go.

The node makes softmax → top-k → division by the sum. That is the same for every input but one: where logits are exactly
equal at the k-th place, TopK and the CUDA kernel take the expert with the lowest number, the CPU kernel the highest.
Scores of a sigmoid are left alone: they saturate, and where they do the router sees ties that the logits do not have.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from ortmoe_cli.graph.index import Index
from ortmoe_cli.moe.block import Block, RawLogits
from ortmoe_cli.moe.routing import renormalised, takes_largest
from ortmoe_cli.outcome import Options

Array = NDArray[Any]

_CLOSE = 1e-5


@dataclass(frozen=True)
class Form:
    """How the node is fed, for the report: `why` the one or the other, and what the user should know."""

    direct: bool
    why: str
    contract: tuple[str, ...] = ()
    assumes: str = ""


def recognise(logits: Array, weights: Array) -> RawLogits | None:
    """What a router does with its logits (T,E) that give these weights (T,E), if the node could do it."""
    hit = weights != 0
    if not takes_largest(logits, hit) or len(set(hit.sum(axis=1).tolist())) != 1:
        return None
    exponential = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = hit * exponential / exponential.sum(axis=1, keepdims=True)
    for normalised in (True, False):
        expected = renormalised(shares) if normalised else shares
        power = float((expected * expected).sum())
        scale = float((expected * weights).sum()) / power if power else 0.0
        if scale > 0 and np.abs(expected * scale - weights).max() <= _CLOSE * np.abs(weights).max():
            return RawLogits(normalised, 1.0 if abs(scale - 1) < _CLOSE else scale)
    return None


def wording(index: Index, block: Block, options: Options) -> Form:
    """How a block is fed, in the words of the report."""
    form = choose(index, block, options)
    if form.direct and not block.direct:
        return Form(False, "the router's own weights: with raw logits results differ")
    return form


def choose(index: Index, block: Block, options: Options) -> Form:
    """Whether a block is to be fed with raw logits."""
    if options.router == "weights":
        return Form(False, "the router's own weights, as asked for: exact for every input, ties included")
    if block.recognised is None or block.input_scale or block.hits is not None:
        return Form(False, "the router's own weights: it is none that the node can do itself")
    node = index.elem_type(block.experts.members[0].down.tensor)
    rounds = node != TensorProto.FLOAT and index.elem_type(block.router.logits) not in (0, node)
    ties = "where logits are exactly equal at the k-th place, the CPU kernel takes the expert with the highest number"
    if options.router == "auto":
        if options.ep != "cuda":
            return Form(False, "the router's own weights: exact on ties too; --router logits saves nodes")
        if rounds:
            return Form(False, "the router's own weights: the node would round the logits and choose other experts")
        return Form(True, "raw logits: the CUDA kernel breaks ties as the router does", (f"on the CPU: {ties}",))
    contract = [f"{ties}, the original the lowest"]
    if rounds:
        contract.append(f"logits are rounded to {TensorProto.DataType.Name(node).lower()} before experts are chosen")
    return Form(True, "raw logits, as asked for", tuple(contract), assumes="raw-logits")
