"""An agent that was taken over: whatever it sends, the engine lives, and holds no more memory or descriptors for it.

The guest here is the test itself, at the far end of the socket that a machine reads.
"""

import array
import asyncio
import io
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche import errors, interfaces, model, settings
from cloche.drivers import link, machine
from cloche.engine import execution, files
from cloche.guest import wire
from tests.security import glass

_ISOLATION = model.Isolation(level="namespaces", driver="fake", uid_range=True)


class FakeMachine(machine.GuestMachine):
    """A machine whose guest is the test."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__("fake", sock, {}, _ISOLATION)

    def kill_now(self) -> None:
        self._loop.call_soon(self.died)

    async def kill(self, reason: str) -> None:
        self.kill_now()
        await self.ended

    def _release(self) -> None:
        pass

    def usage(self) -> interfaces.Usage:
        return interfaces.Usage(0, 0, 0, 0, 0)

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError


class Guest:
    """The hostile end. Without blocking: what does not fit the socket is not sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)

    def send(self, body: "bytes | dict[str, Any]", fds: "list[int] | None" = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([raw], ancillary)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass

    async def next_request(self) -> dict[str, Any]:
        while True:
            try:
                body, fds = wire.receive_raw(self.sock)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            wire.close_all(fds)
            return json.loads(body)


@asynccontextmanager
async def hostile() -> AsyncIterator[tuple[FakeMachine, Guest]]:
    here, there = wire.pair()
    made = FakeMachine(here)
    try:
        yield made, Guest(there)
    finally:
        await made.kill("the test is over")
        there.close()


def a_file(path: "str | Path" = __file__) -> io.BufferedReader:
    return open(path, "rb")


async def _turns(count: int = 20) -> None:
    """Let the loop read what is there."""
    for _ in range(count):
        await asyncio.sleep(0)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a scenario; an error that nobody caught in a callback is a failure too."""

    async def watched() -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
        await work
        assert unhandled == []

    asyncio.run(watched())


# --- what no guest of ours sends ----------------------------------------------------------------------------

GARBAGE = {
    "not-json": b"\xff\xfe\x00garbage",
    "empty-object-cut": b'{"n": 1',
    "an-array": b"[1, 2, 3]",
    "wrong-types": b'{"n": "one", "pid": []}',
    "deep-nesting": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep-objects": b'{"x":' * 30_000 + b"1" + b"}" * 30_000,
    "huge-number": b'{"n": ' + b"9" * 100_000 + b"}",
    "huge-exponent": b'{"cpu_ms": 1e999999999}',
    "not-utf-8": b'{"path": "\xff\xff"}',
    "lone-surrogate": b'{"path": "\\ud800"}',
    "negative-status": b'{"exit": 5, "status": -1}',
    "huge-status": b'{"exit": 5, "status": 123456789012345678901234567890}',
    "huge-memory": b'{"exit": 5, "rss_kib": ' + b"9" * 400 + b"}",
    "huge-pid": b'{"exit": ' + b"9" * 40 + b"}",
    "nul-bytes": b"\0" * 4096,
    "memfd-not-ours": b'{"memfd": 99999999999}',
    "unknown-watch": b'{"watch": 7, "events": [["create", "x"]]}',
    "exit-of-nobody": b'{"exit": 12345, "status": 0}',
    "ready-again": b'{"ready": true}',
    "failed-again": b'{"failed": "no"}',
    "answer-to-nobody": b'{"n": 999999, "pid": 1}',
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_at_most_its_own_sandbox(garbage: str) -> None:
    async def scenario() -> None:
        async with hostile() as (_, guest), hostile() as (other, good):
            guest.send({"ready": True})
            before = glass.open_descriptors()
            with a_file() as file:
                for _ in range(40):
                    guest.send(GARBAGE[garbage], [file.fileno()] * 8)
                    await _turns(3)
            assert glass.open_descriptors() <= before
            asked = asyncio.ensure_future(other.file_act("stat", "/x"))
            request = await good.next_request()
            good.send({"n": request["n"], "entry": ["x", 0o100644, 1, 1000, 1000, 1.5, None]})
            assert (await asked).entry.name == "x"

    _run(scenario())


def test_an_oversized_frame_ends_its_own_sandbox() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            guest.send(b'{"path": "' + b"x" * (wire.MAX_FRAME + 4096) + b'"}')
            await asyncio.wait_for(asyncio.shield(made.ended), 30)
            with pytest.raises(errors.SandboxLost):
                await made.file_act("stat", "/x")

    _run(scenario())


def test_a_frame_of_the_largest_size_is_taken() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            asked = asyncio.ensure_future(made.file_act("list", "/x"))
            request = await guest.next_request()
            entries = [
                [f"{n:04}" + "x" * 200, 0o100644, 1, 0, 0, 1.0, None] for n in range(wire.MAX_FRAME // 250)
            ]
            guest.send({"n": request["n"], "entries": entries})
            assert len((await asked).entries) == len(entries)

    _run(scenario())


# --- descriptors --------------------------------------------------------------------------------------------


def _calls(made: FakeMachine) -> dict[str, Callable[[], Awaitable[Any]]]:
    start = interfaces.Start(["true"], {}, None, "user", [])
    return {
        "stat": lambda: made.file_act("stat", "/x"),
        "signal": lambda: made.signal(5, 9),
        "environment": lambda: made.bind(interfaces.Binding(env={"A": "1"})),
        "start": lambda: made.start(start),
        "open": lambda: made.open_file("/x", os.O_RDONLY),
        "connect": lambda: made.connect(80),
    }


@pytest.mark.parametrize("act", ["stat", "signal", "environment", "start", "open", "connect"])
@pytest.mark.parametrize("answer", ["error", "success"])
def test_a_flood_of_descriptors_is_closed(act: str, answer: str) -> None:
    """Sixteen with every answer, wanted or not: none is kept."""

    async def scenario() -> None:
        async with hostile() as (made, guest):
            before = glass.open_descriptors()
            with a_file() as file:

                async def answer_all() -> None:
                    while True:  # a call may ask twice: `connect` tries both kinds of address
                        request = await guest.next_request()
                        body: dict[str, Any] = {"n": request["n"], "pid": 100 + request["n"]}
                        if answer == "error":
                            body["errno"] = 13
                        guest.send(body, [file.fileno()] * wire.MAX_FDS)

                answering = asyncio.ensure_future(answer_all())
                for _ in range(30):
                    try:
                        given = await _calls(made)[act]()
                    except (errors.ClocheError, OSError):
                        continue
                    if isinstance(given, int):
                        os.close(given)
                answering.cancel()
                await asyncio.wait((answering,))
                assert glass.open_descriptors() <= before + 2

    _run(scenario())


def test_more_descriptors_than_a_frame_may_carry_end_the_sandbox() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            before = glass.open_descriptors()
            with a_file() as file:
                guest.send({"n": 1}, [file.fileno()] * 200)
            await asyncio.wait_for(asyncio.shield(made.ended), 30)
            assert glass.open_descriptors() <= before

    _run(scenario())


def test_an_answer_that_comes_too_late_keeps_nothing() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            before = glass.open_descriptors()
            with a_file() as file:
                for _ in range(20):
                    asked = asyncio.ensure_future(made.open_file("/x", os.O_RDONLY))
                    request = await guest.next_request()
                    asked.cancel()
                    guest.send({"n": request["n"]}, [file.fileno()] * 16)
                    await _turns(4)
            assert glass.open_descriptors() <= before + 1

    _run(scenario())


def _kinds(directory: Path) -> dict[str, Callable[[], int]]:
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    plain = directory / "plain"
    plain.write_text("plain")
    return {
        "directory": lambda: os.open(directory, os.O_RDONLY),
        "device": lambda: os.open("/dev/zero", os.O_RDONLY),
        "fifo": lambda: os.open(fifo, os.O_RDWR),
        "pipe": lambda: os.pipe()[0],
        "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
        "path-only": lambda: os.open(plain, os.O_PATH),
        "write-only": lambda: os.open(plain, os.O_WRONLY),
        "timer": lambda: os.eventfd(0),
        "terminal": lambda: os.openpty()[0],
        "none": lambda: -1,
    }


@pytest.mark.parametrize(
    "kind",
    ["directory", "device", "fifo", "pipe", "socket", "path-only", "write-only", "timer", "terminal", "none"],
)
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            fd = _kinds(tmp_path)[kind]()
            reading = asyncio.ensure_future(files.read(made, "/x"))
            request = await guest.next_request()
            guest.send({"n": request["n"]}, [fd] if fd >= 0 else [])
            with pytest.raises(errors.ClocheError):
                await asyncio.wait_for(reading, 30)

    _run(scenario())


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            (tmp_path / "plain").write_text("plain")
            reading = asyncio.ensure_future(files.read(made, "/x"))
            request = await guest.next_request()
            with a_file(tmp_path / "plain") as file:
                guest.send({"n": request["n"]}, [file.fileno()])
            assert await reading == b"plain"

    _run(scenario())


@pytest.mark.parametrize("kind", ["regular", "device", "path-only", "none"])
def test_only_a_socket_is_a_connection(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            (tmp_path / "plain").write_text("")
            opened = {
                "regular": lambda: [os.open(tmp_path / "plain", os.O_RDWR)],
                "device": lambda: [os.open("/dev/null", os.O_RDWR)],
                "path-only": lambda: [os.open(tmp_path / "plain", os.O_PATH)],
                "none": list,
            }[kind]()
            asked = asyncio.ensure_future(made.connect(80))
            request = await guest.next_request()
            guest.send({"n": request["n"]}, opened)
            wire.close_all(opened)
            with pytest.raises(errors.ClocheError):
                await asked

    _run(scenario())


# --- lies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "..", ".", "", "a/b", "nul\0", "x" * 5000])
def test_names_that_lead_out_are_not_passed_on(name: str) -> None:
    """A tar made of them would, unpacked by somebody trusting, write beside its directory."""

    async def scenario() -> None:
        async with hostile() as (made, guest):
            asked = asyncio.ensure_future(files.download_tree(made, "/x"))
            request = await guest.next_request()
            guest.send({"n": request["n"], "entry": ["x", 0o040755, 1, 0, 0, 1.0, None]})
            request = await guest.next_request()
            guest.send({"n": request["n"], "entries": [[name, 0o120777, 1, 0, 0, 1.0, "target"]]})
            with pytest.raises(errors.ClocheError):
                await asyncio.wait_for(asked, 30)

    _run(scenario())


@pytest.mark.parametrize("lie", ["always-more", "same-place", "no-end-of-directories", "ever-deeper"])
def test_a_tree_without_end_is_given_up(lie: str) -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            work = files.list_dir(made, "/x", depth=1_000_000)
            asked = asyncio.ensure_future(work)
            before = glass.resident_mib()
            turn = 0
            while not asked.done():
                if lie == "ever-deeper" and turn > 5000:
                    break
                request = await asyncio.wait_for(asyncio.shield(_either(guest, asked)), 30)
                if request is None:
                    break
                turn += 1
                guest.send({"n": request["n"], **_page(lie, turn)})
            with pytest.raises(errors.ClocheError):
                await asked
            assert glass.resident_mib() - before < 300

    _run(scenario())


async def _either(guest: Guest, asked: "asyncio.Future[Any]") -> "dict[str, Any] | None":
    reading = asyncio.ensure_future(guest.next_request())
    await asyncio.wait({reading, asked}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        return reading.result()
    reading.cancel()
    return None


def _page(lie: str, turn: int) -> dict[str, Any]:
    if lie == "ever-deeper":
        return {"entries": [["d", 0o040755, 1, 0, 0, 1.0, None]]}
    if lie == "no-end-of-directories":
        return {"entries": [[f"d{n}", 0o040755, 1, 0, 0, 1.0, None] for n in range(300)]}
    entries = [[f"{turn:08}-{n}", 0o100644, 1, 0, 0, 1.0, None] for n in range(1000)]
    return {"entries": entries, "more": True, "last": f"{turn:08}" if lie == "always-more" else "x"}


def test_one_pid_cannot_be_two_commands() -> None:
    """Else the first would wait for an end that the second one took."""

    async def scenario() -> None:
        start = interfaces.Start(["true"], {}, None, "user", [])
        async with hostile() as (made, guest):
            children = []
            for _ in range(2):
                asked = asyncio.ensure_future(made.start(start))
                request = await guest.next_request()
                guest.send({"n": request["n"], "pid": 7})
                try:
                    children.append(await asked)
                except errors.ClocheError:
                    break
            await made.kill("over")
            for child in children:
                with pytest.raises(errors.ClocheError):
                    await asyncio.wait_for(child.exited, 30)

    _run(scenario())


def test_a_command_started_for_nobody_is_ended() -> None:
    """And its end is nobody's: not that of the next command which gets its pid."""

    async def scenario() -> None:
        async with hostile() as (made, guest):
            start = interfaces.Start(["true"], {}, None, "user", [])
            asked = asyncio.ensure_future(made.start(start))
            request = await guest.next_request()
            asked.cancel()
            await _turns(2)
            guest.send({"n": request["n"], "pid": 7})
            order = await guest.next_request()
            assert (order["op"], order["pid"], order["sig"], order["scope"]) == ("signal", 7, 9, "tree")
            guest.send({"n": order["n"], "killed": 1})
            guest.send({"exit": 7, "status": 9})
            await _turns()
            again = asyncio.ensure_future(made.start(start))
            guest.send({"n": (await guest.next_request())["n"], "pid": 7})
            child = await again
            assert not child.exited.done()
            guest.send({"exit": 7, "status": 0})
            assert (await child.exited).exit_code == 0

    _run(scenario())


def test_start_and_end_told_together_are_of_one_command() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            start = interfaces.Start(["true"], {}, None, "user", [], together=True)
            asked = asyncio.ensure_future(made.start(start))
            request = await guest.next_request()
            assert request["together"] is True
            guest.send({"n": request["n"], "pid": 7, "exit": 8, "status": 0})
            assert not (await asked).exited.done(), "the end of another one was taken for its own"
            asked = asyncio.ensure_future(made.start(start))
            guest.send({"n": (await guest.next_request())["n"], "pid": 9, "exit": 9, "status": 3 << 8})
            assert (await asked).exited.result().exit_code == 3

    _run(scenario())


def test_ends_that_nobody_waits_for_are_bounded() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            for pid in range(30_000):
                guest.send({"exit": pid, "status": 0})
                if pid % 50 == 0:
                    await _turns(2)
            assert len(made._early) <= 1000

    _run(scenario())


def test_a_flood_of_file_events_is_bounded() -> None:
    async def scenario() -> None:
        async with hostile() as (made, guest):
            stream = made.watch("/x", recursive=True)
            first = asyncio.ensure_future(anext(stream))
            request = await guest.next_request()
            guest.send({"n": request["n"], "watch": 9})
            before = glass.resident_mib()
            for _ in range(2000):
                guest.send({"watch": 9, "events": [["create", "x" * 1000]] * 30})
                await _turns(2)
            assert (await first).type == "create"
            assert glass.resident_mib() - before < 200
            ending = asyncio.ensure_future(stream.aclose())  # type: ignore[attr-defined]
            request = await guest.next_request()
            guest.send({"n": request["n"]})
            await ending

    _run(scenario())


# --- silence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["stat", "signal", "environment", "start", "open", "connect"])
def test_an_answer_that_never_comes_holds_nobody_else(act: str) -> None:
    async def scenario() -> None:
        async with hostile() as (silent, _), hostile() as (other, good):
            waiting = [asyncio.ensure_future(_calls(silent)[act]()) for _ in range(20)]
            asked = asyncio.ensure_future(other.file_act("stat", "/x"))
            request = await good.next_request()
            good.send({"n": request["n"], "entry": ["x", 0o100644, 1, 1000, 1000, 1.5, None]})
            assert (await asked).entry.name == "x"
            await silent.kill("it does not answer")
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, errors.ClocheError)

    _run(scenario())


