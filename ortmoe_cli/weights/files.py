"""Files that appear whole or not at all, and bytes that go from file to file without passing through us."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ortmoe_cli.errors import ModelError, OutputError
from ortmoe_cli.graph.model import Span

BLOCK = 32 << 20
"""The most that is copied in one call: progress is told and Ctrl-C heard between calls."""

_SMALL = 1 << 20
"""Spans up to this size are gathered in the write buffer; a call of their own would cost more."""

_UNSUPPORTED = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
"""What a fast copy answers where the file systems or the kernel do not offer it."""


def check_target(source: Path, reads: Iterable[Path], target: Path, data: Path, in_place: bool) -> None:
    """Refuse a target that cannot be written, or that would destroy the input (symbolic and hard links included)."""
    folder = target.parent
    if not target.name:
        raise OutputError("the output needs a file name, such as -o fused.onnx", "EXT106")
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder; create it, or write {target.name} elsewhere", "EXT106")
    for path in (target, data):
        if path.is_dir():
            raise OutputError(f"{path} is a folder; give the name of a file to write", "EXT106")
        if path.is_symlink() and not _same(target, source):
            raise OutputError(f"{path} is a link; give the name of the file that it should lead to", "EXT106")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a regular file; give the name of a file to write", "EXT106")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} is not writable; write {target.name} elsewhere", "EXT106")
    if _same(target, source):
        if in_place:
            return
        raise OutputError(f"{target} is the input itself; give another name, or --in-place to replace it", "EXT106")
    for path in (source, *sorted(set(reads))):
        for output in (target, data):
            if _same(output, path):
                raise OutputError(f"{output} holds the input's weights or graph ({path}); give another name", "EXT106")


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free:,} bytes free, the output takes {needed:,}; free {needed - free:,} or write elsewhere",
            "EXT106",
        )


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


class Replacement:
    """Writes files in a folder beside their targets, and puts all of them in place at once, or none.

    They have their final names already while they wait, so that a model there finds its data and can be tried.
    Several renames are never atomic. So the old files are moved away first and the new ones come in the given order:
    whoever looks in between, or after a power cut, finds no model, but never a graph with another one's weights. An
    exception on the way puts the old files back. A target that is a link is replaced by a file; what it leads to stays.
    """

    def __init__(self) -> None:
        self._files: list[tuple[Path, Path, Path]] = []
        self._folder: Path | None = None
        self._moving = False

    def create(self, target: Path, like: Path) -> IO[bytes]:
        """A new file that will become `target`, with the permissions of that file, or of `like`, if they exist."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".ortmoe-", dir=target.parent))
        fresh, old = self._folder / target.name, self._folder / f"{target.name}.old"
        self._files.append((target, fresh, old))
        file = open(fresh, "xb", buffering=BLOCK // 8)  # noqa: SIM115  the caller closes it
        if os.name == "posix":
            for example in (target, like):
                if example.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(example.stat().st_mode) & 0o777)
                    break
        return file

    def waiting(self, target: Path) -> Path:
        """Where the file that will become `target` is now."""
        return next(fresh for wanted, fresh, _ in self._files if wanted == target)

    def commit(self) -> None:
        """Put the files in place, in the order in which they were created."""
        self._moving = len(self._files) > 1
        if self._moving:
            for target, _, old in reversed(self._files):
                with suppress(FileNotFoundError):
                    os.rename(target, old)
        for target, fresh, _ in self._files:
            os.replace(fresh, target)
        self._moving = False
        for folder in {target.parent for target, _, _ in self._files}:
            _sync_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for target, fresh, old in self._files:
            if self._moving and os.path.lexists(old):
                os.replace(old, target)
            elif self._moving and not fresh.exists():  # it has arrived where nothing was
                target.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


Mover = Callable[[int, int, int, int], int]
"""(from, to, offset, count) -> bytes moved to the current position of `to`."""


def _by_kernel(source: int, target: int, offset: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset)


def _by_sendfile(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)


def _by_hand(source: int, target: int, offset: int, count: int) -> int:
    os.lseek(source, offset, os.SEEK_SET)
    block = memoryview(os.read(source, min(count, 4 << 20)))
    moved = len(block)
    while block:
        block = block[os.write(target, block) :]
    return moved


MOVERS: tuple[Mover, ...] = (
    *((_by_kernel,) if hasattr(os, "copy_file_range") else ()),
    *((_by_sendfile,) if hasattr(os, "sendfile") else ()),
    _by_hand,
)
"""Ways to copy, fastest first; the next is tried where one is not offered."""


class Sink:
    """A file that is filled from front to back with bytes and with spans of other files."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance
        self._source: tuple[Path, IO[bytes]] | None = None
        self._movers = MOVERS
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            self._file.write(block)
            self._moved(len(block))

    def pad(self, position: int) -> None:
        self.write(bytes(position - self.position))

    def copy(self, span: Span) -> None:
        """Append the bytes of a span; the kernel moves them where it can."""
        source = self._open(span)
        if span.length <= _SMALL:
            source.seek(span.offset)
            data = source.read(span.length)
            if len(data) < span.length:
                raise _cut_short(span)
            self.write(data)
            return
        self._file.flush()
        done = 0
        while done < span.length:
            count = self._move(source.fileno(), span.offset + done, min(BLOCK, span.length - done))
            if not count:
                raise _cut_short(span)
            done += count
            self._moved(count)

    def _move(self, source: int, offset: int, count: int) -> int:
        while True:
            last = len(self._movers) == 1
            try:
                moved = self._movers[0](source, self._file.fileno(), offset, count)
                if moved or last:
                    return moved
            except OSError as error:
                if last or error.errno not in _UNSUPPORTED:
                    raise
            self._movers = self._movers[1:]

    def _open(self, span: Span) -> IO[bytes]:
        if self._source is None or self._source[0] != span.path:
            self.close()
            try:
                self._source = span.path, open(span.path, "rb", buffering=0)  # noqa: SIM115  see close()
            except OSError as error:
                raise ModelError(f"{span.path} cannot be read: {error.strerror}") from error
        return self._source[1]

    def _moved(self, count: int) -> None:
        self.position += count
        self._advance(count)

    def close(self) -> None:
        """Let go of the file that was copied from last."""
        if self._source is not None:
            self._source[1].close()
            self._source = None

    def finish(self, expected: int) -> None:
        """Make sure that everything is on the disk, and nothing more or less than planned."""
        self.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        if size != expected:
            raise OutputError(f"{size:,} bytes were written, {expected:,} were planned: please report this")


def _cut_short(span: Span) -> ModelError:
    return ModelError(f"{span.path} became shorter while it was read; copy it again and start over")
