"""Tunnels to ports of real sandboxes, in the three ways that a client has: in process, by the unix socket, over HTTP."""

import hashlib
import json
import os
import socket
import subprocess
import threading

import pytest

from cloche import Sandbox, errors
from tests.server import conftest

LISTEN = (
    "import socket,sys; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
)
ECHO = """
import asyncio, sys
async def serve(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        writer.write_eof()
        await writer.drain()
    finally:
        writer.close()
async def main():
    server = await asyncio.start_server(serve, sys.argv[1], 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture(params=["in process", "unix", "http"])
def where(request, served, monkeypatch):
    if request.param == "in process":
        return None
    if request.param == "unix":
        return f"unix:{served.home / 's/cloche.sock'}"
    monkeypatch.setenv("CLOCHE_API_KEY", served.key)
    return served.url


@pytest.fixture
def box(where):
    with Sandbox(server=where) as made:
        yield made


def started(box, *command):
    """Start a program that says its port first."""
    said = b""
    for event in box.start(list(command)).stream():
        said += getattr(event, "data", b"")
        if b"\n" in said:
            return int(said.split()[0])
    raise AssertionError(said)


def echo(box, address="127.0.0.1"):
    return started(box, "python3", "-Ic", ECHO, address)


def code_of(action):
    with pytest.raises(errors.ClocheError) as caught:
        action()
    return caught.value.code


def read_all(tunnel):
    parts = []
    while data := tunnel.read():
        parts.append(data)
    return b"".join(parts)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_sandbox_a_closed_port_and_a_stuck_server_are_three_errors(box, where):
    for port in (0, 70000):
        assert code_of(lambda port=port: box.connect(port)) == "argument_invalid"
        assert code_of(lambda port=port: box.forward(port)) == "argument_invalid"
    with socket.create_server(("127.0.0.1", 0)) as outside:  # the host's loopback is not the sandbox's
        assert code_of(lambda: box.connect(outside.getsockname()[1])) == "port_closed"
    stuck = started(
        box, "python3", "-Ic",
        "import socket; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(0); p=s.getsockname(); a=socket.create_connection(p);"
        "print(p[1], flush=True); input()",
    )  # fmt: skip
    assert code_of(lambda: box.connect(stuck, timeout_s=0.5)) == "wait_timeout"
    assert box.exec("echo still here").stdout == "still here\n"  # the sandbox did not wait with us
    port = echo(box)
    tunnel = box.connect(port)
    dead = Sandbox.get(box.id, server=where)
    dead.delete()
    assert code_of(lambda: read_all(tunnel)) == "sandbox_lost"
    assert code_of(lambda: dead.connect(port)) == "sandbox_lost"
    tunnel.close()


def test_a_driver_without_a_network_of_its_own_says_so():
    with Sandbox(driver="process", minimum_isolation="process") as box:
        assert code_of(lambda: box.connect(80)) == "not_supported_by_driver"
        assert code_of(box.ports) == "not_supported_by_driver"


def test_the_sandboxs_way_out_is_no_way_in(where):
    """What enters there is taken for the sandbox: with what it may reach, and the credentials that are put in for it."""
    with Sandbox(network="open", server=where) as box:
        own = {
            int(line.split()[1].rpartition(":")[2], 16)
            for line in box.exec("cat /proc/net/tcp /proc/net/tcp6").stdout.splitlines()
            if line.split()[3] == "0A"
        }
        assert 3128 in own
        assert box.ports() == []
        for port in own:
            assert code_of(lambda port=port: box.connect(port)) == "port_closed"
        with box.connect(echo(box)) as tunnel:
            tunnel.write("hello")
            assert tunnel.read() == b"hello"
    with Sandbox(server=where) as box:
        server = box.start(["python3", "-Ic", ECHO.replace("sys.argv[1], 0", "'127.0.0.1', 3128")])
        while not box.ports():
            pass
        box.connect(3128).close()
        server.kill()
        server.wait()
        box.policy.update(network="open")
        assert code_of(lambda: box.connect(15001)) == "port_closed"


# ── what is allowed ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0"])
def test_a_port_is_reached_by_either_loopback(box, address):
    port = echo(box, address)
    assert (port, address) in {(info.port, info.address) for info in box.ports()}
    with box.connect(port) as tunnel:
        tunnel.write("hello")
        assert tunnel.read() == b"hello"
        tunnel.end()
        assert read_all(tunnel) == b"bye"


def test_bytes_come_through_whole_in_both_directions_at_once(box):
    size = 30 << 20
    sent = os.urandom(1 << 20) * (size >> 20)
    with box.connect(echo(box)) as tunnel:

        def write():
            tunnel.write(sent)
            tunnel.end()

        writer = threading.Thread(target=write)
        writer.start()
        digest, got = hashlib.sha256(), 0
        while data := tunnel.read():
            digest.update(data[: max(0, size - got)])
            got += len(data)
        writer.join()
    assert got == size + len(b"bye")
    assert digest.hexdigest() == hashlib.sha256(sent).hexdigest()


def test_one_that_nobody_reads_holds_up_no_other(box):
    port = echo(box)
    with box.connect(port) as full, box.connect(port) as free:
        flood = threading.Thread(target=lambda: code_of(lambda: full.write(b"x" * (64 << 20))))
        flood.start()
        for _ in range(50):
            free.write(b"ping")
            assert free.read() == b"ping"
        full.close()
        flood.join(conftest.PATIENCE_S)
        assert not flood.is_alive()


def test_a_server_that_cuts_the_connection_is_told(box):
    port = started(
        box, "python3", "-Ic",
        LISTEN + "import struct; c,_=s.accept(); c.recv(1);"
        "c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii',1,0)); c.close(); input()",
    )  # fmt: skip
    with box.connect(port) as tunnel:
        tunnel.write(b"x")
        assert code_of(lambda: read_all(tunnel)) == "connection_lost"


def test_a_paused_sandbox_wakes(box):
    port = echo(box)
    with box.connect(port) as early:
        box.suspend()
        assert box.info().phase == "paused"
        early.write(b"wake up")
        assert early.read() == b"wake up"
    assert box.info().phase == "running"
    box.suspend()
    with box.connect(port) as late:
        late.write(b"again")
        assert late.read() == b"again"


def test_a_preview_link_needs_a_server(box, where):
    port = echo(box)
    if where is None:
        assert code_of(lambda: box.url(port)) == "server_unavailable"
        return
    assert code_of(lambda: box.url(0)) == "argument_invalid"
    assert code_of(lambda: box.url(port, ttl_s=0)) == "limit_invalid"
    assert box.url(port).startswith(f"http://{port}-{box.id}.localhost:")


def connections(box):
    """How many are open inside, by the kernel's table."""
    return int(box.exec("awk '$4 == \"01\"' /proc/net/tcp /proc/net/tcp6 | wc -l", check=True).stdout)


