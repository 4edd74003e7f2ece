"""One HTTP request, or one WebSocket, passed on to a port inside a sandbox.

What listens there is untrusted: it may answer garbage, nothing, or for ever, and what it answers is shown on an origin of ours. So:

* Bodies flow both ways as they come, and neither side gets ahead of the other. Nothing is kept.
* Hop-by-hop headers end here. What opens *our* door (keys, tokens, links) never goes in; what would reach beyond the sandbox's own origin
  (cookies for a parent domain, Clear-Site-Data, HSTS, Alt-Svc) never comes out.
* An answer of ours that is none of the sandbox's has `X-Cloche-Error` with its code; the sandbox cannot set that header.
* A WebSocket is ended on both sides and its messages are passed on: the server below us has no other way to hand one over.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import h11
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.datastructures import Headers as SocketHeaders
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response as SocketResponse
from websockets.protocol import CONNECTING, State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from cloche import errors, interfaces, settings
from cloche.server import jwt, tokens
from cloche.server.http import doors, links

ERROR_HEADER = b"x-cloche-error"
LARGEST_MESSAGE = 16 << 20
_KEY = re.compile(rf"(?:cl|e2b)_[0-9a-f]{{40}}|{tokens.PREFIX}.+")
_PIECE = 1 << 16
_HOPS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers transfer-encoding upgrade".split()
)
_OURS = frozenset(
    b"x-api-key x-access-token e2b-traffic-access-token e2b-sandbox-id e2b-sandbox-port host expect forwarded x-forwarded-for "
    b"x-forwarded-host x-forwarded-proto x-forwarded-prefix x-real-ip content-length".split()
)
_BEYOND = frozenset(
    [ERROR_HEADER, b"alt-svc", b"strict-transport-security", b"clear-site-data", b"public-key-pins"]
)
_OF_THE_ORIGIN = frozenset([b"set-cookie", b"service-worker-allowed", b"www-authenticate"])


class Target(NamedTuple):
    """Where a request goes, and under which name its answer is shown."""

    backend: interfaces.Backend
    sandbox: str
    port: int
    address: bytes
    """Path and query, as they are on the wire."""
    host: bytes
    prefix: str = ""
    """The path of ours that stands before the sandbox's; empty where the sandbox has a host name, and so an origin, of its own."""
    hides: bool = True
    """Whether the `Authorization` is for us, and so stays here."""
    cookie: bytes | None = None
    """One of ours to set with the answer."""
    patience_s: float = 120


def named(
    scope: Scope, backend: interfaces.Backend, sandbox: str, port: int, config: settings.Settings, **more: Any
) -> Target:
    """The port on an origin of its own: what is asked for goes in as it is, but for what is ours."""
    headers = Headers(scope=scope)
    host = headers.get("host", "") if doors.name_of(headers)[:1].isdigit() else f"localhost:{port}"
    query, _ = links.without_token(scope["query_string"])
    return Target(
        backend, sandbox, port, address(path_of(scope), query), host.encode("latin-1"), hides=bears_ours(headers, config),
        patience_s=config.server.port_timeout_s, **more,
    )  # fmt: skip


def bears_ours(headers: Headers, config: settings.Settings) -> bool:
    """Whether the `Authorization` is a key or token of ours; any other is meant for what listens inside. Where tokens of an issuer are
    accepted, every token is taken for one: better one that does not arrive than one of ours that does."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and (
        _KEY.fullmatch(secret.strip()) is not None or (config.jwt.enabled and jwt.looks_like(secret.strip()))
    )


def path_of(scope: Scope) -> bytes:
    """The path, as it is on the wire."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def address(path: bytes, query: bytes) -> bytes:
    return path + b"?" + query if query else path


async def pass_on(scope: Scope, receive: Receive, send: Send, target: Target) -> None:
    if scope["type"] == "websocket":
        await websocket(scope, receive, send, target)
    else:
        await request(scope, receive, send, target)


class Broken(Exception):
    """The answer broke off after it had begun: it cannot be told any more, only cut."""


# ── requests ───────────────────────────────────────────────────────────────────────────────────────


async def request(scope: Scope, receive: Receive, send: Send, target: Target) -> int:
    """Pass one request on and its answer back: the status. Raises before anything is answered, or `Broken`."""
    head = _request(scope, target)
    async with _dialled(target) as tunnel:
        talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=_PIECE)
        await tunnel.write(_bytes(talk, head))
        moved = _Moved()
        sending = asyncio.ensure_future(_send_body(receive, talk, tunnel, moved))
        answering = asyncio.ensure_future(_answer(send, talk, tunnel, target, moved))
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            sending.result()
            return 499  # the client left
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)


