"""The proxy in this process: real sockets on loopback, a resolver that says what the test wants, and odd servers."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloche.egress import proxy, records, socks, upstream
from cloche.guest import wire
from cloche.policy import rules
from tests.egress import room

make = rules.RuleSet.make
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A proxy with one sandbox, whose explicit listener is on the test's loopback."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.lookups: list[str] = []
        self.records: list[records.Record] = []
        self.answers: list[records.Report] = []
        self._changed = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def begin(self, policy: rules.RuleSet, options: records.Options) -> None:
        loop = asyncio.get_running_loop()
        self.engine, there = wire.pair()
        self.engine.setblocking(False)
        loop.add_reader(self.engine, self._hear)
        self.proxy = proxy.Proxy(loop, there, resolver=self._resolve)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        await self.tell({"op": "configure", "options": msgspec.to_builtins(options)})
        await self.tell(
            {"op": "attach", "sandbox": "s1", "sockets": ["proxy"], "rules": policy.to_builtins()},
            [self.listener.fileno()],
        )

    async def end(self) -> None:
        for writer in self._writers:
            writer.close()
        self.proxy.close()
        self.listener.close()
        asyncio.get_running_loop().remove_reader(self.engine)
        self.engine.close()

    async def _resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        if host not in self.names:
            raise upstream.DialFailed("dns", f"{host} is unknown")
        return self.names[host]

    def _hear(self) -> None:
        received = wire.receive(self.engine)
        assert received is not None
        report = msgspec.convert(received[0], records.Report)
        if report.decision is not None:
            self.records.append(report.decision)
            wire.send(self.engine, {"op": "seen", "id": report.decision.id})
        else:
            self.answers.append(report)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def tell(self, order: dict[str, object], fds: list[int] | None = None) -> records.Report:
        number = len(self.answers) + 1
        wire.send(self.engine, {**order, "id": number}, fds or [])
        await self.until(lambda: len(self.answers) >= number)
        return self.answers[-1]

    async def set_rules(self, policy: rules.RuleSet) -> None:
        await self.tell({"op": "rules", "sandbox": "s1", "rules": policy.to_builtins()})

    async def client(self, first: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        self._writers.append(writer)
        writer.write(first)
        return reader, writer

    async def tunnel(self, host: str, port: int) -> Streams:
        streams = await self.client(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
        assert (await streams[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), self.records
        return streams

    def reasons(self) -> list[str]:
        return [record.reason for record in self.records]


@contextlib.asynccontextmanager
async def world(policy: rules.RuleSet, parent: str = "", **limits: Any) -> AsyncIterator[World]:
    made = World()
    await made.begin(policy, records.Options(limits=msgspec.convert(limits, records.Limits), parent=parent))
    try:
        yield made
    finally:
        await made.end()


class Peer:
    """A TCP server that talks as the test says, and counts its visitors."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.visits = 0
        self.ended = asyncio.Event()

    async def __aenter__(self) -> "Peer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.ended.set()


@contextlib.asynccontextmanager
async def served(talk: Talk, **limits: Any) -> AsyncIterator[tuple[Peer, World]]:
    """A peer that is ok.test on every port the tests use, and a proxy that allows it."""
    async with Peer(talk) as peer:
        resolve = {f"ok.test:{port}": peer.address for port in (25, 80, 9000)}
        async with world(make(allow=["ok.test"], resolve=resolve), **limits) as one:
            yield peer, one


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def everything(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b"<reset>"


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scene())  # type: ignore[arg-type]


# ── what is refused, and how it is said ──


def test_answers_that_lead_inward_are_dropped_and_never_dialled() -> None:
    async def scene() -> None:
        async with Peer(echo) as peer, world(make(allow=["evil.test", "mixed.test"]), connect_s=1) as one:
            one.names = {
                "evil.test": ["127.0.0.1", "10.0.0.1", "::1"],
                "mixed.test": ["127.0.0.1", "240.0.0.1"],
            }
            for host in one.names:
                reader, _ = await one.client(f"CONNECT {host}:{peer.port} HTTP/1.1\r\n\r\n".encode())
                assert b"X-Proxy-Error: blocked-by-policy" in await everything(reader)
            assert one.reasons() == ["private_address"] * 2
            assert peer.visits == 0
            assert one.lookups == [
                "evil.test",
                "mixed.test",
            ]  # once each: what was checked is what would be dialled

    run(scene)


def test_a_name_that_is_not_allowed_is_not_even_looked_up() -> None:
    async def scene() -> None:
        async with world(make(allow=["ok.test"])) as one:
            reader, _ = await one.client(b"CONNECT secret.evil.test:443 HTTP/1.1\r\n\r\n")
            assert (await everything(reader)).startswith(b"HTTP/1.1 403 ")
            assert one.lookups == []

    run(scene)


