"""The engine's side: a proxy that is killed, that cannot start, that lies; and what the sandboxes have meanwhile."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import errors
from cloche.egress import process
from cloche.guest import wire
from cloche.policy import rules
from tests.egress import room

make = rules.RuleSet.make


@pytest.fixture
def inside() -> Iterator[room.Inside]:
    made = room.Inside("user", "explicit")
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[room.Server]:
    with room.serving() as made:
        yield made


CURL = ("curl", "-sS", "-f", "--max-time", "20", "http://ok.test/x")


def test_a_killed_proxy_comes_back_with_the_same_listeners_and_the_current_rules(
    inside: room.Inside, server: room.Server
) -> None:
    async def scene() -> None:
        async with room.egress(inside, make()) as egress:
            resolve = {"ok.test:80": server.address}
            assert (await inside.arun(*CURL, proxy=True)).code != 0
            await egress.process.update("s1", make(allow=["ok.test"], resolve=resolve))
            assert (await inside.arun(*CURL, proxy=True)).code == 0
            old = egress.process.pid
            os.kill(old, signal.SIGKILL)
            # Asked while there is none: it waits in the listener that the engine holds, and nothing else answers.
            served = await inside.arun(*CURL, proxy=True)
            assert served.code == 0, served.err
            assert egress.process.pid not in (0, old)
            assert "no network until it is back" in egress.faults[0]

    asyncio.run(scene())


def test_without_a_proxy_there_is_no_network(inside: room.Inside, server: room.Server) -> None:
    async def scene() -> None:
        resolve = {"ok.test:80": server.address}
        async with room.egress(inside, make(allow=["ok.test"], resolve=resolve)) as egress:
            os.kill(egress.process.pid, signal.SIGSTOP)
            refused = await inside.arun(*CURL[:-3], "--max-time", "1", CURL[-1], proxy=True)
            direct = await inside.arun("curl", "-sS", "--max-time", "1", f"http://{server.address}/")
            assert refused.code != 0
            assert direct.code != 0
            assert server.connections == 0
        # Closed for good: the listeners are gone with the engine's duplicates, but for the test's own.
        assert server.connections == 0

    asyncio.run(scene())


def test_a_proxy_that_cannot_start_is_an_error_for_those_who_wait_and_is_tried_again() -> None:
    async def scene() -> None:
        faults: list[str] = []
        attempts = 0

        def failing_twice() -> process.Spawned:
            nonlocal attempts
            attempts += 1
            if attempts <= 2:
                raise OSError(12, "no memory")
            return process.spawn()

        egress = process.EgressProcess(start=failing_twice, on_fault=faults.append)
        listener = socket.create_server(("127.0.0.1", 0))
        try:
            for _ in range(2):
                with pytest.raises(errors.ClocheError) as caught:
                    await egress.attach("s1", [("proxy", listener)], make())
                assert caught.value.code == "network_unavailable"
            await egress.attach("s1", [("proxy", listener)], make())
            assert egress.pid
            assert len(faults) == 3
            assert faults[-1] == ""
        finally:
            await egress.aclose()
            listener.close()

    asyncio.run(scene())


@pytest.mark.parametrize("lie", [b"not json", b'{"decision":{"sandbox":5}}', b'{"done":"x"}', b"[]"])
def test_a_proxy_that_talks_nonsense_is_replaced(lie: bytes) -> None:
    async def scene() -> None:
        ends: list[socket.socket] = []

        def liar() -> process.Spawned:
            if ends:
                return process.spawn()
            here, there = wire.pair()
            ends.append(there)
            there.send(lie)
            pid = os.posix_spawn(
                sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"], {}
            )
            return process.Spawned(here, pid)

        faults: list[str] = []
        egress = process.EgressProcess(start=liar, on_fault=faults.append)
        try:
            with pytest.raises(errors.ClocheError):
                await egress.start()
            await egress.start()
            assert faults
            assert len(ends) == 1
        finally:
            await egress.aclose()
            ends[0].close()

    asyncio.run(scene())


def test_attaching_many_at_once_while_it_starts() -> None:
    async def scene() -> None:
        egress = process.EgressProcess()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
        try:
            await asyncio.gather(
                *(
                    egress.attach(f"s{number}", [("proxy", one)], make())
                    for number, one in enumerate(listeners)
                )
            )
            for one in listeners:
                reader, writer = await asyncio.open_connection(*one.getsockname())
                writer.write(b"CONNECT a.test:443 HTTP/1.1\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
                writer.close()
            await egress.detach("s0")
            await egress.detach("s0")
            with pytest.raises(errors.ClocheError):
                await egress.update("s0", make())
        finally:
            await egress.aclose()
            await egress.aclose()
            for one in listeners:
                one.close()

    asyncio.run(scene())


def test_large_rule_sets_arrive_and_absurd_ones_are_refused() -> None:
    async def scene() -> None:
        egress = process.EgressProcess()
        listener = socket.create_server(("127.0.0.1", 0))
        try:
            with pytest.raises(errors.ClocheError) as caught:
                await egress.attach(
                    "s1", [("proxy", listener)], make(deny=["a.org reason=" + "x" * (3 << 20)])
                )
            assert caught.value.code == "policy_invalid"
            assert egress.pid == 0
            await egress.attach(
                "s1", [("proxy", listener)], make(deny=[f"host-{n}.example.org" for n in range(20_000)])
            )
        finally:
            await egress.aclose()
            listener.close()

    asyncio.run(scene())


def test_the_proxy_does_not_stay_root_and_sees_nothing_of_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")

    async def scene() -> None:
        async with room.egress() as egress:
            proc = Path(f"/proc/{egress.process.pid}")
            status = dict(
                line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
            )
            if os.geteuid() == 0:
                assert status["Uid"].split() == ["65534"] * 4
                assert status["Groups"].split() == []
                assert int(status["CapEff"], 16) == 0
                assert int(status["CapPrm"], 16) == 0
                assert b"SECRET_TOKEN" not in (proc / "environ").read_bytes()

    asyncio.run(scene())


def test_it_ends_with_its_engine() -> None:
    here, pid = process.spawn()
    here.close()
    assert os.waitpid(pid, 0)[0] == pid