@pytest.mark.parametrize("silent", ["at-once", "when-killing"])
def test_a_time_limit_holds_without_the_guest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: str
) -> None:
    """A guest that never starts the command, or never ends it, is ended itself."""
    monkeypatch.setattr(execution, "_DEAF_S", 0.0)

    async def scenario() -> None:
        async with hostile() as (made, guest):
            request = model.ExecRequest(command=["true"], timeout_s=0.01)
            running = execution.Execution("x", request, made, settings.Limits(), str(tmp_path), lambda: None)
            starting = asyncio.ensure_future(running.start())
            if silent == "when-killing":
                asked = await guest.next_request()
                guest.send({"n": asked["n"], "pid": 7})
                await starting
                with pytest.raises(errors.SandboxLost):
                    await asyncio.wait_for(running.result, 30)
            else:
                with pytest.raises(errors.SandboxLost):
                    await asyncio.wait_for(starting, 30)
            assert made.ended.done()

    _run(scenario())


def test_a_guest_that_does_not_read_is_not_waited_for() -> None:
    """Requests queue up to a bound, with their descriptors, and are let go of with the sandbox."""

    async def scenario() -> None:
        before = glass.open_descriptors()
        async with hostile() as (silent, _):
            with a_file() as file:
                start = interfaces.Start(["true"], {"A": "x" * 30_000}, None, "user", [file.fileno()])
                waiting = [asyncio.ensure_future(silent.start(start)) for _ in range(300)]
                await _turns(5)
            await silent.kill("it does not read")
            assert all(
                isinstance(r, errors.ClocheError)
                for r in await asyncio.gather(*waiting, return_exceptions=True)
            )
        assert glass.open_descriptors() <= before + 1

    _run(scenario())


