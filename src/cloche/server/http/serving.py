"""`cloche serve`: the keeper plus HTTP, one engine, one loop.

Order of an end: on SIGTERM nothing new is accepted, requests under way get `server.drain_s` to finish, streams are told, then the keeper
leaves and the engine ends its sandboxes. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from cloche import errors, interfaces, settings
from cloche.server import jwt, keys, tokens
from cloche.server.http import (
    answering,
    connections,
    doors,
    frames,
    ledger,
    links,
    origins,
    ports,
    terminals,
    tls,
)
from cloche.server.http.meters import MEDIA_TYPE, Meters
from cloche.server.http.routes import TABLE
from cloche.server.leaving import Leaving

_BACKLOG = 2048
_GRACE_S = 1


def make_app(
    backend: interfaces.Backend,
    known: keys.Keys,
    config: settings.Settings,
    *,
    faces: Mapping[str, ASGIApp] | None = None,
    around: Sequence[Callable[..., ASGIApp]] = (),
    meters: Meters | None = None,
    access: tokens.AccessTokens | None = None,
    signed: links.Links | None = None,
    leaving: Leaving | None = None,
    local: str = "",
) -> Starlette:
    """The application; `faces` are those of other protocols, by path. Who goes by more than paths stands `around` it: made as
    `wire(app, entrance=…, config=…)`, it takes what is its own and hands on the rest. `signed`: preview links."""
    domain = config.server.domain.rpartition("://")[2].partition(":")[0]
    entrance = doors.Doors(
        known,
        hosts=(*config.server.hosts, domain),
        origins=config.server.origins,
        foreign=jwt.Tokens(config.jwt) if config.jwt.enabled else None,
        access=access,
        host_paths=config.server.host_paths,
        local=local,
    )
    counted = meters or Meters()
    answers = answering.Answers(backend, entrance, config, leaving=leaving)

    async def metrics(request: Request) -> Response:
        ledger.entry(request.scope).operation = "metrics"
        try:
            answers.admit(request.headers, "metrics", operator=True)
        except errors.ClocheError as problem:
            return answering.failure(problem, ledger.entry(request.scope).request_id)
        return Response(await counted.render(backend), media_type=MEDIA_TYPE)

    async def connect(websocket: WebSocket) -> None:
        ledger.entry(websocket.scope).operation = "connect"
        await frames.connect(websocket, answers, config, counted.called, leaving)

    async def unknown(request: Request, problem: Exception) -> Response:
        status = getattr(problem, "status_code", 404)
        code = "method_refused" if status == 405 else "route_not_found"
        words = f"{request.method} {request.url.path[:200]} is not something this server does"
        hint = "GET /openapi.json lists what it does"
        response = answering.failure(
            errors.error(code, words, hint=hint), ledger.entry(request.scope).request_id
        )
        if status == 405:
            response.headers["Allow"] = ", ".join(sorted(_methods(app, request)))
        return response

    app = Starlette(
        routes=[
            *answers.routes(TABLE),
            Route("/metrics", metrics, include_in_schema=False),
            WebSocketRoute("/v1/connect", connect),
            WebSocketRoute(terminals.PATH, _Application(terminals.Terminals(answers))),
            *(
                Route(path, _Application(answers.mounted(path.strip("/"), face)), include_in_schema=False)
                for path, face in (faces or {}).items()
            ),
        ],
        exception_handlers={404: unknown, 405: unknown},
    )
    app.add_middleware(ports.Ports, entrance=answers, config=config, signed=signed)
    for wire in around:
        app.add_middleware(wire, entrance=answers, config=config)
    if config.server.origins:
        app.add_middleware(origins.Origins, origins=config.server.origins)
    app.add_middleware(answers.gate)
    app.add_middleware(ledger.Ledger, observe=counted.observe, told=config.server.log == "json")
    return app


def _methods(app: Starlette, request: Request) -> set[str]:
    """What all routes of a path together do with it."""
    concerned = [
        route
        for route in app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return {method for route in concerned for method in route.methods or ()}


class _Application:
    """An application as an object: Starlette takes a function for a handler of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn without its hand on the process's signals: those are the keeper's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Http:
    """The application behind uvicorn: on a port, and on the keeper's socket for those who speak HTTP there."""

    def __init__(
        self,
        app: Starlette,
        config: settings.Settings,
        watch: connections.Watch,
        leaving: Leaving,
        *,
        certificate: tls.Certificate | None = None,
        local: str = "",
    ) -> None:
        self._watch = watch
        self._leaving = leaving
        http, self._local, websocket = connections.protocols(watch, local)
        self._server = Server(
            uvicorn.Config(
                app, loop="none", http=http, ws=websocket, log_config=None, access_log=False, lifespan="off", server_header=False,
                ws_max_size=64 << 20, ws_per_message_deflate=False, ws_ping_interval=config.server.ping_s,
                ws_ping_timeout=config.server.ping_s, date_header=False, timeout_keep_alive=int(config.server.idle_timeout_s) or 1,
                backlog=_BACKLOG, timeout_graceful_shutdown=int(config.server.drain_s) + 2 * _GRACE_S,
            )
        )  # fmt: skip
        self._server.config.load()
        if certificate is not None:
            self._server.config.ssl = certificate.context

    def local(self) -> asyncio.Protocol:
        """Who talks to a connection that came by the unix socket."""
        return self._local(config=self._server.config, server_state=self._server.server_state, app_state={})

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled; then wait for what is under way, as long as there is patience."""
        running = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._server.should_exit = True
            self._leaving.begin()
            loop = asyncio.get_running_loop()
            impatience = asyncio.ensure_future(self._leaving.over.wait())
            impatience.add_done_callback(lambda _: loop.call_later(_GRACE_S, self._watch.farewell))
            await running
            impatience.cancel()
            raise


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an address that cannot be had is an error that says why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sends at once (TCP_NODELAY) only on sockets that say they are TCP, and what it accepts
    # says what the listener says. Otherwise the body of an answer waits 40 ms for the client to acknowledge its head.
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as problem:
        sock.close()
        raise errors.error(
            "address_unavailable",
            f"cannot listen on {host}:{port}: {problem.strerror or problem}",
            hint="choose another with --host and --port",
        ) from None
    sock.setblocking(False)
    return sock
