"""One daemon thread with one event loop per process, where every backend lives.

Synchronous callers wait for it; asynchronous callers, in whatever loop, await it. So a notebook's running loop, threads
and several loops all share one engine, and nothing has to be closed with a loop.

A call costs one wake-up of the loop and one of the caller. `run` is written for that: a bare lock instead of a
`concurrent.futures.Future`, whose condition variable and chained callbacks cost as much again.

A fork copies the memory but not the thread. The child's copy is dropped at once, so that new work gets a new portal,
and every handle remembers its portal, so that an old one is recognised by its pid: `used_after_fork`. What our threads hold at that
moment (a module that is being imported, a mutex inside SQLite) would stay held in the child for ever, so they rest while a
fork happens.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from cloche import errors, interfaces
from cloche.sdk import workers

T = TypeVar("T")
_END: Any = object()
_CANCEL_S = 10.0  # how long an interrupted caller waits for its work to unwind
_CLOSE_S = 10.0
_REST_S = (
    5.0  # how long a fork waits for our threads: a child that might hang is better than a parent that does
)


class Portal:
    """A loop in a thread, and the backends that live in it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._workers = workers.Workers()
        self.loop.set_default_executor(self._workers)
        self.backends: dict[str, asyncio.Task[interfaces.Backend]] = {}
        """By address; only the loop's own thread touches it."""
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cloche", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # What is still under way gets to know, so that no caller waits for ever.
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    @property
    def is_here(self) -> bool:
        """Whether this is the portal's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def is_ours(self) -> bool:
        return self.is_here or self._workers.is_here

    def check(self, work: Coroutine[Any, Any, Any]) -> None:
        """Refuse work that nobody would do. It is closed, so that it does not warn of never being awaited."""
        if os.getpid() != self.pid:
            work.close()
            raise errors.error(
                "used_after_fork",
                "this sandbox was made before the process forked",
                hint="create sandboxes in the child, or use the 'spawn' start method",
            )
        if self._closed:
            work.close()
            raise errors.error("server_unavailable", "the process is ending; its sandboxes are gone")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        self.check(work)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        """At exit: end what lives here in order, so that nothing is left for a sweeper. Twice is harmless."""
        if os.getpid() != self.pid or self._closed:
            return
        for closer in self._closers:
            try:
                self.submit(closer()).result(timeout=_CLOSE_S)
            except Exception:
                continue  # going away anyway; the kernel ends what is left
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=2)
        atexit.unregister(self.close)

    def rest(self) -> threading.Event:
        """Nothing of ours runs until the event is set: the loop waits between two steps, the workers have finished theirs."""
        arrived, leave = threading.Event(), threading.Event()

        def wait() -> None:
            arrived.set()
            leave.wait()

        with suppress(RuntimeError):  # closed since
            self.loop.call_soon_threadsafe(wait)
            if arrived.wait(_REST_S):
                self._workers.rest(_REST_S)
        return leave


_portal: Portal | None = None
_lock = threading.Lock()


def get() -> Portal:
    """This process's portal. A forked child gets a new one; handles of the parent's stay unusable in it."""
    global _portal
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = Portal()
        return _portal


def close() -> None:
    """End every backend of this process; the next use starts anew."""
    global _portal
    with _lock:
        closing, _portal = _portal, None
    if closing is not None:
        closing.close()


_forking = threading.local()


def _rest_before_fork() -> None:
    home = _portal
    if home is not None and home.pid == os.getpid() and not home.is_ours:
        _forking.leave = home.rest()


def _go_on_after_fork() -> None:
    leave = _forking.__dict__.pop("leave", None)
    if leave is not None:
        leave.set()


def _forget_after_fork() -> None:
    # Another thread may have held the lock at the fork, and it does not exist in the child to release it.
    global _portal, _lock
    _portal, _lock = None, threading.Lock()
    _forking.__dict__.clear()


os.register_at_fork(
    before=_rest_before_fork, after_in_parent=_go_on_after_fork, after_in_child=_forget_after_fork
)


# ── for synchronous callers ────────────────────────────────────────────────────────────────────────


class _Call(Generic[T]):
    """Work on its way through the portal, and the caller that waits for it."""

    __slots__ = ("_done", "_error", "_home", "_result", "_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], home: Portal) -> None:
        self._work = work
        self._home = home
        self._task: asyncio.Task[None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def wait(self) -> T:
        try:
            self._home.loop.call_soon_threadsafe(self._start)
            self._done.acquire()
        except BaseException:
            self._abandon()
            raise
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def _start(self) -> None:
        self._task = self._home.loop.create_task(self._perform())

    async def _perform(self) -> None:
        # Within the task rather than by a callback of it, which would cost the loop another turn.
        try:
            self._result = await self._work
        except BaseException as problem:
            self._error = problem
        finally:
            self._task = None  # the error's traceback leads here: no cycle for the collector
            self._done.release()

    def _abandon(self) -> None:
        """The caller was interrupted (^C): cancel the work and wait until it has unwound, or for a second ^C."""
        self._home.loop.call_soon_threadsafe(self._cancel)
        self._done.acquire(timeout=_CANCEL_S)

    def _cancel(self) -> None:
        if self._task is None:
            self._leave()  # it has ended, or the interrupt came before it was even handed over
        else:
            self._task.add_done_callback(self._leave)
            self._task.cancel()

    def _leave(self, _: object = None) -> None:
        """A task that is cancelled before its first step never enters `_perform`, and would release nobody."""
        self._work.close()
        with suppress(RuntimeError):  # it did
            self._done.release()


def run(work: Coroutine[Any, Any, T], home: Portal | None = None) -> T:
    """Wait for work in the portal's loop; an interrupt (^C) cancels it there."""
    home = home or get()
    home.check(work)
    if home.is_here:
        work.close()
        raise RuntimeError("a callback of Cloche used a blocking method; use the asynchronous handles there")
    return _Call(work, home).wait()


def iterate(source: AsyncIterator[T], home: Portal | None = None) -> Iterator[T]:
    """The items of an iterator that lives in the portal. Leaving early closes it there."""
    home = home or get()
    stream = _Stream(source)
    try:
        while (item := run(stream.next(), home)) is not _END:
            yield item
    finally:
        _leave(stream, home)


def _leave(stream: _Stream[Any], home: Portal) -> None:
    # A generator may be finalised anywhere: in a forked child, at exit, or by the collector in the portal's own thread.
    with suppress(errors.ClocheError):
        if home.is_here:
            home.submit(stream.finish())
        else:
            run(stream.finish(), home)


# ── for asynchronous callers ───────────────────────────────────────────────────────────────────────


async def bridge(work: Coroutine[Any, Any, T], home: Portal | None = None) -> T:
    """Await work of the portal's loop from any loop."""
    home = home or get()
    if asyncio.get_running_loop() is home.loop:
        return await work
    return await asyncio.wrap_future(home.submit(work))


async def bridge_iterator(source: AsyncIterator[T], home: Portal | None = None) -> AsyncIterator[T]:
    home = home or get()
    stream = _Stream(source)
    try:
        while (item := await bridge(stream.next(), home)) is not _END:
            yield item
    finally:
        with suppress(errors.ClocheError):
            await bridge(stream.finish(), home)


class _Stream(Generic[T]):
    """An iterator in the portal, one step at a time: whoever was cancelled in `next` has unwound before `finish`."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source
        self._turn = asyncio.Lock()

    async def next(self) -> T:
        async with self._turn:
            try:
                return await anext(self._source)
            except StopAsyncIteration:
                return _END  # type: ignore[no-any-return]

    async def finish(self) -> None:
        async with self._turn:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
