"""A few more rules in front of a profile's system call filter, for rungs that lack a namespace.

A rule stands before the profile's own program and can only refuse: a call that passes here goes on to the profile.
One program, not two filters, because only one filter of a process may have a listener and both kinds of refusal need it.

What `PROCESS` closes is what Landlock leaves open on a host that is not hidden:

- sockets: Landlock knows TCP, but not UDP, netlink, or a *named* unix socket (the session bus would run programs for
  us). Only connected pairs remain, and no datagram ones: those can be re-addressed.
- changing modes, owners and times works on any file of the user's that can be named. These calls wait for the
  supervisor, who does them itself, on files of the sandbox only (drivers/supervising.py). Extended attributes are absent.
- limits, priorities and processors of the user's other processes: a call may name itself (0) only.
- System V and POSIX queues, semaphores and shared memory, which belong to the host's ipc namespace.

`COMMAND` is for commands but not the agent: watching a directory tells names in it, and Landlock does not ask.

Standard library and `linux.syscalls` only.
"""

import errno
import struct

from cloche.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Condition = tuple[int, int, tuple[int, ...], bool]
    """(argument, mask, values, whether the masked low word must be one of them or must not)"""
    Rule = tuple[str, int, tuple[Condition, ...]]
    """(call, action unless every condition holds, conditions); without conditions always the action"""

ERRNO, NOTIFY = 0x00050000, 0x7FC00000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _EQUAL, _JUMP, _RETURN = 0x20, 0x54, 0x15, 0x05, 0x06
_ALL = 0xFFFFFFFF
_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x40046602, 0x401C5820
_SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPES = 1, 5, 0xF

_MYSELF: "Condition" = (0, _ALL, (0,), True)
_SECOND_IS_MYSELF: "Condition" = (1, _ALL, (0,), True)

SUPERVISED = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes",
    "futimesat", "utimensat",
)  # fmt: skip
_ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr",
               "removexattrat", "file_setattr")  # fmt: skip
_IPC = ("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl",
        "mq_open", "mq_unlink")  # fmt: skip

PROCESS: "tuple[Rule, ...]" = (
    ("socket", ERRNO | errno.EACCES, ()),
    ("connect", ERRNO | errno.EACCES, ()),
    ("socketpair", ERRNO | errno.EACCES, ((1, _SOCK_TYPES, (_SOCK_STREAM, _SOCK_SEQPACKET), True),)),
    *((name, NOTIFY, ()) for name in SUPERVISED),
    *((name, ERRNO | errno.EOPNOTSUPP, ()) for name in _ATTRIBUTES),
    ("ioctl", ERRNO | errno.ENOTTY, ((1, _ALL, (_FS_IOC_SETFLAGS, _FS_IOC32_SETFLAGS, _FS_IOC_FSSETXATTR), False),)),
    *((name, ERRNO | errno.EPERM, (_MYSELF,)) for name in
      ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")),
    ("setpriority", ERRNO | errno.EPERM, ((0, _ALL, (0, 1), True), _SECOND_IS_MYSELF)),
    ("ioprio_set", ERRNO | errno.EPERM, ((0, _ALL, (1, 2), True), _SECOND_IS_MYSELF)),
    *((name, ERRNO | errno.ENOSYS, ()) for name in _IPC),
)  # fmt: skip
COMMAND: "tuple[Rule, ...]" = (("inotify_add_watch", ERRNO | errno.EACCES, ()),)
PINNED: "tuple[Rule, ...]" = (("sched_setaffinity", ERRNO | errno.EPERM, ()),)
"""Where processors are limited by affinity, it must not be undone."""

ALLOW_ALL = struct.pack("=HBBI", _RETURN, 0, 0, 0x7FFF0000)


def before(program: bytes, rules: "Iterable[Rule]", *, arch: str = syscalls.ARCH) -> bytes:
    """`program` with `rules` in front of it, as an array of `struct sock_filter`. Pure."""
    blocks = [_block(nr, rule) for rule in rules if (nr := syscalls.number(rule[0], arch=arch)) is not None]
    lines = [line for block in blocks for line in block]
    head = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[arch]), (_JUMP, 0, 0, len(lines))]
    # SAFETY: a foreign architecture skips all of this, because its numbers mean other calls; the profile's program,
    # which it then meets, kills it. tests/drivers/test_process.py::test_foreign_architectures_reach_the_profile
    return b"".join(struct.pack("=HBBI", *line) for line in [*head, *lines]) + program


def _block(nr: int, rule: "Rule") -> "list[tuple[int, int, int, int]]":
    """One call: skip if it is another; each condition that fails is the end."""
    _, action, conditions = rule
    body: list[tuple[int, int, int, int]] = []
    for argument, mask, values, wanted in conditions:
        body += _condition(argument, mask, values, wanted, action)
    if not conditions:
        body.append((_RETURN, 0, 0, action))
    return [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(body), nr), *body]


def _condition(
    argument: int, mask: int, values: "tuple[int, ...]", wanted: bool, action: int
) -> "list[tuple[int, int, int, int]]":
    lines = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]
    for at, value in enumerate(values):
        left = len(values) - at - 1  # tests that follow this one
        # A hit jumps over the return when it is wanted, onto it when it is not; missing all does the opposite.
        lines.append((_EQUAL, left + 1 if wanted else left, 0 if wanted or left else 1, value))
    lines.append((_RETURN, 0, 0, action))
    return lines
