"""TCP ports inside a sandbox, seen from the host: a connection on its way, and the kernel's table of listeners.

The socket was made inside, so the inside may share it and set it to block at any time. Nothing here waits in a system call for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

MOST_OF_A_TABLE = 1 << 20  # some 7,000 sockets
_LISTENS = "0A"


async def connected(fd: int) -> int:
    """The descriptor, once the connection is there; closed, and OSError, where it does not come about."""
    loop = asyncio.get_running_loop()
    there: asyncio.Future[None] = loop.create_future()
    loop.add_writer(fd, _settle, there)
    try:
        await there
        with socket.socket(fileno=os.dup(fd)) as shown:
            problem = shown.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
    except BaseException:
        loop.remove_writer(fd)
        os.close(fd)
        raise
    loop.remove_writer(fd)
    return fd


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def listeners(table: bytes) -> set[tuple[str, int]]:
    """(address, port) of what listens, by `/proc/net/tcp` or `tcp6`. Lines that are no such lines are passed over."""
    found = set()
    for line in table.decode("ascii", "replace").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTENS:
            address, _, port = fields[1].partition(":")
            try:
                found.add((_address(address), int(port, 16) & 0xFFFF))
            except ValueError:
                continue
    return found


def _address(digits: str) -> str:
    """The kernel prints an address as numbers of its own byte order, 32 bits each."""
    if len(digits) not in (8, 32):
        raise ValueError("not an address")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
