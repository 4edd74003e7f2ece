"""The asynchronous handles: thin, annotated, and the only ones written by hand.

A handle is a backend, the portal it lives in and an id; every method is one call of the backend, made in the portal's
loop. `sync.py` is generated from this file (`scripts/generate_sync`): keep a method's work in the method, a sub-handle a
property, and `list` last in its class, because after it the name means the method in annotations.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from cloche import errors, interfaces, model, rpc, settings
from cloche.policy import Merged, Mode, Policy
from cloche.sdk import asking, connecting, portal

if TYPE_CHECKING:
    from cloche import stock
    from cloche.sdk.forwarding import Forwarding

T = TypeVar("T")


Progress = Callable[[model.ImageProgress], object]
"""Called with every word about an image that is being made."""

Asked = Callable[[model.Question], "model.Answer | Awaitable[model.Answer]"]
"""Decides about a connection that no rule decides: "once", "sandbox", "always" or "deny"."""

Timeout = float | None | Literal["default"]
"""Seconds, None for without end, or what the settings say."""


class Identified(Protocol):
    """A handle that stands for its id."""

    @property
    def id(self) -> str: ...


class Shape(TypedDict, total=False):
    """The constructor's arguments but `timeout_s`, for whoever passes them on."""

    profile: str | None
    mode: str | None
    template: str | None
    image: str | None
    env: dict[str, str] | None
    memory_mib: int | None
    cpus: float | None
    pids: int | None
    disk_mib: int | None
    idle_timeout_s: Timeout
    workspace: str | None
    overlay: bool
    name: str | None
    labels: dict[str, str] | None
    policy: Policy | None
    network: Mode | None
    allow: list[str] | None
    deny: list[str] | None
    resolve: dict[str, str] | None
    secrets: list[str] | None
    ask: Asked | None
    minimum_isolation: model.Level | None
    driver: str | None
    stay: bool
    snapshot: str | Identified | None
    pause_after_s: float | None
    archive_after_s: float | None
    at_timeout: model.AtTimeout | None
    volumes: dict[str, str | model.Mount] | None
    server: str | None


class Options(Shape, total=False):
    """The constructor's arguments."""

    timeout_s: Timeout


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

    def _shown(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._shown()}>"


class AsyncProcess(Handle):
    """A command that was started: its streams, its terminal, its end."""

    def __init__(
        self,
        backend: interfaces.Backend,
        home: portal.Portal,
        sandbox_id: str,
        execution: model.ExecutionInfo,
    ) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = execution

    def _shown(self) -> str:
        return f"{self._info.id} pid={self._info.pid}"

    @property
    def id(self) -> str:
        """The execution's id, good for `processes.get` from anywhere."""
        return self._info.id

    @property
    def pid(self) -> int:
        """The leader's pid inside the sandbox."""
        return self._info.pid

    async def write(self, data: bytes | str) -> None:
        """Write to the command's input, or type on its terminal."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        await self._do(self._backend.write_stdin(self._id, self.id, raw))

    async def close_stdin(self) -> None:
        """End the command's input; on a terminal, type the end-of-file character."""
        await self._do(self._backend.write_stdin(self._id, self.id, b"", True))

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal; the command gets SIGWINCH."""
        await self._do(self._backend.resize(self._id, self.id, columns, rows))

    async def signal(self, number: int) -> None:
        """Signal the command's process group."""
        await self._do(self._backend.signal(self._id, self.id, number))

    async def kill(self) -> None:
        """End the command and everything it started; harmless if it has ended by itself."""
        try:
            await self._do(self._backend.signal(self._id, self.id, 9, True))
        except errors.Conflict:
            return

    async def wait(self) -> model.ExecResult:
        """The result, when the command has ended."""
        return await self._do(self._backend.wait(self._id, self.id))

    async def stream(self, after: int = 0) -> AsyncIterator[model.StreamEvent]:
        """What the command writes, from cursor `after` on; the last event is `Exited`.

        An event's cursor is its `seq`: to re-attach, call again with the last one seen plus 1. Leaving early stops
        nothing; the command goes on.
        """
        async for event in self._each(self._backend.attach(self._id, self.id, after)):
            yield event


class AsyncProcesses(Handle):
    """The commands of a sandbox."""

    async def get(self, execution: str) -> AsyncProcess:
        """A handle of a command that was started before, perhaps by another program, or went to the background.

        `execution` is `AsyncProcess.id`, or `ExecResult.process` of an `exec` that met its `background_after_s`.
        """
        for info in await self._do(self._backend.executions(self._id)):
            if info.id == execution:
                return AsyncProcess(self._backend, self._home, self._id, info)
        raise errors.error(
            "execution_not_found",
            f"sandbox {self._id} has no execution {execution!r}",
            hint="list them; finished ones are kept for a while only",
        )

    async def list(self) -> list[model.ExecutionInfo]:
        """Live ones and those that ended a while ago, the oldest first."""
        return await self._do(self._backend.executions(self._id))


