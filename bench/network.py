"""Rows 13 to 16: what the way out costs. A server on this machine's loopback, in a process of its own; the same client program
beside the sandbox (direct) and inside it (through the proxy), in turns, one request or one download each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloche
from bench import records, setup
from cloche.sdk import portal

_MIB = 1 << 20
_TUNNELS = 1000

# Lines of input: `get`, `load N`, `tunnels N`; each is answered by one line with seconds (or a count and seconds).
_CLIENT = r"""
import socket, ssl, sys, time
proxied, address, secure, plain, echo, pem = sys.argv[1] == "proxied", *sys.argv[2:]
trust = ssl.create_default_context(cadata=pem)
target = {"secure": ("bench.test", 443), "plain": ("bench.test", 8080), "echo": ("bench.test", 7)}
ports = {"secure": int(secure), "plain": int(plain), "echo": int(echo)}

def dial(which):
    if not proxied:
        made = socket.create_connection((address, ports[which]))
    else:
        made = socket.create_connection(("127.0.0.1", 3128))
        host, port = target[which]
        made.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += made.recv(1)
        if b" 200 " not in head:
            raise SystemExit(head.decode())
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made

def get():
    with trust.wrap_socket(dial("secure"), server_hostname="bench.test") as made:
        made.sendall(b"1\n")
        while made.recv(65536):
            pass

def load(which, size):
    made = dial(which)
    if which == "secure":
        made = trust.wrap_socket(made, server_hostname="bench.test")
    buffer = bytearray(1 << 20)
    with made:
        made.sendall(f"{size}\n".encode())
        got = 0
        while count := made.recv_into(buffer):
            got += count
    assert got == size, got

def tunnels(count):
    open_ = []
    for _ in range(count):
        try:
            open_.append(dial("echo"))
        except (OSError, SystemExit):
            break
    for made in open_:
        made.sendall(b"x")
    return sum(1 for made in open_ if made.recv(1) == b"x")

for line in sys.stdin:
    word, *rest = line.split()
    start = time.perf_counter()
    value = ""
    if word == "get":
        get()
    elif word == "load":
        load(rest[0], int(rest[1]))
    else:
        value = f"{tunnels(int(rest[0]))} "
    print(f"{value}{time.perf_counter() - start}", flush=True)
"""

_SERVER = r"""
import os, socket, ssl, sys, threading
trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
trust.load_cert_chain(sys.argv[1], sys.argv[2])
zeros = os.memfd_create("zeros")
os.ftruncate(zeros, 1 << 30)
block = bytes(1 << 20)

def answer(client, secure):
    try:
        if secure:
            client = trust.wrap_socket(client, server_side=True)
        size = int(client.recv(100))
        if not secure:
            offset = 0
            while offset < size:
                offset += os.sendfile(client.fileno(), zeros, offset, size - offset)
        else:
            while size:
                size -= client.send(block[:size])
        if secure:
            client = client.unwrap()
        client.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    client.close()

def echo(client):
    try:
        while data := client.recv(100):
            client.sendall(data)
    except OSError:
        pass

listeners = [socket.create_server(("127.0.0.1", 0), backlog=2048) for _ in range(3)]
print(*(one.getsockname()[1] for one in listeners), flush=True)

def serve(listener, handle):
    while True:
        client = listener.accept()[0]
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=handle, args=(client,), daemon=True).start()

threading.stack_size(1 << 18)
for listener, handle in zip(listeners, (lambda c: answer(c, True), lambda c: answer(c, False), echo)):
    threading.Thread(target=serve, args=(listener, handle), daemon=True).start()
