"""What a connection may take: time, bytes, places. Who takes more is refused in our words, or cut, and counted by the reason.

uvicorn bounds the pause between two requests and nothing else, and the parser takes heads of any size. So our protocols, which are
uvicorn's with their hands on a `Watch`, keep these:

* *A head comes in one piece*: from its first byte to its last within `server.header_timeout_s`, its address and itself no longer than the
  limits below. `request_too_slow`, `url_too_long`, `head_too_large`.
* *A body moves*: never still for `server.body_timeout_s`, and on the whole not slower than `SLOWEST` bytes a second beyond that. Time in
  which we ourselves do not read does not count.
* *A reader reads*: a connection whose buffer did not shrink for `server.write_timeout_s` is cut, whatever was being written to
  it. It could not be told: what is told goes the way that is blocked. The log says so; an execution goes on, and its log can be read again.
* *Places are limited* (`server.max_connections`). Who comes when all are taken gets the place of the one that has been without a request
  for the longest; only if every connection has a request under way is the newcomer refused.

Nothing here is done per request but setting a time and moving a key of a dict: the limits are looked at by one timer for all connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, ClassVar, NamedTuple, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from cloche import errors, model, rpc, settings
from cloche.server.http import corking

log = logging.getLogger("cloche.http")
SLOWEST = 500
LONGEST_URL = 16 << 10
LARGEST_HEAD = 64 << 10
_MOST_HEADERS = 200
_LINGER_S = 2.0
_COMPLAINTS_A_MINUTE = 60


class Limits(NamedTuple):
    """The settings that concern connections."""

    header_s: float
    body_s: float
    idle_s: float
    write_s: float
    most: int

    @classmethod
    def of(cls, config: settings.Server, descriptors: int) -> Limits:
        """`descriptors`: how many this process may have; a quarter of them stay for sandboxes, files and the rest."""
        most = min(config.max_connections, max(1, descriptors * 3 // 4))
        return cls(
            config.header_timeout_s,
            config.body_timeout_s,
            config.idle_timeout_s,
            config.write_timeout_s,
            most,
        )


class Watch:
    """All connections of a server, who of them waits, and what became of the others."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cut: Counter[str] = Counter()
        """Connections that were ended by us, by the code that says why."""
        self._all: set[Http | WebSocket] = set()
        self._quiet: dict[Http, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._said, self._minute = 0, 0.0

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def quiet(self) -> int:
        """Connections without a request."""
        return len(self._quiet)

    def enter(self, connection: Http | WebSocket, now: float) -> bool:
        """Whether there is a place, or could be made one."""
        if len(self._all) >= self.limits.most and not self._make_room():
            return False
        self._all.add(connection)
        if self._timer is None:
            self._look_later(connection.loop)
        return True

    def leave(self, connection: Http | WebSocket) -> None:
        self._all.discard(connection)
        self._quiet.pop(connection, None)  # type: ignore[arg-type]

    def waits(self, connection: Http) -> None:
        """It has no request; from now on it is the youngest of those."""
        if connection in self._all:
            self._quiet[connection] = None

    def works(self, connection: Http) -> None:
        self._quiet.pop(connection, None)

    def _make_room(self) -> bool:
        oldest = next(iter(self._quiet), None)
        if oldest is None:
            return False
        self.leave(oldest)
        self.told(
            "capacity_exceeded", f"a connection without a request made room: {self.limits.most} are taken"
        )
        oldest.transport.abort()
        return True

    def told(self, code: str, words: str) -> None:
        """Count it, and say it unless it has been said often enough this minute."""
        self.cut[code] += 1
        now = asyncio.get_running_loop().time()
        if now - self._minute >= 60:
            self._said, self._minute = 0, now
        self._said += 1
        if self._said <= _COMPLAINTS_A_MINUTE:
            log.warning("%s (%s)", words, code)

    def farewell(self) -> None:
        """What has not ended by itself is told to."""
        for connection in list(self._all):
            if isinstance(connection, WebSocket):
                connection.end()
            connection.transport.abort()

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        shortest = min(self.limits[:4])
        self._timer = loop.call_later(min(1.0, shortest / 4), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._all):
            connection.check(now)
        self._timer = None
        if self._all:
            self._look_later(loop)


class _Flow:
    """Whether what is written to a transport is taken."""

    def __init__(self) -> None:
        self._since = 0.0
        self._size = -1

    def moved(self) -> None:
        self._size = -1

    def stuck(self, transport: asyncio.Transport, now: float, patience_s: float, *, paused: bool) -> bool:
        """Whoever writes is `paused` where the buffer is full; then the reader must take it at a rate, else only something of it."""
        size = transport.get_write_buffer_size()
        if size == 0:
            self.moved()
            return False
        if self._size < 0 or self._size - size >= (SLOWEST * patience_s if paused else 1):
            self._since, self._size = now, size
            return False
        self._size = max(self._size, size)
        return now - self._since > patience_s


class Http(HttpToolsProtocol):
    """One connection that speaks HTTP/1."""

    watch: ClassVar[Watch]

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._writing = _Flow()
        self._since = self._moved = 0.0
        self._taken = self._head = 0
        self._in_head = self._in_body = False
        self._fault: errors.ClocheError | None = None
        self._lingers_until = 0.0

    # ── what comes ──────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, corking.Corked(transport, self.loop)))
        self._since = self.loop.time()
        if self.watch.enter(self, self._since):
            self.watch.waits(self)
        else:
            self.refuse(_full(self.watch.limits.most))

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers_until:
            return
        continues = self._in_head
        self._moved = self.loop.time()
        self._taken += len(data)
        super().data_received(data)
        if continues and self._in_head and not self._lingers_until:
            self._head += len(data)
            if self._head > LARGEST_HEAD:  # one header without an end: the parser has not shown it to us
                self.refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head = 0
        self._since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > LONGEST_URL:
            self._fault = errors.error(
                "url_too_long", f"the request's address is longer than {LONGEST_URL >> 10} KiB",
                hint="send what is long in the body",
            )  # fmt: skip
            raise ValueError  # ends the parsing; `send_400_response` is next

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head += len(name) + len(value)
        if self._head > LARGEST_HEAD or len(self.headers) > _MOST_HEADERS:
            self._fault = _head_too_large()
            raise ValueError

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._since = self._moved = self.loop.time()
        self._taken = 0
        self.watch.works(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._since = self.loop.time()
            self.watch.waits(self)

    def handle_websocket_upgrade(self) -> None:
        self.watch.leave(self)
        super().handle_websocket_upgrade()

    def resume_writing(self) -> None:
        self._writing.moved()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        fault, self._fault = self._fault, None
        self.refuse(
            fault
            or errors.error(
                "request_malformed", "this is not HTTP/1.1", hint="see whether the address is the right one"
            )
        )

    # ── what does not come ──────────────────────────────────────────────────────────────────────

    def check(self, now: float) -> None:
        """Called again and again, at times that nobody should rely on."""
        limits = self.watch.limits
        if self._writing.stuck(self.transport, now, limits.write_s, paused=self.flow.write_paused):
            self.watch.told(
                "reader_too_slow", f"a stream was cut: its reader took nothing for {limits.write_s:g} s"
            )
            self.transport.abort()
        elif self._lingers_until:
            if now > self._lingers_until:
                self.transport.abort()
        elif self.transport.is_closing():
            pass  # it goes when what is written is read; see above
        elif self._in_head:
            if now - self._since > limits.header_s:
                self.refuse(_too_slow("head", limits.header_s))
        elif self._in_body:
            self._check_body(now, limits.body_s)
        elif not self._under_way() and now - self._since > limits.idle_s:
            self.transport.close()

    def _under_way(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _check_body(self, now: float, patience_s: float) -> None:
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._since += now - self._moved
            self._moved = now
            return
        late = now - self._since - self._taken / SLOWEST
        if now - self._moved > patience_s or late > patience_s:
            self.refuse(_too_slow("body", patience_s))

    def refuse(self, fault: errors.ClocheError) -> None:
        """Say why, if nothing else is being said, and end the connection."""
        self.watch.told(fault.code, fault.message)
        self.watch.works(self)
        under_way = self._under_way()
        spoken = under_way and (self.cycle.response_started or bool(self.pipeline))
        self.pipeline.clear()
        if under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if spoken or self.transport.is_closing():
            self.transport.abort()
            return
        self.transport.write(_answer(fault))
        # Ended for good a little later: what the client still sends is taken, since a socket that is closed with something unread in it
        # takes the answer back.
        self._lingers_until = self.loop.time() + _LINGER_S
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


class Local(Http):
    """One that came by the unix socket: who may open that needs no key. It is told from others by a word that only this process knows."""

    word: ClassVar[str]

    def on_headers_complete(self) -> None:
        if not any(name in (b"authorization", b"x-api-key") for name, _ in self.headers):
            self.headers.append((b"authorization", f"Bearer {self.word}".encode()))
        super().on_headers_complete()


class WebSocket(WebSocketsSansIOProtocol):
    """One connection that has become a WebSocket. uvicorn's pings find out who has gone without a word."""

    watch: ClassVar[Watch]

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._writing = _Flow()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.watch.enter(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.leave(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._writing.moved()
        super().resume_writing()

    def keepalive_timeout(self) -> None:
        self.watch.told("connection_lost", "a WebSocket was cut: its client did not answer to a ping")
        super().keepalive_timeout()
        self.transport.abort()  # the farewell cannot arrive, and must not be waited for

    def check(self, now: float) -> None:
        patience_s, paused = self.watch.limits.write_s, not self.writable.is_set()
        if self._writing.stuck(self.transport, now, patience_s, paused=paused):
            self.watch.told(
                "reader_too_slow",
                f"a WebSocket was cut: its reader took nothing for {patience_s:g} s",
            )
            self.transport.abort()

    def shutdown(self) -> None:
        """The server leaves: what is under way may finish, see `Watch.farewell`."""

    def end(self) -> None:
        super().shutdown()


def protocols(watch: Watch, word: str) -> tuple[type[Http], type[Local], type[WebSocket]]:
    """The classes for one server: uvicorn makes the instances, and has nothing to hand them. `word`: see `Local`."""
    return (
        type("Http", (Http,), {"watch": watch}),
        type("Local", (Local,), {"watch": watch, "word": word}),
        type("WebSocket", (WebSocket,), {"watch": watch}),
    )


def _answer(fault: errors.ClocheError) -> bytes:
    request_id = model.new_id()
    error = {**fault.to_dict(), "request_id": request_id}
    body = rpc.encode({"error": error})
    retry = "Retry-After: 1\r\n" if errors.TABLE[fault.code].retryable else ""
    head = (
        f"HTTP/1.1 {errors.TABLE[fault.code].http} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-ID: {request_id}\r\n{retry}Connection: close\r\n\r\n"
    )
    return head.encode() + body


def _too_slow(what: str, patience_s: float) -> errors.ClocheError:
    return errors.error(
        "request_too_slow",
        f"the request's {what} did not arrive within {patience_s:g} s",
        hint="send it faster, or in smaller pieces",
    )


def _head_too_large() -> errors.ClocheError:
    return errors.error(
        "head_too_large", f"the request's headers are more than {LARGEST_HEAD >> 10} KiB or {_MOST_HEADERS}",
        hint="send fewer or shorter ones",
    )  # fmt: skip


def _full(most: int) -> errors.ClocheError:
    return errors.error(
        "server_busy", f"all {most} connections of this server are in use",
        hint="try again; the operator may raise server.max_connections", retry_after_s=1,
    )  # fmt: skip
