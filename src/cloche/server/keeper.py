"""The keeper: one engine per state directory behind a unix socket, gone when nobody needs it.

A connection is one client. Sandboxes that a client made and did not ask to stay end with its connection; an execution
in a sandbox that stays survives a disconnect. Peers must have the server's own uid. `run` is the thin client's whole
conversation: one message out, raw output back, one result (framing.py has the frames, design/0004 the reasons).

`Connection` is also what the command line serves itself from when no keeper is there, over a socket pair.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, cast

import msgspec

from cloche import __version__, errors, events, framing, interfaces, model, rpc, settings
from cloche.server import leaving, refusals
from cloche.server.leaving import Leaving

_CHUNK = 1 << 18
_PIECE = 1 << 16
_MOST_QUEUED = 4 * framing.WINDOW
_HIGH_WATER = 1 << 20  # asyncio moves what is left to the front after every send: more would cost more
_SEND_BUFFER = 1 << 20
_BACKLOG = 256
_MAKING = ("create", "claim", "put_pool")
_OWN = ("hello", "stop", "run")
_ENDLESS = ("follow_events", "watch_files", "follow_asks")


class Engine(Protocol):
    """What the keeper asks of an engine beyond `interfaces.Backend`."""

    @property
    def live(self) -> int: ...

    @property
    def staying(self) -> int: ...


Observe = Callable[[str, str], None]
"""Told of every call that was answered: its name, and `ok` or the code of what went wrong."""


class Keeper:
    """Listens, counts who is there, and leaves when nobody is."""

    def __init__(
        self,
        backend: interfaces.Backend,
        engine: Engine,
        *,
        idle_exit_s: float | None,
        defaults: settings.Defaults | None = None,
        observe: Observe | None = None,
        leaving: Leaving | None = None,
        http: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        """`leaving`: how to end, with patience; without it, at once. `http`: who talks to those that speak HTTP on the socket."""
        self._patience = leaving
        self._http = http
        self._observe = observe
        self._backend = backend
        self._engine = engine
        self._idle_exit_s = idle_exit_s
        self._defaults = defaults or settings.Defaults()
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._leaving = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, path: str, before_end: Callable[[], Awaitable[None]] | None = None) -> None:
        """Listen until idle for long enough, or told to stop. `before_end`: what else serves this engine leaves first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_leave)
        self._server = await loop.create_unix_server(self._meet, sock=listen(path))
        self.look_again()
        try:
            await self._leaving.wait()
        finally:
            # The name goes before the engine: who comes now starts another keeper instead of meeting a dying one.
            with suppress(OSError):
                os.unlink(path)
            self._server.close()
            if self._patience is not None:
                self._patience.begin()
                drained = [connection.drain(self._patience) for connection in self._connections]
                await asyncio.gather(before_end() if before_end is not None else asyncio.sleep(0), *drained)
            elif before_end is not None:
                await before_end()
            for connection in list(self._connections):
                connection.close()
            if (told := refusals.of(self._backend)) is not None:
                told.close()
            await self._backend.aclose()

    def _told_to_leave(self) -> None:
        if self._leaving.is_set() and self._patience is not None:
            self._patience.end()  # the second time: do not wait
        self._leaving.set()

    def stop(self) -> bool:
        """Leave, unless somebody's sandbox would end by it; whether we leave."""
        if self._engine.live == 0:
            self._leaving.set()
        return self._leaving.is_set()

    def leave(self) -> None:
        """Leave, whoever is there."""
        self._leaving.set()

    @property
    def live(self) -> int:
        return self._engine.live

    def _meet(self) -> asyncio.Protocol:
        return _Hall(self._frames, self._http) if self._http is not None else self._frames()

    def _frames(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._accept)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self._backend, writer, self._defaults, keeper=self, observe=self._observe)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._connections.add(connection)
        self.look_again()
        try:
            if peer_uid(writer.transport) not in (os.geteuid(), 0):
                problem = errors.error("peer_refused", "this socket serves its owner only")
                events.caller.set(f"uid:{peer_uid(writer.transport)}")
                refusals.record_refusal(self._backend, "connect", None, problem)
                connection.fail(0, problem)
            else:
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
        if self._engine.live == 0 and self._engine.staying == 0 and not self._connections:
            self._leaving.set()
        else:
            self.look_again()


