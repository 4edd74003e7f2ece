"""A backend behind the keeper's unix socket: every method of the interface as one call on one connection.

Who listens there must be us: a directory that somebody else may write to holds sockets of their choosing, and whoever
answers gets our commands and files.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import msgspec

from cloche import __version__, errors, framing, interfaces, rpc

_CHUNK = 1 << 18
_PIECE = 1 << 16
_GREETING_S = 10.0


async def connect(path: str, *, missing_ok: bool) -> interfaces.Backend | None:
    """A backend on the server at `path`. With `missing_ok`, None where nobody (of our protocol) answers."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as problem:
        if missing_ok:
            return None
        raise errors.error(
            "server_unavailable",
            f"nothing answers at {path}: {problem.strerror}",
            hint="start it with `cloche serve`, or unset CLOCHE_URL to run locally",
        ) from None
    backend = LocalBackend(path, reader, writer)
    try:
        _check_peer(path, writer)
        await backend.greet()
    except errors.ClocheError:
        await backend.aclose()
        if missing_ok:
            return None
        raise
    return cast(interfaces.Backend, backend)


def _check_peer(path: str, writer: asyncio.StreamWriter) -> None:
    peer: socket.socket = writer.get_extra_info("socket")
    uid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[
        1
    ]
    if uid != os.geteuid():
        raise errors.error(
            "peer_refused",
            f"the server at {path} runs as uid {uid}, not as {os.geteuid()}",
            hint="set CLOCHE_HOME to a directory of your own",
        )


Frames = asyncio.Queue[tuple[int, bytes]]
"""What was answered to one call, kind and body."""


class LocalBackend:
    """Answers `interfaces.Backend` by sending; see `__getattr__`."""

    def __init__(
        self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str | None = None
    ) -> None:
        self.where = where or f"unix:{path}"
        self.closed = False
        self._writer = writer
        self._next = 1
        self._waiting: dict[int, Frames] = {}
        self._task = asyncio.get_running_loop().create_task(self._read(reader), name=f"read {path}")

    async def greet(self) -> None:
        try:
            answer = await asyncio.wait_for(self._call("hello", {"version": __version__}), _GREETING_S)
        except TimeoutError:
            raise errors.error("server_unavailable", f"{self.where} accepts, but does not answer") from None
        found = msgspec.json.decode(answer)
        if found.get("protocol") != framing.PROTOCOL:
            raise errors.error(
                "server_version_mismatch",
                f"the server speaks protocol {found.get('protocol')}, this client {framing.PROTOCOL}",
                hint="restart it: `cloche gc --restart`",
            )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = rpc.methods().get(name)
        if method is None:
            raise AttributeError(name)

        def call(*positional: Any, **named: Any) -> Any:
            arguments = msgspec.to_builtins(method.parameters(*positional, **named))
            if method.streams:
                return self._stream(method, arguments)
            if method.opens:
                return self._tunnel(method, arguments)
            return self._ask(method, arguments)

        return call

    async def _ask(self, method: rpc.Method, arguments: Any) -> Any:
        body = await self._call(method.name, arguments)
        return msgspec.json.decode(body, type=method.result) if method.result is not type(None) else None

    async def _call(self, method: str, arguments: Any) -> bytes:
        channel, queue = self._open(method, arguments)
        try:
            await self._writer.drain()
            _, body = await _answer(queue)
            return body
        except asyncio.CancelledError:
            self._send(framing.CANCEL, channel)
            raise
        finally:
            self._waiting.pop(channel, None)

    async def _stream(self, method: rpc.Method, arguments: Any) -> AsyncIterator[Any]:
        channel, queue = self._open(method.name, arguments)
        ended = False
        try:
            while True:
                kind, body = await _answer(queue)
                if kind == framing.END:
                    ended = True
                    return
                yield msgspec.json.decode(body, type=method.result)
        except errors.ClocheError:
            ended = True
            raise
        finally:
            self._waiting.pop(channel, None)
            if not ended:
                self._send(framing.CANCEL, channel)

    async def _tunnel(self, method: rpc.Method, arguments: Any) -> interfaces.Tunnel:
        tunnel = Tunnel(self._part, self._send, self._writer.drain)
        channel, _ = self._open(method.name, arguments, tunnel.frames)
        tunnel.channel = channel
        try:
            await _answer(tunnel.frames)
        except BaseException:
            self._part(channel)
            raise
        return tunnel

    def _part(self, channel: int) -> None:
        """Leave a call that may still be under way."""
        if self._waiting.pop(channel, None) is not None:
            self._send(framing.CANCEL, channel)

    def _open(self, method: str, arguments: Any, queue: Frames | None = None) -> tuple[int, Frames]:
        if self.closed:
            raise errors.error("connection_lost", f"the connection to {self.where} is closed")
        channel, self._next = self._next, self._next + 1
        queue = queue or asyncio.Queue()
        self._waiting[channel] = queue
        call = {"method": method, "arguments": arguments, "protocol": framing.PROTOCOL}
        self._send(framing.CALL, channel, _encode(call))
        return channel, queue

    def _send(self, kind: int, channel: int, body: bytes = b"") -> None:
        if not self.closed:
            self._writer.write(framing.pack(kind, channel, body))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = framing.Reader()
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                for kind, channel, body in frames.feed(data):
                    if channel in self._waiting:
                        self._waiting[channel].put_nowait((kind, body))
        self._end()

    def _end(self) -> None:
        self.closed = True
        lost = errors.error(
            "connection_lost",
            f"the connection to {self.where} ended",
            hint="its sandboxes are gone; create anew",
        )
        for queue in self._waiting.values():
            queue.put_nowait((framing.ERROR, msgspec.json.encode(lost.to_dict())))

    async def aclose(self) -> None:
        self.closed = True
        self._task.cancel()
        self._writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await self._writer.wait_closed()
        with suppress(asyncio.CancelledError):
            await self._task


