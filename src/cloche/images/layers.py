"""Layers of an image, which are somebody else's bytes: each is judged whole before anything of it is written.

A layer is read twice from our own copy. The first reading checks digest, size and every header, and collects the
whiteouts; the second writes. So a refused layer leaves nothing, and whiteouts act on the layers beneath whatever their
place in the stream, as the OCI specification says.

What a header may not say is a rule with a name (`RULES`); the error tells entry and rule. What it may say is still
written by descriptor only: a parent is opened with RESOLVE_BENEATH from the root, a file is made anew with O_EXCL, never
written through. Set-uid and set-gid bits, extended attributes and owners outside 0–65535 are not taken over: nothing
in a sandbox could use them.

Standard library and `linux.syscalls` only: it runs in a process of its own (unpacking.py).
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from cloche import errors
from cloche.linux import syscalls

RULES = {
    "absolute_path": "its name begins with '/'",
    "parent_path": "its name contains '..'",
    "name": "its name is empty, holds a NUL, is too long or too deep",
    "device": "it is a device",
    "special_file": "it is neither file, directory nor link",
    "sparse": "it is a sparse file",
    "hard_link": "it is a hard link to something that is not a file of this image",
    "symlink_traversal": "it lies behind a symbolic link that leads out of the image, or behind a file",
    "whiteout": "it is a whiteout of nothing that could be there",
    "duplicate": "the layer has it twice",
    "header": "its header is too large or not a header",
}
NOBODY = 65534
DEEPEST = 255  # directories below each other
_HIDDEN, _OPAQUE = ".wh.", ".wh..wh..opq"
_CHUNK = 1 << 20
_MOST_HEADER = 1 << 20
_SLACK = 64 << 20  # of a stream, beyond the bytes of its files: headers and padding
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
_PLACE = os.O_PATH | os.O_DIRECTORY


class Blob(NamedTuple):
    """A layer on disk. `diff_id` is the digest of what is inside its compression."""

    path: str
    digest: str
    diff_id: str | None = None


class Limits:
    """What a whole image may take; counted down by its layers."""

    def __init__(self, size: int, files: int) -> None:
        self.most_bytes, self.most_files = size, files
        self.bytes, self.files = size, files

    def take(self, size: int) -> None:
        self.files -= 1
        self.bytes -= size
        if self.bytes < 0:
            raise _too_large(f"it unpacks to more than {self.most_bytes >> 20} MiB", self.most_bytes)
        if self.files < 0:
            raise _too_large(f"it has more than {self.most_files} files", self.most_bytes)


class Entry(NamedTuple):
    """One header that was found in order."""

    parts: tuple[str, ...]
    member: tarfile.TarInfo
    link: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "/".join(self.parts)

    @property
    def hides(self) -> bool:
        return bool(self.parts) and self.parts[-1].startswith(_HIDDEN)


def unpack(blob: Blob, root: int, limits: Limits, modes: Modes, *, owners: bool, number: int = 0) -> None:
    """Put a layer over what is in the directory `root` (a descriptor). `owners` needs the right to give files away."""
    hidden, opaque = judge(blob, limits, number=number)
    made = Writer(root, modes, owners=owners, number=number)
    for parts in opaque:
        made.empty(parts)
    for parts in hidden:
        made.remove(parts)
    with open_blob(blob, _stream_limit(limits)) as stream:
        for entry in entries(stream, number):
            if not entry.hides:
                made.write(entry, stream)
    made.close()


def judge(
    blob: Blob, limits: Limits, *, number: int = 0
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Read a layer to its end and write nothing: (what its whiteouts hide, what they empty)."""
    hidden: list[tuple[str, ...]] = []
    opaque: list[tuple[str, ...]] = []
    seen: dict[tuple[str, ...], bool] = {}  # → is it a directory
    with open_blob(blob, _stream_limit(limits)) as stream:
        for entry in entries(stream, number):
            member = entry.member
            if seen.get(entry.parts, True) is False or (entry.parts in seen and not member.isdir()):
                raise refusal("duplicate", entry.name, number)
            seen[entry.parts] = member.isdir()
            limits.take(member.size if member.isreg() else 0)
            if entry.hides:
                name = entry.parts[-1]
                if name == _OPAQUE:
                    opaque.append(entry.parts[:-1])
                else:
                    hidden.append((*entry.parts[:-1], name.removeprefix(_HIDDEN)))
        stream.finish()
    return hidden, opaque


