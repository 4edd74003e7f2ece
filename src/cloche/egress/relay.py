"""Moving bytes between two sockets: fast, flat in memory, and faithful to how each side ends.

    relay = Relay(loop, client, server, on_end=…)
    relay.down.start()                    server → client, from now on
    relay.up.start(b"first bytes")        client → server, these first

A `Pump` is one direction, driven by readiness callbacks and no task. It reads into one buffer shared by the whole process
and writes at once; only what the other side does not take is kept (at most one buffer), and reading stops until it is
gone: that is the back-pressure. A direction that has moved a megabyte goes on by splice through a pipe, where bytes do not
enter this process at all. The end of one direction is passed on as a half-close; an error in either ends both.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from typing import Protocol

_BUFFER = bytearray(256 * 1024)
_VIEW = memoryview(_BUFFER)
_SPLICE_AFTER = 1024 * 1024
_PIPE_BYTES = 1024 * 1024
_F_SETPIPE_SZ = 1031
_TURNS = 8  # how often one direction goes on before others get theirs
_SPLICE_FLAGS = 1 | 2  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK
_DRAINED = 64 * 1024


class Framing(Protocol):
    """How far a message goes in a stream; see http.Body."""

    @property
    def done(self) -> bool: ...

    def feed(self, data: memoryview) -> int: ...


class TooMuch(Exception):
    """More was sent than the rule allows."""


class Relay:
    """Both directions of one connection. `on_end` is called once, with None or what went wrong."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: socket.socket,
        server: socket.socket,
        *,
        on_end: Callable[[BaseException | None], None],
        upload_bytes: int | None = None,
    ) -> None:
        self.loop = loop
        self.client = client
        self.server = server
        self.last = loop.time()
        self._on_end = on_end
        self._ended = False
        self.up = Pump(self, client, server, limit=upload_bytes)
        self.down = Pump(self, server, client)

    def end(self, problem: BaseException | None = None) -> None:
        """Close both sides. A connection that failed is reset, so that a cut-off body is not taken for a whole one."""
        if self._ended:
            return
        self._ended = True
        self.up.close()
        self.down.close()
        for one in (self.client, self.server):
            close(self.loop, one, reset=problem is not None)
        self._on_end(problem)

    def one_done(self) -> None:
        if self.up.done and self.down.done:
            self.end()


