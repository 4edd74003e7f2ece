"""What happens by itself: endings and suspensions by time and idleness, and watched memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cloche import interfaces
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


def owner_lives(owner: str) -> bool:
    """Whether the engine `pid:starttime` still runs. A pid that was given to another process does not count."""
    pid, _, started = owner.partition(":")
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # One that has ended and is not reaped yet still has its place in /proc.
        return fields[19] == started.encode() and fields[0] not in (b"Z", b"X")
    except (OSError, ValueError, IndexError):
        return False
