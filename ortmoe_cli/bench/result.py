"""What was measured, as plain data, and the ratios between models."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Workload:
    """What is run: B sequences of `prompt` tokens, then `decode` steps of one token each.

    warmup: runs that are not counted; repeats: runs that are. rounds: how often all models are measured in turn, each
    time in a new process, so that a busy machine is busy for all. threads: 0 lets the runtime choose.
    """

    batch: int = 1
    prompt: int = 128
    decode: int = 16
    warmup: int = 1
    repeats: int = 5
    ep: str = "cpu"
    threads: int = 0
    rounds: int = 1


@dataclass(frozen=True)
class Samples:
    """Times of one thing, in seconds."""

    values: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median: where half of the runs were."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def __bool__(self) -> bool:
        return bool(self.values)


@dataclass(frozen=True)
class Measured:
    """One model. Node counts are of nodes that were executed in one run, as the runtime's profiler saw them.

    launches: what the launch model says about the same step, from the graph alone.
    """

    model: str
    providers: tuple[str, ...]
    nodes: int
    creation: Samples
    first_run: float
    prefill: Samples
    decode: Samples
    prefill_nodes: int
    decode_nodes: int
    launches: int
    peak_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """All models of one run. The first is what the others are compared with."""

    workload: Workload
    models: tuple[Measured, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""

    def tokens_per_second(self, model: Measured) -> dict[str, float | None]:
        work = self.workload
        return {
            "prefill": work.batch * work.prompt / model.prefill.median if model.prefill else None,
            "decode": work.batch / model.decode.median if model.decode else None,
        }

    def ratios(self, model: Measured) -> dict[str, float]:
        """How many times better than the first model: above 1 is faster, fewer, smaller."""
        first = self.models[0]
        pairs: dict[str, tuple[float, float]] = {
            "creation": (_median(first.creation), _median(model.creation)),
            "first_run": (first.first_run, model.first_run),
            "prefill": (_median(first.prefill), _median(model.prefill)),
            "decode": (_median(first.decode), _median(model.decode)),
            "nodes": (first.nodes, model.nodes),
            "prefill_nodes": (first.prefill_nodes, model.prefill_nodes),
            "decode_nodes": (first.decode_nodes, model.decode_nodes),
            "launches": (first.launches, model.launches),
            "memory": (first.peak_bytes, model.peak_bytes),
        }
        return {name: round(before / after, 3) for name, (before, after) in pairs.items() if before and after}


def _median(samples: Samples) -> float:
    return samples.median if samples else 0.0


def document(bench: Bench) -> dict[str, Any]:
    """The run in terms of JSON."""
    work = bench.workload
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench",
        "workload": vars(work).copy(),
        "machine": bench.machine,
        "versions": dict(sorted(bench.versions.items())),
        "models": [_model(bench, model) for model in bench.models],
    }


def _model(bench: Bench, model: Measured) -> dict[str, Any]:
    times: Sequence[tuple[str, Samples]] = (
        ("creation", model.creation),
        ("prefill", model.prefill),
        ("decode", model.decode),
    )
    return {
        "model": model.model,
        "providers": list(model.providers),
        "nodes": model.nodes,
        "first_run": model.first_run,
        **{
            name: {"median": s.median, "spread": round(s.spread, 4), "samples": list(s.values)} if s else None
            for name, s in times
        },
        "tokens_per_second": bench.tokens_per_second(model),
        "prefill_nodes": model.prefill_nodes,
        "decode_nodes": model.decode_nodes,
        "launches": model.launches,
        "peak_bytes": model.peak_bytes,
        "ratios": bench.ratios(model),
        "notes": list(model.notes),
    }
