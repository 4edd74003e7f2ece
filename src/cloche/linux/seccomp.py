"""System call filters: what code behind the glass may ask of the kernel, as classic BPF, per profile.

Every system call of `syscalls.TABLE` has one *rule*, chosen by `_rule`:

    ALLOW             passes
    an errno          is refused with it
    some checks       each looks at the low 32 bits of one argument and may refuse; otherwise the call passes

`build` compiles the rules and `explain` interprets them, so what the documentation says is what the kernel
runs; the tests simulate the compiled program against `explain` for every call of both architectures. Around
the rules stand three facts that hold in every profile: a foreign architecture is killed before anything else
is looked at (the 32-bit entry has other numbers), so are x32 numbers, and a number that the table does not
know is ENOSYS, as on a kernel without it.

Choices worth knowing:

- clone3 is ENOSYS, not EPERM: its flags are in memory, where a filter cannot see them, and libc falls back to
  clone.
- Only the low word is compared where the kernel itself takes an int; else a set high bit would slip a request
  past.
- The program is a binary search over ranges of equal rules. Calls allowed without a check do not even run it:
  since Linux 5.11 the kernel keeps their answer in a bitmap, which needs the simple instructions used here.
- With `notify` the refusals by EPERM wait for a supervisor, who is to answer them by `refuse` and can tell
  what was tried. They are rare calls; nothing on a hot path (open, connect, execve) is ever sent there. With
  the supervisor gone they answer ENOSYS. A guest cannot make a listener of its own, which would let it
  overrule ours.

Building takes about a millisecond: do it once, before forking. Standard library and `syscalls` only.
"""

import ctypes
import errno
import fcntl
import os
import struct

from cloche.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Check = tuple[str, int, tuple[int, ...], int]
    Rule = int | tuple[Check, ...]

PROFILES = ("restrictive", "moderate", "permissive")

ALLOW = 0

# --- the rules ----------------------------------------------------------------------------------------------

_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FILTER_FLAG_NEW_LISTENER = 0x8
_FILTER_FLAG_WAIT_KILLABLE = 0x20

_PER_LINUX, _PER_LINUX32, _UNAME26, _PER_QUERY = 0x0, 0x8, 0x20000, 0xFFFFFFFF
_ADDR_NO_RANDOMIZE = 0x40000

# fmt: off
# Not there at all: calls whose arguments a filter cannot see, and names that the kernel no longer serves.
_ABSENT = frozenset({
    "clone3", "_sysctl", "afs_syscall", "create_module", "epoll_ctl_old", "epoll_wait_old",
    "get_kernel_syms", "getpmsg", "nfsservctl", "putpmsg", "query_module", "security", "tuxcall", "uselib",
    "vserver",
})

_REFUSED = frozenset({
    # Mounts and namespaces.
    "mount", "umount2", "pivot_root", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "setns",
    # Large or rarely audited parts of the kernel.
    "bpf", "userfaultfd", "perf_event_open", "io_uring_setup", "io_uring_enter", "io_uring_register",
    "add_key", "request_key", "keyctl",
    # Reaching into other processes.
    "kcmp", "pidfd_getfd", "process_madvise", "process_mrelease", "migrate_pages",
    # The machine: modules, kernels, clocks, ports, swap, accounting, the log.
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon",
    "swapoff", "acct", "quotactl", "quotactl_fd", "syslog", "settimeofday", "clock_settime",
    "clock_adjtime", "adjtimex", "iopl", "ioperm", "lookup_dcookie", "vhangup",
    # Ways around a path: a file by its handle, events for a whole file system.
    "open_by_handle_at", "fanotify_init", "fanotify_mark",
})

# Refusing one of these by name leaves no sandbox that could say so.
_NEEDED = frozenset({
    "execve", "exit", "exit_group", "read", "write", "openat", "close", "mmap", "munmap", "mprotect", "brk", "clone", "fork",
    "vfork", "wait4", "rt_sigreturn", "rt_sigaction", "rt_sigprocmask", "futex", "fstat", "newfstatat", "recvmsg", "sendmsg",
    "ppoll", "poll", "epoll_wait", "epoll_pwait", "epoll_ctl", "dup3", "dup2", "fcntl", "pipe2", "setsid", "seccomp", "prctl",
})

_PERMISSIVE_ONLY = frozenset({"ptrace", "process_vm_readv", "process_vm_writev", "chroot", "modify_ldt"})
# fmt: on


