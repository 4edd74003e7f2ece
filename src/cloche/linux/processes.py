"""Processes: naming one without mistaking it, finding its descendants, weighing them, tying and limiting
oneself.

A pid is only a name and is given away again; where it matters, hold a pidfd, or remember `start_time` beside
it. Memory is counted as PSS, which shares out what forks have in common, so that the parts of a tree add up
to what the tree costs; RSS would count a forked interpreter's pages once for each child.

Everything read from /proc may vanish between two lines: a process that ends while it is being looked at
counts as ended, never as an error. Standard library and `syscalls` only.
"""

import os
import select
import signal
import time

from cloche.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_KIB_PER_MIB = 1024

# Fields of /proc/PID/stat, counted from the one after the name (which may itself hold spaces and
# parentheses).
_STATE, _PARENT, _USER_TIME, _START_TIME = 0, 1, 11, 19


# --- one process --------------------------------------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, a name that is not given away again.

    None if there is no such process.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[_START_TIME])


def is_running(pid: int, started: int | None = None) -> bool:
    """Whether a process lives (a zombie does not) and, if given, is the one that was `started` then."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in (b"Z", b"X"):
        return False
    return started is None or int(fields[_START_TIME]) == started


def send_signal(pidfd: int, number: int) -> bool:
    """Signal the process behind a descriptor; False if it is gone."""
    try:
        syscalls.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def wait_exit(pidfd: int, timeout_s: float | None) -> bool:
    """Wait for the end of the process behind a descriptor, anyone's child; False when the time is up."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))


def _stat(pid: int) -> list[bytes] | None:
    content = _read(f"/proc/{pid}/stat")
    return None if content is None else content[content.rindex(b")") + 2 :].split()


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to see
        return None
    try:
        pieces = []
        while piece := os.read(fd, 65536):
            pieces.append(piece)
        return b"".join(pieces) or None
    except OSError:
        return None
    finally:
        os.close(fd)


# --- a tree -------------------------------------------------------------------------------------------------


def stop_tree(pid: int, timeout_s: float = 2.0) -> "set[int] | None":
    """Stop a process and everything that came from it; those that were not stopped already, or None if some would not.

    Looked at again until nothing new appears: what is about to fork when it is stopped has a child that is not.
    """
    stopped: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while True:
        states = {found: state(found) for found in (pid, *descendants(pid))}
        left = {found for found, now in states.items() if now not in ("T", "t", "Z", "X", "")}
        if not left:
            return stopped
        for found in left:
            try:
                os.kill(found, signal.SIGSTOP)
                stopped.add(found)
            except (ProcessLookupError, PermissionError):
                continue
        if time.monotonic() > deadline:
            continue_all(stopped)
            return None
        time.sleep(0.0005)


def continue_all(pids: "set[int]") -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def state(pid: int) -> str:
    """The letter that the kernel has for it; empty once it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on of a process, parents before children, itself left out.

    A process whose parent ended belongs to its reaper, so only a subreaper or a pid namespace holds a tree
    together.
    """
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))) is not None:
            children.setdefault(int(fields[_PARENT]), []).append(int(name))
    found = list(children.get(pid, ()))
    for each in found:  # grows while it is walked
        found.extend(children.get(each, ()))
    return found


def pss_kib(pid: int) -> int | None:
    """The proportional share of memory of a process; None if it is gone or may not be looked at."""
    content = _read(f"/proc/{pid}/smaps_rollup")
    if content is None:
        return None
    for line in content.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    return None


def tree_pss_mib(pids: "Iterable[int]") -> float:
    """What these processes cost together, in MiB. What cannot be read counts nothing."""
    return sum(pss_kib(pid) or 0 for pid in pids) / _KIB_PER_MIB


def tree_cpu_ms(pids: "Iterable[int]") -> float:
    """The processor time of these processes and of all that they have reaped, in milliseconds."""
    ticks = 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            # In user mode and in the kernel, its own and its children's.
            ticks += sum(int(field) for field in fields[_USER_TIME : _USER_TIME + 4])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


# --- oneself ------------------------------------------------------------------------------------------------


def set_pdeathsig(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have this process signalled when the thread that made it ends.

    Not inherited by fork, and cleared by setuid and by running a set-uid program: set it last. `parent` is
    the pid that the caller knew before it forked; if that one is gone already, the signal is sent at once.
    """
    # SAFETY: the parent may have ended before the call, and then nothing would ever come
    # (test_pdeathsig_after_the_parent_ended).
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Become the parent of orphans among one's descendants, so that `descendants` finds them all."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)


def set_undumpable() -> None:
    """Close this process to others of the same user: no ptrace, no reading of its memory or files."""
    # SAFETY: holds until the next execve (test_undumpable_process_is_closed).
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def affinity_for(cpus: float) -> list[int]:
    """As many of this process's processors as a limit of `cpus` may use, at least one."""
    own = sorted(os.sched_getaffinity(0))
    return own[: max(1, min(len(own), round(cpus)))]


def pid_of(pidfd: int) -> int:
    """The pid behind a pidfd as this namespace counts, -1 when it has ended."""
    content = _read(f"/proc/self/fdinfo/{pidfd}") or b""
    for line in content.splitlines():
        if line.startswith(b"Pid:"):
            return int(line.split()[1])
    return -1


def session_inside(pid: int) -> int:
    """The session of a process as its own pid namespace counts it, 0 if it cannot be told."""
    content = _read(f"/proc/{pid}/status") or b""
    for line in content.splitlines():
        if line.startswith(b"NSsid:"):
            return int(line.split()[-1])
    return 0


def socket_holder(first: int, address: str, port: int) -> int:
    """The pid of a process, `first` or one that came from it, that holds the TCP or UDP socket bound to address and port in
    the network namespace of `first`; 0 if none does."""
    inode = _bound_inode(first, address, port)
    if not inode:
        return 0
    wanted = f"socket:[{inode}]"
    for pid in _tree(first):
        try:
            held = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for fd in held:
            try:
                if os.readlink(f"/proc/{pid}/fd/{fd}") == wanted:
                    return pid
            except OSError:
                continue
    return 0


def _tree(first: int) -> list[int]:
    """A process and its descendants by the kernel's lists of children: the cost is the tree's, not the host's."""
    found = [first]
    if not os.path.exists(f"/proc/{first}/task/{first}/children"):
        return found + descendants(first)
    for pid in found:  # grows while it is walked
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            found += map(int, (_read(f"/proc/{pid}/task/{thread}/children") or b"").split())
    return found


def _bound_inode(pid: int, address: str, port: int) -> str:
    """From the kernel's table of sockets: `sl local remote state … inode`, addresses as native words in hexadecimal."""
    spellings = {f"{_hex_address(address)}:{port:04X}"}
    if ":" not in address:
        spellings.add(f"{_hex_address('::ffff:' + address)}:{port:04X}")
        spellings.add(f"{'0' * 8}:{port:04X}")  # a datagram socket that was never connected
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in (_read(f"/proc/{pid}/net/{table}") or b"").decode("ascii", "replace").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[1] in spellings and words[9] != "0":
                return words[9]
    return ""


def _hex_address(address: str) -> str:
    import socket
    import struct

    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)
