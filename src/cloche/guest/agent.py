"""The agent: PID 1 of a sandbox, serving executions, signals and files over one socket.

It was forked, not started: everything it will ever need is imported before the root changed under it, and it never
imports again. It reaps every orphan, and when its link to the host ends, it ends, and the kernel ends the rest.

With a range of uids its effective uid is 0 of its user namespace, with three capabilities (SETUID, SETGID, KILL); its
real uid is the user's, 1000, which commands get, and it touches files as 1000 too (`fsuid`). With a single uid it has
no capability, and commands run as it does.

Requests carry `n` and are answered with the same `n`; an `errno` in an answer means that it failed. The one message
sent unasked is `{"exit": pid, …}`. Where the host asks for it (`together`), the answer to a start waits a moment for
the command's exit, and both go as one: most commands are short, and a message costs both sides as much as a fork.
"""

import _signal  # type: ignore[import-not-found]  # its Python face imports enum, for every sandbox
import _socket
import errno
import fcntl
import os
import resource
import select
import stat
import struct
import termios

from cloche.guest import calls, wire

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would cost every sandbox a megabyte
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Message = dict[str, Any]
    Answer = tuple[Message, list[int]]
    T = TypeVar("T")

_IGNORED = (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGHUP)
# All that a command shall find as it would after exec alone. libc looks at each that is not named here, and then sets it.
_DEFAULT = tuple(n for n in range(1, 65) if n not in (_signal.SIGKILL, _signal.SIGSTOP, 32, 33))
_FIRST_MARK = 10**15
_SHELLS = ("/bin/bash", "/bin/sh")
_TOGETHER_MS = 3  # how long the answer to a start waits for the exit
_BATCH = 400  # directory entries looked at for one frame


