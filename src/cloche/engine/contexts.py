"""Code contexts: a template's interpreter that keeps its state between runs.

A context is an execution whose descriptor 3 is a socket to the engine and whose bootstrap comes by descriptor 4
(the guest's interpreter and shells modules say what is spoken). Results arrive as frames on the socket, printed text on the
pipes; a frame is sent after the text before it was flushed, so when `done` arrives the pipes hold all of the run's text.
What comes out of a context is an attacker's: frames are bounded and decoded by a schema.

A follower of a run reads what the run has collected, from where it stopped. Nothing is kept for it, so one that never reads
costs no memory; and because a result's place in both texts is noted when its frame comes, what was printed before it is told before it.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from cloche import errors, interfaces, model

_CHUNK = 256 * 1024
_TURNS = 8  # chunks read from one pipe before others get their turn
_MAX_FRAME = 64 << 20
_MAX_STATUS = 8
_MAX_OUTPUT = 16 * 1024 * 1024
_READY_TIMEOUT_S = 30.0
ALIASES = {
    "python": "python",
    "python3": "python",
    "py": "python",
    "bash": "bash",
    "sh": "bash",
    "shell": "bash",
}


def language_of(name: str, known: Iterable[str]) -> str:
    found = ALIASES.get(name, name)
    if found not in known:
        raise errors.error(
            "language_unknown", f"there are no contexts for {name!r}", hint=f"use one of {', '.join(known)}"
        )
    return found


class Frame(msgspec.Struct):
    op: str
    id: str | None = None
    pid: int = 0
    version: str = ""
    main: bool = False
    data: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    name: str = ""
    value: str = ""
    traceback: str = ""
    count: int = 0
    code: str = ""
    errno: int = 0


_decode = msgspec.json.Decoder(Frame).decode


class Run:
    """One piece of code under way, and what came of it so far."""

    def __init__(self, run_id: str, news: asyncio.Event | None) -> None:
        self.id = run_id
        self.news = news  # of whoever follows it
        self.texts: list[bytearray] = [bytearray(), bytearray()]
        self.places: list[tuple[int, int]] = []  # how much text there was when each result came
        self.results: list[dict[str, Any]] = []
        self.size = 0  # of the results together, as they came
        self.error: model.CodeError | None = None
        self.count = 0
        self.status: int | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self) -> None:
        if self.news is not None:
            self.news.set()


class Follower:
    """How far somebody has read a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = self._failed = False
        self._read = [0, 0]
        self._shown = 0
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in run.texts]

    def rest(self, *, final: bool = False) -> Iterator[model.CodeEvent]:
        """What is new. `final`: no more will come, so what waits for the rest of a character does not wait."""
        run = self._run
        if not self._began and (final or run.started.done()):
            self._began = True
            yield model.CodeBegan(execution_count=run.count)
        while self._shown < len(run.results):
            yield from self._text(run.places[self._shown])
            yield model.CodeShown(result=run.results[self._shown])
            self._shown += 1
        yield from self._text((len(run.texts[0]), len(run.texts[1])), final=final)
        if run.error is not None and not self._failed:
            self._failed = True
            yield model.CodeFailed(error=run.error)

    def _text(self, upto: tuple[int, int], *, final: bool = False) -> Iterator[model.CodeOutput]:
        names: tuple[model.StreamName, model.StreamName] = ("stdout", "stderr")
        for number, name in enumerate(names):
            upto_here = min(upto[number], _MAX_OUTPUT)
            data = bytes(self._run.texts[number][self._read[number] : upto_here])
            self._read[number] = max(upto_here, self._read[number])
            text = self._decoders[number].decode(data, final)
            if text:
                yield model.CodeOutput(stream=name, text=text)


