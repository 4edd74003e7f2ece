"""The name in a TLS ClientHello, without TLS: bytes in, a name out, no sockets and no keys.

    16 03 01 … 01 … 00 00 00 0d 00 0b 00 00 08 "pypi.org"     Hello("pypi.org")
    16 03 01 … 01 … (no extension 0)                          Hello(None): a client that names nobody
    "GET / HTTP/1.1"                                          BadHello: not TLS

    record    = 16 03 xx length(2) 1*16384( byte )            a hello may be spread over several records
    handshake = 01 length(3) version(2) random(32) session<1> ciphers<2> compressions<1> extensions<2>

Read strictly and bounded (64 KiB): lengths must add up exactly, the extension may stand there once with one name. What
follows the hello is never looked at. Encrypted ClientHello hides an inner name; the outer one must still be the host that
was allowed, so it helps only towards servers that were allowed anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cloche.policy import names

MAX_HELLO = 64 * 1024
_CLIENT_HELLO, _SERVER_NAME, _ALPN = b"\x01", 0, 16

ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
INTERNAL_ERROR = b"\x15\x03\x03\x00\x02\x02\x50"
NO_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"
"""Fatal alerts, in the clear: what a client prints when we refuse."""


class BadHello(ValueError):
    """These bytes are no acceptable ClientHello."""


class Hello(NamedTuple):
    """`name` is canonical, None where the client sent none; `protocols` (ALPN) likewise."""

    name: str | None
    protocols: tuple[bytes, ...] | None = None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.place : self.place + count]
        if len(piece) != count:
            raise BadHello("a length in the hello does not add up")
        self.place += count
        return piece

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def block(self, width: int) -> _Reader:
        return _Reader(self.take(self.number(width)))

    def at_end(self) -> bool:
        return self.place == len(self.data)


def looks_like_tls(data: bytes | bytearray) -> bool | None:
    """Whether these first bytes begin a TLS handshake record; None if it is too early to say."""
    if data[:1] not in (b"", b"\x16"):
        return False
    if len(data) < 2:
        return None
    return data[1] == 3


def parse_hello(data: bytes | bytearray) -> Hello | None:
    """The hello at the start of a connection; None if it has not all arrived."""
    message = _handshake(data)
    if message is None:
        if len(data) > MAX_HELLO:
            raise BadHello("the hello is longer than 64 KiB")
        return None
    return _read(_Reader(message))


def _handshake(data: bytes | bytearray) -> bytes | None:
    """The first handshake message, joined from its records."""
    joined = bytearray()
    place = 0
    while True:
        if looks_like_tls(data[place : place + 2]) is False:
            raise BadHello("this is not a TLS handshake")
        if len(data) < place + 5:
            return None
        length = int.from_bytes(data[place + 3 : place + 5], "big")
        if not 0 < length <= 16384 + 256:
            raise BadHello("a record is empty or too long")
        joined += data[place + 5 : place + 5 + length]
        if joined[:1] not in (b"", _CLIENT_HELLO):
            raise BadHello("the handshake does not begin with a ClientHello")
        if len(joined) >= 4:
            wanted = 4 + int.from_bytes(joined[1:4], "big")
            if wanted > MAX_HELLO:
                raise BadHello("the hello is longer than 64 KiB")
            if len(joined) >= wanted:
                return bytes(joined[4:wanted])
        place += 5 + length
        if len(data) < place:
            return None


def _read(hello: _Reader) -> Hello:
    hello.take(2 + 32)
    hello.block(1)
    hello.block(2)
    hello.block(1)
    if hello.at_end():
        return Hello(None)
    extensions = hello.block(2)
    if not hello.at_end():
        raise BadHello("bytes follow the hello's extensions")
    found: list[str] = []
    protocols: tuple[bytes, ...] | None = None
    while not extensions.at_end():
        kind, body = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            found.append(_server_name(body))
        elif kind == _ALPN:
            protocols = tuple(_protocols(body))
    if len(found) > 1:
        raise BadHello("the hello names more than one server")
    return Hello(found[0] if found else None, protocols)


def _protocols(body: _Reader) -> Iterator[bytes]:
    entries = body.block(2)
    while not entries.at_end():
        yield entries.block(1).data


def _server_name(body: _Reader) -> str:
    entries = body.block(2)
    kind, raw = entries.number(1), entries.block(2)
    if kind != 0 or not entries.at_end() or not body.at_end():
        raise BadHello("the server name is not one host name")
    try:
        return names.canonical(raw.data.decode("ascii"))
    except (names.BadHost, UnicodeDecodeError) as problem:
        raise BadHello(f"the server name is refused: {problem}") from None
