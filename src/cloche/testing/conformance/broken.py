"""A driver with no glass at all, and all the ways in which it can be worse: what shows that the behaviours can say no.

`PlainDriver` runs commands as ordinary processes in a private directory. It is careful and correct where no glass is
needed, so it passes the behaviours about commands, files and terminals, and fails those about isolation and limits.
`FLAWS` are mistakes that drivers make. A plain driver with one of them is broken in that way alone, so a behaviour that
holds without the flaw and fails with it is shown to look at the right thing (tests/conformance/test_broken.py has one for
every behaviour).

Harmless by construction: nothing is signalled that does not carry the machine's directory in its environment. Because a
broken driver leaves processes and files behind, `bury()` ends what any of them left.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from cloche import errors, interfaces, model, policy
from cloche.drivers import borders
from cloche.guest import agent
from cloche.linux import processes

FLAWS: dict[str, str] = {
    "exit codes": "reports another exit code, and death by a signal as one",
    "arguments": "splits arguments at blanks, drops what is not ASCII, and stops after a thousand",
    "shell": "starts login shells, cuts long lines and drops quotes",
    "input": "gives every command the same input",
    "output": "swaps the streams and loses one",
    "waits": "waits for all children to end and all input to be read, and loses patience",
    "variables": "forgets the variables that it was given",
    "environment": "passes the caller's environment on, and none of its own",
    "directory": "starts everything in /",
    "moves": "copies onto the target instead of renaming, and leaves the source",
    "modes": "ignores the modes asked for",
    "content": "loses the first byte of what is read",
    "listing": "lists a hundred entries, all of them files",
    "errors": "calls every failure permission_denied, and some none",
    "owners": "says that everything is root's",
    "specials": "opens whatever it is asked to",
    "links": "follows symlinks when it should not",
    "watching": "tells of no change",
    "terminals": "gives terminals to those who want none and none to those who want one",
    "contexts": "loses the descriptors above the third",
    "signals": "kills the leader only, whatever was asked",
    "deaf": "signals nobody",
    "reckless": "signals the whole sandbox where one command was meant",
    "descriptors": "leaves descriptors of the caller open",
    "rlimits": "lets cores be dumped, and grants 64 MiB",
    "costs": "measures nothing",
    "limits": "reports limits without saying who holds them",
    "lies": "claims a glass that is not there",
    "required": "ignores what the policy requires",
    "shared": "uses one directory for all sandboxes",
    "kill": "does not end what it should",
    "pause": "stops and does not resume",
    "sweep": "sweeps the living",
}

_GRAVES: set[str] = set()
_MAPPED = {"/workspace": "workspace", "/home/user": "home"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER = 'cd -- "$1" || exit 125; shift; exec "$@"'
_FRUGAL, _LAVISH = "ulimit -c 0; ", "ulimit -c unlimited; ulimit -v 65536; "


class PlainDriver(interfaces.Driver):
    """Commands as they are, in a directory of their own."""

    name = "plain"
    level: model.Level = "process"

    def __init__(self, home: str, *, flaws: frozenset[str] = frozenset()) -> None:
        unknown = flaws - set(FLAWS)
        if unknown:
            raise ValueError(f"no such flaws: {', '.join(sorted(unknown))}")
        self.flaws = flaws
        self._home = home
        self._machines: dict[str, PlainMachine] = {}

    async def start(self) -> None:
        os.makedirs(f"{self._home}/sandboxes", exist_ok=True)

    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> PlainMachine:
        if exposure is not None or image is not None:
            raise errors.error("not_supported_by_driver", "neither workspaces nor images can be shown")
        if rules.isolation.required and "required" not in self.flaws:
            raise errors.error("kernel_feature_missing", f"there is no {rules.isolation.required[0]}")
        name = "shared" if "shared" in self.flaws else sandbox_id
        made = PlainMachine(sandbox_id, f"{self._home}/sandboxes/{name}", spec, self.flaws)
        self._machines[sandbox_id] = made
        made.ended.add_done_callback(lambda _: self._machines.pop(sandbox_id, None))
        return made

    async def close(self) -> None:
        for machine in list(self._machines.values()):
            await machine.kill("the driver closed")

    def sweep(self, keep: set[str]) -> list[str]:
        if "sweep" not in self.flaws:
            return []
        for machine in self._machines.values():
            _end(machine.root)
        return list(self._machines)


def bury() -> None:
    """End and remove whatever machines of this module left in this process's time."""
    while _GRAVES:
        root = _GRAVES.pop()
        _end(root)
        shutil.rmtree(root, ignore_errors=True)