def _checks(profile: str) -> "dict[str, tuple[Check, ...]]":
    """The calls whose arguments decide: (kind, argument, values, errno), where kind is
    `has` (any of these bits), `is` (one of these values) or `not` (none of these values)."""
    domains: Check = ("not", 0, (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK), errno.EAFNOSUPPORT)
    personalities: tuple[int, ...] = (_PER_LINUX, _PER_LINUX32, _UNAME26, _UNAME26 | _PER_LINUX32, _PER_QUERY)
    if profile == "permissive":
        personalities += (_ADDR_NO_RANDOMIZE,)  # debuggers want it
    return {
        # The low byte of clone's flags is a signal: CLONE_NEWTIME exists in unshare only.
        "clone": (("has", 0, (_NAMESPACES,), errno.EPERM),),
        "unshare": (("has", 0, (_NAMESPACES | syscalls.CLONE_NEWTIME,), errno.EPERM),),
        "socket": (domains,),
        "socketpair": (domains,),
        "ioctl": (("is", 1, (_TIOCSTI, _TIOCLINUX), errno.EPERM),),
        "personality": (("not", 0, personalities, errno.EPERM),),
        "seccomp": (("has", 1, (_FILTER_FLAG_NEW_LISTENER,), errno.EPERM),),
    }


def _rule(
    profile: str, name: str, checks: "dict[str, tuple[Check, ...]]", deny: "Collection[str]" = ()
) -> "Rule":
    if name not in syscalls.TABLE or name in _ABSENT:
        return errno.ENOSYS
    if name in _REFUSED or name in deny:
        return errno.EPERM
    if name in _PERMISSIVE_ONLY:
        return ALLOW if profile == "permissive" else errno.EPERM
    return checks.get(name, ALLOW)


def _check_profile(profile: str) -> None:
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: one of {', '.join(PROFILES)}")


def check_names(names: "Sequence[str]") -> None:
    """Raise ValueError for a name that is no system call, or one that no program can start or end without."""
    for name in names:
        if name not in syscalls.TABLE:
            raise ValueError(f"there is no system call {name!r}")
        if name in _NEEDED:
            raise ValueError(f"nothing could run without the system call {name!r}")


def explain(
    profile: str, name: str, args: "Sequence[int] | None" = None, *, deny: "Sequence[str]" = ()
) -> str:
    """What the profile does with a system call: `allow`, or `refuse:` and the name of an errno.

    Where arguments decide and none are given, the answer is `check:` and the errno that a refusal would have.
    """
    _check_profile(profile)
    rule = _rule(profile, name, _checks(profile), deny)
    if isinstance(rule, int):
        return _verdict(rule)
    if args is None:
        return "check:" + errno.errorcode[rule[0][3]]
    for kind, argument, values, code in rule:
        if _matches(kind, args[argument] & 0xFFFFFFFF, values):
            return _verdict(code)
    return _verdict(ALLOW)


def _matches(kind: str, word: int, values: tuple[int, ...]) -> bool:
    if kind == "has":
        return any(word & value for value in values)
    return (word in values) == (kind == "is")


def _verdict(code: int) -> str:
    return "allow" if code == ALLOW else "refuse:" + errno.errorcode[code]


# --- the compiler -------------------------------------------------------------------------------------------

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NO_CALL = 0xFFFFFFFF  # what a tracer writes to skip a call; the kernel answers ENOSYS, so it must not kill

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

_RET_KILL_PROCESS, _RET_ERRNO, _RET_USER_NOTIF, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FC00000, 0x7FFF0000

_INSTRUCTION = struct.Struct("=HBBI")


