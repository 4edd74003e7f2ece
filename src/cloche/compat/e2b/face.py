"""Which plane a request is for, who sends it, and what becomes of its failures. An ASGI application around the server's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors, interfaces, model, settings
from cloche.compat.e2b import (
    calls,
    connect,
    control,
    faults,
    filesystem,
    interpreter,
    processes,
    state,
    transfers,
)
from cloche.compat.e2b.state import Place

log = logging.getLogger("cloche.e2b")
ENVD, INTERPRETER = 49983, 49999
_HOST = re.compile(rf"(\d{{1,5}})-([a-z0-9]{{{model.ID_LENGTH}}})\..+")
_CONTEXT = re.compile(r"/contexts/([^/]+)(/restart)?")

Unary = Callable[[Place, dict[str, Any]], Awaitable[dict[str, Any]]]
UNARY: dict[str, Unary] = {
    "/process.Process/List": lambda place, _: processes.list_processes(place),
    "/process.Process/Update": processes.update,
    "/process.Process/SendInput": processes.send_input,
    "/process.Process/SendSignal": processes.send_signal,
    "/process.Process/CloseStdin": processes.close_stdin,
    "/filesystem.Filesystem/Stat": filesystem.stat_path,
    "/filesystem.Filesystem/MakeDir": filesystem.make_dir,
    "/filesystem.Filesystem/Move": filesystem.move,
    "/filesystem.Filesystem/ListDir": filesystem.list_dir,
    "/filesystem.Filesystem/Remove": filesystem.remove,
    "/filesystem.Filesystem/CreateWatcher": filesystem.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": filesystem.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": filesystem.remove_watcher,
}
STREAMS: dict[str, Callable[[Place], Awaitable[Response]]] = {
    "/process.Process/Start": processes.start,
    "/process.Process/Connect": processes.reconnect,
    "/process.Process/StreamInput": processes.stream_input,
    "/filesystem.Filesystem/WatchDir": filesystem.watch_dir,
}
_TIDY_EVERY = 64
_MISSING = ("/files/compose", "/envs", "/metrics")


class Entrance(Protocol):
    """The server's door, as a face uses it. The first two raise what they refuse, and have put it on record."""

    def enter(self, headers: Headers, what: str) -> tuple[str, interfaces.Backend]:
        """The caller's key by name, and the backend as that caller may use it."""

    def again(self, headers: Headers, key: str, what: str) -> interfaces.Backend:
        """The same for a caller who was let in before, by the name of the key as it is now."""

    def refused(self, what: str, problem: errors.ClocheError) -> errors.ClocheError:
        """Put on record what the face itself turned down; the problem."""

    def visitor(self, headers: Headers, name: str, sandbox: str, what: str) -> interfaces.Backend:
        """The backend for who may reach a sandbox's ports without being anybody."""

    async def lives(self, sandbox: str) -> bool:
        """Whether there is such a sandbox, whosever it is."""

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
        """A request or WebSocket, to a port of a sandbox, under a host name that is given or its own; raises before anything is
        answered."""


