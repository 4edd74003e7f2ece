"""The manifest: a chain of its own, one line for each thing that becomes of a segment.

    {"n":3,"time":…,"act":"sealed","segment":"2026…-0001","lines":1000,"size":412033,"head":"<64>","key":"…","prev":…,"signature":…,"hash":…}

    opened    it is there from now on; not signed, so that a short command need not load a key
    sealed    so many lines, so many bytes, this head; more may follow
    closed    the same, and nothing follows but the line that says so
    died      its writer ended without a word; this is what was found, `torn` bytes of an unfinished line included
    dropped   it was removed for its age

Every writer appends to it, under a lock on the file. A line that a crash left unfinished is cut off by the next writer, who says in
his own line how many bytes that were.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from cloche.audit import keys, lines

NAME = "manifest.jsonl"
_BLOCK = 1 << 13


class Seal(NamedTuple):
    """What a line of the manifest says about a segment."""

    act: str
    segment: str
    lines: int
    size: int
    head: str
    torn: int = 0


class Place(NamedTuple):
    """Where a line stands in the manifest."""

    n: int
    hash: str


def append(directory: str, seal: Seal, time: float, signer: keys.Signer | None) -> Place:
    with _locked(os.path.join(directory, NAME)) as fd:
        end, last, cut = _last(fd)
        n, prev = (last["n"] + 1, last["hash"]) if last is not None else (0, lines.ZERO)
        fields: dict[str, Any] = {"n": n, "time": time, **seal._asdict()}
        if not seal.torn:
            del fields["torn"]
        if cut:
            fields["cut"] = cut
            os.ftruncate(fd, end)
        if signer is not None:
            fields["key"] = signer.fingerprint
        line, head = lines.chained(fields, prev, signer.sign if signer is not None else None)
        write_all(fd, line, end)
        if signer is not None:
            os.fdatasync(fd)
        return Place(n, head)


def write_all(fd: int, data: bytes, size: int) -> None:
    """Append all of it, or (a full disk) nothing: `size` is how long the file is before."""
    try:
        written = os.write(fd, data)
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise


@contextmanager
def _locked(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _last(fd: int) -> tuple[int, dict[str, Any] | None, int]:
    """Where the last whole line ends, what it says, and how many bytes of an unfinished one follow it."""
    size = os.fstat(fd).st_size
    block = _BLOCK
    while True:
        start = max(0, size - block)
        tail = os.pread(fd, size - start, start)
        whole = tail[: tail.rfind(b"\n") + 1]
        body = whole[:-1]
        if start == 0 or b"\n" in body:
            break
        block *= 8
    end = start + len(whole)
    if not whole:
        return end, None, size - end
    line = body[body.rfind(b"\n") + 1 :]
    return end, lines.opened(line) or _damaged(line), size - end


def _damaged(line: bytes) -> dict[str, Any]:
    """Somebody changed the last line. Writing goes on from it, and `verify` says what is wrong with it."""
    import msgspec

    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
        n = found.get("n")
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        n = None
    return {"n": n if isinstance(n, int) else 0, "hash": lines.digest(line)}