class AsyncFiles(Handle):
    """The files of a sandbox, touched as its user. Relative paths mean the working directory."""

    @overload
    async def read(self, path: str, *, format: Literal["text"] = "text", user: str = "user") -> str: ...

    @overload
    async def read(self, path: str, *, format: Literal["bytes"], user: str = "user") -> bytes: ...

    @overload
    async def read(
        self, path: str, *, format: Literal["stream"], user: str = "user"
    ) -> AsyncIterator[bytes]: ...

    async def read(
        self, path: str, *, format: Literal["text", "bytes", "stream"] = "text", user: str = "user"
    ) -> str | bytes | AsyncIterator[bytes]:
        """A file's content: as text (`not_text` if it is not UTF-8), as bytes, or in pieces for a file of any size."""
        if format == "stream":
            return self._each(self._backend.read_file_stream(self._id, path, user))
        if format not in ("text", "bytes"):
            raise errors.error(
                "argument_invalid", f"the format is {format!r}", hint="use 'text', 'bytes' or 'stream'"
            )
        data = await self._do(self._backend.read_file(self._id, path, user))
        if format == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise errors.error(
                "not_text", f"{path} is not UTF-8 text", hint='read it with format="bytes"'
            ) from None

    async def write(
        self, path: str, data: str | bytes, *, mode: int | None = None, user: str = "user"
    ) -> model.FileInfo:
        """Replace a file, atomically, making missing directories. Its mode stays, unless one is given."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        return await self._do(self._backend.write_file(self._id, path, raw, user, mode))

    async def stat(self, path: str, *, user: str = "user") -> model.FileInfo:
        """One entry; a symlink is not followed."""
        return await self._do(self._backend.stat_file(self._id, path, user))

    async def exists(self, path: str, *, user: str = "user") -> bool:
        """Whether there is such an entry, be it a dangling symlink."""
        try:
            await self._do(self._backend.stat_file(self._id, path, user))
        except errors.NotFound as problem:
            if problem.code != "file_not_found":
                raise
            return False
        return True

    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "user") -> None:
        """Rename a file or directory, making missing directories above the target."""
        await self._do(self._backend.move_file(self._id, path, target, overwrite, user))

    async def remove(self, path: str, *, recursive: bool = False, user: str = "user") -> None:
        """Remove a file, an empty directory or, with `recursive`, a tree."""
        await self._do(self._backend.remove_file(self._id, path, recursive, user))

    async def make_dir(self, path: str, *, user: str = "user") -> bool:
        """Make a directory and its parents; False if it was there."""
        return await self._do(self._backend.make_dir(self._id, path, user))

    async def watch(
        self, path: str = ".", *, recursive: bool = False, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]:
        """Changes beneath a directory, as they happen; ends with the sandbox, or when you leave."""
        async for event in self._each(self._backend.watch_files(self._id, path, recursive, user)):
            yield event

    async def upload(self, path: str, archive: bytes, *, user: str = "user") -> int:
        """Unpack a tar below `path`; the number of files."""
        return await self._do(self._backend.upload_tree(self._id, path, archive, user))

    async def download(self, path: str = ".", *, user: str = "user") -> bytes:
        """A directory (or one file) as a tar. Its names come from inside: unpack it with `filter="data"`."""
        return await self._do(self._backend.download_tree(self._id, path, user))

    async def list(self, path: str = ".", *, depth: int = 1, user: str = "user") -> list[model.FileInfo]:
        """A directory's entries, by name; with `depth`, those of so many levels."""
        return await self._do(self._backend.list_files(self._id, path, depth, user))


