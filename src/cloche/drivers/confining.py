"""How a process gives up what it may not keep, where no launcher built its glass from outside.

Runs in the sandbox's first process, in an interpreter of its own (`python -I -S -c …`, see drivers/spawned.py), before
anything hostile does. The order matters: limits and capabilities first, then Landlock, and the filter last, because it
refuses what the others need.

Imports: standard library, `linux`, `guest`.
"""

import os
import resource
import socket

from cloche.guest import standalone, wire
from cloche.linux import landlock, seccomp, syscalls

LINK, CONTROL, LOCK = 3, 4, 5
"""The descriptors that the engine gives to what it starts."""


def main() -> None:
    """The entry behind bubblewrap: everything but the last steps was done by it. Never returns."""
    keep_only(LINK)
    link = socket.socket(fileno=LINK)
    received = wire.receive(link)
    if received is None:
        os._exit(0)
    standalone.serve(link, received[0], confine)


def confine(message: "dict[str, object]") -> "int | None":
    """Lock this process as the message says; returns the listener for refused calls."""
    limit(message["rlimits"], message.get("affinity"))  # type: ignore[arg-type]
    drop_capabilities()
    # SAFETY: no set-uid program gives anything back. tests/drivers/test_process.py::test_nothing_can_be_gained
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    rules = [(str(path), int(access)) for path, access in message["landlock"]]  # type: ignore[attr-defined]
    abi = int(message["landlock_abi"])  # type: ignore[call-overload]
    if abi:
        # SAFETY: a kernel that promised Landlock and refuses now is an error, never a sandbox without it.
        # tests/drivers/test_process.py::test_no_landlock_no_sandbox
        landlock.restrict(rules, abi=abi, no_tcp=bool(message.get("no_tcp")))
    return seccomp.load(bytes.fromhex(str(message["filter"])), listener=True)


def drop_capabilities() -> None:
    effective, permitted, inheritable = syscalls.get_caps()
    if effective >> syscalls.CAP_SETPCAP & 1:
        syscalls.drop_bounding_set()
    if effective or permitted or inheritable:
        syscalls.set_caps(0, 0, 0)


def limit(limits: "dict[str, int]", affinity: "list[int] | None") -> None:
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        held = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (held, held))
    if affinity:
        os.sched_setaffinity(0, affinity)


def keep_only(*kept: int) -> None:
    """Close every descriptor but stdio (/dev/null) and these."""
    low = 3
    for fd in sorted(kept):
        if fd > low:
            syscalls.close_range(low, fd - 1)
        low = fd + 1
    syscalls.close_range(low)
