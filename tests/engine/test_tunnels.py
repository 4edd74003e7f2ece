"""Tunnels where time and the machine's end decide: over fakes, with simulated time."""

import asyncio
import os
import socket

import pytest

from cloche import errors
from cloche.engine import tunnels
from cloche.testing.fakes import FakeDriver, Script
from tests.engine.test_suspending import Own


class Fake(Own):
    """An engine over a fake driver; port 80 of every machine listens."""

    def __init__(self, home):
        self.driver = FakeDriver({"true": Script()})
        super().__init__(home, drivers=[("fake", lambda: self.driver)])

    def dial(self, sandbox, port=80):
        self.driver.machines[-1].ports.setdefault(80, [])
        return self.do(self.engine.dial(sandbox, port))

    def far(self):
        far = self.driver.machines[-1].ports[80][-1]
        far.settimeout(20)
        return far


@pytest.fixture
def own(cloche_home):
    made = Fake(cloche_home / f"tunnels-{os.urandom(3).hex()}")
    yield made
    made.close()
    for machine in made.driver.machines:
        for far in machine.ports.get(80, []):
            far.close()


def code_of(work, own):
    with pytest.raises(errors.ClocheError) as caught:
        own.do(work)
    return caught.value.code


def test_what_is_no_port_and_who_is_not_there(own):
    box = own.create()
    for port in (0, -1, 65536, 70000):
        assert code_of(own.engine.dial(box, port), own) == "argument_invalid"
    assert code_of(own.engine.dial(box, 80, timeout_s=0), own) == "limit_invalid"
    assert code_of(own.engine.dial(box, 81), own) == "port_closed"
    assert code_of(own.engine.dial("nobody", 80), own) == "sandbox_not_found"
    own.do(own.engine.delete(box))
    assert code_of(own.engine.dial(box, 80), own) == "sandbox_lost"
    recorded = str(own.do(own.engine.events(0)))
    assert "argument_invalid" in recorded
    assert "port_closed" not in recorded  # who waits for a server asks again and again


def test_a_link_needs_a_server(own):
    assert code_of(own.engine.link(own.create(), 80), own) == "server_unavailable"


def test_one_sandbox_has_so_many_tunnels(own, monkeypatch):
    monkeypatch.setattr(tunnels, "MOST", 2)
    box = own.create()
    held = [own.dial(box) for _ in range(2)]
    assert code_of(own.engine.dial(box, 80), own) == "capacity_exceeded"
    own.do(held[0].aclose())
    own.do(own.dial(box).aclose())
    own.do(held[1].aclose())


def test_bytes_wake_and_count_and_silence_does_not(own):
    box = own.create(idle_timeout_s=100)
    tunnel = own.dial(box)
    own.pass_time(60)
    own.far().sendall(b"x")
    assert own.do(tunnel.read()) == b"x"
    own.pass_time(60)
    own.do(own.engine.suspend(box))
    assert own.phase(box) == "paused"
    own.do(tunnel.write(b"hello"))
    assert own.far().recv(10) == b"hello"
    assert own.phase(box) == "running"
    own.do(own.engine.suspend(box))
    own.do(own.dial(box).aclose())
    assert own.phase(box) == "running"
    own.pass_time(101)
    assert code_of(own.engine.info(box), own) == "sandbox_lost"
    assert code_of(tunnel.read(), own) == "sandbox_lost"


@pytest.mark.parametrize("end", ["delete", "fail", "close"])
def test_who_waits_hears_of_the_end_and_nothing_is_left(own, end):
    box = own.create()
    tunnel = own.dial(box)

    async def wait():
        reading = asyncio.ensure_future(tunnel.read())
        await asyncio.sleep(0)
        if end == "delete":
            await own.engine.delete(box)
        elif end == "fail":
            own.driver.machines[-1].fail("the host lost power")
        else:
            await tunnel.aclose()
        await reading

    code = code_of(wait(), own)
    assert code == ("connection_lost" if end == "close" else "sandbox_lost")
    assert code_of(tunnel.write(b"x"), own) == code
    own.do(tunnel.aclose())
    assert tunnel._sock.fileno() == -1
    assert own.far().recv(1) == b""


def test_each_direction_ends_by_itself(own):
    box = own.create()
    tunnel = own.dial(box)
    own.do(tunnel.write(b"last words"))
    own.do(tunnel.end())
    own.do(tunnel.end())
    assert own.far().recv(100) == b"last words"
    assert own.far().recv(100) == b""
    own.far().sendall(b"answer")
    own.far().shutdown(socket.SHUT_WR)
    assert own.do(tunnel.read(3)) == b"ans"
    assert own.do(tunnel.read()) == b"wer"
    assert own.do(tunnel.read()) == b""
    own.do(tunnel.aclose())


def test_who_does_not_read_makes_the_other_wait(own):
    box = own.create()
    tunnel = own.dial(box)
    size = 20 << 20

    async def write():
        writing = asyncio.ensure_future(tunnel.write(b"x" * size))
        done, _ = await asyncio.wait((writing,), timeout=0.2)
        assert not done
        return writing

    writing = own.do(write())
    got = 0
    while got < size:
        got += len(own.far().recv(1 << 20))

    async def finish():
        await writing

    own.do(finish())
    own.do(tunnel.aclose())


def test_a_socket_that_the_inside_sets_to_block_blocks_nobody(own):
    box = own.create()
    tunnel = own.dial(box)
    tunnel._sock.setblocking(True)  # as the inside could, which has the same one

    async def read():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(tunnel.read(), 0.1)

    own.do(read())
    own.do(tunnel.aclose())