def _request(scope: Scope, target: Target) -> h11.Request:
    if scope["method"] == "CONNECT":
        raise errors.error("method_refused", "CONNECT is not passed on", hint="use a tunnel")
    try:
        return h11.Request(
            method=scope["method"], target=target.address, headers=_request_headers(scope, target)
        )
    except h11.LocalProtocolError as problem:
        raise _unfit(problem) from None


def _unfit(problem: h11.LocalProtocolError) -> errors.ClocheError:
    return errors.error(
        "argument_invalid", f"the request cannot be passed on: {problem}", hint="encode what is not ASCII"
    )


class _Moved:
    """When the request last moved: an answer is not late while the question is still being put."""

    def __init__(self) -> None:
        self.now()

    def now(self) -> None:
        self.at = asyncio.get_running_loop().time()

    def left(self, patience_s: float) -> float:
        return self.at + patience_s - asyncio.get_running_loop().time()


async def _send_body(
    receive: Receive, talk: h11.Connection, tunnel: interfaces.Tunnel, moved: _Moved
) -> None:
    """Send what the client sends; returns when the client has left."""
    taken = True
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not taken or talk.our_state is not h11.SEND_BODY:
            continue
        body = message.get("body", b"")
        data = _bytes(talk, h11.Data(data=body)) if body else b""
        if not message.get("more_body", False):
            data += _bytes(talk, h11.EndOfMessage())
        try:
            await tunnel.write(data)
            moved.now()
        except errors.ClocheError:
            taken = False  # it wants no more; perhaps it has answered already


async def _answer(
    send: Send, talk: h11.Connection, tunnel: interfaces.Tunnel, target: Target, moved: _Moved
) -> int:
    response = await _head_in_time(talk, tunnel, target, moved)
    if response.status_code > 599:
        raise misbehaved(target, f"its status is {response.status_code}")
    headers = answer_headers([(bytes(n), bytes(v)) for n, v in response.headers], target)
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    try:
        while True:
            match event := await _next(talk, tunnel):
                case h11.Data():
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                case _:
                    break
    except (h11.RemoteProtocolError, errors.ClocheError) as problem:
        raise Broken(str(problem)) from None
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return response.status_code


async def _head_in_time(
    talk: h11.Connection, tunnel: interfaces.Tunnel, target: Target, moved: _Moved
) -> h11.Response:
    head = asyncio.ensure_future(_head(talk, tunnel))
    try:
        while not head.done():
            await asyncio.wait((head,), timeout=max(0.0, moved.left(target.patience_s)))
            if not head.done() and moved.left(target.patience_s) <= 0:
                raise _late(target)
        return head.result()
    finally:
        head.cancel()


def _late(target: Target) -> errors.ClocheError:
    return errors.error(
        "wait_timeout",
        f"what listens on port {target.port} did not begin to answer within {target.patience_s:g} s",
        hint="it took the connection; see what it is doing, or raise server.port_timeout_s",
        port=target.port,
    )


