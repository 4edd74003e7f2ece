"""The ports of sandboxes, from outside: by path, by host name, and as a raw tunnel. An ASGI application around the server's own.

    /v1/sandboxes/{sandbox}/ports/{port}/…           with a key, on the API's own origin
    <port>-<sandbox>.<domain>                        with a key, or a preview link; an origin of its own
    /v1/sandboxes/{sandbox}/ports/{port}/tunnel      a WebSocket that carries bytes

Two origins, two rules. *By path* untrusted pages would stand on the origin of the API, so nothing that is answered there counts for a
browser: no cookies either way, no CORS, `Content-Security-Policy: sandbox`. It is for programs. *By name* every port is its own origin, and
pages may do there what pages do. A key in `X-API-Key`, or a Bearer that looks like one of ours, opens it; any other `Authorization` is the
page's own and goes in. A link (links.py) opens it too, at first by its token, then by a cookie, and a cookie counts only where the request does
not come from another origin's page.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors, interfaces, model, settings
from cloche.server.guarding import Principal
from cloche.server.http import answering, doors, ledger, links, proxy

log = logging.getLogger("cloche.http")
_PATH = re.compile(r"/v1/sandboxes/([^/]+)/ports/(\d{1,6})(/.*)?", re.DOTALL)
_NAME = re.compile(rf"(\d{{1,5}})-([a-z0-9]{{{model.ID_LENGTH}}})\..+")
_PIECE = 1 << 16
_ANYONE = frozenset(("ports",))


class Ports:
    def __init__(
        self,
        app: ASGIApp,
        entrance: answering.Answers,
        config: settings.Settings,
        signed: links.Links | None,
    ) -> None:
        self._app = app
        self._entrance = entrance
        self._config = config
        self._links = signed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        by_name = _NAME.fullmatch(doors.name_of(Headers(scope=scope)))
        by_path = None if by_name else _PATH.fullmatch(scope["path"])
        if by_name:
            await self._serve(scope, receive, send, int(by_name[1]), by_name[2])
        elif by_path and not _of_the_api(scope, by_path[3]):
            await self._serve(scope, receive, send, int(by_path[2]), by_path[1], by_path[3] or "")
        else:
            await self._app(scope, receive, send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, port: int, sandbox: str, below: str | None = None
    ) -> None:
        status = 0
        ledger.entry(scope).operation = "port"

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            if below is None:
                await self._by_name(scope, receive, observed, port, sandbox)
            elif not below and scope["type"] == "http":
                await _to_the_root(scope, receive, observed)
            elif below == "/tunnel" and scope["type"] == "websocket":
                await self._tunnel(scope, receive, observed, port, sandbox)
            else:
                await self._by_path(scope, receive, observed, port, sandbox)
        except proxy.Broken:
            pass  # what has begun is cut, which tells the client that it is not whole
        except errors.ClocheError as problem:
            if not status:
                await refuse(scope, receive, observed, problem)
        except OSError:
            raise  # the client has left
        except Exception:
            request_id = ledger.entry(scope).request_id
            log.exception("request %s failed", request_id)
            if not status:
                words = f"something of ours failed; the log has request {request_id}"
                await refuse(scope, receive, observed, errors.error("internal_error", words))

    # ── doors ───────────────────────────────────────────────────────────────────────────────────

    async def _by_path(self, scope: Scope, receive: Receive, send: Send, port: int, sandbox: str) -> None:
        model.check_port(port)
        backend = self._entrance.enter(Headers(scope=scope), f"port {port}")[1]
        start, rest = _split(scope)
        target = proxy.Target(
            backend, sandbox, port, proxy.address(rest, scope["query_string"]), b"localhost:%d" % port,
            prefix=start.decode("latin-1"), patience_s=self._config.server.port_timeout_s,
        )  # fmt: skip
        await proxy.pass_on(scope, receive, send, target)

    async def _by_name(self, scope: Scope, receive: Receive, send: Send, port: int, sandbox: str) -> None:
        model.check_port(port)
        headers = Headers(scope=scope)
        query, token = links.without_token(scope["query_string"])
        own = f"{_web(scope)}://{headers.get('host', '')}"
        cookie: bytes | None = None
        if token is None and (proxy.bears_ours(headers, self._config) or "x-api-key" in headers):
            backend = self._entrance.enter(headers, f"port {port}", own=own)[1]
        else:
            backend, shown = self._by_link(headers, token, sandbox, port, own)
            if token is not None and self._links is not None:
                cookie = self._links.cookie(shown, secure=_web(scope) == "https")
                if scope["type"] == "http" and headers.get("sec-fetch-mode") == "navigate":
                    await _clean(scope, receive, send, query, cookie)
                    return
        target = proxy.named(scope, backend, sandbox, port, self._config, cookie=cookie)
        await proxy.pass_on(scope, receive, send, target)

    def _by_link(
        self, headers: Headers, token: str | None, sandbox: str, port: int, own: str
    ) -> tuple[interfaces.Backend, links.Shown]:
        """The backend for who has a link, and the link."""
        what = f"link to port {port}"
        try:
            shown = [token] if token is not None else links.of_cookies(headers.get("cookie", ""))
            if not shown or self._links is None:
                raise errors.error(
                    "key_missing",
                    "this port of a sandbox needs a key or a preview link",
                    hint="send X-API-Key, or ask for a link: POST /v1/sandboxes/{id}/ports/{port}/link",
                )
            found = _first_valid(self._links, shown, sandbox, port)
        except errors.ClocheError as problem:
            raise self._entrance.refused(what, problem) from None
        holder = Principal(
            f"link:{port}-{sandbox}",
            "",
            _ANYONE,
            sandbox=sandbox,
            expires_at=found.expires_at,
            payer=found.payer,
        )
        # Who shows the token has it; a cookie is shown by a browser, for whatever page asked it to.
        return self._entrance.enter_as(headers, holder, what, "*" if token is not None else own), found

    # ── the raw tunnel ──────────────────────────────────────────────────────────────────────────

    async def _tunnel(self, scope: Scope, receive: Receive, send: Send, port: int, sandbox: str) -> None:
        model.check_port(port)
        backend = self._entrance.enter(Headers(scope=scope), f"tunnel to port {port}")[1]
        await receive()  # websocket.connect
        tunnel = await backend.dial(sandbox, port)
        try:
            await send({"type": "websocket.accept"})
            await _carry(receive, send, tunnel)
        finally:
            await tunnel.aclose()


async def refuse(scope: Scope, receive: Receive, send: Send, problem: errors.ClocheError) -> None:
    """Our error in place of the sandbox's answer, marked as such."""
    response = answering.failure(problem, ledger.entry(scope).request_id)
    response.headers[proxy.ERROR_HEADER.decode()] = problem.code
    await response(scope, receive, send)


