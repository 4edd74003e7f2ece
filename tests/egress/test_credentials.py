"""Credentials through the real proxy process: placeholders go in, values come out on the other side and never back.

The servers are real TLS servers on loopback, with an authority of their own; the clients speak through a listener of the proxy.
Each refusal is judged by what the server got and by what came back, byte for byte.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from cloche.egress import authority, credentials
from cloche.policy import rules
from tests.egress import echoing, room

VALUE = "ghp_R3alV4lue/of+the=secret0123456789"
SHOWN = "cloche-secret-" + "k3" * 16
make = rules.RuleSet.make


class World(NamedTuple):
    theirs: authority.Authority
    api: echoing.Echo
    other: echoing.Echo
    plain: echoing.Echo


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    theirs = authority.Authority()
    directory = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(echoing.serving(host, echoing.context_for(theirs, host, directory)))
            for host in ("api.test", "other.test")
        ]
        made.append(stack.enter_context(echoing.serving("api.test", None)))
        yield World(theirs, *made)


@pytest.fixture(autouse=True)
def forgetful(world: World) -> None:
    for server in (world.api, world.other, world.plain):
        server.got.clear()
        server.connections = 0
        server.go.clear()
    world.api.elsewhere = "https://other.test"


def one(**fields: Any) -> credentials.Credential:
    base = {"name": "github", "placeholder": SHOWN, "value": VALUE.encode(), "hosts": ("api.test",)}
    return credentials.Credential(**{**base, **fields})


class Through(NamedTuple):
    egress: room.Egress
    port: int
    trust: ssl.SSLContext
    certificate: str

    def tunnel(self, host: str = "api.test", port: int = 443) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 20)
        made.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = made.recv(4096)
            if not piece:
                break
            answer += piece
        if not answer.startswith(b"HTTP/1.1 200"):
            made.close()
            raise ConnectionRefusedError(answer.decode())
        return made

    def secured(self, host: str = "api.test", name: str | None = None) -> ssl.SSLSocket:
        return self.trust.wrap_socket(self.tunnel(host), server_hostname=name or host)

    def raw(self, request: bytes, host: str = "api.test") -> bytes:
        """Everything that comes back for these bytes."""
        with self.secured(host) as made:
            made.sendall(request)
            received = b""
            while piece := made.recv(65536):
                received += piece
            return received

    async def araw(self, request: bytes, host: str = "api.test") -> bytes:
        return await asyncio.to_thread(self.raw, request, host)

    def get(
        self,
        path: str = "/",
        *,
        host: str = "api.test",
        method: str = "GET",
        body: Any = None,
        **headers: str,
    ):
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.trust, timeout=30)
        connection.set_tunnel(host, 443)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    async def fetch(self, path: str = "/", **options: Any):
        return await asyncio.to_thread(self.get, path, **options)


BEARER = {"Authorization": f"Bearer {SHOWN}"}


@contextlib.asynccontextmanager
async def through(
    world: World,
    *listed: credentials.Credential,
    allow: tuple[str, ...] = ("api.test", "other.test"),
    theirs: str | None = None,
    inspects: bool = True,
    **policy: Any,
) -> AsyncIterator[Through]:
    resolve = {
        "api.test:443": world.api.address,
        "other.test:443": world.other.address,
        "api.test:80": world.plain.address,
        "other.test:80": world.plain.address,
    }
    trusted = world.theirs.certificate if theirs is None else theirs
    async with room.egress(authorities=trusted) as made:
        certificate = await made.process.certificate()
        trust = ssl.create_default_context(cadata=certificate)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            fd = credentials.seal(listed)
            try:
                await made.process.attach(
                    "s1", [("proxy", listener)], make(allow=allow, resolve=resolve, **policy),
                    inspects=inspects, credentials=fd if listed else None,
                )  # fmt: skip
            finally:
                os.close(fd)
            yield Through(made, listener.getsockname()[1], trust, certificate)


def no_value(*texts: bytes | str) -> None:
    """No text has the value, in any spelling that is looked for or that is easily undone."""
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        assert VALUE.encode() not in data
        for spelling in credentials.spellings([one()]):
            assert spelling not in data


# ── what must not happen ───────────────────────────────────────────────────────────────────────────


@room.awaited
async def test_to_another_host_the_placeholder_goes_on_as_it_is(world: World) -> None:
    second = one(
        name="second",
        placeholder="cloche-secret-" + "z9" * 16,
        hosts=("other.test",),
        value=b"another-value-1",
    )
    async with through(world, one(), second) as gate:
        await gate.fetch("/", host="other.test", **BEARER)
        assert world.other.got[0].headers["authorization"] == f"Bearer {SHOWN}"
        withheld = await gate.egress.reported(stage="credential", verdict="deny")
        assert (withheld.secret, withheld.host, withheld.reason) == (
            "github",
            "other.test",
            "credential_withheld",
        )
        denial = withheld.denial()
        assert denial is not None
        assert denial.operation == "credential"
        # The permitted twin.
        await gate.fetch("/", **BEARER)
        assert world.api.got[0].headers["authorization"] == f"Bearer {VALUE}"
        used = await gate.egress.reported(stage="credential", verdict="allow")
        assert (used.secret, used.host, used.place) == ("github", "api.test", "header authorization")


@room.awaited
async def test_an_unbound_host_keeps_its_own_certificate(world: World) -> None:
    async with through(world, one()) as gate:
        with pytest.raises(ssl.SSLCertVerificationError):
            await gate.fetch(
                "/", host="other.test", **BEARER
            )  # it is not ours, so the client does not know it
        theirs = ssl.create_default_context(cadata=world.theirs.certificate)
        answer, _ = await gate._replace(trust=theirs).fetch("/", host="other.test", **BEARER)
        assert answer.status == 200
        assert world.other.got[0].headers["authorization"] == f"Bearer {SHOWN}"


@pytest.mark.parametrize(
    "path",
    ["/plain", "/inheader", "/spelt", "/split", "/untilend", "/big/70000", "/big/3000000", "/redirect"],
)
@room.awaited
async def test_an_echo_comes_back_as_the_placeholder(world: World, path: str) -> None:
    async with through(world, one()) as gate:
        answer, body = await gate.fetch(path, **BEARER)
        assert world.api.got[0].headers["authorization"] == f"Bearer {VALUE}", "the server did get it"
        no_value(body, str(answer.headers))
        if not path.startswith("/big"):
            assert SHOWN.encode() in body + str(answer.headers).encode()
        else:
            assert len(body) == int(path.rpartition("/")[2])
            assert SHOWN[:20].encode() in body


@room.awaited
async def test_an_echo_of_basic_comes_back_as_it_was_sent(world: World) -> None:
    sent = base64.b64encode(f"me:{SHOWN}".encode()).decode()
    async with through(world, one(how="basic", user="me")) as gate:
        _, body = await gate.fetch("/plain", Authorization=f"Basic {sent}")
        got = world.api.got[0].headers["authorization"].removeprefix("Basic ")
        assert base64.b64decode(got) == f"me:{VALUE}".encode()
        assert got.encode() not in body
        assert json.loads(body)["headers"]["authorization"] == f"Basic {sent}"


@pytest.mark.parametrize("path", ["/gzip", "/tegzip"])
@room.awaited
async def test_what_cannot_be_searched_is_refused(world: World, path: str) -> None:
    async with through(world, one()) as gate:
        answer, body = await gate.fetch(path, Accept_Encoding="gzip", **BEARER)
        assert answer.status == 502
        assert answer.headers["X-Proxy-Error"] in ("uninspectable-answer", "upstream-reset")
        assert b"\x1f\x8b" not in body
        assert world.api.got[0].headers["accept-encoding"] == "identity"
        head, empty = await gate.fetch(path, method="HEAD", **BEARER)
        assert (head.status, empty) == (200 if path == "/gzip" else head.status, b"")


@room.awaited
async def test_a_value_cannot_be_fetched_by_halves(world: World) -> None:
    async with through(world, one()) as gate:
        answer, body = await gate.fetch("/ranged", Range="bytes=0-15", **BEARER)
        assert answer.status == 200
        assert "range" not in world.api.got[0].headers
        no_value(body)
        # Without a credential in it a request keeps its range.
        answer, _ = await gate.fetch("/ranged", Range="bytes=0-0", X_Api_Key="abc")
        assert answer.status == 206


@room.awaited
async def test_a_redirect_to_another_host_carries_no_credential(world: World) -> None:
    async with through(world, one()) as gate:
        answer, _ = await gate.fetch("/redirect", **BEARER)
        assert answer.status == 302
        location = answer.headers["Location"]
        no_value(location)
        theirs = ssl.create_default_context(cadata=world.theirs.certificate)
        await gate._replace(trust=theirs).fetch(
            "/landed?" + location.partition("?")[2], host="other.test", **BEARER
        )
        no_value(world.other.got[0].path, world.other.got[0].raw)


@room.awaited
async def test_in_the_clear_nothing_is_put_in(world: World) -> None:
    request = f"GET http://api.test/plain HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer {SHOWN}\r\n\r\n".encode()

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 20) as made:
            made.sendall(request)
            received = b""
            while piece := made.recv(65536):
                received += piece
            return received

    async with through(world, one()) as gate:
        refused = await asyncio.to_thread(ask, gate.port)
        assert refused.startswith(b"HTTP/1.1 403")
        assert b"plain" in refused
        assert world.plain.connections == 0
        assert (await gate.egress.reported(verdict="deny")).reason == "credential_needs_tls"
    async with through(world, one(plain=True)) as gate:
        answer = await asyncio.to_thread(ask, gate.port)
        assert answer.startswith(b"HTTP/1.1 200")
        assert world.plain.got[0].headers["authorization"] == f"Bearer {VALUE}"
        no_value(answer)
        assert SHOWN.encode() in answer


@room.awaited
async def test_a_body_is_left_alone_unless_its_binding_says_so(world: World) -> None:
    form = f"token={SHOWN}&x=1"
    async with through(world, one()) as gate:
        await gate.fetch("/plain", method="POST", body=form)
        assert world.api.got[0].body == form.encode()
    world.api.got.clear()
    async with through(world, one(body=True)) as gate:
        _, echoed = await gate.fetch("/plain", method="POST", body=form)
        assert world.api.got[0].body == f"token={VALUE}&x=1".encode()
        no_value(echoed)

        def chunks() -> Iterator[bytes]:
            yield f"token={SHOWN[:20]}".encode()
            yield f"{SHOWN[20:]}&x=1".encode()

        await gate.fetch("/plain", method="POST", body=chunks())
        assert world.api.got[1].body == f"token={VALUE}&x=1".encode()


@room.awaited
async def test_a_name_that_is_not_the_hosts_is_refused(world: World) -> None:
    async with through(world, one()) as gate:
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.to_thread(gate.secured, "api.test", "other.test")
        assert (await gate.egress.reported(verdict="deny")).reason == "sni_mismatch"
        assert world.api.connections == 0


@room.awaited
async def test_a_host_field_that_is_not_the_hosts_is_refused(world: World) -> None:
    async with through(world, one()) as gate:
        answer = await gate.araw(
            f"GET / HTTP/1.1\r\nHost: other.test\r\nAuthorization: Bearer {SHOWN}\r\n\r\n".encode()
        )
        assert answer.startswith(b"HTTP/1.1 403")
        assert world.api.connections == 0
        twin = await gate.araw(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
        assert twin.startswith(b"HTTP/1.1 200")


@room.awaited
async def test_a_client_of_http2_alone_is_refused_and_told(world: World) -> None:
    async with through(world, one()) as gate:
        only = ssl.create_default_context(cadata=gate.certificate)
        only.set_alpn_protocols(["h2"])
        with pytest.raises(ssl.SSLError, match=r"(?i)no.application.protocol"):
            await asyncio.to_thread(gate._replace(trust=only).secured)
        assert (await gate.egress.reported(verdict="deny")).reason == "http1_only"
        both = ssl.create_default_context(cadata=gate.certificate)
        both.set_alpn_protocols(["h2", "http/1.1"])
        with await asyncio.to_thread(gate._replace(trust=both).secured) as made:
            assert made.selected_alpn_protocol() == "http/1.1"


@room.awaited
async def test_a_client_that_does_not_trust_us_is_a_refusal_with_advice(world: World) -> None:
    async with through(world, one()) as gate:
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(gate._replace(trust=ssl.create_default_context()).secured)
        refused = await gate.egress.reported(verdict="deny")
        assert refused.reason == "certificate_refused"
        assert "SSL_CERT_FILE" in refused.hint


@room.awaited
async def test_a_server_whose_certificate_is_not_trusted_gets_nothing(world: World) -> None:
    async with through(world, one(), theirs="") as gate:
        answer, body = await gate.fetch("/", **BEARER)
        assert answer.status == 502
        assert answer.headers["X-Proxy-Error"] == "upstream-tls"
        assert b"certificate" in body
        assert world.api.got == []


@room.awaited
async def test_a_server_with_another_hosts_certificate_gets_nothing(world: World) -> None:
    led = {"api.test:443": world.other.address}
    async with room.egress(authorities=world.theirs.certificate) as made:
        certificate = await made.process.certificate()
        fd = credentials.seal([one()])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            policy = make(allow=["api.test"], resolve=led)
            await made.process.attach("s1", [("proxy", listener)], policy, inspects=True, credentials=fd)
            os.close(fd)
            trust = ssl.create_default_context(cadata=certificate)
            gate = Through(made, listener.getsockname()[1], trust, certificate)
            answer, _ = await gate.fetch("/", **BEARER)
            assert answer.status == 502
            assert world.other.got == []


SMUGGLED = {
    "two lengths": b"Content-Length: 4\r\nContent-Length: 40",
    "length and chunked": b"Content-Length: 4\r\nTransfer-Encoding: chunked",
    "another coding": b"Transfer-Encoding: gzip, chunked",
    "a blank before the colon": b"Transfer-Encoding : chunked",
    "a folded line": b"X: a\r\n b",
    "a bare CR": b"X: a\rY: b",
    "a NUL": b"X: a\x00b",
    "a second host": b"Host: api.test",
}


@pytest.mark.parametrize("odd", SMUGGLED)
@room.awaited
async def test_what_two_readers_could_frame_differently_is_refused(world: World, odd: str) -> None:
    async with through(world, one()) as gate:
        request = (
            b"POST / HTTP/1.1\r\nHost: api.test\r\n"
            + SMUGGLED[odd]
            + b"\r\n\r\n0\r\n\r\nGET /next HTTP/1.1\r\n\r\n"
        )
        answer = await gate.araw(request)
        assert answer.startswith(b"HTTP/1.1 400")
        assert world.api.got == []


@pytest.mark.parametrize("path", ["/both", "/garbage", "/cut"])
@room.awaited
async def test_a_broken_answer_is_a_clean_failure(world: World, path: str) -> None:
    async with through(world, one()) as gate:
        try:
            answer, _ = await gate.fetch(path, **BEARER)
            assert answer.status == 502
        except (OSError, http.client.HTTPException):
            assert path == "/cut"
        answer, _ = await gate.fetch("/plain", **BEARER)
        assert answer.status == 200


@room.awaited
async def test_a_method_or_path_is_judged_inside_tls(world: World) -> None:
    async with through(world, allow=("api.test methods=GET,HEAD path=/repos", "other.test")) as gate:
        for method, path in (
            ("POST", "/repos/x"),
            ("GET", "/user"),
            ("GET", "/repos/%2e%2e/user"),
            ("GET", "/reposx"),
        ):
            answer, _ = await gate.fetch(path, method=method)
            assert answer.status == 403
            assert answer.headers["X-Proxy-Error"] == "blocked-by-method-policy"
        assert world.api.got == []
        answer, _ = await gate.fetch("/repos/x")
        assert answer.status == 200
    async with through(world, allow=("api.test methods=GET",), inspects=False) as gate:
        with pytest.raises(OSError, match="403"):  # nothing is ended that the sandbox does not trust us for
            await asyncio.to_thread(gate.secured)


@room.awaited
async def test_each_request_of_a_connection_is_judged(world: World) -> None:
    first = b"GET /repos HTTP/1.1\r\nHost: api.test\r\n\r\n"
    second = b"DELETE /repos HTTP/1.1\r\nHost: api.test\r\n\r\n"
    async with through(world, allow=("api.test methods=GET",)) as gate:
        answer = await gate.araw(first + second + first)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert answer.count(b"HTTP/1.1 403") == 1
        assert [got.method for got in world.api.got] == ["GET"]


@room.awaited
async def test_a_binding_is_no_permission(world: World) -> None:
    async with through(world, one(), allow=("other.test",)) as gate:
        with pytest.raises(OSError, match="403"):
            await asyncio.to_thread(gate.secured)
        assert world.api.connections == 0


@room.awaited
async def test_another_sandbox_cannot_use_the_placeholder(world: World) -> None:
    async with through(world, one()) as gate:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = credentials.seal(
                [one(name="mine", placeholder="cloche-secret-" + "aa" * 16, value=b"my-own-value-1")]
            )
            policy = make(allow=["api.test"], resolve={"api.test:443": world.api.address})
            await gate.egress.process.attach(
                "s2", [("proxy", listener)], policy, inspects=True, credentials=mine
            )
            os.close(mine)
            await gate._replace(port=listener.getsockname()[1]).fetch("/plain", **BEARER)
            assert world.api.got[0].headers["authorization"] == f"Bearer {SHOWN}"


@room.awaited
async def test_an_upload_cap_counts_inside_tls(world: World) -> None:
    async with through(world, one(), allow=("api.test upload_bytes=2000",)) as gate:
        answer, _ = await gate.fetch("/sink", method="POST", body=b"x" * 5000, **BEARER)
        assert answer.status == 413

        def chunks() -> Iterator[bytes]:
            for _ in range(50):
                yield b"x" * 1000

        with contextlib.suppress(OSError, http.client.HTTPException):
            await gate.fetch("/plain", method="POST", body=chunks())
        assert (
            await gate.egress.reported(verdict="deny", reason="upload_limit", method="POST")
        ).host == "api.test"
        assert world.api.got == []


# ── what must work ─────────────────────────────────────────────────────────────────────────────────


@room.awaited
async def test_connections_are_kept_and_requests_may_be_pipelined(world: World) -> None:
    ask = f"GET /plain?{{}} HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer {SHOWN}\r\n\r\n"
    last = "GET /plain?last HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n"
    async with through(world, one()) as gate:
        answer = await gate.araw((ask.format(1) + ask.format(2) + last).encode())
        assert answer.count(b"HTTP/1.1 200") == 3
        assert [got.path for got in world.api.got] == ["/plain?1", "/plain?2", "/plain?last"]
        assert world.api.connections == 1
        no_value(answer)


@room.awaited
async def test_continue_is_passed_on(world: World) -> None:
    def ask(gate: Through) -> bytes:
        with gate.secured() as made:
            made.sendall(
                b"POST /plain HTTP/1.1\r\nHost: api.test\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
            )
            first = made.recv(4096)
            assert first.startswith(b"HTTP/1.1 100")
            made.sendall(b"hello")
            return made.recv(65536)

    async with through(world, one()) as gate:
        assert (await asyncio.to_thread(ask, gate)).startswith(b"HTTP/1.1 200")
        assert world.api.got[0].body == b"hello"


@room.awaited
async def test_a_server_may_answer_before_it_has_read_everything(world: World) -> None:
    def ask(gate: Through) -> bytes:
        with gate.secured() as made:
            made.sendall(
                b"POST /early HTTP/1.1\r\nHost: api.test\r\nContent-Length: 100000000\r\n\r\nbeginning"
            )
            return made.recv(65536)

    async with through(world, one()) as gate:
        assert (await asyncio.to_thread(ask, gate)).startswith(b"HTTP/1.1 413")


@room.awaited
async def test_events_are_not_held_back(world: World) -> None:
    def ask(gate: Through) -> tuple[bytes, bytes]:
        with gate.secured() as made:
            made.sendall(
                f"GET /events HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer {SHOWN}\r\n\r\n".encode()
            )
            first = b""
            while b"data: first\n\n" not in first:
                piece = made.recv(4096)
                assert piece
                first += piece
            world.api.go.set()  # only now does the server go on
            rest = b""
            while not rest.endswith(b"0\r\n\r\n"):
                piece = made.recv(4096)
                assert piece
                rest += piece
            return first, rest

    async with through(world, one()) as gate:
        first, rest = await asyncio.to_thread(ask, gate)
        no_value(first, rest)
        assert SHOWN.encode() in rest


@room.awaited
async def test_a_websocket_gets_the_credential_and_masks_its_echo(world: World) -> None:
    def ask(gate: Through, path: str) -> bytes:
        with gate.secured() as made:
            made.sendall(
                f"GET {path} HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer {SHOWN}\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                "Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n".encode()
            )
            received = b""
            sent = False
            while piece := made.recv(4096):
                received += piece
                if not sent and b"\x81" in received:
                    made.sendall(b"\x81\x04ping")
                    sent = True
            return received

    async with through(world, one()) as gate:
        received = await asyncio.to_thread(ask, gate, "/socket")
        assert received.startswith(b"HTTP/1.1 101")
        assert received.endswith(b"\x81\x04ping")
        assert world.api.got[0].headers["authorization"] == f"Bearer {VALUE}"
        assert "sec-websocket-extensions" not in world.api.got[0].headers
        no_value(received)
        refused = await asyncio.to_thread(ask, gate, "/socket/extended")
        assert refused.startswith(b"HTTP/1.1 502")


@room.awaited
async def test_a_half_closed_client_gets_its_answer(world: World) -> None:
    def ask(gate: Through) -> bytes:
        made = gate.tunnel()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        talk = gate.trust.wrap_bio(incoming, outgoing, server_hostname="api.test")

        def until(act: Callable[[], Any]) -> Any:
            while True:
                try:
                    result = act()
                except ssl.SSLWantReadError:
                    made.sendall(outgoing.read())
                    incoming.write(made.recv(65536))
                    continue
                made.sendall(outgoing.read())
                return result

        until(talk.do_handshake)
        until(
            lambda: talk.write(
                f"GET /plain HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer {SHOWN}\r\n\r\n".encode()
            )
        )
        with contextlib.suppress(ssl.SSLError):
            talk.unwrap()
        made.sendall(outgoing.read())
        made.shutdown(socket.SHUT_WR)
        received = b""
        with made, contextlib.suppress(ssl.SSLError):
            while piece := made.recv(65536):
                incoming.write(piece)
            while piece := talk.read(65536):
                received += piece
        return received

    async with through(world, one()) as gate:
        assert (await asyncio.to_thread(ask, gate)).startswith(b"HTTP/1.1 200")


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


@pytest.mark.slow
@pytest.mark.timeout(240)
@room.awaited
async def test_memory_stays_flat(world: World) -> None:
    size = 1 << 28

    def pull(gate: Through) -> int:
        with gate.secured() as made:
            made.sendall(f"GET /big/{size} HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n".encode())
            count = 0
            buffer = bytearray(1 << 18)
            while got := made.recv_into(buffer):
                count += got
            return count

    def push(gate: Through) -> bytes:
        with gate.secured() as made:
            made.sendall(
                f"POST /sink HTTP/1.1\r\nHost: api.test\r\nContent-Length: {size // 4}\r\n\r\n".encode()
            )
            piece = b"y" * (1 << 18)
            for _ in range(size // 4 // len(piece)):
                made.sendall(piece)
            return made.recv(4096)

    async with through(world, one()) as gate:
        await gate.fetch("/big/1000000")
        before = resident_mib(gate.egress.process.pid)
        assert await asyncio.to_thread(pull, gate) > size
        assert (await asyncio.to_thread(push, gate)).startswith(b"HTTP/1.1 200")
        assert resident_mib(gate.egress.process.pid) - before < 40


@room.awaited
async def test_a_new_proxy_has_the_credentials_and_the_same_authority(world: World) -> None:
    async with through(world, one()) as gate:
        await gate.fetch("/plain", **BEARER)
        first = gate.egress.process.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(30):
            while gate.egress.process.pid in (0, first):
                await asyncio.sleep(0.05)
        answer, _ = await gate.fetch("/plain", **BEARER)
        assert answer.status == 200
        assert world.api.got[-1].headers["authorization"] == f"Bearer {VALUE}"


@room.awaited
async def test_credentials_can_be_bound_to_a_live_sandbox_and_taken_away(world: World) -> None:
    policy = make(allow=["api.test"], resolve={"api.test:443": world.api.address})
    other = one(placeholder="cloche-secret-" + "bb" * 16)
    async with through(world, other) as gate:
        await gate.fetch("/plain", **BEARER)
        assert world.api.got[-1].headers["authorization"] == f"Bearer {SHOWN}"
        for listed, expected in (([other, one(name="b")], VALUE), ([other], SHOWN)):
            fd = credentials.seal(listed)
            await gate.egress.process.update("s1", policy, credentials=fd)
            os.close(fd)
            await gate.fetch("/plain", **BEARER)
            assert world.api.got[-1].headers["authorization"] == f"Bearer {expected}"


# ── where values and keys are not ──────────────────────────────────────────────────────────────────


@room.awaited
async def test_the_proxy_cannot_be_dumped(world: World) -> None:
    async with through(world, one()) as gate:
        pid = gate.egress.process.pid
        with open(f"/proc/{pid}/limits") as file:
            core = next(line for line in file if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]
        # What cannot be dumped belongs to root in /proc, whoever runs it.
        assert os.stat(f"/proc/{pid}/environ").st_uid == 0
        with open(f"/proc/{pid}/cmdline", "rb") as one_file, open(f"/proc/{pid}/environ", "rb") as other:
            no_value(one_file.read(), other.read())


@room.awaited
async def test_records_and_faults_have_no_value(world: World) -> None:
    async with through(world, one()) as gate:
        for path in ("/plain", "/gzip", "/garbage", f"/plain?key={SHOWN}"):
            await gate.fetch(path, **BEARER)
        await gate.egress.reported(stage="credential", verdict="deny")
        no_value(repr(gate.egress.records), repr(gate.egress.faults), repr(gate.egress.process))


@room.awaited
async def test_the_engine_does_not_keep_the_value_in_memory(world: World) -> None:
    """The value comes by descriptor: this process, which plays the engine, has only what the test itself wrote."""
    async with through(world, one()) as gate:
        attached = gate.egress.process._attached["s1"]
        no_value(repr(attached))
        assert attached.credentials >= 0
        assert os.readlink(f"/proc/self/fd/{attached.credentials}").startswith("/memfd:")


def test_an_authority_signs_for_names_and_addresses_and_for_servers_only() -> None:
    from cryptography import x509

    made = authority.Authority()
    assert "PRIVATE" not in made.certificate + repr(made)
    ours = x509.load_pem_x509_certificate(made.certificate.encode())
    assert ours.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    for host, kind in (("api.test", x509.DNSName), ("10.0.0.1", x509.IPAddress), ("fd00::1", x509.IPAddress)):
        certificates = x509.load_pem_x509_certificates(made.leaf(host).encode())
        names = certificates[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name) for name in names.get_values_for_type(kind)] == [host]
        assert not certificates[0].extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_bundle_has_the_systems_authorities_and_ours() -> None:
    made = authority.Authority()
    bundle = authority.bundle(made.certificate)
    assert bundle.endswith(made.certificate.encode())
    assert bundle.count(b"BEGIN CERTIFICATE") == authority.system_bundle().count(b"BEGIN CERTIFICATE") + 1
    assert set(authority.variables("/x").values()) == {"/x"}