# --- real guests, as far as a program inside can go ---------------------------------------------------------


def test_a_flood_of_refused_calls_is_survived(box: glass.Box) -> None:
    program = """
nr = 40 if ARM else 165
done = sum(call(nr, b"x", b"/", b"tmpfs", 0, 0) == -1 for _ in range(20000))
say(done)
"""
    before = glass.resident_mib()
    assert box.report(program) == 20000
    result = box.python(program)
    assert len(result.denials) <= 256
    with glass.box() as other:
        assert other.works()
    assert box.works()
    assert glass.resident_mib() - before < 100


def test_a_caller_that_dies_while_refused_is_survived(box: glass.Box) -> None:
    program = """
nr = 40 if ARM else 165
for _ in range(300):
    child = os.fork()
    if child == 0:
        while True:
            call(nr, b"x", b"/", b"tmpfs", 0, 0)
    os.kill(child, 9)
    os.waitpid(child, 0)
say(True)
"""
    assert box.report(program) is True
    assert box.works()


@pytest.mark.parametrize("text", ["slashes", "quotes", "colons", "spaces", "lines"])
def test_output_that_is_hard_to_search_is_survived(box: glass.Box, text: str) -> None:
    """Errors are looked for in what a command wrote; the looking must not take the square of its length."""
    unit = {"slashes": "/", "quotes": "'/", "colons": "/x: Read-only", "spaces": " /", "lines": "/a\n"}[text]
    result = box.python(f"sys.stderr.write({unit!r} * (65536 // {len(unit)}))")
    assert result.exit_code == 0


