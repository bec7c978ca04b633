"""What the finders of blocks hand up: what was found, what it becomes, or why it is left alone.

Everything here is data. Nothing has been changed when an outcome exists; `engine` decides and writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ortmoe_cli.graph.cut import Cutter
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.island import Island
from ortmoe_cli.weights.pack import PackedWeight
from ortmoe_cli.weights.quantise import Scheme

Kind = Literal["moe", "gqa"]
Guarantee = Literal["exact", "narrowed", "assumed", "repaired"]
ASSUMED_KEY = "ortmoe.assume"
"""The entry of a model's metadata that holds what it was fused under, with commas between."""

Fact = str | int | float | bool


@dataclass(frozen=True)
class Check:
    """One comparison of the original with its replacement: under which inputs, and the largest relative difference."""

    regime: str
    error: float


@dataclass(frozen=True)
class Fusion:
    """A block that can be replaced. `island` takes its place, `weights` are what it reads, `contract` what narrows it.

    `region` counts the nodes that the island makes superfluous. `assumes`: what the user granted, if that is the
    guarantee. `proof`: where the island rounds, the same block with a node that does not, to be compared with the
    original in its place.
    """

    kind: Kind
    name: str
    layer: int | None
    code: str
    message: str
    guarantee: Guarantee
    island: Island
    weights: tuple[PackedWeight, ...] = ()
    contract: tuple[str, ...] = ()
    region: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    proof: "Fusion | None" = None
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A block that must stay as it is. `nearest` says how close it came."""

    kind: Kind
    name: str
    layer: int | None
    code: str
    message: str
    nearest: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Already:
    """A fused node that the model came with."""

    kind: Kind
    name: str
    layer: int | None
    code: str
    message: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


Outcome = Fusion | Refusal | Already


class Progress(Protocol):
    """Told about each stage ('identify', 'verify', 'write', …) as it goes on."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that tells nobody."""


@dataclass(frozen=True)
class Options:
    """What the user asked for. `only`: kinds to look at; `assume`: promises that the graph cannot show.

    `rounding`: how float experts are to be quantised, if at all; `max_error`: the largest relative error of a block
    that is let through then. `router`: what the node is fed with, the raw logits where it can do the router's work, or
    the weights that the router gives. `repair`: which fused nodes of the model may be rewritten: those in float32
    (which are meant for the CPU too), or all, or none.
    """

    only: frozenset[str] = frozenset({"moe", "gqa"})
    assume: frozenset[str] = frozenset()
    ep: Literal["cpu", "cuda"] = "cpu"
    verify: Literal["full", "sample", "none"] = "full"
    max_length: int | None = None
    rounding: Scheme | None = None
    max_error: float | None = None
    router: Literal["auto", "logits", "weights"] = "auto"
    repair: Literal["auto", "all", "none"] = "auto"


@dataclass(frozen=True, eq=False)
class Context:
    """What a finder works with."""

    index: Index
    cutter: Cutter
    options: Options = field(default_factory=Options)
    progress: Callable[[str, int, int], None] = silent
