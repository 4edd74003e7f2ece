"""One line of a chain: JSON whose last member is the hash of all that stands before it.

    {"seq":7,"time":…,"actor":"uid:0","sandbox":"k3…","kind":"exited","outcome":"ok","data":{…},"prev":"<64>","hash":"<64>"}

`hash` is the SHA-256 of the line without that member, as the bytes stand in the file: a reader needs no canonical form, and a
change of one byte anywhere is a change of the hash. `prev` is the hash of the line before; of the first, sixty-four zeros.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cloche import events

ZERO = "0" * 64
_HASH = b',"hash":"'
_TAIL = len(_HASH) + 64 + len(b'"}')
_SIGNATURE = b',"signature":"'
OPENED, SEALED, CLOSED = "opened", "sealed", "closed"
BOOKKEEPING = (OPENED, SEALED, CLOSED)
"""Kinds of lines that speak of the log itself."""

_encoder = msgspec.json.Encoder()


def _find_sha256() -> Any:
    """The built-in one: importing hashlib loads OpenSSL, which costs a command more than the log does."""
    for module in ("_sha2", "_sha256"):
        try:
            return __import__(module).sha256
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256


_sha256 = _find_sha256()


def digest(raw: bytes) -> str:
    found: str = _sha256(raw).hexdigest()
    return found


def of_event(event: events.AnyEvent, seq: int, prev: str) -> tuple[bytes, str]:
    """An event's line, newline included, and its hash."""
    row = events.to_row(event)
    actor = row.data.pop("actor")
    return chained(
        {
            "seq": seq,
            "time": row.time,
            "actor": actor,
            "sandbox": row.sandbox,
            "kind": row.kind,
            "outcome": events.outcome(event),
            "data": row.data,
        },
        prev,
    )


def of_log(kind: str, seq: int, prev: str, time: float, data: dict[str, Any]) -> tuple[bytes, str]:
    """A line that the log writes about itself."""
    facts = {"seq": seq, "time": time, "actor": "engine", "sandbox": None, "kind": kind, "outcome": "ok"}
    return chained({**facts, "data": data}, prev)


def chained(fields: dict[str, Any], prev: str, sign: Any = None) -> tuple[bytes, str]:
    """`fields` as a line of a chain; `sign` makes a signature of the bytes before it, which the hash covers too."""
    body = _encoder.encode({**fields, "prev": prev})
    if sign is not None:
        body = body[:-1] + _SIGNATURE + sign(body).hex().encode() + b'"}'
    head = digest(body)
    return body[:-1] + _HASH + head.encode() + b'"}\n', head


def opened(line: bytes) -> dict[str, Any] | None:
    """The members of a line (without its newline) if its hash is right; None if one byte of it is not as written."""
    body, mark, head = line[:-_TAIL], line[-_TAIL:-66], line[-66:-2]
    if mark != _HASH or not line.endswith(b'"}') or digest(body + b"}").encode() != head:
        return None
    try:
        members = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    return members


def signed_part(line: bytes) -> tuple[bytes, bytes] | None:
    """What was signed, and the signature; None for a line without one."""
    body = line[:-_TAIL]
    start = body.rfind(_SIGNATURE)
    if start < 0:
        return None
    try:
        signature = bytes.fromhex(body[start + len(_SIGNATURE) :].rstrip(b'"').decode())
    except ValueError:
        return None
    return body[:start] + b"}", signature
