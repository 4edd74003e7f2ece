"""Requests that are read on their way: for hosts with a bound credential, and for rules that judge by method or path.

    client ──TLS (our certificate)──► Session ──TLS (verified)──► server

Each request of a connection is parsed, decided on, rewritten and serialised anew; each answer is parsed, masked and framed anew.
So no byte of a head or of a frame is ever passed on that was not understood: what two readers could frame differently was
refused by http.py, and chunk extensions and trailers do not pass. The server is asked for bodies without coding; one that is
coded all the same cannot be searched for echoes and is refused with 502.

    content-length ≤ 64 KiB    read whole, masked, with its new length
    content-length  > 64 KiB   passes as it comes; a mask in it has the length of what it covers
    chunked, or until the end  passes as it comes, in our chunks; a mask may have any length

Request and answer flow at the same time (a server may refuse an upload half-way), `100 Continue` and other interim answers pass, a
request waits in the client's socket until the one before it is answered. After `101` for a WebSocket bytes flow both ways, the
server's under a mask of equal length; extensions are not offered, because they compress.

A request that carried a credential has lost `Range`: a value fetched half by half would pass every mask.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from cloche.egress import channel, credentials, http, masking, upstream

if TYPE_CHECKING:
    from cloche.egress.conversation import Conversation

_WHOLE = 64 * 1024
_WHOLE_REQUEST = 1024 * 1024
_DROPPED = frozenset((b"content-length", b"transfer-encoding", b"trailer"))
_DROPPED_BY_MASK = frozenset((b"accept-encoding", b"sec-websocket-extensions"))
_DROPPED_BY_CREDENTIAL = frozenset((b"range", b"if-range"))
_DROPPED_FROM_ANSWER = frozenset((b"content-length", b"transfer-encoding", b"trailer", b"alt-svc"))
_HEADLESS = (204, 304)


class Uninspectable(Exception):
    """An answer that cannot be searched: it is not passed on."""


class _ServerGone(ConnectionError):
    """The server takes nothing any more; it may have said why."""


class Session:
    """The requests of one client connection. `talk` decides, dials and records."""

    def __init__(self, talk: Conversation, client: channel.Channel, *, secure: bool) -> None:
        self._talk = talk
        self._client = client
        self._secure = secure
        self._server: channel.Channel | None = None
        self._buffer = bytearray()  # of the client
        self._received = bytearray()  # of the server
        self.answering = False
        """Part of an answer is out: what goes wrong now can only be told by a reset."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.last = talk.loop.time()

    async def serve(self) -> None:
        """All requests, until either side has enough."""
        while await self._one():
            pass
        await self._client.finish()

    async def serve_one(self, head: http.Head, target: http.Target, first: bytes) -> None:
        """One request that was parsed already."""
        self._buffer += first
        await self._exchange(head, target, once=True)
        await self._client.finish()

    # ── one request ─────────────────────────────────────────────────────────────────────────────

    async def _one(self) -> bool:
        """Whether another may follow."""
        head = await self._read_head()
        if head is None:
            return False
        host, port = self._talk.destination
        target = http.origin_target(head, host, port, default_port=443)
        self._talk.decide("https", head.method, target.path)
        return await self._exchange(head, target, once=False)

    async def _read_head(self) -> http.Head | None:
        if not self._buffer and not await self._more():
            return None
        async with asyncio.timeout(self._talk.limits.header_s):
            while (head := http.parse_request(self._buffer)) is None:
                if not await self._more():
                    raise ConnectionResetError("the client ended within a head")
        del self._buffer[: head.size]
        return head

    async def _more(self) -> bool:
        piece = await self._client.read()
        self._buffer += piece
        self.last = self._talk.loop.time()
        return bool(piece)

    async def _exchange(self, head: http.Head, target: http.Target, *, once: bool) -> bool:
        body = http.body_of(head)
        out = self._talk.usable.put_in(
            target.path, http.end_to_end(head), target.host, target.port, secure=self._secure
        )
        self._talk.check_upload(self.bytes_up + (body.length or 0))
        server = await self._connect()
        self._talk.note(out.used, out.withheld)
        masked = self._talk.usable.masked_for(self._bound(), out.echoes)
        opening = self._opening(head, target, out, bool(masked))
        if head.wants_websocket:
            await server.write(opening + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            return await self._answer(head, masked, None, once=True)
        upload = asyncio.ensure_future(self._upload(server, head, opening, body))
        try:
            return await self._answer(head, masked, upload, once=once)
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)

    def _bound(self) -> tuple[credentials.Credential, ...]:
        bound = self._talk.usable.bound_to(*self._talk.destination)
        return bound if self._secure else tuple(one for one in bound if one.plain)

    def _opening(self, head: http.Head, target: http.Target, out: credentials.Outgoing, masks: bool) -> bytes:
        """The head's lines, without those that say how the body is framed."""
        dropped = _DROPPED
        if masks:
            dropped |= _DROPPED_BY_MASK
        if out.used:
            dropped |= _DROPPED_BY_CREDENTIAL
        if self._replaced():
            dropped |= {b"expect"}
        lines = [f"{head.method} {out.target} HTTP/1.1".encode()]
        if not head.values(b"host"):
            lines.append(b"Host: " + http.host_field(target.host, target.port, 443 if self._secure else 80))
        lines += [name + b": " + value for name, value in out.fields if name.lower() not in dropped]
        if masks:
            lines.append(b"Accept-Encoding: identity")
        if not self._secure and not head.wants_websocket:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n"

    def _replaced(self) -> dict[bytes, bytes]:
        """Placeholders that are replaced in bodies too."""
        return {one.placeholder.encode(): one.value for one in self._bound() if one.body}

    async def _connect(self) -> channel.Channel:
        if self._server is not None and self._server.is_open():
            return self._server
        host, _ = self._talk.destination
        self._received.clear()
        sock, leftover = await self._talk.dial()
        if not self._secure:
            self._server = channel.Plain(self._talk.loop, sock, leftover)
            return self._server
        made = channel.Tls(
            self._talk.loop, sock, self._talk.server_trust, server_side=False, name=host, first=leftover
        )
        try:
            async with asyncio.timeout(self._talk.limits.connect_s):
                await made.handshake()
        except ssl.SSLCertVerificationError as problem:
            raise upstream.DialFailed(
                "tls", f"the certificate of {host} is not trusted: {problem.verify_message}"
            ) from None
        except ssl.SSLError as problem:
            raise upstream.DialFailed("tls", f"{host}: TLS failed: {problem.reason}") from None
        except TimeoutError:
            raise upstream.DialFailed("timeout", f"{host} did not finish the TLS handshake") from None
        except OSError as problem:
            raise upstream.DialFailed("reset", f"{host}: {problem.strerror or problem}") from None
        self._server = made
        return made

    # ── the body on its way out ─────────────────────────────────────────────────────────────────

    async def _upload(
        self, server: channel.Channel, head: http.Head, opening: bytes, body: http.Body
    ) -> None:
        placed = {} if body.done else self._replaced()
        if placed and head.values(b"expect"):
            await self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # the server has not been asked
        if placed and body.length is not None and body.length <= _WHOLE_REQUEST:
            data = b"".join([piece async for piece in self._content(body)])
            for placeholder, value in placed.items():
                data = data.replace(placeholder, value)
            await self._send_up(server, opening + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            return
        chunked = body.length is None or bool(placed)
        if chunked:
            opening += b"Transfer-Encoding: chunked\r\n"
        elif head.values(b"content-length"):
            opening += b"Content-Length: %d\r\n" % (body.length or 0)
        await self._send_up(server, opening + b"\r\n")
        placing = masking.Masker(placed)  # the same search, the other way round
        async for piece in self._content(body):
            if sent := placing.feed(piece):
                await self._send_up(server, _chunk(sent) if chunked else sent)
        if chunked:
            rest = placing.finish()
            await self._send_up(server, (_chunk(rest) if rest else b"") + b"0\r\n\r\n")

    async def _content(self, body: http.Body) -> AsyncIterator[bytes]:
        while not body.done:
            if not self._buffer and not await self._more():
                raise ConnectionResetError("the client ended within a body")
            used, content = body.take(bytes(self._buffer))
            del self._buffer[:used]
            if content:
                yield content

    async def _send_up(self, server: channel.Channel, data: bytes) -> None:
        self.bytes_up += len(data)
        self._talk.count_upload(self.bytes_up)
        try:
            await server.write(data)
        except OSError as problem:
            raise _ServerGone(str(problem)) from None
        self.last = self._talk.loop.time()

    # ── the answer ──────────────────────────────────────────────────────────────────────────────

    async def _answer(
        self, head: http.Head, masked: masking.Spellings, upload: asyncio.Future[None] | None, *, once: bool
    ) -> bool:
        """Pass on interim answers and the final one; whether another request may follow on these connections."""
        while True:
            answer = await self._read_answer(upload)
            if answer.status == 101:
                if not head.wants_websocket or (masked and answer.values(b"sec-websocket-extensions")):
                    raise http.BadRequest(
                        "the server changed the protocol in a way that nobody asked for", 502
                    )
                await self._switch(answer, masked)
                return False
            if answer.status >= 200:
                break
            await self._client.write(_head(answer, masking.Masker(masked), []))
        body = http.answer_body(answer, head.method)
        if masked and (body is None or not body.done):
            _check_coding(answer)
        lasts = not once and head.keeps_alive and answer.keeps_alive and body is not None
        # A client that still sends what nobody wants would be taken at its word for the next request.
        lasts = lasts and upload is not None and upload.done() and upload.exception() is None
        await self._pass_on(head, answer, body, masked, lasts=lasts)
        self.answering = False
        return lasts

    async def _read_answer(self, upload: asyncio.Future[None] | None) -> http.Answer:
        assert self._server is not None
        while True:
            answer = http.parse_answer(self._received) if self._received else None
            if answer is not None:
                del self._received[: answer.size]
                return answer
            piece = await self._read_server(upload)
            if not piece:
                host, _ = self._talk.destination
                raise upstream.DialFailed("reset", f"{host} closed the connection without an answer")
            self._received += piece

    async def _read_server(self, upload: asyncio.Future[None] | None) -> bytes:
        """Some bytes of the server; an upload that fails meanwhile, for another cause than the server, ends the wait."""
        assert self._server is not None
        if upload is None:
            piece = await self._server.read()
        else:
            reading = asyncio.ensure_future(self._server.read())
            try:
                await asyncio.wait((reading, upload), return_when=asyncio.FIRST_COMPLETED)
                problem = upload.exception() if upload.done() else None
                if problem is not None and not isinstance(problem, _ServerGone):
                    raise problem
                piece = await reading
            finally:
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
        self.last = self._talk.loop.time()
        return piece

    async def _pass_on(
        self,
        head: http.Head,
        answer: http.Answer,
        body: http.Body | None,
        masked: masking.Spellings,
        *,
        lasts: bool,
    ) -> None:
        plain = masking.Masker(masked)
        ending = [] if lasts else [b"Connection: close"]
        if body is not None and body.done:
            lengths = answer.values(b"content-length")
            if lengths and answer.status not in _HEADLESS:
                ending.append(b"Content-Length: " + (lengths[0] if lengths[0].isdigit() else b"0"))
            await self._send_down(_head(answer, plain, ending))
        elif body is not None and body.length is not None and body.length <= _WHOLE:
            data = b"".join([piece async for piece in self._body(body)])
            data = plain.whole(data)
            ending.append(b"Content-Length: %d" % len(data))
            await self._send_down(_head(answer, plain, ending) + data)
        elif body is not None and body.length is not None:
            ending.append(b"Content-Length: %d" % body.length)
            await self._send_down(_head(answer, plain, ending))
            await self._stream(body, masking.Masker(masked, keep_length=True), chunked=False)
        else:
            chunked = head.version == "HTTP/1.1"
            if chunked:
                ending.append(b"Transfer-Encoding: chunked")
            await self._send_down(_head(answer, plain, ending))
            await self._stream(body, plain, chunked=chunked)

    async def _stream(self, body: http.Body | None, masker: masking.Masker, *, chunked: bool) -> None:
        async for piece in self._body(body):
            if shown := masker.feed(piece):
                await self._send_down(_chunk(shown) if chunked else shown)
        rest = masker.finish()
        if chunked:
            await self._send_down((_chunk(rest) if rest else b"") + b"0\r\n\r\n")
        elif rest:
            await self._send_down(rest)

    async def _body(self, body: http.Body | None) -> AsyncIterator[bytes]:
        assert self._server is not None
        while body is None or not body.done:
            if not self._received:
                piece = await self._server.read()
                self.last = self._talk.loop.time()
                if not piece:
                    if body is None and not self._server.ragged:
                        return
                    raise ConnectionResetError("the server ended within an answer")
                self._received += piece
            data = bytes(self._received)
            used, content = (len(data), data) if body is None else body.take(data)
            del self._received[:used]
            if content:
                yield content

    async def _send_down(self, data: bytes) -> None:
        self.answering = True
        self.bytes_down += len(data)
        await self._client.write(data)
        self.last = self._talk.loop.time()

    # ── after 101 ───────────────────────────────────────────────────────────────────────────────

    async def _switch(self, answer: http.Answer, masked: masking.Spellings) -> None:
        assert self._server is not None
        ending = [b"Connection: Upgrade", b"Upgrade: websocket"]
        await self._send_down(_head(answer, masking.Masker(masked), ending))
        masker = masking.Masker(masked, keep_length=True)
        await asyncio.gather(self._frames_up(self._server), self._frames_down(self._server, masker))

    async def _frames_up(self, server: channel.Channel) -> None:
        while True:
            data = bytes(self._buffer)
            self._buffer.clear()
            if data:
                await self._send_up(server, data)
            if not await self._more():
                await server.finish()
                return

    async def _frames_down(self, server: channel.Channel, masker: masking.Masker) -> None:
        data = bytes(self._received)
        self._received.clear()
        while True:
            if data and (shown := masker.feed(data)):
                await self._send_down(shown)
            data = await server.read()
            self.last = self._talk.loop.time()
            if not data:
                if rest := masker.finish():
                    await self._send_down(rest)
                await self._client.finish()
                return


def _check_coding(answer: http.Answer) -> None:
    codings = [value.strip().lower() for value in answer.values(b"content-encoding")]
    if any(coding not in (b"", b"identity") for coding in codings):
        shown = b", ".join(codings).decode("latin-1")[:64]
        raise Uninspectable(
            f"the answer's body is coded ({shown}) although it was asked for as it is; it cannot be searched for "
            "the credential, so it is not passed on"
        )


def _head(answer: http.Answer, masker: masking.Masker, ending: list[bytes]) -> bytes:
    lines = [b"HTTP/1.1 %d " % answer.status + masker.whole(answer.reason)]
    for name, value in http.end_to_end(answer, _DROPPED_FROM_ANSWER):
        lines.append(masker.whole(name) + b": " + masker.whole(value))
    return b"\r\n".join([*lines, *ending]) + b"\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"