class Pump:
    """One direction of a relay."""

    def __init__(
        self, relay: Relay, source: socket.socket, sink: socket.socket, *, limit: int | None = None
    ) -> None:
        self._relay = relay
        self._loop = relay.loop
        self._source = source
        self._sink = sink
        self._limit = limit
        self._held = b""
        self._pipe: tuple[int, int] | None = None
        self._piped = 0
        self._ending = False
        self._framing: Framing | None = None
        self._drained = 0
        self._running = False
        self.total = 0
        self.done = False

    def start(self, first: bytes = b"", *, framing: Framing | None = None) -> None:
        """Begin; `first` goes before anything that is read. With a framing, only its message is passed on, and what the
        source says after it is dropped."""
        self._framing = framing
        self._running = True
        if first:
            self._write(memoryview(first))
        if self._running and not self._held and not self.done:
            self._listen()

    def pause(self) -> None:
        """Stop reading, for somebody who wants to read the source himself."""
        self._running = False
        if self._source.fileno() >= 0:
            self._loop.remove_reader(self._source)

    def close(self) -> None:
        self._running = False
        self.done = True
        self._held = b""
        if self._source.fileno() >= 0:
            self._loop.remove_reader(self._source)
        if self._sink.fileno() >= 0:
            self._loop.remove_writer(self._sink)
        if self._pipe is not None:
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None

    def _listen(self) -> None:
        can_splice = self._framing is None and self._limit is None and self.total >= _SPLICE_AFTER
        if can_splice and self._pipe is None:
            self._pipe = _make_pipe()
        self._loop.add_reader(self._source, self._splice_in if self._pipe else self._read)

    # ── by copying ──────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        try:
            count = self._source.recv_into(_BUFFER)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self._relay.end(problem)
            return
        self._relay.last = self._loop.time()
        if count == 0:
            self._end_of_source()
            return
        before = self.total
        self._write(_VIEW[:count])
        if before < _SPLICE_AFTER <= self.total and self._running and not self._held and not self.done:
            self._listen()  # from here on it may be done by splice

    def _write(self, data: memoryview) -> None:
        if self._framing is not None:
            data = self._framed(self._framing, data)
            if self.done:
                return
        self.total += len(data)
        if self._limit is not None and self.total > self._limit:
            self._relay.end(TooMuch())
            return
        try:
            sent = self._sink.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as problem:
            self._relay.end(problem)
            return
        if sent < len(data):
            self._held = bytes(data[sent:])
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._flush)

    def _framed(self, framing: Framing, data: memoryview) -> memoryview:
        """What of `data` belongs to the message. After it, the source is only watched for its end."""
        try:
            used = framing.feed(data)
        except ValueError as problem:
            self._relay.end(problem)
            return data[:0]
        self._drained += len(data) - used
        if self._drained > _DRAINED:
            self.pause()
        return data[:used]

    def _flush(self) -> None:
        try:
            sent = self._sink.send(self._held)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self._relay.end(problem)
            return
        self._relay.last = self._loop.time()
        self._held = self._held[sent:]
        if not self._held:
            self._sink_is_free()

    def _sink_is_free(self) -> None:
        self._loop.remove_writer(self._sink)
        if self._ending:
            self._finish()
        elif self._running:
            self._listen()

    # ── by splice ───────────────────────────────────────────────────────────────────────────────

    def _splice_in(self) -> None:
        for _ in range(_TURNS):
            if not self._splice_once():
                return

    def _splice_once(self) -> bool:
        """One pipe's fill; whether it is worth trying again at once."""
        assert self._pipe is not None
        try:
            count = os.splice(self._source.fileno(), self._pipe[1], _PIPE_BYTES, flags=_SPLICE_FLAGS)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as problem:
            self._relay.end(problem)
            return False
        self._relay.last = self._loop.time()
        if count == 0:
            self._end_of_source()
            return False
        self.total += count
        self._piped += count
        self._splice_out()
        if self._piped and not self.done:
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._splice_on)
        return not self._piped and not self.done

    def _splice_out(self) -> None:
        assert self._pipe is not None
        try:
            while self._piped:
                self._piped -= os.splice(self._pipe[0], self._sink.fileno(), self._piped, flags=_SPLICE_FLAGS)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as problem:
            self._relay.end(problem)

    def _splice_on(self) -> None:
        self._relay.last = self._loop.time()
        self._splice_out()
        if not self._piped and not self.done:
            self._sink_is_free()

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def _end_of_source(self) -> None:
        if self._framing is not None and not self._framing.done:
            self._relay.end(ConnectionAbortedError("the message was cut off"))
            return
        self._loop.remove_reader(self._source)
        self._ending = True
        if not self._held and not self._piped:
            self._finish()

    def _finish(self) -> None:
        self.done = True
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already; the other direction will notice
        self._relay.one_done()


def _make_pipe() -> tuple[int, int] | None:
    """A large pipe, or None where none is to be had: then bytes go on being copied."""
    try:
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.fcntl(ends[1], _F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass  # beyond what the user may have in pipes: a small one does too
    return ends


def close(loop: asyncio.AbstractEventLoop, one: socket.socket, *, reset: bool = False) -> None:
    """Close a socket that the loop may be watching. The loop forgets it first: the number is used again at once."""
    if one.fileno() < 0:
        return
    loop.remove_reader(one)
    loop.remove_writer(one)
    if reset:
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        except OSError:
            pass
    one.close()
