"""Which names the installed runtime holds: the binaries of its wheel are searched, nothing is loaded."""

import mmap
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

CUDA_LIBRARY = "providers_cuda"


def libraries() -> tuple[Path, ...]:
    """The shared libraries of the installed runtime; none where it is not installed."""
    spec = find_spec("onnxruntime")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return tuple(
        sorted(
            path
            for folder in folders
            for pattern in ("*.so*", "*.pyd", "*.dll", "*.dylib")
            for path in (Path(folder) / "capi").glob(pattern)
        )
    )


def cuda_library() -> Path | None:
    """The CUDA provider of the installed runtime, whether or not it can be loaded here."""
    return next((path for path in libraries() if CUDA_LIBRARY in path.name), None)


def missing(names: Iterable[str], files: Iterable[Path]) -> frozenset[str]:
    """Those names that none of the files holds as text of its own (ended by a zero byte)."""
    left = set(names)
    for file in files:
        if not left or not file.stat().st_size:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            left -= {name for name in left if data.find(name.encode() + b"\0") >= 0}
    return frozenset(left)
