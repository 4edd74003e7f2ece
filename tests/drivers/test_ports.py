"""What a guest answers when it is asked for a connection, and what the kernel's table says."""

import asyncio
import os
import socket

import pytest

from cloche import errors
from cloche.drivers import link, ports


@pytest.mark.parametrize("kind", ["nothing", "file", "unix", "datagram"])
def test_what_is_no_tcp_socket_is_refused_and_closed(kind, tmp_path):
    made: list[int] = []
    if kind == "file":
        made = [os.open(tmp_path, os.O_RDONLY)]
    elif kind == "unix":
        made = [end.detach() for end in socket.socketpair()]
    elif kind == "datagram":
        made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()]
    with pytest.raises(errors.ClocheError) as caught:
        link.only_tcp(list(made))
    assert caught.value.code == "guest_misbehaved"
    for fd in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_tcp_socket_is_taken_and_what_came_with_it_is_closed():
    with socket.socket() as sock:
        extra, other = os.pipe()
        os.close(other)
        kept = link.only_tcp([os.dup(sock.fileno()), extra])
        os.close(kept)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(extra)


def test_a_connection_that_does_not_come_about_is_closed():
    async def attempt():
        with socket.create_server(("127.0.0.1", 0)) as gone:
            where = gone.getsockname()
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(where)
        fd = sock.detach()
        with pytest.raises(ConnectionRefusedError):
            await ports.connected(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    asyncio.run(attempt())


def test_only_listeners_count_and_nonsense_is_passed_over():
    table = b"""  sl  local_address rem_address   st
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000
   1: 00000000:0050 00000000:0000 0A 00000000:00000000
   2: 0100007F:1F41 0100007F:9999 01 00000000:00000000
   3: 00000000000000000000000001000000:1F42 00000000000000000000000000000000:0000 0A x
   4: zz:zz 00000000:0000 0A
   5: 0100:1F43 00000000:0000 0A
\xff\xff nonsense
"""
    assert ports.listeners(table) == {("127.0.0.1", 8000), ("0.0.0.0", 80), ("::1", 8002)}
    assert ports.listeners(b"") == set()