class Agent:
    def __init__(self, link: _socket.socket, config: "Message") -> None:
        self.link = link
        self.base_env: dict[str, str] = dict(config["env"])
        self.default_cwd = str(config["cwd"])
        self.can_switch = bool(config["can_switch"])
        self.uid = int(config["uid"])
        self.leaders: set[int] = set()
        self.marks: dict[int, int] = {}  # of the live leaders, see `mark`
        self.next_mark = _FIRST_MARK
        self.held: Message | None = None  # the answer to a start, while it waits for the exit
        self.watches: dict[int, Watch] = {}
        self.shell = next((s for s in _SHELLS if os.access(s, os.X_OK)), "/bin/sh")
        self.poll = select.poll()
        self.acts = {
            "exec": self.exec, "signal": self.signal, "open": self.open, "stat": self.stat, "list": self.list_entries,
            "reserve": self.reserve, "adopt": self.adopt,
            "move": self.move, "replace": self.replace, "remove": self.remove, "make_dir": self.make_dir, "chmod": self.chmod,
            "symlink": self.symlink, "watch": self.watch, "unwatch": self.unwatch, "bind": self.bind, "connect": self.connect,
            "ping": self.ping, "processes": self.processes,
        }  # fmt: skip

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        self.poll.register(self.link.fileno(), select.POLLIN)
        self.poll.register(wake_read, select.POLLIN)
        link = self.link.fileno()
        while True:
            ready = self.poll.poll(_TOGETHER_MS if self.held else None)
            if not ready:
                self.release()
            for descriptor, _ in ready:
                if descriptor == link:
                    self.release()
                    if not self.serve_one():
                        return
                elif descriptor == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                    self.release()
                elif descriptor in self.watches:
                    events = self.watches[descriptor].read()
                    while events:
                        some = _fitting(events)
                        self.send({"watch": descriptor, "events": some})
                        events = events[len(some) :]

    def serve_one(self) -> bool:
        received = wire.receive(self.link)
        if received is None:
            return False
        message, fds = received
        answer: dict[str, object]
        out: list[int] = []
        try:
            answer, out = self.acts[str(message["op"])](message, fds)
        except OSError as problem:
            answer = {"errno": problem.errno or errno.EIO, "path": str(problem.filename or "")}
        except Exception as problem:
            answer = {"errno": errno.EINVAL, "path": f"{type(problem).__name__}: {problem}"[:500]}
        finally:
            wire.close_all(fds)
        answer["n"] = message["n"]
        if message.get("together") and "pid" in answer:
            self.held = answer
            return True
        self.send(answer, out)
        wire.close_all(out)
        return True

    def release(self) -> None:
        if self.held is not None:
            held, self.held = self.held, None
            self.send(held)

    def send(self, message: "Message", fds: "list[int] | tuple[int, ...]" = ()) -> None:
        try:
            wire.send(self.link, message, fds, lossy=True)
        except OSError:
            os._exit(0)  # the host is gone; so are we

    # ── executions ──────────────────────────────────────────────────────────────────────────────

    def exec(self, message: "Message", fds: "list[int]") -> "Answer":
        """Start a command. Descriptors: stdin, stdout, stderr (or one terminal), then extra ones for 3, 4, …"""
        environment = {**self.base_env, **message["env"]}
        identity = self.identity(message)
        if identity == 0:
            environment.update(HOME="/root", USER="root", LOGNAME="root", **message["env"])
        cwd = self.locate_cwd(str(message.get("cwd") or self.default_cwd), identity)
        mark = self.mark()
        try:
            argv = self.arguments(message, fds)
            pid = 0
            if identity == self.uid and not message.get("pty"):
                pid = self.spawn(argv, environment, cwd, fds)
            if not pid:
                pid = self.fork(argv, environment, cwd, identity, fds, bool(message.get("pty")))
        finally:
            os.close(cwd)
        self.leaders.add(pid)
        self.marks[pid] = mark
        return {"pid": pid}, []

    def mark(self) -> int:
        """A number that the next command and all that comes from it carry, whatever they do to session and parents.

        It is a limit of processor time for real-time scheduling, which is not to be had inside: a limit is inherited
        through fork and exec, /proc shows it, and without a capability it can only be lowered, so ours count down.
        """
        self.next_mark -= 1
        try:
            resource.setrlimit(resource.RLIMIT_RTTIME, (self.next_mark, self.next_mark))
        except (OSError, ValueError):
            return -1  # the caller's own limit is lower: the line and the session must do
        return self.next_mark

    def spawn(self, argv: "list[str]", environment: "dict[str, str]", cwd: int, fds: "list[int]") -> int:
        """The fast way: posix_spawn shares this process's memory until exec, where a fork would copy its page tables.

        RESETIDS makes the agent's real uid (the user's) the effective one, and exec makes it the only one; no group is
        inherited that the user lacks. Returns 0 when the program cannot be executed: `fork` then says why, as shells do.
        """
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(fds)]
        os.fchdir(cwd)
        try:
            # SAFETY: sources are above their targets (descriptors arrive in order, from 3), so no action overwrites
            # a later one's source; all else is close-on-exec. tests/security/test_descriptors.py
            return os.posix_spawn(
                find_program(argv[0], environment), argv, environment, file_actions=actions, resetids=self.can_switch,
                setsid=True, setsigdef=_DEFAULT, setsigmask=(),
            )  # fmt: skip
        except OSError:
            return 0
        finally:
            os.chdir("/")

    def fork(
        self,
        argv: "list[str]",
        environment: "dict[str, str]",
        cwd: int,
        identity: int,
        fds: "list[int]",
        tty: bool,
    ) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self.become([os.fsencode(a) for a in argv], environment, cwd, identity, fds, tty)
            finally:
                os._exit(126)
        return pid

    def arguments(self, message: "Message", fds: "list[int]") -> "list[str]":
        if "line" in message:
            line = str(message["line"])
            if len(line) < 100_000:
                return [self.shell, "-c", line]
            # One argument may not reach 128 KiB, so a long line is a script that the shell reads by descriptor. It is
            # not stdin, which stays the command's own.
            memory = os.memfd_create("line", 0)
            os.write(memory, os.fsencode(line))
            os.lseek(memory, 0, os.SEEK_SET)
            fds.append(memory)
            return [self.shell, f"/proc/self/fd/{len(fds) - 1 + (2 if message.get('pty') else 0)}"]
        return list(message["argv"])

    def identity(self, message: "Message") -> int:
        if message.get("user") == "root" and self.can_switch:
            return 0
        return self.uid

    def locate_cwd(self, path: str, identity: int) -> int:
        with self.acting_as(identity):
            return calls.open_inside(self.absolute(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def become(
        self,
        argv: "list[bytes]",
        environment: "dict[str, str]",
        cwd: int,
        identity: int,
        fds: "list[int]",
        tty: bool,
    ) -> None:
        """In the child: take on streams, terminal, directory and user; then be the command."""
        os.setsid()
        streams = [fds[0]] * 3 + fds[1:] if tty else fds
        # Copy everything above its final place first: a source may sit where another target goes.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in streams]
        cwd = fcntl.fcntl(cwd, fcntl.F_DUPFD_CLOEXEC, 200)
        for target, source in enumerate(high):
            os.dup2(source, target, inheritable=True)
        if tty:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.fchdir(cwd)
        os.closerange(len(high), 200 + len(high) + 16)
        if self.can_switch:
            os.setresgid(identity, identity, identity)
            os.setresuid(identity, identity, identity)
        # exec resets what is caught, not what is ignored.
        for number in _IGNORED:
            _signal.signal(number, _signal.SIG_DFL)
        _replace(argv, {os.fsencode(k): os.fsencode(v) for k, v in environment.items()})

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.leaders:
                self.leaders.discard(pid)
                self.marks.pop(pid, None)
                cpu_ms = (usage.ru_utime + usage.ru_stime) * 1000
                exit = {"exit": pid, "status": status, "cpu_ms": cpu_ms, "rss_kib": usage.ru_maxrss}
                if self.held is not None and self.held["pid"] == pid:
                    self.held.update(exit)
                    self.release()
                else:
                    self.send(exit)

    def reserve(self, message: "Message", _fds: "list[int]") -> "Answer":
        """Marks for processes to come that are not started by us; the first, from which they count down."""
        first = self.next_mark - 1
        self.next_mark -= min(int(message["count"]), 10_000)
        return {"mark": first}, []

    def adopt(self, message: "Message", _fds: "list[int]") -> "Answer":
        """Treat orphans that lead sessions as if they had been started by us; those that are such."""
        found = []
        with self.acting_as(0):
            for pid, mark in message["pids"]:
                if calls.parent_and_session(pid) == (os.getpid(), pid):
                    self.leaders.add(pid)
                    self.marks[pid] = mark
                    found.append(pid)
        return {"pids": found}, []

    def signal(self, message: "Message", _fds: "list[int]") -> "Answer":
        """Signal a leader, its process group, or its whole tree."""
        pid, number = int(message["pid"]), int(message["sig"])
        if pid not in self.leaders:
            raise ProcessLookupError(errno.ESRCH, "no such execution")
        scope = message.get("scope", "group")
        if scope == "tree":
            return {"killed": self.kill_tree(pid, number)}, []
        if scope == "group":
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
        return {}, []

    def kill_tree(self, leader: int, number: int) -> int:
        """Signal everything that came from `leader`, until a look finds nothing new.

        Stopping first keeps a fork bomb from outrunning the look. What earlier commands left running is spared.
        """
        seen: set[int] = set()
        for _ in range(50):
            found = self.tree(leader) - seen
            if not found:
                break
            for pid in found:
                _kill(pid, _signal.SIGSTOP)
            seen |= found
        for pid in seen:
            _kill(pid, number)
            if number != _signal.SIGKILL:
                _kill(pid, _signal.SIGCONT)
        return len(seen)

    def tree(self, leader: int) -> "set[int]":
        parents: dict[int, int] = {}
        sessions: dict[int, int] = {}
        tree = {leader}
        mark = self.marks.get(leader, -1)
        with self.acting_as(0):  # the group that /proc's hidepid lets see everybody
            for name in os.listdir("/proc"):
                found = calls.parent_and_session(int(name)) if name.isdigit() else None
                if found:
                    parents[int(name)], sessions[int(name)] = found
            if mark > 0:
                tree |= {pid for pid in parents if pid != 1 and calls.mark_of(pid) == mark}
        grown = True
        while grown:
            more = {p for p in parents if p not in tree and (parents[p] in tree or sessions[p] == leader)}
            tree |= more
            grown = bool(more)
        return tree

    def processes(self, _message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(0):
            return {"pids": [int(n) for n in os.listdir("/proc") if n.isdigit()]}, []

    def bind(self, message: "Message", fds: "list[int]") -> "Answer":
        """Variables for commands to come, and files: their contents follow each other in the one descriptor."""
        offset = 0
        with self.acting_as(self.uid):
            for path, size, mode in message["files"]:
                self.put(self.absolute(str(path)), fds[0], offset, int(size), mode)
                offset += int(size)
        self.base_env.update(message["env"])
        return {}, []

    def put(self, path: str, source: int, offset: int, size: int, mode: "int | None") -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        try:
            _make_parents(path)
            file = calls.open_inside(path, flags, 0o644 if mode is None else mode)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.ENODEV, "not a regular file")
                end = offset + size
                while offset < end:
                    offset += os.write(file, os.pread(source, min(1 << 20, end - offset), offset))
                if mode is not None and stat.S_IMODE(os.fstat(file).st_mode) != mode:
                    os.fchmod(file, mode)
            finally:
                os.close(file)
        except OSError as problem:
            problem.filename = path
            raise

    def ping(self, _message: "Message", _fds: "list[int]") -> "Answer":
        return {}, []

    def connect(self, message: "Message", _fds: "list[int]") -> "Answer":
        """A connection to a port inside, begun in this network namespace and handed out. The host waits until it is there:
        a listener that never accepts must hold up nobody else."""
        old = message["family"] == 4
        kind = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
        link = _socket.socket(_socket.AF_INET if old else _socket.AF_INET6, kind, _socket.IPPROTO_TCP)
        try:
            problem = link.connect_ex(("127.0.0.1" if old else "::1", int(message["port"])))
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, "no connection")
            return {}, [link.detach()]
        finally:
            link.close()

    # ── files, always as the user asked for ─────────────────────────────────────────────────────

    def absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.default_cwd}/{path}"

    def acting_as(self, identity: int) -> "calls.FileIdentity":
        return calls.FileIdentity(identity if self.can_switch else None)

    def open(self, message: "Message", _fds: "list[int]") -> "Answer":
        path, flags = self.absolute(str(message["path"])), int(message["flags"])
        with self.acting_as(self.identity(message)):
            if message.get("parents"):
                _make_parents(path)
            mode = int(message.get("mode", 0o644))
            return {}, [calls.open_inside(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)]

    def stat(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            path = self.absolute(str(message["path"]))
            follow = bool(message.get("follow"))
            return {"entry": _entry(path, os.path.basename(path.rstrip("/")) or "/", follow)}, []

    def list_entries(self, message: "Message", _fds: "list[int]") -> "Answer":
        """Entries in name order from `after`; the caller asks again until `more` is false."""
        path, after = self.absolute(str(message["path"])), str(message.get("after", ""))
        with self.acting_as(self.identity(message)):
            directory = calls.open_inside(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By the name that the host is told, or it could not say where to go on.
                names = sorted((told, n) for n in os.listdir(directory) if (told := _told(n)) > after)[
                    :_BATCH
                ]
            finally:
                os.close(directory)
            entries = []
            for told, name in names:
                try:
                    entries.append(_entry(f"{path.rstrip('/')}/{name}", told, False))
                except FileNotFoundError:
                    entries.append([told])  # removed meanwhile
            some = _fitting(entries)
            more = len(names) == _BATCH or len(some) < len(entries)
            return {
                "entries": [e for e in some if len(e) > 1],
                "more": more,
                "last": str(some[-1][0]) if more else "",
            }, []

    def move(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            source, target = self.absolute(str(message["path"])), self.absolute(str(message["target"]))
            if message.get("parents"):
                _make_parents(target)
            if not message.get("overwrite", True) and os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "exists", target)
            os.rename(source, target)
            return {}, []

    def replace(self, message: "Message", _fds: "list[int]") -> "Answer":
        """Put a draft in the place of a regular file, or of nothing; on request with the mode of the file before it."""
        with self.acting_as(self.identity(message)):
            draft, target = self.absolute(str(message["path"])), self.absolute(str(message["target"]))
            try:
                mode = os.lstat(target).st_mode
            except FileNotFoundError:
                mode = 0
            if mode and not stat.S_ISREG(mode):
                raise OSError(errno.ENXIO, "not a regular file", target)
            if mode and message.get("keep_mode"):
                os.chmod(draft, stat.S_IMODE(mode))
            os.rename(draft, target)
            return {}, []

    def remove(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            path = self.absolute(str(message["path"]))
            if stat.S_ISDIR(os.lstat(path).st_mode):
                if not message.get("recursive"):
                    os.rmdir(path)
                else:
                    _remove_tree(path)
            else:
                os.unlink(path)
            return {}, []

    def make_dir(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            path = self.absolute(str(message["path"]))
            _make_parents(path)
            try:
                os.mkdir(path, 0o755)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise
                return {"made": False}, []
            return {"made": True}, []

    def chmod(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            os.chmod(self.absolute(str(message["path"])), int(message["mode"]))
            return {}, []

    def symlink(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            path = self.absolute(str(message["path"]))
            if message.get("parents"):
                _make_parents(path)
            os.symlink(str(message["target"]), path)
            return {}, []

    def watch(self, message: "Message", _fds: "list[int]") -> "Answer":
        with self.acting_as(self.identity(message)):
            made = Watch(self.absolute(str(message["path"])), bool(message.get("recursive")))
        self.watches[made.fd] = made
        self.poll.register(made.fd, select.POLLIN)
        return {"watch": made.fd}, []

    def unwatch(self, message: "Message", _fds: "list[int]") -> "Answer":
        fd = int(message["watch"])
        if self.watches.pop(fd, None):
            self.poll.unregister(fd)
            os.close(fd)
        return {}, []


class Watch:
    """Changes beneath a directory, by inotify; new directories are followed when asked."""

    _MASK = (
        0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200
    )  # modify, attrib, close_write, moved_*, create, delete

    def __init__(self, root: str, recursive: bool) -> None:
        self.root, self.recursive = root.rstrip("/") or "/", recursive
        self.paths: dict[int, str] = {}
        self.fd = calls.inotify_init()
        try:
            if not stat.S_ISDIR(os.stat(self.root).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", root)
            self.add(self.root)
        except OSError:
            os.close(self.fd)
            raise

    def add(self, path: str) -> "list[str]":
        """Watch a directory, and what is beneath it when asked; what was found in there."""
        self.paths[calls.inotify_add(self.fd, path, self._MASK)] = path
        found: list[str] = []
        if self.recursive:
            for entry in os.scandir(path):
                found.append(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    found += self.add(entry.path)
        return found

    def read(self) -> "list[tuple[str, str]]":
        events: list[tuple[str, str]] = []
        buffer = os.read(self.fd, 32768)
        while buffer:
            watch, mask, _, length = struct.unpack_from("iIII", buffer)
            name = buffer[16 : 16 + length].rstrip(b"\0").decode("utf-8", "replace")
            buffer = buffer[16 + length :]
            if mask & 0x4000:
                events.append(("overflow", ""))
                continue
            path = f"{self.paths.get(watch, self.root)}/{name}"
            kind = _watch_kind(mask)
            if kind:
                events.append((kind, path[len(self.root) :].lstrip("/")))
            if self.recursive and mask & 0x40000000 and mask & (0x100 | 0x80):
                try:
                    # What came into a new directory before it was watched is told now, some of it perhaps twice.
                    events += [("create", found[len(self.root) :].lstrip("/")) for found in self.add(path)]
                except OSError:
                    pass  # gone again already: its removal is an event of its own
        return events[:500]


def _watch_kind(mask: int) -> str:
    for bits, kind in (
        (0x100 | 0x80, "create"),
        (0x8 | 0x2, "write"),
        (0x200, "remove"),
        (0x40, "rename"),
        (0x4, "chmod"),
    ):
        if mask & bits:
            return kind
    return ""


def _replace(argv: "list[bytes]", environment: "dict[bytes, bytes]") -> None:
    """execve along PATH; what fails is said on stderr with the exit status that shells use for it."""
    name = argv[0]
    directories = [b""] if b"/" in name else environment.get(b"PATH", b"/usr/bin:/bin").split(b":")
    worst = errno.ENOENT
    for directory in directories:
        try:
            os.execve(os.path.join(directory, name) if directory else name, argv, environment)
        except OSError as problem:
            if problem.errno == errno.ENOEXEC:
                try:
                    os.execve(
                        b"/bin/sh",
                        [b"sh", os.path.join(directory, name) if directory else name, *argv[1:]],
                        environment,
                    )
                except OSError as second:
                    problem = second
            if problem.errno not in (errno.ENOENT, errno.ENOTDIR):
                worst = problem.errno or errno.EIO
    text = b"command not found" if worst == errno.ENOENT else os.fsencode(os.strerror(worst))
    os.write(2, b"cloche: " + name + b": " + text + b"\n")
    os._exit(127 if worst == errno.ENOENT else 126)


def find_program(name: str, environment: "dict[str, str]") -> str:
    """Where PATH leads; the bare name if nowhere, which then fails to execute."""
    if "/" in name:
        return name
    for directory in environment.get("PATH", "/usr/bin:/bin").split(":"):
        path = f"{directory}/{name}"
        if os.access(path, os.X_OK, effective_ids=True) and not os.path.isdir(path):
            return path
    return name


def _told(name: str) -> str:
    """A file name as the host is told it: see `lossy` in wire.py."""
    return name.encode("utf-8", "replace").decode()


def _fitting(items: "list[T]") -> "list[T]":
    """As many of the first as one frame carries inline, at least one: a host does not follow a memfd."""
    room = wire.INLINE - 1024
    for count, item in enumerate(items):
        room -= len(wire.encode(item)) + 1
        if room < 0:
            return items[: max(1, count)]
    return items


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _entry(path: str, name: str, follow: bool) -> "list[object]":
    info = os.stat(path) if follow else os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    return [name, info.st_mode, info.st_size, info.st_uid, info.st_gid, info.st_mtime, target]


def _make_parents(path: str) -> None:
    parent = os.path.dirname(path)
    if parent not in ("", "/") and not os.path.isdir(parent):
        _make_parents(parent)
        try:
            os.mkdir(parent, 0o755)
        except FileExistsError:
            pass


def _remove_tree(path: str) -> None:
    # By descriptors, never by path: a name swapped for a symlink meanwhile must not lead elsewhere.
    parent = calls.open_inside(os.path.dirname(path) or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_below(parent, os.path.basename(path))
    finally:
        os.close(parent)


def _remove_below(parent: int, name: str) -> None:
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for child in os.listdir(directory):
            if stat.S_ISDIR(os.stat(child, dir_fd=directory, follow_symlinks=False).st_mode):
                _remove_below(directory, child)
            else:
                os.unlink(child, dir_fd=directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)


def prime() -> None:
    """Touch what first use would pay for (or import), while imports still work."""
    for codec in ("utf-8", "latin-1", "ascii"):
        "a".encode(codec)
    b"\xff".decode("utf-8", "replace")
    os.fsencode("\udcff")
    os.strerror(errno.ENOENT)
    calls.prime()
