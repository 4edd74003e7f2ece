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

import fcntl
import os
import socket
import struct

from cloche.linux import syscalls

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

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


def make_user(
    uid_maps: list[IdMap], gid_maps: list[IdMap], *, close_nested: bool = True, proc: str = "/proc"
) -> int:
    """A user namespace with these maps, as a descriptor; nested ones are closed inside it.

    A helper enters the namespace, waits for its maps, closes nested namespaces and is gone. `proc` is a proc file system
    that counts pids as the caller does.
    """
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()  # else the helper would wait for an end that it holds open itself
        _become_user_namespace(there, close_nested)
    there.close()
    try:
        _expect(here)
        _write(f"{proc}/{pid}/uid_map", _lines(uid_maps))
        if len(gid_maps) == 1 and gid_maps[0][2] == 1:
            # One gid without privilege needs setgroups closed first; with privilege it does no harm.
            _write(f"{proc}/{pid}/setgroups", "deny", missing_ok=True)
        _write(f"{proc}/{pid}/gid_map", _lines(gid_maps))
        here.send(b"m")
        _expect(here)
        return os.open(f"{proc}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        here.close()
        os.waitpid(pid, 0)


def _become_user_namespace(link: socket.socket, close_nested: bool) -> None:
    status = 1
    try:
        # SAFETY: gives this helper capabilities over nothing but a new, empty user namespace; the helper runs no
        # code but these lines. tests/security/test_kernel.py::test_user_namespaces_are_closed
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        link.send(b"u")
        _expect(link)
        if close_nested:
            _write("/proc/sys/user/max_user_namespaces", "0")
            _leave_watches_to_others()
        link.send(b"d")
        link.recv(1)  # EOF: the descriptor was opened, or the maker died
        status = 0
    finally:
        os._exit(status)


def _leave_watches_to_others() -> None:
    """Inotify is counted for whoever made the namespace, up to the host's limit: bound what one sandbox takes of it."""
    for kind in ("instances", "watches"):
        try:
            with open(f"/proc/sys/fs/inotify/max_user_{kind}") as file:
                share = max(8, int(file.read()) // 8)
        except FileNotFoundError:
            continue
        # SAFETY: else one sandbox leaves none to its neighbours, nor to the caller's other programs.
        # tests/security/test_limits.py::test_one_sandbox_cannot_take_all_watches
        _write(f"/proc/sys/user/max_inotify_{kind}", str(share), missing_ok=True)


def _expect(link: socket.socket) -> None:
    if not link.recv(1):
        raise OSError(1, "a user namespace could not be made (see cloche doctor)")


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
            # sit in a sandbox's network. tests/drivers/test_launcher.py::test_launcher_stays_in_its_own_namespaces
            syscalls.setns(own, syscalls.CLONE_NEWNET)
    finally:
        os.close(own)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def _lines(maps: list[IdMap]) -> str:
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in maps)


def _write(path: str, text: str, *, missing_ok: bool = False) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    try:
        os.write(descriptor, text.encode())  # maps must arrive in one write
    finally:
        os.close(descriptor)
