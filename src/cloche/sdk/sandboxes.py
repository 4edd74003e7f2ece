"""The asynchronous handles. `sync.py` is generated from this file; keep methods thin and annotated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any, Literal, TypeVar, overload

import msgspec

from cloche import errors, interfaces, model
from cloche.policy import Policy
from cloche.sdk import connecting, portal

T = TypeVar("T")


class Handle:
    """What every handle holds: the backend, the portal it lives in, and the sandbox's id."""

    def __init__(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str) -> None:
        self._backend = backend
        self._home = home
        self._id = sandbox_id

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return await portal.bridge(work, self._home)

    def _each(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        return portal.bridge_iterator(source, self._home)


class AsyncProcess(Handle):
    """A command that was started: its streams, its terminal, its end."""

    def __init__(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, execution: model.ExecutionInfo) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = execution

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.id} pid={self._info.pid}>"

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def pid(self) -> int:
        """The leader's pid inside the sandbox."""
        return self._info.pid

    async def write(self, data: bytes | str) -> None:
        """Write to the command's input, or type on its terminal."""
        raw = data.encode() if isinstance(data, str) else data
        await self._do(self._backend.write_stdin(self._id, self.id, raw))

    async def close_stdin(self) -> None:
        """End the command's input."""
        await self._do(self._backend.write_stdin(self._id, self.id, b"", True))

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal; the command gets SIGWINCH."""
        await self._do(self._backend.resize(self._id, self.id, columns, rows))

    async def signal(self, number: int) -> None:
        """Signal the command's process group."""
        await self._do(self._backend.signal(self._id, self.id, number))

    async def kill(self) -> None:
        """End the command and everything it started."""
        try:
            await self._do(self._backend.signal(self._id, self.id, 9, True))
        except errors.Conflict:
            return  # it had ended by itself

    async def wait(self) -> model.ExecResult:
        """The result, when the command has ended."""
        return await self._do(self._backend.wait(self._id, self.id))

    async def stream(self, after: int = 0) -> AsyncIterator[model.StreamEvent]:
        """What the command writes, from cursor `after` on; may be called again to re-attach."""
        async for event in self._each(self._backend.attach(self._id, self.id, after)):
            yield event


class AsyncProcesses(Handle):
    """The commands of a sandbox."""

    async def list(self) -> list[model.ExecutionInfo]:
        """Live ones and those that ended a while ago."""
        return await self._do(self._backend.executions(self._id))

    async def get(self, execution: str) -> AsyncProcess:
        """A handle of a command that was started before, perhaps by another program."""
        for info in await self._do(self._backend.executions(self._id)):
            if info.id == execution:
                return AsyncProcess(self._backend, self._home, self._id, info)
        raise errors.error("execution_not_found", f"there is no execution {execution!r}")


class AsyncFiles(Handle):
    """The files of a sandbox, touched as its user. Relative paths mean the working directory."""

    @overload
    async def read(self, path: str, *, format: Literal["text"] = "text", user: str = "user") -> str: ...

    @overload
    async def read(self, path: str, *, format: Literal["bytes"], user: str = "user") -> bytes: ...

    async def read(self, path: str, *, format: Literal["text", "bytes"] = "text", user: str = "user") -> str | bytes:
        """A file's whole content; `not_text` if it is read as text and is not UTF-8."""
        data = await self._do(self._backend.read_file(self._id, path, user))
        if format == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise errors.error("not_text", f"{path} is not UTF-8 text", hint='read it with format="bytes"') from None

    async def read_stream(self, path: str, *, user: str = "user") -> AsyncIterator[bytes]:
        """A file's content in pieces, for files of any size."""
        async for data in self._each(self._backend.read_file_stream(self._id, path, user)):
            yield data

    async def write(self, path: str, data: str | bytes, *, mode: int | None = None, user: str = "user") -> model.FileInfo:
        """Replace a file, atomically, making missing directories."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        return await self._do(self._backend.write_file(self._id, path, raw, user, mode))

    async def list(self, path: str = ".", *, depth: int = 1, user: str = "user") -> list[model.FileInfo]:
        """A directory's entries, by name."""
        return await self._do(self._backend.list_files(self._id, path, depth, user))

    async def stat(self, path: str, *, user: str = "user") -> model.FileInfo:
        """One entry; a symlink is not followed."""
        return await self._do(self._backend.stat_file(self._id, path, user))

    async def exists(self, path: str, *, user: str = "user") -> bool:
        try:
            await self._do(self._backend.stat_file(self._id, path, user))
        except errors.NotFound as problem:
            if problem.code != "file_not_found":
                raise
            return False
        return True

    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "user") -> None:
        await self._do(self._backend.move_file(self._id, path, target, overwrite, user))

    async def remove(self, path: str, *, recursive: bool = False, user: str = "user") -> None:
        await self._do(self._backend.remove_file(self._id, path, recursive, user))

    async def make_dir(self, path: str, *, user: str = "user") -> bool:
        """Make a directory and its parents; False if it was there."""
        return await self._do(self._backend.make_dir(self._id, path, user))

    async def watch(self, path: str = ".", *, recursive: bool = False, user: str = "user") -> AsyncIterator[model.FileEvent]:
        """Changes beneath a directory, as they happen."""
        async for event in self._each(self._backend.watch_files(self._id, path, recursive, user)):
            yield event

    async def upload(self, path: str, archive: bytes, *, user: str = "user") -> int:
        """Unpack a tar below `path`; the number of files."""
        return await self._do(self._backend.upload_tree(self._id, path, archive, user))

    async def download(self, path: str = ".", *, user: str = "user") -> bytes:
        """A directory as a tar."""
        return await self._do(self._backend.download_tree(self._id, path, user))


