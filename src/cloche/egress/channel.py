"""Bytes to and from one peer, in the clear or through TLS, so that an exchange need not know which.

    channel = Tls(loop, sock, context, server_side=True, first=hello)     first: what was read before it was clear that this is TLS
    await channel.handshake(); await channel.read(); await channel.write(b"…"); await channel.finish()

TLS runs on memory buffers, because the ClientHello was read already and a socket takes nothing back. `write` returns when the
kernel has the bytes, which is the back-pressure; one reader and one writer may work at the same time. `finish` ends our
direction only.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol

_READ = 256 * 1024


class Channel(Protocol):
    ragged: bool
    """The peer's direction ended without saying so: what had no length may have been cut."""

    async def read(self) -> bytes:
        """Some bytes; none at the peer's end."""

    async def write(self, data: bytes) -> None: ...

    def is_open(self) -> bool:
        """Whether the peer has neither ended nor spoken unasked, as far as can be told now."""

    async def finish(self) -> None:
        """Say that nothing follows."""


class Plain:
    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, first: bytes = b"") -> None:
        self._loop = loop
        self._socket = sock
        self._first = first
        self.ragged = False

    async def read(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        return await self._loop.sock_recv(self._socket, _READ)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    def is_open(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return not self._first
        except OSError:
            pass
        return False

    async def finish(self) -> None:
        _shut(self._socket)


class Tls:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        name: str | None = None,
        first: bytes = b"",
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._incoming.write(first)
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=name
        )
        self._sending = asyncio.Lock()
        self._finished = False
        self.ragged = False

    async def handshake(self) -> None:
        """Raises `ssl.SSLError`; the peer has been told then."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionResetError("the connection ended within the handshake") from None
            except ssl.SSLError:
                try:
                    await self._flush()
                except OSError:
                    pass
                raise
        await self._flush()

    async def read(self) -> bytes:
        while True:
            data, ended = self._decrypt()
            if self._outgoing.pending:
                await self._flush()
            if data or ended:
                return data
            await self._fill()

    def _decrypt(self) -> tuple[bytes, bool]:
        """What has arrived, all records of it; and whether nothing follows."""
        pieces: list[bytes] = []
        size = 0
        try:
            while size < _READ:
                piece = self._tls.read(_READ)
                if not piece:
                    return b"".join(pieces), True
                pieces.append(piece)
                size += len(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            return b"".join(pieces), True
        except ssl.SSLEOFError:
            self.ragged = True
            return b"".join(pieces), True
        except ssl.SSLError as problem:
            if pieces:
                return b"".join(pieces), False  # it is raised again at the next read
            raise ConnectionResetError(f"TLS: {problem.reason or 'broken'}") from None
        return b"".join(pieces), False

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view[:_READ]) :]
                if self._outgoing.pending >= _READ:
                    await self._flush()
        except ssl.SSLError as problem:
            raise ConnectionResetError(f"TLS: {problem.reason or 'broken'}") from None
        await self._flush()

    def is_open(self) -> bool:
        try:
            while data := self._socket.recv(_READ):
                self._incoming.write(data)
            return False
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        try:
            return self._decrypt() == (b"", False)  # tickets and the like are taken in here
        except OSError:
            return False

    async def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # it wants the peer's answer, for which nobody waits
        await self._flush()
        _shut(self._socket)

    async def _fill(self) -> bool:
        data = await self._loop.sock_recv(self._socket, _READ)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return bool(data)

    async def _flush(self) -> None:
        async with self._sending:  # two senders would interleave their records
            while data := self._outgoing.read():
                await self._loop.sock_sendall(self._socket, data)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it is gone already
