"""The supervisor of a sandbox on the rung `process`: the parent of its agent, outside the glass.

There is no pid namespace whose end would end everything, so this process stands in for one. It is the subreaper above
the agent, which confines itself after the fork: whatever runs inside descends from here, however often it forks, and
Landlock keeps it from signalling back. It ends all of it when the agent ends, when the engine lets go of the control
socket, or when the engine dies; then it removes the sandbox's directory and cgroup. It survives the engine by that long.

It also does the few things that Landlock has no word for. Changing the mode, owner or times of a file works on whatever
the user owns and can be named, so the filter sends those calls here: the file is opened once, its place is looked up,
and the change is made to that very file if it lies in the sandbox's directories. Nothing is ever "let through".

Runs no code but ours, holds no capability but the one to remove cgroups, and is its own process, so that a flood of calls costs its sandbox only.
Imports: standard library, `linux`, `guest`.
"""

import errno
import os
import select
import signal
import socket
import stat
import struct
import sys
import time

from cloche.drivers import confining, narrow
from cloche.guest import agent, standalone, wire
from cloche.linux import cgroups, processes, seccomp, syscalls

_CAP_DAC_OVERRIDE = 1 << 1  # root's cgroups are removed from directories that even root may not write
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
_MAX_TOLD = 256  # refused calls told to the engine; later ones are refused all the same
_NS = 1_000_000_000


def main() -> None:
    """The entry of the rung `process`. Never returns."""
    confining.keep_only(confining.LINK, confining.CONTROL, confining.LOCK)
    link = confining.own(confining.LINK)
    received = wire.receive(link)
    if received is None:
        os._exit(0)
    message = received[0]
    engine = int(message["engine"])  # type: ignore[call-overload]
    relay, inside = wire.pair()
    processes.become_subreaper()
    child = os.fork()
    if child == 0:
        _be_agent(link, message, inside)
    inside.close()
    link.close()
    _watch(child, engine, message, relay)
    os._exit(0)


# --- the agent's side ---------------------------------------------------------------------------------------


def _be_agent(link: socket.socket, message: "dict[str, object]", relay: socket.socket) -> None:
    try:
        confining.keep_only(link.fileno(), relay.fileno())
        processes.become_subreaper()
        for path in message["cgroups"]:  # type: ignore[attr-defined]
            with open(path, "wb", buffering=0) as file:
                file.write(b"0")
    except BaseException as problem:
        standalone.tell_failure(link, problem)
        os._exit(1)

    def hand_over(listener: int) -> None:
        wire.send(relay, {}, [listener])
        relay.close()

    standalone.serve(link, message, confining.confine, make=_resident, hand_over=hand_over)


def _resident(link: socket.socket, config: "dict[str, object]") -> agent.Agent:
    program = narrow.before(narrow.ALLOW_ALL, narrow.COMMAND)

    def narrowed() -> None:
        seccomp.load(program)

    def expose(seen: bool) -> None:
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, int(seen))

    return standalone.Resident(link, config, narrowed, expose)


# --- the supervisor's side ----------------------------------------------------------------------------------


def _watch(child: int, engine: int, message: "dict[str, object]", relay: socket.socket) -> None:
    roots = tuple(str(path) for path in message["roots"])  # type: ignore[attr-defined]
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda got, _frame: ended.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    confining.drop_capabilities(_CAP_DAC_OVERRIDE)
    processes.set_undumpable()
    # SAFETY: SIGTERM and not SIGKILL: there is work to do when the engine dies. After the credentials changed, which
    # clears it. tests/drivers/test_process.py::test_a_killed_engine_leaves_nothing
    processes.set_pdeathsig(signal.SIGTERM, parent=engine)
    control = confining.own(confining.CONTROL)
    calls = _Calls(roots, control)
    poll = select.poll()
    for fd in (control.fileno(), wake_read, relay.fileno()):
        poll.register(fd, select.POLLIN)
    while not ended and _reap_until(child):
        for fd, _ in poll.poll():
            if fd == control.fileno():
                ended.append(0)  # the engine says nothing on it: it can only have let go
            elif fd == wake_read:
                os.read(wake_read, 4096)
            elif fd == relay.fileno():
                _take_listener(relay, poll, calls)
            elif not calls.answer_one():
                poll.unregister(fd)
                calls.close()
    calls.close()
    end_everything(str(message["group"]))
    remove(str(message["home"]))