class _Hall(asyncio.Protocol):
    """Where a connection waits until its first bytes say what it speaks. No frame begins like a line of text: the fifth byte is its kind."""

    def __init__(self, frames: Callable[[], asyncio.Protocol], http: Callable[[], asyncio.Protocol]) -> None:
        self._choices = (frames, http)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer_uid(self._transport) not in (os.geteuid(), 0):
            self._go(self._choices[0])  # which says why not

    def data_received(self, data: bytes) -> None:
        frames, http = self._choices
        self._go(http if data[4:5] >= b" " else frames).data_received(data)

    def _go(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        protocol = make()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        return protocol


class Connection:
    """One client: its calls under way, and the sandboxes that end with it."""

    def __init__(
        self,
        backend: interfaces.Backend,
        writer: asyncio.StreamWriter,
        defaults: settings.Defaults,
        *,
        keeper: Keeper | None = None,
        before_each: Callable[[], None] = lambda: None,
        while_streaming: Callable[[], None] = lambda: None,
        observe: Observe | None = None,
    ) -> None:
        """`before_each` call, and beside what one sends: whether this client may still have it; raises if not."""
        self._before_each = before_each
        self._while_streaming = while_streaming
        self._observe = observe
        self._backend = backend
        self._writer = writer
        self._defaults = defaults
        self._keeper = keeper
        self._calls: dict[int, _Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._owned: set[str] = set()
        self._pools: set[str] = set()
        self._dropping: set[asyncio.Task[None]] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Serve until the client leaves."""
        frames = framing.Reader()
        with suppress(OSError, ValueError):  # ValueError: not our frames, or not our JSON
            while data := await reader.read(_CHUNK):
                for kind, channel, body in frames.feed(data):
                    self._take(kind, channel, body)

    def _take(self, kind: int, channel: int, body: bytes) -> None:
        if kind == framing.CALL and self._draining:
            self.fail(channel, leaving.problem())
        elif kind == framing.CALL:
            self._calls[channel] = _Call()
            self._idle.clear()
            self._calls[channel].task = _spawn(self._serve(channel, body), f"call {channel}")
        elif channel not in self._calls:
            return
        elif kind == framing.INPUT:
            self._calls[channel].queue(body)
            if self._calls[channel].queued > _MOST_QUEUED:
                self.close()  # it does not keep to the window, and would fill our memory
        elif kind == framing.TAKEN:
            self._calls[channel].credit.give(framing.COUNT.unpack(body)[0])
        elif kind == framing.CONTROL:
            self._take_order(self._calls[channel], body)
        elif kind == framing.CANCEL:
            self._calls[channel].cancel()

    def _take_order(self, call: _Call, body: bytes) -> None:
        order = msgspec.json.decode(body, type=_Order)
        if order.stay:
            # At once, not in turn: who detaches closes the connection with the next breath.
            call.keep = True
            self._owned.discard(call.made)
        call.control.put_nowait(order)

    async def _serve(self, channel: int, body: bytes) -> None:
        name, code = "unknown", "ok"
        try:
            self._before_each()
            call = rpc.decode_call(body)
            name = call.method if call.method in _OWN or call.method in rpc.methods() else "unknown"
            self._calls[channel].endless = name in _ENDLESS
            if call.method not in ("hello", "stop"):
                self._check_version(call)
            await self._answer(channel, call)
        except errors.ClocheError as problem:
            code = problem.code
            self.fail(channel, problem)
        except asyncio.CancelledError:
            code = "cancelled"
            raise
        except Exception as problem:
            code = "internal_error"
            self.fail(channel, errors.error("internal_error", f"{type(problem).__name__}: {problem}"))
        finally:
            self._calls.pop(channel, None)
            if not self._calls:
                self._idle.set()
            if self._observe is not None:
                self._observe(name, code)

    def _check_version(self, call: rpc.Call) -> None:
        if call.protocol == framing.PROTOCOL and call.version in ("", __version__):
            return
        raise errors.error(
            "server_version_mismatch",
            f"this server is version {__version__} (protocol {framing.PROTOCOL}), "
            f"the client {call.version or '?'} (protocol {call.protocol})",
            **self._greeting(),
        )

    def _greeting(self) -> dict[str, Any]:
        live = self._keeper.live if self._keeper is not None else 0
        return {"protocol": framing.PROTOCOL, "version": __version__, "pid": os.getpid(), "live": live}

    async def _answer(self, channel: int, call: rpc.Call) -> None:
        if call.method == "hello":
            self.send(framing.RESULT, channel, self._greeting())
        elif call.method == "stop":
            stopped = self._keeper is not None and self._keeper.stop()
            self.send(framing.RESULT, channel, {**self._greeting(), "stopped": stopped})
        elif call.method == "run":
            await self._run(channel, rpc.decode_arguments(call.arguments, rpc.RunArguments))
        else:
            method = rpc.methods().get(call.method)
            if method is None:
                raise errors.error("argument_invalid", f"there is no method {call.method!r}")
            await self._invoke(channel, method, rpc.decode_arguments(call.arguments, method.parameters))

    async def _invoke(self, channel: int, method: rpc.Method, arguments: Any) -> None:
        named = {field: getattr(arguments, field) for field in arguments.__struct_fields__}
        known = await self._known(method, arguments)
        answer = getattr(self._backend, method.name)(**named)
        if method.opens:
            await self._tunnel(channel, await answer)
            return
        if method.streams:
            async for item in answer:
                self._while_streaming()
                self.send(framing.ITEM, channel, item)
                await self._writer.drain()
            self.send(framing.END, channel, None)
            return
        result = await answer
        if method.name in _MAKING and not arguments.spec.stay:
            self._own(method.name, result, known)
        elif method.name == "fork" and (await self._backend.info(arguments.sandbox)).id in self._owned:
            self._owned.update(info.id for info in result)
        elif method.name == "suspend" and arguments.mode == "archive":
            self._owned.discard(result.id)  # what is archived outlives engines; much more a connection
        self.send(framing.RESULT, channel, result)

    def _own(self, act: str, result: Any, known: set[str]) -> None:
        """What a client made for itself ends with its connection."""
        made: str = {"create": "id", "claim": "sandbox", "put_pool": "name"}[act]
        found = getattr(result, made)
        if found is not None and found not in known:
            (self._pools if act == "put_pool" else self._owned).add(found)

    async def _known(self, method: rpc.Method, arguments: Any) -> set[str]:
        """What a creation by name may give back: whoever made it owns it, not who asks again."""
        if method.name == "put_pool":
            return {info.name for info in await self._backend.pools()}
        if method.name not in _MAKING or arguments.spec.name is None:
            return set()
        return {info.id for info in await self._backend.list()}

    # ── run: one command, attached ──────────────────────────────────────────────────────────────

    async def _run(self, channel: int, arguments: rpc.RunArguments) -> None:
        call = self._calls[channel]
        call.keep = arguments.keep
        sandbox = arguments.sandbox
        if sandbox is None:
            sandbox = call.made = await self._create(arguments)
        try:
            execution = arguments.execution or await self._start(sandbox, arguments.request)
            self.send(framing.ITEM, channel, {"sandbox": sandbox, "execution": execution})
            call.helpers = [
                _spawn(self._feed(channel, call, sandbox, execution), f"input {channel}"),
                _spawn(self._steer(call, sandbox, execution), f"control {channel}"),
            ]
            async for event in self._backend.attach(
                sandbox, execution, arguments.after, lossless=not arguments.capture
            ):
                self._while_streaming()
                await self._forward(channel, arguments, event)
                if isinstance(event, model.Exited):
                    await self._conclude(channel, arguments, sandbox, event.result)
        finally:
            call.end_helpers()
            if call.made:
                self._part(call.made, keep=call.keep)

    async def _create(self, arguments: rpc.RunArguments) -> str:
        if arguments.spec is None:
            raise errors.error("argument_invalid", "run needs a sandbox or a spec")
        # It ends with its command, however long that takes; one that is kept gets its time from then on.
        spec = rpc.complete({**arguments.spec, "timeout_s": None}, self._defaults)
        made = (await self._backend.create(spec)).id
        if not arguments.keep:
            self._owned.add(made)
        return made

    async def _start(self, sandbox: str, request: model.ExecRequest | None) -> str:
        if request is None:
            raise errors.error("argument_invalid", "run needs an execution or a request")
        return (await self._backend.start(sandbox, request)).id

    def _part(self, sandbox: str, *, keep: bool) -> None:
        """A run is over. The answer does not wait for the sandbox's end; the connection's end makes sure of it."""
        after = self._keep(sandbox) if keep else self._drop(sandbox)
        task = _spawn(after, f"part {sandbox}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _keep(self, sandbox: str) -> None:
        self._owned.discard(sandbox)
        with suppress(errors.ClocheError):
            await self._backend.extend(sandbox, self._defaults.timeout_s)

    async def _drop(self, sandbox: str) -> None:
        self._owned.discard(sandbox)
        with suppress(errors.ClocheError):
            await self._backend.delete(sandbox)

    async def _drop_pool(self, pool: str) -> None:
        with suppress(errors.ClocheError):
            await self._backend.delete_pool(pool)

    async def _forward(self, channel: int, arguments: rpc.RunArguments, event: model.StreamEvent) -> None:
        match event:
            case model.Output(stream=stream, data=data) if not arguments.capture:
                await self._pass_on(framing.STDOUT if stream == "stdout" else framing.STDERR, channel, data)
            case model.Denied() | model.Truncated():
                self.send(framing.ITEM, channel, event)

    async def _conclude(
        self, channel: int, arguments: rpc.RunArguments, sandbox: str, result: model.ExecResult
    ) -> None:
        if not arguments.capture:
            result = msgspec.structs.replace(result, stdout_bytes=b"", stderr_bytes=b"")
        kept = sandbox if self._calls[channel].keep else None
        report = None
        said = arguments.spec or {}
        if (said.get("workspace") or said.get("volumes")) and kept is None:
            # The host's files are put in order, and volumes are free, after the sandbox's end: only then may the caller
            # go on.
            await self._drop(sandbox)
            with suppress(errors.ClocheError):
                report = await self._backend.workspace_report(sandbox)
        code = result.shell_code
        quiet = (
            kept is None and (code == 0 or not result.denials) and not (report and _says_something(report))
        )
        # The order is part of the protocol: the thin client reads the beginning only.
        self.send(
            framing.RESULT, channel,
            {"code": code, "quiet": quiet, "sandbox": kept, "result": result, "report": report},
        )  # fmt: skip

    async def _pass_on(self, kind: int, channel: int, data: bytes) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(framing.pack(kind, channel, data))
        if self._writer.transport.get_write_buffer_size() > _HIGH_WATER:
            await self._writer.drain()

    async def _feed(self, channel: int, call: _Call, sandbox: str, execution: str) -> None:
        while True:
            data = await call.input()
            with suppress(errors.ClocheError):  # it takes no more: the client learns from the result
                await self._backend.write_stdin(sandbox, execution, data, not data)
            if data and not self._writer.is_closing():
                self._writer.write(framing.pack(framing.TAKEN, channel, framing.COUNT.pack(len(data))))

    async def _steer(self, call: _Call, sandbox: str, execution: str) -> None:
        while True:
            order = await call.control.get()
            with suppress(errors.ClocheError):
                if order.signal:
                    await self._backend.signal(sandbox, execution, order.signal, order.tree)
                if order.columns:
                    await self._backend.resize(sandbox, execution, order.columns, order.rows)

    # ── dial: bytes both ways ───────────────────────────────────────────────────────────────────

    async def _tunnel(self, channel: int, tunnel: interfaces.Tunnel) -> None:
        call = self._calls[channel]
        self.send(framing.ITEM, channel, None)
        inwards = _spawn(self._inwards(channel, call, tunnel), f"into {channel}")
        try:
            while data := await tunnel.read(await call.credit.some(_PIECE)):
                call.credit.spend(len(data))
                self._raw(framing.STDOUT, channel, data)
                await self._writer.drain()
            self._raw(framing.STDOUT, channel, b"")
            await inwards
            self.send(framing.END, channel, None)
        finally:
            inwards.cancel()
            await tunnel.aclose()

    async def _inwards(self, channel: int, call: _Call, tunnel: interfaces.Tunnel) -> None:
        while data := await call.input():
            try:
                await tunnel.write(data)
            except errors.ClocheError:
                return  # it is cut, and who reads from it says so
            self._raw(framing.TAKEN, channel, framing.COUNT.pack(len(data)))
        with suppress(errors.ClocheError):
            await tunnel.end()

    def _raw(self, kind: int, channel: int, body: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(framing.pack(kind, channel, body))

    # ── sending and ending ──────────────────────────────────────────────────────────────────────

    def send(self, kind: int, channel: int, message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(framing.pack(kind, channel, rpc.encode(message)))

    def fail(self, channel: int, problem: errors.ClocheError) -> None:
        self.send(framing.ERROR, channel, problem.to_dict())

    async def drain(self, patience: Leaving) -> None:
        """Take no new calls, let those under way finish while there is patience, tell the others, and close."""
        self._draining = True
        self._tell(endless_only=True)
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._idle, patience.over)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        self._tell(endless_only=False)
        self.close()

    def _tell(self, *, endless_only: bool) -> None:
        for channel, call in list(self._calls.items()):
            if call.endless or not endless_only:
                self.fail(channel, leaving.problem())
                call.cancel()

    def close(self) -> None:
        self._writer.close()

    async def finish(self) -> None:
        """The client has left: end what was its own."""
        under_way = [call.task for call in self._calls.values() if call.task is not None]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await asyncio.gather(*(self._drop(sandbox) for sandbox in list(self._owned)))
        await asyncio.gather(*(self._drop_pool(pool) for pool in self._pools))
        await asyncio.gather(*self._dropping, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class _Order(msgspec.Struct):
    """A CONTROL frame."""

    signal: int = 0
    tree: bool = False
    columns: int = 0
    rows: int = 0
    stay: bool = False
    """The sandbox outlives this connection after all: a shell was detached."""


class _Call:
    """One call under way. Signals have a queue of their own: input that nobody reads must not hold them up."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.helpers: list[asyncio.Task[None]] = []
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self.queued = 0
        self.control: asyncio.Queue[_Order] = asyncio.Queue()
        self.credit = rpc.Credit()
        self.made = ""
        self.keep = False
        self.endless = False

    def queue(self, data: bytes) -> None:
        self.queued += len(data)
        self._input.put_nowait(data)

    async def input(self) -> bytes:
        data = await self._input.get()
        self.queued -= len(data)
        return data

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def end_helpers(self) -> None:
        for helper in self.helpers:
            helper.cancel()


def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)


def _says_something(report: model.WorkspaceReport) -> bool:
    return any(getattr(report, field) for field in report.__struct_fields__)


async def serve_pair(
    sock: socket.socket, make_backend: Callable[[], interfaces.Backend], defaults: settings.Defaults
) -> None:
    """One client on one end of a socket pair, with an engine of its own that ends with it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        backend = make_backend()
    except errors.ClocheError as problem:
        # Whatever the first call is, this is its answer.
        writer.write(framing.pack(framing.ERROR, 1, msgspec.json.encode(problem.to_dict())))
        writer.close()
        return
    connection = Connection(backend, writer, defaults)
    try:
        await connection.run(reader)
    finally:
        await connection.finish()
        await backend.aclose()


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
    sock.listen(_BACKLOG)
    return sock


def peer_uid(transport: asyncio.BaseTransport) -> int:
    sock = transport.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