def test_two_hundred_at_once_and_none_is_left(box, until):
    port = echo(box)
    held = [box.connect(port) for _ in range(200)]
    assert connections(box) == 400  # both ends are inside
    for number, tunnel in enumerate(held):
        tunnel.write(f"{number:04}")
    assert [tunnel.read() for tunnel in held] == [f"{number:04}".encode() for number in range(200)]
    for tunnel in held:
        tunnel.close()
    until(lambda: connections(box) == 0)


def test_a_local_port_is_one_inside(box):
    port = echo(box)
    with box.forward(port) as forward:
        with socket.create_connection(("127.0.0.1", forward.port), timeout=conftest.PATIENCE_S) as link:
            link.sendall(b"over there")
            assert link.recv(100) == b"over there"
            link.shutdown(socket.SHUT_WR)
            assert link.recv(100) == b"bye"
        assert code_of(lambda: box.forward(port, local_port=forward.port)) == "address_unavailable"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", forward.port))


def test_a_local_port_of_a_closed_one_is_reset(box):
    with (
        box.forward(1) as forward,
        socket.create_connection(("127.0.0.1", forward.port), timeout=conftest.PATIENCE_S) as link,
        pytest.raises(ConnectionResetError),
    ):
        assert link.recv(1) != b""


def test_the_command_line_forwards_from_far_away(served, http, monkeypatch):
    monkeypatch.setenv("CLOCHE_API_KEY", served.key)
    far = {
        **served.environment,
        "CLOCHE_URL": served.url,
        "CLOCHE_API_KEY": served.key,
        "CLOCHE_HOME": "/nowhere",
    }
    with Sandbox(server=served.url) as box:
        command = conftest.argv("forward", box.id, str(echo(box)), "1", "--json")
        with subprocess.Popen(
            command, env=far, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            open_, closed = (
                int(json.loads(running.stdout.readline())["address"].rpartition(":")[2]) for _ in range(2)
            )
            with socket.create_connection(("127.0.0.1", open_), timeout=conftest.PATIENCE_S) as link:
                link.sendall(b"far")
                assert link.recv(10) == b"far"
            with (
                socket.create_connection(("127.0.0.1", closed), timeout=conftest.PATIENCE_S) as link,
                pytest.raises(ConnectionResetError),
            ):
                assert link.recv(1) != b""
            running.terminate()
            assert running.wait(conftest.PATIENCE_S) == 0
            assert "nothing listens on port 1 " in running.stderr.read()
