"""A terminal over a WebSocket: `GET /v1/sandboxes/{sandbox}/executions/{execution}/terminal?after=N`.

    binary →   what is typed                       binary ←   what the command writes, one message a piece
    text   →   {"resize": {"columns", "rows"}}     text   ←   {"truncated": {…}}, {"denied": {…}}, {"error": {…}}
               {"signal": 2}, {"end": true}                   {"exit": {the result}}, the last one

The execution is the sandbox's: a client that leaves stops nothing. To go on, it attaches again with `after` = the `after` it had plus the
number of binary and `truncated` messages it got. A client that reads too slowly misses what the log no longer keeps, and is told how much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from cloche import errors, interfaces, model, rpc
from cloche.server.guarding import opened
from cloche.server.http import answering, ports, wire
from cloche.server.http.operations import Event
from cloche.server.http.routes.executions import exec_event

PATH = "/v1/sandboxes/{sandbox}/executions/{execution}/terminal"


class Size(wire.Body, frozen=True, kw_only=True):
    columns: int
    rows: int


class Order(wire.Body, frozen=True, kw_only=True):
    """A text message of the client; one of these."""

    resize: Size | None = None
    signal: int | None = None
    end: bool = False


class Terminals:
    def __init__(self, entrance: answering.Answers) -> None:
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = _Place(scope["path_params"])
        try:
            place.backend = self._entrance.enter(Headers(scope=scope), "terminal")[1]
            after = _after(QueryParams(scope["query_string"].decode("latin-1")))
            await receive()  # websocket.connect
            followed = await opened(place.backend.attach(place.sandbox, place.execution, after))
        except errors.ClocheError as problem:
            await ports.refuse(scope, receive, send, problem)
            return
        await send({"type": "websocket.accept"})
        ways = [asyncio.ensure_future(_out(send, followed)), asyncio.ensure_future(_in(receive, send, place))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            close = getattr(followed, "aclose", None)
            if close is not None:
                with suppress(RuntimeError):
                    await close()


class _Place:
    backend: interfaces.Backend

    def __init__(self, places: dict[str, str]) -> None:
        self.sandbox, self.execution = places["sandbox"], places["execution"]


async def _out(send: Send, followed: AsyncIterator[model.StreamEvent]) -> None:
    code, reason = 1000, ""
    try:
        async for event in followed:
            if isinstance(event, model.Output):
                await send({"type": "websocket.send", "bytes": event.data})
            else:
                await _say(send, exec_event(event))
    except errors.ClocheError as problem:
        code, reason = 4000 + errors.TABLE[problem.code].http, problem.code
        await _say(send, Event("error", problem.to_dict()))
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def _say(send: Send, event: Event) -> None:
    await send({"type": "websocket.send", "text": rpc.encode({event.kind: event.data}).decode()})


async def _in(receive: Receive, send: Send, place: _Place) -> None:
    """Returns when the client has left. What it asks for and cannot have is told, and ends nothing."""
    while (message := await receive())["type"] != "websocket.disconnect":
        try:
            await _take(message, place)
        except errors.ClocheError as problem:
            await _say(send, Event("error", problem.to_dict()))


async def _take(message: Any, place: _Place) -> None:
    where = (place.sandbox, place.execution)
    data = message.get("bytes")
    if data is not None:
        await place.backend.write_stdin(*where, data)
        return
    order = _order(message.get("text") or "")
    if order.resize is not None:
        await place.backend.resize(*where, order.resize.columns, order.resize.rows)
    if order.signal is not None:
        await place.backend.signal(*where, order.signal)
    if order.end:
        await place.backend.write_stdin(*where, b"", True)


def _order(text: str) -> Order:
    try:
        return msgspec.json.decode(text.encode(), type=Order)
    except msgspec.DecodeError as problem:
        raise errors.error(
            "argument_invalid",
            f"a text message is not valid: {problem}",
            hint='send {"resize": {"columns": 80, "rows": 24}} or {"signal": 2}; bytes to type are binary messages',
        ) from None


def _after(query: QueryParams) -> int:
    given = query.get("after", "0")
    if not given.isdecimal() or len(given) > 15:
        raise errors.error("argument_invalid", f"after is {given[:50]!r}", field="after")
    return int(given)
