"""A server's end: who is under way when it is told to stop, who is told when, and when patience is over.

* *Begun*: nothing new is begun; whoever asks gets `server_stopping`. What has an end may come to it. What has none (events that are followed, a
  directory that is watched) is told at once, since waiting for it would be waiting for nothing.
* *Over*, after `server.drain_s` or a second signal: the rest is told as well. Told means an answer, an event or a frame with the code, not a
  connection that breaks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cloche import errors


class Leaving:
    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.begun = asyncio.Event()
        self.over = asyncio.Event()
        self._work: dict[asyncio.Future[Any], bool] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, work: asyncio.Future[Any], *, endless: bool = False) -> None:
        """Cancel this when its time has come. Whoever waits for it asks `told` then."""
        self._work[work] = endless
        work.add_done_callback(lambda done: self._work.pop(done, None))
        if self.over.is_set() or (endless and self.begun.is_set()):
            work.cancel()

    def told(self, work: asyncio.Future[Any]) -> errors.ClocheError | None:
        """The problem to tell, if it was us who ended this."""
        return problem() if work.cancelled() and self.begun.is_set() else None

    def check(self) -> None:
        """Refuse what comes now."""
        if self.begun.is_set():
            raise problem()

    def begin(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self._timer = asyncio.get_running_loop().call_later(self.drain_s, self.end)
            for work in [work for work, endless in self._work.items() if endless]:
                work.cancel()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.begun.set()
        self.over.set()
        for work in list(self._work):
            work.cancel()


def problem() -> errors.ClocheError:
    return errors.error(
        "server_stopping",
        "the server was told to stop",
        hint="try again in a moment, when another has taken its place",
        retry_after_s=2,
    )
