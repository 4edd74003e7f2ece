"""The journal: what happened, as a page and as a stream; and the probes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from cloche import __version__, errors
from cloche.server.guarding import opened
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Stream
from cloche.server.http.routes.executions import last_event_id
from cloche.server.http.routes.table import operation

_MOST = 1000


class Health(wire.Answer, frozen=True, kw_only=True):
    status: str
    version: str
    sandboxes: int


@operation("GET", "/v1/events", scope="events")
async def list_events(
    call: Call, *, after: int = 0, sandbox: str | None = None, limit: int = 100
) -> wire.Events:
    """What happened, oldest first. `next_cursor` is the `after` of the next page."""
    if not 1 <= limit <= _MOST:
        raise errors.error("limit_invalid", f"limit is {limit}; it must be 1 to {_MOST}", field="limit")
    found = await call.backend.events(after, sandbox, limit)
    more = str(found[-1]["seq"]) if len(found) == limit else None
    return wire.Events(events=tuple(found), next_cursor=more)


@operation("GET", "/v1/events/stream", scope="events")
async def follow_events(call: Call, *, after: int = 0, sandbox: str | None = None) -> Stream[dict[str, Any]]:
    """Follow what happens, as server-sent events named by their kind; `Last-Event-ID` goes on from there."""
    last = last_event_id(call)
    followed = call.backend.follow_events(after if last is None else last, sandbox)
    return Stream(_events(await opened(followed)))


async def _events(followed: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Event]:
    async for event in followed:
        yield Event(str(event["kind"]), event, str(event["seq"]))


@operation("GET", "/healthz", scope=None)
async def health(call: Call) -> Health:
    """Whether the engine answers."""
    return await _health(call)


@operation("GET", "/readyz", scope=None, errors="server_unavailable")
async def ready(call: Call) -> Health:
    """Whether the store can be read and sandboxes can be made."""
    await call.backend.events(0, None, 1)
    return await _health(call)


async def _health(call: Call) -> Health:
    return Health(status="ok", version=__version__, sandboxes=len(await call.backend.list()))
