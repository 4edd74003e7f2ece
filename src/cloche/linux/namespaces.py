"""Namespaces: made ahead of need, entered in microseconds.

A user namespace needs somebody outside it to write its maps, and a network namespace costs a third of a
millisecond; both are made while nothing is asked (`Blank`) and entered with setns. Every other kind is unshared by
the sandbox's first process. The order that works, and that every caller follows:

    pid          unshared by the launcher before fork, because only children enter it
    net          entered while still privileged over it
    mnt ipc uts cgroup time   unshared by the child, still owned by the launcher's user namespace
    user         entered last: the sandbox owns *none* of the namespaces it lives in, so that the capabilities it
                 has in its own user namespace reach nothing

Standard library and `linux.syscalls` only.
"""

import _socket
import fcntl
import os
import struct

from cloche.linux import syscalls

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SIGKILL = 9

IdMap = tuple[int, int, int]  # first id inside, first id outside, how many


class Blank:
    """The namespaces of a sandbox that does not exist yet."""

    __slots__ = ("lower_fd", "net_fd", "slot", "user_fd")

    def __init__(self, user_fd: int, net_fd: int, slot: int, lower_fd: int = -1) -> None:
        self.user_fd = user_fd
        self.net_fd = net_fd
        self.slot = slot
        self.lower_fd = lower_fd  # a map, never entered: whose files of the host are whose inside


def make_blank(uid_maps: list[IdMap], gid_maps: list[IdMap], slot: int, lower_fd: int = -1) -> Blank:
    user_fd = make_user(uid_maps, gid_maps)
    return Blank(user_fd, make_net(), slot, lower_fd)


def make_user(uid_maps: list[IdMap], gid_maps: list[IdMap], *, proc: str = "/proc") -> int:
    """A user namespace with these maps, as a descriptor. Whoever enters it applies `Bounds`.

    Somebody must be in it while its maps are written: a child that does nothing. `proc` is a proc file system that
    counts pids as the caller does.
    """
    # SAFETY: the child has capabilities over nothing but a new, empty user namespace, and runs no code of anybody's.
    # tests/security/test_kernel.py::test_user_namespaces_are_closed
    pid = syscalls.clone_idle(syscalls.CLONE_NEWUSER)
    try:
        _write(f"{proc}/{pid}/uid_map", _lines(uid_maps))
        if len(gid_maps) == 1 and gid_maps[0][2] == 1:
            # One gid without privilege needs setgroups closed first; with privilege it does no harm.
            _write(f"{proc}/{pid}/setgroups", "deny", missing_ok=True)
        _write(f"{proc}/{pid}/gid_map", _lines(gid_maps))
        return os.open(f"{proc}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, _SIGKILL)
        os.waitpid(pid, 0)


class Bounds:
    """What holds inside a user namespace for good: written by its first process, as soon as it is in.

    The kernel shows /proc/sys/user of whoever looks, so this cannot be done from outside; and the sandbox's own /proc is
    read-only. Hence a descriptor of the maker's.
    """

    def __init__(self) -> None:
        self.sysctl = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # SAFETY: else one sandbox could make namespaces that are its own.
        # tests/security/test_kernel.py::test_user_namespaces_are_closed
        self._lines = [("user/max_user_namespaces", "0")]
        # Inotify is counted for whoever made the namespace, up to the host's limit.
        # SAFETY: else one sandbox leaves none to its neighbours, nor to the caller's other programs.
        # tests/security/test_limits.py::test_one_sandbox_cannot_take_all_watches
        for kind in ("instances", "watches"):
            try:
                with open(f"/proc/sys/fs/inotify/max_user_{kind}") as file:
                    share = max(8, int(file.read()) // 8)
            except FileNotFoundError:
                continue
            self._lines.append((f"user/max_inotify_{kind}", str(share)))

    def apply(self) -> None:
        for path, text in self._lines:
            _write(path, text, missing_ok="inotify" in path, within=self.sysctl)


def make_net() -> int:
    """A network namespace with loopback up and nothing else, as a descriptor."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        try:
            raise_loopback()
            return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            # SAFETY: back to where this process was, also when loopback failed; otherwise the launcher itself would
            # sit in a sandbox's network. tests/drivers/test_namespaces.py::test_the_launcher_stays_in_its_own_namespaces
            syscalls.setns(own, syscalls.CLONE_NEWNET)
    finally:
        os.close(own)


def raise_loopback() -> None:
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
    finally:
        probe.close()


def _lines(maps: list[IdMap]) -> str:
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in maps)


def _write(path: str, text: str, *, missing_ok: bool = False, within: int | None = None) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=within)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    try:
        os.write(descriptor, text.encode())  # maps must arrive in one write
    finally:
        os.close(descriptor)
