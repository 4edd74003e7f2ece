"""What happens by itself: endings and suspensions by time and idleness, watched memory, and a warm sandbox kept for the next caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from cloche import errors, interfaces, model, policy
from cloche.engine import sandboxes
from cloche.lifecycle import expiry, suspending

_LONGEST_S = 3600.0
_WATCH_S = 0.5  # how often a watched memory limit is looked at


class Reaper:
    """One timer for all sandboxes. `sweep_once` is one turn of the loop."""

    def __init__(
        self, clock: interfaces.Clock, listing: Callable[[], list[sandboxes.Sandbox]],
        expire: Callable[[sandboxes.Sandbox, str], None], rest: Callable[[sandboxes.Sandbox, suspending.Rung], None],
    ) -> None:  # fmt: skip
        self._clock = clock
        self._listing = listing
        self._expire = expire
        self._rest = rest
        self._timer: asyncio.TimerHandle | None = None
        self._at = float("inf")
        self._closed = False

    def look_again(self, changed: sandboxes.Sandbox | None = None) -> None:
        """Something changed that may bring an ending nearer: of one sandbox, or of any.

        Only the one is looked at: this runs with every command, and a thousand others may live. What moved an ending
        further away needs nothing, because a timer that is early finds nothing due and is set anew.
        """
        if self._closed:
            return
        looked_at = [changed] if changed is not None and self._timer is not None else self._listing()
        now = self._clock.monotonic()
        ends = expiry.next_deadline(s.life for s in looked_at)
        rests = suspending.next_deadline(s.rest for s in looked_at if not s.resting)
        at = min(deadline for deadline in (ends, rests, now + _LONGEST_S) if deadline is not None)
        if any(_watched(s) for s in looked_at):
            at = min(at, now + _WATCH_S)
        if self._timer is not None and self._at <= at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._turn)

    def _turn(self) -> None:
        self._timer, self._at = None, float("inf")
        self.sweep_once()
        self.look_again()

    def sweep_once(self) -> None:
        now = self._clock.monotonic()
        for sandbox in self._listing():
            end = expiry.due(sandbox.life, now)
            if end is not None:
                self._expire(sandbox, end.reason)
                continue
            if _watched(sandbox):
                _check_memory(sandbox)
            rung = None if sandbox.resting else suspending.due(sandbox.rest, now)
            if rung is not None:
                self._rest(sandbox, rung)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()


def _watched(sandbox: sandboxes.Sandbox) -> bool:
    limit = sandbox.machine.limits.get("memory_mib")
    return limit is not None and limit.enforcement == "watched" and sandbox.life.running > 0


def _check_memory(sandbox: sandboxes.Sandbox) -> None:
    """Where no cgroup holds the limit, whoever is found over it is ended."""
    if sandbox.machine.usage().memory_mib > sandbox.machine.limits["memory_mib"].value:
        for running in [e for e in sandbox.executions.values() if e.running]:
            running.kill_for_memory()


class Warm:
    """Sandboxes of the last-used shape, made before they are asked for. Each serves one caller, once."""

    def __init__(
        self, make: Callable[[model.SandboxSpec, policy.Merged], Awaitable[interfaces.Machine]], count: int
    ) -> None:
        self._make = make
        self._count = count
        self._shape: bytes = b""
        self._ready: list[interfaces.Machine] = []
        self._task: asyncio.Task[None] | None = None

    async def take(
        self, spec: model.SandboxSpec, rules: policy.Merged, env: dict[str, str]
    ) -> interfaces.Machine | None:
        if not _ordinary(spec, rules) or _shape(spec, rules) != self._shape:
            return None
        while self._ready:
            machine = self._ready.pop(0)
            if machine.ended.done():
                continue
            if env:
                await machine.set_environment(env)
            return machine
        return None

    def replenish(self, spec: model.SandboxSpec, rules: policy.Merged) -> None:
        if self._count <= 0 or not _ordinary(spec, rules):
            return
        shape = _shape(spec, rules)
        stale = self._ready if shape != self._shape else []
        self._shape = shape
        self._ready = [m for m in self._ready if m not in stale]
        if self._task is None or self._task.done():
            bare = msgspec.structs.replace(spec, name=None, env={}, labels={}, stay=False)
            self._task = asyncio.get_running_loop().create_task(self._fill(bare, rules, stale), name="warm")

    async def _fill(
        self, spec: model.SandboxSpec, rules: policy.Merged, stale: list[interfaces.Machine]
    ) -> None:
        for machine in stale:
            await machine.kill("another shape is wanted")
        with suppress(errors.ClocheError):
            while len(self._ready) < self._count:
                self._ready.append(await self._make(spec, rules))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for machine in self._ready:
            await machine.kill("the engine closed")
        self._ready = []


def _ordinary(spec: model.SandboxSpec, rules: policy.Merged) -> bool:
    """Whether one that nobody asked for yet could be it: files of one's own cannot be given afterwards."""
    lends = spec.workspace is not None or bool(rules.files.read or rules.files.write)
    return not lends and spec.snapshot is None


def _shape(spec: model.SandboxSpec, rules: policy.Merged) -> bytes:
    """What must be equal for one sandbox to stand in for another; the rest is bound when it is taken. The rules are part of
    it, because files that they come from may have changed since."""
    late: dict[str, Any] = {
        "name": None,
        "env": {},
        "labels": {},
        "stay": False,
        "timeout_s": None,
        "idle_timeout_s": None,
        "secrets": (),
        "policy": {group: fields for group, fields in spec.policy.items() if group != "network"},
    }
    bare = msgspec.structs.replace(rules, network=policy.Network(), environment=policy.Environment())
    return msgspec.json.encode((msgspec.structs.replace(spec, **late), bare))


def owner_lives(owner: str) -> bool:
    """Whether the engine `pid:starttime` still runs. A pid that was given to another process does not count."""
    pid, _, started = owner.partition(":")
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19] == started.encode()
    except (OSError, ValueError, IndexError):
        return False
