"""A policy for a model: its dimensions read off its inputs, its fused nodes counted."""

from pathlib import Path

from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.graph.index import Index
from ortmoe_cli.graph.roles import Role, cache_axis, roles
from ortmoe_cli.policy.facts import assumed, counts
from ortmoe_cli.policy.model import Fusions, Policy
from ortmoe_cli.policy.presets import PRESETS
from ortmoe_cli.runtime.settings import CPU, CUDA

GENERIC = "generic-moe"


def derive(model: Path, preset: str = GENERIC, ep: str = "cpu") -> Policy:
    """What `preset` asks for, in terms of this model: its own dimensions, and as many fused nodes as it holds now.

    Raises ModelError if the model cannot be read.
    """
    index = open_index(model)
    base = PRESETS[preset].policy()
    held = {name: count or None for name, count in counts(index).items()}
    fields = {f: getattr(base, f) for f in ("optimization_level", "buckets", "specialise", "cuda_graph", "experts")}
    if ep == "cpu":
        fields = {"optimization_level": base.optimization_level}
    return Policy(
        name=model.stem,
        providers=(CUDA, CPU) if ep == "cuda" else (CPU,),
        provider_options=base.provider_options if ep == "cuda" else {},
        dimensions=dimensions(index),
        fusions=Fusions(**held),
        assume=assumed(index),
        models=(model.name,),
        **fields,
    )


def dimensions(index: Index) -> dict[str, str | int]:
    """What each symbolic dimension of the inputs stands for, by what the inputs feed and where the dimension is."""
    found: dict[str, str | int] = {}
    of = roles(index)
    for name, info in index.graph_inputs.items():
        dims = info.dims or ()
        for axis, dim in enumerate(dims):
            role = _role(of[name], axis, len(dims), cache_axis(index, name) if of[name] is Role.PAST else -1)
            if isinstance(dim, str) and role:
                found.setdefault(dim, role)
    return found


def symbols(index: Index) -> dict[str, str]:
    """The symbolic dimensions of the inputs, each with the first input that has it."""
    found: dict[str, str] = {}
    for name, info in index.graph_inputs.items():
        for axis, dim in enumerate(info.dims or ()):
            if dim is None or isinstance(dim, str):
                found.setdefault(dim or f"{name}[{axis}]", name)
    return found


def unnamed(index: Index) -> tuple[str, ...]:
    """Dimensions of inputs that are dynamic but have no name, so that nothing can fix them."""
    return tuple(
        f"{name}[{axis}]"
        for name, info in index.graph_inputs.items()
        for axis, dim in enumerate(info.dims or ())
        if dim is None
    )


def _role(role: Role, axis: int, rank: int, tokens: int) -> str | None:
    if role is Role.PAST:
        return "past" if axis == tokens else "batch" if axis == 0 else None
    if role in (Role.TOKENS, Role.HIDDEN):
        return {0: "batch", 1: "sequence"}.get(axis)
    if role is Role.POSITIONS:
        return {rank - 1: "sequence", rank - 2: "batch"}.get(axis)
    if role is Role.MASK:
        last = {rank - 1: "total", 0: "batch"}
        return last.get(axis) or ("sequence" if rank > 2 and axis == rank - 2 else None)
    return None
