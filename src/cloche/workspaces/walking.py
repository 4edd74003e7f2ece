"""Looking at and writing into trees that hostile code has had its hands on.

Nothing here follows a symlink below its starting point: each directory is opened from its parent with O_NOFOLLOW, and
what is read is a regular file of bounded size. A name swapped between look and use yields an error, never another file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
MAX_TEXT = 1 << 20
_MAX_DEPTH = 200


@contextmanager
def directory(root: str | int, relative: str = "") -> Iterator[int]:
    """A descriptor of `relative` beneath `root`; a symlink on the way is an OSError."""
    fd = os.dup(root) if isinstance(root, int) else os.open(root, DIRECTORY)
    try:
        for part in _parts(relative):
            inner = os.open(part, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _parts(relative: str) -> list[str]:
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(f"{relative!r} leads upwards")
    return parts


@contextmanager
def parent(root: str, relative: str) -> Iterator[tuple[int, str]]:
    """The directory that holds `relative`, and the name in it."""
    with directory(root, os.path.dirname(relative)) as fd:
        yield fd, os.path.basename(relative)


def open_regular(name: str, dir_fd: int) -> int:
    """A regular file, for reading. A FIFO does not block and a device is not read."""
    fd = os.open(name, _READ, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(f"{name!r} is not a regular file")


def read(root: str, relative: str, limit: int = MAX_TEXT) -> bytes:
    """The content of a regular file of at most `limit` bytes beneath `root`."""
    with parent(root, relative) as (dir_fd, name):
        fd = open_regular(name, dir_fd)
        with open(fd, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{relative!r} is larger than {limit} bytes")
    return data


def read_text(root: str, relative: str) -> str | None:
    """The content as text, byte for byte recoverable; None where there is no such file to read."""
    try:
        return read(root, relative).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def update(root: str, relative: str, change: Callable[[bytes], bytes], *, lock: str) -> None:
    """Replace a file by what `change` makes of it, holding `lock` (made exclusively beside it) from before the reading.

    What is no regular file counts as empty. Owner and mode stay.
    """
    with parent(root, relative) as (dir_fd, name):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(lock, flags, 0o600, dir_fd=dir_fd)
        done = False
        try:
            with open(fd, "wb") as file:
                info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                before = read(root, relative) if stat.S_ISREG(info.st_mode) else b""
                after = change(before)
                file.write(after)
                file.flush()
                own_like(fd, info)
                os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o777 if stat.S_ISREG(info.st_mode) else 0o644)
                os.fsync(fd)
            if after != before or not stat.S_ISREG(info.st_mode):
                os.rename(lock, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                done = True
        finally:
            if not done:
                os.unlink(lock, dir_fd=dir_fd)


def own_like(target: str | int, info: os.stat_result) -> None:
    """Root makes files for others; nobody else can, nor needs to."""
    if os.geteuid() == 0:
        os.chown(target, info.st_uid, info.st_gid)


class Listing(NamedTuple):
    """One directory: its path relative to where the walk began, and the names in it."""

    path: str
    files: frozenset[str]
    directories: frozenset[str]


class Walk:
    """Every directory beneath `root`, at most `limit`. `complete` says afterwards whether that was all."""

    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.complete = True

    def __iter__(self) -> Iterator[Listing]:
        # Depth first, each directory opened from its parent's descriptor; the stack holds one per level.
        stack: list[tuple[int, str, Iterator[str]]] = []
        seen = 0
        try:
            fd, path = os.open(self.root, DIRECTORY), ""
            while True:
                listing = _list(fd, path)
                stack.append((fd, path + "/" if path else "", iter(_deeper(listing))))
                seen += 1
                yield listing
                step = self._next(stack)
                if step is None:
                    return
                fd, path = step
                if seen == self.limit:
                    os.close(fd)
                    self.complete = False
                    return
        finally:
            for fd, _path, _names in stack:
                os.close(fd)

    def _next(self, stack: list[tuple[int, str, Iterator[str]]]) -> tuple[int, str] | None:
        """Open the next directory, going up where one is done. The unreadable is skipped: git cannot read it either."""
        while stack:
            fd, prefix, names = stack[-1]
            for name in names:
                if len(stack) > _MAX_DEPTH:
                    self.complete = False
                    break
                try:
                    return os.open(name, DIRECTORY, dir_fd=fd), prefix + name
                except OSError:
                    continue
            stack.pop()
            os.close(fd)
        return None


def _list(fd: int, path: str) -> Listing:
    files: set[str] = set()
    directories: set[str] = set()
    with os.scandir(fd) as entries:
        for entry in entries:
            (directories if entry.is_dir(follow_symlinks=False) else files).add(entry.name)
    return Listing(path, frozenset(files), frozenset(directories))


def _deeper(listing: Listing) -> list[str]:
    """What git keeps in a repository is no place for further ones, but for these."""
    inner = listing.directories & {"modules", "worktrees"} if is_git_dir(listing) else listing.directories
    return sorted(inner)


def is_git_dir(listing: Listing) -> bool:
    """What git would take for a repository: symlinks count as any name does."""
    names = listing.files | listing.directories
    return "HEAD" in names and ({"objects", "refs"} <= names or "commondir" in names)