class Face:
    def __init__(self, app: ASGIApp, entrance: Entrance, config: settings.Settings) -> None:
        self._app = app
        self._entrance = entrance
        self._config = config
        self._state = state.State()
        self._answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path: str = scope["path"]
        by_host = _HOST.fullmatch(headers.get("host", ""))
        if by_host and int(by_host[1]) not in (ENVD, INTERPRETER):
            await self._traffic(scope, receive, send, by_host[2], int(by_host[1]))
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        if by_host:
            response = await self._data(Request(scope, receive), by_host[2], int(by_host[1]))
        elif control.owns(path) and not (path == "/health" and _routed(headers)):
            response = await self._control(Request(scope, receive))
        elif _routed(headers) and not path.startswith("/v1/"):
            named, port = headers["e2b-sandbox-id"], _port(headers)
            if port not in (ENVD, INTERPRETER):
                await self._traffic(scope, receive, send, named, port)
                return
            response = await self._data(Request(scope, receive), named, port)
        elif path == "/files" and "signature" in Request(scope).query_params:
            response = await self._data(Request(scope, receive), "", ENVD)
        else:
            await self._app(scope, receive, send)
            return
        await response(scope, receive, send)

    # ── the control plane ──────────────────────────────────────────────────────────────────────────

    async def _control(self, request: Request) -> Response:
        try:
            route, places = control.find(request.method, _path(request))
            key, backend = self._entrance.enter(request.headers, f"e2b {route.name}")
            if route.handler is None:
                raise faults.missing(f"{route.name} ({route.method} {route.path})")
            call = calls.Call(request, backend, key, self._state, self._config, places)
            answer = await route.handler(call)
            self._answered += 1
            if self._answered % _TIDY_EVERY == 0:
                await self.tidy()
            return answer
        except Exception as problem:
            return faults.as_json(_fault(problem))

    async def tidy(self) -> None:
        """Forget what ended by itself. Some are looked at each time, in turn, more than can have come since the last."""
        for sandbox in self._state.next_ids(2 * _TIDY_EVERY):
            if not await self._entrance.lives(sandbox):
                self._state.forget(sandbox)

    # ── the data plane ─────────────────────────────────────────────────────────────────────────────

    async def _data(self, request: Request, sandbox: str, port: int) -> Response:
        path = _path(request)
        try:
            sandbox, backend = self._admit(request, sandbox, port)
            info = await self._awake(backend, sandbox)
            if info is None:
                return faults.gone(sandbox)
            place = Place(request, backend, info.id, self._state.of(info.id), self._config)
            return await self._answer(place, port, path)
        except Exception as problem:
            if isinstance(problem, errors.ClocheError) and faults.is_gone(problem):
                return faults.gone(sandbox)
            fault = _fault(problem)
            if path in STREAMS and request.method == "POST":
                return connect.failed(fault)
            return faults.as_connect(fault) if path in UNARY else faults.as_json(fault)

    # ── ports of the user's own ────────────────────────────────────────────────────────────────────

    async def _traffic(self, scope: Scope, receive: Receive, send: Send, sandbox: str, port: int) -> None:
        """By E2B's rules where a client of E2B's made the sandbox: public, unless it said otherwise; then by its traffic token. What
        neither opens is left to the server's own rules (a key, a preview link)."""
        headers = Headers(scope=scope)
        begun = False

        async def observed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            backend = self._visitor(headers, sandbox, port)
            if backend is None and not _routed(headers):
                await self._app(scope, receive, send)
                return
            if backend is None:
                backend = self._entrance.enter(headers, f"e2b port {port}")[1]
            if not 0 < port < 65536:
                raise errors.error("port_closed", f"there is no port {port}")
            info = await self._awake(backend, sandbox)
            if info is None:
                await faults.gone(sandbox)(scope, receive, send)
                return
            rules = self._state.of(info.id).network
            host = rules.masked(port) if rules is not None else ""
            await self._entrance.pass_on(scope, receive, observed, backend, info.id, port, host)
        except Exception as problem:
            if begun:
                raise
            await _undelivered(problem, sandbox, port)(scope, receive, send)

    def _visitor(self, headers: Headers, sandbox: str, port: int) -> interfaces.Backend | None:
        held = self._state.known(sandbox)
        names = ("e2b-traffic-access-token", "x-access-token")
        shown = [token for name in names if (token := headers.get(name))]
        what = f"e2b port {port}"
        if held is None and shown and "x-api-key" not in headers:
            raise self._entrance.refused(what, _missing(sandbox))
        if held is None:
            return None
        for token in shown:
            key = self._state.holder(sandbox, token, ("access", "traffic"))
            if key is not None:
                return self._entrance.again(headers, key, what)
        if held.network is not None and held.network.public:
            return self._entrance.visitor(headers, "e2b:public", sandbox, what)
        return None

    async def _awake(self, backend: interfaces.Backend, sandbox: str) -> model.SandboxInfo | None:
        """The sandbox if it runs, or may be woken by being used and now does."""
        try:
            info = await backend.info(sandbox)
        except errors.ClocheError as problem:
            if faults.is_gone(problem):
                self._state.forget(sandbox)
                return None
            raise
        if info.phase in ("paused", "archived") and control.may_wake(info):
            info = await control.wake(backend, info, self._state.of(info.id))
        return info if info.phase == "running" else None

    def _admit(self, request: Request, sandbox: str, port: int) -> tuple[str, interfaces.Backend]:
        """By a token of the sandbox, a signed address, or a key."""
        headers, query = request.headers, request.query_params
        what = f"e2b {request.method} {_path(request)[:100]}"
        if "signature" in query and _path(request) == "/files" and port == ENVD:
            operation = {"GET": "read", "POST": "write"}.get(request.method, "")
            signer = self._state.signer(
                [sandbox] if sandbox else self._state.ids(), query.get("path", ""), operation, query.get("username", ""),
                query["signature"], query.get("signature_expiration", ""),
            )  # fmt: skip
            if signer is None:
                words = "the signature is not valid, or its time is over"
                raise self._entrance.refused(what, errors.error("key_refused", words))
            return signer[0], self._entrance.again(headers, signer[1], what)
        shown: list[tuple[str, tuple[state.Kind, ...]]] = [(headers.get("x-access-token", ""), ("access",))]
        if port != ENVD:
            shown = [
                (headers.get("x-access-token", ""), ("access", "traffic")),
                (headers.get("e2b-traffic-access-token", ""), ("traffic",)),
            ]
        for token, kinds in shown:
            key = self._state.holder(sandbox, token, kinds) if token else None
            if key is not None:
                return sandbox, self._entrance.again(headers, key, what)
        if any(token for token, _ in shown) and "x-api-key" not in headers:
            if self._state.known(sandbox) is None:
                raise self._entrance.refused(what, _missing(sandbox))
            words = "the access token is not this sandbox's"
            raise self._entrance.refused(what, errors.error("key_refused", words))
        return sandbox, self._entrance.enter(headers, what)[1]

    async def _answer(self, place: Place, port: int, path: str) -> Response:
        method = place.request.method
        if port == INTERPRETER:
            return await _interpreter(place, method, path)
        if path in STREAMS and method == "POST":
            return await STREAMS[path](place)
        if path in UNARY and method == "POST":
            body = await connect.read_all(place.request, self._config.server.max_body_mib << 20)
            return faults.json(await UNARY[path](place, connect.decode(body)))
        if path == "/health" and method == "GET":
            return Response(status_code=204)
        if path == "/files" and method in ("GET", "HEAD"):
            return await transfers.read(place)
        if path == "/files" and method == "POST":
            return await transfers.write(place)
        if path in _MISSING:
            raise faults.missing(f"{method} {path}")
        raise faults.Fault(404, f"{method} {path[:200]} is not something envd does", name="route_not_found")