def entries(stream: Stream, number: int = 0) -> Iterator[Entry]:
    """The headers of a tar stream, each checked by the rules that need nothing but the header."""
    try:
        archive = tarfile.TarFile(fileobj=stream, mode="r", errors="surrogateescape")  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            yield check(member, number)
    except (tarfile.TarError, ValueError, UnicodeError, OverflowError) as problem:
        raise refusal("header", f"after byte {stream.tell()}", number, str(problem)) from None
    except (zlib.error, gzip.BadGzipFile, EOFError) as problem:
        raise _broken(stream.blob, f"it cannot be decompressed ({problem})") from None
    stream.ends_with_zeros(number)


def check(member: tarfile.TarInfo, number: int = 0) -> Entry:
    """The entry of a header; `image_layer_refused` names the rule that it breaks."""
    parts = _parts(member.name, member.name, number)
    link: tuple[str, ...] = ()
    if member.isdev() and not member.isfifo():
        raise refusal("device", member.name, number)
    if member.issparse():
        raise refusal("sparse", member.name, number)
    if member.islnk():
        link = _parts(member.linkname, member.name, number)
        if not link or not parts or any(part.startswith(_HIDDEN) for part in link):
            raise refusal("hard_link", member.name, number)
    elif member.issym():
        if not parts or not 0 < len(os.fsencode(member.linkname)) < 4096 or "\0" in member.linkname:
            raise refusal("name", member.name, number)
    elif not member.isdir() and not member.isreg():
        raise refusal("special_file", member.name, number)
    if not parts and not member.isdir():
        raise refusal("name", member.name, number)
    if any(part.startswith(_HIDDEN) for part in parts[:-1]):
        raise refusal("whiteout", member.name, number)
    if parts and parts[-1].startswith(_HIDDEN):
        target = parts[-1].removeprefix(_HIDDEN)
        known = parts[-1] == _OPAQUE or (target not in ("", ".", "..") and not target.startswith(_HIDDEN))
        if not known or not member.isreg():
            raise refusal("whiteout", member.name, number)
    return Entry(parts, member, link)


def _parts(path: str, name: str, number: int) -> tuple[str, ...]:
    if path.startswith("/"):
        raise refusal("absolute_path", name, number)
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise refusal("parent_path", name, number)
    long = len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in parts)
    if not path or "\0" in path or long or len(parts) > DEEPEST:
        raise refusal("name", name, number)
    return parts


# ── writing ────────────────────────────────────────────────────────────────────────────────────────


