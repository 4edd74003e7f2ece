"""Which credential goes where: placeholders out of a request, values in, for bound hosts and bound places only. Pure.

    Authorization: Bearer cloche-secret-9…   →  Authorization: Bearer ghp_…           how = bearer
    Authorization: Basic (u:cloche-secret-9…) →  Authorization: Basic (user:value)     how = basic, and bearer (git does this)
    X-Api-Key: cloche-secret-9…              →  X-Api-Key: value                      how = header, field = X-Api-Key
    GET /v1?key=cloche-secret-9…             →  GET /v1?key=value                     how = query, field = key

A placeholder is random, per sandbox, and worth nothing: what is not replaced goes on as it is, to whomever, and the engine is
told that a secret was withheld. Nothing is added to a request that did not carry the placeholder in a place of its binding.

    credentials = JSON array of `Credential`, in a memory file: it travels as a descriptor, never in argv, environment or a frame
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple
from urllib.parse import quote_from_bytes, unquote_plus

import msgspec

from cloche.egress import masking
from cloche.policy import names, rules

PREFIX = "cloche-secret-"
How = Literal["bearer", "basic", "header", "query"]
_MOST_BYTES = 8 * 1024 * 1024
_MOST_PREPARED = 64


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One secret of one sandbox, with its value."""

    name: str
    placeholder: str
    value: bytes
    hosts: tuple[str, ...]
    how: How = "bearer"
    user: str = ""
    field: str = ""
    format: str = ""
    body: bool = False
    plain: bool = False

    def __repr__(self) -> str:
        return f"Credential({self.name!r}, {', '.join(self.hosts)})"

    @property
    def place(self) -> str:
        """Where in a request it goes, in words for an event."""
        match self.how:
            case "query":
                return f"query {self.field}"
            case "header":
                return f"header {self.field.lower()}"
            case _:
                return "header authorization"


class Outgoing(NamedTuple):
    """A request as it may leave. `echoes` are texts with a value in them → what the client had written there."""

    target: str
    fields: list[tuple[bytes, bytes]]
    used: tuple[Credential, ...]
    withheld: tuple[Credential, ...]
    echoes: dict[bytes, bytes]


class Credentials:
    """All that one sandbox may use."""

    def __init__(self, listed: Iterable[Credential] = ()) -> None:
        self.all = tuple(listed)
        self._of_rule: dict[rules.Rule, list[Credential]] = {}
        for one in self.all:
            for host in one.hosts:
                self._of_rule.setdefault(rules.Rule.parse(host), []).append(one)
        self._lookup = rules.Lookup(self._of_rule)
        self._prepared: dict[object, masking.Spellings] = {}

    def bound_to(self, host: str, port: int) -> tuple[Credential, ...]:
        """Those that may be sent to a (canonical) host."""
        if not self.all:
            return ()
        found: dict[str, Credential] = {}
        for rule in self._concerned(host):
            if rule.port in (None, port):
                found.update((one.name, one) for one in self._of_rule[rule])
        return tuple(found.values())

    def _concerned(self, host: str) -> Iterator[rules.Rule]:
        if names.is_address(host):
            return self._lookup.of_address(names.facts(host)[0])
        return self._lookup.of_name(host)

    def masked_for(self, bound: tuple[Credential, ...], echoes: dict[bytes, bytes]) -> masking.Spellings:
        """What is masked in an answer. A client mostly sends the same again, so what was prepared is kept."""
        key = tuple(one.name for one in bound), frozenset(echoes.items())
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            found = self._prepared[key] = masking.Spellings(spellings(bound, echoes))
        return found

    def seen_in(self, target: str, fields: Iterable[tuple[bytes, bytes]]) -> tuple[Credential, ...]:
        """Those whose placeholder stands anywhere in a head."""
        if not self.all:
            return ()
        text = b"\n".join((target.encode(), *(value for _, value in fields)))
        text += b"".join(_decoded(value) for name, value in fields if name.lower() == b"authorization")
        if PREFIX.encode() not in text:
            return ()
        return tuple(one for one in self.all if one.placeholder.encode() in text)

    def put_in(
        self,
        target: str,
        fields: Iterable[tuple[bytes, bytes]],
        host: str,
        port: int,
        *,
        secure: bool = True,
    ) -> Outgoing:
        """The head with values for placeholders, where host, place and (if not `secure`) binding allow it."""
        kept = list(fields)
        seen = self.seen_in(target, kept)
        used: list[Credential] = []
        echoes: dict[bytes, bytes] = {}
        bound = {one.name for one in self.bound_to(host, port)}
        for one in seen:
            if one.name not in bound or not (secure or one.plain):
                continue
            before = target, list(kept)
            if one.how == "query":
                target = _in_query(target, one)
            else:
                kept = [(name, _in_field(name, value, one)) for name, value in kept]
            if (target, kept) != before:
                used.append(one)
                pairs = zip(kept, before[1], strict=True)
                echoes.update((new[1], old[1]) for new, old in pairs if new[1] != old[1])
                echoes.update(_after_scheme(echoes))
        # What is still there is in a place, or on its way to a host, that its binding does not name.
        withheld = tuple(one for one in self.seen_in(target, kept))
        return Outgoing(target, kept, tuple(used), withheld, echoes)


