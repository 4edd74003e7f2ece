"""Trees on disk, walked and written by descriptor: no name is ever looked up through a link.

Roots of images are never written after they were made, so a root that is derived from another shares its files: `clone`
makes directories anew and gives every file a further name. A derived root costs its directories and what was changed.

`apply` takes over what a sandbox wrote: the upper directory of its root's overlay, in the kernel's notation (a whiteout
is a device 0:0, `opaque` and `redirect` are attributes). It is read when nothing of the sandbox runs any more.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cloche import errors
from cloche.images import layers
from cloche.linux import syscalls

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
# Of a sandbox's root: what is nobody's to keep.
_PASSING = (("tmp",), ("var", "tmp"), ("run",), ("dev",), ("proc",), ("sys",))
Parts = tuple[str, ...]
Owner = Callable[[int], int]


@contextmanager
def opened(path: str, directory: int | None = None) -> Iterator[int]:
    fd = os.open(path, _LIST, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def clone(source: int, target: int, depth: int = 0) -> None:
    """Fill `target` with `source`'s tree: directories anew, files as further names of the same ones."""
    _check_depth(depth)
    for name in os.listdir(source):
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            with opened(name, source) as below, opened(name, target) as made:
                clone(below, made, depth + 1)
                like(made, found, owners=os.geteuid() == 0)
        else:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def copy(source: int, target: int, limits: layers.Limits, *, owners: bool, depth: int = 0) -> None:
    """Fill `target` with a copy of `source`'s tree, within one file system; specials are left out."""
    _check_depth(depth)
    device = os.fstat(source).st_dev
    for name in sorted(os.listdir(source)):
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            limits.take(0)
            os.mkdir(name, 0o700, dir_fd=target)
            with opened(name, target) as made:
                if found.st_dev == device:
                    with opened(name, source) as below:
                        copy(below, made, limits, owners=owners, depth=depth + 1)
                like(made, found, owners=owners)
        elif stat.S_ISREG(found.st_mode):
            limits.take(found.st_size)
            copy_file(source, target, name, found, owners=owners)
        elif stat.S_ISLNK(found.st_mode):
            limits.take(0)
            copy_link(source, target, name, found, owners=owners)