def test_socks_says_why_in_its_codes() -> None:
    def order(host: bytes, port: int) -> bytes:
        return b"\x05\x01\x00" + b"\x05\x01\x00\x03" + bytes([len(host)]) + host + port.to_bytes(2, "big")

    async def scene() -> None:
        closed = socket.create_server(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        closed.close()
        policy = make(allow=["ok.test", "gone.test"], resolve={f"ok.test:{port}": f"127.0.0.1:{port}"})
        async with world(policy) as one:
            for host, code in ((b"evil.test", socks.RULESET), (b"ok.test", socks.REFUSED), (b"gone.test", socks.HOST),
                               (b"ok.test\0x", socks.RULESET)):  # fmt: skip
                reader, _ = await one.client(order(host, port))
                assert await everything(reader) == socks.NO_AUTHENTICATION + socks.reply(code)
            assert one.reasons() == ["not_allowed", "upstream_refused", "upstream_dns"]

    run(scene)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "nested_connect"),
     (b"connect evil.test:443 HTTP/1.1\r\n\r\n", "host_mismatch"),
     (b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "host_mismatch"),
     (b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", "host_mismatch")],
)  # fmt: skip
def test_inside_a_tunnel_nobody_else_is_reached(sent: bytes, reason: str) -> None:
    async def scene() -> None:
        seen = bytearray()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.extend(await reader.read())

        async with (
            Peer(note) as peer,
            world(make(allow=["ok.test"], resolve={"ok.test:9000": peer.address})) as one,
        ):
            reader, writer = await one.tunnel("ok.test", 9000)
            writer.write(sent)
            answer = await everything(reader)
            assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), answer
            await peer.ended.wait()
            assert seen == b""
            if answer.startswith(b"HTTP/1.1 403 "):
                assert reason in one.reasons()

    run(scene)


@pytest.mark.parametrize(("port", "reason"), [(443, "not_tls"), (80, "not_http")])
def test_the_web_ports_carry_the_web_unless_the_rule_says_raw(port: int, reason: str) -> None:
    async def scene() -> None:
        async with Peer(echo) as peer:
            resolve = {f"ok.test:{port}": peer.address}
            async with world(make(allow=["ok.test"], resolve=resolve)) as one:
                reader, writer = await one.tunnel("ok.test", port)
                writer.write(b"\x00\x01binary")
                assert await everything(reader) in (b"", b"<reset>")
                assert one.reasons()[-1] == reason
                await one.set_rules(make(allow=["ok.test raw"], resolve=resolve))
                reader, writer = await one.tunnel("ok.test", port)
                writer.write(b"\x00\x01binary")
                writer.write_eof()
                assert await everything(reader) == b"\x00\x01binary"

    run(scene)


def test_a_trickling_head_is_cut_and_a_quick_one_is_not() -> None:
    async def scene() -> None:
        async with Peer(echo) as peer:
            policy = make(allow=["ok.test"], resolve={"ok.test:9000": peer.address})
            async with world(policy, header_s=0.3) as one:
                slow, _ = await one.client(b"GET http://ok.test/ HTTP/1.1\r\nX: ")
                greeting, _ = await one.client(b"\x05\x03")
                nothing, _ = await one.client()
                assert (await everything(slow)).startswith(b"HTTP/1.1 408 ")
                assert await everything(greeting) in (b"", b"<reset>")
                assert await everything(nothing) in (b"", b"<reset>")
                assert peer.visits == 0
                reader, writer = await one.tunnel("ok.test", 9000)
                writer.write(b"\x01")
                assert await reader.readexactly(1) == b"\x01"

    run(scene)


def test_an_idle_connection_ends() -> None:
    async def scene() -> None:
        async with served(silent, idle_s=0.3) as (peer, one):
            await one.tell({"op": "configure", "options": {"limits": {"idle_s": 0.3}}})
            one.proxy._sweep()
            reader, writer = await one.tunnel("ok.test", 9000)
            writer.write(b"\x01")
            assert await everything(reader) in (b"", b"<reset>")
            await peer.ended.wait()

    run(scene)


def test_connections_beyond_the_limit_are_turned_away() -> None:
    async def scene() -> None:
        async with Peer(echo) as peer:
            policy = make(allow=["ok.test"], resolve={"ok.test:9000": peer.address})
            async with world(policy, connections=3) as one:
                held = [await one.tunnel("ok.test", 9000) for _ in range(3)]
                with contextlib.suppress(ConnectionResetError):
                    reader, _ = await one.client(b"CONNECT ok.test:9000 HTTP/1.1\r\n\r\n")
                    assert await everything(reader) in (b"", b"<reset>")
                await one.until(lambda: "too_many_connections" in one.reasons())
                held[0][1].close()
                await one.until(lambda: any(record.stage == "closed" for record in one.records))
                await one.tunnel("ok.test", 9000)

    run(scene)


