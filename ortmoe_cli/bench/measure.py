"""Runs the worker for each model, in turn, and puts the results together."""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from os import cpu_count
from pathlib import Path
from typing import Any

from ortmoe_cli.bench.result import Bench, Measured, Samples, Workload
from ortmoe_cli.engine.audit import versions
from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.outcome import Progress, silent

_WORKER = "ortmoe_cli.bench.worker"


def measure(models: Sequence[Path], work: Workload, progress: Progress = silent) -> Bench:
    """Measure every model. Raises OrtmoeError with the first that cannot be measured."""
    answers: list[list[dict[str, Any]]] = [[] for _ in models]
    steps = work.rounds * len(models)
    for done in range(steps):
        progress("bench", done, steps)
        number = done % len(models)
        answers[number].append(_run(models[number], work))
    progress("bench", steps, steps)
    found = [_measured(rounds) for rounds in answers]
    machine = f"{platform.system()} {platform.machine()}, {cpu_count()} CPU threads"
    return Bench(work, tuple(found), versions(), machine)


def _run(model: Path, work: Workload) -> dict[str, Any]:
    command = [sys.executable, "-m", _WORKER, str(model), json.dumps(asdict(work))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise OrtmoeError(f"{model}: the process that measured it ended with {done.returncode}: {done.stderr[-300:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise OrtmoeError(answer["error"])
    return answer


def _measured(rounds: Sequence[dict[str, Any]]) -> Measured:
    """All rounds of one model as one: their samples together, and the most memory."""
    first = rounds[0]

    def together(key: str) -> Samples:
        return Samples(tuple(value for answer in rounds for value in answer[key]))

    return Measured(
        model=first["model"],
        providers=tuple(first["providers"]),
        nodes=first["nodes"],
        creation=together("creation"),
        first_run=Samples(tuple(answer["first_run"] for answer in rounds)).median,
        prefill=together("prefill"),
        decode=together("decode"),
        prefill_nodes=first["prefill_nodes"],
        decode_nodes=first["decode_nodes"],
        launches=first["launches"],
        peak_bytes=max(answer["peak_bytes"] for answer in rounds),
        notes=tuple(first["notes"]),
    )
