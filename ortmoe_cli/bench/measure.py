"""Runs the worker for each model, one after the other, and puts the results together."""

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
    found = []
    for done, model in enumerate(models):
        progress("bench", done, len(models))
        found.append(_measured(_run(model, work)))
    progress("bench", len(models), len(models))
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


def _measured(answer: dict[str, Any]) -> Measured:
    return Measured(
        model=answer["model"],
        providers=tuple(answer["providers"]),
        nodes=answer["nodes"],
        creation=Samples(tuple(answer["creation"])),
        first_run=answer["first_run"],
        prefill=Samples(tuple(answer["prefill"])),
        decode=Samples(tuple(answer["decode"])),
        prefill_nodes=answer["prefill_nodes"],
        decode_nodes=answer["decode_nodes"],
        launches=answer["launches"],
        peak_bytes=answer["peak_bytes"],
        notes=tuple(answer["notes"]),
    )
