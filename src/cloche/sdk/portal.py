"""One daemon thread with one event loop per process, where every backend lives.

Synchronous callers wait for it; asynchronous callers, in whatever loop, await it. So a notebook's running loop, threads
and several loops all share one engine, and nothing has to be closed with a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from cloche import errors

T = TypeVar("T")
_END: Any = object()


class Portal:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._run, name="cloche", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if os.getpid() != self.pid:
            work.close()
            raise errors.error(
                "used_after_fork", "this sandbox was made before the process forked",
                hint="create sandboxes in the child, or use the 'spawn' start method",
            )  # fmt: skip
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        """At exit: end what lives here in order, so that nothing is left for a sweeper."""
        if os.getpid() != self.pid or not self.loop.is_running():
            return
        for closer in self._closers:
            try:
                self.submit(closer()).result(timeout=10)
            except Exception:
                continue  # going away anyway; the kernel ends what is left
        self._closers.clear()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=2)
        if not self.loop.is_running():
            self.loop.close()


_portal: Portal | None = None
_lock = threading.Lock()


def get() -> Portal:
    """This process's portal. A forked child gets a new one; handles of the parent's stay unusable in it."""
    global _portal
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = Portal()
        return _portal


def run(work: Coroutine[Any, Any, T], portal: Portal | None = None) -> T:
    """Wait for work in the portal's loop; an interrupt (^C) cancels it there."""
    future = (portal or get()).submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def bridge(work: Coroutine[Any, Any, T], portal: Portal | None = None) -> T:
    """Await work of the portal's loop from any loop."""
    home = portal or get()
    if asyncio.get_running_loop() is home.loop:
        return await work
    return await asyncio.wrap_future(home.submit(work))


def iterate(source: AsyncIterator[T], portal: Portal | None = None) -> Iterator[T]:
    home = portal or get()
    try:
        while (item := run(_next(source), home)) is not _END:
            yield item
    finally:
        run(_finish(source), home)


async def bridge_iterator(source: AsyncIterator[T], portal: Portal | None = None) -> AsyncIterator[T]:
    home = portal or get()
    try:
        while (item := await bridge(_next(source), home)) is not _END:
            yield item
    finally:
        await bridge(_finish(source), home)


async def _next(source: AsyncIterator[T]) -> T:
    try:
        return await anext(source)
    except StopAsyncIteration:
        return _END  # type: ignore[no-any-return]


async def _finish(source: AsyncIterator[T]) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()
