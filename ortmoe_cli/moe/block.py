"""A block of experts that is fully identified: everything that emission and verification need."""

from dataclasses import dataclass

from ortmoe_cli.moe.anchor import Router
from ortmoe_cli.moe.experts import Experts
from ortmoe_cli.moe.region import Cone, Cut
from ortmoe_cli.moe.routing import Dense, Pair


@dataclass(frozen=True)
class Addition:
    """A tensor (T,H) that the block adds to its routed experts, times a number."""

    tensor: str
    factor: float


@dataclass(frozen=True)
class RawLogits:
    """What a router does that the node could do itself: weights are the softmax of the logits, times `scale`, divided
    by the sum of the chosen if `normalised`."""

    normalised: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Block:
    """exit = scale · Σ_e w_e · expert_e(input) + additions.

    hits: the original only runs when exactly so many experts are hit (None: always); reshape: the tensor whose shape
    the exit has ('' if it is (T,H)); input_scale: weights multiply the input of the experts (k = 1 only); recognised:
    what the router does, if the node could do it; direct: it shall.
    """

    router: Router
    cone: Cone
    region: Cut
    exit: str
    input: str
    width: int
    experts: Experts
    source: Dense | Pair
    scale: float
    additions: tuple[Addition, ...]
    hits: int | None
    reshape: str
    router_kind: str
    row_bytes: int
    input_scale: bool = False
    recognised: RawLogits | None = None
    direct: bool = False