class Modes:
    """Modes, owners and times of directories, which are set when nothing more is written into them."""

    def __init__(self, root: int, *, owners: bool) -> None:
        self._root = root
        self._owners = owners
        self._wanted: dict[tuple[str, ...], tarfile.TarInfo] = {}

    def later(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        self._wanted[parts] = member

    def settle(self) -> None:
        for parts, member in self._wanted.items():
            try:
                fd = syscalls.openat2(
                    self._root, "/".join(parts) or ".", os.O_RDONLY | os.O_DIRECTORY, resolve=_BENEATH
                )
            except OSError:
                continue  # a later layer took it away, or put something else in its place
            try:
                _own(fd, member, self._owners, directory=True)
            finally:
                os.close(fd)


class Writer:
    """Writes one layer below a directory, by descriptors of parents that were opened beneath it."""

    def __init__(self, root: int, modes: Modes, *, owners: bool, number: int) -> None:
        self._root = root
        self._modes = modes
        self._owners = owners
        self._number = number
        self._parent: tuple[str, ...] = ()
        self._fd = -1  # of the last entry's parent: the next one is mostly its sibling

    def close(self) -> None:
        self._forget()

    def write(self, entry: Entry, stream: Stream) -> None:
        member = entry.member
        if not entry.parts:
            self._modes.later((), member)
            return
        with _as_refusal("symlink_traversal", entry.name, self._number):
            directory = self._directory(entry.parts[:-1])
        name = entry.parts[-1]
        if member.isdir():
            self._make_directory(directory, name)
            self._modes.later(entry.parts, member)
            return
        self._take_away(directory, name)
        if member.islnk():
            self._link(entry, directory, name)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=directory)
            _own_link(name, directory, member, self._owners)
        else:
            self._make_file(entry, directory, name, stream)

    def _make_file(self, entry: Entry, directory: int, name: str, stream: Stream) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # SAFETY: O_EXCL makes it anew, so nothing that exists is written through: neither a link nor a file that
        # another image shares. tests/images/test_layers.py::test_a_hard_link_is_not_written_through
        fd = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            stream.copy_to(fd, entry.member.size, entry.name)
            _own(fd, entry.member, self._owners)
        finally:
            os.close(fd)

    def _link(self, entry: Entry, directory: int, name: str) -> None:
        with _as_refusal("hard_link", entry.name, self._number):
            source = self._open(entry.link[:-1])
        try:
            with _as_refusal("hard_link", entry.name, self._number):
                found = os.stat(entry.link[-1], dir_fd=source, follow_symlinks=False)
                if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
                    raise OSError(errno.EPERM, "it is no file")
                os.link(entry.link[-1], name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)

    def remove(self, parts: tuple[str, ...]) -> None:
        """What a whiteout hides; that nothing is there is no mistake."""
        with _as_refusal("symlink_traversal", "/".join(parts), self._number):
            try:
                directory = self._open(parts[:-1])
            except (FileNotFoundError, NotADirectoryError):
                return
        try:
            self._take_away(directory, parts[-1])
        finally:
            os.close(directory)

    def empty(self, parts: tuple[str, ...]) -> None:
        with _as_refusal("symlink_traversal", "/".join(parts), self._number):
            try:
                directory = self._open(parts)
            except (FileNotFoundError, NotADirectoryError):
                return
        try:
            reading = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            try:
                for name in os.listdir(reading):
                    self._take_away(directory, name)
            finally:
                os.close(reading)
        finally:
            os.close(directory)

    def _take_away(self, directory: int, name: str) -> None:
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)

    def _make_directory(self, directory: int, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=directory)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                self._take_away(directory, name)
                os.mkdir(name, 0o700, dir_fd=directory)

    def _directory(self, parts: tuple[str, ...]) -> int:
        """A descriptor of a parent, made with the directories above it where a layer left them out."""
        if self._fd >= 0 and parts == self._parent:
            return self._fd
        self._forget()
        for depth in range(len(parts) + 1):
            try:
                fd = self._open(parts[: len(parts) - depth])
                break
            except FileNotFoundError:
                continue
        for part in parts[len(parts) - depth :]:
            os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _PLACE | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        self._parent, self._fd = parts, fd
        return fd

    def _open(self, parts: tuple[str, ...]) -> int:
        # SAFETY: whatever links the layers planted, the lookup does not leave the root.
        # tests/images/test_layers.py::test_nothing_is_written_outside (hypothesis)
        return syscalls.openat2(self._root, "/".join(parts) or ".", _PLACE, resolve=_BENEATH)

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _own(fd: int, member: tarfile.TarInfo, owners: bool, *, directory: bool = False) -> None:
    if owners:
        os.fchown(fd, _id(member.uid), _id(member.gid))
    # Without owners everything is the caller's, who must be able to read it, and to remove it one day.
    needed = 0 if owners else 0o700 if directory else 0o400
    os.fchmod(fd, member.mode & (0o1777 if directory else 0o777) | needed)
    os.utime(fd, ns=(_time(member), _time(member)))


def _own_link(name: str, directory: int, member: tarfile.TarInfo, owners: bool) -> None:
    if owners:
        os.chown(name, _id(member.uid), _id(member.gid), dir_fd=directory, follow_symlinks=False)


def _id(number: int) -> int:
    return number if 0 <= number < NOBODY + 2 else NOBODY


def _time(member: tarfile.TarInfo) -> int:
    return int(min(max(float(member.mtime), 0.0), 2.0**33)) * 1_000_000_000


# ── reading ────────────────────────────────────────────────────────────────────────────────────────


