"""A tunnel: one connection to a port inside, on the host's side.

Invariants:

* The socket came from inside and may be shared with it, so no call on it may block whatever the inside sets it to: each says
  so itself (MSG_DONTWAIT), and waiting is the event loop's.
* Nothing is buffered here. What nobody reads stays in the kernel's buffers, and TCP tells the other side.
* Nobody gets to the sandbox's way out from outside: what enters there is taken for the sandbox and gets its credentials.
* A tunnel belongs to a machine and ends with it: archived, restored, killed or lost. Bytes are use of the sandbox and wake it; an
  open tunnel on which nothing moves is not.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from cloche import errors, interfaces
from cloche.engine import sandboxes

MOST = 1000  # of one sandbox: each is a descriptor of the engine's
_DIRECT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


async def dial(sandbox: sandboxes.Sandbox, port: int, timeout_s: float) -> Tunnel:
    if len(sandbox.tunnels) >= MOST:
        raise errors.error(
            "capacity_exceeded",
            f"sandbox {sandbox.id} has {MOST} open connections to its ports",
            hint="close some; each HTTP request through a port is one while it lasts",
        )
    async with sandbox.use() as machine:
        _refuse_own(sandbox, port)
        try:
            async with asyncio.timeout(timeout_s):
                fd = await machine.connect(port)
        except TimeoutError:
            raise errors.error(
                "wait_timeout",
                f"what listens on port {port} inside accepted no connection within {timeout_s:g} s",
                hint="it is there, but busy or stuck",
                port=port,
            ) from None
    tunnel = Tunnel(fd, sandbox)
    try:
        _refuse_own(sandbox, port)  # it may have been given a network meanwhile
    except errors.ClocheError:
        await tunnel.aclose()
        raise
    return tunnel


def _refuse_own(sandbox: sandboxes.Sandbox, port: int) -> None:
    if port in sandbox.own_ports:
        raise errors.error(
            "port_closed",
            f"port {port} inside is the entrance to the sandbox's own network, and is for what runs inside",
            hint="let the server inside listen on another port",
            port=port,
        )


class Tunnel(interfaces.Tunnel):
    def __init__(self, fd: int, sandbox: sandboxes.Sandbox) -> None:
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self._problem: errors.ClocheError | None = None
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        if self._sock.family != socket.AF_UNIX:  # which fakes have
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sandbox.tunnels.add(self)

    async def read(self, most: int = 1 << 16) -> bytes:
        async with self._reading:
            while True:
                self._check()
                try:
                    data = self._sock.recv(max(1, most), _DIRECT)
                except (BlockingIOError, InterruptedError):
                    await self._ready(self._loop.add_reader, self._loop.remove_reader)
                except OSError as problem:
                    raise self._cut(problem) from None
                else:
                    if not data and self._sandbox.phase in ("deleted", "lost"):
                        raise lost(self._sandbox)
                    self._sandbox.touch()
                    return data

    async def write(self, data: bytes) -> None:
        async with self._writing:
            left = memoryview(data)
            while left:
                self._check()
                await self._sandbox.wake()
                self._check()
                try:
                    left = left[self._sock.send(left, _DIRECT) :]
                except (BlockingIOError, InterruptedError):
                    await self._ready(self._loop.add_writer, self._loop.remove_writer)
                except OSError as problem:
                    raise self._cut(problem) from None
                else:
                    self._sandbox.touch()

    async def end(self) -> None:
        async with self._writing:
            self._check()
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # it is cut; who reads is told

    async def aclose(self) -> None:
        self.fail(errors.error("connection_lost", "the tunnel was closed here"))

    def fail(self, problem: errors.ClocheError) -> None:
        """End it; whoever waits for it gets the problem."""
        if self._problem is not None:
            return
        self._problem = problem
        self._sandbox.tunnels.discard(self)
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for waiting in self._waiting:
            _settle(waiting)

    async def _ready(self, add: Callable[..., None], remove: Callable[..., bool]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(ready)
        add(self._sock, _settle, ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if self._problem is None:
                remove(self._sock)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _cut(self, problem: OSError) -> errors.ClocheError:
        if self._sandbox.phase in ("deleted", "lost"):
            return lost(self._sandbox)
        words = problem.strerror or str(problem)
        return errors.error("connection_lost", f"the connection to the port was cut inside ({words})")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def lost(sandbox: sandboxes.Sandbox) -> errors.ClocheError:
    return errors.error(
        "sandbox_lost", f"sandbox {sandbox.id} has ended: {sandbox.reason}", hint="create another"
    )
