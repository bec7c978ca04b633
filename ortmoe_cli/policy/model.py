"""What a deployment asks of the runtime and of a model, as frozen data. Nothing here imports the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ortmoe_cli.runtime.settings import CPU, CUDA, Scalar, as_text

Level = Literal["all", "layout", "extended", "basic", "disabled"]
Count = int | Literal["all"] | None
ROLES = ("batch", "sequence", "past", "total")
"""What a symbolic dimension can stand for; total = past + sequence."""


@dataclass(frozen=True)
class Bucket:
    """One shape that is served: B sequences of S new tokens after P cached ones (None: the cache may have any length).

    `graph_id`: the CUDA graph that runs of this shape record and replay; -1 runs them without a graph.
    """

    batch: int
    sequence: int
    past: int | None = None
    graph_id: int | None = None

    def sizes(self) -> dict[str, int]:
        """The size of each role, as far as this bucket fixes it."""
        fixed = {"batch": self.batch, "sequence": self.sequence}
        if self.past is None:
            return fixed
        return fixed | {"past": self.past, "total": self.past + self.sequence}

    def __str__(self) -> str:
        text = f"batch {self.batch} × sequence {self.sequence}"
        return text if self.past is None else f"{text} after {self.past}"


@dataclass(frozen=True)
class CudaGraph:
    """CUDA graphs: on or off, and how many runs of each shape come before one is recorded (at least two)."""

    enabled: bool = False
    warmup_runs: int = 2


@dataclass(frozen=True)
class Fusions:
    """How many fused nodes the model must hold: a count, or 'all' for every block that is found; None: as it comes.

    MoE and QMoE together are the mixtures of experts: with `moe = "all"`, either counts.
    """

    moe: Count = None
    qmoe: Count = None
    gqa: Count = None


@dataclass(frozen=True)
class Experts:
    """How expert weights must be stored: quantised to `bits` in blocks of `block_size` (None: any)."""

    bits: int
    block_size: int | None = None


@dataclass(frozen=True)
class Policy:
    """One place for all the settings that decide throughput.

    providers: what must run the model, first choice first. dimensions: what each symbolic dimension of the model stands
    for (a role, or a fixed size). specialise: 'sessions' makes one session with fixed shapes for each bucket; 'graphs'
    makes one session and one CUDA graph for each bucket. other_shapes: what to do with a shape that has no bucket.
    assume: promises under which the model may have been fused. models: files that the guard checks.
    """

    name: str = "policy"
    optimization_level: Level = "all"
    providers: tuple[str, ...] = (CPU,)
    provider_options: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    session_config: Mapping[str, Scalar] = field(default_factory=dict)
    run_config: Mapping[str, Scalar] = field(default_factory=dict)
    intra_op_threads: int = 0
    dimensions: Mapping[str, str | int] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    specialise: Literal["sessions", "graphs"] = "sessions"
    other_shapes: Literal["refuse", "general"] = "general"
    cuda_graph: CudaGraph = CudaGraph()
    fusions: Fusions = Fusions()
    experts: Experts | None = None
    assume: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether the policy is for the CUDA provider."""
        return CUDA in self.providers

    def options_of(self, provider: str) -> dict[str, str]:
        """The options of a provider as the runtime takes them. CUDA graphs are switched on here."""
        options = {name: as_text(value) for name, value in self.provider_options.get(provider, {}).items()}
        if provider == CUDA:
            options.setdefault("enable_cuda_graph", as_text(self.cuda_graph.enabled))
        return options

    def overrides(self, bucket: Bucket) -> dict[str, int]:
        """The sizes of the symbolic dimensions that a bucket fixes."""
        sizes = bucket.sizes()
        found = {name: role if isinstance(role, int) else sizes.get(role) for name, role in self.dimensions.items()}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def fixed_dimensions(self) -> dict[str, int]:
        """Dimensions that have one size whatever the bucket."""
        return {name: role for name, role in self.dimensions.items() if isinstance(role, int)}