async def _carry(receive: Receive, send: Send, tunnel: interfaces.Tunnel) -> None:
    """Binary messages are pieces of the stream, an empty one is the end of its direction."""
    ended = asyncio.Event()
    inwards = asyncio.ensure_future(_in(receive, tunnel, ended))
    through = asyncio.ensure_future(_through(send, tunnel, ended))
    code, reason = 1000, ""
    try:
        await asyncio.wait((inwards, through), return_when=asyncio.FIRST_COMPLETED)
        if not through.done():
            inwards.result()
            return  # the client left
        through.result()
    except errors.ClocheError as problem:
        code, reason = 4000 + errors.TABLE[problem.code].http, problem.code
    except _NotBytes:
        code, reason = 1003, "binary messages only"
    finally:
        for task in (inwards, through):
            task.cancel()
        await asyncio.gather(inwards, through, return_exceptions=True)
    await send({"type": "websocket.close", "code": code, "reason": reason})


class _NotBytes(Exception):
    pass


async def _in(receive: Receive, tunnel: interfaces.Tunnel, ended: asyncio.Event) -> None:
    """Returns when the client has left."""
    while (message := await receive())["type"] != "websocket.disconnect":
        data = message.get("bytes")
        if data is None:
            raise _NotBytes
        if ended.is_set():
            continue
        if data:
            await tunnel.write(data)
        else:
            ended.set()
            await tunnel.end()


async def _through(send: Send, tunnel: interfaces.Tunnel, ended: asyncio.Event) -> None:
    """Returns when both directions have ended."""
    while data := await tunnel.read(_PIECE):
        await send({"type": "websocket.send", "bytes": data})
    await send({"type": "websocket.send", "bytes": b""})
    await ended.wait()


# ── addresses ──────────────────────────────────────────────────────────────────────────────────────


def _of_the_api(scope: Scope, below: str | None) -> bool:
    return below == "/link" and scope["type"] == "http" and scope["method"] == "POST"


def _first_valid(signed: links.Links, tokens: list[str], sandbox: str, port: int) -> links.Shown:
    refusal: errors.ClocheError | None = None
    for token in tokens[:10]:
        try:
            return signed.check(token, sandbox, port)
        except errors.ClocheError as problem:
            refusal = refusal or problem
    assert refusal is not None
    raise refusal


def _web(scope: Scope) -> str:
    return "https" if scope["scheme"] in ("https", "wss") else "http"


def _split(scope: Scope) -> tuple[bytes, bytes]:
    """Our part of the path, and the sandbox's, as they are on the wire."""
    parts = proxy.path_of(scope).split(b"/", 6)
    return b"/".join(parts[:6]), b"/" + (parts[6] if len(parts) > 6 else b"")


async def _to_the_root(scope: Scope, receive: Receive, send: Send) -> None:
    """Relative addresses of a page need the slash."""
    location = proxy.address(proxy.path_of(scope) + b"/", scope["query_string"]).decode("latin-1")
    await Response(status_code=307, headers={"Location": location})(scope, receive, send)


async def _clean(scope: Scope, receive: Receive, send: Send, query: bytes, cookie: bytes) -> None:
    """A browser shows the address that it ends at: one without the token."""
    path = b"/" + proxy.path_of(scope).lstrip(b"/")  # two slashes would be another host
    headers = {
        "Location": proxy.address(path, query).decode("latin-1"),
        "Cache-Control": "no-store",
        "Set-Cookie": cookie.decode("latin-1"),
    }
    with suppress(OSError):
        await Response(status_code=303, headers=headers)(scope, receive, send)
