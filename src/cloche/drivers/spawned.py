"""Machines whose first process the engine starts itself: what the rungs `bubblewrap` and `process` share.

A machine is one child of the engine (bubblewrap's monitor, or the supervisor), the link to its agent, and perhaps a
cgroup. The child is started by posix_spawn, never by a fork of the engine, with an empty environment, in a session of
its own, and with exactly the descriptors that it is given. Its end is the machine's end: each rung sees to it that the
child goes last.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cloche import errors, interfaces, model, policy
from cloche.drivers import holding, link
from cloche.guest import wire
from cloche.linux import cgroups, landlock

_READY_TIMEOUT_S = 20.0
_PROBE_TIMEOUT_S = 20.0
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


# ── starting a process ─────────────────────────────────────────────────────────────────────────────


def program(entry: str, root: str) -> list[str]:
    """Arguments that make a Python run `entry` ("module:function" of ours, found beneath `root`) and nothing else."""
    module, _, function = entry.partition(":")
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import {function}; {function}()"
    return ["-I", "-S", "-c", code]


def spawn(argv: Sequence[str], fds: Sequence[int], stderr: int) -> int:
    """Start a process with `fds` as 3, 4, 5, … and nothing else of ours."""
    # Copies far above, because a source may sit where another target goes.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (stderr, *fds)]
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
    ]
    actions += [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(high, start=2)]
    try:
        # A session of its own: ^C at the caller's terminal is the engine's business, not the sandbox's.
        return os.posix_spawn(argv[0], list(argv), {}, file_actions=actions, setsid=True)
    finally:
        wire.close_all(high)


async def run(argv: Sequence[str], fds: Sequence[int] = ()) -> tuple[int, str]:
    """Run a helper to its end: its exit status (negative for a signal) and what it said, on either stream."""
    said = os.memfd_create("said", os.MFD_CLOEXEC)
    try:
        shell = ["/bin/sh", "-c", 'exec "$@" >&2', "sh", *argv]
        pid = spawn(shell, fds, said)
        pidfd = os.pidfd_open(pid)
        try:
            await asyncio.wait_for(_readable(pidfd), _PROBE_TIMEOUT_S)
        except TimeoutError:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _readable(pidfd)
        finally:
            os.close(pidfd)
        return _reap(pid), _read_all(said)
    finally:
        os.close(said)


def _reap(pid: int) -> int:
    """The exit status of a child that has ended, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(fd, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        loop.remove_reader(fd)


def _read_all(fd: int) -> str:
    return os.pread(fd, 16384, 0).decode("utf-8", "replace").strip()


# ── a driver ───────────────────────────────────────────────────────────────────────────────────────


class SpawnedDriver(interfaces.Driver):
    """The parts of a driver that do not depend on the rung."""

    agents = 1
    """Processes of ours in the cgroup, which the user's limit does not count."""

    def __init__(self, home: str, *, landlock_abi: int | None = None) -> None:
        """`landlock_abi` is for a caller that knows it already, or wants no more of it."""
        self.home = home
        self.abi = landlock.abi() if landlock_abi is None else landlock_abi
        self.groups: cgroups.Hierarchy
        self.machines: dict[str, SpawnedMachine] = {}
        self._closed = False

    async def start(self) -> None:
        if not sys.executable:
            raise errors.error(
                "kernel_feature_missing", "this Python does not know its own executable (sys.executable)"
            )
        self.groups = cgroups.detect()
        await self.prepare()

    @abstractmethod
    async def prepare(self) -> None:
        """Find out whether this host can; raise `NotSupported` with cause and fix where it cannot."""

    @abstractmethod
    def held_features(self) -> set[str]:
        """What `isolation.required` may ask for and gets."""

    @abstractmethod
    def make(self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged) -> SpawnedMachine:
        """Start the process of a new machine and tell it everything; on failure leave nothing."""

    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> SpawnedMachine:
        if image is not None:
            raise errors.error(
                "not_supported_by_driver",
                f"the driver {self.name!r} has no root but this machine's own",
                hint="use the driver 'namespaces' for an image",
            )
        self._refuse(rules, exposure)
        made = self.make(sandbox_id, spec, rules)
        try:
            await asyncio.wait_for(asyncio.shield(made.ready), _READY_TIMEOUT_S)
        except TimeoutError:
            await made.kill("creation took too long")
            raise errors.error("sandbox_create_failed", "the sandbox did not get ready in time") from None
        except errors.SandboxError as problem:
            await made.kill("creation failed")
            raise _explained(problem, made.said) from None
        except BaseException:
            await made.kill("creation failed")
            raise
        return made

    def _refuse(self, rules: policy.Merged, exposure: interfaces.Exposure | None) -> None:
        if self._closed:
            raise errors.error("sandbox_create_failed", f"the driver {self.name!r} has been closed")
        if exposure is not None:
            raise errors.error(
                "not_supported_by_driver",
                f"the driver {self.name!r} cannot show a workspace with its protected files",
                hint="use the driver 'namespaces', or copy the files in (box.files.write)",
            )
        holding.check_calls(rules)
        held = self.held_features() | {f"cgroup_{name}" for name in self.groups.enforceable}
        for feature in rules.isolation.required:
            if feature not in held:
                raise errors.error(
                    "kernel_feature_missing",
                    f"the policy requires {feature!r}, which the driver {self.name!r} does not give on this host",
                    hint="run `cloche doctor`, or drop it from isolation.required of the policy",
                )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(each.kill("the engine closed") for each in list(self.machines.values())))

    def sweep(self, keep: set[str]) -> list[str]:
        return holding.sweep_groups(keep)


def _explained(problem: errors.SandboxError, said: str) -> errors.ClocheError:
    if not said:
        return problem
    return errors.error(
        problem.code, f"{problem.message}: {said[-1000:]}", hint=problem.hint or "run `cloche doctor`"
    )


# ── a machine ──────────────────────────────────────────────────────────────────────────────────────


class SpawnedMachine(holding.HeldMachine):
    def __init__(
        self, driver: SpawnedDriver, sandbox_id: str, sock: socket.socket, group: cgroups.Group | None, isolation: model.Isolation
    ) -> None:  # fmt: skip
        super().__init__(sandbox_id, sock, group, isolation)
        self._driver = driver
        self._pid = self._agent = -1
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        self.said = ""
        driver.machines[sandbox_id] = self

    def launch(self, argv: Sequence[str], fds: Sequence[int]) -> None:
        self._pid = spawn(argv, fds, self._said)
        self._pidfd = os.pidfd_open(self._pid)
        self._loop.add_reader(self._pidfd, self._first_process_ended)

    def tell(self, message: dict[str, Any]) -> None:
        self._link.post(message)

    def _frame(self, frame: link.Frame, fds: list[int]) -> None:
        if frame.ready and not self.ready.done() and fds:
            self._agent = fds.pop()  # the agent's pidfd, sent before anything hostile ran
        super()._frame(frame, fds)

    def _first_process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        with suppress(ChildProcessError):  # the caller's program may reap every child it has
            os.waitpid(self._pid, 0)
        self.died()

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    async def kill(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.kill_now()
        if self._pidfd < 0:
            self.died()
        await self._wait_gone()

    def _release(self) -> None:
        self._driver.machines.pop(self.id, None)
        self.said = _read_all(self._said)
        for fd in (self._pidfd, self._agent, self._said):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._agent = self._said = -1
        self._remove_group()


def signal_quietly(pidfd: int, number: int) -> None:
    if pidfd >= 0:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
