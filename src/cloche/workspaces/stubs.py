"""Empty files and directories that stand where a protected name is not there yet.

A mount needs a mount point, and a name that does not exist cannot be kept from being made (CVE-2026-25725). So an empty
stub is made on the host, bound read-only inside, and removed at the end. The rules that keep it from hurting:

- written down, and on disk, before it is made: a crash at any point leaves a journal from which `remove` cleans up;
- removed only while it is what was made: same inode, still empty, not touched. Otherwise it is the user's by now;
- two sandboxes may share a workspace. The second finds the first one's stub and *adopts* it by writing the same line
  into its own journal; whoever ends last removes it. The journals of all lie side by side (`<states>/<sandbox>/stubs`),
  and a lock on the directory of states orders the comings and goings.

One stub is not empty: `.git/commondir` holds ".", which is what git assumes where there is none. An empty one stops git.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from cloche.workspaces import walking

JOURNAL = "stubs"


class Want(NamedTuple):
    """A name to be made: beneath `anchor`, a directory or a file with `content`."""

    anchor: str
    path: str
    directory: bool
    content: bytes = b""


class Stub(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a journal. Without an inode it was planned and perhaps never made."""

    anchor: str
    path: str
    directory: bool
    content: bytes = b""
    device: int = 0
    inode: int = 0
    changed_ns: int = 0
    """0 for a directory that holds other stubs: those change it."""

    @property
    def full(self) -> str:
        return f"{self.anchor}/{self.path}"


@contextmanager
def exclusive(state: str) -> Iterator[None]:
    """One comer or goer at a time among all sandboxes of one state directory."""
    fd = os.open(os.path.dirname(state), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # held for milliseconds; no sandbox sees this directory
        yield
    finally:
        os.close(fd)


def make(state: str, wants: Iterable[Want]) -> list[str]:
    """Make what is missing of `wants`, parents first; adopt what another sandbox made. Holds `exclusive`.

    The answer names what could not be made: where the caller may not write, the sandbox may not either.
    """
    ordered = list(wants)
    if not ordered:
        return []
    failed: list[str] = []
    others = {(stub.device, stub.inode): stub for stub in _others(state) if stub.inode}
    _append(state, [Stub(want.anchor, want.path, want.directory, want.content) for want in ordered])
    made: list[Stub] = []
    try:
        for want in ordered:
            try:
                stub = _make(want, others)
                if stub and any(other.path.startswith(want.path + "/") for other in ordered):
                    stub = msgspec.structs.replace(stub, changed_ns=0)
            except OSError as problem:
                if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                    raise
                failed.append(f"{want.anchor}/{want.path}")
            else:
                made += [stub] if stub else []
    finally:
        _append(state, made)
    return failed


def _make(want: Want, others: dict[tuple[int, int], Stub]) -> Stub | None:
    with walking.parent(want.anchor, want.path) as (dir_fd, name):
        try:
            if want.directory:
                os.mkdir(name, 0o755, dir_fd=dir_fd)
            else:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
                os.write(fd, want.content)
                os.close(fd)
        except FileExistsError:
            info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            return others.get((info.st_dev, info.st_ino))
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            walking.own_like(fd, os.fstat(dir_fd))
            info = os.fstat(fd)
        finally:
            os.close(fd)
    return Stub(
        want.anchor, want.path, want.directory, want.content, info.st_dev, info.st_ino, info.st_mtime_ns
    )


def recorded(state: str) -> list[Stub]:
    """The journal: the last word on each path. A torn last line was never acted upon."""
    try:
        with open(f"{state}/{JOURNAL}", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found: dict[str, Stub] = {}
    for line in lines[:-1]:
        stub = msgspec.json.decode(line, type=Stub)
        found[stub.full] = stub
    return list(found.values())


def of_others(state: str) -> set[tuple[int, int]]:
    """Device and inode of every stub that another sandbox stands by."""
    if not os.path.isdir(os.path.dirname(state)):
        return set()  # no sandbox of this engine has had a workspace yet
    return {(stub.device, stub.inode) for stub in _others(state) if stub.inode}


def remove(state: str) -> list[str]:
    """Remove the stubs of one journal, then the journal; the paths removed. Holds `exclusive`. Twice is harmless."""
    shared = {(stub.device, stub.inode) for stub in _others(state)}
    shared_paths = {stub.full for stub in _others(state)}
    removed: list[str] = []
    for stub in sorted(recorded(state), key=lambda stub: stub.full.count("/"), reverse=True):
        if (stub.inode and (stub.device, stub.inode) in shared) or (
            not stub.inode and stub.full in shared_paths
        ):
            continue
        try:
            if _remove(stub):
                removed.append(stub.full)
        except OSError:
            continue  # gone, moved, or not empty: then it is not ours any more
    try:
        os.unlink(f"{state}/{JOURNAL}")
    except FileNotFoundError:
        pass
    return removed[::-1]


def _remove(stub: Stub) -> bool:
    with walking.parent(stub.anchor, stub.path) as (dir_fd, name):
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if stub.inode and (info.st_dev, info.st_ino) != (stub.device, stub.inode):
            return False
        # Inode numbers are used again at once, so a name removed and made anew is told by its time.
        if stub.changed_ns and info.st_mtime_ns != stub.changed_ns:
            return False
        if stub.directory:
            os.rmdir(name, dir_fd=dir_fd)  # refuses what is not empty
            return True
        if not stat.S_ISREG(info.st_mode) or info.st_size != len(stub.content):
            return False
        if stub.content and walking.read(stub.anchor, stub.path, 64) != stub.content:
            return False
        os.unlink(name, dir_fd=dir_fd)
        return True


def _append(state: str, stubs: list[Stub]) -> None:
    if not stubs:
        return
    fd = os.open(f"{state}/{JOURNAL}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(b"".join(msgspec.json.encode(stub) + b"\n" for stub in stubs))
        file.flush()
        os.fsync(fd)
    directory = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fsync(directory)  # the name too, or a crash of the machine leaves stubs and no journal
    os.close(directory)


def _others(state: str) -> list[Stub]:
    states, mine = os.path.split(state)
    with os.scandir(states) as entries:
        names = [entry.name for entry in entries if entry.name != mine]
    return [stub for name in names for stub in recorded(f"{states}/{name}")]
