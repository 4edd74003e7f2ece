"""Files of a sandbox: the guest opens, as the user, and passes the descriptor; the engine does the I/O.

Whole files are written beside their place and moved into it, so a reader sees the old or the new, never half. Trees
travel as tar streams. A path is checked before it is sent; `..` is refused, relative ones mean the working directory.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from cloche import errors, interfaces, model

if TYPE_CHECKING:  # trees are rare, and tarfile costs a command more than this module
    import io
    import tarfile

MAX_READ = 256 * 1024 * 1024
MAX_TREE = 1 << 30
_CHUNK = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_INLINE = 1 << 20  # bytes that are moved without leaving the event loop
_MOST_ENTRIES = 100_000  # of one list
_USERS = {0: "root", 1000: "user"}


async def read(machine: interfaces.Machine, path: str, *, user: str = "user", limit: int = MAX_READ) -> bytes:
    fd = await machine.open_file(model.check_path(path), os.O_RDONLY, user=user)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise errors.error(
                "file_too_large", f"{path} has {size} bytes; at most {limit} are read at once",
                hint='read it with format="stream"',
            )  # fmt: skip
        if size <= _INLINE:
            return _read_all(fd, limit)
        return await asyncio.to_thread(_read_all, fd, limit)
    finally:
        os.close(fd)


def _read_all(fd: int, limit: int) -> bytes:
    """To the end, not to `st_size`: /proc files say 0, and a file may grow."""
    pieces: list[bytes] = []
    left = limit
    while left > 0 and (data := os.read(fd, min(left, _CHUNK))):
        pieces.append(data)
        left -= len(data)
    return b"".join(pieces)


async def read_stream(machine: interfaces.Machine, path: str, *, user: str = "user") -> AsyncIterator[bytes]:
    fd = await machine.open_file(model.check_path(path), os.O_RDONLY, user=user)
    try:
        while data := await asyncio.to_thread(os.read, fd, _CHUNK):
            yield data
    finally:
        os.close(fd)


async def write(
    machine: interfaces.Machine, path: str, data: bytes, *, user: str = "user", mode: int | None = None
) -> model.FileInfo:
    """Replace `path` by `data`, atomically, making missing directories. A symlink is written through."""
    model.check_path(path)
    # What is nearly always there is a regular file or nothing, and whoever replaces it looks first.
    written = await _write_quickly(machine, path, data, user, mode)
    if written is not None:
        return written
    old = await _existing(machine, path, user)
    if old is not None and stat.S_ISLNK(old.mode):
        return await _write_through(machine, path, data, user)
    if old is not None and not stat.S_ISREG(old.mode):
        code = "is_directory" if stat.S_ISDIR(old.mode) else "not_regular_file"
        raise errors.error(code, f"{path} is not a regular file and is not replaced", hint="remove it first")
    wanted = mode if mode is not None else (stat.S_IMODE(old.mode) if old is not None else 0o644)
    draft = _draft(path)
    fd = await machine.open_file(draft, _NEW, mode=wanted, user=user, parents=old is None)
    try:
        await _fill(fd, data, path)
        info = os.fstat(fd)
        await machine.file_act("move", draft, target=path, user=user)
    except BaseException:
        await _discard(machine, draft, user)
        raise
    finally:
        os.close(fd)
    return _info_of_fd(path, info, user)


async def _write_quickly(
    machine: interfaces.Machine, path: str, data: bytes, user: str, mode: int | None
) -> model.FileInfo | None:
    """In two messages; None, and nothing done, where it takes a closer look."""
    draft = _draft(path)
    try:
        fd = await machine.open_file(
            draft, _NEW, mode=0o644 if mode is None else mode, user=user, parents=True
        )
    except errors.ClocheError:
        return None
    try:
        await _fill(fd, data, path)
        try:
            await machine.file_act("replace", draft, target=path, user=user, keep_mode=mode is None)
        except errors.ClocheError:
            await _discard(machine, draft, user)
            return None
        return _info_of_fd(path, os.fstat(fd), user)
    except BaseException:
        await _discard(machine, draft, user)
        raise
    finally:
        os.close(fd)


def _draft(path: str) -> str:
    """A name beside `path` that nobody has."""
    directory, _, name = path.rpartition("/")
    beside = f"{directory}/" if directory or path.startswith("/") else ""
    return f"{beside}.{name[:100]}.{os.urandom(6).hex()}"


async def _existing(machine: interfaces.Machine, path: str, user: str) -> Any:
    try:
        return (await machine.file_act("stat", path, user=user)).entry
    except errors.NotFound:
        return None


async def _write_through(machine: interfaces.Machine, path: str, data: bytes, user: str) -> model.FileInfo:
    fd = await machine.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, user=user)
    try:
        await _fill(fd, data, path)
        return _info_of_fd(path, os.fstat(fd), user)
    finally:
        os.close(fd)


async def _fill(fd: int, data: bytes, path: str) -> None:
    try:
        if len(data) <= _INLINE:
            _write_all(fd, data)
        else:
            await asyncio.to_thread(_write_all, fd, data)
    except OSError as problem:
        code = "sandbox_disk_full" if problem.errno in (28, 122) else "permission_denied"
        raise errors.error(
            code,
            f"{path} was not written: {problem.strerror}",
            hint="remove files, or ask for a larger disk_mib",
        ) from None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _discard(machine: interfaces.Machine, path: str, user: str) -> None:
    try:
        await machine.file_act("remove", path, user=user)
    except errors.ClocheError:
        pass  # the sandbox is gone, and the draft with it


async def stat_path(
    machine: interfaces.Machine, path: str, *, user: str = "user", follow: bool = False
) -> model.FileInfo:
    frame = await machine.file_act("stat", model.check_path(path), user=user, follow=follow)
    return _info(path.rstrip("/") or "/", frame.entry)


async def list_dir(
    machine: interfaces.Machine, path: str, *, user: str = "user", depth: int = 1
) -> list[model.FileInfo]:
    if depth < 1:
        raise errors.error("limit_invalid", f"depth is {depth}; it must be at least 1")
    found = level = await _entries(machine, path, user)
    while depth > 1 and level:
        depth -= 1
        below: list[model.FileInfo] = []
        for directory in level:
            if directory.type == "directory":
                below += await _entries(
                    machine, directory.path, user, most=_MOST_ENTRIES - len(found) - len(below)
                )
        found, level = found + below, below
    return found


async def _entries(
    machine: interfaces.Machine, path: str, user: str, most: int = _MOST_ENTRIES
) -> list[model.FileInfo]:
    """One directory. What says that there is always more is a hostile guest, or too much to hold."""
    model.check_path(path)
    found: list[model.FileInfo] = []
    base = path.rstrip("/")
    after = ""
    while True:
        frame = await machine.file_act("list", path, user=user, after=after)
        found += [
            _info(f"{base}/{e.name}" if base not in ("", ".") or path.startswith("/") else e.name, e)
            for e in frame.entries
        ]
        if len(found) > most:
            raise errors.error(
                "file_too_large",
                f"there are more than {_MOST_ENTRIES} entries",
                hint="list the parts, or use a command",
            )
        if not frame.more:
            return found
        if frame.last <= after:
            raise errors.error("guest_misbehaved", f"the list of {path} does not get on")
        after = frame.last


async def move(
    machine: interfaces.Machine, source: str, target: str, *, user: str = "user", overwrite: bool = True
) -> None:
    model.check_path(target)
    await machine.file_act(
        "move", model.check_path(source), target=target, user=user, overwrite=overwrite, parents=True
    )


async def remove(
    machine: interfaces.Machine, path: str, *, user: str = "user", recursive: bool = False
) -> None:
    await machine.file_act("remove", model.check_path(path), user=user, recursive=recursive)


async def make_dir(machine: interfaces.Machine, path: str, *, user: str = "user") -> bool:
    """Make a directory and what is missing above it; False if it was there."""
    return bool((await machine.file_act("make_dir", model.check_path(path), user=user)).made)


async def download_tree(machine: interfaces.Machine, path: str, *, user: str = "user") -> bytes:
    """A directory (or file) as a tar. Regular files, directories and symlinks; names are relative to `path`."""
    import io
    import tarfile

    top = await stat_path(machine, path, user=user)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        if top.type != "directory":
            await _add(machine, archive, top, top.name or "file", user, buffer)
        else:
            await _add_below(machine, archive, top.path, user, buffer)
    return buffer.getvalue()


async def _add_below(
    machine: interfaces.Machine, archive: tarfile.TarFile, path: str, user: str, buffer: io.BytesIO
) -> None:
    waiting = [(path, "")]
    count = 0
    while waiting:  # not by recursion: a tree inside may be deeper than Python's stack
        directory, prefix = waiting.pop()
        entries = await _entries(machine, directory, user, most=_MOST_ENTRIES - count)
        count += len(entries)
        for entry in entries:
            await _add(machine, archive, entry, prefix + entry.name, user, buffer)
            if entry.type == "directory":
                waiting.append((entry.path, prefix + entry.name + "/"))


async def _add(
    machine: interfaces.Machine,
    archive: tarfile.TarFile,
    entry: model.FileInfo,
    name: str,
    user: str,
    buffer: io.BytesIO,
) -> None:
    import io
    import tarfile

    item = tarfile.TarInfo(name)
    item.mode, item.mtime = stat.S_IMODE(entry.mode), int(entry.modified_at)
    data = b""
    if entry.type == "directory":
        item.type = tarfile.DIRTYPE
    elif entry.type == "symlink":
        item.type, item.linkname = tarfile.SYMTYPE, entry.target or ""
    elif entry.type == "file":
        data = await read(machine, entry.path, user=user)
        item.size = len(data)
    else:
        return  # sockets, FIFOs and devices stay where they are
    if buffer.tell() + item.size > MAX_TREE:
        raise errors.error("file_too_large", "the tree exceeds 1 GiB", hint="download its parts")
    archive.addfile(item, io.BytesIO(data))


async def upload_tree(machine: interfaces.Machine, path: str, archive: bytes, *, user: str = "user") -> int:
    """Unpack a tar below `path`; the number of files. Names that lead out, devices and hard links are refused first."""
    model.check_path(path)
    with _open_archive(archive) as source:
        members = source.getmembers()
        for member in members:
            _check_member(member)
        await make_dir(machine, path, user=user)
        count = 0
        for member in members:
            target = f"{path.rstrip('/')}/{member.name}".rstrip("/")
            if member.isdir():
                await make_dir(machine, target, user=user)
            elif member.issym():
                await machine.file_act("symlink", target, target=member.linkname, user=user, parents=True)
            else:
                file = source.extractfile(member)
                await write(
                    machine, target, file.read() if file else b"", user=user, mode=member.mode & 0o777
                )
                count += 1
    return count


def _open_archive(archive: bytes) -> tarfile.TarFile:
    """The archive with its table read, so that a broken one is refused before anything is unpacked."""
    import io
    import tarfile

    try:
        source = tarfile.open(fileobj=io.BytesIO(archive), mode="r:*")  # noqa: SIM115 - the caller closes it
        source.getmembers()
        return source
    except (tarfile.TarError, EOFError, OSError, ValueError) as problem:
        text = str(problem).partition("\n")[0]
        raise errors.error("argument_invalid", f"the archive is not a tar: {text}") from None


def _check_member(member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts:
        raise errors.error("path_invalid", f"the archive's {member.name!r} leads out of the target")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise errors.error(
            "not_regular_file", f"the archive's {member.name!r} is a device, FIFO or hard link"
        )


def _info(path: str, entry: Any) -> model.FileInfo:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    return model.FileInfo(
        name=entry.name, path=path, type=kinds.get(stat.S_IFMT(entry.mode), "other"), size=entry.size,  # type: ignore[arg-type]
        mode=stat.S_IMODE(entry.mode), owner=_USERS.get(entry.uid, str(entry.uid)),
        group=_USERS.get(entry.gid, str(entry.gid)), modified_at=entry.mtime, target=entry.target,
    )  # fmt: skip


def _info_of_fd(path: str, info: os.stat_result, user: str) -> model.FileInfo:
    return model.FileInfo(
        name=path.rpartition("/")[2], path=path, type="file", size=info.st_size, mode=stat.S_IMODE(info.st_mode),
        owner=user, group=user, modified_at=info.st_mtime,
    )  # fmt: skip
