"""What a command wrote: counted in full, kept at both ends, readable by cursor.

Each stream keeps its head and its tail for the result. Beside that the whole of both streams is a *log*: frames with
one sequence in order of arrival, in memory while it is small, in an unnamed file when it grows, and cut (with a count)
past a limit. A follower reads frames from a cursor and waits for more; many may follow one log. A *lossless* follower
is the command's real reader, as the next program of a pipeline is: it gets every byte past any limit, and what it does
not take in time makes the command wait.

A command that writes single bytes must not make the engine hold a frame for each: what no follower has seen is joined to
the frame before, and past a number of frames the rest is only counted.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from cloche import errors, model

_IN_MEMORY = 256 * 1024
_JOINED = 64 * 1024  # a frame grows up to this
_MOST_FRAMES = 100_000


class HeadAndTail:
    """The first and last bytes of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        return self.total > len(self._head) + min(self._tail_size, self._half)

    def bytes(self) -> bytes:
        tail = b"".join(self._tail)[-self._half :] if self._tail else b""
        if not self.truncated:
            return bytes(self._head) + tail
        missing = self.total - len(self._head) - len(tail)
        return bytes(self._head) + b"\n[... %d bytes not kept ...]\n" % missing + tail


class Frame(NamedTuple):
    stream: model.StreamName
    offset: int
    length: int
    kept: bool


class Tap:
    """What a lossless follower has still to take."""

    def __init__(self) -> None:
        self.events: deque[model.StreamEvent] = deque()
        self.size = 0
        self.changed = asyncio.Event()

    def put(self, event: model.StreamEvent, size: int = 0) -> None:
        self.events.append(event)
        self.size += size
        self.changed.set()

    def take(self) -> model.StreamEvent:
        event = self.events.popleft()
        if isinstance(event, model.Output):
            self.size -= len(event.data)
        return event


class Log:
    """All that was written, as frames."""

    def __init__(self, *, keep: int, spool_limit: int, directory: str) -> None:
        self.stdout, self.stderr = HeadAndTail(keep), HeadAndTail(keep)
        self._frames: list[Frame | model.Denied] = []
        self._memory = bytearray()
        self._file = -1
        self._size = 0
        self._spool_limit = spool_limit
        self._directory = directory
        self._seen = 0  # frames that some follower has
        self._uncounted: dict[model.StreamName, int] = {}
        self._lost: errors.ClocheError | None = None
        self._changed = asyncio.Event()
        self._taps: set[Tap] = set()
        self.exited: model.Exited | None = None
        self.on_taken: Callable[[], None] = lambda: None
        """Called when a lossless follower has taken something, or has left."""

    @property
    def next_seq(self) -> int:
        return len(self._frames)

    def add(self, stream: model.StreamName, data: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).add(data)
        for tap in self._taps:
            tap.put(model.Output(stream=stream, data=data, seq=self.next_seq), len(data))
        kept = (
            self._size + len(data) <= self._spool_limit
            and len(self._frames) < _MOST_FRAMES
            and self._write(data)
        )
        if not self._join(stream, len(data), kept):
            if len(self._frames) < _MOST_FRAMES:
                self._frames.append(Frame(stream, self._size, len(data), kept))
            else:
                self._uncounted[stream] = self._uncounted.get(stream, 0) + len(data)
        if kept:
            self._size += len(data)
        self._wake()

    def _join(self, stream: model.StreamName, length: int, kept: bool) -> bool:
        last = self._frames[-1] if len(self._frames) > self._seen else None
        if not isinstance(last, Frame) or (last.stream, last.kept) != (stream, kept):
            return False
        if kept and last.length + length > _JOINED:
            return False
        self._frames[-1] = last._replace(length=last.length + length)
        return True

    def deny(self, denial: model.Denial) -> None:
        denied = model.Denied(denial=denial, seq=self.next_seq)
        self._frames.append(denied)
        for tap in self._taps:
            tap.put(denied)
        self._wake()

    def finish(self, result: model.ExecResult) -> None:
        for stream, count in self._uncounted.items():
            self._frames.append(Frame(stream, 0, count, False))
        self.exited = model.Exited(result=result, seq=self.next_seq)
        self._wake()

    def lose(self, problem: errors.ClocheError) -> None:
        """The command went with its sandbox: followers are told instead of waiting for ever."""
        self._lost = self._lost or problem
        self._wake()

    def close(self) -> None:
        """Let go of the bytes; whoever still follows is told."""
        self.lose(errors.error("sandbox_lost", "the log is gone with its sandbox"))
        self._frames.clear()
        self._memory.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def backlog(self) -> int:
        """Bytes that the slowest lossless follower has still to take."""
        return max((tap.size for tap in self._taps), default=0)

    def _wake(self) -> None:
        for tap in self._taps:
            tap.changed.set()
        self._changed.set()
        self._changed = asyncio.Event()

    def _write(self, data: bytes) -> bool:
        if self._file < 0 and self._size + len(data) <= _IN_MEMORY:
            self._memory += data
            return True
        try:
            if self._file < 0:
                self._spill()
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            return False  # a full disk of ours must not fail the user's command: it is told as truncated
        return True

    def _spill(self) -> None:
        # Unnamed: if this process is killed, nothing is left.
        self._file = os.open(self._directory or "/tmp", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        view = memoryview(bytes(self._memory))
        while view:
            view = view[os.write(self._file, view) :]
        self._memory = bytearray()

    def _read(self, frame: Frame) -> bytes:
        if self._file >= 0:
            return os.pread(self._file, frame.length, frame.offset)
        return bytes(self._memory[frame.offset : frame.offset + frame.length])

    def event(self, seq: int) -> model.StreamEvent:
        frame = self._frames[seq]
        if isinstance(frame, model.Denied):
            return frame
        if not frame.kept:
            return model.Truncated(stream=frame.stream, skipped=frame.length, seq=seq)
        return model.Output(stream=frame.stream, data=self._read(frame), seq=seq)

    async def follow(self, after: int = 0, *, wait: bool = True) -> AsyncIterator[model.StreamEvent]:
        """Events from cursor `after` on; ends with `Exited`, or (without `wait`) with what there is."""
        cursor = max(0, after)
        while True:
            changed = self._changed
            while cursor < len(self._frames):
                self._seen = max(self._seen, cursor + 1)
                yield self.event(cursor)
                cursor += 1
            if self._lost is not None:
                raise self._lost
            if self.exited is not None:
                yield self.exited
                return
            if not wait:
                return
            await changed.wait()

    async def follow_all(self, after: int = 0) -> AsyncIterator[model.StreamEvent]:
        """As `follow`, without loss: from now on the command waits for this follower."""
        tap = Tap()
        self._taps.add(tap)
        try:
            for seq in range(max(0, after), len(self._frames)):
                self._seen = max(self._seen, seq + 1)
                yield self.event(seq)
            while True:
                tap.changed.clear()
                while tap.events:
                    yield tap.take()
                    self.on_taken()
                if self._lost is not None:
                    raise self._lost
                if self.exited is not None:
                    yield self.exited
                    return
                await tap.changed.wait()
        finally:
            self._taps.discard(tap)
            self.on_taken()