def _take_listener(relay: socket.socket, poll: "select.poll", calls: "_Calls") -> None:
    received = wire.receive(relay)
    poll.unregister(relay.fileno())
    relay.close()
    if received is not None and received[1]:
        calls.listener = received[1][0]
        poll.register(calls.listener, select.POLLIN)


def _reap_until(child: int) -> bool:
    """Reap what has ended; False once the agent has."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == child:
            return False


def end_everything(group: str) -> None:
    """Kill what descends from this process until nothing does, and reap it."""
    held = cgroups.detect().open(group) if group else None
    if held is not None:
        held.thaw()
        held.kill()
    while True:
        left = processes.descendants(os.getpid())
        # Stopping first keeps what forks from outrunning the look.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(
                    0.001
                )  # the dying take a moment; a look may have missed one, so never wait for good
        except ChildProcessError:
            break
    if held is not None:
        held.remove(0.5)


def remove(home: str) -> None:
    """Remove a directory tree that something hostile made, after everything that could change it is dead.

    Directories are moved up to the top before they are emptied: no depth, mode or length of path stops this.
    """
    try:
        top = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        number = 0
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    number = _lift(inner, top, number)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(home)


def _lift(inner: int, top: int, number: int) -> int:
    """Unlink the files of a directory, and move its directories to `top` under names that nothing there has."""
    for child in os.listdir(inner):
        if not stat.S_ISDIR(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
            os.unlink(child, dir_fd=inner)
            continue
        os.chmod(child, 0o700, dir_fd=inner)  # moving a directory elsewhere writes to it
        number += 1
        os.rename(child, f"\n{number}", src_dir_fd=inner, dst_dir_fd=top)
    return number


# --- calls that wait for an answer --------------------------------------------------------------------------


class _Calls:
    """Answers the calls that the filter sends: does some for the caller, refuses and tells the rest."""

    def __init__(self, roots: "tuple[str, ...]", control: socket.socket) -> None:
        self.roots = roots
        self.listener = -1
        self.control = control
        self.told = 0

    def close(self) -> None:
        if self.listener >= 0:
            os.close(self.listener)
            self.listener = -1

    def answer_one(self) -> bool:
        try:
            call = seccomp.receive(self.listener)
        except OSError:
            return False
        if call is None:
            return True
        code = errno.EPERM
        if call.name in narrow.SUPERVISED:
            code = self.perform(call)
        leader = processes.session_inside(call.pid)  # before the answer, after which the caller may be gone
        seccomp.refuse(self.listener, call.id, code)  # with 0 the call has been done, and returns that
        if code == errno.EPERM:
            self.tell(call, leader)
        return True

    def tell(self, call: seccomp.Notification, leader: int) -> None:
        self.told += 1
        if self.told > _MAX_TOLD:
            return
        frame = {"refused": call.name, "leader": leader, "args": [hex(word) for word in call.args[:3]]}
        try:
            self.control.setblocking(False)
            wire.send(self.control, frame)
        except OSError:
            pass  # telling is a courtesy; refusing is not

    def perform(self, call: seccomp.Notification) -> int:
        """Do a supervised call; 0, or the errno that it failed with."""
        try:
            target, words = self.locate(call)
        except OSError as problem:
            return problem.errno or errno.EPERM
        try:
            # SAFETY: what was opened, not what its name means by now, is looked up, judged and changed.
            # tests/drivers/test_process.py::test_modes_outside_cannot_be_changed
            place = os.readlink(f"/proc/self/fd/{target}")
            if not any(place == root or place.startswith(root + "/") for root in self.roots):
                return errno.EPERM
            if not seccomp.is_waiting(self.listener, call.id):
                return errno.EPERM  # whoever has the pid now, the memory read was not the caller's
            return _change(call, f"/proc/self/fd/{target}", words)
        except OSError as problem:
            return problem.errno or errno.EPERM
        finally:
            os.close(target)

    def locate(self, call: seccomp.Notification) -> "tuple[int, tuple[int, ...]]":
        """The file that a call is about, opened without reaching into it, and the arguments that follow."""
        args = call.args
        if call.name in ("fchmod", "fchown"):
            return _open_of(call.pid, _signed(args[0]), "", True), args[1:]
        at = call.name.endswith(("at", "at2"))
        dirfd = _signed(args[0]) if at else _AT_FDCWD
        pointer, rest = (args[1], args[2:]) if at else (args[0], args[1:])
        flags = _flags(call)
        path = "" if pointer == 0 else seccomp.read_string(self.listener, call, pointer)
        if path is None:
            raise PermissionError(errno.EPERM, "the caller's memory cannot be read")
        if path == "" and pointer and not flags & _AT_EMPTY_PATH:
            raise FileNotFoundError(errno.ENOENT, "an empty path")
        follow = call.name != "lchown" and not flags & _AT_SYMLINK_NOFOLLOW
        return _open_of(call.pid, dirfd, path, follow), rest


def _flags(call: seccomp.Notification) -> int:
    place = {"fchmodat2": 3, "fchownat": 4, "utimensat": 3}.get(call.name)
    return 0 if place is None else call.args[place] & 0xFFFFFFFF


def _open_of(pid: int, dirfd: int, path: str, follow: bool) -> int:
    """What `path` means to the process `pid`, which shares our root."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    for own in ("/proc/self/", "/dev/fd/"):
        if path.startswith(own):
            path = f"/proc/{pid}/" + ("fd/" if own == "/dev/fd/" else "") + path[len(own) :]
    if path.startswith("/"):
        return os.open(path, flags)
    base = f"/proc/{pid}/cwd" if dirfd == _AT_FDCWD else f"/proc/{pid}/fd/{dirfd}"
    if not path:
        return os.open(base, os.O_PATH | os.O_CLOEXEC)
    directory = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.open(path, flags, dir_fd=directory)
    finally:
        os.close(directory)