class _Program:
    """Instructions with named targets. A target that ends a path is made when first named and placed last."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int, str, str]] = []
        self.labels: dict[str, int] = {}
        self.endings: dict[str, int] = {}

    def add(self, code: int, operand: int, then: str = "", otherwise: str = "") -> None:
        """One instruction; an empty target is the line after it."""
        self.lines.append((code, operand, then, otherwise))

    def mark(self, label: str) -> None:
        self.labels[label] = len(self.lines)

    def ending(self, action: int) -> str:
        label = f"return {action:#x}"
        self.endings[label] = action
        return label

    def assemble(self) -> bytes:
        for label, action in self.endings.items():
            self.mark(label)
            self.add(_RETURN, action)
        return b"".join(
            _INSTRUCTION.pack(code, self._distance(at, then), self._distance(at, otherwise), operand)
            for at, (code, operand, then, otherwise) in enumerate(self.lines)
        )

    def _distance(self, at: int, label: str) -> int:
        distance = self.labels[label] - at - 1 if label else 0
        if not 0 <= distance <= 255:  # BPF cannot jump back, and conditional jumps have one byte
            raise ValueError(f"jump from {at} to {label!r} is out of reach")
        return distance


def build(
    profile: str, *, deny: "Sequence[str]" = (), arch: str = syscalls.ARCH, notify: bool = False
) -> bytes:
    """The filter of a profile as an array of `struct sock_filter`, without the calls of `deny`. Pure: the same answer on
    every machine."""
    _check_profile(profile)
    check_names(deny)
    if arch not in _AUDIT_ARCH:
        raise ValueError(f"no filter for architecture {arch!r}: one of {', '.join(_AUDIT_ARCH)}")
    checks = _checks(profile)
    program = _Program()
    program.add(_LOAD, _OFFSET_ARCH)
    # SAFETY: nothing may be decided by number before this (test_foreign_architectures_are_killed).
    program.add(_JUMP_EQUAL, _AUDIT_ARCH[arch], otherwise=program.ending(_RET_KILL_PROCESS))
    program.add(_LOAD, _OFFSET_NUMBER)
    segments = _segments(program, profile, arch, checks, notify, frozenset(deny))
    _search(program, segments)
    used = {target for _, target in segments}
    for name, rule in checks.items():
        if f"check {name}" in used:
            _argument_checks(program, name, rule, notify)
    return program.assemble()


def _ending(program: _Program, code: int, notify: bool) -> str:
    if code == ALLOW:
        return program.ending(_RET_ALLOW)
    if code == errno.EPERM and notify:
        return program.ending(_RET_USER_NOTIF)
    return program.ending(_RET_ERRNO | code)


def _segments(
    program: _Program,
    profile: str,
    arch: str,
    checks: "dict[str, tuple[Check, ...]]",
    notify: bool,
    deny: "frozenset[str]",
) -> list[tuple[int, str]]:
    """The number line, cut into (first number, target) where the target changes."""
    targets = {}
    for name in syscalls.TABLE:
        nr = syscalls.number(name, arch=arch)
        if nr is not None:
            rule = _rule(profile, name, checks, deny)
            targets[nr] = _ending(program, rule, notify) if isinstance(rule, int) else f"check {name}"
    unknown = _ending(program, errno.ENOSYS, notify)
    points = [(nr, targets.get(nr, unknown)) for nr in range(max(targets) + 2)]
    if arch == "x86_64":
        # SAFETY: x32 numbers are a second way to every call (test_x32_numbers_are_killed).
        points += [(_X32_BIT, program.ending(_RET_KILL_PROCESS)), (_NO_CALL, unknown)]
    return [point for at, point in enumerate(points) if at == 0 or point[1] != points[at - 1][1]]


def _search(program: _Program, segments: list[tuple[int, str]]) -> None:
    """Binary search for the segment of the loaded number; lower halves follow their test directly."""
    middle = len(segments) // 2
    lower, upper = segments[:middle], segments[middle:]
    upper_target = upper[0][1] if len(upper) == 1 else f"from {upper[0][0]}"
    lower_target = lower[0][1] if len(lower) == 1 else ""
    program.add(_JUMP_AT_LEAST, upper[0][0], upper_target, lower_target)
    if len(lower) > 1:
        _search(program, lower)
    if len(upper) > 1:
        program.mark(upper_target)
        _search(program, upper)


def _argument_checks(program: _Program, name: str, checks: "tuple[Check, ...]", notify: bool) -> None:
    program.mark(f"check {name}")
    allow = _ending(program, ALLOW, notify)
    for position, (kind, argument, values, code) in enumerate(checks):
        passed = allow if position == len(checks) - 1 else f"check {name} {position + 1}"
        refused = _ending(program, code, notify)
        found, missed = (passed, refused) if kind == "not" else (refused, passed)
        jump = _JUMP_BITS if kind == "has" else _JUMP_EQUAL
        # SAFETY: the low word alone, as the kernel reads it (test_high_bits_do_not_hide_a_request).
        program.add(_LOAD, _OFFSET_ARGS + 8 * argument)
        for value in values[:-1]:
            program.add(jump, value, found)
        program.add(jump, values[-1], found, missed)
        if passed != allow:
            program.mark(passed)


# --- loading ------------------------------------------------------------------------------------------------

_SET_MODE_FILTER = 1


def load(program: bytes, *, listener: bool = False) -> int | None:
    """Filter this thread and all it will start, for ever; with `listener`, a descriptor that receives
    notifications.

    Sets no_new_privs. Other threads are not filtered: load before starting any.
    """
    code = ctypes.create_string_buffer(program, len(program))
    prog = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    # SAFETY: without it a set-uid program would run under our filter, which could mislead it
    # (test_load_sets_no_new_privs).
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not listener:
        syscalls.raw("seccomp", _SET_MODE_FILTER, 0, prog)
        return None
    try:
        # A caller that waits for the supervisor is then woken by deadly signals only: programs that interrupt
        # themselves all the time (Go does) would otherwise never get their answer.
        flags = _FILTER_FLAG_NEW_LISTENER | _FILTER_FLAG_WAIT_KILLABLE
        return syscalls.raw("seccomp", _SET_MODE_FILTER, flags, prog)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.19
            raise
    return syscalls.raw("seccomp", _SET_MODE_FILTER, _FILTER_FLAG_NEW_LISTENER, prog)


# --- notifications ------------------------------------------------------------------------------------------

_NOTIF_RECV, _NOTIF_SEND, _NOTIF_ID_VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTIF = struct.Struct("=QIIiIQ6Q")
_NOTIF_RESPONSE = struct.Struct("=QqiI")
_NOTIF_ID = struct.Struct("=Q")

_PAGE = 4096

_names: dict[int, str] = {}


class Notification:
    """One refused call, waiting for its answer. `pid` is as the receiver sees it, 0 if it cannot."""

    __slots__ = ("args", "id", "name", "nr", "pid")

    def __init__(self, id: int, pid: int, nr: int, name: str, args: tuple[int, ...]) -> None:
        self.id = id
        self.pid = pid
        self.nr = nr
        self.name = name
        self.args = args

    def __repr__(self) -> str:
        args = ", ".join(f"{arg:#x}" for arg in self.args)
        return (
            f"Notification(id={self.id:#x}, pid={self.pid}, nr={self.nr}, name={self.name!r}, args=({args}))"
        )


def receive(fd: int) -> Notification | None:
    """The next notification, waiting for it; None when its caller died (poll `fd` again, heed POLLHUP)."""
    buffer = bytearray(_NOTIF.size)  # the kernel insists on zeroes
    try:
        fcntl.ioctl(fd, _NOTIF_RECV, buffer)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    id, pid, _flags, nr, _arch, _address, *args = _NOTIF.unpack(buffer)
    return Notification(id, pid, nr, _name(nr), tuple(args))


def refuse(fd: int, id: int, code: int = errno.EPERM) -> bool:
    """Answer a notification with an errno; False when the caller no longer waits for it."""
    # SAFETY: an error is the only answer ever given: letting a call continue after having looked at its
    # memory could be raced by the guest (test_a_notified_call_is_refused_and_told).
    try:
        fcntl.ioctl(fd, _NOTIF_SEND, _NOTIF_RESPONSE.pack(id, 0, -code, 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def is_waiting(fd: int, id: int) -> bool:
    """Whether the caller behind a notification still waits, so that its pid still is its own."""
    try:
        fcntl.ioctl(fd, _NOTIF_ID_VALID, _NOTIF_ID.pack(id))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def read_string(fd: int, notification: Notification, address: int, limit: int = 4096) -> str | None:
    """The text at `address` in the caller's memory, cut at `limit` bytes; None when it cannot be read.

    Good for telling what was tried, never for deciding: the guest may change it at any moment.
    """
    try:
        memory = os.open(f"/proc/{notification.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # SAFETY: after opening, because a pid may be reused; the descriptor then keeps to the right process
        # (test_read_string_of_a_dead_caller).
        if not is_waiting(fd, notification.id):
            return None
        return _read_string(memory, address, limit)
    except OSError:
        return None
    finally:
        os.close(memory)


def _read_string(memory: int, address: int, limit: int) -> str | None:
    found = b""
    while len(found) < limit:
        # Page by page: the string may end just before memory that is not there.
        size = min(_PAGE - (address + len(found)) % _PAGE, limit - len(found))
        piece = os.pread(memory, size, address + len(found))
        text, end, _ = piece.partition(b"\0")
        found += text
        if end or not piece:
            break
    return os.fsdecode(found)


def _name(nr: int) -> str:
    if not _names:
        for name in syscalls.TABLE:
            known = syscalls.number(name)
            if known is not None:
                _names[known] = name
    return _names.get(nr, f"syscall_{nr}")
