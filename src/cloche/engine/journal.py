"""Events: appended once, written behind, fanned out to followers.

The hot path only appends to a list; a writer moves it to the store a moment later, off the event loop. Whoever reads
the journal gets what is not written yet as well, because reading flushes first.

The audit log is fed from here as well, and sooner: its lines are handed to the kernel in the next turn of the loop, while the
command that they speak of is still on its way, and in any case before an answer. What looks like a credential is masked
once, for both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from cloche import events, interfaces

if TYPE_CHECKING:
    from cloche.measures import Measures

_NOBODY = ("engine", "guest", "sweeper")
_DELAY_S = 0.2


class Journal:
    def __init__(
        self,
        store: interfaces.Store,
        audit: interfaces.Audit | None = None,
        measures: Measures | None = None,
    ) -> None:
        self._measures = measures
        self._store = store
        self._audit = audit
        self._audit_due = False
        self._tending = False
        self._known_problem: str | None = None
        self._pending: list[events.AnyEvent] = []
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def append(self, event: events.AnyEvent) -> None:
        # What nobody asked for at this moment happens in tasks that may have begun in somebody's request.
        asked = None if event.actor in _NOBODY else events.trace.get()
        if asked is not None and event.trace is msgspec.UNSET:
            event = msgspec.structs.replace(event, trace=asked.id)
        if self._measures is not None:
            self._measures.take(event)
        if self._audit is not None:
            event = self._audit.masked(event)
            self.audit(event)
        self._pending.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._flush_soon)

    def audit(self, event: events.AnyEvent) -> None:
        """For the audit log alone: what the store has recorded by itself."""
        if self._audit is None:
            return
        self._audit.append(event)
        if not self._audit_due:
            self._audit_due = True
            asyncio.get_running_loop().call_soon(self._flush_audit)

    def settle_audit(self) -> None:
        """Now, because somebody is about to be answered."""
        if self._audit_due:
            self._flush_audit()

    def _flush_audit(self) -> None:
        if self._audit is None or not self._audit_due:
            return
        self._audit_due = False
        if self._audit.flush() and not self._tending:
            self._tending = True
            self._spawn(self._tend(), "audit")
        self._tell_problem()

    def _tell_problem(self) -> None:
        """The store hears of it when the log begins to fail; of the end of that, the log itself."""
        problem = self._audit.problem if self._audit is not None else None
        if problem is not None and self._known_problem is None:
            self._pending.append(
                events.Administered(
                    sandbox=None,
                    time=time.time(),
                    actor="engine",
                    operation="audit_failed",
                    detail=problem,
                    failed=True,
                )
            )
        self._known_problem = problem

    async def _tend(self) -> None:
        assert self._audit is not None
        try:
            await asyncio.to_thread(self._audit.tend)
        finally:
            self._tending = False
        self._tell_problem()

    def _flush_soon(self) -> None:
        self._spawn(self.flush(), "journal")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        async with self._writing:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            batch, self._pending = self._pending, []
            if batch:
                await asyncio.to_thread(self._write, batch)
                self._changed.set()
                self._changed = asyncio.Event()

    def _write(self, batch: list[events.AnyEvent]) -> None:
        self._store.record(batch)

    async def close(self) -> None:
        """Write what waits, to both."""
        await self.flush()
        if self._audit is not None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.to_thread(self._audit.close)

    async def read(
        self, *, after: int = 0, sandbox: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        await self.flush()
        return await asyncio.to_thread(self._store.events, after=after, sandbox=sandbox, limit=limit)

    async def follow(self, *, after: int = 0, sandbox: str | None = None) -> AsyncIterator[dict[str, Any]]:
        while True:
            changed = self._changed
            for event in await self.read(after=after, sandbox=sandbox):
                after = event["seq"]
                yield event
            if changed is self._changed:
                await changed.wait()