class AsyncContext(Handle):
    """A stateful interpreter inside the sandbox."""

    def __init__(
        self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, info: model.ContextInfo
    ) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = info

    def _shown(self) -> str:
        return f"{self._info.id} {self._info.language}"

    @property
    def id(self) -> str:
        """The context's id."""
        return self._info.id

    @property
    def language(self) -> str:
        """`python` or `bash`."""
        return self._info.language

    async def run(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_result: Callable[[dict[str, Any]], Any] | None = None,
    ) -> model.CodeResult:
        """Run code; its own error is part of the result. Runs of one context queue up.

        The callbacks are told what the code prints and shows, as it does. They run in a thread of their own, an
        asynchronous handle's in its loop; one that raises interrupts the code.
        """
        if on_stdout is None and on_stderr is None and on_result is None:
            return await self._do(
                self._backend.run_code(self._id, code, self.id, self.language, env, timeout_s)
            )
        followed = self.run_stream(code, env=env, timeout_s=timeout_s)
        return await _told(followed, self._home, on_stdout, on_stderr, on_result)

    async def run_stream(
        self, code: str, *, env: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[model.CodeEvent]:
        """Run code and yield what it prints and shows as it does; the last event is `CodeEnded`. Leaving early interrupts it."""
        async for event in self._each(
            self._backend.run_code_stream(self._id, code, self.id, self.language, env, timeout_s)
        ):
            yield event

    async def interrupt(self) -> None:
        """Interrupt what runs; the context and its state stay."""
        await self._do(self._backend.interrupt_context(self._id, self.id))

    async def restart(self) -> None:
        """A fresh interpreter under the same id; the state is gone."""
        await self._do(self._backend.restart_context(self._id, self.id))

    async def fork(self, count: int = 1) -> list[AsyncContext]:
        """Copies of it with everything it has in memory, in the same sandbox; all of them, or none.

        A context with more than one thread is refused with `context_has_threads`.
        """
        made = await self._do(self._backend.fork_context(self._id, self.id, count))
        return [AsyncContext(self._backend, self._home, self._id, info) for info in made]

    async def delete(self) -> None:
        """End the interpreter."""
        await self._do(self._backend.delete_context(self._id, self.id))


class AsyncContexts(Handle):
    """The code contexts of a sandbox."""

    async def create(self, language: str = "python", *, cwd: str | None = None) -> AsyncContext:
        """A fresh interpreter (`python` or `bash`), beside any others."""
        info = await self._do(self._backend.create_context(self._id, language, cwd))
        return AsyncContext(self._backend, self._home, self._id, info)

    async def list(self) -> list[model.ContextInfo]:
        """The live contexts, the default ones included."""
        return await self._do(self._backend.contexts(self._id))


class AsyncSandboxPolicy(Handle):
    """What a sandbox may touch."""

    async def get(self) -> Merged:
        """The rules that hold now."""
        return await self._do(self._backend.get_policy(self._id))

    async def update(
        self,
        *,
        network: Mode | None = None,
        allow: list[str] | None = None,
        deny: list[str] | None = None,
        resolve: dict[str, str] | None = None,
    ) -> Merged:
        """Replace network rules of the live sandbox: each list that is given, as a whole; the others stay.

        When this returns the new rules hold, and connections that they refuse have ended.
        """
        said = _network(network, allow=allow, deny=deny, resolve=resolve)
        return await self._do(self._backend.update_policy(self._id, {"network": said}))


class AsyncSnapshot(Handle):
    """A sandbox's files at one moment. Any number of sandboxes start from it: `AsyncSandbox(snapshot=...)`."""

    def __init__(
        self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, info: stock.SnapshotInfo
    ) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = info

    def _shown(self) -> str:
        return f"{self._info.id} {self._info.name or ''}".strip()

    @property
    def id(self) -> str:
        """Its id, good for `get` from anywhere that reaches the same server."""
        return self._info.id

    @property
    def name(self) -> str | None:
        """Its name, if it was given one."""
        return self._info.name

    @classmethod
    async def get(cls, snapshot: str, *, server: str | None = None) -> AsyncSnapshot:
        """A handle of a snapshot that exists, by id or name."""
        home = portal.get()
        backend, info = await portal.bridge(_find_snapshot(snapshot, server, home), home)
        return cls(backend, home, info.sandbox, info)

    async def info(self) -> stock.SnapshotInfo:
        """What it is: when and of what it was taken, its size, its tags."""
        return await self._do(self._backend.snapshot_info(self.id))

    async def diff(self, other: str | Identified) -> list[model.FileChange]:
        """What became of its files in another snapshot: added, modified and removed paths."""
        return await self._do(self._backend.diff_snapshots(self.id, _id_of(other)))

    async def delete(self) -> None:
        """Remove it. Sandboxes that started from it keep their files."""
        await self._do(self._backend.delete_snapshot(self.id))

    @classmethod
    async def list(cls, *, tag: str | None = None, server: str | None = None) -> list[stock.SnapshotInfo]:
        """The snapshots there are, oldest first; with `tag`, those that have it."""
        home = portal.get()
        return await portal.bridge(_list_snapshots(tag, server, home), home)


class AsyncImage(Handle):
    """What sandboxes start from: `AsyncSandbox(image=...)`. The functions work on the images of a server, or of this process."""

    @classmethod
    async def pull(
        cls, reference: str, *, progress: Progress | None = None, server: str | None = None
    ) -> model.ImageInfo:
        """Fetch what a reference means now, and unpack it; `progress` is called with what happens."""
        home = portal.get()
        wanted = model.absolute_image(reference)
        return await portal.bridge(_make_image(lambda b: b.pull_image(wanted), progress, server, home), home)

    @classmethod
    async def build(
        cls,
        recipe: dict[str, Any] | str | os.PathLike[str],
        directory: str | None = None,
        *,
        progress: Progress | None = None,
        server: str | None = None,
    ) -> model.ImageInfo:
        """Make the image of a recipe: data, or the path of a YAML file. Copies come from `directory`, by default the file's,
        else the current one."""
        home = portal.get()
        given, place = _recipe(recipe, directory)
        return await portal.bridge(
            _make_image(lambda b: b.build_image(given, place), progress, server, home), home
        )

    @classmethod
    async def get(cls, reference: str, *, server: str | None = None) -> model.ImageInfo:
        """An image that is here."""
        home = portal.get()
        wanted = model.absolute_image(reference)
        return await portal.bridge(_with(lambda b: b.image(wanted), server, home), home)

    @classmethod
    async def remove(cls, reference: str, *, server: str | None = None) -> model.ImageInfo:
        """Remove an image; `image_in_use` while a sandbox is made of it."""
        home = portal.get()
        wanted = model.absolute_image(reference)
        return await portal.bridge(_with(lambda b: b.remove_image(wanted), server, home), home)

    @classmethod
    async def gc(cls, *, server: str | None = None) -> list[model.ImageInfo]:
        """Remove what is half-made, and beyond `images.max_mib` what was not used for longest; what went."""
        home = portal.get()
        return await portal.bridge(_with(lambda b: b.gc_images(), server, home), home)

    @classmethod
    async def list(cls, *, server: str | None = None) -> list[model.ImageInfo]:
        """The images that are here, most recently used first."""
        home = portal.get()
        return await portal.bridge(_with(lambda b: b.images(), server, home), home)


class AsyncVolume(Handle):
    """A named directory that outlives sandboxes: `AsyncSandbox(volumes={"/data": "name"})`, or `"name:ro"` to read it."""

    def __init__(
        self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, info: stock.VolumeInfo
    ) -> None:
        super().__init__(backend, home, sandbox_id)
        self._info = info

    def _shown(self) -> str:
        return self._info.spec.name

    @property
    def name(self) -> str:
        """Its name."""
        return self._info.spec.name

    @classmethod
    async def create(
        cls,
        name: str,
        *,
        size_mib: int = 1024,
        labels: dict[str, str] | None = None,
        server: str | None = None,
    ) -> AsyncVolume:
        """An empty volume; the same name and size again is the same volume."""
        home = portal.get()
        backend, info = await portal.bridge(_create_volume(name, size_mib, labels, server, home), home)
        return cls(backend, home, "", info)

    @classmethod
    async def get(cls, name: str, *, server: str | None = None) -> AsyncVolume:
        """A handle of a volume that exists."""
        home = portal.get()
        backend, info = await portal.bridge(_find_volume(name, server, home), home)
        return cls(backend, home, "", info)

    async def info(self) -> stock.VolumeInfo:
        """Its size and how that is held, what it takes, and which sandboxes have it."""
        return await self._do(self._backend.volume(self.name))

    async def delete(self) -> None:
        """Remove it and what is in it; `volume_in_use` while a sandbox has it."""
        await self._do(self._backend.delete_volume(self.name))

    @classmethod
    async def list(cls, *, server: str | None = None) -> list[stock.VolumeInfo]:
        """The volumes there are, by name."""
        home = portal.get()
        return await portal.bridge(_list_volumes(server, home), home)


class AsyncTunnel(Handle):
    """A connection to a TCP port inside: bytes both ways. `async with` closes it at the end."""

    def __init__(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, port: int) -> None:
        super().__init__(backend, home, sandbox_id)
        self._port = port
        self._tunnel: interfaces.Tunnel | None = None

    def _shown(self) -> str:
        return f"{self._id}:{self._port}"

    async def _dial(self, timeout_s: float) -> AsyncTunnel:
        self._tunnel = await self._do(self._backend.dial(self._id, self._port, timeout_s))
        return self

    def _open(self) -> interfaces.Tunnel:
        assert self._tunnel is not None
        return self._tunnel

    async def read(self, most: int = 65536) -> bytes:
        """What has come, at most so much; waits for something, and is empty once the inside will send no more."""
        return await self._do(self._open().read(most))

    async def write(self, data: bytes | str) -> None:
        """Send all of it. Waits while the inside does not read."""
        await self._do(self._open().write(data.encode() if isinstance(data, str) else bytes(data)))

    async def end(self) -> None:
        """Say that no more will be written, as `shutdown` does; reading goes on."""
        await self._do(self._open().end())

    async def close(self) -> None:
        """Leave. Twice is harmless."""
        await self._do(self._open().aclose())

    async def __aenter__(self) -> AsyncTunnel:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(errors.ClocheError):
            await self.close()


class AsyncForward(Handle):
    """A port of this machine's loopback that is a port inside, until it is closed. `async with` closes it at the end."""

    def __init__(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str, port: int) -> None:
        super().__init__(backend, home, sandbox_id)
        self._port = port
        self._forwarding: Forwarding | None = None

    def _shown(self) -> str:
        return f"127.0.0.1:{self.port} to {self._id}:{self._port}"

    async def _listen(self, local_port: int) -> AsyncForward:
        from cloche.sdk import forwarding

        self._forwarding = forwarding.Forwarding(self._backend, self._id, self._port)
        await self._do(self._forwarding.listen(local_port))
        return self

    @property
    def port(self) -> int:
        """The local port, on 127.0.0.1."""
        return 0 if self._forwarding is None else self._forwarding.local_port

    async def close(self) -> None:
        """Close the local port and what goes through it. Twice is harmless."""
        if self._forwarding is not None:
            await self._do(self._forwarding.aclose())

    async def __aenter__(self) -> AsyncForward:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(errors.ClocheError):
            await self.close()


class AsyncSandbox(Handle):
    """One sandbox. `await AsyncSandbox.create(...)`, or `async with AsyncSandbox(...) as box`, which deletes it.

    What is left out is the settings' default: profile `moderate`, template `base`, 512 MiB of memory, 1 processor, 256
    processes, 1024 MiB of disk, a life of 300 s and no idle limit, unless the owner of this machine chose otherwise.
    """

    def __init__(
        self,
        *,
        profile: str | None = None,
        mode: str | None = None,
        template: str | None = None,
        image: str | None = None,
        env: dict[str, str] | None = None,
        memory_mib: int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk_mib: int | None = None,
        timeout_s: Timeout = "default",
        idle_timeout_s: Timeout = "default",
        workspace: str | None = None,
        overlay: bool = False,
        name: str | None = None,
        labels: dict[str, str] | None = None,
        policy: Policy | None = None,
        network: Mode | None = None,
        allow: list[str] | None = None,
        deny: list[str] | None = None,
        resolve: dict[str, str] | None = None,
        secrets: list[str] | None = None,
        ask: Asked | None = None,
        minimum_isolation: model.Level | None = None,
        driver: str | None = None,
        stay: bool = False,
        snapshot: str | Identified | None = None,
        pause_after_s: float | None = None,
        archive_after_s: float | None = None,
        at_timeout: model.AtTimeout | None = None,
        volumes: dict[str, str | model.Mount] | None = None,
        server: str | None = None,
    ) -> None:
        resources = {"memory_mib": memory_mib, "cpus": cpus, "pids": pids, "disk_mib": disk_mib}
        said: dict[str, Any] = {
            "name": name,
            "template": template,
            "image": None if image is None else model.absolute_image(image),
            "profile": profile,
            "mode": mode,
            "env": env,
            "resources": {field: value for field, value in resources.items() if value is not None},
            "workspace": None if workspace is None else os.path.abspath(workspace),
            "path": None
            if workspace is None
            else os.environ.get("PATH"),  # whose toolchains a workspace shows
            "overlay": overlay,
            "minimum_isolation": minimum_isolation,
            "driver": driver,
            "labels": labels,
            "policy": _policy(
                policy,
                _asking_mode(network, ask, profile, mode, policy),
                allow=allow,
                deny=deny,
                resolve=resolve,
            ),
            "secrets": secrets,
            "stay": stay,
            "snapshot": None if snapshot is None else _id_of(snapshot),
            "ladder": _ladder(pause_after_s, archive_after_s, at_timeout),
            "volumes": {path: _mounted(what) for path, what in (volumes or {}).items()} or None,
        }
        times = {"timeout_s": timeout_s, "idle_timeout_s": idle_timeout_s}
        self._said = {field: value for field, value in said.items() if value is not None}
        self._said |= {field: value for field, value in times.items() if value != "default"}
        self._server = server
        self._ask = ask

    @classmethod
    async def create(cls, **options: Unpack[Options]) -> AsyncSandbox:
        """A running sandbox; the arguments are the constructor's."""
        return await cls(**options)._open()

    @classmethod
    async def get(cls, sandbox: str, *, server: str | None = None, key: str | None = None) -> AsyncSandbox:
        """A handle of a sandbox that exists, by id or name. `key` stands for `CLOCHE_API_KEY`; a token of the sandbox is one too."""
        home = portal.get()
        backend, info = await portal.bridge(_find(sandbox, server, home, key), home)
        handle = cls.__new__(cls)
        handle._adopt(backend, home, info.id)
        return handle

    @classmethod
    def _claimed(
        cls, backend: interfaces.Backend, home: portal.Portal, claim: stock.ClaimInfo
    ) -> AsyncSandbox:
        if claim.sandbox is None:
            raise errors.error("sandbox_lost", f"the sandbox of the claim {claim.name} has ended")
        handle = cls.__new__(cls)
        handle._adopt(backend, home, claim.sandbox)
        handle._claim = claim
        return handle

    @property
    def claim(self) -> stock.ClaimInfo | None:
        """The claim that it was bound by, as it was then; None for one that was created."""
        return self._claim

    async def _open(self) -> AsyncSandbox:
        home = portal.get()
        backend, info = await portal.bridge(_create(self._said, self._server, home), home)
        self._adopt(backend, home, info.id)
        if self._ask is not None:
            loop = asyncio.get_running_loop()
            try:
                await portal.bridge(asking.begin(backend, info.id, self._ask, loop), home)
            except BaseException:
                with suppress(errors.ClocheError):
                    await self._do(backend.delete(info.id))
                raise
        return self

    def _adopt(self, backend: interfaces.Backend, home: portal.Portal, sandbox_id: str) -> None:
        Handle.__init__(self, backend, home, sandbox_id)
        self._claim: stock.ClaimInfo | None = None
        self._files = AsyncFiles(backend, home, sandbox_id)
        self._processes = AsyncProcesses(backend, home, sandbox_id)
        self._contexts = AsyncContexts(backend, home, sandbox_id)
        self._policy = AsyncSandboxPolicy(backend, home, sandbox_id)

    async def __aenter__(self) -> AsyncSandbox:
        if not hasattr(self, "_id"):
            await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.delete()
        except (errors.NotFound, errors.SandboxLost):
            return  # it ended by itself

    def _shown(self) -> str:
        return getattr(self, "_id", "not created")

    @property
    def id(self) -> str:
        """Its id, good for `get` from anywhere that reaches the same server."""
        return self._id

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        return self._files

    @property
    def processes(self) -> AsyncProcesses:
        """Its commands."""
        return self._processes

    @property
    def contexts(self) -> AsyncContexts:
        """Its code contexts."""
        return self._contexts

    @property
    def policy(self) -> AsyncSandboxPolicy:
        """What it may touch, and the network rules to change."""
        return self._policy

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
        """Run a command to its end: a string is a shell line, a list an argument vector.

        A failing command is a result; with `check` it raises `CommandFailed`, whose `result` is this one. Past
        `timeout_s` the command and all it started is killed. Past `background_after_s` it goes on: the result has what
        was written so far, no exit code, and `process`, to be used with `processes.get`.
        """
        request = model.ExecRequest(
            command=command,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            cwd=cwd,
            env=env or {},
            timeout_s=timeout_s,
            background_after_s=background_after_s,
            user=user,
            merge=merge,
            output_limit=output_limit,
        )
        result = await self._do(self._backend.exec(self._id, request))
        if check and not result.ok and result.process is None:
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
        """Run a command and yield what it writes as it writes it; the last event is `Exited`.

        Leaving early ends the command, as nobody holds it any more; for one that goes on, use `start`.
        """
        request = model.ExecRequest(
            command=command,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            cwd=cwd,
            env=env or {},
            timeout_s=timeout_s,
            user=user,
            merge=merge,
        )
        async for event in self._each(_run_to_end(self._backend, self._id, request)):
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
        """Start a command with open input; with `pty`, on a terminal of 80x24 or of the columns and rows given."""
        size = (80, 24) if pty is True else (pty or None)
        request = model.ExecRequest(
            command=command,
            open_stdin=True,
            cwd=cwd,
            env=env or {},
            timeout_s=timeout_s,
            user=user,
            merge=merge,
            pty=size,
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
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_result: Callable[[dict[str, Any]], Any] | None = None,
    ) -> model.CodeResult:
        """Run code in the language's default context, which keeps its state. The code's own error is no exception.

        The callbacks are told what the code prints and shows, as it does. They run in a thread of their own, an
        asynchronous handle's in its loop; one that raises interrupts the code.
        """
        if on_stdout is None and on_stderr is None and on_result is None:
            return await self._do(self._backend.run_code(self._id, code, None, language, env, timeout_s))
        followed = self.run_code_stream(code, language=language, env=env, timeout_s=timeout_s)
        return await _told(followed, self._home, on_stdout, on_stderr, on_result)

    async def run_code_stream(
        self,
        code: str,
        *,
        language: str = "python",
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[model.CodeEvent]:
        """Run code and yield what it prints and shows as it does; the last event is `CodeEnded`. Leaving early interrupts it."""
        async for event in self._each(
            self._backend.run_code_stream(self._id, code, None, language, env, timeout_s)
        ):
            yield event

    async def connect(self, port: int, *, timeout_s: float = 10) -> AsyncTunnel:
        """A connection to a TCP port of the sandbox's own loopback, whatever its network is.

        `port_closed` where nobody listens, `wait_timeout` where nobody accepts in time. Wakes a sandbox that is suspended.
        """
        return await AsyncTunnel(self._backend, self._home, self._id, port)._dial(timeout_s)

    async def forward(self, port: int, *, local_port: int = 0) -> AsyncForward:
        """Listen on 127.0.0.1 and pass every connection on to a port inside; `forward.port` says where."""
        model.check_port(port)
        return await AsyncForward(self._backend, self._home, self._id, port)._listen(local_port)

    async def url(self, port: int, *, ttl_s: float = 3600) -> str:
        """A preview link: an address for a browser that reaches a port inside without a key, until it expires or the sandbox
        ends. Served by `cloche serve`; elsewhere `server_unavailable`."""
        return (await self._do(self._backend.link(self._id, port, ttl_s))).url

    async def ports(self) -> list[model.PortInfo]:
        """The TCP ports that something inside listens on, lowest first."""
        return await self._do(self._backend.ports(self._id))

    async def info(self) -> model.SandboxInfo:
        """What it is and how it is held: isolation, limits, warnings, when it ends. To look is not to use."""
        return await self._do(self._backend.info(self._id))

    async def token(
        self, *, scopes: Sequence[model.TokenScope] = ("exec", "files"), ttl_s: float = 900
    ) -> model.AccessToken:
        """A token for this sandbox alone, on a server: `Sandbox.get(id, server=…, key=token)` for whoever should work in it.

        It is good for what `scopes` say (`sandboxes`, `exec`, `files`, `ports`, `events`), never for more than your own key, until `ttl_s` seconds are over
        or the sandbox ends. It makes no tokens, and neither lists nor creates sandboxes.
        """
        return await self._do(self._backend.create_token(self._id, list(scopes), ttl_s))

    async def usage(self) -> model.SandboxUsage:
        """What it costs now, and has cost."""
        return await self._do(self._backend.usage(self._id))

    async def extend(self, timeout_s: float | None) -> model.SandboxInfo:
        """Let it live `timeout_s` from now; None is without end."""
        return await self._do(self._backend.extend(self._id, timeout_s))

    async def suspend(self, mode: Literal["pause", "hibernate", "archive"] = "pause") -> model.SandboxInfo:
        """Put it to sleep; whatever needs the sandbox wakes it.

        `pause` stops everything where it stands, memory stays. `archive` keeps the files only, beyond the end of the engine
        and of the machine. `hibernate` keeps memory on disk, where the driver can.
        """
        return await self._do(self._backend.suspend(self._id, mode))

    async def resume(self) -> model.SandboxInfo:
        """Let it go on."""
        return await self._do(self._backend.resume(self._id))

    async def snapshot(self, name: str | None = None, *, tags: list[str] | None = None) -> AsyncSnapshot:
        """Keep its files as they are now. It stands still for the moment that takes."""
        info = await self._do(self._backend.snapshot(self._id, name, tags))
        return AsyncSnapshot(self._backend, self._home, self._id, info)

    async def restore(self, snapshot: str | Identified) -> model.SandboxInfo:
        """Set its files back to a snapshot. Every process in it ends; id, environment, limits and life stay."""
        return await self._do(self._backend.restore(self._id, _id_of(snapshot)))

    async def fork(self, count: int = 1) -> list[AsyncSandbox]:
        """Sandboxes that begin with the same files and no processes; all of them, or none."""
        made = []
        for info in await self._do(self._backend.fork(self._id, count)):
            handle = AsyncSandbox.__new__(AsyncSandbox)
            handle._adopt(self._backend, self._home, info.id)
            made.append(handle)
        return made

    async def diff(self) -> list[model.FileChange]:
        """What was changed of a workspace lent with `overlay=True`."""
        return await self._do(self._backend.diff(self._id))

    async def apply(self, paths: list[str] | None = None) -> list[str]:
        """Take changes of an overlaid workspace over into the host's directory: all, or those at `paths`."""
        return await self._do(self._backend.apply(self._id, paths))

    async def events(self, after: int = 0) -> list[dict[str, Any]]:
        """What happened to it, from cursor `after` (an event's `seq`) on."""
        return await self._do(self._backend.events(after, self._id))

    async def delete(self) -> None:
        """End it and everything in it."""
        await self._do(self._backend.delete(self._id))

    @classmethod
    async def list(cls, *, server: str | None = None) -> list[model.SandboxInfo]:
        """The live sandboxes of the server, or of this process."""
        home = portal.get()
        return await portal.bridge(_list(server, home), home)


async def run(
    command: str | list[str],
    *,
    stdin: bytes | str | None = None,
    cwd: str | None = None,
    timeout_s: float | None = None,
    check: bool = False,
    **shape: Unpack[Shape],
) -> model.ExecResult:
    """One command in a sandbox of its own, which lives as long as the command; the rest describes the sandbox."""
    async with AsyncSandbox(timeout_s=None, **shape) as box:
        return await box.exec(command, stdin=stdin, cwd=cwd, timeout_s=timeout_s, check=check)


# ── in the portal's loop ───────────────────────────────────────────────────────────────────────────


async def _create(
    said: dict[str, Any], server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, model.SandboxInfo]:
    spec = rpc.complete(said, settings.load(os.environ).defaults)
    spec.check()
    backend = await connecting.connect(server, home)
    return backend, await backend.create(spec)


async def _find(
    sandbox: str, server: str | None, home: portal.Portal, key: str | None = None
) -> tuple[interfaces.Backend, model.SandboxInfo]:
    backend = await connecting.connect(server, home, key)
    return backend, await backend.info(sandbox)


async def _list(server: str | None, home: portal.Portal) -> list[model.SandboxInfo]:
    return await (await connecting.connect(server, home)).list()


async def _find_snapshot(
    snapshot: str, server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, stock.SnapshotInfo]:
    backend = await connecting.connect(server, home)
    return backend, await backend.snapshot_info(snapshot)


async def _list_snapshots(
    tag: str | None, server: str | None, home: portal.Portal
) -> list[stock.SnapshotInfo]:
    return await (await connecting.connect(server, home)).snapshots(tag)


async def _with(
    ask: Callable[[interfaces.Backend], Coroutine[Any, Any, T]], server: str | None, home: portal.Portal
) -> T:
    return await ask(await connecting.connect(server, home))


def _recipe(
    recipe: dict[str, Any] | str | os.PathLike[str], directory: str | None
) -> tuple[dict[str, Any] | str, str]:
    """A recipe as it is sent, and where its copies come from."""
    if isinstance(recipe, dict):
        return recipe, os.path.abspath(directory or ".")
    path = os.path.abspath(recipe)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as problem:
        cause = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise errors.error(
            "recipe_invalid", f"{path!r} cannot be read: {cause}", hint="check the path"
        ) from None
    return text, os.path.abspath(directory or os.path.dirname(path))


async def _told(
    followed: AsyncIterator[model.CodeEvent],
    home: portal.Portal,
    on_stdout: Callable[[str], Any] | None,
    on_stderr: Callable[[str], Any] | None,
    on_result: Callable[[dict[str, Any]], Any] | None,
) -> model.CodeResult:
    """Hand what code prints and shows to callbacks; the whole result."""
    async with aclosing(followed) as events:  # type: ignore[type-var]
        async for event in events:
            match event:
                case model.CodeOutput(stream=stream, text=text):
                    await _call(on_stdout if stream == "stdout" else on_stderr, text, home)
                case model.CodeShown(result=result):
                    await _call(on_result, result, home)
                case model.CodeEnded(result=whole):
                    return whole
    raise errors.error("internal_error", "the code ended, and nothing was said of how")


async def _call(callback: Callable[[Any], Any] | None, item: Any, home: portal.Portal) -> None:
    """In the caller's loop; for a blocking handle, whose coroutines run in the portal's loop, in a thread."""
    if callback is None:
        return
    loop = asyncio.get_running_loop()
    said = await loop.run_in_executor(None, callback, item) if loop is home.loop else callback(item)
    if inspect.isawaitable(said):
        await said


async def _make_image(
    begin: Callable[[interfaces.Backend], AsyncIterator[model.ImageProgress]],
    progress: Progress | None,
    server: str | None,
    home: portal.Portal,
) -> model.ImageInfo:
    async for said in begin(await connecting.connect(server, home)):
        if progress is not None:
            progress(said)
        if said.image is not None:
            return said.image
    raise errors.error("internal_error", "the image was not made, and nothing was said why")


async def _create_volume(
    name: str, size_mib: int, labels: dict[str, str] | None, server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, stock.VolumeInfo]:
    from cloche import stock

    spec = stock.VolumeSpec(name=name, size_mib=size_mib, labels=labels or {})
    spec.check()
    backend = await connecting.connect(server, home)
    return backend, await backend.create_volume(spec)


async def _find_volume(
    name: str, server: str | None, home: portal.Portal
) -> tuple[interfaces.Backend, stock.VolumeInfo]:
    backend = await connecting.connect(server, home)
    return backend, await backend.volume(name)


async def _list_volumes(server: str | None, home: portal.Portal) -> list[stock.VolumeInfo]:
    return await (await connecting.connect(server, home)).volumes()


def mount(what: str | model.Mount) -> model.Mount:
    """A volume's name, read-only with `:ro` after it, or a `Mount`."""
    if isinstance(what, model.Mount):
        return what
    return model.Mount(volume=what.removesuffix(":ro"), read_only=what.endswith(":ro"))


def _mounted(what: str | model.Mount) -> dict[str, Any]:
    chosen = mount(what)
    return {"volume": chosen.volume, "read_only": chosen.read_only}


def _ladder(
    pause_after_s: float | None, archive_after_s: float | None, at_timeout: model.AtTimeout | None
) -> dict[str, float | str] | None:
    rungs = {"pause_after_s": pause_after_s, "archive_after_s": archive_after_s, "at_timeout": at_timeout}
    return {rung: value for rung, value in rungs.items() if value is not None} or None


def _id_of(noun: str | Identified) -> str:
    return noun if isinstance(noun, str) else noun.id


async def _run_to_end(
    backend: interfaces.Backend, sandbox: str, request: model.ExecRequest
) -> AsyncIterator[model.StreamEvent]:
    """Start, follow, and end it if the follower leaves. All in one place, so that whoever is cancelled in between does
    not leave a command behind that nobody knows of."""
    info = await backend.start(sandbox, request)
    ended = False
    try:
        async for event in backend.attach(sandbox, info.id):
            ended = isinstance(event, model.Exited)
            yield event
    finally:
        if not ended:
            with suppress(errors.ClocheError):  # the sandbox went, and the command with it
                await backend.signal(sandbox, info.id, 9, True)


def _command_failed(command: str | list[str], result: model.ExecResult) -> errors.CommandFailed:
    shown = command if isinstance(command, str) else " ".join(command)
    made = errors.CommandFailed(
        f"{shown[:200]!r} ended with {result.shell_code}",
        hint=result.stderr[-500:] or None,
        details={"exit_code": result.exit_code, "signal": result.signal, "timed_out": result.timed_out},
    )
    made.result = result
    return made


def _policy(given: Policy | None, network: Mode | None, **lists: Any) -> dict[str, Any] | None:
    """A policy with the network arguments added to it: they add rules, and `network` replaces the mode."""
    said = _network(network, **lists)
    if given is None:
        return {"network": said} if said else None
    whole = given.to_builtins()
    before = dict(whole.get("network", {}))
    if said.get("allow") and before.get("mode") == "off":
        del before["mode"]
    if network == "off":
        before = {field: value for field, value in before.items() if field not in ("allow", "ask")}
    for field, value in said.items():
        if isinstance(value, list):
            said[field] = [*before.get(field, ()), *value] if value else []
        elif isinstance(value, dict):
            said[field] = {**before.get(field, {}), **value}
    return {**whole, "network": {**before, **said}} if said else whole


def _asking_mode(
    network: Mode | None, ask: Asked | None, profile: str | None, mode: str | None, given: Policy | None
) -> Mode | None:
    """Who gives somebody to ask wants a network, unless something else was said about it."""
    said = network is not None or mode is not None or profile == "permissive"
    if ask is None or said or (given is not None and "mode" in given.fields.get("network", {})):
        return network
    return "rules"


def _network(network: Mode | None, **lists: Any) -> dict[str, Any]:
    if network == "off" and lists.get("allow"):
        raise errors.error(
            "argument_invalid",
            "allow gives a network and network='off' takes it",
            hint="leave one of them out",
        )
    for field, value in lists.items():
        if isinstance(value, str):
            raise errors.error(
                "argument_invalid", f"{field} is a list of rules, not one text", hint=f"{field}=[{value!r}]"
            )
    said = {field: value for field, value in lists.items() if value is not None}
    return said if network is None else {"mode": network, **said}
