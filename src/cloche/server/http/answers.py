"""Answers to requests with an idempotency key, on disk: a key holds across a restart, and across a server that was killed.

One line of JSON per answer, appended by a single write before the client gets it, so that whoever heard an answer hears the same one again. A line
that a crash cut short is skipped. Appending hands the line to the kernel and no further: it survives the server, not the machine. A start, and a
file that has grown too large, write the file anew with what still holds; it has the mode 0600, since answers hold output.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec

LARGEST = 1 << 20
_MOST_BYTES = 128 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    caller: str
    key: str
    digest: str
    time: float
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class File:
    def __init__(self, path: str, kept_s: float) -> None:
        self._path = path
        self._kept_s = kept_s
        self._fd = -1
        self._size = 0

    def read(self) -> list[Kept]:
        """What still holds, the oldest first; from now on it can be appended to."""
        live = list(self._lines())
        self._write_anew(live)
        return live

    def append(self, answer: Kept) -> None:
        """A disk that takes no more costs the key its memory, not the client its answer."""
        if len(answer.body) > LARGEST:
            return
        line = msgspec.json.encode(answer) + b"\n"
        with suppress(OSError):
            if self._size + len(line) > _MOST_BYTES:
                self._write_anew(list(self._lines())[-1000:])
            self._size += os.write(self._fd, line)

    def _lines(self) -> Iterator[Kept]:
        horizon = time.time() - self._kept_s
        try:
            with open(self._path, "rb") as file:
                for line in file:
                    with suppress(msgspec.DecodeError):
                        answer = msgspec.json.decode(line, type=Kept)
                        if answer.time > horizon:
                            yield answer
        except FileNotFoundError:
            return

    def _write_anew(self, answers: Iterable[Kept]) -> None:
        fresh = self._path + ".new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600)
        with suppress(OSError):
            self._size = sum(os.write(fd, msgspec.json.encode(answer) + b"\n") for answer in answers)
            os.replace(fresh, self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
