"""`/run` and `/run/stream`: one command in a sandbox of its own, which ends with the request unless `detach`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cloche import errors, model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Stream, begun
from cloche.server.http.routes.executions import exec_events
from cloche.server.http.routes.table import operation

_ERRORS = "template_not_found capacity_exceeded isolation_too_low command_empty argument_too_long"


@operation("POST", "/run", scope="exec", errors=_ERRORS, fleeting=True)
async def run(call: Call, body: wire.Run) -> wire.Result:
    """Run a command in a new sandbox and give its result."""
    async with _sandbox(call, body) as info:
        result = await call.backend.exec(info.id, body.request())
        return wire.Result.of(result, info.id if body.detach else None)


@operation(
    "POST", "/run/stream", scope="exec", errors=_ERRORS, events={"start": wire.Began, **wire.EXEC_EVENTS}
)
async def run_stream(call: Call, body: wire.Run) -> Stream[wire.ExecEvent]:
    """The same as server-sent events, each sent as it happens: `start`, `stdout`, `stderr`, `denied`, `exit`."""
    body.request().check()
    return Stream(await begun(_events(call, body)))


async def _events(call: Call, body: wire.Run) -> AsyncIterator[Event]:
    async with _sandbox(call, body) as info:
        started = await call.backend.start(info.id, body.request())
        yield Event("start", wire.Began(sandbox=info.id, execution=started.id))
        shown = info.id if body.detach else None
        async for event in exec_events(call.backend.attach(info.id, started.id), shown):
            yield event


@asynccontextmanager
async def _sandbox(call: Call, body: wire.Run) -> AsyncIterator[model.SandboxInfo]:
    spec = call.spec(body.sandbox, stay=body.detach)
    info = await call.backend.create(spec)
    try:
        yield info
    finally:
        if not body.detach:
            with suppress(errors.ClocheError):
                await asyncio.shield(call.backend.delete(info.id))  # whatever happens to who waits for it
