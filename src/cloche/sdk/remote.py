"""A backend behind `http://…` or `https://…`: the keeper's frames over a WebSocket (`/v1/connect`), with the caller's key.

What carries the bytes differs, the conversation is `local.LocalBackend`'s. A server that refuses says why before it closes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import msgspec

from cloche import errors, interfaces
from cloche.sdk import local, trust

_PIECE = 1 << 19
_HIGH_WATER = 4 << 20


async def connect(url: str, api_key: str | None, ca_file: str | None = None) -> interfaces.Backend:
    from websockets.asyncio.client import connect as open_socket  # only who is far away pays for it

    with trust.telling(url):
        socket = await open_socket(**trust.opening(url, api_key, ca_file, client="cloche-python"))
    carrier = Carrier(socket)
    backend = local.LocalBackend(
        url, cast(asyncio.StreamReader, carrier), cast(asyncio.StreamWriter, carrier), where=url
    )
    try:
        await backend.greet()
    except errors.ClocheError:
        await backend.aclose()
        if carrier.refusal is not None:
            raise carrier.refusal from None
        raise
    return cast(interfaces.Backend, backend)


class Carrier:
    """A WebSocket as a stream of bytes, both ways."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._size = 0
        self._room = asyncio.Event()
        self._room.set()
        self._task = asyncio.get_running_loop().create_task(self._send(), name="frames out")
        self.refusal: errors.ClocheError | None = None

    async def read(self, most: int) -> bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            data = await self._socket.recv(decode=False)
        except ConnectionClosed:
            return b""
        if data[:1] == b"{":  # never the beginning of a frame: the server says why it will not serve
            with suppress(msgspec.DecodeError):
                self.refusal = errors.from_dict(msgspec.json.decode(data))
                return b""
        return bytes(data)

    def write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > _HIGH_WATER:
            self._room.clear()
        for start in range(0, len(data), _PIECE):
            self._pieces.put_nowait(data[start : start + _PIECE])

    async def drain(self) -> None:
        await self._room.wait()

    def close(self) -> None:
        self._pieces.put_nowait(b"")

    async def wait_closed(self) -> None:
        await self._task

    async def _send(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while piece := await self._pieces.get():
                await self._socket.send(piece)
                self._size -= len(piece)
                if self._size <= _HIGH_WATER:
                    self._room.set()
        except ConnectionClosed:
            pass  # the reading side tells whoever waits
        finally:
            self._room.set()
            await self._socket.close()