_CHANNEL = """
import json, os, stat, struct
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
channel = next(fd for fd in range(3, 2000) if is_socket(fd))
"""


@pytest.mark.parametrize("language", ["python", "bash"])
def test_a_context_s_channel_cannot_be_flooded(box: glass.Box, language: str) -> None:
    """Code that writes to its context's own socket and pipes without end: bounded memory, and others are served."""
    flood = {
        "bash": "head -c 400M /dev/zero | tr '\\0' 9 >&10",  # where bash keeps it aside
        "python": _CHANNEL
        + "for _ in range(1600):\n    os.write(channel, b'\\x00\\x10\\x00\\x00' + b'9' * 0x40000)",
    }[language]
    before = glass.resident_mib()
    try:
        glass.wait(box.handle.run_code(flood, language=language, timeout_s=20))
    except errors.ClocheError:
        pass
    assert glass.resident_mib() - before < 150
    with glass.box() as other:
        assert other.works()
    assert box.works()


def test_results_without_end_are_bounded(box: glass.Box) -> None:
    """Frames as the interpreter itself would send them, only more than anybody would keep."""
    flood = (
        _CHANNEL
        + """
body = json.dumps({"op": "result", "id": "1", "data": {"text/plain": "x" * (8 << 20)}}).encode()
for _ in range(80):
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(channel, view):]
"""
    )
    before = glass.resident_mib()
    result = glass.wait(box.handle.run_code(flood, timeout_s=40))
    assert result.results  # the twin: some are kept
    assert glass.resident_mib() - before < 300


