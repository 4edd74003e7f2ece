"""A driver without a kernel: sandboxes in memory that do what a test scripted, at once and always the same.

For tests of what stands above a driver: an engine, a server, an agent of yours. Nothing is executed; a command is looked
up, what it "wrote" goes to its pipes, and its end is told. Files live in anonymous memory, so descriptors are real.

    driver = FakeDriver({"make test": Script(stdout=b"3 passed\\n"), ("ls", "-l"): Script(exit_code=2, stderr=b"no\\n")})
    box = ...                                       # an engine over [("fake", lambda: driver)]
    (await box.exec("make test")).stdout            # '3 passed\\n'
    driver.machines[0].started                      # every Start, in order
    driver.machines[0].fail("the host lost power")  # the sandbox is lost

A script may be a function of the `Start`, to answer by arguments or environment. One that `runs` goes on until it is
signalled or a test calls `machine.finish(pid)`. What is not scripted ends with 127. To see how a real driver fares use
`cloche.testing.conformance`; fakes are for everything else.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

from cloche import errors, interfaces, model, policy


class Script(NamedTuple):
    """What one command does."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = 0
    signal: int | None = None
    runs: bool = False
    """Goes on after its output, until it is signalled or finished by the test."""


Scripted = Script | Callable[[interfaces.Start], Script]
Commands = Mapping[str | tuple[str, ...], Scripted]
USAGE = interfaces.Usage(memory_mib=2, memory_peak_mib=3, cpu_ms=1, pids=1, oom_kills=0)