def test_records_are_bounded_and_what_was_dropped_is_counted() -> None:
    async def scene() -> None:
        async with world(make(), records_per_s=5) as one:
            for number in range(40):
                reader, _ = await one.client(f"CONNECT h{number}.test:443 HTTP/1.1\r\n\r\n".encode())
                await everything(reader)
            assert len(one.records) < 40
            one.proxy._sandboxes["s1"].tokens = 5
            reader, _ = await one.client(b"CONNECT last.test:443 HTTP/1.1\r\n\r\n")
            await everything(reader)
            await one.until(lambda: one.records[-1].host == "last.test")
            assert len(one.records) + sum(record.dropped for record in one.records) == 41

    run(scene)


# ── caps ──


def test_an_upload_cap_holds_for_tunnels_and_requests() -> None:
    async def scene() -> None:
        received = bytearray()

        async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                received.extend(data)

        async with Peer(sink) as peer:
            resolve = {"ok.test:9000": peer.address, "ok.test:80": peer.address}
            async with world(make(allow=["ok.test upload_bytes=1000"], resolve=resolve)) as one:
                reader, writer = await one.tunnel("ok.test", 9000)
                writer.write(b"\x01" + b"x" * 100_000)
                assert await everything(reader) in (b"", b"<reset>")
                assert len(received) <= 1000
                await one.until(lambda: one.records[-1].stage == "closed")
                assert one.reasons() == ["allowed", "upload_limit", "upload_limit"]
                before = peer.visits
                reader, _ = await one.client(
                    b"POST http://ok.test/ HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 5000\r\n\r\n"
                )
                assert (await everything(reader)).startswith(b"HTTP/1.1 413 ")
                assert peer.visits == before

    run(scene)


def test_memory_does_not_grow_with_the_body() -> None:
    """A reader that does not read: the writer is held back, and nothing piles up in between."""

    async def scene() -> None:
        written = 0

        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await reader.readexactly(1)
            writer.transport.set_write_buffer_limits(0)
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()
                written += 1 << 20

        async with served(flood) as (_, one):
            streams = await one.tunnel("ok.test", 9000)
            reader, writer = streams
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"\x01")
            (talk,) = one.proxy._sandboxes["s1"].conversations
            assert talk._relay is not None
            down = talk._relay.down
            async with asyncio.timeout(20):
                while not (down._held or down._piped):
                    await asyncio.sleep(0.01)
            assert len(down._held) <= 256 * 1024
            assert down._piped <= 1 << 20
            assert written < 64 << 20  # kernel buffers, and no more
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            total = 0
            while total < 64 << 20:
                total += len(await reader.read(1 << 20))

    run(scene)


# ── faithful bytes ──


def test_half_close_travels_both_ways() -> None:
    async def scene() -> None:
        async def after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.read()
            writer.write(b"heard %d" % len(data))

        async with served(after_the_end) as (_, one):
            reader, writer = await one.tunnel("ok.test", 9000)
            writer.write(b"\x01" * 3_000_000)
            writer.write_eof()
            assert await everything(reader) == b"heard 3000000"
            await one.until(lambda: one.records[-1].stage == "closed")
            assert (one.records[-1].bytes_up, one.records[-1].bytes_down) == (3_000_000, 13)

    run(scene)


def test_large_bodies_arrive_whole_by_copy_and_by_splice() -> None:
    async def scene() -> None:
        async with served(echo) as (_, one):
            reader, writer = await one.tunnel("ok.test", 9000)
            block = bytes(range(256)) * 4096
            sent = b"\x01" + block * 12

            async def send() -> None:
                writer.write(sent)
                await writer.drain()
                writer.write_eof()

            task = asyncio.create_task(send())
            assert await everything(reader) == sent
            await task

    run(scene)


def test_a_server_may_speak_first() -> None:
    async def scene() -> None:
        async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 ready\r\n")
            assert await reader.readline() == b"EHLO x\r\n"
            writer.write(b"250 ok\r\n")

        async with served(banner) as (_, one):
            reader, writer = await one.tunnel("ok.test", 25)
            assert await reader.readline() == b"220 ready\r\n"
            writer.write(b"EHLO x\r\n")
            assert await reader.readline() == b"250 ok\r\n"

    run(scene)