async def _head(talk: h11.Connection, tunnel: interfaces.Tunnel) -> h11.Response:
    try:
        while not isinstance(event := await _next(talk, tunnel), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise _unanswered()
    except h11.RemoteProtocolError as problem:
        if talk.trailing_data == (b"", True):
            raise _unanswered() from None
        raise errors.error(
            "port_misbehaved",
            f"what listens inside did not answer in HTTP: {problem}",
            hint="for other protocols use a tunnel: box.connect(port), `cloche forward`",
        ) from None
    return event


def _unanswered() -> errors.ClocheError:
    return errors.error("port_misbehaved", "what listens inside closed the connection unanswered")


async def _next(talk: h11.Connection, tunnel: interfaces.Tunnel) -> Any:
    while (event := talk.next_event()) is h11.NEED_DATA:
        talk.receive_data(await tunnel.read(_PIECE))
    return event


def _bytes(talk: h11.Connection, event: Any) -> bytes:
    try:
        return talk.send(event) or b""
    except h11.LocalProtocolError as problem:
        raise _unfit(problem) from None


@asynccontextmanager
async def _dialled(target: Target) -> AsyncIterator[interfaces.Tunnel]:
    tunnel = await target.backend.dial(target.sandbox, target.port)
    try:
        yield tunnel
    finally:
        await tunnel.aclose()


def misbehaved(target: Target, why: str) -> errors.ClocheError:
    return errors.error(
        "port_misbehaved",
        f"what listens on port {target.port} did not answer in HTTP: {why}",
        port=target.port,
    )


# ── headers ────────────────────────────────────────────────────────────────────────────────────────


def _request_headers(scope: Scope, target: Target) -> list[tuple[bytes, bytes]]:
    given = [(name.lower(), value) for name, value in scope["headers"]]
    framing: list[tuple[bytes, bytes]] = []
    if any(name == b"transfer-encoding" for name, _ in given):
        framing = [(b"transfer-encoding", b"chunked")]
    else:
        framing = [(name, value) for name, value in given if name == b"content-length"][:1]
    return [(b"host", target.host), *_inwards(scope, target), *framing, (b"connection", b"close")]


def _inwards(scope: Scope, target: Target) -> list[tuple[bytes, bytes]]:
    """What of a request's headers goes in, and what is said of where it came from."""
    given = [(name.lower(), value) for name, value in scope["headers"]]
    dropped = _HOPS | _OURS | _named(given)
    kept = []
    for name, value in given:
        if name in dropped or (name == b"authorization" and target.hides):
            continue
        shown = _cookies(value, target) if name == b"cookie" else value
        if shown or name != b"cookie":
            kept.append((name, shown))
    secure = scope["scheme"] in ("https", "wss")
    client = scope.get("client")
    host = next((value for name, value in given if name == b"host"), b"")
    kept += [(b"x-forwarded-host", host), (b"x-forwarded-proto", b"https" if secure else b"http")]
    if client:
        kept.append((b"x-forwarded-for", str(client[0]).encode()))
    if target.prefix:
        kept.append((b"x-forwarded-prefix", target.prefix.encode()))
    return kept


def _named(given: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The headers that `Connection` names."""
    return frozenset(
        word.strip().lower() for name, value in given if name == b"connection" for word in value.split(b",")
    )


def answer_headers(given: list[tuple[bytes, bytes]], target: Target) -> list[tuple[bytes, bytes]]:
    """What of an answer's headers comes out."""
    dropped = _HOPS | _BEYOND | _named(given) | (_OF_THE_ORIGIN if target.prefix else frozenset())
    kept: list[tuple[bytes, bytes]] = []
    for name, value in given:
        if name in dropped or (target.prefix and name.startswith(b"access-control-")):
            continue
        shown: bytes | None = value
        if name == b"set-cookie":
            shown = _cookie(value)
        elif name == b"location" and target.prefix:
            shown = _below(value, target)
        if shown is not None:
            kept.append((name, shown))
    if target.prefix:
        # Shown on the origin of the API: whatever it is, a browser gives it no origin, no script and no form.
        kept += [(b"content-security-policy", b"sandbox"), (b"x-content-type-options", b"nosniff")]
    if target.cookie is not None:
        kept.append((b"set-cookie", target.cookie))
    return kept


def _cookies(value: bytes, target: Target) -> bytes:
    return b"" if target.prefix else links.without_cookie(value.decode("latin-1")).encode("latin-1")


def _cookie(value: bytes) -> bytes | None:
    kept = links.own_cookie(value.decode("latin-1"))
    return None if kept is None else kept.encode("latin-1")


def _below(location: bytes, target: Target) -> bytes:
    """An address of the sandbox's own, as it is under our prefix."""
    for own in (b"localhost", b"127.0.0.1"):
        start = b"http://%s:%d/" % (own, target.port)
        if location.startswith(start):
            location = location[len(start) - 1 :]
    if location.startswith(b"/") and not location.startswith(b"//"):
        return target.prefix.encode() + location
    return location


# ── WebSockets ─────────────────────────────────────────────────────────────────────────────────────


async def websocket(scope: Scope, receive: Receive, send: Send, target: Target) -> None:
    """Pass one WebSocket on. Raises before it was accepted; afterwards it is closed with a reason."""
    await receive()  # websocket.connect
    async with _dialled(target) as tunnel:
        talk = _Talk(scope, target, tunnel)
        try:
            answer = await asyncio.wait_for(talk.open(), target.patience_s)
        except TimeoutError:
            raise _late(target) from None
        if isinstance(answer, SocketResponse):
            await _declined(send, answer, target)
            return
        await send({"type": "websocket.accept", "subprotocol": talk.protocol.subprotocol, "headers": answer})
        ways = [asyncio.ensure_future(talk.inwards(receive)), asyncio.ensure_future(talk.outwards(send))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _declined(send: Send, answer: SocketResponse, target: Target) -> None:
    """What listens there wants no WebSocket, and says so in HTTP."""
    given = [
        (n.lower().encode("latin-1"), v.encode("latin-1", "replace")) for n, v in answer.headers.raw_items()
    ]
    headers = [pair for pair in answer_headers(given, target) if pair[0] != b"content-length"]
    await send({"type": "websocket.http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body or b""})


class _Talk:
    """The client's part of a WebSocket with what listens inside."""

    def __init__(self, scope: Scope, target: Target, tunnel: interfaces.Tunnel) -> None:
        path, _, query = target.address.partition(b"?")
        uri = WebSocketURI(False, "localhost", target.port, path.decode("latin-1"), query.decode("latin-1"))
        offered = [Subprotocol(name) for name in scope.get("subprotocols", [])]
        self.protocol = ClientProtocol(uri, subprotocols=offered or None, max_size=LARGEST_MESSAGE)
        self._scope, self._target, self._tunnel = scope, target, tunnel
        self._early: list[Any] = []
        self._parts: list[bytes] = []
        self._text = False

    async def open(self) -> SocketResponse | list[tuple[bytes, bytes]]:
        """The headers for the client's own handshake, or the answer of one who declines."""
        hello = self.protocol.connect()
        del hello.headers["Host"]
        hello.headers["Host"] = self._target.host.decode("latin-1")
        for name, value in _inwards(self._scope, self._target):
            if not name.startswith(b"sec-websocket-"):
                hello.headers[name.decode("latin-1")] = value.decode("latin-1")
        self.protocol.send_request(hello)
        await self._flush()
        while self.protocol.state is CONNECTING and self.protocol.handshake_exc is None:
            self._feed(await self._tunnel.read(_PIECE))
        problem = self.protocol.handshake_exc
        if isinstance(problem, InvalidStatus):
            return problem.response
        if problem is not None:
            raise misbehaved(self._target, str(problem))
        answer, *self._early = self.protocol.events_received()
        headers: SocketHeaders = getattr(answer, "headers", SocketHeaders())
        given = [
            (n.lower().encode("latin-1"), v.encode("latin-1", "replace")) for n, v in headers.raw_items()
        ]
        return [
            pair for pair in answer_headers(given, self._target) if not pair[0].startswith(b"sec-websocket-")
        ]

    def _feed(self, data: bytes) -> None:
        with suppress(InvalidHandshake):
            if data:
                self.protocol.receive_data(data)
            else:
                self.protocol.receive_eof()

    async def _flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                await self._tunnel.write(data)
            else:
                await self._tunnel.end()

    async def inwards(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code", 1000)
                if self.protocol.state is State.OPEN:
                    self.protocol.send_close(
                        code if _may_be_sent(code) else 1001, message.get("reason") or ""
                    )
                    with suppress(errors.ClocheError):
                        await self._flush()
                return
            if message.get("text") is not None:
                self.protocol.send_text(message["text"].encode())
            else:
                self.protocol.send_binary(message.get("bytes") or b"")
            await self._flush()

    async def outwards(self, send: Send) -> None:
        code, reason = 1006, ""
        try:
            while True:
                early, self._early = self._early, []
                for event in [*early, *self.protocol.events_received()]:
                    if isinstance(event, Frame):
                        await self._take(event, send)
                await self._flush()
                if self.protocol.state is not State.OPEN:
                    break
                self._feed(await self._tunnel.read(_PIECE))
            last = self.protocol.close_rcvd or self.protocol.close_sent
            code, reason = (last.code, last.reason) if last is not None else (1006, "")
        except UnicodeDecodeError:
            code, reason = 1007, "text that is not UTF-8"
        except errors.ClocheError as problem:
            code, reason = 4000 + errors.TABLE[problem.code].http, problem.code
        await send(
            {"type": "websocket.close", "code": code if _may_be_sent(code) else 1011, "reason": reason[:100]}
        )

    async def _take(self, frame: Frame, send: Send) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._text, self._parts = frame.opcode is Opcode.TEXT, [bytes(frame.data)]
        elif frame.opcode is Opcode.CONT:
            self._parts.append(bytes(frame.data))
        else:
            return
        if not frame.fin:
            return
        data, self._parts = b"".join(self._parts), []
        message: Message = {"type": "websocket.send"}
        message["text" if self._text else "bytes"] = data.decode() if self._text else data
        await send(message)


def _may_be_sent(code: int) -> bool:
    return 1000 <= code < 5000 and code not in (1004, 1005, 1006, 1015)
