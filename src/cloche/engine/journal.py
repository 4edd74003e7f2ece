"""Events: appended once, written behind, fanned out to followers.

The hot path only appends to a list; a writer moves it to the store a moment later, off the event loop. Whoever reads
the journal gets what is not written yet as well, because reading flushes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from cloche import events, interfaces

_DELAY_S = 0.2


class Journal:
    def __init__(self, store: interfaces.Store) -> None:
        self._store = store
        self._pending: list[events.AnyEvent] = []
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def append(self, event: events.AnyEvent) -> None:
        self._pending.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._flush_soon)

    def _flush_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.flush(), name="journal")
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
