"""Throughput policies that are ready to use, and the two public presets of the throughput guide."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.policy.model import Bucket, CudaGraph, Experts, Fusions, Policy
from ortmoe_cli.policy.read import read
from ortmoe_cli.runtime.settings import CPU, CUDA, LEVELS, nearest

_LADDER = 8
"""Buckets of a range are this factor apart."""
_BLOCK = 32
_NAMES = {
    "batch": ("batch_size", "batch"),
    "sequence": ("sequence_length", "sequence"),
    "past": ("past_sequence_length", "past"),
    "total": ("total_sequence_length", "total"),
}


@dataclass(frozen=True)
class ThroughputPolicy:
    """The settings of the throughput guide, under the names that it gives them.

    Some of them name what the runtime does not have; `policy()` says what each becomes:
    `cuda_graph_partial` a `gpu_graph_id` for each decoding bucket and -1 for prompts, `free_dim_overrides` (name, low,
    high) a ladder of buckets from low to high. Neither name ever reaches the runtime.
    """

    optimization_level: str = "ORT_ENABLE_ALL"
    enable_cuda_graph: bool = True
    use_tf32: bool = True
    cuda_graph_partial: bool = True
    free_dim_overrides: tuple[tuple[str, int, int], ...] = ()
    keep_moe_subgraph: bool = True
    keep_gqa_node: bool = True
    qmoe_block_quant: bool = True
    model_kind: str = "generic-moe"

    def cuda_provider_options(self) -> dict[str, str]:
        """The options of the CUDA provider, each of which the runtime knows."""
        return self.policy().options_of(CUDA)

    def policy(self) -> Policy:
        """The same in terms of what the runtime has."""
        levels = {name: level for level, name in LEVELS.items()}
        if self.optimization_level not in levels:
            near = nearest(self.optimization_level, levels)
            raise OrtmoeError(f"optimization_level '{self.optimization_level}' does not exist; did you mean '{near}'?")
        return Policy(
            name=self.model_kind,
            optimization_level=levels[self.optimization_level],  # type: ignore[arg-type]
            providers=(CUDA, CPU),
            provider_options={CUDA: {"use_tf32": self.use_tf32}},
            dimensions=_dimensions(self.free_dim_overrides),
            buckets=_buckets(self.free_dim_overrides, self.enable_cuda_graph and self.cuda_graph_partial),
            specialise="graphs" if self.enable_cuda_graph and self.cuda_graph_partial else "sessions",
            cuda_graph=CudaGraph(self.enable_cuda_graph),
            fusions=Fusions(
                moe="all" if self.keep_moe_subgraph else None,
                gqa="all" if self.keep_gqa_node else None,
            ),
            experts=Experts(4, _BLOCK) if self.qmoe_block_quant else None,
        )

    def describe(self) -> str:
        """Each setting, what it becomes, and what it needs."""
        from ortmoe_cli.policy.describe import describe  # noqa: PLC0415  it describes policies, which presets make

        return describe(self.policy())


@dataclass(frozen=True)
class OrtGptOssThroughputPolicy(ThroughputPolicy):
    """gpt-oss-20b: up to 64 sequences, up to 8192 tokens."""

    free_dim_overrides: tuple[tuple[str, int, int], ...] = (("batch_size", 1, 64), ("sequence_length", 1, 8192))
    model_kind: str = "gpt-oss-20b"


@dataclass(frozen=True)
class OrtQwenThroughputPolicy(ThroughputPolicy):
    """qwen3.6-35b-a3b: up to 128 sequences, up to 32768 tokens."""

    free_dim_overrides: tuple[tuple[str, int, int], ...] = (("batch_size", 1, 128), ("sequence_length", 1, 32768))
    model_kind: str = "qwen3.6-35b-a3b"


@dataclass(frozen=True)
class _GenericMoePolicy(ThroughputPolicy):
    """Any mixture of experts, as it is: no quantisation asked for, shapes from `ortmoe policy init`."""

    enable_cuda_graph: bool = False
    cuda_graph_partial: bool = False
    qmoe_block_quant: bool = False


PRESETS: Mapping[str, ThroughputPolicy] = {
    preset.model_kind: preset
    for preset in (OrtGptOssThroughputPolicy(), OrtQwenThroughputPolicy(), _GenericMoePolicy())
}


def find(name: str) -> Policy:
    """The policy of a preset's name or of a TOML file. Raises OrtmoeError where there is neither."""
    if name in PRESETS:
        return PRESETS[name].policy()
    path = Path(name)
    if path.exists() or path.suffix == ".toml":
        return read(path)
    near = nearest(name, PRESETS)
    hint = f"did you mean '{near}'? " if near else ""
    raise OrtmoeError(f"no policy '{name}': neither a file nor a preset; {hint}presets: {', '.join(PRESETS)}")


def as_policy(policy: Policy | ThroughputPolicy) -> Policy:
    """Either kind as the one that the runtime understands."""
    return policy.policy() if isinstance(policy, ThroughputPolicy) else policy


def _dimensions(overrides: tuple[tuple[str, int, int], ...]) -> dict[str, str | int]:
    """What the named dimensions stand for, with the lengths of cache and mask that follow from them."""
    roles = {name: role for role, names in _NAMES.items() for name in names}
    found: dict[str, str | int] = {}
    for name, low, high in overrides:
        if name not in roles and low != high:
            raise OrtmoeError(
                f"the dimension '{name}' cannot have a range: buckets are made of {', '.join(roles)}; give it one size"
            )
        found[name] = roles.get(name, high)
    if "sequence" in found.values():
        found |= {_NAMES[role][0]: role for role in ("past", "total")}
    return found


def _buckets(overrides: tuple[tuple[str, int, int], ...], graphs: bool) -> tuple[Bucket, ...]:
    """Decoding with a full cache for each batch of the ladder, and the longest prompt for a single sequence."""
    ranges = {role: (low, high) for name, low, high in overrides for role in _NAMES if name in _NAMES[role]}
    if not {"batch", "sequence"} <= set(ranges):
        return ()
    longest = ranges["sequence"][1]
    batches = ladder(*ranges["batch"])
    decoding = [Bucket(batch, 1, longest - 1, number if graphs else None) for number, batch in enumerate(batches, 1)]
    return (*decoding, Bucket(batches[0], longest, 0, -1 if graphs else None))


def ladder(low: int, high: int) -> tuple[int, ...]:
    """Sizes from low to high: 1, 8, 64."""
    sizes = [low]
    while sizes[-1] * _LADDER < high:
        sizes.append(sizes[-1] * _LADDER)
    return tuple(dict.fromkeys((*sizes, high)))