def test_endless_output_of_a_context_lets_others_work(box: glass.Box) -> None:
    """By count: while one context never stops writing, a hundred commands elsewhere come to their end."""
    glass.wait(box.handle.run_code("import subprocess; p = subprocess.Popen(['yes'])"))
    with glass.box() as other:
        for _ in range(100):
            assert other.out("echo on") == "on\n"


@pytest.mark.parametrize(
    "said",
    [
        b"\0" * 100,
        b"9" * 5000 + b"\0",
        b"-1\0",
        b"x\0" * 1000,
        b"\xff\xff\xff\xff",
        b"\0\0\0\x04null",
        b"\0\0\0\x02{}",
    ],
)
@pytest.mark.parametrize("language", ["python", "bash"])
def test_nonsense_on_a_context_s_channel_is_survived(box: glass.Box, language: str, said: bytes) -> None:
    box.write("/workspace/said", said)
    code = {
        "bash": "cat /workspace/said >&10",
        "python": _CHANNEL + "os.write(channel, open('/workspace/said', 'rb').read())",
    }[language]
    for _ in range(3):
        try:
            glass.wait(box.handle.run_code(code, language=language, timeout_s=20))
        except errors.ClocheError:
            continue
    assert box.works()


def test_link_closes_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        here, there = wire.pair()
        ended: list[str] = []
        made = link.Link(here, on_frame=lambda _frame, fds: wire.close_all(fds), on_end=ended.append)
        made.close("first")
        made.close("second")
        there.close()
        assert ended == ["first"]

    _run(scenario())
