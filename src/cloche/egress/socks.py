"""SOCKS5 as far as a sandbox needs it: no authentication, CONNECT only. Bytes in, facts out, no sockets.

    05 01 00                                  greeting: I can do "no authentication"   → 05 00
    05 01 00 03 08 "pypi.org" 01 BB           connect to a name                        → 05 00 00 01 …
    05 01 00 01 5D B8 D8 22 00 50             connect to an IPv4 address; 04 is IPv6

    greeting = 05 count 1*255( method )
    request  = 05 command 00 ( 01 4( byte ) | 03 length 1*255( byte ) | 04 16( byte ) ) port

Names are decoded as UTF-8 and made canonical at once; whatever `names.canonical` refuses is a refusal here: a NUL in
this very field was once the way past an allow-list. BIND and UDP ASSOCIATE are answered with code 7.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from cloche.policy import names

NO_AUTHENTICATION = b"\x05\x00"
NO_METHOD = b"\x05\xff"
OK, GENERAL, RULESET, NETWORK, HOST, REFUSED, TTL, COMMAND, ADDRESS_TYPE = range(9)


class BadSocks(ValueError):
    """What is refused; `reply` is sent before closing."""

    def __init__(self, message: str, reply: bytes) -> None:
        super().__init__(message)
        self.reply = reply


class Destination(NamedTuple):
    host: str
    port: int
    size: int


def parse_greeting(data: bytes | bytearray) -> int | None:
    """The length of the greeting; None if it has not all arrived."""
    if data[:1] not in (b"", b"\x05"):
        raise BadSocks("this is not SOCKS5", b"")
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    if 0 not in data[2 : 2 + data[1]]:
        raise BadSocks("the client wants to authenticate, and there is nobody to", NO_METHOD)
    return 2 + data[1]


def parse_request(data: bytes | bytearray) -> Destination | None:
    """Where a client wants to go; None if the request has not all arrived."""
    if len(data) >= 3 and (data[0] != 5 or data[2] != 0):
        raise BadSocks("this is not a SOCKS5 request", reply(GENERAL))
    if len(data) >= 2 and data[1] != 1:
        raise BadSocks("only CONNECT is spoken here, no BIND and no UDP", reply(COMMAND))
    if len(data) < 5:
        return None
    kind = data[3]
    if kind not in (1, 3, 4):
        raise BadSocks("the address is of no known kind", reply(ADDRESS_TYPE))
    start, length = (5, data[4]) if kind == 3 else (4, 4 if kind == 1 else 16)
    end = start + length
    if len(data) < end + 2:
        return None
    host, port = _host(kind, bytes(data[start:end])), int.from_bytes(data[end : end + 2], "big")
    if not port:
        raise BadSocks("port 0 is refused", reply(RULESET))
    return Destination(host, port, end + 2)


def _host(kind: int, raw: bytes) -> str:
    try:
        if kind == 3:
            return names.canonical(raw.decode("utf-8"))
        return names.canonical(str(ipaddress.ip_address(raw)))
    except (names.BadHost, UnicodeDecodeError) as problem:
        raise BadSocks(f"the host is refused: {problem}", reply(RULESET)) from None


def reply(code: int) -> bytes:
    """An answer to a request. The bound address is always 0.0.0.0:0: where we dial from is nobody's business inside."""
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))
