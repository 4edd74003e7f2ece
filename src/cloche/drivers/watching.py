"""Noticing that a sandbox lost a mount.

The kernel detaches a mount when its mount point is replaced in another mount namespace, as an editor on the host does when
it saves by renaming. It says so on /proc/PID/mountinfo, as an exceptional condition, which asyncio does not wait for;
an epoll descriptor of our own does, and asyncio waits for that.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


class Mounts:
    """Calls `changed` with the mount points that are left, whenever they change; owns `fd`, an open mountinfo."""

    def __init__(self, fd: int, changed: Callable[[set[str]], None]) -> None:
        self._fd = fd
        self._changed = changed
        self._epoll = select.epoll()
        self._epoll.register(fd, select.EPOLLPRI)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._look)

    def _look(self) -> None:
        self._epoll.poll(0)
        self._changed(self.points())

    def points(self) -> set[str]:
        os.lseek(self._fd, 0, os.SEEK_SET)
        text = b""
        while data := os.read(self._fd, 1 << 16):
            text += data
        return {_plain(line.split(" ")[4]) for line in text.decode("utf-8", "surrogateescape").splitlines()}

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        os.close(self._fd)


def _plain(field: str) -> str:
    for code, character in _ESCAPES:
        field = field.replace(code, character)
    return field
