"""Code contexts: interpreters that keep their state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from cloche import model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.operations import Event, Stream, begun
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation

_HERE = "/v1/sandboxes/{sandbox}/contexts"
_PATIENCE_S = 5.0  # for a first event: code may have to wait for its turn
_ERRORS = "sandbox_not_found sandbox_lost context_not_found"


@operation(
    "POST", "/v1/sandboxes/{sandbox}/code", scope="exec", errors=f"{_ERRORS} context_busy language_unknown"
)
async def run_code(call: Call, sandbox: str, body: wire.Code) -> wire.Ran:
    """Run code in a context; without one, in the sandbox's default context of that language.

    The code's own error is part of the result.
    """
    result = await call.backend.run_code(
        sandbox, body.code, body.context, body.language, body.env, body.timeout_s
    )
    return wire.Ran.of(result)


@operation(
    "POST",
    "/v1/sandboxes/{sandbox}/code/stream",
    scope="exec",
    errors=f"{_ERRORS} context_busy language_unknown",
    events=wire.CODE_EVENTS,
)
async def stream_code(call: Call, sandbox: str, body: wire.Code) -> Stream[wire.CodeEvent]:
    """The same as server-sent events: `start`, `stdout`, `stderr`, `result`, `failed` (the code's own error), and `exit` with the whole result.

    A client that leaves interrupts the code; the context keeps its state.
    """
    followed = call.backend.run_code_stream(
        sandbox, body.code, body.context, body.language, body.env, body.timeout_s
    )
    return Stream(await begun(_code_events(followed), _PATIENCE_S))


async def _code_events(followed: AsyncIterator[model.CodeEvent]) -> AsyncIterator[Event]:
    async with aclosing(followed) as events:  # type: ignore[type-var]
        async for event in events:
            match event:
                case model.CodeBegan(execution_count=count):
                    yield Event("start", wire.CodeStart(execution_count=count))
                case model.CodeOutput(stream=stream, text=text):
                    yield Event(stream, wire.CodeText(text=text))
                case model.CodeShown(result=result):
                    yield Event("result", result)
                case model.CodeFailed(error=error):
                    yield Event("failed", error)
                case model.CodeEnded(result=whole):
                    yield Event("exit", wire.Ran.of(whole))


@operation("POST", _HERE, scope="exec", status=201, errors="sandbox_not_found language_unknown cwd_not_found")
async def create_context(call: Call, sandbox: str, body: wire.CreateContext) -> model.ContextInfo:
    """Start an interpreter."""
    return await call.backend.create_context(sandbox, body.language, body.cwd)


@operation("GET", _HERE, scope="exec", errors="sandbox_not_found")
async def list_contexts(
    call: Call, sandbox: str, *, limit: Limit = 100, cursor: Cursor | None = None
) -> wire.Contexts:
    """The contexts of a sandbox."""
    contexts = await call.backend.contexts(sandbox)
    found, more = page(contexts, lambda info: (info.id,), limit, cursor)
    return wire.Contexts(contexts=found, next_cursor=more)


@operation("DELETE", _HERE + "/{context}", scope="exec", errors=_ERRORS)
async def delete_context(call: Call, sandbox: str, context: str) -> None:
    """End an interpreter."""
    await call.backend.delete_context(sandbox, context)


@operation("POST", _HERE + "/{context}/interrupt", scope="exec", errors=_ERRORS)
async def interrupt_context(call: Call, sandbox: str, context: str) -> None:
    """Interrupt what a context runs; its state stays."""
    await call.backend.interrupt_context(sandbox, context)


@operation("POST", _HERE + "/{context}/restart", scope="exec", errors=_ERRORS)
async def restart_context(call: Call, sandbox: str, context: str) -> None:
    """Start a context afresh under the same id."""
    await call.backend.restart_context(sandbox, context)


@operation(
    "POST", _HERE + "/{context}/fork", scope="exec", status=201, errors=f"{_ERRORS} context_has_threads"
)
async def fork_context(call: Call, sandbox: str, context: str, body: wire.Fork) -> wire.Contexts:
    """Copy a live Python context with its memory, within its sandbox."""
    return wire.Contexts(contexts=tuple(await call.backend.fork_context(sandbox, context, body.count)))
