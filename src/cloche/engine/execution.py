"""One command, from the pipes made for it to the result.

The engine makes the pipes and passes their far ends in, so it reads output itself. The result is ready when the leader
is reaped and its pipes are read empty; what an orphan writes later still goes to the log, which closes a little later.
A failing command is a result. A time-out kills the whole tree.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from cloche import errors, events, interfaces, model, settings
from cloche.engine import output

_CHUNK = 256 * 1024
_BACKLOG = 8 << 20  # bytes that a lossless follower may be behind
_TURNS = 8  # chunks read from one pipe before others get their turn
_USUAL_PIPE_SIZE, _PIPE_SIZE = 64 * 1024, 256 * 1024
_MAX_STDIN = 64 * 1024 * 1024
_READ_ONLY = b": Read-only file system"
_APART = re.compile(rb"[\s:'\"\x60]")
_MAX_DENIALS = 200
_DEAF_S = 10.0  # past a command's time, how long its guest may take to start or end it
_ORPHANS_S = 2.0  # how long after the leader's end its orphans' output still reaches the log


class Execution:
    def __init__(
        self, execution_id: str, request: model.ExecRequest, machine: interfaces.Machine, limits: settings.Limits,
        directory: str, on_use: Callable[[], None], *, together: bool = False,
    ) -> None:  # fmt: skip
        """`together`: whoever asks waits for the end, and need not be told of the start before."""
        self.id = execution_id
        self.request = request
        self.pid = 0
        self.started_at = time.time()
        self.trace = events.trace.get()
        self.first_output_s: float | None = None
        """Seconds from being asked for to the first byte of output."""
        self.result: asyncio.Future[model.ExecResult] = asyncio.get_running_loop().create_future()
        keep = request.output_limit or limits.output_limit_bytes
        self.log = output.Log(keep=keep, spool_limit=limits.log_limit_mib << 20, directory=directory)
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._on_use = on_use
        self._together = together
        self._waiters: list[asyncio.Future[None]] = []
        self._readers: dict[int, model.StreamName] = {}
        self._paused = True  # until it has been started
        self.log.on_taken = self._resume_reading
        self._stdin = -1
        self._pending = bytearray()
        self._stdin_ends = False
        self._drained = asyncio.Event()
        self._master = -1
        self._denials: list[model.Denial] = []
        self._faults: list[str] = []
        self._timed_out = self._oom_killed = False
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._last_resort: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return not self.result.done()

    def info(self) -> model.ExecutionInfo:
        command = self.request.command
        text = command if isinstance(command, str) else " ".join(command)
        done = self.result.result() if self.result.done() and not self.result.exception() else None
        return model.ExecutionInfo(
            id=self.id, command=text[:1000], pid=self.pid, started_at=self.started_at, running=self.running,
            pty=self.request.pty is not None, exit_code=done.exit_code if done else None,
            signal=done.signal if done else None,
        )  # fmt: skip

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        request = self.request
        inside: list[int] = []
        self._began = time.perf_counter()
        if request.timeout_s is not None:
            # SAFETY: a guest that was taken over may answer nothing; its caller's limit holds all the same.
            # tests/security/test_hostile_guest.py::test_a_time_limit_holds_without_the_guest
            self._last_resort = self._loop.call_later(request.timeout_s + _DEAF_S, self._end_machine)
        try:
            inside = self._open_terminal() if request.pty else self._open_pipes()
            wanted = interfaces.Start(
                request.command, request.env, request.cwd, request.user, inside, request.pty is not None,
                self._together,
            )  # fmt: skip
            child = await self._machine.start(wanted)
        except BaseException:
            self._cancel_timers()
            self._close_all()
            self.log.close()
            raise
        finally:
            for fd in set(inside):
                os.close(fd)
        self.pid = child.pid
        if child.exited.done():
            self._exited(child.exited)
            return
        self._resume_reading()
        if request.timeout_s is not None:
            self._timer = self._loop.call_later(request.timeout_s, self._time_out)
        child.exited.add_done_callback(self._exited)

    async def finished(self) -> model.ExecResult:
        """Wait for the result. As a shielded `result`, without the turns of the loop that a shield takes."""
        if not self.result.done():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        return self.result.result()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _open_pipes(self) -> list[int]:
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        self._read(out_read, "stdout")
        if self.request.merge:
            err_write = out_write
        else:
            err_read, err_write = os.pipe2(os.O_CLOEXEC)
            self._read(err_read, "stderr")
        return [self._open_stdin(), out_write, err_write]

    def _open_stdin(self) -> int:
        data = self.request.stdin
        if data is None and not self.request.open_stdin:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        reading, self._stdin = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._stdin, False)
        if data:
            self._feed(data)
        if not self.request.open_stdin:
            self._end_stdin()
        return reading

    def _open_terminal(self) -> list[int]:
        master, slave = self._machine.open_terminal()
        self._master = master
        columns, rows = self.request.pty or (80, 24)
        _set_size(master, columns, rows)
        self._read(master, "stdout")
        self._stdin = os.dup(master)
        os.set_inheritable(self._stdin, False)
        return [slave]

    # ── output ──────────────────────────────────────────────────────────────────────────────────

    def _read(self, fd: int, stream: model.StreamName) -> None:
        os.set_blocking(fd, False)
        self._readers[fd] = stream

    def _readable(self, fd: int, turns: int = _TURNS) -> None:
        for _ in range(turns):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""  # EIO: every slave of the terminal is closed
            if not data:
                self._stop_reading(fd)
                return
            if len(data) == _USUAL_PIPE_SIZE and fd != self._master:
                with suppress(OSError):  # it was full: a command that writes much gets a larger one
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            self._on_use()
            if self.first_output_s is None:
                self.first_output_s = time.perf_counter() - self._began
            self.log.add(self._readers[fd], data)
            if self.log.backlog > _BACKLOG:
                self._pause_reading()
                return

    def _pause_reading(self) -> None:
        """Whoever reads the command's output has enough to do: let the pipes fill, and the command wait."""
        self._paused = True
        for fd in self._readers:
            self._loop.remove_reader(fd)

    def _resume_reading(self) -> None:
        if self._paused and self.log.backlog < _BACKLOG // 2:
            self._paused = False
            for fd in self._readers:
                self._loop.add_reader(fd, self._readable, fd)

    def _stop_reading(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            if not self._paused:
                self._loop.remove_reader(fd)
            os.close(fd)
            if fd == self._master:
                self._master = -1

    # ── input ───────────────────────────────────────────────────────────────────────────────────

    async def write(self, data: bytes) -> None:
        if self._stdin < 0 or self._stdin_ends or not self.running:
            raise errors.error("execution_finished", "the command takes no more input")
        if len(self._pending) + len(data) > _MAX_STDIN:
            raise errors.error(
                "capacity_exceeded",
                "the command does not read its input; 64 MiB are waiting",
                hint="write less at a time",
            )
        self._on_use()
        self._feed(data)
        while self._pending and self._stdin >= 0 and len(self._pending) > _CHUNK:
            self._drained.clear()
            await self._drained.wait()  # back-pressure to whoever writes

    def end_input(self) -> None:
        if self.request.pty is not None:
            self._feed(b"\x04")  # a terminal's end of file is a character
        else:
            self._end_stdin()

    def _feed(self, data: bytes) -> None:
        empty = not self._pending
        self._pending += data
        if empty and self._pending:
            self._writable()
            if self._pending and self._stdin >= 0:
                self._loop.add_writer(self._stdin, self._writable)

    def _writable(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._stdin, self._pending[:65536])]
        except BlockingIOError:
            return
        except OSError:
            self._pending.clear()  # the reader is gone
            self._stdin_ends = True
        self._drained.set()
        self._loop.remove_writer(self._stdin)
        if self._stdin_ends:
            self._close_stdin()

    def _end_stdin(self) -> None:
        self._stdin_ends = True
        if not self._pending:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
        self._drained.set()

    def resize(self, columns: int, rows: int) -> None:
        if self._master < 0:
            raise errors.error("execution_finished", "the command has no terminal, or has ended")
        if not (0 < columns < 10_000 and 0 < rows < 10_000):
            raise errors.error("limit_invalid", f"a terminal of {columns}x{rows} is not possible")
        _set_size(self._master, columns, rows)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    async def signal(self, number: int, *, scope: str = "group") -> None:
        if not self.running:
            raise errors.error("execution_finished", "the command has ended already")
        await self._machine.signal(self.pid, number, scope=scope)

    def _time_out(self) -> None:
        self._timed_out = True
        self._kill_tree()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._last_resort):
            if timer is not None:
                timer.cancel()

    def _end_machine(self) -> None:
        ending = self._machine.kill("its guest did not end a command that was out of time")
        self._killing = self._loop.create_task(ending, name=f"end {self.id}")

    def _kill_tree(self) -> None:
        async def kill() -> None:
            with suppress(errors.ClocheError):
                await self._machine.signal(self.pid, signal.SIGKILL, scope="tree")

        self._killing = self._loop.create_task(kill(), name=f"kill {self.id}")

    def kill_for_memory(self) -> None:
        """The sandbox is over its watched memory limit."""
        self._oom_killed = True
        self._kill_tree()

    def denied(self, denial: model.Denial) -> None:
        if denial.kind == "network" and denial in self._denials:
            return  # clients try again, and then again: it is one thing to know
        if len(self._denials) < _MAX_DENIALS:
            self._denials.append(denial)
            self.log.deny(denial)

    def faulted(self, reason: str) -> None:
        if reason not in self._faults:
            self._faults.append(reason)

    def _exited(self, future: asyncio.Future[interfaces.ExitStatus]) -> None:
        self._cancel_timers()
        if future.cancelled() or (problem := future.exception()) is not None:
            self._close_all()
            lost = None if future.cancelled() else problem
            if not isinstance(lost, errors.ClocheError):
                lost = errors.error("sandbox_lost", "the sandbox has ended")
            self.log.lose(lost)
            if not self.result.done():
                self.result.set_exception(lost)
                self.result.exception()
            self._wake_waiters()
            self.log.close()
            return
        for fd in list(self._readers):
            # A hostile orphan may write for ever; the leader's own output is at most a pipe's worth by now.
            self._readable(fd, turns=_TURNS)
        self._close_stdin()
        result = self._make_result(future.result())
        self.log.finish(result)
        if not self.result.done():
            self.result.set_result(result)
        self._wake_waiters()
        self._on_use()
        if self._readers:
            self._resume_reading()
            self._linger = self._loop.call_later(_ORPHANS_S, self._close_all)

    def _make_result(self, status: interfaces.ExitStatus) -> model.ExecResult:
        killed = status.signal == signal.SIGKILL or status.exit_code == 128 + signal.SIGKILL
        oom = self._oom_killed or (killed and not self._timed_out and self._machine.usage().oom_kills > 0)
        if oom:
            limit = self._machine.limits["memory_mib"]
            self.denied(
                model.Denial(
                    kind="limit",
                    operation="memory",
                    target=f"{limit.value:g} MiB",
                    rule="resources.memory_mib",
                    hint="use less memory, or create the sandbox with a larger memory_mib",
                    evidence="limit",
                )
            )
        self._infer_denials()
        log = self.log
        return model.ExecResult(
            exit_code=None if self._timed_out else status.exit_code,
            signal=signal.SIGKILL if self._timed_out else status.signal,
            timed_out=self._timed_out, oom_killed=oom,
            stdout_bytes=log.stdout.bytes(), stderr_bytes=log.stderr.bytes(),
            stdout_total=log.stdout.total, stderr_total=log.stderr.total,
            truncated=log.stdout.truncated or log.stderr.truncated,
            duration_ms=(time.perf_counter() - self._began) * 1000, cpu_ms=status.cpu_ms,
            max_rss_mib=status.max_rss_mib, denials=tuple(self._denials), faults=tuple(self._faults),
            isolation=self._machine.isolation,
            execution=self.id,
        )  # fmt: skip

    def _infer_denials(self) -> None:
        """An errno line whose path the mount plan makes read-only: the kernel raises no event for these."""
        for named in _read_only_names(self.log.stderr.bytes()[-65536:]):
            path = os.path.normpath(os.path.join(self._machine.cwd, self.request.cwd or "", named))
            rule = self._machine.read_only_rule(path)
            if rule is not None:
                self.denied(
                    model.Denial(
                        kind="file",
                        operation="write",
                        target=path,
                        rule=rule,
                        hint="write below /workspace, /tmp or the home directory instead",
                        evidence="inferred",
                    )
                )

    def _close_all(self) -> None:
        for fd in list(self._readers):
            self._stop_reading(fd)
        self._close_stdin()

    def close(self) -> None:
        """Let go of everything; the log is not readable afterwards."""
        if self._linger is not None:
            self._linger.cancel()
        self._cancel_timers()
        self._close_all()
        self.log.close()

    def follow(
        self, after: int = 0, *, wait: bool = True, lossless: bool = False
    ) -> AsyncIterator[model.StreamEvent]:
        return self.log.follow_all(after) if lossless else self.log.follow(after, wait=wait)


def _read_only_names(text: bytes) -> Iterator[str]:
    """What stands before each such error. Linear in what a hostile command wrote; one expression for it all is not."""
    for before in text.split(_READ_ONLY, _MAX_DENIALS)[:-1]:
        named = _APART.split(before[-4096:].rstrip(b"'\"\x60"))[-1]
        if named:
            yield named.decode("utf-8", "replace")


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
