"""The code interpreter of a sandbox: `/execute` and `/contexts` on port 49999.

Code without a context runs in one per language that is made on first use, in the user's home. Runs of a context queue; a client that leaves
interrupts its run. Every line is sent as it happens, and a keepalive where nothing has for a few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors, model
from cloche.compat.e2b import connect, faults, guests, notebooks
from cloche.compat.e2b.state import Place

_KEEPALIVE_S = 5.0
_NOT_HERE = ("javascript", "js", "typescript", "ts", "r", "java")
_FORMS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "application/vnd.cloche.chart+json": "chart", "application/vnd.cloche.table+json": "data",
}  # fmt: skip


class Execute(msgspec.Struct, kw_only=True):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class Make(msgspec.Struct, kw_only=True):
    language: str | None = None
    cwd: str | None = None


async def _body(place: Place, kind: Any) -> Any:
    data = await connect.read_all(place.request, place.config.server.max_body_mib << 20)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise faults.Fault(400, f"the body is not valid: {problem}") from None


async def execute(place: Place) -> Response:
    body: Execute = await _body(place, Execute)
    if body.context_id is not None and body.language is not None:
        raise faults.Fault(400, "Only one of context_id or language can be provided")
    if body.context_id is not None:
        known = await _known(place, body.context_id)
        context, language = known.id, known.language
    else:
        language = _language(body.language)
        context = await _default(place, language)
    if language == "python":
        body.code = notebooks.plain(body.code)
    lines = connect.with_keepalive(_run(place, context, body), _KEEPALIVE_S, {"type": "keepalive"})
    return connect.Stream(_lines(lines), place.config.server.write_timeout_s, "application/x-ndjson")


async def _lines(items: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            yield msgspec.json.encode(item) + b"\n"
    except errors.ClocheError as problem:
        error = {
            "type": "error",
            "name": problem.code,
            "value": problem.message,
            "traceback": problem.message,
        }
        yield msgspec.json.encode(error) + b"\n" + b'{"type":"end_of_execution"}\n'


async def _run(place: Place, context: str, body: Execute) -> AsyncIterator[dict[str, Any]]:
    events = place.backend.run_code_stream(place.sandbox, body.code, context, env=body.env_vars or None)
    try:
        async for event in events:
            told = _told(event)
            if told is not None:
                yield told
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _told(event: model.CodeEvent) -> dict[str, Any] | None:
    match event:
        case model.CodeBegan():
            return {"type": "number_of_executions", "execution_count": event.execution_count}
        case model.CodeOutput():
            return {"type": event.stream, "text": event.text, "timestamp": time.time_ns()}
        case model.CodeShown():
            return _result(event.result)
        case model.CodeFailed():
            return {"type": "error", **msgspec.to_builtins(event.error)}
        case model.CodeEnded():
            return {"type": "end_of_execution"}


def _result(found: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "result", "is_main_result": bool(found.get("main"))}
    extra: dict[str, Any] = {}
    for mime, value in found.items():
        if mime in _FORMS:
            made[_FORMS[mime]] = value
        elif mime != "main":
            extra[mime] = value
    text = made.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        made["text"] = text[1:-1]
    if extra:
        made["extra"] = extra
    return made


def _language(given: str | None) -> str:
    language = (given or "python").lower()
    if language in _NOT_HERE:
        raise faults.missing(f"the language {language}", "; python and bash are")
    return language


async def _default(place: Place, language: str) -> str:
    async with place.held.queues.setdefault(f"language {language}", asyncio.Lock()):
        known = place.held.contexts.get(language)
        if known is not None and any(c.id == known for c in await place.backend.contexts(place.sandbox)):
            return known
        made = await place.backend.create_context(place.sandbox, language, guests.HOME)
        place.held.contexts[language] = made.id
        return made.id


async def _known(place: Place, identity: str) -> model.ContextInfo:
    for found in await place.backend.contexts(place.sandbox):
        if found.id == identity:
            return found
    raise faults.Fault(404, f"Context {identity[:50]} not found", name="context_not_found")


def _shown(info: model.ContextInfo) -> dict[str, Any]:
    return {"id": info.id, "language": info.language, "cwd": info.cwd}


async def create_context(place: Place) -> Response:
    body: Make = await _body(place, Make)
    cwd = guests.path_of(body.cwd)
    made = await place.backend.create_context(place.sandbox, _language(body.language), cwd)
    return faults.json(_shown(made))


async def list_contexts(place: Place) -> Response:
    return faults.json([_shown(info) for info in await place.backend.contexts(place.sandbox)])


async def restart_context(place: Place, identity: str) -> Response:
    await place.backend.restart_context(place.sandbox, (await _known(place, identity)).id)
    return Response(status_code=200)


async def delete_context(place: Place, identity: str) -> Response:
    await place.backend.delete_context(place.sandbox, (await _known(place, identity)).id)
    return Response(status_code=204)
