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
        waiting = [""]
        seen = 0
        while waiting:
            if seen == self.limit:
                self.complete = False
                return
            seen += 1
            listing = self._list(waiting.pop())
            if listing is None:
                continue
            yield listing
            if not is_git_dir(
                listing
            ):  # what git keeps in there is no place for further repositories but `modules`
                deeper = listing.directories
            else:
                deeper = listing.directories & {"modules", "worktrees"}
            prefix = listing.path + "/" if listing.path else ""
            waiting += [prefix + name for name in sorted(deeper, reverse=True)]

    def _list(self, path: str) -> Listing | None:
        files: set[str] = set()
        directories: set[str] = set()
        try:
            with directory(self.root, path) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    (directories if entry.is_dir(follow_symlinks=False) else files).add(entry.name)
        except OSError:
            if not path:
                raise
            return None  # gone or unreadable: then git on the host cannot use it either
        return Listing(path, frozenset(files), frozenset(directories))


def is_git_dir(listing: Listing) -> bool:
    """What git would take for a repository: symlinks count as any name does."""
    names = listing.files | listing.directories
    return "HEAD" in names and ({"objects", "refs"} <= names or "commondir" in names)