sys.stdin.read()
"""


class Server:
    def __init__(self, scratch: str) -> None:
        cert, key = os.path.join(scratch, "cert.pem"), os.path.join(scratch, "key.pem")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
             "-out", cert, "-days", "2", "-subj", "/CN=bench", "-addext", "subjectAltName=DNS:bench.test"],
            check=True, capture_output=True,
        )  # fmt: skip
        with open(cert) as file:
            self.certificate = file.read()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, cert, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.ports = [int(port) for port in self._process.stdout.readline().split()]

    @property
    def resolve(self) -> dict[str, str]:
        return {
            f"bench.test:{port}": f"127.0.0.1:{real}"
            for port, real in zip((443, 8080, 7), self.ports, strict=True)
        }

    def arguments(self, how: str) -> list[str]:
        return ["python3", "-c", _CLIENT, how, "127.0.0.1", *map(str, self.ports), self.certificate]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


class Client:
    """The client program somewhere: `ask("get")` gives what it answers."""

    def __init__(self, write: Callable[[str], Any], read: Callable[[], str]) -> None:
        self._write = write
        self._read = read

    def ask(self, words: str) -> list[float]:
        self._write(words + "\n")
        return [float(word) for word in self._read().split()]


@contextmanager
def direct(server: Server) -> Iterator[Client]:
    made = subprocess.Popen(
        server.arguments("direct"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert made.stdin is not None
    assert made.stdout is not None
    try:
        yield Client(made.stdin.write, made.stdout.readline)
    finally:
        made.stdin.close()
        made.stdout.close()
        made.wait()


@contextmanager
def inside(server: Server, box: cloche.Sandbox) -> Iterator[Client]:
    process = box.start(server.arguments("proxied"))
    stream = process.stream()
    buffer = [""]

    def read() -> str:
        while "\n" not in buffer[0]:
            event = next(stream)
            if isinstance(event, cloche.Output):
                buffer[0] += event.data.decode()
                if event.stream == "stderr":
                    raise RuntimeError(buffer[0])
        line, _, buffer[0] = buffer[0].partition("\n")
        return line

    try:
        yield Client(process.write, read)
    finally:
        process.kill()


@contextmanager
def scene(bench: setup.Bench) -> Iterator[tuple[Server, cloche.Sandbox]]:
    if shutil.which("openssl") is None:
        raise LookupError("openssl is not installed")
    server = Server(bench.scratch)
    try:
        with cloche.Sandbox(
            allow=["bench.test"], resolve=server.resolve, timeout_s=None, memory_mib=1024
        ) as box:
            yield server, box
    finally:
        server.close()
        setup.close_engine()


def request(bench: setup.Bench) -> list[records.Row]:
    """Row 13."""
    row = records.Row(
        key="row13", name="what the proxy adds to an HTTPS request",
        boundary="the client connects → the answer's last byte, with a new TLS connection; less the median of the same without",
        subject=records.Series(name="added"), beside=[records.Series(name="direct"), records.Series(name="through the proxy")],
        bars=[records.Bar(value=1)],
    )  # fmt: skip
    with scene(bench) as (server, box), direct(server) as near, inside(server, box) as far:
        setup.hold(row, box.info())
        setup.interleave(
            bench.count(500),
            (row.beside[0], lambda: near.ask("get")[0] * 1000),
            (row.beside[1], lambda: far.ask("get")[0] * 1000),
        )
    for sample in row.beside[1].samples:
        row.subject.add(sample - row.beside[0].p50)
    return [row]


def download(bench: setup.Bench) -> list[records.Row]:
    """Row 14: plain bytes, where nothing but copying is measured, and TLS, which costs the ends more than the way."""
    made = []
    size = 64 * _MIB if bench.quick else 1024 * _MIB
    with scene(bench) as (server, box), direct(server) as near, inside(server, box) as far:
        for which, words in (("plain", "plain bytes"), ("secure", "TLS")):
            row = records.Row(
                key="row14", name=f"1 GB download, {words}", boundary="the client connects → the last byte",
                subject=records.Series(name="through the proxy", unit="MB/s"), beside=[records.Series(name="direct", unit="MB/s")],
                bars=[records.Bar(value=0.6, at_least=True, of="direct")],
            )  # fmt: skip
            setup.hold(row, box.info())
            order = f"load {which} {size}"
            setup.interleave(
                3 if bench.quick else 7,
                (row.beside[0], _rate(near, order, size)),
                (row.subject, _rate(far, order, size)),
            )
            made.append(row)
    return made


def _rate(client: Client, order: str, size: int) -> setup.Measure:
    return lambda: size / client.ask(order)[0] / 1e6


def tunnels(bench: setup.Bench) -> list[records.Row]:
    """Row 15."""
    row = records.Row(
        key="row15", name="parallel tunnels of one sandbox", boundary="opened one after the other; all answer one byte while all are open",
        subject=records.Series(name="cloche", unit="tunnels"), bars=[records.Bar(value=_TUNNELS, unit="tunnels", at_least=True)],
    )  # fmt: skip
    with scene(bench) as (server, box), inside(server, box) as far:
        setup.hold(row, box.info())
        count, seconds = far.ask(f"tunnels {_TUNNELS}")
        row.subject.add(count)
        row.notes.append(f"{seconds:.2f} s to open them and hear from each")
    return [row]


def binding(bench: setup.Bench) -> list[records.Row]:
    """Row 16."""
    row = records.Row(
        key="row16", name="network rules bound to a sandbox that waits", boundary="the engine is asked → the rules hold and commands to come know the proxy",
        subject=records.Series(name="cloche"), beside=[records.Series(name="other rules for one that has some")],
        bars=[records.Bar(value=1)],
    )  # fmt: skip
    rules = {"network": {"allow": ["pypi.org", "*.pythonhosted.org:443", "github.com"]}}

    async def one(backend: Any, sandbox: str) -> float:
        start = time.perf_counter()
        await backend.update_policy(sandbox, rules)
        return (time.perf_counter() - start) * 1000

    async def prepare(backend: Any, sandbox: str) -> None:
        """As for a sandbox that waits in a pool."""
        await backend._networks.prepare(backend._sandboxes[sandbox].machine)

    with cloche.Sandbox(allow=["pypi.org"]) as other:
        setup.hold(row, other.info())
        for _ in range(bench.count(100)):
            with cloche.Sandbox() as box:
                backend = box._async._backend
                portal.run(prepare(backend, box.id))
                row.subject.add(portal.run(one(backend, box.id)))
                row.beside[0].add(portal.run(one(backend, other.id)))
    setup.close_engine()
    return [row]
