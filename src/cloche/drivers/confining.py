"""How a process gives up what it may not keep, where no launcher built its glass from outside.

Runs in the sandbox's first process, in an interpreter of its own (`python -I -S -c …`, see drivers/spawned.py), before
anything hostile does. The order matters: limits and capabilities first, then Landlock, and the filter last, because it
refuses what the others need.

Imports: standard library, `linux`, `guest`.
"""

import os
import resource
import socket
import sys

from cloche.guest import standalone, wire
from cloche.linux import landlock, seccomp, syscalls

LINK, CONTROL, LOCK = 3, 4, 5
"""The descriptors that the engine gives to what it starts."""


def main() -> None:
    """The entry behind bubblewrap: everything but the last steps was done by it. Never returns."""
    keep_only(LINK)
    link = own(LINK)
    received = wire.receive(link)
    if received is None:
        os._exit(0)
    standalone.serve(link, received[0], confine)


def own(fd: int) -> socket.socket:
    """A socket that came with the start of this process, and goes no further."""
    # SAFETY: it was inherited once and would be again: a command that holds the link is the agent to the engine.
    # tests/drivers/rungs.py::descriptors_are_the_commands_own
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


STAGE = "/tmp"
"""Where `step_down` shows directories; covered in its own mount namespace only."""


def step_down() -> None:
    """Become a uid that owns nothing, then the program to run: `UID [SOURCE PLACE]… -- PROGRAM ARGUMENT…`.

    The sources are directories beneath root's own, where that uid could not go; they are shown at their places, beneath
    STAGE, in a mount namespace that lasts as long as the program.
    """
    at = sys.argv.index("--")
    uid, places, command = int(sys.argv[1]), sys.argv[2:at], sys.argv[at + 1 :]
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # SAFETY: private first, or the host would see what is mounted here.
        # tests/drivers/test_bubblewrap.py::test_nothing_is_left_behind
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        # Both before STAGE hides what is beneath it. Not close-on-exec: a script's interpreter opens it by descriptor.
        trees = [_tree(source) for source in places[::2]]
        program = os.open(command[0], os.O_RDONLY)
        os.set_inheritable(program, True)
        syscalls.mount("stage", STAGE, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755,size=64k")
        for tree, place in zip(trees, places[1::2], strict=True):
            os.mkdir(place)
            syscalls.move_mount(tree, "", syscalls.AT_FDCWD, place, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
            os.close(tree)
        # SAFETY: mapped to root, the user inside would own the host's devices and /proc entries, and could change their
        # modes for everybody. tests/drivers/test_bubblewrap.py::test_what_the_host_owns_cannot_be_changed
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.execve(program, command, {})
    except OSError as problem:
        os.write(2, f"root could not give itself up: {problem}\n".encode())
    os._exit(1)


def _tree(path: str) -> int:
    return syscalls.open_tree(
        syscalls.AT_FDCWD, path, syscalls.OPEN_TREE_CLONE | syscalls.AT_SYMLINK_NOFOLLOW
    )


def confine(message: "dict[str, object]") -> "int | None":
    """Lock this process as the message says; returns the listener for refused calls."""
    limit(message["rlimits"], message.get("affinity"))  # type: ignore[arg-type]
    drop_capabilities()
    # SAFETY: no set-uid program gives anything back. tests/drivers/test_process.py::test_nothing_can_be_gained
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.prctl(syscalls.PR_SET_NAME, b"cloche-agent\0")  # `pkill python` does not mean us
    rules = [(str(path), int(access)) for path, access in message["landlock"]]  # type: ignore[attr-defined]
    if rules:
        # SAFETY: where rules are given a kernel without Landlock is an error, never a sandbox without it.
        # tests/drivers/test_process.py::test_a_kernel_that_breaks_its_promise_makes_no_sandbox
        abi = int(message["landlock_abi"])  # type: ignore[call-overload]
        landlock.restrict(rules, abi=abi, no_tcp=bool(message.get("no_tcp")))
    return seccomp.load(bytes.fromhex(str(message["filter"])), listener=True)


def drop_capabilities(keep: int = 0) -> None:
    """Give up every capability but those in the bit mask `keep`, as far as they are there."""
    effective, permitted, inheritable = syscalls.get_caps()
    if effective >> syscalls.CAP_SETPCAP & 1:
        syscalls.drop_bounding_set(keep)
    if effective or permitted or inheritable:
        syscalls.set_caps(effective & keep, permitted & keep, 0)


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
