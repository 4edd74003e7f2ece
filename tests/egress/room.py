"""What the network tests work with: a namespace with commands in it, a server that remembers, a proxy that reports."""

import asyncio
import contextlib
import functools
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloche.egress import process, records
from cloche.guest import wire
from cloche.policy import rules

INSIDE = Path(__file__).with_name("inside.py")


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine, run to its end in a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def whole() -> None:
            await test(**fixtures)

        asyncio.run(whole())

    return run


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Inside:
    """A network namespace with a process in it."""

    def __init__(self, mode: str, how: str = "nft") -> None:
        if mode == "root" and os.geteuid() != 0:
            pytest.skip("needs uid 0")
        here, there = wire.pair()
        there.set_inheritable(True)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(INSIDE), str(there.fileno()), mode, how],
            pass_fds=[there.fileno()],
            stderr=subprocess.PIPE,
        )
        there.close()
        self._link = here
        received = wire.receive(here)
        if received is None:
            assert self._process.stderr is not None
            pytest.fail(self._process.stderr.read().decode())
        message, fds = received
        self.how = message["how"]
        self.note = str(message["note"])
        roles: Any = message["roles"]
        self.sockets = [(role, socket.socket(fileno=fd)) for role, fd in zip(roles, fds, strict=True)]

    def run(self, *argv: str, proxy: bool = False, env: dict[str, str] | None = None, cwd: str = "/") -> Done:
        wire.send(self._link, {"argv": argv, "proxy": proxy, "env": env or {}, "cwd": cwd})
        received = wire.receive(self._link)
        assert received is not None
        return Done(**received[0])  # type: ignore[arg-type]

    async def arun(self, *argv: str, **options: Any) -> Done:
        return await asyncio.to_thread(self.run, *argv, **options)

    def close(self) -> None:
        for _, one in self.sockets:
            one.close()
        self._link.close()
        self._process.wait(10)
        assert self._process.stderr is not None
        self._process.stderr.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Host", "")))
        self.server.authorizations.append(self.headers.get("Authorization", ""))
        size = int(self.path.rpartition("/big/")[2]) if "/big/" in self.path else 0
        body = b"x" * size if size else f"hello from {self.path}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        if length is not None:
            count = len(self.rfile.read(int(length)))
        else:
            count = 0
            while size := int(self.rfile.readline(), 16):
                count += len(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
        self.server.requests.append((self.command, self.path, self.headers.get("Host", "")))
        body = f"{count} bytes\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Server(http.server.ThreadingHTTPServer):
    """An HTTP(S) server on the host's loopback; it counts connections, for a refusal is proved by its absence."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.context = context
        self.connections = 0
        self.requests: list[tuple[str, str, str]] = []
        self.authorizations: list[str] = []
        self.port = self.server_address[1]
        self.address = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def get_request(self) -> Any:
        client, peer = super().get_request()
        self.connections += 1
        if self.context is not None:
            client.settimeout(10)
            client = self.context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, peer

    def handle_error(self, *_: object) -> None: ...

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5)


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    made = Server(context)
    try:
        yield made
    finally:
        made.close()


class Egress:
    """A real proxy process, and what it reported."""

    def __init__(self, **options: Any) -> None:
        self.process = process.EgressProcess(
            options=records.Options(**options), on_record=self.heard, on_fault=self.fault
        )
        self.records: list[records.Record] = []
        self.faults: list[str] = []
        self._changed = asyncio.Event()

    def heard(self, record: records.Record) -> None:
        self.records.append(record)
        self._changed.set()

    def fault(self, reason: str) -> None:
        self.faults.append(reason)
        self._changed.set()

    async def reported(self, **wanted: object) -> records.Record:
        """The first record with these fields; waits for it."""
        async with asyncio.timeout(15):
            while True:
                for record in self.records:
                    if all(getattr(record, field) == value for field, value in wanted.items()):
                        return record
                self._changed.clear()
                await self._changed.wait()

    def denials(self) -> list[tuple[str, int, str]]:
        return [(r.host, r.port, r.reason) for r in self.records if r.verdict == "deny"]


@contextlib.asynccontextmanager
async def egress(
    inside: Inside | None = None, policy: rules.RuleSet | None = None, **options: Any
) -> AsyncIterator[Egress]:
    made = Egress(**options)
    async with made.process:
        if inside is not None:
            await made.process.attach("s1", inside.sockets, policy or rules.RuleSet())
        yield made


def certificate(directory: Path, *hosts: str) -> tuple[Path, Path]:
    """A self-signed certificate for these names."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = directory / "cert.pem", directory / "key.pem"
    names = ",".join(f"DNS:{host}" for host in hosts)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={names}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
