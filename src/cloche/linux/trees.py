"""Trees that something hostile shaped: walked, packed into one file, unpacked, compared.

A walk holds one directory open and steps up by "..", so no depth of nesting and no length of path stops it; it follows
nothing and opens regular files only. Nobody may change the tree meanwhile.

A pack is a sequence of entries, each a length (4 bytes, big-endian), that much JSON, and the data of a file without its
holes. An entry has a `kind`: `d` enters a directory and `x` leaves it again, `f` is a file, `l` a symlink, `h` a further
name of the file numbered `file`, `p` a FIFO, `s` a socket, `w` a whiteout (what an overlay puts where something of the
layer below was removed). Owners count from where the sandbox's uid range begins. Devices are left out: no sandbox makes any.

Standard library and `linux.extents` only: launchers run this.
"""

import errno
import json
import os
import stat

from cloche.linux import extents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Entry = dict[str, Any]

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_KINDS = {stat.S_IFDIR: "d", stat.S_IFREG: "f", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
_MADE = {"p": stat.S_IFIFO, "s": stat.S_IFSOCK}
_XATTRS = ("user.", "trusted.overlay.")
_LINKS = ".cloche-links"
_MAX_HEAD = 1 << 20


# --- walking ------------------------------------------------------------------------------------------------


def walk(root: int, first_id: int = 0) -> "Iterator[tuple[Entry, int]]":
    """Every entry beneath a directory, and for a file its descriptor (-1 otherwise), good until the next step."""
    here = os.open(".", _OPEN_DIR, dir_fd=root)
    levels = [sorted(os.listdir(here), reverse=True)]
    seen: dict[tuple[int, int], int] = {}
    try:
        while levels:
            if not levels[-1]:
                levels.pop()
                if levels:
                    yield {"kind": "x"}, -1
                    here = step(here, "..")
                continue
            name = levels[-1].pop()
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
            entry = _entry(name, info, first_id)
            if entry is None:
                continue
            if entry["kind"] == "d":
                here = step(here, name)
                entry["xattrs"] = _xattrs(here)
                yield entry, -1
                levels.append(sorted(os.listdir(here), reverse=True))
            elif entry["kind"] == "f":
                yield from _file(here, entry, info, seen)
            else:
                if entry["kind"] == "l":
                    entry["target"] = os.readlink(name, dir_fd=here)
                yield entry, -1
    finally:
        os.close(here)


def step(here: int, name: str) -> int:
    there = os.open(name, _OPEN_DIR, dir_fd=here)
    os.close(here)
    return there


def _entry(name: str, info: os.stat_result, first_id: int) -> "Entry | None":
    kind = _KINDS.get(stat.S_IFMT(info.st_mode))
    if kind is None:
        if not stat.S_ISCHR(info.st_mode) or info.st_rdev != 0:
            return None
        kind = "w"
    return {
        "kind": kind, "name": name, "mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid - first_id,
        "gid": info.st_gid - first_id, "mtime": info.st_mtime_ns, "ctime": info.st_ctime_ns, "ino": info.st_ino,
        "size": info.st_size if kind == "f" else 0,
    }  # fmt: skip


def _file(
    here: int, entry: "Entry", info: os.stat_result, seen: "dict[tuple[int, int], int]"
) -> "Iterator[tuple[Entry, int]]":
    mark = (info.st_dev, info.st_ino)
    if info.st_nlink > 1:
        if mark in seen:
            yield {**entry, "kind": "h", "file": seen[mark]}, -1
            return
        seen[mark] = entry["file"] = len(seen)
    fd = os.open(entry["name"], OPEN_FILE, dir_fd=here)
    try:
        entry["xattrs"] = _xattrs(fd)
        yield entry, fd
    finally:
        os.close(fd)


def _xattrs(fd: int) -> "dict[str, str]":
    try:
        names = [name for name in os.listxattr(fd) if name.startswith(_XATTRS)]
        return {name: os.getxattr(fd, name).hex() for name in names}
    except OSError as problem:
        if problem.errno in (errno.ENOTSUP, errno.ENODATA):
            return {}
        raise


# --- packing ------------------------------------------------------------------------------------------------


class Packed:
    """What a pack turned out to be."""

    def __init__(self) -> None:
        self.files = 0
        self.size = 0


def pack(root: int, writing: int, first_id: int, wanted: "tuple[str, ...]") -> Packed:
    """Write the trees of a sandbox's disk to a file: of its top, what is `wanted`, and of that what was written (`up`)."""
    done = Packed()
    at = 0
    for entry, fd in _chosen(walk(root, first_id), wanted):
        pieces = extents.data(fd, entry["size"]) if fd >= 0 else []
        if fd >= 0:
            entry["data"] = pieces
        body = json.dumps(entry, separators=(",", ":")).encode()
        _write(writing, len(body).to_bytes(4, "big") + body, at)
        at += 4 + len(body)
        for start, end in pieces:
            extents.copy_range(fd, start, writing, at, end - start)
            at += end - start
        done.files += entry["kind"] not in ("x",)
    done.size = at
    return done


def _chosen(
    entries: "Iterator[tuple[Entry, int]]", wanted: "tuple[str, ...]"
) -> "Iterator[tuple[Entry, int]]":
    """Two levels down the names are ours: layers, and in each what was written beside the kernel's working place."""
    depth, skipped = 0, 0
    for entry, fd in entries:
        kind = entry["kind"]
        if skipped:
            skipped += {"d": 1, "x": -1}.get(kind, 0)
            continue
        if kind == "d" and (
            (depth == 0 and entry["name"] not in wanted) or (depth == 1 and entry["name"] != "up")
        ):
            skipped = 1
            continue
        depth += {"d": 1, "x": -1}.get(kind, 0)
        yield entry, fd


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def read(pack_fd: int) -> "Iterator[tuple[Entry, int]]":
    """The entries of a pack, and where the data of each begins."""
    at = 0
    while head := os.pread(pack_fd, 4, at):
        length = int.from_bytes(head, "big")
        if len(head) < 4 or length > _MAX_HEAD:
            raise OSError(errno.EIO, "a pack is damaged")
        entry = json.loads(os.pread(pack_fd, length, at + 4))
        at += 4 + length
        yield entry, at
        at += sum(end - start for start, end in entry.get("data", ()))


def unpack(pack_fd: int, root: int, first_id: int) -> None:
    """Make what a pack holds beneath an empty directory."""
    here = os.open(".", _OPEN_DIR, dir_fd=root)
    os.mkdir(_LINKS, 0o700, dir_fd=root)
    links = os.open(_LINKS, _OPEN_DIR, dir_fd=root)
    entered: list[Entry] = []
    try:
        for entry, at in read(pack_fd):
            if entry["kind"] == "d":
                os.mkdir(entry["name"], 0o700, dir_fd=here)
                here = step(here, entry["name"])
                entered.append(entry)
            elif entry["kind"] == "x":
                made = entered.pop()
                _dress(here, made, first_id)
                here = step(here, "..")
                os.utime(made["name"], ns=(made["mtime"],) * 2, dir_fd=here, follow_symlinks=False)
            else:
                _make(here, entry, pack_fd, at, links, first_id)
        for name in os.listdir(links):
            os.unlink(name, dir_fd=links)
        os.rmdir(_LINKS, dir_fd=root)
    finally:
        os.close(here)
        os.close(links)


def _make(here: int, entry: "Entry", pack_fd: int, at: int, links: int, first_id: int) -> None:
    name, kind = entry["name"], entry["kind"]
    if kind == "h":
        os.link(str(entry["file"]), name, src_dir_fd=links, dst_dir_fd=here, follow_symlinks=False)
        return
    if kind == "f":
        fd = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=here
        )
        try:
            os.ftruncate(fd, entry["size"])
            for start, end in entry["data"]:
                extents.copy_range(pack_fd, at, fd, start, end - start)
                at += end - start
            _dress(fd, entry, first_id)
        finally:
            os.close(fd)
        if "file" in entry:
            os.link(name, str(entry["file"]), src_dir_fd=here, dst_dir_fd=links, follow_symlinks=False)
    elif kind == "l":
        os.symlink(entry["target"], name, dir_fd=here)
        _own(name, entry, first_id, here)
    elif kind == "w":
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=here)
        return
    else:
        os.mknod(name, _MADE[kind] | 0o600, dir_fd=here)
        _own(name, entry, first_id, here)
        os.chmod(name, entry["mode"], dir_fd=here)
    os.utime(name, ns=(entry["mtime"],) * 2, dir_fd=here, follow_symlinks=False)


def _own(name: str, entry: "Entry", first_id: int, here: int) -> None:
    if first_id:
        os.chown(name, first_id + entry["uid"], first_id + entry["gid"], dir_fd=here, follow_symlinks=False)


def _dress(fd: int, entry: "Entry", first_id: int) -> None:
    """Owner before mode: a change of owner takes bits off."""
    if first_id:
        os.fchown(fd, first_id + entry["uid"], first_id + entry["gid"])
    for name, value in entry.get("xattrs", {}).items():
        os.setxattr(fd, name, bytes.fromhex(value))
    os.fchmod(fd, entry["mode"])
