"""What this machine's runtime is, and whether the facts that this package rests on hold for it."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ortmoe_cli.outcome import Progress, silent
from ortmoe_cli.runtime import probe_cuda, probe_gqa, probe_moe, probe_session
from ortmoe_cli.runtime.binaries import cuda_library, libraries, missing
from ortmoe_cli.runtime.facts import DIFFERS, Tried, attempt
from ortmoe_cli.runtime.settings import CPU, CUDA, CUDA_OPTIONS, RUN_KEYS, SESSION_KEYS

SCHEMA_VERSION = 1
FACTS = (*probe_moe.FACTS, *probe_gqa.FACTS, *probe_session.FACTS, *probe_cuda.FACTS)


@dataclass(frozen=True)
class Provider:
    """An execution provider: built in, and whether it really loads."""

    name: str
    loads: bool
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was tried. `unknown`: settings that a policy may hold and this runtime does not know."""

    versions: Mapping[str, str]
    providers: tuple[Provider, ...]
    facts: tuple[Tried, ...]
    unknown: tuple[str, ...]

    @property
    def differs(self) -> tuple[Tried, ...]:
        return tuple(fact for fact in self.facts if fact.verdict == DIFFERS)

    def document(self) -> dict[str, Any]:
        """The diagnosis in terms of JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "doctor",
            "versions": dict(self.versions),
            "providers": [asdict(provider) for provider in self.providers],
            "unknown_settings": list(self.unknown),
            "facts": [asdict(fact) for fact in self.facts],
        }


def examine(ep: Literal["cpu", "cuda", "all"] = "all", progress: Progress = silent) -> Diagnosis:
    """Try everything. `ep` picks the facts of one provider."""
    facts = [fact for fact in FACTS if ep in ("all", fact.ep)]
    tried = []
    for done, fact in enumerate(facts):
        progress("facts", done, len(facts))
        tried.append(attempt(fact))
    progress("facts", len(facts), len(facts))
    return Diagnosis(versions(), providers(), tuple(tried), unknown_settings())


def providers() -> tuple[Provider, ...]:
    """The providers of this build. CUDA is really started; others but the CPU are taken as they are named."""
    import onnxruntime as ort  # noqa: PLC0415

    found = []
    for name in ort.get_available_providers():
        if name == CUDA:
            found.append(Provider(name, *probe_cuda.loads()))
        else:
            found.append(Provider(name, name == CPU, "" if name == CPU else "not tried"))
    return tuple(found)


def unknown_settings() -> tuple[str, ...]:
    """Settings of `runtime.settings` that the installed binaries do not hold."""
    cuda = cuda_library()
    plain = [path for path in libraries() if path != cuda]
    lost = missing({**SESSION_KEYS, **RUN_KEYS}, [*plain, *([cuda] if cuda else [])])
    if cuda is None:
        lost = frozenset(name for name in lost if not name.startswith("ep.cuda."))
    lost |= missing(CUDA_OPTIONS, [cuda]) if cuda else frozenset()
    return tuple(sorted(lost))


def versions() -> dict[str, str]:
    """What is installed."""
    import numpy  # noqa: PLC0415
    import onnx  # noqa: PLC0415
    import onnxruntime as ort  # noqa: PLC0415

    return {
        "onnxruntime": ort.__version__,
        "onnxruntime build": ort.get_build_info()[:60],
        "onnx": onnx.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
