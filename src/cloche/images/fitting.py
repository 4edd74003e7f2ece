"""What a foreign root needs to be a sandbox's: places to mount on, the user, and no names of anybody's machine.

Everything is made by descriptor and anew. A root's own `/proc` or `/tmp` may be a link, which would send a mount
elsewhere, so mount points are made real directories; a file may be shared with another root, so none is written in
place. Fitting twice changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat

from cloche import errors
from cloche.images import host, trees

_POINTS = {
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777,
    "home": 0o755, "home/user": 0o755, "workspace": 0o755, "root": 0o700, "etc": 0o755,
}  # fmt: skip
_OURS = ("home/user", "workspace")
_MAIN = ("etc", "var", "home")  # whose being a link would hide what the image has there
_WRITTEN = ("etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/machine-id")
_MOST_TABLE = 1 << 20


def signature() -> str:
    """Changes when fitting does."""
    return hashlib.sha256(repr((_POINTS, sorted(host.FILES.items()), 1)).encode()).hexdigest()[:8]


def fit(root: int, *, owners: bool) -> None:
    """Make `root` (a descriptor) a root that the drivers can mount."""
    for path, mode in _POINTS.items():
        with trees.opened(os.path.dirname(path) or ".", root) as parent:
            _make_point(parent, path, mode, owners)
    with trees.opened("etc", root) as etc:
        for path in _WRITTEN:
            _write(etc, os.path.basename(path), host.FILES[path])
        _write(etc, "passwd", _joined(_table(etc, "passwd"), host.FILES["etc/passwd"]))
        _write(etc, "group", _joined(_table(etc, "group"), host.FILES["etc/group"]))
        if "mtab" not in os.listdir(etc):
            os.symlink("/proc/self/mounts", "mtab", dir_fd=etc)
    mode = stat.S_IMODE(os.fstat(root).st_mode)
    os.fchmod(root, mode & 0o777 | 0o555)


def _make_point(parent: int, path: str, mode: int, owners: bool) -> None:
    name = os.path.basename(path)
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        found = 0
    if found and not stat.S_ISDIR(found):
        if path in _MAIN:
            raise errors.error("image_invalid", f"/{path} of the image is not a directory")
        os.unlink(name, dir_fd=parent)
    if not stat.S_ISDIR(found):
        os.mkdir(name, 0o700, dir_fd=parent)
    with trees.opened(name, parent) as made:
        # What the image has stays as it is, but everybody must be able to walk to what is ours.
        if not stat.S_ISDIR(found) or path in _OURS or path.endswith("tmp"):
            os.fchmod(made, mode)
        elif path in _MAIN:
            os.fchmod(made, stat.S_IMODE(found) & 0o777 | 0o555)
        if owners and path in _OURS:
            os.fchown(made, host.USER_ID, host.USER_ID)
        elif owners and not found:
            os.fchown(made, 0, 0)


def _table(etc: int, name: str) -> str:
    """The image's passwd or group, as far as it is one."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=etc)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return file.read(_MOST_TABLE).decode("utf-8", "surrogateescape").replace("\r", "")


def _joined(theirs: str, ours: str) -> str:
    """The image's table with our user in it, before whoever else has that number: the first line counts."""
    lines = {line.partition(":")[0]: line for line in ours.splitlines()}
    kept = {line.partition(":")[0]: line for line in theirs.splitlines() if line}
    order = ["root", "user", *kept, *lines]
    chosen = {**lines, **kept, "user": lines["user"]}
    return "".join(f"{chosen[name]}\n" for name in dict.fromkeys(order))


def _write(etc: int, name: str, text: str) -> None:
    trees.take_away(etc, name)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=etc)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        os.fchmod(fd, 0o644)  # whatever the caller's umask is