class AsyncContext(Handle):
    """A stateful interpreter inside the sandbox."""

    def __init__(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, info: model.ContextInfo) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = info

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def language(self) -> str:
        return self._info.language

    async def run(self, code: str, *, env: dict[str, str] | None = None, timeout_s: float | None = None) -> model.CodeResult:
        """Run code; its own error is part of the result."""
        return await self._do(
            self._backend.run_code(self._id, code, self.id, self.language, env, timeout_s)
        )

    async def interrupt(self) -> None:
        """Interrupt what runs; the context and its state stay."""
        await self._do(self._backend.interrupt_context(self._id, self.id))

    async def restart(self) -> None:
        """A fresh interpreter under the same id; the state is gone."""
        await self._do(self._backend.restart_context(self._id, self.id))

    async def delete(self) -> None:
        await self._do(self._backend.delete_context(self._id, self.id))


class AsyncContexts(Handle):
    """The code contexts of a sandbox."""

    async def create(self, language: str = "python", *, cwd: str | None = None) -> AsyncContext:
        info = await self._do(self._backend.create_context(self._id, language, cwd))
        return AsyncContext(self._backend, self._home, self._id, info)

    async def list(self) -> list[model.ContextInfo]:
        return await self._do(self._backend.contexts(self._id))


class AsyncSandbox(Handle):
    """One sandbox. `await AsyncSandbox.create(...)`, or `async with AsyncSandbox(...) as box`."""

    def __init__(
        self,
        *,
        profile: str = "moderate",
        template: str = "base",
        env: dict[str, str] | None = None,
        memory_mib: int = 512,
        cpus: float = 1,
        pids: int = 256,
        disk_mib: int = 1024,
        timeout_s: float | None = 300,
        idle_timeout_s: float | None = None,
        workspace: str | None = None,
        overlay: bool = False,
        name: str | None = None,
        labels: dict[str, str] | None = None,
        policy: Policy | None = None,
        minimum_isolation: model.Level = "namespaces",
        driver: str | None = None,
        stay: bool = False,
        server: str | None = None,
    ) -> None:
        self._spec = model.SandboxSpec(
            name=name, template=template, profile=profile, env=env or {},
            resources=model.Resources(memory_mib=memory_mib, cpus=cpus, pids=pids, disk_mib=disk_mib),
            timeout_s=timeout_s, idle_timeout_s=idle_timeout_s, workspace=workspace, overlay=overlay,
            minimum_isolation=minimum_isolation, driver=driver, labels=labels or {}, stay=stay,
            policy=msgspec.to_builtins(policy) if policy is not None else {},
        )  # fmt: skip
        self._server = server

    @classmethod
    async def create(cls, **arguments: Any) -> AsyncSandbox:
        """A running sandbox; the arguments are the constructor's."""
        return await cls(**arguments).open()

    @classmethod
    async def get(cls, sandbox: str, *, server: str | None = None) -> AsyncSandbox:
        """A handle of a sandbox that exists, by id or name."""
        home = portal.get()
        backend = await portal.bridge(connecting.connect(server), home)
        info = await portal.bridge(backend.info(sandbox), home)
        handle = cls.__new__(cls)
        handle._adopt(backend, home, info.id)
        return handle

    @classmethod
    async def list(cls, *, server: str | None = None) -> list[model.SandboxInfo]:
        """The live sandboxes of the backend."""
        home = portal.get()
        backend = await portal.bridge(connecting.connect(server), home)
        return await portal.bridge(backend.list(), home)

    async def open(self) -> AsyncSandbox:
        """Create the sandbox that the constructor described."""
        home = portal.get()
        self._adopt(*await portal.bridge(_create(self._spec, self._server), home))
        return self

    def _adopt(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str) -> None:
        Handle.__init__(self, backend, home, sandbox_id)
        self.files = AsyncFiles(backend, home, sandbox_id)
        self.processes = AsyncProcesses(backend, home, sandbox_id)
        self.contexts = AsyncContexts(backend, home, sandbox_id)

    async def __aenter__(self) -> AsyncSandbox:
        if not hasattr(self, "_id"):
            await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.delete()
        except (errors.NotFound, errors.SandboxLost):
            return  # it ended by itself

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, '_id', 'not created')}>"

    @property
    def id(self) -> str:
        return self._id

    async def exec(
        self,
        command: str | list[str],
        *,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        background_after_s: float | None = None,
        user: str = "user",
        merge: bool = False,
        check: bool = False,
        output_limit: int | None = None,
    ) -> model.ExecResult:
        """Run a command to its end: a string is a shell line, a list an argument vector."""
        request = model.ExecRequest(
            command=command, stdin=stdin.encode() if isinstance(stdin, str) else stdin, cwd=cwd, env=env or {},
            timeout_s=timeout_s, background_after_s=background_after_s, user=user, merge=merge, output_limit=output_limit,
        )  # fmt: skip
        result = await self._do(self._backend.exec(self._id, request))
        if check and not result.ok:
            raise _command_failed(command, result)
        return result

    async def exec_stream(
        self,
        command: str | list[str],
        *,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str = "user",
        merge: bool = False,
    ) -> AsyncIterator[model.StreamEvent]:
        """Run a command and yield what it writes as it writes it; the last event is `Exited`."""
        request = model.ExecRequest(
            command=command, stdin=stdin.encode() if isinstance(stdin, str) else stdin, cwd=cwd, env=env or {},
            timeout_s=timeout_s, user=user, merge=merge,
        )  # fmt: skip
        info = await self._do(self._backend.start(self._id, request))
        async for event in self._each(self._backend.attach(self._id, info.id)):
            yield event

    async def start(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str = "user",
        merge: bool = False,
        pty: bool | tuple[int, int] = False,
    ) -> AsyncProcess:
        """Start a command with open input; with `pty`, on a terminal of 80x24 or the size given."""
        size = (80, 24) if pty is True else (pty or None)
        request = model.ExecRequest(
            command=command, open_stdin=True, cwd=cwd, env=env or {}, timeout_s=timeout_s, user=user, merge=merge, pty=size
        )
        info = await self._do(self._backend.start(self._id, request))
        return AsyncProcess(self._backend, self._home, self._id, info)

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> model.CodeResult:
        """Run code in the sandbox's default context, which keeps its state."""
        return await self._do(self._backend.run_code(self._id, code, None, language, env, timeout_s))

    async def info(self) -> model.SandboxInfo:
        return await self._do(self._backend.info(self._id))

    async def usage(self) -> model.SandboxUsage:
        return await self._do(self._backend.usage(self._id))

    async def extend(self, timeout_s: float | None) -> model.SandboxInfo:
        """Let it live `timeout_s` from now."""
        return await self._do(self._backend.extend(self._id, timeout_s))

    async def suspend(self, mode: Literal["pause"] = "pause") -> model.SandboxInfo:
        """Stop everything where it stands; whatever needs the sandbox wakes it."""
        return await self._do(self._backend.suspend(self._id))

    async def resume(self) -> model.SandboxInfo:
        return await self._do(self._backend.resume(self._id))

    async def events(self, after: int = 0) -> list[dict[str, Any]]:
        """What happened to it, from cursor `after` on."""
        return await self._do(self._backend.events(after, self._id))

    async def delete(self) -> None:
        """End it and everything in it."""
        await self._do(self._backend.delete(self._id))


async def _create(spec: model.SandboxSpec, server: str | None) -> tuple[interfaces.Backend, portal.Portal, str]:
    spec.check()
    backend = await connecting.connect(server)
    return backend, portal.get(), (await backend.create(spec)).id


def _command_failed(command: str | list[str], result: model.ExecResult) -> errors.CommandFailed:
    shown = command if isinstance(command, str) else " ".join(command)
    made = errors.CommandFailed(
        f"{shown[:200]!r} ended with {result.shell_code}",
        hint=result.stderr[-500:] or None,
        details={"exit_code": result.exit_code, "signal": result.signal, "timed_out": result.timed_out},
    )
    made.result = result
    return made


async def run(command: str | list[str], *, timeout_s: float | None = None, **sandbox: Any) -> model.ExecResult:
    """One command in a sandbox of its own; the other arguments are `AsyncSandbox`'s."""
    async with AsyncSandbox(**sandbox) as box:
        return await box.exec(command, timeout_s=timeout_s)