def spellings(bound: Iterable[Credential], echoes: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """What is masked in the answers of a host."""
    found: dict[bytes, bytes] = {}
    for one in bound:
        found.update(masking.forms(one.value, one.placeholder.encode()))
    return found | (echoes or {})


def _in_field(name: bytes, value: bytes, one: Credential) -> bytes:
    placeholder = one.placeholder.encode()
    if one.how == "header":
        if name.lower() != one.field.lower().encode() or placeholder not in value:
            return value
        return (
            one.format.encode().replace(b"{}", one.value)
            if one.format
            else value.replace(placeholder, one.value)
        )
    if name.lower() != b"authorization":
        return value
    decoded = _decoded(value)
    if placeholder in decoded:
        user, _, rest = decoded.partition(b":")
        if one.how == "basic" and one.user:
            decoded = one.user.encode() + b":" + one.value
        elif one.how == "basic":
            decoded = user + b":" + rest.replace(placeholder, one.value)
        else:
            decoded = decoded.replace(placeholder, one.value)
        return value[:5] + b" " + base64.b64encode(decoded)
    return value.replace(placeholder, one.value) if one.how == "bearer" else value


def _decoded(value: bytes) -> bytes:
    """What stands in a Basic authorization; nothing if it is not one."""
    scheme, _, text = value.partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        return b""


def _after_scheme(echoes: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """`Basic x` is also echoed as `x`."""
    parts = [(new.partition(b" ")[2], old.partition(b" ")[2]) for new, old in echoes.items()]
    return {new: old for new, old in parts if len(new) >= 8 and old}


def _in_query(target: str, one: Credential) -> str:
    path, mark, query = target.partition("?")
    parts = []
    for part in query.split("&"):
        key, equals, value = part.partition("=")
        if equals and unquote_plus(key) == one.field:
            value = value.replace(one.placeholder, quote_from_bytes(one.value, ""))
        parts.append(key + equals + value)
    return path + mark + "&".join(parts)


# ── how they travel ────────────────────────────────────────────────────────────────────────────────


def seal(listed: Iterable[Credential]) -> int:
    """A memory file with these credentials, which cannot be changed any more; the descriptor is the caller's.

    It is in no file system and not in the engine's memory, so neither a core dump of the engine nor a snapshot has it."""
    import fcntl

    fd = os.memfd_create("cloche-credentials", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(msgspec.json.encode(list(listed)))
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, _F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unseal(fd: int) -> Credentials:
    """Read such a file; its offset is not moved, because the engine holds the same one."""
    data = bytearray()
    while piece := os.pread(fd, 1 << 20, len(data)):
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError("the credentials are too large")
    try:
        return Credentials(msgspec.json.decode(bytes(data), type=list[Credential]))
    except msgspec.MsgspecError:
        raise ValueError("the credentials cannot be read") from None  # the message could quote them


_F_ADD_SEALS = 1033
_ALL_SEALS = 1 | 2 | 4 | 8