def fingerprint(root: int) -> str:
    """What a tree is, as far as its listing tells: names, kinds, sizes, owners, times."""
    digest = hashlib.sha256()

    def add(directory: int, path: str, depth: int) -> None:
        _check_depth(depth)
        device = os.fstat(directory).st_dev
        for name in sorted(os.listdir(directory)):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            facts = (
                found.st_mode,
                found.st_uid,
                found.st_gid,
                found.st_size,
                found.st_mtime_ns,
                found.st_ino,
            )
            digest.update(f"{path}/{name}\0{facts}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISDIR(found.st_mode) and found.st_dev == device:
                with opened(name, directory) as below:
                    add(below, f"{path}/{name}", depth + 1)

    add(root, "", 0)
    return digest.hexdigest()


def apply(upper: int, parent: int, target: int, limits: layers.Limits, *, first_id: int | None) -> list[str]:
    """Take over into `target` (a clone of `parent`) what the overlay's `upper` says; what was left out, in words.

    `first_id` is the host's id of the sandbox's root: owners are counted from there. None where all is the caller's.
    """
    return _Applier(parent, limits, first_id).apply(upper, target)


class _Applier:
    def __init__(self, parent: int, limits: layers.Limits, first_id: int | None) -> None:
        self._parent = parent
        self._limits = limits
        self._first = first_id
        self._prefix = "user.overlay." if first_id is None else "trusted.overlay."
        self._linked: dict[int, Parts] = {}
        self._left_out: list[str] = []
        self._root = -1

    def apply(self, upper: int, target: int) -> list[str]:
        self._root = target
        self._directory(upper, target, ())
        return self._left_out

    def _directory(self, upper: int, target: int, parts: Parts) -> None:
        _check_depth(len(parts))
        if parts in _PASSING:
            return
        for name in os.listdir(upper):
            found = os.stat(name, dir_fd=upper, follow_symlinks=False)
            self._limits.take(found.st_size if stat.S_ISREG(found.st_mode) else 0)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                take_away(target, name)
            elif stat.S_ISDIR(found.st_mode):
                self._merge(upper, target, (*parts, name), found)
            elif stat.S_ISREG(found.st_mode):
                self._file(upper, target, (*parts, name), found)
            elif stat.S_ISLNK(found.st_mode):
                take_away(target, name)
                copy_link(upper, target, name, found, owners=self._owners, owner=self._owner)
            else:
                take_away(target, name)
                self._left_out.append(f"/{'/'.join((*parts, name))} is neither file, directory nor link")

    def _merge(self, upper: int, target: int, parts: Parts, found: os.stat_result) -> None:
        name = parts[-1]
        with opened(name, upper) as below:
            moved = self._attribute(below, "redirect")
            if moved or self._attribute(below, "opaque"):
                take_away(target, name)
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.stat(name, dir_fd=target, follow_symlinks=False).st_mode):
                    take_away(target, name)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=target)
            with opened(name, target) as made:
                if moved:
                    self._restore_moved(moved, parts, made)
                self._directory(below, made, parts)
                like(made, found, owners=self._owners, owner=self._owner)

    def _restore_moved(self, moved: bytes, parts: Parts, made: int) -> None:
        """A renamed directory: the layer holds what changed in it, the rest is where it was."""
        where = os.fsdecode(moved)
        path = where.lstrip("/") if where.startswith("/") else "/".join((*parts[:-1], where))
        fd = syscalls.openat2(
            self._parent, path, _LIST, resolve=syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS
        )
        try:
            clone(fd, made, len(parts))
        finally:
            os.close(fd)

    def _file(self, upper: int, target: int, parts: Parts, found: os.stat_result) -> None:
        name = parts[-1]
        take_away(target, name)
        if found.st_nlink > 1 and (first := self._linked.get(found.st_ino)) is not None:
            with suppress(OSError):  # what it was linked to may have been passing
                source = syscalls.openat2(
                    self._root, "/".join(first[:-1]) or ".", _LIST, resolve=syscalls.RESOLVE_NO_SYMLINKS
                )
                try:
                    os.link(first[-1], name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                    return
                finally:
                    os.close(source)
        copy_file(upper, target, name, found, owners=self._owners, owner=self._owner)
        self._linked.setdefault(found.st_ino, parts)

    @property
    def _owners(self) -> bool:
        return self._first is not None

    def _owner(self, number: int) -> int:
        inside = number - (self._first or 0)
        return inside if 0 <= inside < layers.NOBODY + 2 else layers.NOBODY

    def _attribute(self, fd: int, name: str) -> bytes:
        try:
            return os.getxattr(fd, self._prefix + name)
        except OSError:
            return b""


def take_away(directory: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def copy_file(
    source: int, target: int, name: str, found: os.stat_result, *, owners: bool, owner: Owner = int
) -> None:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    try:
        write_file(reading, target, name, found, owners=owners, owner=owner)
    finally:
        os.close(reading)


def write_file(
    reading: int, target: int, name: str, found: os.stat_result, *, owners: bool, owner: Owner = int
) -> None:
    """A new file of what an open one has; never more than was looked at."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    writing = os.open(name, flags, 0o600, dir_fd=target)
    try:
        left, position = found.st_size, 0
        while left > 0 and (data := os.pread(reading, min(left, _CHUNK), position)):
            left -= len(data)
            position += len(data)
            while data:
                data = data[os.write(writing, data) :]
        like(writing, found, owners=owners, owner=owner, directory=False)
    finally:
        os.close(writing)


def copy_link(
    source: int, target: int, name: str, found: os.stat_result, *, owners: bool, owner: Owner = int
) -> None:
    os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    if owners:
        os.chown(name, owner(found.st_uid), owner(found.st_gid), dir_fd=target, follow_symlinks=False)


def like(fd: int, found: os.stat_result, *, owners: bool, owner: Owner = int, directory: bool = True) -> None:
    """Mode, owner and time as `found`, without the bits that give somebody else's rights."""
    if owners:
        os.fchown(fd, owner(found.st_uid), owner(found.st_gid))
    needed = 0 if owners else 0o700 if directory else 0o400
    os.fchmod(fd, stat.S_IMODE(found.st_mode) & (0o1777 if directory else 0o777) | needed)
    os.utime(fd, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _check_depth(depth: int) -> None:
    if depth > layers.DEEPEST:
        raise errors.error("image_invalid", f"its directories are nested more than {layers.DEEPEST} deep")
