"""Measures one model in this process and prints what it found as JSON. Started by `measure`, once for each model."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ortmoe_cli.bench.decode import Loop, Values, loop_of
from ortmoe_cli.bench.result import Workload
from ortmoe_cli.engine.inspect import open_index
from ortmoe_cli.engine.launch import launches
from ortmoe_cli.errors import OrtmoeError
from ortmoe_cli.runtime.settings import CPU, CUDA

_CREATIONS = 3
_QUICK = 5.0
"""Sessions that take longer than this are created once."""


def main(arguments: list[str]) -> int:
    """Measure `arguments[0]` under the workload in `arguments[1]`."""
    try:
        found = measure(Path(arguments[0]), Workload(**json.loads(arguments[1])))
    except OrtmoeError as error:
        found = {"error": error.message}
    except Exception as error:
        found = {"error": f"{arguments[0]}: {' '.join(str(error).split())}"}
    print(json.dumps(found))
    return 0


def measure(path: Path, work: Workload) -> dict[str, Any]:
    """Times in seconds, counts, and the peak memory of this process."""
    import onnxruntime as ort  # noqa: PLC0415

    ort.set_default_logger_severity(4)
    index = open_index(path)
    loop = loop_of(index)
    prompt = loop.inputs(work.batch, work.prompt)
    base = _memory()
    creation, session = _create(path, work)
    notes = [] if loop.decodes else ["no cache that can be fed back: decoding is not measured"]
    started = time.perf_counter()
    outputs = session.run(None, prompt)
    first = time.perf_counter() - started
    prefill = [_timed(session, prompt)[0] for _ in range(work.warmup + work.repeats)][work.warmup :]
    decode = _decode(session, loop, work, outputs) if loop.decodes and work.decode else []
    peak = _memory()
    return {
        "model": str(path),
        "providers": session.get_providers(),
        "nodes": len(index),
        "creation": creation,
        "first_run": first,
        "prefill": prefill,
        "decode": decode,
        "launches": launches(index),
        "peak_bytes": peak,
        "base_bytes": base,
        "notes": notes,
        **_profiled(path, work, loop, prompt),
    }


def _decode(session: Any, loop: Loop, work: Workload, outputs: Any) -> list[float]:
    """Seconds for each step: the median-free raw samples of all repeats, each from the same prompt."""
    samples = []
    for repeat in range(work.warmup + work.repeats):
        caches, past = loop.kept(outputs), work.prompt
        for _ in range(work.decode):
            seconds, results = _timed(session, loop.inputs(work.batch, 1, past, caches))
            caches, past = loop.kept(results), past + 1
            if repeat >= work.warmup:
                samples.append(seconds)
    return samples


def _timed(session: Any, values: Values) -> tuple[float, Any]:
    started = time.perf_counter()
    outputs = session.run(None, values)
    return time.perf_counter() - started, outputs


def _create(path: Path, work: Workload) -> tuple[list[float], Any]:
    times: list[float] = []
    session = None
    while len(times) < _CREATIONS and sum(times) < _QUICK:
        del session
        started = time.perf_counter()
        session = _session(path, work)
        times.append(time.perf_counter() - started)
    return times, session


def _session(path: Path, work: Workload, profile: Path | None = None) -> Any:
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = work.threads
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    provider = CUDA if work.ep == "cuda" else CPU
    session = ort.InferenceSession(str(path), options, providers=[provider], enable_fallback=0)
    if provider not in session.get_providers():
        raise OrtmoeError(f"{provider} did not load; 'ortmoe doctor --ep cuda' says what is missing")
    return session


def _profiled(path: Path, work: Workload, loop: Loop, prompt: Values) -> dict[str, int]:
    """Nodes that were executed in one run, by the runtime's profiler."""
    counts = {}
    with tempfile.TemporaryDirectory(prefix="ortmoe-") as folder:
        session = _session(path, work, Path(folder) / "prompt")
        outputs = session.run(None, prompt)
        counts["prefill_nodes"] = _executed(session.end_profiling())
        counts["decode_nodes"] = 0
        if loop.decodes:
            del session
            session = _session(path, work, Path(folder) / "step")
            session.run(None, loop.inputs(work.batch, 1, work.prompt, loop.kept(outputs)))
            counts["decode_nodes"] = _executed(session.end_profiling())
    return counts


def _executed(profile: str) -> int:
    events: Iterable[dict[str, Any]] = json.loads(Path(profile).read_text("utf-8"))
    return sum(event.get("cat") == "Node" and event["name"].endswith("_kernel_time") for event in events)


def _memory() -> int:
    """The most memory that this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main(sys.argv[1:]))
