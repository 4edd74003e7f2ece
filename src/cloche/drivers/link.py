"""The host's end of a guest's socket. The guest is hostile ground.

Every frame is bounded, decoded by a schema, and matched to a request that is waiting; descriptors are taken only where
an answer may carry one. Anything else ends the sandbox with `guest_misbehaved`. Sending never blocks the event loop:
a guest that does not read makes its own requests wait, and nobody else's.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from cloche import errors
from cloche.guest import wire

_MAX_QUEUED = 10_000
MISBEHAVED = "the guest sent what no guest of ours sends (guest_misbehaved)"
_CARRYING = ("open", "connect")  # the requests whose answers bring a descriptor

# Whatever is computed with later is bounded here, so that no number overflows where nobody expects it to.
Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Real = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class Frame(msgspec.Struct):
    """All that a guest may say."""

    n: Size | None = None
    errno: Number | None = None
    path: str = ""
    pid: Number = 0
    killed: Number = 0
    made: bool = False
    entry: Entry | None = None
    entries: list[Entry] = []
    more: bool = False
    last: str = ""
    watch: Number = -1
    events: list[tuple[str, str]] = []
    pids: list[Number] = []
    mark: Size = 0
    ready: bool = False
    passed: tuple[str, ...] = ("terminals", "listener")
    """What the descriptors of `ready` are, in order."""
    trace: list[Size] = []
    first_id: Size | None = None
    failed: str | None = None
    exit: Number | None = None
    status: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0
    cpu_ms: Real = 0
    rss_kib: Size = 0


class Entry(msgspec.Struct, array_like=True):
    name: Annotated[str, msgspec.Meta(max_length=4096)]
    mode: Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
    size: Size
    uid: Size
    gid: Size
    mtime: Real
    target: str | None


_decode = msgspec.json.Decoder(Frame).decode


class Answer:
    """A frame that answers a request, and the descriptors that came with it."""

    __slots__ = ("fds", "frame")

    def __init__(self, frame: Frame, fds: list[int]) -> None:
        self.frame = frame
        self.fds = fds


class Link:
    def __init__(
        self,
        sock: socket.socket,
        *,
        on_frame: Callable[[Frame, list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_end = on_end
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._late: dict[int, Callable[[Frame], None]] = {}
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._next = 1
        self.closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    async def request(
        self,
        op: str,
        fields: dict[str, Any],
        fds: Sequence[int] = (),
        *,
        late: Callable[[Frame], None] | None = None,
    ) -> Answer:
        """Ask, and wait for the answer. An errno in it is raised as OSError. If the asker is cancelled, `late` gets it."""
        if self.closed:
            raise errors.error("sandbox_lost", "the sandbox has ended")
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self._send({"op": op, "n": number, **fields}, fds)
            answer = await future
        except asyncio.CancelledError:
            if late is not None:
                self._late[number] = late
            raise
        finally:
            self._waiting.pop(number, None)
        if op not in _CARRYING or answer.frame.errno is not None:
            wire.close_all(answer.fds)
            answer.fds = []
        if answer.frame.errno is not None:
            code = answer.frame.errno if 0 < answer.frame.errno < 4096 else 5
            raise OSError(code, os.strerror(code), answer.frame.path[:4096])
        return answer

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell without waiting for an answer."""
        self._send(message, fds)

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        if not self._queue:
            try:
                wire.send(self._sock, message, tuple(fds))
                return
            except BlockingIOError:
                pass
            except OSError as problem:
                self.close("the guest is gone")
                raise errors.error("sandbox_lost", "the sandbox has ended") from problem
        if len(self._queue) >= _MAX_QUEUED:
            raise errors.error(
                "capacity_exceeded", "the sandbox does not answer and too many requests wait for it"
            )
        # The caller may close its descriptors as soon as this returns.
        self._queue.append((msgspec.json.encode(message), [os.dup(fd) for fd in fds]))
        if len(self._queue) == 1:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        while self._queue:
            body, fds = self._queue[0]
            try:
                wire.send(self._sock, msgspec.json.decode(body), fds)
            except BlockingIOError:
                return
            except OSError:
                self.close("the guest is gone")
                return
            self._queue.popleft()
            wire.close_all(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(64):  # then let others run; a flooding guest gets no more than its turn
            try:
                body, fds = wire.receive_raw(self._sock)
            except BlockingIOError:
                return
            except OSError:
                body, fds = b"", []
            if not body:
                self.close("the guest ended")
                return
            try:
                frame = _decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                wire.close_all(fds)
                self.close(MISBEHAVED)
                return
            self._dispatch(frame, fds)
            if self.closed:
                return

    def _dispatch(self, frame: Frame, fds: list[int]) -> None:
        future = self._waiting.pop(frame.n, None) if frame.n is not None else None
        if future is not None and not future.done():
            future.set_result(Answer(frame, fds))
        elif frame.n is None:
            self._on_frame(frame, fds)
        else:
            wire.close_all(fds)  # an answer nobody waits for any more
            if frame.n in self._late:
                self._late.pop(frame.n)(frame)

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._queue:
            self._loop.remove_writer(self._sock.fileno())
            for _, fds in self._queue:
                wire.close_all(fds)
            self._queue.clear()
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(errors.error("sandbox_lost", f"the sandbox has ended: {reason}"))
                future.exception()  # a caller that went away has nobody to tell
        self._waiting.clear()
        self._on_end(reason)


def only_regular(fds: list[int], flags: int) -> int:
    """The one descriptor of an answer, if it is what it must be: a regular file, opened as was asked."""
    wire.close_all(fds[1:])
    if not fds:
        raise errors.error("guest_misbehaved", "the guest answered without the file that it was asked for")
    fd = fds[0]
    mode, opened = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    if stat.S_ISREG(mode) and not opened & os.O_PATH and opened & os.O_ACCMODE == flags & os.O_ACCMODE:
        return fd
    os.close(fd)
    if stat.S_ISREG(mode):
        raise errors.error(
            "guest_misbehaved", "the guest answered with a file that is not open as it was asked to be"
        )
    if stat.S_ISDIR(mode):
        raise errors.error("is_directory", "the path is a directory", hint="list it, or name a file in it")
    raise errors.error(
        "not_regular_file",
        "the path is a device, FIFO or socket, not a regular file",
        hint="read it with a command",
    )


def only_tcp(fds: list[int]) -> int:
    """The one descriptor of an answer, if it is a TCP socket."""
    wire.close_all(fds[1:])
    if not fds or not _is_tcp(fds[0]):
        wire.close_all(fds[:1])
        raise errors.error(
            "guest_misbehaved", "the guest answered without the connection that it was asked for"
        )
    return fds[0]


def _is_tcp(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as shown:
        kind = shown.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        return shown.family in (socket.AF_INET, socket.AF_INET6) and (kind, shown.proto) == (
            socket.SOCK_STREAM,
            socket.IPPROTO_TCP,
        )
