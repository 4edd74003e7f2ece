"""Taking a value out of a stream again: what a server echoes comes back as the placeholder.

    masker = Masker(forms(b"s3cr3t-value", b"cloche-secret-1f…"))
    masker.feed(b"you sent s3cr")      b"you sent "          the rest may be its beginning: it waits for what follows
    masker.feed(b"3t-value!")          b"cloche-secret-1f…!"

A value is looked for as it is and in the spellings that servers use when they repeat something: base64 at each of the three
alignments (so also inside a longer text, as in Basic), percent-encoding, JSON, HTML and hexadecimal. This catches servers that
repeat, not servers that help to steal: one that reverses a value before it answers was trusted with it by whoever bound it.

Only bytes that may begin a spelling are held back, so a stream of events is not delayed; at most one spelling's length is held.
Pure: no sockets.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping
from urllib.parse import quote_from_bytes, quote_plus

_STEM = 4  # a spelling's first bytes: searched for before whole comparisons


def forms(value: bytes, placeholder: bytes) -> dict[bytes, bytes]:
    """Every spelling of a value that is looked for → what stands there instead."""
    found: dict[bytes, bytes] = {}
    for spelling in (*_quoted(value), value.hex().encode(), value.hex().upper().encode()):
        found.setdefault(spelling, placeholder)
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for offset in range(3):
            found.setdefault(_core(encode, value, offset), _core(encode, placeholder, offset))
        found.setdefault(encode(value), encode(placeholder))
    found[value] = placeholder
    return found


def _quoted(value: bytes) -> set[bytes]:
    percent = {quote_from_bytes(value, safe).encode() for safe in ("", "/", "/:@")} | {
        quote_plus(value).encode()
    }
    percent |= {re.sub(rb"%[0-9A-F]{2}", lambda match: match[0].lower(), one) for one in percent}
    text = value.decode("utf-8", "surrogateescape")
    escaped = json.dumps(text)[1:-1].encode("utf-8", "surrogateescape")
    unescaped = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")
    marked = {html.escape(text, quote=quote).encode("utf-8", "surrogateescape") for quote in (True, False)}
    return percent | marked | {escaped, unescaped, escaped.replace(b"/", rb"\/")}


def _core(encode: Callable[[bytes], bytes], value: bytes, offset: int) -> bytes:
    """The characters of base64 that the value alone decides, when `offset` bytes (mod 3) stand before it."""
    whole = encode(b"\0" * offset + value)
    return whole[-(-offset * 8 // 6) : (offset + len(value)) * 8 // 6]


class Spellings:
    """What is looked for, prepared once and used by any number of streams."""

    def __init__(self, masks: Mapping[bytes, bytes]) -> None:
        self.masks = dict(masks)
        self.fitting = {spelling: _fit(mask, len(spelling)) for spelling, mask in masks.items()}
        self.longest_first = sorted(masks, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.longest_first))) if masks else None

    def __bool__(self) -> bool:
        return bool(self.masks)


class Masker:
    """One stream. With `keep_length` a mask is as long as what it covers (cut, or filled with `*`)."""

    def __init__(self, spellings: Spellings | Mapping[bytes, bytes], *, keep_length: bool = False) -> None:
        known = spellings if isinstance(spellings, Spellings) else Spellings(spellings)
        self._masks = known.fitting if keep_length else known.masks
        self._spellings = known.longest_first
        self._pattern = known.pattern
        self._longest = len(self._spellings[0]) if self._spellings else 0
        self._held = b""
        self.count = 0
        """How often something was masked."""

    def feed(self, data: bytes) -> bytes:
        """What may go on now."""
        if self._pattern is None:
            return data
        data = self._held + data
        wait = self._beginning(data)
        if any(spelling in data for spelling in self._spellings):
            return self._mask(data, wait)
        self._held = data[wait:]
        return data[:wait]

    def finish(self) -> bytes:
        """What was held back; the stream has ended."""
        rest, self._held = self._held, b""
        return self._replace(rest)

    def whole(self, data: bytes) -> bytes:
        """A text that is complete, apart from the stream."""
        return self._replace(data)

    def _mask(self, data: bytes, wait: int) -> bytes:
        """Replace what begins before `wait`; what begins there may be part of something longer."""
        assert self._pattern is not None
        pieces: list[bytes] = []
        place = 0
        for match in self._pattern.finditer(data):
            if match.start() >= wait:
                break
            pieces += [data[place : match.start()], self._masks[match[0]]]
            self.count += 1
            place = match.end()
        if place > wait:
            wait = place + self._beginning(data[place:])
        pieces.append(data[place:wait])
        self._held = data[wait:]
        return b"".join(pieces)

    def _replace(self, data: bytes) -> bytes:
        if self._pattern is None or not data:
            return data
        made, count = self._pattern.subn(lambda match: self._masks[match[0]], data)
        self.count += count
        return made

    def _beginning(self, data: bytes) -> int:
        """Where the longest end of `data` starts that is a spelling's beginning and not all of it; its length if none is."""
        first = max(0, len(data) - self._longest + 1)
        found = len(data)
        for spelling in self._spellings:
            place = data.find(spelling[:_STEM], first, found + _STEM - 1)
            while 0 <= place < found:
                if len(data) - place < len(spelling) and spelling.startswith(data[place:]):
                    found = place
                    break
                place = data.find(spelling[:_STEM], place + 1, found + _STEM - 1)
        for place in range(max(first, len(data) - _STEM + 1), found):
            if any(spelling.startswith(data[place:]) for spelling in self._spellings):
                return place
        return found


def _fit(mask: bytes, length: int) -> bytes:
    return mask[:length].ljust(length, b"*")
