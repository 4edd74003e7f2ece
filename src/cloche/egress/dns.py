"""The name service inside: it answers from the rules and asks nobody.

    A pypi.org       (rules may allow it)    198.18.x.y, remembered as pypi.org for the connection that follows
    A evil.org       (rules cannot)          NXDOMAIN, and nothing left the machine
    TXT pypi.org                             REFUSED: a record that carries data is how data is carried out

    query = header(12) question [ rest ]     at most 4096 bytes; one question, class IN, no compression

A name gets one number; 198.18.0.0/15 (set aside for benchmarks, never routed) plus it is its IPv4 address, a block of
unique local addresses plus it the IPv6 one. The table keeps the most recently used names; numbers go round the whole block
before one is used again, and start anywhere, so that an address remembered by a client for too long means nothing rather
than another name. Real names are resolved by the proxy when it dials, and only then.
"""

from __future__ import annotations

import ipaddress
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from cloche.policy import names

MAX_QUERY = 4096
TTL_S = 30
FAKE_V4 = ipaddress.IPv4Network("198.18.0.0/15")
FAKE_V6 = ipaddress.IPv6Network("fd63:6c6f:6368:6500::/96")
_SIZE = FAKE_V4.num_addresses

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
A, AAAA, SVCB, HTTPS = 1, 28, 64, 65
_IN = 1
_HEADER = struct.Struct(">HHHHHH")


class BadQuery(ValueError):
    """Bytes that get an error code, or (with `code` None) no answer at all."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


class Query(NamedTuple):
    number: int
    flags: int
    host: str
    kind: int
    question: bytes
    """The question as it was sent: names are echoed letter by letter, case included."""


class Answer(NamedTuple):
    packet: bytes | None
    host: str
    code: int


class NameTable:
    """Which name stands behind which fake address; the least recently used names are forgotten."""

    def __init__(self, *, capacity: int = 8192, first: int = 0) -> None:
        self._capacity = min(capacity, _SIZE - 2)
        self._next = first % _SIZE
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._hosts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, host: str) -> int:
        number = self._numbers.get(host)
        if number is None:
            if len(self._numbers) >= self._capacity:
                _, old = self._numbers.popitem(last=False)
                del self._hosts[old]
            number = self._free()
            self._hosts[number] = host
        self._numbers[host] = number
        self._numbers.move_to_end(host)
        return number

    def _free(self) -> int:
        while (
            self._next in (0, _SIZE - 1) or self._next in self._hosts
        ):  # network and broadcast look odd to clients
            self._next = (self._next + 1) % _SIZE
        number = self._next
        self._next = (number + 1) % _SIZE
        return number

    def v4(self, host: str) -> ipaddress.IPv4Address:
        return FAKE_V4[self.number_of(host)]

    def v6(self, host: str) -> ipaddress.IPv6Address:
        return FAKE_V6[self.number_of(host)]

    def host_of(self, address: names.Address) -> str | None:
        """The name behind an address; None for a fake address that is not (any more) given out."""
        block = FAKE_V4 if address.version == 4 else FAKE_V6
        host = self._hosts.get(int(address) - int(block.network_address))
        if host is not None:
            self._numbers.move_to_end(host)
        return host


def is_fake(address: names.Address) -> bool:
    return address in FAKE_V4 if address.version == 4 else address in FAKE_V6


def answer(packet: bytes, table: NameTable, may: Callable[[str], bool], *, ipv6: bool = True) -> Answer:
    """What to send back. `may` says whether any request to a name could be allowed."""
    try:
        query = parse(packet)
    except BadQuery as problem:
        return Answer(_error(packet, problem.code), "", problem.code or FORMERR)
    except names.BadHost:
        return Answer(_error(packet, NXDOMAIN), "", NXDOMAIN)
    if names.is_address(query.host) or not may(query.host):
        return Answer(_respond(query, NXDOMAIN), query.host, NXDOMAIN)
    if query.kind == A:
        return Answer(_respond(query, NOERROR, table.v4(query.host).packed), query.host, NOERROR)
    if query.kind == AAAA and ipv6:
        return Answer(_respond(query, NOERROR, table.v6(query.host).packed), query.host, NOERROR)
    if query.kind in (AAAA, SVCB, HTTPS):
        return Answer(
            _respond(query, NOERROR), query.host, NOERROR
        )  # the name exists, such a record does not
    return Answer(_respond(query, REFUSED), query.host, REFUSED)


def parse(packet: bytes) -> Query:
    if len(packet) < 12 or len(packet) > MAX_QUERY:
        raise BadQuery("the packet is too short or too long", None)
    number, flags, questions, answers, authorities, _ = _HEADER.unpack_from(packet)
    if flags & 0x8000:
        raise BadQuery("this is an answer", None)  # answering answers is how loops start
    if flags & 0x7800:
        raise BadQuery("only queries are answered", NOTIMP)
    if (questions, answers, authorities) != (1, 0, 0):
        raise BadQuery("a query has one question", FORMERR)
    labels, place = _labels(packet, 12)
    if len(packet) < place + 4:
        raise BadQuery("the question is cut off", FORMERR)
    kind, family = struct.unpack_from(">HH", packet, place)
    if family != _IN:
        raise BadQuery("only class IN is known", REFUSED)
    host = names.canonical(".".join(labels))
    return Query(number, flags, host, kind, packet[12 : place + 4])


def _labels(packet: bytes, place: int) -> tuple[list[str], int]:
    labels: list[str] = []
    total = 0
    while True:
        if place >= len(packet):
            raise BadQuery("the name is cut off", FORMERR)
        length = packet[place]
        place += 1
        if length == 0:
            return labels, place
        # A pointer needs an earlier name to point to, and a question is the first: so there are no loops.
        if length > 63:
            raise BadQuery("the question's name is compressed", FORMERR)
        total += length + 1
        raw = packet[place : place + length]
        if len(raw) != length or total > 254:
            raise BadQuery("the name is cut off or too long", FORMERR)
        # A dot within a label would be read as two labels.
        if b"." in raw or not raw.isascii():
            raise names.BadHost("a label has a byte that names do not have")
        labels.append(raw.decode("ascii"))
        place += length


def _respond(query: Query, code: int, data: bytes = b"") -> bytes:
    flags = 0x8000 | (query.flags & 0x0100) | 0x0080 | code
    packet = _HEADER.pack(query.number, flags, 1, 1 if data else 0, 0, 0) + query.question
    if data:
        kind = A if len(data) == 4 else AAAA
        packet += struct.pack(">HHHIH", 0xC00C, kind, _IN, TTL_S, len(data)) + data
    return packet


def _error(packet: bytes, code: int | None) -> bytes | None:
    """An answer to what could not be read: its number, a code, and nothing else."""
    if code is None:
        return None
    number, flags = struct.unpack_from(">HH", packet)
    return _HEADER.pack(number, 0x8000 | (flags & 0x7900) | 0x0080 | code, 0, 0, 0, 0)
