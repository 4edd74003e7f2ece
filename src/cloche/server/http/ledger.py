"""One line for every request, whichever face answers it: what it was, whose, how it went, how long it took.

The ledger stands around the whole application. It gives a request its id (the caller's `X-Request-ID` where that is a plain word), reads
`traceparent`, and opens an `Entry`, in which whoever answers writes what only they know: the operation and the key. When the answer has begun it
tells the meters, and when it is over it writes the line, if lines are wanted.

*A line holds no secret.* No header, body or query is in it; a path is there only where no operation was found for it, and what is long in it, or
looks like a key, is left out. *A line is a line*: it is JSON, so whatever a client sends, it cannot end the line and begin one of its own.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import events, model
from cloche.server.http import clients

log = logging.getLogger("cloche.requests")
UNKNOWN = "unknown"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[a-z0-9]+( [A-Za-z][A-Za-z _-]{0,60})?")
_KEY = re.compile(r"(cl|e2b)_|.{37}")


class Entry:
    """What is known of one request."""

    def __init__(self, request_id: str, client: clients.Client) -> None:
        self.request_id = request_id
        self.client = client
        self.operation = UNKNOWN
        self.caller = "-"
        self.status = 0
        self.began = time.perf_counter()

    def name_for(self, what: str) -> None:
        """The operation of another face, by the words that it goes by on record; those with a path in them are cut to the face."""
        self.operation = what if _NAME.fullmatch(what) else what.partition(" ")[0][:20]


Observe = Callable[[Entry, float], None]
"""Told of every answer when it begins: the entry, and the seconds until then."""

_current: ContextVar[Entry | None] = ContextVar("entry", default=None)


def entry(scope: Scope) -> Entry:
    """The entry of a request."""
    found = scope.get("cloche.entry")
    if found is None:  # an application that is served without its ledger
        found = scope["cloche.entry"] = Entry(model.new_id(), clients.OTHER)
    return cast(Entry, found)


def current() -> Entry:
    """The entry of the request that is being answered, for who does not see it."""
    return _current.get() or Entry(model.new_id(), clients.OTHER)


class Ledger:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, observe: Observe, told: bool) -> None:
        self._app = app
        self._observe = observe
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        made = _open(scope)
        request_id = made.request_id.encode()

        async def observed(message: Message) -> None:
            kind = message["type"]
            if kind in ("http.response.start", "websocket.http.response.start"):
                made.status = message["status"]
                headers = list(message.get("headers", ()))
                if not any(name.lower() == b"x-request-id" for name, _ in headers):
                    message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
                self._observe(made, time.perf_counter() - made.began)
            elif kind == "websocket.accept":
                made.status = 101
                self._observe(made, time.perf_counter() - made.began)
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            if self._told:
                _tell(made, scope)


def _open(scope: Scope) -> Entry:
    request_id = agent = b""
    parents = []
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id = value
        elif name == b"user-agent":
            agent = value
        elif name == b"traceparent":
            parents.append(value.decode("latin-1"))
    events.trace.set(events.read_trace(parents[0]) if len(parents) == 1 else None)
    known = _REQUEST_ID.fullmatch(request_id)
    made = Entry(request_id.decode() if known else model.new_id(), clients.of(agent))
    scope["cloche.entry"] = made
    _current.set(made)
    return made


def _tell(made: Entry, scope: Scope) -> None:
    trace = events.trace.get()
    line = {
        "request_id": made.request_id,
        "method": scope.get("method", "WEBSOCKET"),
        "operation": made.operation,
        "status": made.status or 499,
        "ms": round((time.perf_counter() - made.began) * 1000, 3),
        "key": made.caller,
        "client": " ".join(made.client),
    }
    peer = scope.get("client")
    if peer:
        line["peer"] = peer[0]
    if made.operation == UNKNOWN:
        line["path"] = shown(scope["path"])
    if (sandbox := scope.get("path_params", {}).get("sandbox")) is not None:
        line["sandbox"] = str(sandbox)[:64]
    if trace is not None:
        line["trace_id"] = trace.id
    log.info("request", extra={"fields": line})


def shown(path: str) -> str:
    """A path as it may be told: what is long, or looks like a key, is not."""
    return "/".join("…" if _KEY.match(segment) else segment for segment in path[:1000].split("/"))[:200]
