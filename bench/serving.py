"""Rows 43 to 47: `cloche serve` as its clients see it. The server is a process of its own; clients and server share the machine's cores.

The client speaks HTTP by hand, so that the figure is the server's and not a client library's. Beside it stands a bare Starlette application that answers with what it was sent,
served by the same uvicorn with the same parsers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import cloche
from bench import commands, records, setup, throughput

_START_S = 30.0
_ECHO = """
import asyncio, sys, uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
async def echo(request):
    return Response(await request.body(), media_type="application/json")
app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), http="httptools", log_level="error", access_log=False)
"""


class Served(NamedTuple):
    url: str
    key: str
    socket: str
    process: subprocess.Popen[str]
    home: str

    @property
    def rss_mib(self) -> float:
        return _rss_kib(self.process.pid) / 1024


@contextmanager
def serving(bench: setup.Bench) -> Iterator[Served]:
    home = bench.home + ".served"
    os.makedirs(home, mode=0o700)
    environment = {**os.environ, "CLOCHE_HOME": home}
    environment.pop("CLOCHE_URL", None)
    process = subprocess.Popen(
        [*commands.CLOCHE, "serve", "--port", "0", "--json"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with open(told["key_file"]) as file:
            key = file.read().strip()
        yield Served(told["url"], key, os.path.join(home, "cloche.sock"), process, home)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(home, ignore_errors=True)


# ── a client by hand ───────────────────────────────────────────────────────────────────────────────


class Wire:
    """One connection that is kept, and one request at a time on it."""

    def __init__(self, url: str, key: str) -> None:
        at = urlsplit(url)
        self._address = (at.hostname or "", at.port or 80)
        self._head = f"Host: {at.netloc}\r\nAuthorization: Bearer {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> bytes:
        reader, status, headers = await self._begin(method, path, body)
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status} {content[:300]!r}")
        return content

    @asynccontextmanager
    async def events(self, method: str, path: str, body: Any = None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The chunks of an answer that goes on, each with the moment of its arrival left to the caller."""
        reader, status, _ = await self._begin(method, path, body)
        if status >= 400:
            raise RuntimeError(f"{method} {path}: {status}")
        try:
            yield _chunks(reader)
        finally:
            await self.close()

    async def _begin(
        self, method: str, path: str, body: Any
    ) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\nContent-Type: application/json\r\n\r\n"
        writer.write(head.encode() + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        return reader, int(lines[0].split(" ", 2)[1]), headers

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _create(wire: Wire) -> str:
    found: str = json.loads(await wire.ask("POST", "/v1/sandboxes", {"timeout_s": 3600}))["id"]
    return found


def _held(row: records.Row, served: Served) -> None:
    """What is in force in a sandbox as this server makes them."""
    with cloche.Sandbox(server=f"unix:{served.socket}") as box:
        setup.hold(row, box.info())
    setup.close_engine()


# ── one request ────────────────────────────────────────────────────────────────────────────────────


def execute(bench: setup.Bench) -> list[records.Row]:
    """Rows 43 and 43b."""
    rows = [
        records.Row(
            key="row43", name="exec of `true` over the unix socket", boundary="`box.exec` of the synchronous SDK is called → its result returned",
            subject=records.Series(name="cloche"), bars=[records.Bar(value=4)],
        ),
        records.Row(
            key="row43b", name="exec of `true` over HTTP", boundary="the request is written → its answer is read, one kept connection",
            subject=records.Series(name="cloche"),
        ),
    ]  # fmt: skip
    echo = records.Series(name="Starlette echo")
    with (
        serving(bench) as served,
        _echoing() as echo_url,
        cloche.Sandbox(server=f"unix:{served.socket}") as box,
    ):
        for row in rows:
            row.beside = [echo]
            setup.hold(row, box.info())
        loop = asyncio.new_event_loop()
        ours, theirs = Wire(served.url, served.key), Wire(echo_url, "")
        body = {"command": ["true"]}
        path = f"/v1/sandboxes/{loop.run_until_complete(_create(ours))}/exec"

        def asked(wire: Wire, path: str) -> Callable[[], float]:
            return setup.timed(lambda: loop.run_until_complete(wire.ask("POST", path, body)))

        contestants = (
            (rows[0].subject, setup.timed(lambda: box.exec(["true"]))),
            (rows[1].subject, asked(ours, path)),
            (echo, asked(theirs, "/echo")),
        )
        for _, measure in contestants:
            for _ in range(setup.WARM_UP):
                measure()
        setup.interleave(bench.count(1000), *contestants)
        loop.run_until_complete(ours.close())
        loop.run_until_complete(theirs.close())
        loop.close()
    setup.close_engine()
    return rows


@contextmanager
def _echoing() -> Iterator[str]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", _ECHO, str(port)])
    try:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


_TICKS = (
    "import time\nfor _ in range({n}):\n    time.sleep(0.01)\n    print(time.monotonic_ns(), flush=True)\n"
)


def first_byte(bench: setup.Bench) -> list[records.Row]:
    """Row 44."""
    row = records.Row(
        key="row44", name="what a process writes, until a client of `/run/stream` has it",
        boundary="the process reads the clock, then writes → the event's bytes are in the client's hands",
        subject=records.Series(name="cloche"), bars=[records.Bar(value=3)],
    )  # fmt: skip

    async def listen(served: Served) -> None:
        wire = Wire(served.url, served.key)
        program = _TICKS.format(n=bench.count(500))
        async with wire.events("POST", "/run/stream", {"command": ["python3", "-c", program]}) as chunks:
            async for chunk in chunks:
                now = time.monotonic_ns()
                if b"event: stdout" in chunk:
                    written = json.loads(chunk.split(b"data: ", 1)[1].split(b"\n", 1)[0])["text"].split()[-1]
                    row.subject.add((now - int(written)) / 1e6)

    with serving(bench) as served:
        _held(row, served)
        asyncio.run(listen(served))
    return [row]


# ── many requests ──────────────────────────────────────────────────────────────────────────────────


def sustained(bench: setup.Bench) -> list[records.Row]:
    """Row 45."""
    row = records.Row(
        key="row45", name="execs a second over HTTP, sustained, server and clients on 2 cores",
        boundary="answers read per second, counted over each second", subject=records.Series(name="cloche", unit="/s"),
        beside=[records.Series(name="Starlette echo", unit="/s")], bars=[records.Bar(value=300, unit="/s", at_least=True)],
    )  # fmt: skip
    seconds = 2.0 if bench.quick else 20.0
    with throughput.two_cores(), serving(bench) as served, _echoing() as echo_url:
        _held(row, served)
        tried: dict[int, float] = {}
        for level in (4, 8, 16, 32):
            tried[level] = throughput.rate(asyncio.run(_execs(served, level, seconds / 5)), seconds / 5)
        best = max(tried, key=lambda level: tried[level])
        for series, ends in (
            (row.subject, asyncio.run(_execs(served, best, seconds))),
            (row.beside[0], asyncio.run(_load([Wire(echo_url, "") for _ in range(best)], ["/echo"] * best, seconds / 5))),
        ):  # fmt: skip
            for second in range(max(1, int(max(ends)))):
                series.add(float(sum(1 for end in ends if second <= end < second + 1)))
    row.notes.append(
        "tried (/s): " + ", ".join(f"{level} connections {rate:.0f}" for level, rate in tried.items())
    )
    return [row]


async def _execs(served: Served, level: int, seconds: float) -> list[float]:
    wires = [Wire(served.url, served.key) for _ in range(level)]
    boxes = [await _create(wires[0]) for _ in range(min(4, level))]
    paths = [f"/v1/sandboxes/{boxes[number % len(boxes)]}/exec" for number in range(level)]
    ends = await _load(wires, paths, seconds)
    for box in boxes:
        await wires[0].ask("DELETE", f"/v1/sandboxes/{box}")
    for wire in wires:
        await wire.close()
    return ends


async def _load(wires: list[Wire], paths: list[str], seconds: float) -> list[float]:
    ends: list[float] = []
    start = time.perf_counter()

    async def work(wire: Wire, path: str) -> None:
        while time.perf_counter() - start < seconds:
            await wire.ask("POST", path, {"command": ["true"]})
            ends.append(time.perf_counter() - start)

    await asyncio.gather(*(work(wire, path) for wire, path in zip(wires, paths, strict=True)))
    return ends


def streams(bench: setup.Bench) -> list[records.Row]:
    """Row 46."""
    count = 50 if bench.quick else 1000
    row = records.Row(
        key="row46", name=f"{count:,} streams of running commands at once: an event to each",
        boundary="the command's line is written → the last of the clients has it", subject=records.Series(name="cloche"),
    )  # fmt: skip

    async def main(served: Served) -> float:
        wire = Wire(served.url, served.key)
        boxes = [await _create(wire) for _ in range(10)]
        program = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
        body = {"command": ["python3", "-c", program], "open_stdin": True}
        told = {
            box: json.loads(await wire.ask("POST", f"/v1/sandboxes/{box}/executions", body))["id"]
            for box in boxes
        }
        heard: asyncio.Queue[int] = asyncio.Queue()
        ready = 0

        async def follow(box: str) -> None:
            nonlocal ready
            own = Wire(served.url, served.key)
            async with own.events("GET", f"/v1/sandboxes/{box}/executions/{told[box]}/stream") as chunks:
                ready += 1
                async for chunk in chunks:
                    for _ in range(chunk.count(b"event: stdout")):
                        heard.put_nowait(1)

        followers = [asyncio.ensure_future(follow(boxes[number % len(boxes)])) for number in range(count)]
        while ready < count:
            await asyncio.sleep(0.05)
            for follower in followers:
                if follower.done():
                    follower.result()
        for _ in range(bench.count(20)):
            before = time.perf_counter()
            for box in boxes:
                await wire.ask("POST", f"/v1/sandboxes/{box}/executions/{told[box]}/stdin", {"data": "x\n"})
            for _ in range(count):
                await asyncio.wait_for(heard.get(), 60)
            row.subject.add((time.perf_counter() - before) * 1e3)
        rss = served.rss_mib
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        for box in boxes:
            await wire.ask("DELETE", f"/v1/sandboxes/{box}")
        return rss

    with serving(bench) as served:
        _held(row, served)
        idle = served.rss_mib
        rss = asyncio.run(main(served))
    row.notes.append(f"the server's memory: {idle:.0f} MiB before, {rss:.0f} MiB with {count:,} streams")
    return [row]


def memory(bench: setup.Bench) -> list[records.Row]:
    """Rows 47 and 47b."""
    count = 100_000 if bench.full else 10_000
    count = 500 if bench.quick else count
    idle = records.Row(
        key="row47", name="the server's memory, idle", boundary="VmRSS of `cloche serve` after one request",
        subject=records.Series(name="cloche", unit="MiB"), bars=[records.Bar(value=120, unit="MiB")],
    )  # fmt: skip
    after = records.Row(
        key="row47b", name=f"the same after {count:,} requests", boundary="VmRSS, after every tenth of the requests",
        subject=records.Series(name="cloche", unit="MiB"), beside=[records.Series(name="after the first tenth", unit="MiB")],
        bars=[records.Bar(value=1.05, of="after the first tenth")],
    )  # fmt: skip

    async def ask(served: Served, number: int) -> None:
        wires = [Wire(served.url, served.key) for _ in range(8)]
        box = await _create(wires[0])

        async def work(wire: Wire, share: int) -> None:
            for turn in range(share):
                if turn % 20 == 0:
                    await wire.ask("POST", f"/v1/sandboxes/{box}/exec", {"command": ["true"]})
                else:
                    await wire.ask("GET", f"/v1/sandboxes/{box}" if turn % 2 else "/v1/sandboxes")

        await asyncio.gather(*(work(wire, number // len(wires)) for wire in wires))
        await wires[0].ask("DELETE", f"/v1/sandboxes/{box}")
        for wire in wires:
            await wire.close()

    with serving(bench) as served:
        _held(idle, served)
        after.held, after.whole = idle.held, idle.whole
        idle.subject.add(served.rss_mib)
        for tenth in range(10):
            asyncio.run(ask(served, count // 10))
            (after.beside[0] if tenth == 0 else after.subject).add(served.rss_mib)
    after.notes.append("one in twenty runs a command; the rest reads; the sandbox changes every tenth")
    return [idle, after]


def _rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
