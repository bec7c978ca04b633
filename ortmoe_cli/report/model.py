"""What a run found and did, as plain data. Every renderer reads this and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ortmoe_cli.outcome import Check, Fact, Guarantee, Kind, Outcome

SCHEMA_VERSION = 1
"""Counts up when a field of the JSON report changes its meaning or goes; new fields do not count."""

Status = Literal["fused", "fusable", "already-fused", "refused"]

KINDS: Mapping[str, str] = {"moe": "MoE", "gqa": "GQA"}
"""The kinds of blocks, in the order in which they are reported, and how they are written for people."""

STATUSES: tuple[Status, ...] = ("fused", "fusable", "already-fused", "refused")
"""In the order in which they are reported."""


@dataclass(frozen=True)
class BlockReport:
    """One block: where it is, what became of it, and on what that rests.

    `guarantee` is None for a block that was not rewritten. `region` counts the nodes that a fused node stands for.
    """

    kind: Kind
    name: str
    layer: int | None
    status: Status
    code: str
    message: str
    guarantee: Guarantee | None = None
    contract: tuple[str, ...] = ()
    nearest: str = ""
    region: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()

    @classmethod
    def from_outcome(cls, outcome: Outcome, fusion_status: Status) -> BlockReport:
        """The report of an outcome. A Fusion gets `fusion_status`: 'fused' if it is written, otherwise 'fusable'."""
        from ortmoe_cli.outcome import Already, Fusion  # noqa: PLC0415  a report can be read without the runtime

        common = (outcome.kind, outcome.name, outcome.layer)
        if isinstance(outcome, Fusion):
            return cls(
                *common,
                fusion_status,
                outcome.code,
                outcome.message,
                guarantee=outcome.guarantee,
                contract=outcome.contract,
                region=outcome.region,
                facts=outcome.facts,
                checks=outcome.checks,
            )
        if isinstance(outcome, Already):
            return cls(*common, "already-fused", outcome.code, outcome.message, facts=outcome.facts)
        return cls(*common, "refused", outcome.code, outcome.message, nearest=outcome.nearest, facts=outcome.facts)


@dataclass(frozen=True)
class Launches:
    """The launch model for T new tokens: nodes that start kernels in one run, before and after fusing.

    touched: how many experts of all blocks are expected to be used, if tokens choose evenly; of `experts` in all.
    active_bytes: the weights of these, of `expert_bytes` in all.
    """

    tokens: int
    before: int
    after: int
    touched: float = 0.0
    experts: int = 0
    active_bytes: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """One run of `audit` or `fuse`. Blocks are put in order: by kind, then by layer.

    `nodes_after` is None where nothing was rewritten, not even for trial; `output` is None where nothing was written.
    `input_sha256` is of the .onnx file alone. `notes` are sentences that concern the model as a whole.
    """

    model: str
    command: Literal["audit", "fuse"]
    blocks: tuple[BlockReport, ...]
    nodes_before: int
    nodes_after: int | None = None
    weight_bytes: int = 0
    opset: int = 0
    output: str | None = None
    output_bytes: int | None = None
    seconds: float = 0.0
    dry_run: bool = False
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    input_sha256: str | None = None
    launches: tuple[Launches, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", in_order(self.blocks))

    @property
    def contract(self) -> tuple[str, ...]:
        """What the fused blocks no longer accept or rest on, each sentence once, in the order of the blocks."""
        return tuple(dict.fromkeys(sentence for block in self.blocks for sentence in block.contract))

    def of(self, kind: str | None = None, status: str | None = None) -> tuple[BlockReport, ...]:
        """The blocks of a kind, of a status, or of both."""
        return tuple(b for b in self.blocks if kind in (None, b.kind) and status in (None, b.status))

    def fails(self, statuses: Collection[str]) -> bool:
        """Is there a block of one of these statuses?"""
        return any(block.status in statuses for block in self.blocks)

    @property
    def exit_code(self) -> int:
        """0 when nothing is left to do, 1 when there are findings: for `audit`, what could be fused is one too."""
        return int(self.fails(("fusable", "refused") if self.command == "audit" else ("refused",)))


def in_order(blocks: Iterable[BlockReport]) -> tuple[BlockReport, ...]:
    """Blocks by kind, then by layer (unnumbered ones last), otherwise as they came."""
    kinds = list(KINDS)
    return tuple(sorted(blocks, key=lambda b: (kinds.index(b.kind), b.layer is None, b.layer or 0)))
