"""One client connection, from its first byte to its last.

    explicit      first byte 05: SOCKS5; else HTTP: CONNECT opens a tunnel, an absolute address is one request
    transparent   the destination is known from the kernel; a fake address is a name of the stub resolver
    tunnel        bytes for a known destination: what they are is seen from how they begin

In a tunnel the server may speak first and is passed on at once; the client's first bytes wait until they are understood:
a TLS hello must name the host, an HTTP request too (and is then handled as one request), a CONNECT is refused, anything else
passes, but not on ports 443 and 80 unless the rule says `raw`. Whoever is refused is told in the language he speaks: 403 and
a line of text, a SOCKS code, a TLS alert; where there is none, a reset.

A TLS connection to a host with a bound credential, or with rules that judge by method or path, is ended here (`_inspect`) and
each request in it is decided on: inspection.py.

Every other connection is decided twice: when its destination is known (nothing is dialled that could not be allowed) and when its
content is. After that no task is left, only a `Relay`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from cloche.egress import channel, credentials, dns, http, inspection, records, relay, socks, tls, upstream
from cloche.policy import names, rules

if TYPE_CHECKING:
    from cloche.egress.proxy import Proxy, Sandbox

_T = TypeVar("_T")
_ORIGINAL_DST = 80
_SPEECH_S = 0.5
_FEW_BYTES_S = 1.0
_FAREWELL_S = 2.0
_FAREWELL_BYTES = 4 * 1024 * 1024

_ERRORS = {
    "not_allowed": "blocked-by-allowlist",
    "port_not_allowed": "blocked-by-allowlist",
    "denied": "blocked-by-denylist",
    "method_not_allowed": "blocked-by-method-policy",
    "uninspectable": "blocked-by-method-policy",
    "answer_uninspectable": "uninspectable-answer",
}
_STATUSES = {"upload_limit": 413, "answer_uninspectable": 502}
_SOCKS_FAILURES = {
    "refused": socks.REFUSED,
    "timeout": socks.HOST,
    "dns": socks.HOST,
    "unreachable": socks.NETWORK,
}
_Speech = Literal["", "http", "socks", "tls"]


class _Refused(Exception):
    """The client is refused; `decision` says why."""

    def __init__(self, decision: rules.Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class _Gone(Exception):
    """The client ended before it said what it wants."""


class Conversation:
    def __init__(
        self, proxy: Proxy, sandbox: Sandbox, client: socket.socket, peer: tuple[str, int] | None = None
    ) -> None:
        self._proxy = proxy
        self._loop = proxy.loop
        self._sandbox = sandbox
        self._client = client
        self._peer = peer
        self._granted = False
        self._server: socket.socket | None = None
        self._relay: relay.Relay | None = None
        self._session: inspection.Session | None = None
        self._voice: channel.Channel = channel.Plain(proxy.loop, client)
        self._buffer = bytearray()
        self._leftover = b""
        self._speech: _Speech = ""
        self._request = rules.Request("", 0)
        self._decision: rules.Decision | None = None
        self._address = ""
        self._dialled_for_session = False
        self._started = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._outcome = "allowed"
        self._ended = False

    def start(self, *, transparent: bool) -> None:
        serve = self._transparent if transparent else self._explicit
        self._task = self._loop.create_task(self._run(serve), name=f"egress {self._sandbox.id}")

    async def _run(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            await serve()
        except _Refused as refused:
            await self._refuse(refused.decision)
        except upstream.NotAllowed as refused:
            await self._refuse(refused.decision)
        except upstream.DialFailed as problem:
            await self._fail(problem)
        except inspection.Uninspectable as problem:
            await self._refuse(rules.Decision("deny", None, "built-in", "answer_uninspectable", str(problem)))
        except relay.TooMuch as problem:
            self._relay_ended(problem)
        except http.BadRequest as problem:
            await self._refuse_request(problem)
        except socks.BadSocks as problem:
            await self._farewell(problem.reply)
        except TimeoutError:
            late = http.refusal(408, "header-timeout", "the request came too slowly")
            await self._farewell(late if self._speech == "http" else b"")
        except (_Gone, OSError):
            self.end(reset=self._session is not None and self._session.answering)
        except BaseException:
            self.end(reset=True)  # a defect of ours, or the loop is closing: never left open
            raise
        finally:
            self._task = None

    # ── how clients come ────────────────────────────────────────────────────────────────────────

    async def _explicit(self) -> None:
        async with asyncio.timeout(self._limits.header_s):
            await self._more()
            if self._buffer[0] == 5:
                destination = await self._read_socks()
                front: rules.Protocol = "socks"
            else:
                self._speech = "http"
                head = await self._read_head()
                target = http.proxy_target(head)
                destination = target.host, target.port
                front = "connect"
        self._aim(*destination)
        if front == "connect" and not target.tunnel:
            await self._exchange(head, target._replace(host=self._request.host))
            return
        sees = self._sees() and self._request.port == 443
        await self._settle(
            "tls" if self._request.port == 443 and not self._may_be_raw() and not sees else front
        )
        if not sees:  # otherwise nothing is dialled before a request was read
            await self._dial()
        if front == "connect":
            await self._loop.sock_sendall(self._client, b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            await self._loop.sock_sendall(self._client, socks.reply(socks.OK))
        self._speech = ""
        await (self._understand() if sees else self._tunnel())

    async def _read_socks(self) -> tuple[str, int]:
        self._speech = "socks"
        size = await self._parse(socks.parse_greeting)
        del self._buffer[:size]
        await self._loop.sock_sendall(self._client, socks.NO_AUTHENTICATION)
        destination = await self._parse(socks.parse_request)
        del self._buffer[: destination.size]
        return destination.host, destination.port

    async def _transparent(self) -> None:
        destination = original_destination(self._client)
        if destination is None:
            self.end(reset=True)  # somebody inside dialled the listener itself
            return
        self._aim(*destination)
        await self._settle("transparent")
        # On these the client speaks first, so it can be understood before anything is dialled.
        if self._request.port in (80, 443) and (self._sees() or not self._may_be_raw()):
            await self._understand()
        else:
            await self._dial()
            await self._tunnel()

    def _aim(self, host: str, port: int) -> None:
        """Where it goes; a fake address is the name it was given out for."""
        self._request = rules.Request(host, port)
        if not names.is_address(host):
            return
        address, _ = names.facts(host)
        if dns.is_fake(address):
            name = self._sandbox.table.host_of(address)
            if name is None:
                hint = "the name that this address stood for is forgotten; resolve it again"
                raise _Refused(rules.Decision("deny", None, "built-in", "address_unknown", hint))
            self._request = rules.Request(name, port)

    # ── what they say ───────────────────────────────────────────────────────────────────────────

    async def _tunnel(self) -> None:
        """The server is there: pass on what it says, and what the client says once it is understood."""
        connection = self._open_relay()
        connection.down.start(self._leftover)
        self._leftover = b""
        if self._may_be_raw() and not self._sees():
            self._begin(connection)
        else:
            await self._understand()

    async def _understand(self) -> None:
        """Look at the client's first bytes, decide on what they are, and let them go."""
        kind = await self._classify()
        if kind == "http":
            await self._one_request()
            return
        if kind == "tls":
            self._speech = "tls"
            async with asyncio.timeout(self._limits.header_s):
                hello = await self._check_hello()
            if self._sees() and not (names.is_address(self._request.host) and hello.name):
                await self._inspect(hello)
                return
        elif self._may_be_raw():
            pass
        elif self._request.port == 443:
            raise self._refusal(
                "not_tls", "what was sent to port 443 is not TLS; a rule with `raw` lets it through"
            )
        elif self._request.port == 80:
            raise self._refusal(
                "not_http", "what was sent to port 80 is not HTTP/1; a rule with `raw` lets it through"
            )
        await self._settle(kind)
        if self._server is None:
            await self._dial()
        connection = self._relay
        if connection is None:
            connection = self._open_relay()
            connection.down.start(self._leftover)
        self._begin(connection)

    def _begin(self, connection: relay.Relay) -> None:
        first = bytes(self._buffer)
        self._buffer.clear()
        connection.up.start(first)

    async def _classify(self) -> Literal["tls", "http", "tcp"]:
        """What the client's first bytes are. It may take its time to say any, but not between the first and the next: on 80
        and 443 it is cut then, elsewhere a byte or two after which it waits for an answer are a language of their own."""
        if not self._buffer and not await self._more(or_end=True):
            return "tcp"
        strict = self._request.port in (80, 443)
        try:
            async with asyncio.timeout(self._limits.header_s if strict else _FEW_BYTES_S):
                return await self._recognise()
        except TimeoutError:
            if strict:
                raise
            return "tcp"

    async def _recognise(self) -> Literal["tls", "http", "tcp"]:
        while True:
            is_tls, is_http = tls.looks_like_tls(self._buffer), http.looks_like_http(self._buffer)
            if is_tls or is_http:
                return "tls" if is_tls else "http"
            if (is_tls, is_http) == (False, False) or not await self._more(or_end=True):
                return "tcp"

    async def _check_hello(self) -> tls.Hello:
        host = self._request.host
        try:
            hello = await self._parse(tls.parse_hello)
        except tls.BadHello as problem:
            raise self._refusal("not_tls", f"the TLS hello is refused: {problem}") from None
        if names.is_address(host):
            if hello.name and (refused := rules.denied_by_name(self._rules, hello.name, self._request.port)):
                raise _Refused(refused)
        elif hello.name is None:
            raise self._refusal("sni_missing", f"the TLS hello names no server; it must name {host}")
        elif hello.name != host:
            raise self._refusal(
                "sni_mismatch", f"the TLS hello names {hello.name}, the connection goes to {host}"
            )
        return hello

    async def _inspect(self, hello: tls.Hello) -> None:
        """Be the server for this client, read its requests, and ask the real one."""
        host = self._request.host
        self._stop_relay()
        if hello.protocols is not None and b"http/1.1" not in hello.protocols:
            raise self._refusal(
                "http1_only", f"requests to {host} are read on their way, and only HTTP/1.1 can be"
            )
        context = await self._proxy.leaf(host)
        secured = channel.Tls(self._loop, self._client, context, server_side=True, first=bytes(self._buffer))
        self._buffer.clear()
        try:
            async with asyncio.timeout(self._limits.header_s):
                await secured.handshake()
        except ssl.SSLError as problem:
            self._speech = ""  # it has been told, by TLS
            raise self._refusal(
                "certificate_refused",
                f"the client did not accept the sandbox's certificate for {host} ({problem.reason}); it must trust the file "
                "that SSL_CERT_FILE names",
            ) from None
        self._voice, self._speech = secured, "http"
        self._session = inspection.Session(self, secured, secure=True)
        await self._session.serve()
        await self._drain()

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.up.pause()
            self._relay.down.pause()

    async def _one_request(self) -> None:
        """A plain HTTP request for a known destination."""
        self._speech = "http"
        if self._relay is not None:
            self._relay.down.pause()
        async with asyncio.timeout(self._limits.header_s):
            head = await self._read_head()
        target = http.origin_target(head, self._request.host, self._request.port)
        named = http.named_host(head)
        if named and (refused := rules.denied_by_name(self._rules, named, target.port)):
            raise _Refused(refused)
        await self._exchange(head, target)

    # ── one HTTP request ────────────────────────────────────────────────────────────────────────

    async def _exchange(self, head: http.Head, target: http.Target) -> None:
        await self._settle("http", head.method, target.path)
        if self.usable.all and await self._with_credentials(head, target):
            return
        body = http.body_of(head)
        forwarded = http.forward(head, target)
        self.check_upload(len(forwarded) + (body.length or 0))
        if self._server is None:
            await self._dial()
        assert self._server is not None
        connection = self._relay or self._open_relay()
        await self._loop.sock_sendall(self._server, forwarded)
        connection.up.total = len(forwarded)
        if not head.wants_websocket:
            first = bytes(self._buffer)
            self._buffer.clear()
            connection.up.start(first, framing=body)
        await self._answer(head, connection)

    async def _with_credentials(self, head: http.Head, target: http.Target) -> bool:
        """Whether a plain request was served with what is bound to its host. In the clear a value goes only where its
        binding says so; a placeholder that goes on as it is was not meant for this host."""
        seen = self.usable.seen_in(target.path, head.fields)
        bound = self.usable.bound_to(target.host, target.port)
        for one in seen:
            if one in bound and not one.plain:
                raise self._refusal(
                    "credential_needs_tls",
                    f"the secret {one.name!r} is sent through TLS only; use https, or bind it with plain",
                )
        if not any(one.plain for one in bound):
            self.note((), seen)
            return False
        self._stop_relay()
        self._session = inspection.Session(self, self._voice, secure=False)
        first = bytes(self._buffer)
        self._buffer.clear()
        await self._session.serve_one(head, target, first)
        await self._drain()
        return True

    async def _answer(self, head: http.Head, connection: relay.Relay) -> None:
        """Pass on interim responses and the final one's head; the rest goes by itself."""
        assert self._server is not None
        data = bytearray(self._leftover)
        while True:
            parsed = http.parse_response(data) if data else None
            if parsed is None:
                piece = await self._loop.sock_recv(self._server, 65536)
                if not piece:
                    raise upstream.DialFailed(
                        "reset", f"{self._request.host} closed the connection without an answer"
                    )
                connection.last = self._loop.time()
                data += piece
            elif parsed.status == 101:
                if not head.wants_websocket:
                    raise http.BadRequest("the server changed the protocol, and nobody had asked", 502)
                connection.down.start(bytes(data))
                self._begin(connection)
                return
            elif parsed.status < 200:
                await self._loop.sock_sendall(self._client, data[: parsed.size])
                del data[: parsed.size]
            else:
                if head.wants_websocket:
                    connection.up.start(b"", framing=http.Body(0))
                connection.down.start(http.answer_once(bytes(data[: parsed.size])) + data[parsed.size :])
                return

    def check_upload(self, size: int) -> None:
        rule = self._decision.rule if self._decision else None
        if rule is not None and rule.upload_bytes is not None and size > rule.upload_bytes:
            raise self._refusal("upload_limit", f"the rule {str(rule)!r} lets {rule.upload_bytes} bytes out")

    # ── what a session asks for ─────────────────────────────────────────────────────────────────

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def limits(self) -> records.Limits:
        return self._limits

    @property
    def destination(self) -> tuple[str, int]:
        return self._request.host, self._request.port

    @property
    def usable(self) -> credentials.Credentials:
        return self._sandbox.credentials

    @property
    def server_trust(self) -> ssl.SSLContext:
        return self._proxy.server_trust

    def decide(self, protocol: rules.Protocol, method: str, path: str) -> None:
        """Whether one more request of this connection may be made."""
        self._decide(protocol, method, path)
        if self._server is not None:
            assert self._decision is not None
            self._record(self._decision, "decided")

    async def dial(self) -> tuple[socket.socket, bytes]:
        """The server, and what it has said already: the connection that is there and unused, or a new one."""
        if self._server is None or self._dialled_for_session:
            if self._server is not None:
                relay.close(self._loop, self._server)
                self._server = None
            await self._dial()
        self._dialled_for_session = True
        assert self._server is not None
        leftover, self._leftover = self._leftover, b""
        return self._server, leftover

    def count_upload(self, total: int) -> None:
        rule = self._decision.rule if self._decision else None
        if rule is not None and rule.upload_bytes is not None and total > rule.upload_bytes:
            raise relay.TooMuch

    def note(
        self, used: tuple[credentials.Credential, ...], withheld: tuple[credentials.Credential, ...]
    ) -> None:
        """Tell the engine which secrets went out, and which were asked for where they do not belong."""
        for one in used:
            self._note(one, rules.Decision("allow", None, "secret", "credential_used"))
        for one in withheld:
            hint = f"the secret {one.name!r} is bound to {', '.join(one.hosts)}, {one.place}; the placeholder went on as it is"
            self._note(one, rules.Decision("deny", None, "secret", "credential_withheld", hint))

    def _note(self, one: credentials.Credential, decision: rules.Decision) -> None:
        self._record(decision, "credential", secret=one.name, place=one.place)

    # ── deciding ────────────────────────────────────────────────────────────────────────────────

    @property
    def _rules(self) -> rules.RuleSet:
        return self._sandbox.rules

    @property
    def _limits(self) -> records.Limits:
        return self._proxy.options.limits

    def _decide(self, protocol: rules.Protocol, method: str | None = None, path: str | None = None) -> None:
        self._request = self._request._replace(protocol=protocol, method=method, path=path)
        decision = self._judge()
        if not decision.allowed:
            raise _Refused(decision)
        self._decision = decision

    def _judge(self) -> rules.Decision:
        decision = rules.decide(self._rules, self._request)
        if self._granted and rules.is_askable(self._rules, decision):
            return rules.Decision("allow", decision.rule, "answer", "allowed")
        return decision

    async def _settle(
        self, protocol: rules.Protocol, method: str | None = None, path: str | None = None
    ) -> None:
        """Decide, and where a person may decide, ask, once for the connection."""
        try:
            self._decide(protocol, method, path)
        except _Refused as refused:
            if not rules.is_askable(self._rules, refused.decision):
                raise
            await self._ask(refused.decision)
            self._decide(protocol, method, path)

    async def _ask(self, decision: rules.Decision) -> None:
        request = self._request
        allowed, why = await self._proxy.ask(
            records.Ask(
                id=0,
                sandbox=self._sandbox.id,
                host=request.host[:255],
                port=request.port,
                protocol=request.protocol,
                rule=str(decision.rule) if decision.reason == "ask" else "",
                peer=self._peer,
            )
        )
        if not allowed:
            raise _Refused(decision._replace(source="answer", hint=why or decision.hint))
        self._granted = True

    def _sees(self) -> bool:
        """Whether TLS to this destination is ended here."""
        if not self._sandbox.inspects:
            return False
        host, port = self.destination
        return bool(self.usable.bound_to(host, port)) or rules.asks_to_see(self._rules, host, port)

    def _may_be_raw(self) -> bool:
        """Whether the rule for this destination lets bytes through unseen."""
        if self._decision is None:
            decision = rules.decide(self._rules, self._request._replace(protocol="connect"))
            return decision.allowed and decision.rule is not None and decision.rule.raw
        return self._decision.rule is not None and self._decision.rule.raw

    def _refusal(self, reason: str, hint: str) -> _Refused:
        rule = self._decision.rule if self._decision else None
        return _Refused(rules.Decision("deny", rule, "built-in", reason, hint))

    def reconsider(self) -> None:
        """The rules have changed: what is refused now ends now."""
        if self._decision is None:
            return  # it will be decided by the new rules
        decision = self._judge()
        pinned = rules.override(self._rules, self._request.host, self._request.port) is not None
        if decision.allowed and self._address not in ("", "parent"):
            checked = rules.check_address(
                self._rules, self._request.host, self._address, self._request.port, pinned=pinned
            )
            decision = decision if checked.allowed else checked
        if decision.allowed:
            self._decision = decision
        else:
            self._record(decision, "decided")
            self._outcome = "rules_changed"
            self.end(reset=True)

    # ── refusing ────────────────────────────────────────────────────────────────────────────────

    async def _refuse(self, decision: rules.Decision) -> None:
        noted = self._proxy.refuse(self._sandbox, self._describe(decision, "decided"))
        self._decision = None
        if noted is not None:
            await noted
        if not self._speech and not self._buffer and self._relay is None:
            await self._listen_for_speech()
        await self._farewell(self._refusal_text(decision))

    def _refusal_text(self, decision: rules.Decision) -> bytes:
        match self._speech:
            case "http":
                status = _STATUSES.get(decision.reason, 403)
                error = _ERRORS.get(decision.reason, "blocked-by-policy")
                where = f"{self._request.host}:{self._request.port}"
                text = f"network denied: {where} ({decision.reason}); {decision.hint}"
                return http.refusal(status, error, text, head_only=self._request.method == "HEAD")
            case "socks":
                return socks.reply(socks.RULESET)
            case "tls" if decision.reason == "http1_only":
                return tls.NO_PROTOCOL
            case "tls":
                return tls.UNRECOGNIZED_NAME if decision.reason.startswith("sni_") else tls.ACCESS_DENIED
            case _:
                return b""

    async def _listen_for_speech(self) -> None:
        """Give a refused client a moment to show in which language it wants to hear it."""
        try:
            async with asyncio.timeout(_SPEECH_S):
                kind = await self._classify()
            self._speech = "" if kind == "tcp" else kind
        except (TimeoutError, _Gone, OSError):
            pass

    async def _refuse_request(self, problem: http.BadRequest) -> None:
        match problem:
            case http.HostMismatch():
                await self._refuse(rules.Decision("deny", None, "built-in", "host_mismatch", str(problem)))
            case http.NestedConnect():
                await self._refuse(rules.Decision("deny", None, "built-in", "nested_connect", str(problem)))
            case _ if problem.status == 502:
                await self._fail(upstream.DialFailed("reset", str(problem)))
            case _:
                await self._farewell(http.refusal(problem.status, "bad-request", str(problem)))

    async def _fail(self, problem: upstream.DialFailed) -> None:
        """The server, not the policy: told apart on every wire."""
        decision = self._decision or rules.Decision("allow", None, "", "")
        self._record(decision._replace(reason=f"upstream_{problem.kind}", hint=str(problem)), "closed")
        self._decision = None
        match self._speech:
            case "http":
                status = 504 if problem.kind == "timeout" else 502
                text = http.refusal(status, f"upstream-{problem.kind}", str(problem))
            case "socks":
                text = socks.reply(_SOCKS_FAILURES.get(problem.kind, socks.GENERAL))
            case "tls":
                text = tls.INTERNAL_ERROR
            case _:
                text = b""
        await self._farewell(text)

    async def _farewell(self, text: bytes) -> None:
        """Say it and close so that it is read: closing on unread bytes would reset the connection and lose the answer."""
        self._stop_relay()
        if not text or (self._session is not None and self._session.answering):
            self.end(reset=True)
            return
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._voice.write(text)
                await self._voice.finish()
        except (OSError, TimeoutError):
            self.end()
            return
        await self._drain()

    async def _drain(self) -> None:
        """We have said everything: let the client take its leave."""
        try:
            async with asyncio.timeout(_FAREWELL_S):
                left = _FAREWELL_BYTES
                while left > 0 and (piece := await self._loop.sock_recv(self._client, 65536)):
                    left -= len(piece)
        except (OSError, TimeoutError):
            pass
        self.end()

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    async def _more(self, *, or_end: bool = False) -> bool:
        piece = await self._loop.sock_recv(self._client, 65536)
        if not piece and not or_end:
            raise _Gone
        self._buffer += piece
        return bool(piece)

    async def _parse(self, parser: Callable[[bytearray], _T | None]) -> _T:
        while (found := parser(self._buffer)) is None:
            await self._more()
        return found

    async def _read_head(self) -> http.Head:
        head = await self._parse(http.parse_request)
        del self._buffer[: head.size]
        return head

    # ── the server's side, and the end ──────────────────────────────────────────────────────────

    async def _dial(self) -> None:
        policy, decision = self._rules, self._decision
        assert decision is not None
        request = self._request
        dialled = await self._proxy.dialler.dial(policy, request.host, request.port, self._sandbox.lookups)
        self._server, self._address, self._leftover = dialled
        if (
            policy is not self._rules
        ):  # they changed while it was dialled, and the address was judged by the old ones
            self.reconsider()
        if self._ended:
            relay.close(self._loop, dialled.socket)
            raise _Gone
        self._record(decision, "decided")

    def _open_relay(self) -> relay.Relay:
        assert self._server is not None
        rule = self._decision.rule if self._decision else None
        self._relay = relay.Relay(
            self._loop,
            self._client,
            self._server,
            on_end=self._relay_ended,
            upload_bytes=rule.upload_bytes if rule else None,
        )
        return self._relay

    def _relay_ended(self, problem: BaseException | None) -> None:
        if isinstance(problem, relay.TooMuch) and self._decision is not None:
            rule = self._decision.rule
            self._record(
                rules.Decision(
                    "deny", rule, "policy.network.allow", "upload_limit", "the rule's upload cap was reached"
                ),
                "decided",
            )
            self._outcome = "upload_limit"
        elif problem is not None and self._outcome == "allowed":
            self._outcome = "reset"
        self.end(reset=self._session is not None)

    def end_if_idle(self, before: float) -> None:
        busy = self._session or self._relay
        if (busy.last if busy is not None else self._started) < before:
            self._outcome = "idle"
            self.end(reset=True)

    def end(self, *, reset: bool = False) -> None:
        """Close everything and say what it was. Twice is harmless."""
        if self._ended:
            return
        self._ended = True
        if self._relay is not None:
            self._relay.end(ConnectionResetError() if reset else None)
        for one in (self._client, self._server):
            if one is not None:
                relay.close(self._loop, one, reset=reset)
        if self._task is not None and self._task is not asyncio.current_task(self._loop):
            self._task.cancel()
        self._sandbox.conversations.discard(self)
        if self._decision is not None and self._server is not None:
            self._record(self._decision._replace(reason=self._outcome), "closed")

    def _record(
        self, decision: rules.Decision, stage: records.Stage, *, secret: str = "", place: str = ""
    ) -> None:
        self._proxy.record(self._sandbox, self._describe(decision, stage, secret=secret, place=place))

    def _describe(
        self, decision: rules.Decision, stage: records.Stage, *, secret: str = "", place: str = ""
    ) -> records.Record:
        request = self._request
        up, down = self._moved()
        return records.Record(
            sandbox=self._sandbox.id,
            verdict=decision.verdict,
            host=request.host[:255],
            port=request.port,
            protocol=request.protocol,
            reason=decision.reason,
            stage=stage,
            rule=str(decision.rule) if decision.rule else "",
            source=decision.source,
            hint=decision.hint[:1000],
            method=request.method or "",
            address=self._address,
            bytes_up=up,
            bytes_down=down,
            duration_ms=round((self._loop.time() - self._started) * 1000, 3),
            secret=secret,
            place=place,
            peer=self._peer,
        )

    def _moved(self) -> tuple[int, int]:
        if self._session is not None:
            return self._session.bytes_up, self._session.bytes_down
        return (self._relay.up.total, self._relay.down.total) if self._relay is not None else (0, 0)


def original_destination(client: socket.socket) -> tuple[str, int] | None:
    """Where a captured connection was going: by nftables' memory, else by the address it arrived at. None for loopback,
    which is never captured: then the listener itself was dialled."""
    host, port = client.getsockname()[:2]
    found = _redirected(client, is_v6=":" in host and not host.startswith("::ffff:"))
    if found is not None:
        host, port = found
    host = names.canonical(host)
    return None if names.facts(host)[1] == "loopback" else (host, port)


def _redirected(client: socket.socket, *, is_v6: bool) -> tuple[str, int] | None:
    try:
        if is_v6:
            raw = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DST, 28)
            return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack_from(">H", raw, 2)[0]
        raw = client.getsockopt(socket.IPPROTO_IP, _ORIGINAL_DST, 16)
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack_from(">H", raw, 2)[0]
    except OSError:
        return None  # not redirected
