"""Idempotency keys: a request that is repeated gets the first one's answer.

* *One execution.* Who repeats a key while the first is under way waits for it. The work does not end with the client that asked
  first: losing an answer is what the key is for. (The exception is work whose promise is to end with its request; then whoever still
  waits begins anew.)
* *The same request.* A key belongs to one caller and one request: operation, address, query and body. Another one with it is refused.
* *A failure is no answer*: the next attempt is a first one.
* *Bounded*, by age, number and bytes.
* *Kept*, in a file if one is given (`answers`), before anybody hears the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cloche import errors
from cloche.server.http import answers

_MOST = 10_000
_MOST_BYTES = 64 << 20
_KEPT_S = 24 * 3600.0


class _Known(NamedTuple):
    digest: str
    since: float
    answer: asyncio.Future[Response]


class Remembered:
    def __init__(self, clock: Callable[[], float] = time.monotonic, path: str | None = None) -> None:
        self._clock = clock
        self._file = None if path is None else answers.File(path, _KEPT_S)
        self._read = path is None
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._size = 0

    async def once(
        self,
        key: tuple[str, str],
        digest: str,
        perform: Callable[[], Awaitable[Response]],
        wait: Callable[[Awaitable[Response]], Awaitable[Response]],
    ) -> Response:
        """`perform` is done once; every caller waits for it in its own way, and `wait` raises if that caller leaves."""
        if not self._read:
            self._recall()
        while True:
            self._forget()
            known = self._known.get(key)
            first = known is None
            if known is None:
                known = self._begin(key, digest, perform)
            elif known.digest != digest:
                raise errors.error(
                    "name_conflict",
                    "this Idempotency-Key was used for another request",
                    hint="use a new one for every request that differs",
                )
            try:
                return _copy(await wait(asyncio.shield(known.answer)))
            except ClientDisconnect:
                if first or not known.answer.done() or not _left(known.answer):
                    raise
                # It was not this client that left but the first, and its work ended with it.

    def _begin(self, key: tuple[str, str], digest: str, perform: Callable[[], Awaitable[Response]]) -> _Known:
        async def work() -> Response:
            response = await perform()
            if self._file is not None:
                self._file.append(_written(key, digest, response))
            return response

        made = _Known(digest, self._clock(), asyncio.get_running_loop().create_task(work()))
        self._known[key] = made

        def ended(task: asyncio.Future[Response]) -> None:
            if task.cancelled() or task.exception() is not None:
                if self._known.get(key) is made:
                    del self._known[key]
            else:
                self._size += len(task.result().body)

        made.answer.add_done_callback(ended)
        return made

    def _recall(self) -> None:
        """What a server before this one has answered."""
        self._read = True
        assert self._file is not None
        for kept in self._file.read():
            answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
            answer.set_result(_as_response(kept))
            since = self._clock() - max(0.0, time.time() - kept.time)
            self._known[kept.caller, kept.key] = _Known(kept.digest, since, answer)
            self._size += len(kept.body)

    def _forget(self) -> None:
        now = self._clock()
        for key, known in list(self._known.items()):
            fits = len(self._known) <= _MOST and self._size <= _MOST_BYTES
            if fits and now - known.since < _KEPT_S:
                return
            if known.answer.done() and not known.answer.cancelled() and known.answer.exception() is None:
                del self._known[key]
                self._size -= len(known.answer.result().body)


def _written(key: tuple[str, str], digest: str, response: Response) -> answers.Kept:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
    return answers.Kept(
        caller=key[0], key=key[1], digest=digest, time=time.time(), status=response.status_code, headers=headers,
        body=bytes(response.body),
    )  # fmt: skip


def _as_response(kept: answers.Kept) -> Response:
    response = Response(kept.body, kept.status)
    response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.headers]
    return response


def _left(answer: asyncio.Future[Response]) -> bool:
    return answer.cancelled() or isinstance(answer.exception(), ClientDisconnect)


def _copy(response: Response) -> Response:
    copied = Response(response.body, response.status_code)
    copied.raw_headers = list(response.raw_headers)
    return copied