interfaces.Backend.register(LocalBackend)


class _Incoming(Frames):
    """The frames of a tunnel. What the other side has passed on concerns who writes, and is not queued behind what nobody reads."""

    def __init__(self, credit: rpc.Credit) -> None:
        super().__init__()
        self._credit = credit

    def put_nowait(self, item: tuple[int, bytes]) -> None:
        if item[0] == framing.TAKEN:
            self._credit.give(framing.COUNT.unpack(item[1])[0])
            return
        if item[0] in (framing.ERROR, framing.END):
            self._credit.end()
        super().put_nowait(item)


class Tunnel(interfaces.Tunnel):
    """A tunnel as frames: see framing.py."""

    def __init__(
        self,
        part: Callable[[int], None],
        send: Callable[[int, int, bytes], None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self.channel = 0
        self._credit = rpc.Credit()
        self.frames = _Incoming(self._credit)
        self._part, self._send, self._drain = part, send, drain
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._rest = b""
        self._over = self._ended = False
        self._problem: errors.ClocheError | None = None

    async def read(self, most: int = 1 << 16) -> bytes:
        async with self._reading:
            if not self._rest and not self._over:
                await self._next()
            data, self._rest = self._rest[:most], self._rest[most:]
            if data:
                self._send(framing.TAKEN, self.channel, framing.COUNT.pack(len(data)))
            return data

    async def _next(self) -> None:
        if self._problem is not None:
            raise self._problem
        try:
            kind, self._rest = await _answer(self.frames)
        except errors.ClocheError as problem:
            self._problem = problem
            raise
        self._over = kind == framing.END or not self._rest

    async def write(self, data: bytes) -> None:
        async with self._writing:
            left = memoryview(data)
            while left:
                if self._problem is not None:
                    raise self._problem
                count = await self._credit.some(min(_PIECE, len(left)))
                if count == 0:
                    raise errors.error("connection_lost", "the tunnel has ended")
                self._credit.spend(count)
                self._send(framing.INPUT, self.channel, bytes(left[:count]))
                left = left[count:]
                await self._drain()

    async def end(self) -> None:
        async with self._writing:
            if not self._ended:
                self._ended = True
                self._send(framing.INPUT, self.channel, b"")

    async def aclose(self) -> None:
        self._part(self.channel)
        if self._problem is None:
            self._problem = errors.error("connection_lost", "the tunnel was closed here")
            self.frames.put_nowait((framing.ERROR, msgspec.json.encode(self._problem.to_dict())))


def _encode(call: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(call)
    except (
        UnicodeEncodeError
    ):  # a path or argument that is not UTF-8: only the standard library says it in JSON
        return json.dumps(call).encode()


async def _answer(queue: Frames) -> tuple[int, bytes]:
    kind, body = await queue.get()
    if kind == framing.ERROR:
        raise errors.from_dict(msgspec.json.decode(body))
    return kind, body