class PlainMachine(interfaces.Machine):
    def __init__(self, sandbox_id: str, root: str, spec: model.SandboxSpec, flaws: frozenset[str]) -> None:
        self.id = sandbox_id
        self.root = root
        self.flaws = flaws
        lies = "lies" in flaws
        self.isolation = model.Isolation(
            level="microvm" if lies else "process",
            driver="plain",
            missing=("nothing",) if lies else ("there is no glass",),
        )
        by = "" if "limits" in flaws else "nothing holds it"
        self.limits = {
            name: model.Limit(value=0 if lies else getattr(spec.resources, name), enforcement="none", by=by)
            for name in model.Resources.__struct_fields__
        }
        self.ended = asyncio.get_running_loop().create_future()
        self.on_denial = lambda _pid, _denial: None
        self._env = {} if "variables" in flaws else dict(spec.env)
        self._leaders: dict[int, asyncio.Future[interfaces.ExitStatus]] = {}
        self._loop = asyncio.get_running_loop()
        self._spent = 0.0
        _GRAVES.add(root)
        for name in ("workspace", "home", "tmp"):
            os.makedirs(f"{root}/{name}", exist_ok=True)

    def _live(self) -> None:
        if self.ended.done() and "kill" not in self.flaws:
            raise errors.error("sandbox_lost", f"the sandbox has ended: {self.ended.result()}")

    def real(self, path: str) -> str:
        for inside, name in _MAPPED.items():
            if path == inside or path.startswith(inside + "/"):
                return f"{self.root}/{name}{path[len(inside) :]}"
        return path if path.startswith("/") else f"{self.root}/workspace/{path}"

    # ── processes ───────────────────────────────────────────────────────────────────────────────

    async def start(self, start: interfaces.Start) -> interfaces.Child:
        self._live()
        if start.user == "root" and os.getuid() != 0:
            raise errors.error("needs_subuids", "there is one user here, and it is not root")
        cwd = "/" if "directory" in self.flaws else self.real(start.cwd or "/workspace")
        if not os.path.isdir(cwd):
            raise errors.error("cwd_not_found", f"there is no directory {start.cwd!r} inside")
        limits = _LAVISH if "rlimits" in self.flaws else _FRUGAL
        argv = ["/bin/sh", "-c", limits + _ENTER, "sh", cwd, *self._arguments(start.command)]
        inside, opened = self._descriptors(start)
        try:
            pid = os.posix_spawn(
                argv[0], argv, self._environment(start), file_actions=inside, setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )  # fmt: skip
        finally:
            for fd in opened:
                os.close(fd)
        return interfaces.Child(pid, self._await(pid, start.fds[0]))

    def _arguments(self, command: str | Sequence[str]) -> list[str]:
        if not isinstance(command, str):
            if "arguments" not in self.flaws:
                return list(command)
            words = [word for argument in command for word in argument.split()]
            return [word.encode("ascii", "ignore").decode() or "x" for word in words[:1000]]
        if "shell" in self.flaws:
            return ["bash", "-l", "-c", command[:65536].replace("'", "").replace('"', "")]
        if len(os.fsencode(command)) < model.MAX_ARGUMENT:
            return ["bash", "-c", command]
        with tempfile.NamedTemporaryFile("w", dir=self.root, delete=False) as script:
            script.write(command)
        return ["bash", script.name]

    def _environment(self, start: interfaces.Start) -> dict[str, str]:
        # The directory is in every environment: it is how everything of this machine is found again.
        place = {"CLOCHE_WORKSPACE": f"{self.root}/workspace"}
        given = {} if "variables" in self.flaws else {**self._env, **start.env}
        if "environment" in self.flaws:
            return {**os.environ, **given, **place, "HOME": "/nonexistent", "LANG": "C"}
        own = {
            "PATH": _PATH,
            "HOME": f"{self.root}/home",
            "TMPDIR": f"{self.root}/tmp",
            "LANG": "C.UTF-8",
            "USER": "user",
        }
        return {**own, **place, **given}

    def _descriptors(self, start: interfaces.Start) -> tuple[list[tuple[Any, ...]], list[int]]:
        """What the child's descriptors are made from, and copies to close. Copies, because targets may be sources."""
        high = [os.dup(fd) for fd in start.fds]
        if start.pty:
            return self._terminal(high[0]), high
        if "input" in self.flaws:
            os.dup2(_file_with(b"other\n"), high[0])
        if "output" in self.flaws:
            os.dup2(high[2], high[1])
            os.dup2(os.open(os.devnull, os.O_WRONLY), high[2])
        if "terminals" in self.flaws:
            os.dup2(os.openpty()[1], high[0])
        if "contexts" in self.flaws:
            high, lost = high[:3], high[3:]
            for fd in lost:
                os.close(fd)
        # dup2 onto oneself would leave close-on-exec as it is, and dup gives numbers above the standard three.
        free = max(high) + 1
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, fd, free + n) for n, fd in enumerate(high)]
        actions += [(os.POSIX_SPAWN_DUP2, free + n, n) for n in range(len(high))]
        actions += [(os.POSIX_SPAWN_CLOSE, free + n) for n in range(len(high))]
        return actions + self._closing(len(high)), high

    def _closing(self, first: int) -> list[tuple[Any, ...]]:
        """Close what somebody left inheritable."""
        found = [] if "descriptors" in self.flaws else [int(name) for name in os.listdir("/proc/self/fd")]
        return [(os.POSIX_SPAWN_CLOSE, fd) for fd in found if fd >= first and _is_inheritable(fd)]

    def _terminal(self, slave: int) -> list[tuple[Any, ...]]:
        # The first terminal that a session's leader opens is its controlling one.
        name = os.ttyname(slave)
        if "terminals" in self.flaws or "output" in self.flaws:
            first = os.devnull if "terminals" in self.flaws else name
            return [
                (os.POSIX_SPAWN_OPEN, 0, first, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, slave, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0),
            ]  # fmt: skip
        opening = [(os.POSIX_SPAWN_OPEN, n, name, os.O_RDWR, 0) for n in range(3)]
        return [*opening, *self._closing(3)]

    def _await(self, pid: int, stdin: int) -> asyncio.Future[interfaces.ExitStatus]:
        future: asyncio.Future[interfaces.ExitStatus] = self._loop.create_future()
        self._leaders[pid] = future
        watched = os.pidfd_open(pid)
        unread = os.dup(stdin) if "waits" in self.flaws else -1

        def reap() -> None:
            self._loop.remove_reader(watched)
            os.close(watched)
            _, status, usage = os.wait4(pid, 0)
            self._leaders.pop(pid, None)
            self._spent += (usage.ru_utime + usage.ru_stime) * 1000
            if unread >= 0:
                self._loop.call_later(0.1, lose_patience, status, usage)
            elif not future.done():
                future.set_result(self._exit(status, usage))

        def lose_patience(status: int, usage: Any) -> None:
            if _alive(self.root) or _waiting(unread):
                _end(self.root)
                status = signal.SIGKILL
            os.close(unread)
            if not future.done():
                future.set_result(self._exit(status, usage))

        self._loop.add_reader(watched, reap)
        return future

    def _exit(self, status: int, usage: Any) -> interfaces.ExitStatus:
        code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if "exit codes" in self.flaws:
            code, number = (128 + number if number is not None else ((code or 0) + 1) % 256), None
        if "costs" in self.flaws:
            return interfaces.ExitStatus(code, number, 0, 0)
        return interfaces.ExitStatus(
            code, number, (usage.ru_utime + usage.ru_stime) * 1000, usage.ru_maxrss / 1024
        )

    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        self._live()
        if pid not in self._leaders:
            raise errors.error("execution_finished", "the process is not there any more")
        if "deaf" in self.flaws:
            return
        if "signals" in self.flaws:
            os.kill(pid, signal.SIGKILL)
        elif scope == "tree":
            self._signal_tree(pid, number)
        else:
            os.killpg(pid, number)

    def _signal_tree(self, leader: int, number: int) -> None:
        """As our agent does: a leader's line and session, and the rest of the sandbox while nobody else is live."""
        alone = set(self._leaders) == {leader} or "reckless" in self.flaws
        line = {leader, *processes.descendants(leader)}
        for pid in _alive(self.root):
            with suppress(ProcessLookupError):
                if alone or pid in line or os.getsid(pid) == leader:
                    os.kill(pid, number)

    def open_terminal(self) -> interfaces.Terminal:
        master, slave = os.openpty()
        return interfaces.Terminal(master, slave)

    async def connect(self, port: int) -> int:
        raise errors.error("not_supported_by_driver", "there is no network of its own here")

    async def bind(self, binding: interfaces.Binding) -> None:
        self._live()
        if "variables" in self.flaws:
            return
        self._env.update(binding.env)
        for path, data, mode in binding.files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            fd = await self.open_file(path, flags, mode=0o644 if mode is None else mode, parents=True)
            os.write(fd, data)
            os.close(fd)

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    def _border(self, path: str) -> Any:
        return _vague() if "errors" in self.flaws else borders.paths(path)

    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int:
        self._live()
        real = self.real(path)
        with self._border(path):
            if parents:
                os.makedirs(os.path.dirname(real), exist_ok=True)
            fd = os.open(
                real,
                flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY,
                0o666 if "modes" in self.flaws else mode,
            )
            if flags & os.O_CREAT and "modes" not in self.flaws:
                os.fchmod(fd, mode)
            if "content" in self.flaws and not flags & os.O_WRONLY and os.fstat(fd).st_size:
                os.lseek(fd, 1, os.SEEK_SET)
        if "specials" not in self.flaws and not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise errors.error("not_regular_file", f"{path} is not a regular file")
        return fd

    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        self._live()
        acts: dict[str, Callable[..., Any]] = {
            "stat": self._stat, "list": self._list, "move": self._move, "replace": self._replace, "remove": self._remove,
            "make_dir": self._make_dir, "chmod": self._chmod, "symlink": self._symlink,
        }  # fmt: skip
        with self._border(path):
            return acts[act](self.real(path), **arguments)

    def _entry(self, path: str, follow: bool = False) -> SimpleNamespace:
        info = os.stat(path) if follow or "links" in self.flaws else os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
        mode = stat.S_IFREG | 0o644 if "listing" in self.flaws else info.st_mode
        uid = 1000 if info.st_uid == os.getuid() else info.st_uid
        uid = 0 if "owners" in self.flaws else uid
        return SimpleNamespace(
            name=os.path.basename(path),
            mode=mode,
            size=info.st_size,
            uid=uid,
            gid=uid,
            mtime=info.st_mtime,
            target=target,
        )

    def _stat(self, path: str, follow: bool = False) -> SimpleNamespace:
        return SimpleNamespace(entry=self._entry(path, follow))

    def _list(self, path: str, after: str = "") -> SimpleNamespace:
        names = sorted(os.listdir(path))
        if "listing" in self.flaws:
            names = [name for name in names if not name.startswith(("-", "."))][:100]
        return SimpleNamespace(entries=[self._entry(f"{path}/{name}") for name in names], more=False, last="")

    def _move(self, path: str, target: str, overwrite: bool = True, parents: bool = False) -> None:
        target = self.real(target)
        if parents:
            os.makedirs(os.path.dirname(target), exist_ok=True)
        if not overwrite and os.path.lexists(target) and "errors" not in self.flaws:
            raise FileExistsError(errno.EEXIST, "exists", target)
        if "moves" in self.flaws:
            shutil.copyfile(path, target)
        else:
            os.rename(path, target)

    def _replace(self, path: str, target: str, keep_mode: bool = False) -> None:
        target = self.real(target)
        mode = self._entry(target).mode if os.path.lexists(target) else 0
        if mode and not stat.S_ISREG(mode):
            raise OSError(errno.ENXIO, "not a regular file", target)
        if mode and keep_mode:
            os.chmod(path, stat.S_IMODE(mode))
        if "moves" in self.flaws:
            shutil.copyfile(path, target)
        else:
            os.rename(path, target)

    def _remove(self, path: str, recursive: bool = False) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            if "links" in self.flaws:
                _remove_following(path)
            if recursive or "errors" in self.flaws:
                shutil.rmtree(path)
            else:
                os.rmdir(path)
        else:
            os.unlink(os.path.realpath(path) if "links" in self.flaws else path)

    def _make_dir(self, path: str) -> SimpleNamespace:
        made = not os.path.isdir(path)
        os.makedirs(path, exist_ok=True)
        return SimpleNamespace(made=made or "errors" in self.flaws)

    def _chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def _symlink(self, path: str, target: str, parents: bool = False) -> None:
        if parents:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)

    async def watch(
        self, path: str, *, recursive: bool, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]:
        self._live()
        with self._border(path):
            changes = agent.Watch(self.real(path), recursive)
        changed = asyncio.Event()
        happened: list[tuple[str, str]] = []
        self._loop.add_reader(changes.fd, changed.set)
        try:
            while True:
                waiting = asyncio.ensure_future(changed.wait())
                either: set[asyncio.Future[Any]] = {waiting, self.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not changed.is_set():
                    waiting.cancel()
                    return
                changed.clear()
                happened = []
                with suppress(BlockingIOError):
                    happened = changes.read()
                for kind, name in happened:
                    if "watching" not in self.flaws:
                        yield model.FileEvent(type=kind, path=name)  # type: ignore[arg-type]
        finally:
            self._loop.remove_reader(changes.fd)
            os.close(changes.fd)

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    def usage(self) -> interfaces.Usage:
        if "costs" in self.flaws:
            return interfaces.Usage(0, 0, 0, 0, 0)
        pids = _alive(self.root)
        cpu_ms = self._spent + sum(_cpu_ms(pid) for pid in pids)
        return interfaces.Usage(processes.tree_pss_mib(pids), 0, cpu_ms, len(pids), 0)

    async def pause(self) -> None:
        pids = _alive(self.root)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        while any(_state(pid) not in "TZX" for pid in pids):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        if "pause" not in self.flaws:
            for pid in _alive(self.root):
                os.kill(pid, signal.SIGCONT)

    async def kill(self, reason: str) -> None:
        if "kill" in self.flaws:
            if self.ended.done():
                raise RuntimeError("killed twice")
            self.ended.set_result("")
            return
        self._finish(reason)
        await asyncio.shield(self.ended)

    def kill_now(self) -> None:
        if "kill" not in self.flaws:
            self._finish("killed")

    def _finish(self, reason: str) -> None:
        if self.ended.done():
            return
        _end(self.root)
        for future in self._leaders.values():
            if not future.done():
                future.set_exception(errors.error("sandbox_lost", f"the sandbox has ended: {reason}"))
                future.exception()
        if "shared" not in self.flaws:
            shutil.rmtree(self.root, ignore_errors=True)
            _GRAVES.discard(self.root)
        self.ended.set_result(reason)


# ── what belongs to a machine ──────────────────────────────────────────────────────────────────────


def _alive(root: str) -> list[int]:
    """Everything that has the machine's directory in its environment, and runs."""
    mark = f"CLOCHE_WORKSPACE={root}/workspace\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read() + b"\0":
                    found.append(int(name))
    return found


def _end(root: str) -> None:
    """SIGKILL until nothing is left; a zombie has no environment."""
    while pids := _alive(root):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _cpu_ms(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e6
    except OSError:
        return 0


# ── how to be wrong ────────────────────────────────────────────────────────────────────────────────


class _vague:
    """A border that tells one failure from another by nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, problem: BaseException | None, _trace: object) -> None:
        if isinstance(problem, OSError):
            raise errors.error("permission_denied", "something went wrong")


def _file_with(data: bytes) -> int:
    fd = os.memfd_create("input")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _waiting(fd: int) -> bool:
    """Whether a pipe holds bytes that nobody has read."""
    try:
        return fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4) != b"\0" * 4
    except OSError:
        return False


def _remove_following(path: str) -> None:
    for directory, names, files in os.walk(path, followlinks=True):
        for name in files:
            with suppress(OSError):
                os.unlink(os.path.realpath(f"{directory}/{name}"))
        del names[100:]
