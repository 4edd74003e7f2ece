"""The few system calls an agent needs beyond the standard library, by ctypes.

openat2 has one number on every architecture; the others are libc functions, so this page needs no table.
"""

import ctypes
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_OPENAT2 = 437
_AT_FDCWD = -100
_NO_MAGICLINKS, _IN_ROOT = 0x2, 0x10


def open_inside(path: str, flags: int, mode: int = 0) -> int:
    """open(2) that follows symlinks but no magic link: nothing leads out through /proc/*/root or /proc/*/fd."""
    creating = flags & (os.O_CREAT | getattr(os, "O_TMPFILE", 0))
    how = struct.pack("QQQ", flags, mode if creating else 0, _NO_MAGICLINKS | _IN_ROOT)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(8):  # EAGAIN: a rename elsewhere raced with the lookup
            fd: int = _libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how))
            if fd >= 0:
                return fd
            if ctypes.get_errno() != errno.EAGAIN:
                break
    finally:
        os.close(root)
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), path)


class FileIdentity:
    """Touch files as another uid for a moment; with None there is no other."""

    _now = 1000

    def __init__(self, uid: "int | None") -> None:
        self.uid = uid

    def __enter__(self) -> None:
        self._switch(self.uid)

    def __exit__(self, *_: object) -> None:
        self._switch(1000 if self.uid is not None else None)

    @classmethod
    def _switch(cls, uid: "int | None") -> None:
        if uid is None or uid == FileIdentity._now:
            return
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)
        FileIdentity._now = uid

    @staticmethod
    def begin(uid: int) -> None:
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)
        FileIdentity._now = uid


def inotify_init() -> int:
    return _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def inotify_add(fd: int, path: str, mask: int) -> int:
    return _checked(_libc.inotify_add_watch(fd, os.fsencode(path), mask))


def parent_and_session(pid: int) -> "tuple[int, int] | None":
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(1024).rpartition(b")")[2].split()
        return int(fields[1]), int(fields[3])
    except OSError:
        return None


def mark_of(pid: int) -> int:
    """The limit that `Agent.mark` set, -1 if there is none."""
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b"Max realtime timeout")[2].split()
        return int(fields[1])
    except (OSError, ValueError, IndexError):
        return -1


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prime() -> None:
    os.close(open_inside("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    parent_and_session(os.getpid())
    mark_of(os.getpid())
    os.close(inotify_init())
    ctypes.get_errno()