class Stream:
    """A layer's bytes without their compression, forward only, counted and hashed. tarfile takes it for a file."""

    def __init__(self, blob: Blob, source: IO[bytes], raw: _Hashing, limit: int, process: Any = None) -> None:
        self.blob = blob
        self._source = source
        self._raw = raw
        self._limit = limit
        self._process = process
        self._position = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
        self._raw.close()

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER:
            raise refusal("header", f"at byte {self._position}", 0)
        return self._take(size)

    def _take(self, size: int) -> bytes:
        pieces = []
        while size > 0 and (data := self._source.read(min(size, _CHUNK))):
            size -= len(data)
            self._position += len(data)
            self._digest.update(data)
            pieces.append(data)
        if self._position > self._limit:
            raise _too_large("it unpacks to more than images.max_mib allows", self._limit)
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, _whence: int = 0) -> int:
        if position < self._position:
            raise tarfile.ReadError("it asks to read backwards")
        while self._position < position:
            if not self._take(min(position - self._position, _CHUNK)):
                break
        return self._position

    def copy_to(self, fd: int, size: int, name: str) -> None:
        """The next `size` bytes, which are those of the entry that was read last."""
        while size:
            data = self._take(min(size, _CHUNK))
            if not data:
                raise _broken(self.blob, f"it ends within {name!r}")
            size -= len(data)
            while data:
                data = data[os.write(fd, data) :]

    def ends_with_zeros(self, number: int) -> None:
        """After the last entry there is padding only: what tarfile would not read must not be there."""
        while data := self._take(_CHUNK):
            if data.strip(b"\0"):
                raise refusal("header", f"after byte {self._position}", number, "something follows the end")

    def finish(self) -> None:
        """At the end: is it what it was called?"""
        found = self._raw.drain()
        if self._process is not None and self._process.wait() != 0:
            raise _broken(self.blob, "it cannot be decompressed (zstd)")
        for wanted, has in (
            (self.blob.digest, found),
            (self.blob.diff_id, "sha256:" + self._digest.hexdigest()),
        ):
            if wanted is not None and wanted != has:
                raise errors.error(
                    "image_digest_mismatch", f"a layer is called {wanted} and has the digest {has}",
                    hint="it was damaged or changed on its way: pull it again", expected=wanted, found=has,
                )  # fmt: skip


class _Hashing:
    """A file that counts what is read of it into a digest."""

    def __init__(self, file: IO[bytes], digest: str) -> None:
        self._file = file
        if not digest.startswith(("sha256:", "sha512:")):
            raise errors.error("image_invalid", f"the digest {digest[:80]!r} is of no kind that is known")
        self._kind = digest.partition(":")[0]
        self._hash = hashlib.new(self._kind)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def drain(self) -> str:
        while self.read(_CHUNK):
            pass
        return f"{self._kind}:{self._hash.hexdigest()}"

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def open_blob(blob: Blob, limit: int) -> Stream:
    file = open(blob.path, "rb", buffering=0)  # noqa: SIM115 - the stream closes it
    magic = file.read(4)
    file.seek(0)
    raw = _Hashing(file, blob.digest)
    if magic[:2] == b"\x1f\x8b":
        return Stream(blob, gzip.GzipFile(fileobj=raw, mode="rb"), raw, limit)  # type: ignore[call-overload]
    if magic == b"\x28\xb5\x2f\xfd":
        return _open_zstd(blob, raw, limit)
    return Stream(blob, raw, raw, limit)  # type: ignore[arg-type]


def _open_zstd(blob: Blob, raw: _Hashing, limit: int) -> Stream:
    if shutil.which("zstd") is None:
        raise errors.error(
            "image_tool_missing", "a layer is compressed with zstd, and there is no `zstd` here",
            hint="apt-get install zstd", tool="zstd",
        )  # fmt: skip
    process = subprocess.Popen(
        ["zstd", "-dcq", "--memory=128MB", blob.path],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    return Stream(blob, process.stdout, raw, limit, process)


def _stream_limit(limits: Limits) -> int:
    return limits.bytes + _SLACK + 2048 * limits.files


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────


def refusal(rule: str, entry: str, number: int, detail: str = "") -> errors.ClocheError:
    shown = entry.encode("utf-8", "backslashreplace").decode()[:200]
    return errors.error(
        "image_layer_refused",
        f"layer {number + 1} of the image is refused: {shown!r}: {RULES[rule]}" + (f" ({detail})" if detail else ""),
        hint="images are untrusted input; have its maker build it without that entry",
        entry=shown, rule=rule, layer=number + 1,
    )  # fmt: skip


def _broken(blob: Blob, detail: str) -> errors.ClocheError:
    return errors.error("image_invalid", f"the layer {blob.digest} is not an archive: {detail}")


def _too_large(detail: str, size: int) -> errors.ClocheError:
    return errors.error(
        "image_too_large", f"the image is refused: {detail}",
        hint="raise images.max_mib if you trust its maker", limit_bytes=size,
    )  # fmt: skip


class _as_refusal:
    """What the kernel refuses of a lookup, as the rule that the entry breaks."""

    def __init__(self, rule: str, entry: str, number: int) -> None:
        self._refuse: Callable[[str], errors.ClocheError] = lambda detail: refusal(
            rule, entry, number, detail
        )

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, problem: BaseException | None, _trace: object) -> None:
        if isinstance(problem, OSError) and problem.errno not in (
            errno.ENOSPC,
            errno.EIO,
            errno.EDQUOT,
            errno.EMFILE,
        ):
            raise self._refuse(problem.strerror or "") from None