async def _interpreter(place: Place, method: str, path: str) -> Response:
    if (method, path) == ("GET", "/health"):
        return Response("OK")
    if (method, path) == ("POST", "/execute"):
        return await interpreter.execute(place)
    if path == "/contexts" and method in ("GET", "POST"):
        make = method == "POST"
        return await (interpreter.create_context(place) if make else interpreter.list_contexts(place))
    matched = _CONTEXT.fullmatch(path)
    if matched and method == "POST" and matched[2]:
        return await interpreter.restart_context(place, matched[1])
    if matched and method == "DELETE" and not matched[2]:
        return await interpreter.delete_context(place, matched[1])
    raise faults.Fault(404, f"{method} {path[:200]} is not something the code interpreter does")


def _undelivered(problem: Exception, sandbox: str, port: int) -> Response:
    if isinstance(problem, errors.ClocheError) and faults.is_gone(problem):
        return faults.gone(sandbox)
    if isinstance(problem, errors.ClocheError) and problem.code == "port_closed":
        return faults.closed(sandbox, port)
    return faults.as_json(_fault(problem))


def _port(headers: Headers) -> int:
    port = headers.get("e2b-sandbox-port", str(ENVD))
    return int(port) if port.isdecimal() and port.isascii() and len(port) < 6 else 0


def _path(request: Request) -> str:
    """Not `request.url.path`, which first makes a whole address of it."""
    path: str = request.scope["path"]
    return path


def _missing(sandbox: str) -> errors.ClocheError:
    return errors.error("sandbox_not_found", f"there is no sandbox {sandbox[:50]!r}")


def _routed(headers: Headers) -> bool:
    return "e2b-sandbox-id" in headers


def _fault(problem: Exception) -> faults.Fault:
    if isinstance(problem, faults.Fault):
        return problem
    if isinstance(problem, errors.ClocheError):
        return faults.of(problem)
    if isinstance(problem, ClientDisconnect):
        return faults.Fault(499, "the client left")
    log.error("a request failed", exc_info=problem)
    return faults.Fault(500, "something of ours failed; the log has it", name="internal_error")
