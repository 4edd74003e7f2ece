"""The journal: what happened, as a page and as a stream; and the probes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from cloche import __version__, errors
from cloche.events import KINDS
from cloche.server.guarding import opened
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Number, Stream
from cloche.server.http.pages import Cursor, Limit
from cloche.server.http.pages import made as made_cursor
from cloche.server.http.pages import opened as opened_cursor
from cloche.server.http.reading import last_event_id
from cloche.server.http.routes.table import operation

log = logging.getLogger("cloche.http")


class Health(wire.Answer, frozen=True, kw_only=True):
    status: str
    version: str
    sandboxes: int


@operation("GET", "/v1/events", scope="events", errors="sandbox_not_found")
async def list_events(
    call: Call,
    *,
    after: Number = 0,
    sandbox: str | None = None,
    limit: Limit = 100,
    cursor: Cursor | None = None,
) -> wire.Events:
    """What happened, oldest first: after that number, or from a cursor on."""
    if cursor is not None:
        (place,) = opened_cursor(cursor, (0.0,))
        after = max(after, int(place))
    found = await call.backend.events(after, sandbox, limit)
    more = made_cursor((float(found[-1]["seq"]),)) if len(found) == limit else None
    return wire.Events(events=tuple(map(_event, found)), next_cursor=more)


@operation(
    "GET",
    "/v1/events/stream",
    scope="events",
    errors="sandbox_not_found",
    resumes=True,
    events=dict.fromkeys(KINDS, wire.JournalEvent),
)
async def follow_events(
    call: Call, *, after: Number = 0, sandbox: str | None = None
) -> Stream[wire.JournalEvent]:
    """Follow what happens, as server-sent events named by their kind. Each has its number as id; `Last-Event-ID` goes on from there."""
    last = last_event_id(call.request.headers)
    followed = call.backend.follow_events(after if last is None else last, sandbox)
    return Stream(_events(await opened(followed)), endless=True)


async def _events(followed: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    async with aclosing(followed) as events:  # type: ignore[type-var]
        async for event in events:
            yield Event(str(event["kind"]), event, str(event["seq"]))


def _event(found: dict[str, Any]) -> wire.JournalEvent:
    return wire.JournalEvent(**{name: found[name] for name in wire.JournalEvent.__struct_fields__})


@operation("GET", "/healthz", scope=None)
async def health(call: Call) -> Health:
    """Whether the engine answers: if not, restart it."""
    return await _health(call)


@operation("GET", "/readyz", scope=None, errors="server_unavailable")
async def ready(call: Call) -> Health:
    """Whether a sandbox could be made, recorded and kept now: the launcher lives, the state can be written and has room, and the
    audit log takes what it must. If not, send nobody here; why is in the log."""
    check = getattr(call.backend, "check_ready", None)
    try:
        if check is not None:
            await check()
    except errors.ClocheError as problem:
        log.warning("not ready: %s", problem.message)
        words = f"this server is not ready ({problem.code})"  # the rest is not for who has no key
        raise errors.error("server_unavailable", words, hint="its log says why") from None
    return await _health(call)


async def _health(call: Call) -> Health:
    return Health(status="ok", version=__version__, sandboxes=len(await call.backend.list()))
