"""The Connect protocol with its JSON codec: envelopes in and out, and streams that end with a word about how they ended.

An envelope is a flag byte, a length of four bytes (big-endian) and a message. The last one of a stream has flag 2 and is `{}` or
`{"error": {code, message}}`; the status is 200 by then, whatever happens. Compression is never offered.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.compat.e2b import faults

log = logging.getLogger("cloche.e2b")
_HEAD = struct.Struct(">BI")
_END, _COMPRESSED = 2, 1
STREAM_TYPE = "application/connect+json"


def envelope(message: Any, flag: int = 0) -> bytes:
    body = msgspec.json.encode(message)
    return _HEAD.pack(flag, len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError as problem:
        raise faults.Fault(400, f"the message is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise faults.Fault(400, "the message is not an object")
    return found


async def read_all(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise faults.Fault(413, f"the body is larger than {most >> 20} MiB", connect="resource_exhausted")
        parts.append(part)
    return b"".join(parts)


async def messages(request: Request, most: int) -> AsyncIterator[dict[str, Any]]:
    """The messages of a client's stream, each as soon as it is whole."""
    buffer = bytearray()
    async for part in request.stream():
        buffer += part
        while len(buffer) >= _HEAD.size:
            flag, length = _HEAD.unpack_from(buffer)
            if length > most:
                raise faults.Fault(
                    413, f"a message is larger than {most >> 20} MiB", connect="resource_exhausted"
                )
            if flag & _COMPRESSED:
                raise faults.Fault(501, "compressed messages are not taken", connect="unimplemented")
            if len(buffer) < _HEAD.size + length:
                break
            body = bytes(buffer[_HEAD.size : _HEAD.size + length])
            del buffer[: _HEAD.size + length]
            if not flag & _END:
                yield decode(body)
    if buffer:
        raise faults.Fault(400, "the stream ends within a message")


async def only_message(request: Request, most: int) -> dict[str, Any]:
    """The one request of a call whose answers are a stream."""
    async for message in messages(request, most):
        return message
    raise faults.Fault(400, "the stream has no message")


class Last(bytes):
    """The last piece of a stream: it leaves together with the end."""


class Stream(Response):
    """Bytes, each piece flushed as it comes. Who takes nothing for too long is cut; who leaves ends nothing but the stream."""

    def __init__(self, pieces: AsyncIterator[bytes], patience_s: float, media_type: str) -> None:
        super().__init__(
            media_type=media_type, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError, TimeoutError, OSError):
                await writing
            await _close(self._pieces)

    async def _write(self, send: Send) -> None:
        async for piece in self._pieces:
            last = isinstance(piece, Last)
            message = {"type": "http.response.body", "body": bytes(piece), "more_body": not last}
            try:
                await asyncio.wait_for(send(message), self._patience_s)
            except TimeoutError:
                log.warning("a stream was cut: its reader took nothing for %s s", self._patience_s)
                raise
            if last:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(items: AsyncIterator[Any]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        with suppress(RuntimeError):
            await close()


def failed(fault: faults.Fault) -> Response:
    """A stream that ends before it begins: its status is 200 all the same, and a client looks for the reason in its last envelope."""
    end = {"error": {"code": fault.connect, "message": fault.message}}
    return Response(envelope(end, _END), media_type=STREAM_TYPE)


async def enveloped(
    events: AsyncIterator[dict[str, Any]],
    sandbox: str,
    is_last: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> AsyncIterator[bytes]:
    """Events as envelopes, and the last one; a failure is told there, in the words of `faults`."""
    end: dict[str, Any] = {}
    kept = b""
    try:
        async for event in events:
            if is_last(event):  # and so it goes with the word about how the stream ended
                kept = envelope(event)
                break
            yield envelope(event)
    except faults.Fault as fault:
        end = {"error": {"code": fault.connect, "message": fault.message}}
    except errors.ClocheError as problem:
        if faults.is_gone(problem):
            end = {"error": {"code": "unavailable", "message": f"The sandbox {sandbox} was not found"}}
        else:
            made = faults.of(problem)
            end = {"error": {"code": made.connect, "message": made.message}}
    except Exception:
        log.exception("a stream failed")
        end = {"error": {"code": "internal", "message": "something of ours failed; the log has it"}}
    finally:
        await _close(events)
    yield Last(kept + envelope(end, _END))


async def with_keepalive(events: AsyncIterator[Any], every_s: float, keepalive: Any) -> AsyncIterator[Any]:
    """The events, and `keepalive` where there has been none for a while."""
    waiting: asyncio.Future[Any] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((waiting,), timeout=every_s)
            if not done:
                yield keepalive
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield event
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, errors.ClocheError):
                await waiting
        await _close(events)
