"""From a request to a handler and back.

The order is fixed: request id, door, scope, rate, size, then parameters, then the sandbox's tenant, then the handler. Whatever is raised
becomes one shape, `{"error": {code, message, hint, request_id, details}}`, with the status of `errors.TABLE`; what nobody foresaw is
`internal_error` with its request id, and its traceback goes to the log, never to the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from cloche import errors, events, interfaces, model, rpc, settings
from cloche.server.guarding import Principal, guard
from cloche.server.http import doors, ledger, operations, proxy, reading, remembering, wire
from cloche.server.leaving import Leaving
from cloche.server.refusals import record_refusal

log = logging.getLogger("cloche.http")
_HEARTBEAT_S = 15.0
_LOOK_S = 5.0
_MOST_CALLERS = 10_000
_PROBE = Principal("-", "", frozenset())


class Call(NamedTuple):
    """One request, as its handler sees it."""

    backend: interfaces.Backend
    """The engine as this caller may use it."""
    principal: Principal
    defaults: settings.Defaults
    request: Request
    request_id: str

    def spec(self, body: wire.Create, *, stay: bool = True) -> model.SandboxSpec:
        return body.spec(self.defaults, stay=stay)


class Answers:
    """The dispatcher: holds what all requests share, and makes Starlette's routes."""

    def __init__(
        self,
        backend: interfaces.Backend,
        entrance: doors.Doors,
        config: settings.Settings,
        *,
        leaving: Leaving | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leaving = leaving or Leaving(config.server.drain_s)
        self._backend = backend
        self._doors = entrance
        self._config = config
        self._rates = _Rates(config.server.requests_per_s, config.server.burst, clock)
        self._remembered = remembering.Remembered(clock, os.path.join(config.home, "answers.jsonl"))

    def routes(self, table: operations.Table) -> list[Route]:
        return [self._route(made) for made in table.operations.values()]

    def _route(self, made: operations.Operation) -> Route:
        route = Route(
            made.path, self._endpoint(made), methods=[made.method], name=made.name, include_in_schema=False
        )
        if made.streams and route.methods is not None:
            route.methods.discard("HEAD")  # there is no asking for a stream without its events
        return route

    def _endpoint(self, operation: operations.Operation) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            entry = ledger.entry(request.scope)
            entry.operation, request_id = operation.name, entry.request_id
            principal, backend = _PROBE, self._backend
            try:
                self._doors.check_origin(request.headers)
                if operation.scope is not None:
                    principal = self._doors.principal(request.headers)
                    entry.caller = principal.name
                    if principal.sandbox is None or operation.name != "get_sandbox":
                        principal.require(operation.scope)
                    self._rates.take(principal.account)
                    backend = guard(self._backend, principal)
                call = Call(backend, principal, self._config.defaults, request, request_id)
                response = await self._answer(operation, call)
            except ClientDisconnect:
                response = Response(status_code=499)
            except errors.ClocheError as problem:
                self._turned_down(operation.name, principal, problem)
                response = failure(problem, request_id)
            except Exception:
                log.exception("request %s failed", request_id)
                response = failure(
                    errors.error(
                        "internal_error", f"something of ours failed; the log has request {request_id}"
                    ),
                    request_id,
                )
            return response

        return endpoint

    def mounted(self, name: str, face: ASGIApp) -> ASGIApp:
        """Another protocol's application behind the same doors. It finds the engine as its caller may use it in `scope["cloche"]`."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            request, entry = Request(scope), ledger.entry(scope)
            entry.operation = name
            principal, status, complete = _PROBE, 0, False

            async def observed(message: Message) -> None:
                nonlocal status, complete
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif message["type"] == "http.response.body":
                    complete = not message.get("more_body", False)
                await send(message)

            try:
                self._doors.check_origin(request.headers)
                principal = self._doors.principal(request.headers)
                entry.caller = principal.name
                self._rates.take(principal.account)
            except errors.ClocheError as problem:
                self._turned_down(name, principal, problem)
                await failure(problem, entry.request_id)(scope, receive, observed)
            else:
                scope["cloche"] = guard(self._backend, principal)
                try:
                    await self._until_leaving(scope["method"] == "GET", face(scope, receive, observed))
                    if self._leaving.begun.is_set() and status and not complete:
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                except Exception:
                    request_id = entry.request_id
                    log.exception("request %s of %s failed", request_id, name)
                    if not status:
                        words = f"something of ours failed; the log has request {request_id}"
                        await failure(errors.error("internal_error", words), request_id)(
                            scope, receive, observed
                        )

        return app

    async def _until_leaving(self, endless: bool, work: Awaitable[None]) -> None:
        """Another protocol's standing stream ends when the server leaves."""
        if not endless:
            return await work
        task = asyncio.ensure_future(work)
        self._leaving.watch(task, endless=True)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
        if self._leaving.told(task) is None:
            task.result()

    def enter(self, headers: Headers, what: str, own: str | None = None) -> tuple[str, interfaces.Backend]:
        """For other faces: the caller's key by name, and the backend as that caller may use it. `own`: an origin whose pages may."""
        principal = self._enter(headers, what, lambda: self._doors.principal(headers), own=own)
        return principal.known_as, guard(self._backend, principal)

    def enter_as(
        self, headers: Headers, principal: Principal, what: str, own: str | None = None
    ) -> interfaces.Backend:
        """For who is let in by something else than a key."""
        return guard(self._backend, self._enter(headers, what, lambda: principal, own=own))

    def visitor(self, headers: Headers, name: str, sandbox: str, what: str) -> interfaces.Backend:
        """For who may look at one sandbox and reach its ports without being anybody; whatever page it comes from."""
        anybody = Principal(name, "", frozenset(("ports", "sandboxes")), sandbox=sandbox)
        return self.enter_as(headers, anybody, what, "*")

    async def lives(self, sandbox: str) -> bool:
        """Whether there is such a sandbox, for a face that keeps something of it. Whose it is does not matter there."""
        try:
            return (await self._backend.info(sandbox)).phase in ("running", "paused", "archived")
        except (errors.NotFound, errors.SandboxLost):
            return False

    async def pass_on(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        backend: interfaces.Backend,
        sandbox: str,
        port: int,
        host: str = "",
    ) -> None:
        """A request or WebSocket, to a port of a sandbox on an origin of its own, which hears `host` for its name if one is given.
        Raises before anything is answered."""
        target = proxy.named(scope, backend, sandbox, port, self._config)
        if host:
            target = target._replace(host=host.encode("latin-1"))
        try:
            await proxy.pass_on(scope, receive, send, target)
        except proxy.Broken:
            return  # what has begun is cut, which tells the client that it is not whole

    def again(self, headers: Headers, key: str, what: str) -> interfaces.Backend:
        """The same for a caller who showed a token that a face gave out for a key: what that key may do now."""
        return guard(self._backend, self._enter(headers, what, lambda: self._doors.holder(key)))

    def open(self, headers: Headers, what: str) -> tuple[interfaces.Backend, Callable[[], None], Standing]:
        """For a connection that carries many calls: the backend, what to ask before each of them, and what to ask while one of them
        streams. A connection does not outlive its key."""
        principal = self._enter(headers, what, lambda: self._doors.principal(headers), rate=False)

        def each() -> None:
            self._enter(headers, what, lambda: self._doors.principal(headers))

        def still() -> None:
            self._enter(headers, what, lambda: self._doors.principal(headers), rate=False)

        return guard(self._backend, principal), each, Standing(still)

    def _standing(self, what: str, call: Call) -> Standing:
        headers = call.request.headers

        def still() -> None:
            if call.principal is not _PROBE:
                self._enter(headers, what, lambda: self._doors.principal(headers), rate=False)

        return Standing(still)

    def admit(self, headers: Headers, scope: operations.Scope, *, operator: bool = False) -> None:
        """For what is no operation of the table."""

        def who() -> Principal:
            principal = self._doors.principal(headers)
            principal.require(scope)
            if operator and principal.tenant:
                words = f"the {scope} are the operator's"
                hint = "use a key without a tenant"
                raise errors.error("scope_missing", words, hint=hint, scope=scope)
            return principal

        self._enter(headers, scope, who)

    def refused(self, what: str, problem: errors.ClocheError) -> errors.ClocheError:
        """Put on record what a face turned down by itself."""
        self._turned_down(what, _PROBE, problem)
        return problem

    def _enter(
        self,
        headers: Headers,
        what: str,
        who: Callable[[], Principal],
        *,
        rate: bool = True,
        own: str | None = None,
    ) -> Principal:
        principal, entry = _PROBE, ledger.current()
        entry.name_for(what)
        try:
            self._doors.check_origin(headers, own)
            principal = who()
            entry.caller = principal.name
            if rate:
                self._rates.take(principal.account)
        except errors.ClocheError as problem:
            self._turned_down(what, principal, problem)
            raise
        return principal

    def gate(self, app: ASGIApp) -> ASGIApp:
        """Around everything: by which name we are called is looked at before any face is asked, whatever the path; and what a
        check may have to wait for is fetched here, so that checks themselves wait for nothing."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] not in ("http", "websocket"):
                return await app(scope, receive, send)
            headers = Headers(scope=scope)
            try:
                self._leaving.check()
                self._doors.check_name(headers, (scope.get("server") or ("",))[0])
            except errors.ClocheError as problem:
                self._turned_down(
                    f"{scope.get('method', 'WEBSOCKET')} {scope['path'][:100]}", _PROBE, problem
                )
                response = failure(problem, ledger.entry(scope).request_id)
                if scope["type"] == "http":
                    return await response(scope, receive, send)
                return await WebSocket(scope, receive, send).close(4000 + response.status_code, problem.code)
            await self._doors.prepare(headers)
            await app(scope, receive, send)

        return gated

    def _turned_down(self, operation: str, principal: Principal, problem: errors.ClocheError) -> None:
        """On record too."""
        events.caller.set("stranger" if principal is _PROBE else principal.actor)
        record_refusal(self._backend, operation, None, problem)

    async def _answer(self, operation: operations.Operation, call: Call) -> Response:
        headers, limits = call.request.headers, self._config.server
        arguments = reading.places(operation, call.request)
        query = reading.query(operation, call.request)
        reading.check_condition(operation, headers)
        body = await reading.body(
            operation, call.request, json_mib=limits.max_body_mib, raw_mib=limits.max_upload_mib
        )
        if operation.body is not None:
            arguments["body"] = body

        async def perform() -> Response:
            return self._response(operation, call, await operation.handler(call, **arguments, **query))

        async def wait(work: Awaitable[Response]) -> Response:
            response: Response = await while_there(call.request, work, self._leaving)
            return response

        key = reading.idempotency_key(operation, headers)
        if key is None:
            return await wait(perform())
        said = [operation.name, call.request.url.path, str(call.request.url.query), body]
        digest = hashlib.sha256(msgspec.json.encode(said)).hexdigest()
        first = (lambda: wait(perform())) if operation.fleeting else perform
        return await self._remembered.once((call.principal.actor, key), digest, first, wait)

    def _response(self, operation: operations.Operation, call: Call, result: Any) -> Response:
        if isinstance(result, Response):
            return result
        if isinstance(result, operations.Stream):
            standing = self._standing(operation.name, call)
            return EventStream(result.events, standing, self._leaving, endless=result.endless)
        if result is None:
            return Response(status_code=operation.status)
        if isinstance(result, bytes):
            return Response(result, media_type=operation.media, status_code=operation.status)
        response = Response(rpc.encode(result), media_type="application/json", status_code=operation.status)
        if operation.version is not None:
            tag = f'"{operation.version(result)}"'
            if operation.skips and reading.seen(call.request.headers, tag):
                return Response(status_code=304, headers={"ETag": tag})
            response.headers["ETag"] = tag
        elif operation.skips:
            return unless_seen(response, call.request.headers)
        return response


def unless_seen(response: Response, headers: Headers) -> Response:
    """The answer with its entity tag, or 304 to who has it already."""
    tag = f'"{hashlib.sha256(response.body).hexdigest()[:32]}"'
    if reading.seen(headers, tag):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return response


def failure(problem: errors.ClocheError, request_id: str) -> Response:
    fault = wire.Fault(
        code=problem.code, message=problem.message, hint=problem.hint, request_id=request_id,
        details=_plain(problem.details),
    )  # fmt: skip
    headers = {"X-Request-ID": request_id}
    if "retry_after_s" in problem.details:
        headers["Retry-After"] = str(max(1, round(float(str(problem.details["retry_after_s"])))))
    if errors.TABLE[problem.code].http == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        rpc.encode(wire.Failure(error=fault)),
        status_code=errors.TABLE[problem.code].http,
        media_type="application/json",
        headers=headers,
    )


async def while_there(request: Request, work: Awaitable[Any], leaving: Leaving) -> Any:
    """Do the work unless the client, or the server, leaves first; then it is cancelled, and cleans up after itself."""
    task = asyncio.ensure_future(work)
    leaving.watch(task)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if (problem := leaving.told(task)) is not None:
            raise problem
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, errors.ClocheError):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(pieces: AsyncIterator[bytes]) -> Any:
    """Bytes as they are read. What goes wrong before the first of them is an answer; later, the connection ends short."""
    try:
        first = await anext(pieces)
    except StopAsyncIteration:
        first = b""
    return Pieces(first, pieces)


class Pieces(Response):
    media_type = "application/octet-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._first)
            async for piece in self._rest:
                await self._send(send, piece)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _close(self._rest)

    async def _send(self, send: Send, piece: bytes) -> None:
        message = {"type": "http.response.body", "body": piece, "more_body": True}
        await send(message)


class Standing:
    """Whether who opened a stream may still have it: asked beside what is sent, once in a while. A stream does not outlive its key."""

    def __init__(self, still: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._still = still
        self._clock = clock
        self._looked_at = clock()

    def look(self) -> None:
        """Raises once it may not."""
        if self._clock() - self._looked_at >= _LOOK_S:
            self._looked_at = self._clock()
            self._still()


class EventStream(Response):
    """Server-sent events, each flushed as it happens: the next is asked for when the socket has room (`connections` cuts who takes
    nothing for too long)."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[operations.Event],
        standing: Standing,
        leaving: Leaving,
        *,
        endless: bool = False,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._standing = standing
        self._leaving = leaving
        self._endless = endless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        left = asyncio.ensure_future(_left(receive))
        self._leaving.watch(writing, endless=self._endless)
        try:
            await asyncio.wait((writing, left), return_when=asyncio.FIRST_COMPLETED)
            if not left.done() and (problem := self._leaving.told(writing)) is not None:
                await self._send(send, _frame(operations.Event("error", problem.to_dict())))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (writing, left):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await writing
            await _close(self._events)

    async def _write(self, send: Send) -> None:
        try:
            async for event in _with_heartbeat(self._events):
                self._standing.look()
                await self._send(send, _frame(event))
        except errors.ClocheError as problem:
            await self._send(send, _frame(operations.Event("error", problem.to_dict())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _with_heartbeat(events: AsyncIterator[operations.Event]) -> AsyncIterator[operations.Event | None]:
    """The events, and None where there has been none for a while, so that a dead connection shows."""
    waiting: asyncio.Future[operations.Event] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((waiting,), timeout=_HEARTBEAT_S)
            if not done:
                yield None
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield event
    finally:
        if waiting is not None:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, errors.ClocheError):
                await waiting


def _frame(event: operations.Event | None) -> bytes:
    if event is None:
        return b": still here\n\n"
    head = b"" if event.id is None else b"id: " + event.id.encode() + b"\n"
    return head + b"event: " + event.kind.encode() + b"\ndata: " + rpc.encode(event.data) + b"\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(events: AsyncIterator[Any]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        with suppress(RuntimeError):
            await close()


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(dict(details))
    except (TypeError, ValueError):
        plain = {name: str(value) for name, value in details.items()}
    return plain


# ── limits ─────────────────────────────────────────────────────────────────────────────────────────


class _Rates:
    """One bucket per caller, of one second's worth or as many as may come at once; None is without limit."""

    def __init__(self, per_s: float | None, burst: int | None, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._most = float(burst or max(1.0, per_s or 1.0))
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        if self._per_s is None:
            return
        now = self._clock()
        left, since = self._buckets.pop(caller, (self._most, now))
        left = min(self._most, left + (now - since) * self._per_s)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now)
        while len(self._buckets) > _MOST_CALLERS:
            self._buckets.popitem(last=False)
        if left < 1:
            raise errors.error(
                "rate_exceeded",
                f"{caller!r} sends more than {self._per_s:g} requests a second",
                hint="wait as long as Retry-After says",
                retry_after_s=(1 - left) / self._per_s,
            )