class Context:
    def __init__(
        self, context_id: str, language: str, interpreter: interfaces.Interpreter, machine: interfaces.Machine, *,
        cwd: str | None, preload: Sequence[str] = (), env: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.id = context_id
        self._preload = tuple(preload)
        self._environment: dict[str, str] = {}
        self._unsent: dict[str, str] = {}
        self._preloaded: asyncio.Future[str] | None = None
        self.language = language
        self._interpreter = interpreter
        self.cwd = cwd or "/workspace"
        self._env = env or {}
        self.pid = 0
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._pipes: dict[int, bytearray] = {}
        self._run: Run | None = None
        self._lock = asyncio.Lock()
        self._ready: asyncio.Future[None] | None = None
        self._forked: asyncio.Future[Frame] | None = None
        self._runs = 0

    def info(self) -> model.ContextInfo:
        return model.ContextInfo(id=self.id, language=self.language, cwd=self.cwd, pid=self.pid)

    @property
    def busy(self) -> bool:
        return self._run is not None

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        inside = [null, out_write, err_write, there.fileno()]
        if self._interpreter.source is not None:
            inside.append(self._interpreter.source())
        try:
            child = await self._machine.start(
                interfaces.Start(self._interpreter.command, self._env, self.cwd, "user", inside)
            )
        except BaseException:
            here.close()
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            there.close()
            for fd in (null, out_write, err_write):
                os.close(fd)
        self.pid = child.pid
        self._adopt(here, out_read, err_read)
        child.exited.add_done_callback(self._told_by(here))
        self._unsent = dict(self._environment)
        if self._interpreter.frames:
            await self._wait_ready()
            await self._send_setup()

    async def _send_setup(self) -> None:
        """A fresh interpreter is told what was bound, and imports what is wanted before any user's code."""
        if self._environment:
            await self._send({"op": "env", "set": self._environment})
        if self._preload:
            await self._import()

    async def _import(self) -> None:
        self._preloaded = self._loop.create_future()
        await self._send({"op": "preload", "modules": self._preload})
        problem = await self._preloaded
        if problem:
            self.close()
            raise errors.error(
                "startup_failed",
                f"the context could not import {', '.join(self._preload)}: {problem[:1000]}",
                hint="is the module in the template's image?",
            )

    async def set_environment(self, env: dict[str, str]) -> None:
        """Variables for this and all later runs. A shell is told with its next piece of code."""
        self._environment.update(env)
        if self._interpreter.frames:
            await self._send({"op": "env", "set": env})
        else:
            self._unsent.update(env)

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        body = msgspec.json.encode(message)
        await self._loop.sock_sendall(self._socket, struct.pack(">I", len(body)) + body)

    def _adopt(self, channel: socket.socket, out_read: int, err_read: int) -> None:
        channel.setblocking(False)
        self._socket = channel
        self._ready = self._loop.create_future()
        self._loop.add_reader(channel.fileno(), self._readable)
        self._pipes = {out_read: bytearray(), err_read: bytearray()}
        for fd in self._pipes:
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._drain, fd)

    async def _wait_ready(self) -> None:
        assert self._ready is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), _READY_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise errors.error(
                "context_lost", "the interpreter did not start", hint="is there a python3 in the template?"
            ) from None

    def _interpreter_ended(self, channel: socket.socket) -> None:
        if channel is self._socket:  # not one that a restart has replaced: its end may be told late
            self._lost()

    def _told_by(self, channel: socket.socket) -> Callable[[asyncio.Future[Any]], None]:
        return lambda _: self._interpreter_ended(channel)

    def _lost(self) -> None:
        if self._socket is None:
            return
        said = b"".join(bytes(b) for b in self._texts())[-2000:].decode("utf-8", "replace").strip()
        text = "the context's interpreter ended" + (f": {said}" if said else "")
        self._end(errors.error("context_lost", text, hint="restart the context; its variables are gone"))

    def _end(self, lost: errors.ClocheError) -> None:
        """Let go of the interpreter, and tell whoever waits for it."""
        self._drop()
        waiting: list[asyncio.Future[Any] | None] = [self._ready, self._forked, self._preloaded]
        for future in (*waiting, self._run.done if self._run else None):
            if future is not None and not future.done():
                future.set_exception(lost)
                future.exception()

    def _texts(self) -> list[bytearray]:
        for fd in list(self._pipes):
            self._drain(fd)
        return list(self._pipes.values())

    def _drop(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for fd in self._pipes:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._pipes = {}

    def close(self) -> None:
        self._end(errors.error("context_lost", "the context has ended"))

    async def kill(self, reason: str = "the context was deleted") -> None:
        self._end(errors.error("context_lost", reason))
        with suppress(errors.ClocheError):
            await self._machine.signal(self.pid, signal.SIGKILL, scope="tree")

    async def restart(self) -> None:
        await self.kill("the context was restarted")
        self._buffer.clear()
        await self.start()

    async def interrupt(self) -> None:
        """SIGINT, once the run has begun (before, it would be lost), and again while the interpreter does not heed it:
        CPython may notice a signal late that arrives just before a blocking call."""
        run = self._run
        if run is None:
            return
        await asyncio.wait({run.started, run.done}, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(3):
            if run.done.done():
                return
            await self._machine.signal(self.pid, signal.SIGINT, scope="group")
            await asyncio.wait({run.done}, timeout=1)

    # ── a run ───────────────────────────────────────────────────────────────────────────────────

    async def run(
        self, code: str, *, env: dict[str, str] | None = None, timeout_s: float | None = None,
        begin: Callable[[Run], None] | None = None, news: asyncio.Event | None = None,
    ) -> model.CodeResult:  # fmt: skip
        """Run code and wait. Runs of one context queue up; the user's error is part of the result.

        `begin` is told of the run when its turn has come; from then on `news` is set when there is more of it.
        """
        async with self._lock:
            if self._socket is None:
                raise errors.error(
                    "context_lost", "the context has ended", hint="restart it, or create another"
                )
            self._runs += 1
            self._texts()  # what threads printed between runs belongs to none
            self._run = run = Run(str(self._runs), news)
            self._pipes = dict(zip(self._pipes, run.texts, strict=True))
            if begin is not None:
                begin(run)
            try:
                await self._send_code(code, env)
                return await self._await_done(run, timeout_s)
            except asyncio.CancelledError:
                # Nobody waits for the result any more; the next run must not wait for this one.
                with suppress(errors.ClocheError):
                    await self.interrupt()
                raise
            finally:
                self._run = None
                self._pipes = {fd: bytearray() for fd in self._pipes}

    async def follow(
        self, code: str, *, env: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[model.CodeEvent]:
        """The same, told as it happens. Leaving interrupts the code."""
        news = asyncio.Event()
        followers: list[Follower] = []
        running = asyncio.ensure_future(
            self.run(
                code,
                env=env,
                timeout_s=timeout_s,
                begin=lambda run: followers.append(Follower(run)),
                news=news,
            )
        )
        running.add_done_callback(lambda _: news.set())
        try:
            while not running.done():
                await news.wait()
                news.clear()
                for follower in followers:
                    for event in follower.rest():
                        yield event
            for follower in followers:
                for event in follower.rest(final=True):
                    yield event
            yield model.CodeEnded(result=running.result())
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def _send_code(self, code: str, env: dict[str, str] | None) -> None:
        assert self._socket is not None
        assert self._run is not None
        if self._interpreter.frames:
            body = msgspec.json.encode(
                {"op": "run", "id": self._run.id, "code": code, "env": env or None, "cwd": None, "name": None}
            )
            message = struct.pack(">I", len(body)) + body
        else:
            if "\0" in code:
                raise errors.error("argument_invalid", "the code contains a NUL byte")
            told = {**self._unsent, **(env or {})}
            self._unsent = {}
            prefix = "".join(f"export {key}={_quoted(value)}\n" for key, value in told.items())
            message = (prefix + code).encode() + b"\0"
        await self._loop.sock_sendall(self._socket, message)
        if not self._interpreter.frames:
            self._run.count = self._runs
            self._run.started.set_result(None)  # a shell says nothing before its status
            self._run.tell()

    async def _await_done(self, run: Run, timeout_s: float | None) -> model.CodeResult:
        try:
            await asyncio.wait_for(asyncio.shield(run.done), timeout_s)
        except TimeoutError:
            with suppress(errors.ClocheError):
                await self.interrupt()
            if not run.done.done():
                await self.restart()  # deaf to SIGINT: the context's state is lost, the sandbox is not
            run.error = model.CodeError(
                name="TimeoutError", value=f"the code ran longer than {timeout_s:g} s", traceback=""
            )
        self._texts()
        texts = [bytes(text[:_MAX_OUTPUT]).decode("utf-8", "replace") for text in run.texts]
        return model.CodeResult(
            results=tuple(run.results), stdout=texts[0], stderr=texts[1], error=run.error, execution_count=run.count,
            exit_code=run.status,
        )  # fmt: skip

    # ── copies ──────────────────────────────────────────────────────────────────────────────────

    async def fork(self, count: int) -> list[Context]:
        """Copies of the interpreter with everything it has in memory; all of them, or none."""
        if self.language != "python":
            raise errors.error(
                "argument_invalid", f"a context of {self.language} cannot be forked", hint="only Python's can"
            )
        async with self._lock:
            if self._socket is None:
                raise errors.error("context_lost", "the context has ended", hint="create another")
            copies = [
                Context(
                    model.new_id(),
                    self.language,
                    self._interpreter,
                    self._machine,
                    cwd=self.cwd,
                    env=self._env,
                )
                for _ in range(count)
            ]
            try:
                await self._fork(copies)
            except BaseException:
                for made in copies:
                    made.close()
                raise
        return copies

    async def _fork(self, copies: list[Context]) -> None:
        assert self._socket is not None
        mark = await self._machine.reserve(len(copies))
        self._forked = self._loop.create_future()
        await self._send({"op": "fork", "id": "fork", "count": len(copies), "mark": mark})
        for made in copies:
            await self._give(made)
        frame = await self._forked
        if frame.op == "refused" and frame.code == "context_has_threads":
            raise errors.error(
                "context_has_threads",
                "the context has more than one thread, and only one of them would be in its copies",
                hint="end its threads; numpy starts some unless OPENBLAS_NUM_THREADS=1 was set before its import",
            )
        if frame.op == "refused" or frame.count != len(copies):
            why = os.strerror(frame.errno) if 0 < frame.errno < 4096 else "the interpreter refused"
            raise errors.error(
                "capacity_exceeded",
                f"{len(copies)} copies of the context could not be made: {why}",
                hint="raise pids or memory_mib",
            )
        await asyncio.gather(*(made._wait_ready() for made in copies))
        await self._adopt_all(copies, mark)
        for made in copies:
            made._environment = dict(self._environment)

    async def _give(self, made: Context) -> None:
        """Pass the ends of a copy's channel and pipes in: they are made here, as for every command."""
        assert self._socket is not None
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        made._adopt(here, out_read, err_read)
        fds = struct.pack("3i", there.fileno(), out_write, err_write)
        try:
            for fd in (out_write, err_write):
                os.fchmod(fd, 0o666)  # the user inside may open /dev/stdout
            while True:
                try:
                    self._socket.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                    return
                except BlockingIOError:
                    await _writable(self._loop, self._socket)
        finally:
            there.close()
            os.close(out_write)
            os.close(err_write)

    async def _adopt_all(self, copies: list[Context], mark: int) -> None:
        marks = {made.pid: mark - number for number, made in enumerate(copies)}
        children = await self._machine.adopt(list(marks.items()))
        for made in copies:
            channel = made._socket
            if made.pid not in children or channel is None:
                raise errors.error("context_lost", "a copy of the context ended at once", hint="try again")
            children[made.pid].exited.add_done_callback(made._told_by(channel))

    # ── what comes back ─────────────────────────────────────────────────────────────────────────

    def _drain(self, fd: int) -> None:
        # Not until it is empty: who writes faster than we read would have the loop for itself.
        text = self._pipes[fd]
        for _ in range(_TURNS):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(fd)
                return
            if len(text) < _MAX_OUTPUT:
                text += data
                if self._run is not None:
                    self._run.tell()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._buffer += data
        if self._interpreter.frames:
            self._take_frames()
        else:
            self._take_statuses()

    def _take_statuses(self) -> None:
        *whole, rest = bytes(self._buffer).split(b"\0")
        self._buffer = bytearray(rest)
        if len(rest) > _MAX_STATUS:
            self._lost()
            return
        if whole and self._run is not None and not self._run.done.done():
            status = whole[0]
            self._run.status = int(status) if status.isdigit() and len(status) <= _MAX_STATUS else 1
            self._run.done.set_result(None)

    def _take_frames(self) -> None:
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if length > _MAX_FRAME:
                self._lost()
                return
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                frame = _decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self._lost()
                return
            self._dispatch(frame, length)

    def _dispatch(self, frame: Frame, size: int) -> None:
        if frame.op == "ready":
            if self._ready is not None and not self._ready.done():
                self.pid = self.pid or frame.pid
                self._ready.set_result(None)
            return
        if frame.op in ("forked", "refused") and self._forked is not None and not self._forked.done():
            self._forked.set_result(frame)
            return
        if frame.op == "preloaded":
            if self._preloaded is not None and not self._preloaded.done():
                self._preloaded.set_result(frame.value)
            return
        run = self._run
        if run is None or frame.id != run.id or run.done.done():
            return
        if frame.op == "started" and not run.started.done():
            run.count = frame.count
            run.started.set_result(None)
            run.tell()
        elif frame.op == "result" and len(run.results) < 1000 and run.size + size <= _MAX_FRAME:
            run.size += size
            self._texts()
            run.places.append((len(run.texts[0]), len(run.texts[1])))
            run.tell()
            run.results.append(
                {**frame.data, "main": frame.main, **({"extra": frame.extra} if frame.extra else {})}
            )
        elif frame.op == "error":
            run.error = model.CodeError(name=frame.name, value=frame.value, traceback=frame.traceback)
        elif frame.op == "done":
            run.count = frame.count
            run.done.set_result(None)


async def _writable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(channel.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_writer(channel.fileno())


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