def _change(call: seccomp.Notification, file: str, words: "tuple[int, ...]") -> int:
    if "chmod" in call.name:
        os.chmod(file, words[0] & 0o7777)
    elif "chown" in call.name:
        same = (_signed(words[0]) in (-1, os.getuid()), _signed(words[1]) in (-1, os.getgid()))
        return 0 if all(same) else errno.EPERM
    else:
        os.utime(file, ns=_times(call, words[0], os.stat(file)))
    return 0


def _times(call: seccomp.Notification, pointer: int, now: os.stat_result) -> "tuple[int, int]":
    """The access and modification times that a call asks for, in nanoseconds."""
    if pointer == 0:
        return time.time_ns(), time.time_ns()
    size = 16 if call.name == "utime" else 32
    memory = os.open(f"/proc/{call.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        words = struct.unpack(f"={size // 8}q", os.pread(memory, size, pointer))
    finally:
        os.close(memory)
    if call.name == "utime":
        return words[0] * _NS, words[1] * _NS
    if call.name != "utimensat":
        return words[0] * _NS + words[1] * 1000, words[2] * _NS + words[3] * 1000
    kept = (now.st_atime_ns, now.st_mtime_ns)
    access, modified = (_moment(words[2 * i], words[2 * i + 1], kept[i]) for i in (0, 1))
    return access, modified


def _moment(seconds: int, nanoseconds: int, kept: int) -> int:
    if nanoseconds == _UTIME_NOW:
        return time.time_ns()
    return kept if nanoseconds == _UTIME_OMIT else seconds * _NS + nanoseconds


def _signed(word: int) -> int:
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


if sys.byteorder != "little":  # the structures above are read as the two supported architectures write them
    raise ImportError("the rung process knows little-endian machines only")
