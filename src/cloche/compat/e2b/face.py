"""Which plane a request is for, who sends it, and what becomes of its failures. An ASGI application around the server's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
_MISSING = ("/files/compose", "/envs", "/metrics")


class Entrance(Protocol):
    """The server's door, as a face uses it. The first two raise what they refuse, and have put it on record."""

    def enter(self, headers: Headers, what: str) -> tuple[str, interfaces.Backend]:
        """The caller's key by name, and the backend as that caller may use it."""

    def again(self, headers: Headers, key: str, what: str) -> interfaces.Backend:
        """The same for a caller who was let in before, by the name of the key as it is now."""

    def refused(self, what: str, problem: errors.ClocheError) -> errors.ClocheError:
        """Put on record what the face itself turned down; the problem."""


class Face:
    def __init__(self, app: ASGIApp, entrance: Entrance, config: settings.Settings) -> None:
        self._app = app
        self._entrance = entrance
        self._config = config
        self._state = state.State()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path: str = scope["path"]
        by_host = _HOST.fullmatch(headers.get("host", ""))
        if by_host:
            response = await self._data(Request(scope, receive), by_host[2], int(by_host[1]))
        elif control.owns(path) and not (path == "/health" and _routed(headers)):
            response = await self._control(Request(scope, receive))
        elif _routed(headers) and not path.startswith("/v1/"):
            named = headers["e2b-sandbox-id"]
            port = headers.get("e2b-sandbox-port", str(ENVD))
            response = await self._data(Request(scope, receive), named, int(port) if port.isdigit() else 0)
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
            return await route.handler(call)
        except Exception as problem:
            return faults.as_json(_fault(problem))

    # ── the data plane ─────────────────────────────────────────────────────────────────────────────

    async def _data(self, request: Request, sandbox: str, port: int) -> Response:
        path = _path(request)
        try:
            sandbox, backend = self._admit(request, sandbox, port)
            try:
                info = await backend.info(sandbox)
            except errors.ClocheError as problem:
                if faults.is_gone(problem):
                    self._state.forget(sandbox)
                    return faults.gone(sandbox)
                raise
            if info.phase in ("paused", "archived") and control.may_wake(info):
                info = await control.wake(backend, info, self._state.of(info.id))
            if info.phase != "running":
                return faults.gone(sandbox)
            if port not in (ENVD, INTERPRETER):
                return await _traffic(backend, info.id, port)
            place = Place(request, backend, info.id, self._state.of(info.id), self._config)
            return await self._answer(place, port, path)
        except Exception as problem:
            if isinstance(problem, errors.ClocheError) and faults.is_gone(problem):
                return faults.gone(sandbox)
            fault = _fault(problem)
            if path in STREAMS and request.method == "POST":
                return connect.failed(fault)
            return faults.as_connect(fault) if path in UNARY else faults.as_json(fault)

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
                raise errors.error("sandbox_not_found", f"there is no sandbox {sandbox[:50]!r}")
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


async def _traffic(backend: interfaces.Backend, sandbox: str, port: int) -> Response:
    """A port of the user's own: closed, or open and not to be reached this way. Asked inside, as only there is it known."""
    if not 0 < port < 65536:
        return faults.closed(sandbox, port)
    asked = ["/bin/bash", "-c", ': <"/dev/tcp/127.0.0.1/$0"', str(port)]
    result = await backend.exec(sandbox, model.ExecRequest(command=asked, timeout_s=10))
    if result.exit_code != 0:
        return faults.closed(sandbox, port)
    return faults.as_json(faults.missing(f"traffic to port {port} of a sandbox"))


def _path(request: Request) -> str:
    """Not `request.url.path`, which first makes a whole address of it."""
    path: str = request.scope["path"]
    return path


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
