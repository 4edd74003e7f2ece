"""A backend behind `http://…` or `https://…`: the keeper's frames over a WebSocket (`/v1/connect`), with the caller's key.

What carries the bytes differs, the conversation is `local.LocalBackend`'s. A server that refuses says why before it closes.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any, cast

import msgspec

from cloche import __version__, errors, interfaces
from cloche.sdk import local, trust

_PIECE = 1 << 19
_HIGH_WATER = 4 << 20
_OPEN_S = 15.0


async def connect(url: str, api_key: str | None, ca_file: str | None = None) -> interfaces.Backend:
    from websockets.asyncio.client import connect as open_socket  # only who is far away pays for it
    from websockets.exceptions import InvalidHandshake, WebSocketException

    address = "ws" + url.rstrip("/").removeprefix("http") + "/v1/connect"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    trusted = trust.context(url, ca_file)
    secured: dict[str, Any] = {} if trusted is None else {"ssl": trusted}
    try:
        socket = await open_socket(
            address,
            additional_headers=headers,
            user_agent_header=f"cloche-python/{__version__}",
            max_size=None,
            open_timeout=_OPEN_S,
            proxy=None,
            compression=None,
            **secured,
        )
    except ssl.SSLError as problem:
        raise trust.distrusted(url, problem) from None
    except InvalidHandshake as problem:
        raise _unavailable(url, f"what answers there is not a Cloche server ({problem})") from None
    except (OSError, TimeoutError, WebSocketException) as problem:
        raise _unavailable(
            url, f"nothing answers ({getattr(problem, 'strerror', None) or problem})"
        ) from None
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


def _unavailable(url: str, why: str) -> errors.ClocheError:
    return errors.error(
        "server_unavailable",
        f"{url}: {why}",
        hint="start it with `cloche serve`, or unset CLOCHE_URL to run locally",
    )


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
