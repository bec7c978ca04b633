"""What the runtime makes of a model: the graph that it runs after its own rewrites, and where each node went."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

MOST_BYTES = 1 << 31
"""Models with more weights than this are not written out to be looked at."""


@dataclass(frozen=True)
class Observation:
    """What was seen of a session. `operators` is None where the optimised graph was not written out."""

    providers: tuple[str, ...]
    operators: Mapping[str, int] | None
    placement: Mapping[str, Mapping[str, int]]
    """For each provider, how many nodes of each operator it runs."""

    @property
    def copies(self) -> int:
        """Copies between host and device that the runtime put in."""
        return sum(count for op, count in (self.operators or {}).items() if op.startswith("Memcpy"))


def observe(
    path: Path, options: Any, providers: list[tuple[str, dict[str, str]]], weight_bytes: int = 0
) -> Observation:
    """Start a session and look at it. `options` are changed. Whatever the runtime raises is raised."""
    import onnxruntime as ort  # noqa: PLC0415

    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory(prefix="ortmoe-") as folder:
        written = Path(folder) / "optimised.onnx"
        if weight_bytes < MOST_BYTES:
            options.optimized_model_filepath = str(written)
        session = ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
        placement = _placement(session)
        operators = _operators(written) if written.exists() else None
        return Observation(tuple(session.get_providers()), operators, placement)


def _placement(session: Any) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return {name: dict(ops) for name, ops in found.items()}


def _operators(path: Path) -> dict[str, int]:
    model = onnx.load(str(path), load_external_data=False)
    return dict(Counter(node.op_type for node in model.graph.node))


def lost_providers(wanted: tuple[str, ...], got: tuple[str, ...]) -> tuple[str, ...]:
    """The providers that were asked for and are not there."""
    return tuple(name for name in wanted if name not in got)


def quiet(options: Any) -> Any:
    """The same options, without messages of the runtime on the terminal: what it refuses is a result here."""
    options.log_severity_level = 4
    return options
