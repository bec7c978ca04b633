"""The questions that only a running session answers: what was loaded, where each node went, what became of it."""

from collections.abc import Iterator

from ortmoe_cli.policy.checks import Subject
from ortmoe_cli.policy.findings import Check, Finding, named, passed_or
from ortmoe_cli.policy.model import Bucket
from ortmoe_cli.policy.options import build_providers, build_session_options
from ortmoe_cli.report.words import counted
from ortmoe_cli.runtime.observe import Observation, lost_providers, observe, quiet
from ortmoe_cli.runtime.settings import CPU

WATCHED = ("MoE", "QMoE", "GroupQueryAttention", "FusedMatMul", "SimplifiedLayerNormalization",
           "SkipSimplifiedLayerNormalization", "LayerNormalization", "SkipLayerNormalization", "QuickGelu",
           "MatMulNBits", "MemcpyFromHost", "MemcpyToHost")  # fmt: skip
"""Operators of the optimised graph that are told about."""
_KEPT = ("MoE", "QMoE", "GroupQueryAttention")
_TITLES = {
    "session": "a session starts with these settings",
    "providers": "the providers asked for are there",
    "placement": "nodes run on the first provider",
    "copies": "the runtime put in no copies",
    "kept": "fused nodes are still there after the runtime's rewrites",
}


def ask_runtime(subject: Subject) -> tuple[Check, ...]:
    """Start the session of each bucket (one without, if there are none), and look."""
    import onnxruntime as ort  # noqa: PLC0415

    ort.set_default_logger_severity(4)
    seen: list[Observation] = []
    failures: list[Finding] = []
    for bucket in _sessions(subject):
        try:
            seen.append(_observe(subject, bucket))
        except Exception as error:
            failures.append(_failure(bucket, error))
    first = passed_or(iter(failures), "session", _TITLES["session"], note=_running(seen))
    if not seen:
        return (first, *(_skipped(name) for name in _TITLES if name != "session"))
    questions = {"providers": _providers, "placement": _placement, "copies": _copies, "kept": _kept}
    return (first, *(passed_or(ask(subject, seen[0]), name, _TITLES[name]) for name, ask in questions.items()))


def _sessions(subject: Subject) -> tuple[Bucket | None, ...]:
    return subject.policy.buckets if subject.policy.specialise == "sessions" and subject.policy.buckets else (None,)


def _observe(subject: Subject, bucket: Bucket | None) -> Observation:
    options = quiet(build_session_options(subject.policy, bucket))
    model = subject.index.model
    return observe(model.path, options, build_providers(subject.policy), model.weight_bytes)


def _failure(bucket: Bucket | None, error: Exception) -> Finding:
    where = f"bucket {bucket}: " if bucket else ""
    message = " ".join(str(error).split())
    return Finding("POL151", f"{where}the runtime makes no session: {message[-300:]}", "ortmoe doctor")


def _skipped(name: str) -> Check:
    return Check(name, _TITLES[name], note="no session", skipped=True)


def _running(seen: list[Observation]) -> str:
    """What runs, in words: '2 MoE, 2 GroupQueryAttention, 5 SimplifiedLayerNormalization'."""
    if not seen or seen[0].operators is None:
        return ""
    found = [f"{seen[0].operators[op]} {op}" for op in WATCHED if op in seen[0].operators]
    return ", ".join((counted(sum(seen[0].operators.values()), "node"), *found))


def _providers(subject: Subject, seen: Observation) -> Iterator[Finding]:
    lost = lost_providers(subject.policy.providers, seen.providers)
    if lost:
        yield Finding(
            "POL152",
            f"{named(lost)} did not load; the session runs on {', '.join(seen.providers)} without an error",
            "ortmoe doctor --ep cuda",
        )


def _placement(subject: Subject, seen: Observation) -> Iterator[Finding]:
    first = subject.policy.providers[0]
    if first == CPU or first not in seen.providers:
        return
    elsewhere = {op: count for name, ops in seen.placement.items() if name != first for op, count in ops.items()}
    kept = {op: count for op, count in elsewhere.items() if op in _KEPT}
    if kept:
        listed = ", ".join(f"{count} {op}" for op, count in kept.items())
        yield Finding("POL153", f"not on {first}: {listed}", "ortmoe doctor --ep cuda", tuple(kept))


def _copies(subject: Subject, seen: Observation) -> Iterator[Finding]:
    if seen.copies:
        yield Finding(
            "POL154",
            f"the runtime put in {counted(seen.copies, 'copy').replace('copys', 'copies')} between host and device",
            "fix all dimensions in buckets",
        )


def _kept(subject: Subject, seen: Observation) -> Iterator[Finding]:
    if seen.operators is None:
        return
    for op in _KEPT:
        before = len(subject.index.nodes_of(f"com.microsoft.{op}"))
        after = seen.operators.get(op, 0)
        if after < before:
            yield Finding(
                "POL155",
                f"the model holds {before} {op} nodes, the runtime runs {after}",
                "set optimization.disable_specified_optimizers to the optimiser that takes them away",
            )