@pytest.mark.parametrize("phase", ["tunnel", "request"])
def test_a_client_that_goes_away_frees_the_server(phase: str) -> None:
    async def scene() -> None:
        async with Peer(silent) as peer:
            resolve = {"ok.test:9000": peer.address, "ok.test:80": peer.address}
            async with world(make(allow=["ok.test"], resolve=resolve)) as one:
                if phase == "tunnel":
                    _, writer = await one.tunnel("ok.test", 9000)
                    writer.write(b"\x01")
                else:
                    _, writer = await one.client(b"GET http://ok.test/ HTTP/1.1\r\nHost: ok.test\r\n\r\n")
                    await one.until(lambda: one.records)
                writer.transport.abort()
                async with asyncio.timeout(10):
                    await peer.ended.wait()

    run(scene)


def test_a_websocket_opens_after_the_server_agrees() -> None:
    async def scene() -> None:
        async def chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Upgrade: websocket" in head
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x02hi"
            )
            await echo(reader, writer)

        async with served(chat) as (_, one):
            reader, writer = await one.client(
                b"GET http://ok.test/ws HTTP/1.1\r\nHost: ok.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            writer.write(b"\x81\x03you")
            writer.write_eof()
            assert await everything(reader) == b"\x81\x02hi\x81\x03you"

    run(scene)


def test_one_request_per_connection_and_nothing_after_it() -> None:
    async def scene() -> None:
        seen = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.extend(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            seen.extend(await reader.readexactly(3))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: 5\r\n\r\nok")
            await writer.drain()

        async with served(serve) as (_, one):
            reader, _ = await one.client(
                b"POST http://ok.test/a HTTP/1.1\r\nHost: ok.test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
                b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n"
            )
            answer = await everything(reader)
            assert answer == (
                b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
            )
            assert b"evil" not in seen
            assert seen.startswith(b"POST /a HTTP/1.1\r\n")

    run(scene)


# ── servers that misbehave ──


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"\x00\xff" * 100)


async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.transport.abort()


async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize("talk", [garbage, slam, leave], ids=lambda talk: talk.__name__)
def test_a_misbehaving_server_is_a_clean_502(talk: Talk) -> None:
    async def scene() -> None:
        async with served(talk) as (_, one):
            reader, _ = await one.client(b"GET http://ok.test/ HTTP/1.1\r\nHost: ok.test\r\n\r\n")
            answer = await everything(reader)
            assert answer.startswith(b"HTTP/1.1 502 "), answer
            assert b"X-Proxy-Error: upstream-reset" in answer

    run(scene)


def test_a_body_that_is_cut_off_is_not_taken_for_a_whole_one() -> None:
    async def scene() -> None:
        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            await writer.drain()
            await reader.read(1)

        async with served(cut) as (_, one):
            reader, _ = await one.client(b"GET http://ok.test/ HTTP/1.1\r\nHost: ok.test\r\n\r\n")
            await reader.readuntil(b"half")
            await one.set_rules(make())
            assert await everything(reader) == b"<reset>"

    run(scene)


def test_failures_of_servers_are_told_apart() -> None:
    async def scene() -> None:
        closed = socket.create_server(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        closed.close()
        full = socket.socket()
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler = [socket.socket() for _ in range(4)]
        for one_filler in filler:
            one_filler.setblocking(False)
            one_filler.connect_ex(full.getsockname())
        resolve = {
            "closed.test:80": f"127.0.0.1:{port}",
            "full.test:80": f"127.0.0.1:{full.getsockname()[1]}",
        }
        policy = make(allow=["closed.test", "full.test", "unknown.test"], resolve=resolve)
        async with world(policy, connect_s=0.5) as one:
            for host, status, error in (
                ("closed", 502, "refused"),
                ("full", 504, "timeout"),
                ("unknown", 502, "dns"),
            ):
                reader, _ = await one.client(
                    f"GET http://{host}.test/ HTTP/1.1\r\nHost: {host}.test\r\n\r\n".encode()
                )
                answer = (await everything(reader)).decode()
                assert answer.startswith(f"HTTP/1.1 {status} "), answer
                assert f"X-Proxy-Error: upstream-{error}\r\n" in answer
            assert one.reasons() == ["upstream_refused", "upstream_timeout", "upstream_dns"]
            assert all(record.verdict == "allow" for record in one.records)
        for made in (*filler, full):
            made.close()

    run(scene)


# ── rules that change, sandboxes that go ──


def test_tightening_ends_what_it_refuses_and_spares_the_rest() -> None:
    async def scene() -> None:
        async with Peer(echo) as peer:
            resolve = {"a.test:9000": peer.address, "b.test:9000": peer.address}
            async with world(make(allow=["a.test", "b.test"], resolve=resolve)) as one:
                gone, gone_writer = await one.tunnel("a.test", 9000)
                gone_writer.write(b"\x01")
                await gone.readexactly(1)
                kept, kept_writer = await one.tunnel("b.test", 9000)
                await one.set_rules(make(allow=["b.test"], resolve=resolve))
                assert await everything(gone) in (b"", b"<reset>")
                kept_writer.write(b"\x01")
                assert await kept.readexactly(1) == b"\x01"

    run(scene)


def test_detaching_closes_listeners_and_connections() -> None:
    async def scene() -> None:
        async with served(echo) as (_, one):
            reader, _ = await one.tunnel("ok.test", 9000)
            await one.tell({"op": "detach", "sandbox": "s1"})
            assert await everything(reader) in (b"", b"<reset>")
            one.listener.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", 1)

    run(scene)


@pytest.mark.parametrize("order", [
    {"op": "attach", "sandbox": "x", "sockets": ["proxy"], "rules": {"mode": "rules"}}, {"op": "rules", "sandbox": "nobody", "rules": {}},
    {"op": "attach", "sandbox": "x", "sockets": [], "rules": {"mode": "opne"}}, {"op": "dance"},
    {"op": "configure", "options": {"parent": "socks://x"}}])  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused_and_changes_nothing(order: dict[str, object]) -> None:
    async def scene() -> None:
        async with world(make()) as one:
            assert (await one.tell(order)).error
            assert set(one.proxy._sandboxes) == {"s1"}

    run(scene)


# ── a parent ──


def test_everything_public_goes_through_the_parent() -> None:
    async def scene() -> None:
        asked: list[bytes] = []

        async def parent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head)
            if b"forbidden" in head:
                writer.write(b"HTTP/1.1 407 No\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst")
            await echo(reader, writer)

        async with Peer(parent) as above, Peer(echo) as near:
            policy = make(
                allow=["ok.test", "forbidden.test", "near.test"], resolve={"near.test:9000": near.address}
            )
            async with world(policy, parent=f"http://u:p%40@{above.address}") as one:
                denied, _ = await one.client(b"CONNECT evil.test:9000 HTTP/1.1\r\n\r\n")
                assert (await everything(denied)).startswith(b"HTTP/1.1 403 ")
                refused, _ = await one.client(b"CONNECT forbidden.test:9000 HTTP/1.1\r\n\r\n")
                assert b"X-Proxy-Error: upstream-parent" in await everything(refused)
                reader, writer = await one.tunnel("ok.test", 9000)
                assert await reader.readexactly(5) == b"first"
                writer.write(b"\x01")
                assert await reader.readexactly(1) == b"\x01"
                await one.tunnel("near.test", 9000)
                assert near.visits == 1
                assert [head.split()[1] for head in asked] == [b"forbidden.test:9000", b"ok.test:9000"]
                assert all(b"Proxy-Authorization: Basic dTpwQA==" in head for head in asked)
                assert one.lookups == []

    run(scene)


# ── many, and inside TLS ──


@pytest.mark.slow
def test_a_thousand_tunnels_at_once() -> None:
    async def scene() -> None:
        async with served(echo, connections=1024) as (_, one):
            tunnels = [await one.tunnel("ok.test", 9000) for _ in range(1000)]
            for _, writer in tunnels:
                writer.write(b"\x01x")
            for reader, _ in tunnels:
                assert await reader.readexactly(2) == b"\x01x"

    run(scene)


def test_http2_inside_tls_passes_as_bytes(tmp_path: Path) -> None:
    """ALPN is negotiated end to end, by a proxy that only looked at the name."""
    certificate = room.certificate(tmp_path, "ok.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2"])

    async def scene() -> None:
        server = await asyncio.start_server(echo_once, "127.0.0.1", 0, ssl=context)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with world(make(allow=["ok.test:443"], resolve={"ok.test:443": address})) as one:
            reader, writer = await one.tunnel("ok.test", 443)
            mine = ssl.create_default_context(cafile=str(certificate[0]))
            mine.set_alpn_protocols(["h2", "http/1.1"])
            await writer.start_tls(mine, server_hostname="ok.test")
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            writer.write(b"PRI * HTTP/2.0\r\n\r\n")
            assert await reader.readexactly(18) == b"PRI * HTTP/2.0\r\n\r\n"
            writer.close()
        server.close()

    run(scene)


async def echo_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        writer.write(await reader.read(100))
        await writer.drain()
        await reader.read()
    except (ConnectionError, ssl.SSLError):
        pass
    writer.close()