class FakeDriver(interfaces.Driver):
    """Makes machines in memory. `refuses` is raised at the start, as by a host that cannot; `fails` at each creation."""

    def __init__(
        self, commands: Commands | None = None, *, name: str = "fake", level: model.Level = "namespaces",
        refuses: errors.ClocheError | None = None, fails: errors.ClocheError | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.level = level
        self.commands: dict[str | tuple[str, ...], Scripted] = dict(commands or {})
        self.refuses = refuses
        self.fails = fails
        self.machines: list[FakeMachine] = []
        self.starts = self.closes = 0
        self.left: list[str] = []
        """What the next sweep finds of dead engines."""

    async def start(self) -> None:
        self.starts += 1
        if self.refuses is not None:
            raise self.refuses

    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> FakeMachine:
        if self.fails is not None:
            raise self.fails
        made = FakeMachine(sandbox_id, self, spec, rules, exposure, image)
        self.machines.append(made)
        return made

    async def restore(
        self,
        kept: str,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> FakeMachine:
        made = await self.create(sandbox_id, spec, rules, exposure, image)
        made.files.load(f"{kept}/files")
        return made

    async def close(self) -> None:
        self.closes += 1
        for machine in self.machines:
            await machine.kill("the driver closed")

    def sweep(self, keep: set[str]) -> list[str]:
        swept, self.left = [name for name in self.left if name not in keep], []
        return swept


class Running(NamedTuple):
    """A command that goes on, and its copies of the descriptors, which keep its pipes open as a process would."""

    start: interfaces.Start
    fds: tuple[int, ...]
    exited: asyncio.Future[interfaces.ExitStatus]


class FakeMachine(interfaces.Machine):
    """One sandbox in memory. What was done to it is in its attributes."""

    def __init__(
        self, sandbox_id: str, driver: FakeDriver, spec: model.SandboxSpec, rules: policy.Merged,
        exposure: interfaces.Exposure | None, image: interfaces.Image | None = None,
    ) -> None:  # fmt: skip
        self.id = sandbox_id
        self.spec, self.rules, self.exposure, self.image = spec, rules, exposure, image
        self.isolation = model.Isolation(
            level=driver.level, driver=driver.name, missing=("there is no sandbox at all",)
        )
        self.limits = _limits(spec.resources)
        self.ended = asyncio.get_running_loop().create_future()
        self.on_denial = lambda _pid, _denial: None
        self.commands = driver.commands
        self.started: list[interfaces.Start] = []
        self.signals: list[tuple[int, int, str]] = []
        self.running: dict[int, Running] = {}
        self.files = Files()
        self.environment = dict(spec.env)
        self.ports: dict[int, list[socket.socket]] = {}
        """Ports that something listens on, and the far ends of the connections to each."""
        self.bindings: list[interfaces.Binding] = []
        self.used = USAGE
        """What `usage` answers."""
        self.paused = False
        self._pid = 1
        self._watchers: list[asyncio.Queue[model.FileEvent]] = []

    # ── for the test ────────────────────────────────────────────────────────────────────────────

    def fail(self, reason: str) -> None:
        """End behind the engine's back, as if the host had taken it away."""
        self._end(reason)

    def finish(self, pid: int, script: Script | None = None) -> None:
        """Let a running command write and end."""
        script = script or Script()
        running = self.running.pop(pid)
        _write(running.fds, script)
        _close(running.fds)
        running.exited.set_result(_status(script))

    def write(self, pid: int, data: bytes) -> None:
        """Let a running command write to its output."""
        _write(self.running[pid].fds, Script(stdout=data))

    def happened(self, event: model.FileEvent) -> None:
        """Tell the watchers of a change."""
        for queue in self._watchers:
            queue.put_nowait(event)

    # ── processes ───────────────────────────────────────────────────────────────────────────────

    def _live(self) -> None:
        if self.ended.done():
            raise errors.error("sandbox_lost", f"the sandbox has ended: {self.ended.result()}")

    async def start(self, start: interfaces.Start) -> interfaces.Child:
        self._live()
        self.started.append(start)
        self._pid += 1
        exited: asyncio.Future[interfaces.ExitStatus] = asyncio.get_running_loop().create_future()
        script = self._script(start)
        _write(start.fds, script)
        if script.runs:
            self.running[self._pid] = Running(start, tuple(os.dup(fd) for fd in start.fds), exited)
        else:
            exited.set_result(_status(script))
        return interfaces.Child(self._pid, exited)

    def _script(self, start: interfaces.Start) -> Script:
        command = start.command if isinstance(start.command, str) else tuple(start.command)
        found = self.commands.get(command)
        if found is None:
            return Script(exit_code=127, stderr=f"fake: {command!r} is not scripted\n".encode())
        return found if isinstance(found, Script) else found(start)

    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        self._live()
        if pid not in self.running:
            raise errors.error("execution_finished", "the process is not there any more")
        self.signals.append((pid, number, scope))
        self.finish(pid, Script(exit_code=None, signal=number))

    def open_terminal(self) -> interfaces.Terminal:
        self._live()
        return interfaces.Terminal(*os.openpty())

    async def connect(self, port: int) -> int:
        self._live()
        if port not in self.ports:
            raise errors.error("port_closed", f"nothing listens on port {port} inside", port=port)
        here, there = socket.socketpair()
        self.ports[port].append(there)
        return here.detach()

    async def listening(self) -> list[tuple[str, int]]:
        self._live()
        return [("127.0.0.1", port) for port in sorted(self.ports)]

    async def bind(self, binding: interfaces.Binding) -> None:
        self._live()
        self.bindings.append(binding)
        if binding.resources is not None:
            self.limits = _limits(binding.resources)
        for path, data, mode in binding.files:
            fd = await self.open_file(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                mode=0o644 if mode is None else mode,
                parents=True,
            )
            os.write(fd, data)
            os.close(fd)
        self.environment.update(binding.env)

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int:
        self._live()
        with _told(path):
            return self.files.open(_absolute(path), flags, mode, parents)

    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        self._live()
        with _told(path):
            return getattr(self.files, act)(_absolute(path), **arguments)

    async def watch(
        self, path: str, *, recursive: bool, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]:
        self._live()
        queue: asyncio.Queue[model.FileEvent] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            while True:
                coming = asyncio.ensure_future(queue.get())
                either: set[asyncio.Future[Any]] = {coming, self.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    return
                yield coming.result()
        finally:
            self._watchers.remove(queue)

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    def usage(self) -> interfaces.Usage:
        return self.used

    async def pause(self) -> None:
        self._live()
        self.paused = True

    async def resume(self) -> None:
        self._live()
        self.paused = False

    async def save(self, directory: str) -> interfaces.Saved:
        self._live()
        if not self.paused:
            raise AssertionError("a machine is saved while it stands still")
        return self.files.save(f"{directory}/files")

    async def kill(self, reason: str) -> None:
        self._end(reason)

    def kill_now(self) -> None:
        self._end("killed")

    def _end(self, reason: str) -> None:
        if self.ended.done():
            return
        for running in self.running.values():
            _close(running.fds)
            running.exited.set_exception(errors.error("sandbox_lost", f"the sandbox has ended: {reason}"))
            running.exited.exception()
        self.running.clear()
        self.files.close()
        self.ended.set_result(reason)


# ── files in memory ────────────────────────────────────────────────────────────────────────────────


class Files:
    """A tree of regular files and directories. A file is a memfd, so its descriptors are those of a regular file."""

    def __init__(self) -> None:
        self.directories = {"/", "/workspace", "/home", "/home/user", "/tmp"}
        self._files: dict[str, int] = {}

    def paths(self) -> Iterable[str]:
        return sorted(self._files)

    def read(self, path: str) -> bytes:
        fd = self._files[path]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def open(self, path: str, flags: int, mode: int, parents: bool) -> int:
        if path in self.directories:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path not in self._files:
            self._create(path, flags, mode, parents)
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        # A new description of the same memory, with an offset of its own.
        return os.open(f"/proc/self/fd/{self._files[path]}", flags & ~(os.O_CREAT | os.O_EXCL) | os.O_CLOEXEC)

    def _create(self, path: str, flags: int, mode: int, parents: bool) -> None:
        if not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if parents:
            self.make_dir(os.path.dirname(path))
        self._check_parent(path)
        self._files[path] = os.memfd_create(os.path.basename(path)[:200], os.MFD_CLOEXEC)
        os.fchmod(self._files[path], mode)

    def _check_parent(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent not in self.directories:
            code = errno.ENOTDIR if parent in self._files else errno.ENOENT
            raise OSError(code, os.strerror(code))

    def stat(self, path: str, follow: bool = False) -> SimpleNamespace:
        return SimpleNamespace(entry=self._entry(path))

    def _entry(self, path: str) -> SimpleNamespace:
        if path in self.directories:
            mode, size, modified = stat.S_IFDIR | 0o755, 0, 0.0
        elif path in self._files:
            info = os.fstat(self._files[path])
            mode, size, modified = info.st_mode, info.st_size, info.st_mtime
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        name = os.path.basename(path) or "/"
        return SimpleNamespace(
            name=name, mode=mode, size=size, uid=1000, gid=1000, mtime=modified, target=None
        )

    def list(self, path: str, after: str = "") -> SimpleNamespace:
        if path not in self.directories:
            code = errno.ENOTDIR if path in self._files else errno.ENOENT
            raise OSError(code, os.strerror(code))
        inside = sorted(p for p in {*self.directories, *self._files} - {"/"} if os.path.dirname(p) == path)
        return SimpleNamespace(
            entries=[self._entry(p) for p in inside if os.path.basename(p) > after], more=False, last=""
        )

    def move(self, path: str, target: str, overwrite: bool = True, parents: bool = False) -> SimpleNamespace:
        target = _absolute(target)
        self._entry(path)
        if not overwrite and (target in self._files or target in self.directories):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if parents:
            self.make_dir(os.path.dirname(target))
        self._check_parent(target)
        for old in [p for p in (*self.directories, *self._files) if p == path or p.startswith(path + "/")]:
            self._rename(old, target + old[len(path) :])
        return SimpleNamespace()

    def _rename(self, old: str, new: str) -> None:
        if old in self.directories:
            self.directories.remove(old)
            self.directories.add(new)
            return
        if new in self._files:
            os.close(self._files[new])
        self._files[new] = self._files.pop(old)

    def replace(self, path: str, target: str, keep_mode: bool = False) -> SimpleNamespace:
        target = _absolute(target)
        if target in self.directories:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        if keep_mode and target in self._files:
            os.fchmod(self._files[path], stat.S_IMODE(os.fstat(self._files[target]).st_mode))
        return self.move(path, target)

    def remove(self, path: str, recursive: bool = False) -> SimpleNamespace:
        self._entry(path)
        below = [p for p in (*self.directories, *self._files) if p.startswith(path + "/")]
        if below and not recursive:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        for gone in (path, *below):
            self.directories.discard(gone)
            if gone in self._files:
                os.close(self._files.pop(gone))
        return SimpleNamespace()

    def make_dir(self, path: str) -> SimpleNamespace:
        made = path not in self.directories
        while path not in self.directories:
            if path in self._files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self.directories.add(path)
            path = os.path.dirname(path)
        return SimpleNamespace(made=made)

    def chmod(self, path: str, mode: int) -> SimpleNamespace:
        self._entry(path)
        if path in self._files:
            os.fchmod(self._files[path], mode)
        return SimpleNamespace()

    def symlink(self, path: str, target: str, parents: bool = False) -> SimpleNamespace:
        raise errors.error("not_supported_by_driver", "a fake has no symbolic links")

    def save(self, path: str) -> interfaces.Saved:
        body = {name: base64.b64encode(self.read(name)).decode() for name in self._files}
        with open(path, "x") as file:
            json.dump({"directories": sorted(self.directories), "files": body}, file)
        return interfaces.Saved(sum(os.fstat(fd).st_size for fd in self._files.values()), len(self._files))

    def load(self, path: str) -> None:
        with open(path) as file:
            said = json.load(file)
        self.directories = set(said["directories"])
        for name, body in said["files"].items():
            fd = self.open(name, os.O_WRONLY | os.O_CREAT, 0o644, False)
            os.write(fd, base64.b64decode(body))
            os.close(fd)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


_CODES = {
    errno.ENOENT: "file_not_found",
    errno.EEXIST: "file_exists",
    errno.ENOTDIR: "not_directory",
    errno.EISDIR: "is_directory",
    errno.ENOTEMPTY: "directory_not_empty",
}


class _told:
    """The error of a path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, problem: BaseException | None, _trace: object) -> None:
        if isinstance(problem, OSError):
            code = _CODES.get(problem.errno or 0, "internal_error")
            raise errors.error(code, f"{self._path}: {problem.strerror}") from None


def _limits(resources: model.Resources) -> dict[str, model.Limit]:
    return {
        name: model.Limit(value=getattr(resources, name), enforcement="enforced", by="a fake")
        for name in model.Resources.__struct_fields__
    }


def _absolute(path: str) -> str:
    return os.path.normpath(path if path.startswith("/") else f"/workspace/{path}")


def _write(fds: Iterable[int], script: Script) -> None:
    """Small writes, as a test's are: they fit a pipe. Whoever has gone away does not get them."""
    targets = list(fds)
    output, errors_to = (targets[1], targets[2]) if len(targets) > 2 else (targets[0], targets[0])
    with suppress(BrokenPipeError):
        os.write(output, script.stdout)
    with suppress(BrokenPipeError):
        os.write(errors_to, script.stderr)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _status(script: Script) -> interfaces.ExitStatus:
    code = script.exit_code if script.signal is None else None
    return interfaces.ExitStatus(code, script.signal, cpu_ms=1, max_rss_mib=1)


KILLED = Script(exit_code=None, signal=signal.SIGKILL)
