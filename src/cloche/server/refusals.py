"""Every refused request is on record; a flood of them is a number.

Who needs no key to be refused must not be able to fill the disk, and who has one should not either. So each caller (strangers are one) has
`A_MINUTE` lines a minute; what goes beyond is counted by code, and the count is written as one line when the minute is over. Nothing is
left out: the sum over the lines is the number of refusals.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

from cloche import errors, events

A_MINUTE = 50
_MINUTE_S = 60.0
_MOST_CALLERS = 1000


class Recorder(Protocol):
    """What a backend that keeps a record has beside `interfaces.Backend`."""

    def record_refusal(self, operation: str, sandbox: str | None, code: str, message: str) -> None: ...

    def settle_audit(self) -> None: ...


class _Window:
    def __init__(self, since: float) -> None:
        self.since = since
        self.left = A_MINUTE
        self.more: Counter[str] = Counter()
        self.timer: asyncio.TimerHandle | None = None


class Ledger:
    """The refusals of one backend."""

    def __init__(self, backend: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def record(self, operation: str, sandbox: str | None, problem: errors.ClocheError) -> None:
        """Once, and before the answer leaves; `events.caller` says whose it is."""
        if getattr(problem, "_recorded", False):
            return
        problem._recorded = True  # type: ignore[attr-defined]
        caller, now = events.caller.get(""), self._clock()
        window = self._windows.get(caller)
        if window is not None and now - window.since >= _MINUTE_S:
            self._close(caller)
            window = None
        if window is None:
            window = self._windows[caller] = _Window(now)
            while len(self._windows) > _MOST_CALLERS:
                self._close(next(iter(self._windows)))
        if window.left > 0:
            window.left -= 1
            self._write(operation, sandbox, problem.code, problem.record or problem.message)
        else:
            window.more[problem.code] += 1
            self._arm(caller, window, now)

    def close(self) -> None:
        for caller in list(self._windows):
            self._close(caller)

    def _arm(self, caller: str, window: _Window, now: float) -> None:
        if window.timer is None:
            rest = max(0.0, window.since + _MINUTE_S - now)
            window.timer = asyncio.get_running_loop().call_later(rest, self._close, caller)

    def _close(self, caller: str) -> None:
        window = self._windows.pop(caller, None)
        if window is None:
            return
        if window.timer is not None:
            window.timer.cancel()
        if window.more:
            contextvars.copy_context().run(self._sum_up, caller, window.more)

    def _sum_up(self, caller: str, more: Counter[str]) -> None:
        events.caller.set(caller)
        each = ", ".join(f"{code} {count}" for code, count in more.most_common())
        words = f"{more.total()} more within a minute, which are not written one by one: {each}"
        self._write("many", None, more.most_common(1)[0][0], words)

    def _write(self, operation: str, sandbox: str | None, code: str, words: str) -> None:
        self._backend.record_refusal(operation, sandbox, code, words)
        self._backend.settle_audit()


_LEDGERS: WeakKeyDictionary[object, Ledger] = WeakKeyDictionary()


def of(backend: object) -> Ledger | None:
    """The ledger of a backend; None for one that keeps no record."""
    if not hasattr(backend, "record_refusal"):
        return None
    if backend not in _LEDGERS:
        _LEDGERS[backend] = Ledger(backend)  # type: ignore[arg-type]
    return _LEDGERS[backend]


def record_refusal(backend: object, operation: str, sandbox: str | None, problem: errors.ClocheError) -> None:
    """Put it on record, if the backend keeps one."""
    ledger = of(backend)
    if ledger is not None:
        ledger.record(operation, sandbox, problem)
