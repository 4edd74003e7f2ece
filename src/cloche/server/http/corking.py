"""One packet instead of several: what is written in one turn of the loop is sent at its end.

An answer is written in pieces (head, body; of a stream: head, event, event), and every piece that is handed to the kernel by itself costs
a system call and wakes the reader, more than all the rest of a small answer. Nothing waits for more to come: the next turn of the loop sends.
"""

from __future__ import annotations

import asyncio
from typing import Any

_LARGE = 1 << 16  # copying it would cost more than sending it by itself


class Corked:
    """A transport for writing; everything else is the one below."""

    __slots__ = ("_below", "_held", "_loop", "_size")

    def __init__(self, below: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._below = below
        self._loop = loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if self._size + len(data) > _LARGE:
            self._send()
            self._below.write(data)
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)
        self._size += len(data)

    def _send(self) -> None:
        if self._held:
            held, self._held, self._size = self._held, [], 0
            self._below.write(b"".join(held))

    def get_write_buffer_size(self) -> int:
        return self._size + self._below.get_write_buffer_size()

    def close(self) -> None:
        self._send()
        self._below.close()

    def write_eof(self) -> None:
        self._send()
        self._below.write_eof()

    def abort(self) -> None:
        self._held, self._size = [], 0
        self._below.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)
