"""What adapters implement and engines use. Small, and each promise is said.

A `Driver` makes `Machine`s; a machine is one running sandbox as the engine sees it: processes by pid, files by
descriptor, and an end. Drivers and engines never import each other; `wiring` introduces them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from cloche import model, policy


class Clock(Protocol):
    """Wall time for what users see, monotonic time for what expires."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...


class ExitStatus(NamedTuple):
    exit_code: int | None
    signal: int | None
    cpu_ms: float
    max_rss_mib: float


class Start(NamedTuple):
    """A command for a machine. `fds` become 0, 1, 2, 3, … (with `pty`: one terminal as 0–2, then 3, …)."""

    command: str | Sequence[str]
    env: dict[str, str]
    cwd: str | None
    user: str
    fds: Sequence[int]
    pty: bool = False


class Child(NamedTuple):
    """A started command: its pid inside, and its end."""

    pid: int
    exited: asyncio.Future[ExitStatus]


class Usage(NamedTuple):
    memory_mib: float
    memory_peak_mib: float
    cpu_ms: float
    pids: int
    oom_kills: int


class Terminal(NamedTuple):
    """Both ends of a terminal that lives inside; the holder closes them."""

    master_fd: int
    slave_fd: int


class Machine(ABC):
    """One running sandbox.

    Every method raises `SandboxLost` once the machine has ended. Methods that name a path raise the error of the path
    (`file_not_found`, `permission_denied`, …). Descriptors returned are the caller's to close; a descriptor from
    `open_file` is always a regular file.
    """

    id: str
    isolation: model.Isolation
    limits: dict[str, model.Limit]
    shown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ended: asyncio.Future[str]
    """Resolves once, with the reason, when nothing of the machine runs any more."""
    on_denial: Callable[[int, model.Denial], None]
    """Called with the pid of an execution's leader (0 if unknown) for everything the glass stopped."""

    @abstractmethod
    async def start(self, start: Start) -> Child: ...

    @abstractmethod
    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        """Signal a leader, its process group, or (`tree`) everything that came from it."""

    @abstractmethod
    async def open_file(self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False) -> int: ...

    @abstractmethod
    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        """`stat`, `list`, `move`, `remove`, `make_dir` or `chmod`; see engine/files.py for the arguments."""

    @abstractmethod
    def watch(self, path: str, *, recursive: bool, user: str = "user") -> AsyncIterator[model.FileEvent]: ...

    @abstractmethod
    async def connect(self, port: int) -> int:
        """A connected socket to a port inside, as a descriptor."""

    @abstractmethod
    def open_terminal(self) -> Terminal: ...

    @abstractmethod
    async def set_environment(self, env: dict[str, str]) -> None:
        """Bind variables for executions to come."""

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    async def pause(self) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def kill(self, reason: str) -> None:
        """End everything and wait until nothing is left: no process, mount, cgroup or file. Twice is harmless."""

    @abstractmethod
    def kill_now(self) -> None:
        """The same without waiting, for a caller that is going away itself."""


class Driver(ABC):
    """Makes machines of one isolation level."""

    name: str
    level: model.Level

    @abstractmethod
    async def start(self) -> None:
        """Get ready; raises `NotSupported` with the cause and the fix where this host cannot."""

    @abstractmethod
    async def create(self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Policy) -> Machine:
        """Make a running machine, or raise and leave nothing behind."""

    @abstractmethod
    async def close(self) -> None:
        """End every machine and the driver's own processes. Twice is harmless."""

    @abstractmethod
    def sweep(self, keep: set[str]) -> list[str]:
        """Remove what machines of dead engines left behind; the ids swept."""


class Store(ABC):
    """The durable nouns and the journal."""

    @abstractmethod
    def put_sandbox(self, info: model.SandboxInfo) -> None: ...

    @abstractmethod
    def sandboxes(self, *, live_only: bool = False) -> list[model.SandboxInfo]: ...

    @abstractmethod
    def append_event(self, kind: str, sandbox: str | None, time: float, data: dict[str, Any]) -> int: ...

    @abstractmethod
    def events(self, *, after: int = 0, sandbox: str | None = None, limit: int = 1000) -> list[dict[str, Any]]: ...

    @abstractmethod
    def close(self) -> None: ...
