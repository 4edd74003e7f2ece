"""Starting a launcher, as early and as cheaply as possible.

Standard library only, and little of it: a one-shot `cloche run` starts its launcher first and imports the rest of the
engine while the launcher gets ready on the other core.
"""

import _socket
import os
import sys

from cloche import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from cloche.drivers.launcher import main; main(3)"
CAP_SYS_ADMIN = 21
_SEND_BUFFER = 512 * 1024  # as `guest.wire.pair`
_LIMIT = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, r.getrlimit(r.RLIMIT_NOFILE)[1])); "

soft_descriptors: int | None = None
"""The limit for launchers, and so for sandboxes, where this process has raised its own."""


class Launch:
    """A launcher that was started: the engine's end of its socket, and the process that will be reaped."""

    def __init__(self, end: "_socket.socket", pid: int) -> None:
        self.end = end
        self.pid = pid

    @property
    def link(self) -> "socket.socket":
        """The socket, to whoever owns the launcher from now on; once. (`socket` is not imported before it is needed.)"""
        import socket

        return socket.socket(fileno=self.end.detach())


def start() -> Launch:
    if not sys.executable:
        raise errors.error(
            "sandbox_create_failed", "this Python does not know its own executable (sys.executable)"
        )
    here, there = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    for end in (here, there):
        end.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, _SEND_BUFFER)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, there.fileno(), 3),
    ]
    if there.fileno() == 3:
        os.set_inheritable(3, True)  # dup2 onto itself keeps close-on-exec
    program = _PROGRAM.format(root=root)
    if soft_descriptors is not None:
        program = _LIMIT.format(soft=soft_descriptors) + program
    # An empty environment: nothing of the caller's enters, not even by accident of inheritance.
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-I", "-S", "-c", program], {}, file_actions=actions
    )
    there.close()
    return Launch(here, pid)


def is_privileged() -> bool:
    """Whether this process may mount for the whole host (CAP_SYS_ADMIN); otherwise the rootless way is taken."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1) and os.geteuid() == 0
    return False
