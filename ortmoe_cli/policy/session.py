"""Sessions that never fall back silently: what was asked for is there, or an error says what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.graph.index import Index
from ortmoe_cli.policy.derive import symbols
from ortmoe_cli.policy.model import Bucket, Policy
from ortmoe_cli.policy.options import build_providers, build_run_options, build_session_options
from ortmoe_cli.policy.presets import ThroughputPolicy, as_policy
from ortmoe_cli.runtime.observe import lost_providers
from ortmoe_cli.runtime.settings import CUDA, nearest

Feeds = Mapping[str, np.ndarray]
"""Values for the inputs of a model."""


class SessionError(OrtmoeError):
    """A session that would not be what the policy asks for."""


@dataclass(eq=False)
class Bound:
    """Inputs and outputs at fixed addresses, as CUDA graphs need them: write new values with `update`, then `run`."""

    session: Any
    binding: Any
    inputs: dict[str, Any]
    run_options: Any

    def update(self, feeds: Feeds) -> None:
        """Put new values of the same shapes where the old ones were."""
        for name, value in feeds.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(value))

    def run(self) -> list[np.ndarray]:
        """Run once and fetch the outputs."""
        self.binding.synchronize_inputs()
        self.session.run_with_iobinding(self.binding, self.run_options)
        self.binding.synchronize_outputs()
        return list(self.binding.copy_outputs_to_cpu())


@dataclass(eq=False)
class ModelSession:
    """A model under a policy: one session for each bucket, or one for all; runs go to the one that fits their shapes.

    `placement`: how many nodes each provider runs, for each session.
    """

    policy: Policy
    index: Index
    sessions: Mapping[Bucket | None, Any]
    placement: Mapping[Bucket | None, Mapping[str, int]] = field(default_factory=dict)

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(next(iter(self.sessions.values())).get_providers())

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> list[np.ndarray]:
        """Run the session that fits the shapes. Raises SessionError if none does and the policy refuses others."""
        bucket = self.bucket_of(feeds)
        session = self._session(bucket, feeds)
        return list(session.run(outputs, dict(feeds), build_run_options(self.policy, bucket)))

    def bind(self, feeds: Feeds) -> Bound:
        """Fixed addresses for inputs and outputs of these shapes, after as many warm-up runs as a graph needs."""
        import onnxruntime as ort  # noqa: PLC0415

        bucket = self.bucket_of(feeds)
        session = self._session(bucket, feeds)
        device = "cuda" if self.providers[0] == CUDA else "cpu"
        binding = session.io_binding()
        inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(np.array(value, order="C"), device, 0)  # on the CPU it is no copy
            for name, value in feeds.items()
        }
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_output(output.name, device)
        bound = Bound(session, binding, inputs, build_run_options(self.policy, bucket))
        if self.policy.cuda_graph.enabled:
            self._fix_outputs(bound)
            for _ in range(self.policy.cuda_graph.warmup_runs):
                bound.run()
        return bound

    def bucket_of(self, feeds: Feeds) -> Bucket | None:
        """The bucket whose sizes are those of the inputs, or None."""
        sizes = self._sizes(feeds)
        for bucket in self.policy.buckets:
            wanted = self.policy.overrides(bucket)
            if all(sizes.get(name, size) == size for name, size in wanted.items()):
                return bucket
        return None

    def _sizes(self, feeds: Feeds) -> dict[str, int]:
        """The sizes of the symbolic dimensions."""
        found: dict[str, int] = {}
        for name, value in feeds.items():
            info = self.index.graph_inputs.get(name)
            if info is None:
                raise SessionError(f"the model has no input '{name}'; it has {', '.join(self.index.graph_inputs)}")
            for dim, size in zip(info.dims or (), value.shape, strict=False):
                if isinstance(dim, str):
                    found[dim] = size
        return found

    def _session(self, bucket: Bucket | None, feeds: Feeds) -> Any:
        if bucket is None and self.policy.buckets and self.policy.other_shapes == "refuse":
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
            raise SessionError(f"no bucket for {shapes}; there are: {'; '.join(map(str, self.policy.buckets))}")
        return self.sessions[bucket] if bucket in self.sessions else self.sessions[None]

    @staticmethod
    def _fix_outputs(bound: Bound) -> None:
        """Bind the outputs of a first run where they lie, so that later ones are written to the same place."""
        bound.binding.synchronize_inputs()
        bound.session.run_with_iobinding(bound.binding, _without_graph())
        values = bound.binding.get_outputs()
        for output, value in zip(bound.session.get_outputs(), values, strict=True):
            bound.binding.bind_ortvalue_output(output.name, value)


def _without_graph() -> Any:
    """Run options that record nothing."""
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


def session(model: str | Path, policy: Policy | ThroughputPolicy) -> ModelSession:
    """The sessions of a model under a policy.

    Raises SessionError if a provider does not load, or if a dimension of the policy does not exist in the model (the
    runtime ignores both silently); PolicyError for settings that the runtime lacks; ModelError for unreadable models.
    """
    policy = as_policy(policy)
    index = open_index(Path(model))
    _assert_dimensions(index, policy)
    made: dict[Bucket | None, Any] = {}
    for bucket in _wanted(policy):
        made[bucket] = _start(Path(model), policy, bucket)
    return ModelSession(policy, index, made, {bucket: _placement(each) for bucket, each in made.items()})


def _wanted(policy: Policy) -> tuple[Bucket | None, ...]:
    if policy.specialise == "graphs" or not policy.buckets:
        return (None,)
    return policy.buckets if policy.other_shapes == "refuse" else (*policy.buckets, None)


def _assert_dimensions(index: Index, policy: Policy) -> None:
    known = symbols(index)
    lost = [name for name in policy.dimensions if name not in known]
    if lost:
        near = nearest(lost[0], known)
        hint = f"did you mean '{near}'? " if near else ""
        raise SessionError(
            f"{index.model.path} has no dimension called {', '.join(map(repr, lost))}; {hint}"
            f"its dimensions: {', '.join(known) or 'none is dynamic'}"
        )


def _start(model: Path, policy: Policy, bucket: Bucket | None) -> Any:
    import onnxruntime as ort  # noqa: PLC0415

    options = build_session_options(policy, bucket)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        made = ort.InferenceSession(str(model), options, providers=build_providers(policy), enable_fallback=0)
    except Exception as error:
        where = f" for bucket {bucket}" if bucket else ""
        raise SessionError(f"{model}: no session{where}: {' '.join(str(error).split())}") from error
    lost = lost_providers(policy.providers, tuple(made.get_providers()))
    if lost:
        raise SessionError(
            f"{model}: {', '.join(lost)} did not load, and the runtime would run on {', '.join(made.get_providers())} "
            "instead; 'ortmoe doctor --ep cuda' says what is missing"
        )
    return made


def _placement(made: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in made.get_provider_graph_assignment_info():
        found[part.ep_name] = found.get(part.ep_name, 0) + len(part.get_nodes())
    return found
