"""The keeper's frames over a WebSocket, for our own clients far away: `GET /v1/connect`.

The same `Connection` serves the unix socket and this, behind the same guard as every route, so a remote SDK can do what a local one can,
streams, terminals and cancellation included, and a sandbox that was not made to stay ends with its connection here too. Messages are
pieces of one byte stream: where one ends means nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from cloche import errors, rpc, settings
from cloche.server import keeper
from cloche.server.http import answering
from cloche.server.leaving import Leaving

_PIECE = 1 << 19
_HIGH_WATER = 4 << 20


async def connect(
    websocket: WebSocket,
    entrance: answering.Answers,
    config: settings.Settings,
    observe: keeper.Observe,
    leaving: Leaving | None,
) -> None:
    """Serve one client until it leaves."""
    try:
        backend, each, standing = entrance.open(websocket.headers, "connect")
    except errors.ClocheError as problem:
        await websocket.accept()
        status = errors.TABLE[problem.code].http
        with suppress(WebSocketDisconnect, RuntimeError):
            await websocket.send_bytes(rpc.encode(problem.to_dict()))
            await websocket.close(4000 + status, problem.code)
        return
    await websocket.accept()
    writer = Writer(websocket)
    serving = keeper.Connection(
        backend, cast(asyncio.StreamWriter, writer), config.defaults, before_each=each, while_streaming=standing.look,
        observe=lambda call, code: observe(f"websocket {call}", code),
    )  # fmt: skip
    drained = asyncio.ensure_future(_drain(serving, leaving)) if leaving is not None else None
    try:
        await serving.run(cast(asyncio.StreamReader, Reader(websocket)))
    finally:
        if drained is not None:
            drained.cancel()
        await serving.finish()


async def _drain(serving: keeper.Connection, leaving: Leaving) -> None:
    await leaving.begun.wait()
    await serving.drain(leaving)


class Reader:
    """As much of a StreamReader as a connection uses."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def read(self, most: int) -> bytes:
        try:
            return await self._websocket.receive_bytes()
        except (WebSocketDisconnect, RuntimeError, KeyError):  # KeyError: a text message, which is not ours
            return b""


class Writer:
    """As much of a StreamWriter as a connection uses: what is written goes out in order, and `drain` waits for room."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._size = 0
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._send(), name="frames out")
        self.transport = self

    def write(self, data: bytes) -> None:
        if self._closing:
            return
        self._size += len(data)
        if self._size > _HIGH_WATER:
            self._room.clear()
        for start in range(0, len(data), _PIECE):
            self._pieces.put_nowait(data[start : start + _PIECE])

    async def drain(self) -> None:
        await self._room.wait()

    def get_write_buffer_size(self) -> int:
        return self._size

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._pieces.put_nowait(b"")

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._task

    async def _send(self) -> None:
        try:
            while piece := await self._pieces.get():
                await self._websocket.send_bytes(piece)
                self._size -= len(piece)
                if self._size <= _HIGH_WATER:
                    self._room.set()
            await self._websocket.close()
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # the client has gone; the reading side sees it too
        finally:
            self._closing = True
            self._room.set()
