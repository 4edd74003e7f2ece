"""Executions: run to the end, start, attach, feed, signal. They belong to their sandbox and survive any disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cloche import errors, model
from cloche.server.guarding import opened
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Number, Stream
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.reading import last_event_id
from cloche.server.http.routes.table import operation

_HERE = "/v1/sandboxes/{sandbox}/executions"


@operation(
    "POST", "/v1/sandboxes/{sandbox}/exec", scope="exec",
    errors="sandbox_not_found sandbox_lost command_empty argument_too_long user_refused cwd_not_found",
)  # fmt: skip
async def exec_command(call: Call, sandbox: str, body: wire.Exec) -> wire.Result:
    """Run a command to its end.

    A failing command is a result. Past `background_after_s` the answer has `process`, and the command goes on.
    """
    running = asyncio.ensure_future(call.backend.exec(sandbox, body.request()))
    running.add_done_callback(_look_at)
    return wire.Result.of(await asyncio.shield(running))  # the client may leave; the command goes on


def _look_at(running: asyncio.Future[model.ExecResult]) -> None:
    if not running.cancelled():
        running.exception()  # or it would be complained about where the client has left


@operation("POST", _HERE, scope="exec", status=201, errors="sandbox_not_found sandbox_lost command_empty")
async def start_execution(call: Call, sandbox: str, body: wire.Exec) -> model.ExecutionInfo:
    """Start a command and come back at once."""
    return await call.backend.start(sandbox, body.request())


@operation("GET", _HERE, scope="exec", errors="sandbox_not_found sandbox_lost")
async def list_executions(
    call: Call, sandbox: str, *, limit: Limit = 100, cursor: Cursor | None = None
) -> wire.Executions:
    """The commands of a sandbox: those that run, and the last that ended; oldest first."""
    executions = await call.backend.executions(sandbox)
    found, more = page(executions, lambda info: (info.started_at, info.id), limit, cursor)
    return wire.Executions(executions=found, next_cursor=more)


@operation("GET", _HERE + "/{execution}/result", scope="exec", errors="sandbox_not_found execution_not_found")
async def wait_execution(call: Call, sandbox: str, execution: str) -> wire.Result:
    """Wait for a command's end and its result."""
    return wire.Result.of(await call.backend.wait(sandbox, execution))


@operation(
    "GET",
    _HERE + "/{execution}/stream",
    scope="exec",
    errors="sandbox_not_found execution_not_found",
    resumes=True,
    events=wire.EXEC_EVENTS,
)
async def follow_execution(
    call: Call, sandbox: str, execution: str, *, after: Number = 0, wait: bool = True
) -> Stream[wire.ExecEvent]:
    """Follow what a command writes, as server-sent events: `stdout`, `stderr`, `denied`, `truncated`, `exit`.

    Each has its sequence number as id. `Last-Event-ID` goes on after that one; `after` is the first number to send.
    """
    last = last_event_id(call.request.headers)
    after = after if last is None else last + 1
    await _known(call, sandbox, execution)
    return Stream(exec_events(await opened(call.backend.attach(sandbox, execution, after, wait))))


async def _known(call: Call, sandbox: str, execution: str) -> None:
    """That there is such a command: a stream of one that is not would have begun before it could say so."""
    if all(info.id != execution for info in await call.backend.executions(sandbox)):
        raise errors.error(
            "execution_not_found",
            f"the sandbox has no execution {execution[:50]!r}",
            hint="list them; finished ones are kept for a while only",
        )


async def exec_events(
    followed: AsyncIterator[model.StreamEvent], sandbox: str | None = None
) -> AsyncIterator[Event]:
    async for event in followed:
        yield exec_event(event, sandbox)


def exec_event(event: model.StreamEvent, sandbox: str | None = None) -> Event:
    id_ = str(event.seq)
    match event:
        case model.Output(stream=stream, data=data, seq=seq):
            base64 = wire.inexact(data)
            chunk = (
                wire.Chunk(seq=seq, text=data.decode())
                if base64 is None
                else wire.Chunk(seq=seq, data=base64)
            )
            return Event(stream, chunk, id_)
        case model.Denied(denial=denial, seq=seq):
            return Event("denied", wire.DeniedEvent(seq=seq, denial=denial), id_)
        case model.Truncated(stream=stream, skipped=skipped, seq=seq):
            return Event("truncated", wire.TruncatedEvent(seq=seq, stream=stream, skipped=skipped), id_)
        case model.Exited(result=result):
            return Event("exit", wire.Result.of(result, sandbox), id_)


@operation(
    "POST", _HERE + "/{execution}/stdin", scope="exec", errors="execution_not_found execution_finished"
)
async def write_stdin(call: Call, sandbox: str, execution: str, body: wire.Input) -> None:
    """Feed a command that was started with `open_stdin` or a terminal; `end` closes its input."""
    await call.backend.write_stdin(sandbox, execution, body.content(), body.end)


@operation("POST", _HERE + "/{execution}/signal", scope="exec", errors="execution_not_found signal_unknown")
async def signal_execution(call: Call, sandbox: str, execution: str, body: wire.Signal) -> None:
    """Signal a command's process group, or with `tree` everything that came from it."""
    await call.backend.signal(sandbox, execution, body.signal, body.tree)


@operation("POST", _HERE + "/{execution}/resize", scope="exec", errors="execution_not_found")
async def resize_execution(call: Call, sandbox: str, execution: str, body: wire.Resize) -> None:
    """Resize a command's terminal."""
    await call.backend.resize(sandbox, execution, body.columns, body.rows)
