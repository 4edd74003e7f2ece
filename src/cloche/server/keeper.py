"""The keeper: one engine per state directory behind a unix socket, gone when nobody needs it.

A connection is one client. Sandboxes that a client made and did not ask to stay end with its connection; an execution
in a sandbox that stays survives a disconnect. Peers must have the server's own uid. `run` is the thin client's whole
conversation: one message out, raw output back, one result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from cloche import __version__, errors, framing, interfaces, model, rpc

_CHUNK = 1 << 18
_HIGH_WATER = 4 << 20


class Engine(Protocol):
    """What the keeper asks of an engine beyond `interfaces.Backend`."""

    @property
    def live(self) -> int: ...


class Keeper:
    def __init__(self, backend: interfaces.Backend, engine: Engine, *, idle_exit_s: float | None) -> None:
        self._backend = backend
        self._engine = engine
        self._idle_exit_s = idle_exit_s
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._idle = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, path: str) -> None:
        """Listen until idle for long enough, or told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._idle.set)
        self._server = await asyncio.start_unix_server(self._accept, sock=listen(path))
        self.look_again()
        try:
            await self._idle.wait()
        finally:
            self._server.close()
            # The name goes before the engine: who comes now starts another keeper instead of meeting a dying one.
            with suppress(OSError):
                os.unlink(path)
            for connection in list(self._connections):
                connection.close()
            await self._backend.aclose()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self._backend, writer)
        self._connections.add(connection)
        self.look_again()
        try:
            if _peer_uid(writer) not in (os.geteuid(), 0):
                connection.fail(0, errors.error("peer_refused", "this socket serves its owner only"))
                return
            await connection.run(reader)
        finally:
            await connection.finish()
            self._connections.discard(connection)
            self.look_again()

    def look_again(self) -> None:
        """Start, or stop, the countdown to leaving."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._idle_exit_s is not None and not self._connections:
            self._timer = asyncio.get_running_loop().call_later(self._idle_exit_s, self._maybe_leave)

    def _maybe_leave(self) -> None:
        if self._engine.live == 0 and not self._connections:
            self._idle.set()
        else:
            self.look_again()


class Connection:
    """One client: its calls under way, and the sandboxes that end with it."""

    def __init__(self, backend: interfaces.Backend, writer: asyncio.StreamWriter) -> None:
        self._backend = backend
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._inputs: dict[int, asyncio.Queue[tuple[int, bytes]]] = {}
        self._owned: set[str] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        frames = framing.Reader()
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                for kind, channel, body in frames.feed(data):
                    self._take(kind, channel, body)

    def _take(self, kind: int, channel: int, body: bytes) -> None:
        if kind == framing.CALL:
            self._inputs[channel] = asyncio.Queue()
            task = asyncio.get_running_loop().create_task(self._serve(channel, body), name=f"call {channel}")
            self._calls[channel] = task
        elif kind in (framing.INPUT, framing.CONTROL) and channel in self._inputs:
            self._inputs[channel].put_nowait((kind, body))
        elif kind == framing.CANCEL and channel in self._calls:
            self._calls[channel].cancel()

    async def _serve(self, channel: int, body: bytes) -> None:
        try:
            call = rpc.decode_call(body)
            if call.protocol != framing.PROTOCOL:
                raise errors.error(
                    "server_version_mismatch", f"the keeper speaks protocol {framing.PROTOCOL}, the client {call.protocol}"
                )
            await self._answer(channel, call)
        except errors.ClocheError as problem:
            self.fail(channel, problem)
        except asyncio.CancelledError:
            raise
        except Exception as problem:
            self.fail(channel, errors.error("internal_error", f"{type(problem).__name__}: {problem}"))
        finally:
            self._calls.pop(channel, None)
            self._inputs.pop(channel, None)

    async def _answer(self, channel: int, call: rpc.Call) -> None:
        if call.method == "hello":
            self.send(framing.RESULT, channel, {"protocol": framing.PROTOCOL, "version": __version__, "pid": os.getpid()})
        elif call.method == "run":
            await self._run(channel, rpc.decode_arguments(call.arguments, rpc.RunArguments))
        else:
            method = rpc.methods().get(call.method)
            if method is None:
                raise errors.error("argument_invalid", f"there is no method {call.method!r}")
            await self._invoke(channel, method, rpc.decode_arguments(call.arguments, method.parameters))

    async def _invoke(self, channel: int, method: rpc.Method, arguments: Any) -> None:
        named = {field: getattr(arguments, field) for field in arguments.__struct_fields__}
        answer = getattr(self._backend, method.name)(**named)
        if method.streams:
            async for item in answer:
                self.send(framing.ITEM, channel, item)
                await self._writer.drain()
            self.send(framing.END, channel, None)
            return
        result = await answer
        if method.name == "create" and not arguments.spec.stay:
            self._owned.add(result.id)
        self.send(framing.RESULT, channel, result)

    # ── run: one command, attached ──────────────────────────────────────────────────────────────

    async def _run(self, channel: int, arguments: rpc.RunArguments) -> None:
        sandbox, execution = arguments.sandbox, arguments.execution
        made = None
        if sandbox is None:
            if arguments.spec is None:
                raise errors.error("argument_invalid", "run needs a sandbox or a spec")
            made = await self._backend.create(arguments.spec)
            sandbox = made.id
            self._owned.add(sandbox)
        if execution is None:
            if arguments.request is None:
                raise errors.error("argument_invalid", "run needs an execution or a request")
            execution = (await self._backend.start(sandbox, arguments.request)).id
        self.send(framing.ITEM, channel, {"sandbox": sandbox, "execution": execution})
        feeding = asyncio.get_running_loop().create_task(self._feed(channel, sandbox, execution), name=f"input {channel}")
        try:
            async for event in self._backend.attach(sandbox, execution, arguments.after):
                await self._forward(channel, event)
        finally:
            feeding.cancel()
            if made is not None and not arguments.keep:
                # The answer does not wait for the sandbox's end; the connection's end makes sure of it.
                task = asyncio.get_running_loop().create_task(self._drop(sandbox), name=f"drop {sandbox}")
                _background.add(task)
                task.add_done_callback(_background.discard)
            elif made is not None:
                self._owned.discard(sandbox)

    async def _forward(self, channel: int, event: model.StreamEvent) -> None:
        match event:
            case model.Output(stream=stream, data=data):
                self._writer.write(framing.pack(framing.STDOUT if stream == "stdout" else framing.STDERR, channel, data))
                if self._writer.transport.get_write_buffer_size() > _HIGH_WATER:
                    await self._writer.drain()
            case model.Exited(result=result):
                bare = msgspec.structs.replace(result, stdout_bytes=b"", stderr_bytes=b"")
                self.send(framing.RESULT, channel, {"result": bare, "code": result.shell_code})
            case _:
                self.send(framing.ITEM, channel, event)

    async def _feed(self, channel: int, sandbox: str, execution: str) -> None:
        queue = self._inputs[channel]
        while True:
            kind, body = await queue.get()
            with suppress(errors.ClocheError):
                if kind == framing.INPUT:
                    await self._backend.write_stdin(sandbox, execution, body, not body)
                else:
                    await self._control(sandbox, execution, msgspec.json.decode(body))

    async def _control(self, sandbox: str, execution: str, order: dict[str, Any]) -> None:
        if "signal" in order:
            await self._backend.signal(sandbox, execution, int(order["signal"]), bool(order.get("tree")))
        elif "columns" in order:
            await self._backend.resize(sandbox, execution, int(order["columns"]), int(order["rows"]))

    # ── sending and ending ──────────────────────────────────────────────────────────────────────

    def send(self, kind: int, channel: int, message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(framing.pack(kind, channel, msgspec.json.encode(message)))

    def fail(self, channel: int, problem: errors.ClocheError) -> None:
        self.send(framing.ERROR, channel, problem.to_dict())

    def close(self) -> None:
        self._writer.close()

    async def finish(self) -> None:
        for task in list(self._calls.values()):
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await asyncio.gather(*(self._drop(sandbox) for sandbox in list(self._owned)))
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _drop(self, sandbox: str) -> None:
        self._owned.discard(sandbox)
        with suppress(errors.ClocheError):
            await self._backend.delete(sandbox)


_background: set[asyncio.Task[None]] = set()


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, for its owner only. A stale one is replaced: the caller holds the state's lock."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(mask)
    sock.listen(256)
    return sock


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


