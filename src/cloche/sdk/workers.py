"""Threads for the portal's blocking work that still work while the process ends.

Python shuts its own thread pools before it runs `atexit`, and since 3.12 no thread can be started by then. But sandboxes
are ended in `atexit`, after the caller's last thread: a worker of ours, started early and belonging to nobody's pool, is
there to the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_MOST = 16


class Workers(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` by name only, because an event loop takes no other; the threads and the queue are ours."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Condition()
        self._hired: set[threading.Thread] = set()
        self._count = 0
        self._free = 0
        self._hire()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def perform() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args, **kwargs)
            except BaseException as problem:
                future.set_exception(problem)
            else:
                future.set_result(result)

        with self._lock:
            wanted = self._free <= 0 and self._count < _MOST
            self._free -= 1
        if wanted:
            self._hire()
        self._todo.put(perform)
        return future

    def _hire(self) -> None:
        try:
            thread = threading.Thread(target=self._work, name="cloche worker", daemon=True)
            self._hired.add(thread)
            thread.start()
        except RuntimeError:
            return  # the process is ending: those that are there must do
        with self._lock:
            self._count += 1
            self._free += 1

    def _work(self) -> None:
        while (perform := self._todo.get()) is not None:
            perform()
            del perform  # or it would keep its result alive until the next one
            with self._lock:
                self._free += 1
                if self._free == self._count:
                    self._lock.notify_all()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() in self._hired

    def rest(self, seconds: float) -> None:
        """Wait until nothing is under way, at most so long. Nobody submits meanwhile, or there is no end to it."""
        with self._lock:
            self._lock.wait_for(lambda: self._free >= self._count, seconds)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._count):
            self._todo.put(None)
