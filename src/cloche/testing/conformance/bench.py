"""The bench on which a driver is tried: a real engine above it, and a host beside it that has something to lose.

The bench puts out what must not be reached before the driver starts, because a driver may leak at its start too: a
variable in the environment, an inheritable descriptor, a directory that anybody may read and write. Behaviours make
sandboxes with `box()`; the bench deletes them afterwards. What a behaviour needs from the template is a shell, coreutils,
util-linux's flock, and python3.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from cloche import engine, errors, interfaces, model, policy, settings, store, wiring, workspaces
from cloche.testing.conformance.registry import Broken, expect

MakeDriver = Callable[[str], interfaces.Driver]
SECRET_VARIABLE = "CLOCHE_CONFORMANCE_SECRET"


class Bench:
    """One driver under one engine, for any number of behaviours, one at a time."""

    def __init__(self, make_driver: MakeDriver) -> None:
        self.make_driver = make_driver
        self._boxes: list[Box] = []
        self._neighbours: list[Neighbour] = []
        self.retired = False
        self.secret = secrets.token_hex(16)

    async def __aenter__(self) -> Bench:
        self.directory = tempfile.mkdtemp(prefix="cl-")
        self.home = os.path.join(self.directory, "state")
        self.host = os.path.join(self.directory, "host")
        self._expose()
        self.driver = Recording(self.make_driver(self.home))
        self.engine = make_engine(self.home, self.driver)
        return self

    def _expose(self) -> None:
        """What a leak would show: readable and writable by anybody, so that only glass is in the way."""
        os.chmod(self.directory, 0o755)
        os.mkdir(self.home, 0o700)
        os.mkdir(self.host)
        os.chmod(self.host, 0o777)
        self.canary = os.path.join(self.host, "canary")
        with open(self.canary, "w") as file:
            file.write(self.secret)
        os.chmod(self.canary, 0o666)
        self._outer_secret = os.environ.get(SECRET_VARIABLE)
        os.environ[SECRET_VARIABLE] = self.secret
        self._leak = os.open(self.canary, os.O_RDONLY)
        os.set_inheritable(self._leak, True)

    async def __aexit__(self, *_: object) -> None:
        await self.clear()
        await self.engine.aclose()
        os.environ.pop(SECRET_VARIABLE)
        if self._outer_secret is not None:  # this bench stood on another
            os.environ[SECRET_VARIABLE] = self._outer_secret
        os.close(self._leak)
        shutil.rmtree(self.directory, ignore_errors=True)

    async def clear(self) -> None:
        """End what the last behaviour made."""
        boxes, self._boxes = self._boxes, []
        for box in boxes:
            with suppress(errors.ClocheError):
                await self.engine.delete(box.id)
        for neighbour in self._neighbours:
            neighbour.end()
        self._neighbours.clear()

    async def retire(self) -> None:
        """Close the engine, for a behaviour that counts what is left in this process. The next one gets another bench."""
        self.retired = True
        await self.clear()
        await self.engine.aclose()

    # ── sandboxes ───────────────────────────────────────────────────────────────────────────────

    def spec(self, **fields: Any) -> model.SandboxSpec:
        resources = {name: fields.pop(name) for name in model.Resources.__struct_fields__ if name in fields}
        fields.setdefault("resources", model.Resources(**{"disk_mib": 64, **resources}))
        return model.SandboxSpec(minimum_isolation="process", **fields)

    async def box(self, **fields: Any) -> Box:
        """A fresh sandbox: the spec's fields, and those of its resources."""
        info = await self.engine.create(self.spec(**fields))
        made = Box(self.engine, info, self.driver.machines[-1])
        self._boxes.append(made)
        return made

    async def known(self, sandbox: str) -> Box:
        """A sandbox that the engine made by itself."""
        return Box(self.engine, await self.engine.info(sandbox), self.driver.machines[-1])

    # ── the host ────────────────────────────────────────────────────────────────────────────────

    def neighbour(self) -> Neighbour:
        """A process of the caller, outside of every sandbox."""
        started = Neighbour()
        self._neighbours.append(started)
        return started


