"""`cp SOURCE TARGET`: files and trees between the host and a sandbox, `ID:PATH` being the sandbox's side.

As cp does: into a directory that is there, else under the name given; `tree/.` is what is in the tree. Trees travel as tar. What comes *out* of a sandbox
is an attacker's: nothing is written through a symlink, none that leads out of the copied tree is made, no device, no
set-uid bit. So directories and files are made first, by parts that were looked at, and links last.
"""

import argparse
import io
import os
import posixpath
import stat
import tarfile
from binascii import a2b_base64, b2a_base64
from typing import Any, NamedTuple

from cloche import errors
from cloche.cli import client, output, talk


class Place(NamedTuple):
    """One side of a copy; `sandbox` is empty for the host's."""

    sandbox: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Place":
        """`ID:path`, `name:path`; with a slash before the colon, or none, it is the host's: `./a:b`, `/tmp/x`."""
        head, colon, path = text.partition(":")
        if not colon or "/" in head or not head:
            return cls("", text)
        return cls(head, path or ".")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("source", metavar="SOURCE", help="PATH, or ID:PATH for a sandbox's")
    parser.add_argument("target", metavar="TARGET", help="PATH, or ID:PATH for a sandbox's")
    parser.add_argument(
        "--user", metavar="NAME", default="user", choices=("user", "root"), help="as whom inside"
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    source, target = Place.parse(chosen.source), Place.parse(chosen.target)
    if bool(source.sandbox) == bool(target.sandbox):
        raise errors.error(
            "argument_invalid", "exactly one side of `cloche cp` is a sandbox's",
            hint="cloche cp FILE ID:PATH, or cloche cp ID:PATH FILE; a host path with a colon is written ./a:b",
        )  # fmt: skip
    with client.reach() as server:
        if target.sandbox:
            copied = put(server, source.path, target, chosen.user)
        else:
            copied = get(server, source, target.path, chosen.user)
    if chosen.json:
        output.as_json({"source": chosen.source, "target": chosen.target, "files": copied})
    return 0


# ── into the sandbox ───────────────────────────────────────────────────────────────────────────────


def put(server: client.Client, source: str, target: Place, user: str) -> int:
    info = os.stat(source)
    inside = {"sandbox": target.sandbox, "user": user}
    path = target.path
    name = os.path.basename(os.path.abspath(source))
    if _is_directory(server, path, inside) and not _is_content(source):
        path = posixpath.join(path, name)
    if stat.S_ISDIR(info.st_mode):
        archive = b2a_base64(pack(source), newline=False).decode()
        files: int = server.call("upload_tree", path=path, archive=archive, **inside)
        return files
    if not stat.S_ISREG(info.st_mode):
        raise errors.error("not_regular_file", f"{source!r} is neither a regular file nor a directory")
    with open(source, "rb") as file:
        data = b2a_base64(file.read(), newline=False).decode()
    server.call("write_file", path=path, data=data, mode=stat.S_IMODE(info.st_mode) & 0o777, **inside)
    return 1


def _is_content(path: str) -> bool:
    return posixpath.basename(path.rstrip("/")) in (".", "..", "")


def _is_directory(server: client.Client, path: str, inside: dict[str, Any]) -> bool:
    try:
        found = server.call("stat_file", path=path, **inside)
    except errors.NotFound as problem:
        if problem.code != "file_not_found":
            raise
        if path.endswith("/"):
            server.call("make_dir", path=path, **inside)
            return True
        return False
    return bool(found["type"] == "directory")


def pack(directory: str) -> bytes:
    """A tree as a tar; what is neither file, directory nor symlink is left out and said."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, ".", filter=_plain)
    return made.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.isfile() or member.isdir() or member.issym() or member.islnk():
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member
    talk.warning(f"{member.name} is neither file, directory nor symlink and is left out")
    return None


# ── out of the sandbox ─────────────────────────────────────────────────────────────────────────────


def get(server: client.Client, source: Place, target: str, user: str) -> int:
    inside = {"sandbox": source.sandbox, "user": user}
    info = server.call("stat_file", path=source.path, **inside)
    name = posixpath.basename(posixpath.normpath(info["path"])) or "root"
    if os.path.isdir(target) and not _is_content(source.path):
        target = os.path.join(target, name)
    if info["type"] == "directory":
        archive = a2b_base64(server.call("download_tree", path=source.path, **inside))
        return unpack(archive, target)
    _get_file(server, source.path, inside, target, stat.S_IMODE(info["mode"]) & 0o777)
    return 1


def _get_file(server: client.Client, path: str, inside: dict[str, Any], target: str, mode: int) -> None:
    """Written beside its place and moved into it, so that a copy that breaks off leaves the old file."""
    draft = f"{target}.{os.getpid()}.part"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            for data in server.stream("read_file_stream", path=path, **inside):
                file.write(a2b_base64(data))
            os.fchmod(fd, mode)
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise


def unpack(archive: bytes, root: str) -> int:
    """The tree below `root`; the number of files."""
    links: list[tarfile.TarInfo] = []
    count = 0
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        os.makedirs(root, exist_ok=True)
        for member in tar:
            if member.issym():
                links.append(member)
            elif member.isdir():
                _make_parents(root, _parts(member.name))
            elif member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                _write(root, _parts(member.name), content.read(), member.mode & 0o777)
                count += 1
    for link in links:
        count += _link(root, _parts(link.name), link.linkname)
    return count


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise errors.error("path_invalid", f"the sandbox sent the path {name!r}, which leads out")
    return parts


def _make_parents(root: str, parts: list[str]) -> str:
    """A directory below `root`, none of whose parts below it is a symlink: an earlier copy may have left one."""
    path = root
    for part in parts:
        path = os.path.join(path, part)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
    return path


def _place(root: str, parts: list[str]) -> str:
    path = os.path.join(_make_parents(root, parts[:-1]), parts[-1])
    if os.path.lexists(path):
        if os.path.isdir(path) and not os.path.islink(path):
            raise errors.error(
                "is_directory", f"{path!r} is a directory and is not replaced", hint="remove it first"
            )
        os.unlink(path)
    return path


def _write(root: str, parts: list[str], data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(_place(root, parts), flags, 0o600), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


def _link(root: str, parts: list[str], target: str) -> int:
    inside = posixpath.normpath(posixpath.join(*parts[:-1], target) if len(parts) > 1 else target)
    if target.startswith("/") or inside == ".." or inside.startswith("../"):
        talk.warning(f"the symlink {'/'.join(parts)} leads to {target}, outside of the copy; it is left out")
        return 0
    os.symlink(target, _place(root, parts))
    return 1
