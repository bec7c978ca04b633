"""`ortmoe check`: a model held against a policy."""

import time
from pathlib import Path

from ortmoe_cli import engine
from ortmoe_cli.engine.audit import versions
from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.outcome import Options, Progress, silent
from ortmoe_cli.policy.checks import Subject, ask
from ortmoe_cli.policy.findings import GuardReport
from ortmoe_cli.policy.model import Policy
from ortmoe_cli.policy.presets import ThroughputPolicy, as_policy
from ortmoe_cli.policy.read import check as check_policy


def guard(
    model: Path, policy: Policy | ThroughputPolicy, *, runtime: bool = False, progress: Progress = silent
) -> GuardReport:
    """Hold a model against a policy. With `runtime`, a session is started too and asked what it really runs.

    Raises ModelError if the model cannot be read, PolicyError if the policy asks for what the runtime lacks.
    """
    started = time.monotonic()
    policy = as_policy(policy)
    check_policy(policy)
    index = open_index(model)
    fusions = policy.fusions
    kinds = {kind for kind, wanted in (("moe", fusions.moe or fusions.qmoe), ("gqa", fusions.gqa)) if wanted}
    if policy.experts:
        kinds.add("moe")
    audit = engine.audit(model, Options(only=frozenset(kinds)), progress) if kinds else None
    subject = Subject(index, policy, audit)
    checks = ask(subject)
    if runtime:
        from ortmoe_cli.policy.running import ask_runtime  # noqa: PLC0415  starts the model

        checks += ask_runtime(subject)
    seconds = round(time.monotonic() - started, 3)
    return GuardReport(str(model), policy.name, checks, runtime, seconds, versions())