class Neighbour:
    """A process of the host that answers for as long as it lives. Its command line has a mark."""

    def __init__(self) -> None:
        self.mark = f"mark-{secrets.token_hex(8)}"
        self._process = subprocess.Popen(
            ["sed", "-u", "-e", f"s/ping/{self.mark}/"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid

    def answers(self) -> bool:
        """Asked and not looked up: one that was just killed is in the list of processes for a moment more."""
        typed, said = self._process.stdin, self._process.stdout
        with suppress(BrokenPipeError):
            typed.write(b"ping\n")  # type: ignore[union-attr]
        return said.readline() == f"{self.mark}\n".encode()  # type: ignore[union-attr]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Recording(interfaces.Driver):
    """The driver under trial, with the machines it made in reach."""

    def __init__(self, inner: interfaces.Driver) -> None:
        self.inner = inner
        self.name, self.level = inner.name, inner.level
        self.machines: list[interfaces.Machine] = []

    async def start(self) -> None:
        await self.inner.start()

    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> interfaces.Machine:
        made = await self.inner.create(sandbox_id, spec, rules, exposure, image)
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
    ) -> interfaces.Machine:
        made = await self.inner.restore(kept, sandbox_id, spec, rules, exposure, image)
        self.machines.append(made)
        return made

    async def compare(self, kept: str, other: str) -> list[model.FileChange]:
        return await self.inner.compare(kept, other)

    async def make_volume(self, directory: str, size_mib: int) -> model.Limit:
        return await self.inner.make_volume(directory, size_mib)

    async def volume_used(self, directory: str) -> int:
        return await self.inner.volume_used(directory)

    async def check_volume(self, directory: str) -> None:
        await self.inner.check_volume(directory)

    async def remove_volume(self, directory: str) -> None:
        await self.inner.remove_volume(directory)

    async def close(self) -> None:
        await self.inner.close()

    def sweep(self, keep: set[str]) -> list[str]:
        return self.inner.sweep(keep)


def make_engine(home: str, driver: interfaces.Driver) -> engine.Engine:
    """A real engine over one driver, with its state in memory."""
    config = settings.Settings(home=home)
    return engine.Engine(
        config, store.Store(":memory:"), [(driver.name, lambda: driver)], owner=wiring.owner(),
        interpreters=wiring.interpreters(), workspaces=workspaces.LocalWorkspaces(home, {}), egress=lambda: wiring.egress(settings.Settings(home=home)),
        secrets=lambda: wiring.secrets(config),
        policies=lambda workspace: policy.Sources(),
    )  # fmt: skip


class Box:
    """One sandbox, in the words of the SDK."""

    def __init__(self, backend: engine.Engine, info: model.SandboxInfo, machine: interfaces.Machine) -> None:
        self.id = info.id
        self.info = info
        self.machine = machine
        self._engine = backend

    async def exec(self, command: str | list[str], **request: Any) -> model.ExecResult:
        return await self._engine.exec(self.id, model.ExecRequest(command=command, **request))

    async def out(self, command: str | list[str], **request: Any) -> str:
        """What a command prints that must succeed."""
        result = await self.exec(command, **request)
        if result.exit_code != 0:
            raise Broken(f"{str(command)[:200]!r} ended with {result.shell_code}: {result.stderr[-500:]!r}")
        return result.stdout

    async def python(self, code: str, *arguments: str, **request: Any) -> Any:
        """What a program, run inside, prints as JSON."""
        said = await self.out(["python3", "-I", "-c", f"import json, os, sys\n{code}", *arguments], **request)
        try:
            return json.loads(said)
        except json.JSONDecodeError:
            raise Broken(f"the program printed {said[:300]!r}") from None

    async def start(self, command: str | list[str], **request: Any) -> Running:
        info = await self._engine.start(self.id, model.ExecRequest(command=command, **request))
        return Running(self._engine, self.id, info)

    async def write(self, path: str, data: str | bytes, **options: Any) -> model.FileInfo:
        return await self._engine.write_file(
            self.id, path, data.encode() if isinstance(data, str) else data, **options
        )

    async def read(self, path: str, **options: Any) -> bytes:
        return await self._engine.read_file(self.id, path, **options)

    async def names(self, path: str = ".", depth: int = 1) -> list[str]:
        return [entry.path for entry in await self._engine.list_files(self.id, path, depth)]


class Running:
    """A started command."""

    def __init__(self, backend: engine.Engine, sandbox: str, info: model.ExecutionInfo) -> None:
        self.id, self.pid = info.id, info.pid
        self._engine, self._sandbox = backend, sandbox
        self._seen = 0
        self.text = b""

    async def until(self, part: bytes) -> bytes:
        """Follow the output until it holds `part`; all that came so far."""
        if part not in self.text:
            async for event in self.follow(self._seen):
                self._seen = event.seq + 1
                if isinstance(event, model.Output):
                    self.text += event.data
                if part in self.text:
                    break
                expect(
                    not isinstance(event, model.Exited),
                    f"it ended without {part!r}, with {self.text[-300:]!r}",
                )
        return self.text

    def follow(self, after: int = 0, wait: bool = True) -> AsyncIterator[model.StreamEvent]:
        return self._engine.attach(self._sandbox, self.id, after, wait)

    async def write(self, data: bytes, end: bool = False) -> None:
        await self._engine.write_stdin(self._sandbox, self.id, data, end)

    async def resize(self, columns: int, rows: int) -> None:
        await self._engine.resize(self._sandbox, self.id, columns, rows)

    async def signal(self, number: int, *, tree: bool = False) -> None:
        await self._engine.signal(self._sandbox, self.id, number, tree)

    async def wait(self) -> model.ExecResult:
        return await self._engine.wait(self._sandbox, self.id)


# ── looking at the host ────────────────────────────────────────────────────────────────────────────


def unique_seconds() -> str:
    """A duration that nobody else sleeps: a process that was given it is found again by its command line."""
    return f"3600.{secrets.randbelow(10**12):012d}"


def processes_with(mark: str) -> list[int]:
    """The processes of the host whose command line has this word."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    found.append(int(name))
    return found


async def eventually(look: Callable[[], object], otherwise: str, seconds: float = 5.0) -> None:
    """For what the kernel does in its own time. It is looked at again and again, never waited for blindly."""
    try:
        async with asyncio.timeout(seconds):
            while not look():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise Broken(otherwise) from None
