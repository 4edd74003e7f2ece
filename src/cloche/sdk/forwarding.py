"""A port of this machine's loopback that is a port inside a sandbox: each connection is a tunnel.

Bytes are passed on as they come, neither side gets ahead of the other, and each direction ends by itself, as TCP has it. A port that is
closed inside resets the connection, as it would have there; what went wrong is told to `on_problem`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from cloche import errors, interfaces

_PIECE = 1 << 16


class Forwarding:
    def __init__(
        self,
        backend: interfaces.Backend,
        sandbox: str,
        port: int,
        on_problem: Callable[[errors.ClocheError], None] = lambda _: None,
    ) -> None:
        self._backend = backend
        self._sandbox = sandbox
        self._port = port
        self._on_problem = on_problem
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.local_port = 0

    async def listen(self, local_port: int) -> None:
        if not 0 <= local_port < 65536:
            raise errors.error(
                "argument_invalid", f"the local port is {local_port}", hint="0 takes a free one"
            )
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", local_port)
        except OSError as problem:
            raise errors.error(
                "address_unavailable",
                f"cannot listen on 127.0.0.1:{local_port}: {problem.strerror or problem}",
                hint="choose another port, or 0 for a free one",
            ) from None
        self.local_port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Close the port and what goes through it. Twice is harmless."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name=f"port {self._port}")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            tunnel = await self._backend.dial(self._sandbox, self._port)
            try:
                await join(tunnel, reader, writer)
            finally:
                await tunnel.aclose()
        except errors.ClocheError as problem:
            _reset(writer)
            self._on_problem(problem)
        except OSError:
            _reset(writer)  # the local side has left
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def join(tunnel: interfaces.Tunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass everything on until both directions have ended; raises what cut one of them."""
    ways = [asyncio.ensure_future(_in(tunnel, reader)), asyncio.ensure_future(_out(tunnel, writer))]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _in(tunnel: interfaces.Tunnel, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(_PIECE):
        await tunnel.write(data)
    await tunnel.end()


async def _out(tunnel: interfaces.Tunnel, writer: asyncio.StreamWriter) -> None:
    while data := await tunnel.read(_PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
