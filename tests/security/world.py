"""A host of our own to attack from inside: a network namespace with every address that must not be reached, and a name service.

The engine is a keeper that runs in it, so what the proxy resolves and dials is this world's. Every address answers on every
port that matters: if a refused connection is made after all, somebody notes it, and that note is what tests judge by. The
machine's own network is not touched.

    good       93.184.216.34, 2606:4700::1111      what rules allow
    evil       93.184.216.35, 2606:4700::2222      as public, and not allowed
    the rest   loopback, private, link-local, shared, metadata
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloche.sdk import portal
from cloche.sdk.sandboxes import AsyncSandbox
from tests.security import glass

GOOD, EVIL = "93.184.216.34", "93.184.216.35"
GOOD6, EVIL6 = "2606:4700::1111", "2606:4700::2222"
INWARD4 = (
    "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.1.1", "169.254.169.254", "169.254.170.2", "100.100.100.200",
    "168.63.129.16", "192.0.2.1", "198.51.100.1",
)  # fmt: skip
INWARD6 = ("fd00::1", "fd00:ec2::254", "2001:db8::1")
PORTS = (22, 25, 80, 443, 3128, 8080, 8443)
ZONE: dict[str, tuple[str, ...]] = {
    "good.test": (GOOD, GOOD6),
    "evil.test": (EVIL, EVIL6),
    "wild.test": (EVIL,),
    "evilwild.test": (EVIL,),
    "wild.test.evil.test": (EVIL,),
    "both.test": (GOOD,),
    "notboth.test": (EVIL,),
    "port.test": (GOOD,),
    "method.test": (GOOD,),
    "upload.test": (GOOD,),
    "raw.test": (GOOD,),
    "denied.test": (EVIL,),
    "to-loopback.test": ("127.0.0.1",),
    "to-loopback6.test": ("::1",),
    "to-private.test": ("10.0.0.1",),
    "to-lan.test": ("192.168.0.1",),
    "to-shared.test": ("100.64.0.1",),
    "to-linklocal.test": ("169.254.1.1",),
    "to-metadata.test": ("169.254.169.254",),
    "to-metadata6.test": ("fd00:ec2::254",),
    "to-alibaba.test": ("100.100.100.200",),
    "to-unique.test": ("fd00::1",),
    "to-mapped.test": ("::ffff:127.0.0.1",),
    "to-any.test": ("0.0.0.0",),
    "to-both.test": ("10.0.0.1", "127.0.0.1"),
    "metadata.google.internal": ("169.254.169.254",),
    "metadata.goog": ("169.254.169.254",),
    "metadata": ("169.254.169.254",),
}
"""What the host's name service says. Names below wild.test and both.test lead to good."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Reached(NamedTuple):
    """Somebody connected, or sent a datagram."""

    address: str
    port: int
    first: bytes


class World:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.reached: list[Reached] = []
        self.asked: list[str] = []
        self.certificate = b""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: list[socket.socket] = []
        resolv = home / "resolv.conf"
        resolv.write_text("nameserver 127.0.0.1\noptions timeout:2 attempts:2\n")
        hosts = home / "hosts"
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        setup = (
            f"mount --make-rprivate / && mount --bind {resolv} /etc/resolv.conf && mount --bind {hosts} /etc/hosts"
            " && ip link set lo up && echo up && exec sleep 100000"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", setup], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", self._holder.stderr and self._holder.stderr.read()
        self._make_addresses()
        self._make_certificate()
        settings = home / "c/cloche/settings.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text(f'[network]\nauthorities = "{home / "cert.pem"}"\n')
        self._in_namespace(self._listen)
        self._run(self._serve)
        self._run(self._serve_names)
        self._run(self._serve_datagrams)
        self._keeper = self._start_keeper()

    # ── the host's side ────────────────────────────────────────────────────────────────────────────

    def _make_addresses(self) -> None:
        lines = [f"addr add {a}/32 dev lo" for a in (GOOD, EVIL, *INWARD4)]
        lines += [f"addr add {a}/128 dev lo nodad" for a in (GOOD6, EVIL6, *INWARD6)]
        self.nsenter("ip", "-batch", "-", stdin="\n".join(lines))

    def nsenter(self, *argv: str, stdin: str = "") -> str:
        command = ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", *argv]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def _make_certificate(self) -> None:
        names = "DNS:good.test,DNS:evil.test,DNS:port.test,DNS:*.wild.test"
        cert, key = self.home / "cert.pem", self.home / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
             "-subj", "/CN=test", "-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)],
            check=True, capture_output=True, timeout=30,
        )  # fmt: skip
        self.certificate = cert.read_bytes()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(cert, key)

    def _in_namespace(self, work: Any) -> None:
        """Run `work` in a thread that has moved there: a socket belongs to the namespace it was made in."""
        failed: list[BaseException] = []

        def moved() -> None:
            try:
                fd = os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                if _libc.setns(fd, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(fd)
                work()
            except BaseException as problem:
                failed.append(problem)

        thread = threading.Thread(target=moved)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def _listen(self) -> None:
        for port in PORTS:
            made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("::", port))
            made.listen(128)
            self._listeners.append(made)
        self._names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._names.bind(("127.0.0.1", 53))
        self._datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self._datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._datagrams.bind(("::", 5353))
        self._listeners += [self._names, self._datagrams]

    def _run(self, work: Any) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        tcp = [s for s in self._listeners if s.type == socket.SOCK_STREAM]
        while not self._stop.is_set():
            ready, _, _ = select.select(tcp, [], [], 0.2)
            for listener in ready:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        address, port = connection.getsockname()[:2]
        address = address.removeprefix("::ffff:")
        index = len(self.reached)
        self.reached.append(Reached(address, port, b""))
        connection.settimeout(10)
        try:
            if port in (443, 8443) and connection.recv(1, socket.MSG_PEEK) == b"\x16":
                connection = self._tls.wrap_socket(connection, server_side=True)
            first = connection.recv(65536)
            self.reached[index] = Reached(address, port, first)
            path = first.split(b" ")[1] if first.count(b" ") >= 2 else b""
            if path.startswith(b"/echo"):
                connection.sendall(_echo(first, path))
            elif path.startswith(b"/redirect/"):
                to = path.removeprefix(b"/redirect/")
                head = (
                    b"HTTP/1.1 302 Found\r\nLocation: "
                    + to
                    + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                connection.sendall(head)
            else:
                body = b"reached " + address.encode() + b" " + path + b"\n"
                size = str(len(body)).encode()
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: " + size + b"\r\nConnection: close\r\n\r\n" + body
                )
        except (OSError, ssl.SSLError, IndexError):
            pass
        finally:
            connection.close()

    def _serve_names(self) -> None:
        self._names.settimeout(0.2)
        while not self._stop.is_set():
            try:
                query, peer = self._names.recvfrom(4096)
            except TimeoutError:
                continue
            except OSError:
                return
            with contextlib.suppress(OSError, IndexError, struct.error):
                self._names.sendto(self._resolve(query), peer)

    def _resolve(self, query: bytes) -> bytes:
        labels, place = [], 12
        while size := query[place]:
            labels.append(query[place + 1 : place + 1 + size].decode("latin-1"))
            place += size + 1
        name = ".".join(labels).lower()
        kind = struct.unpack(">H", query[place + 1 : place + 3])[0]
        question = query[12 : place + 5]
        self.asked.append(name)
        found = ZONE.get(name)
        if found is None and name.endswith((".wild.test", ".both.test")):
            found = (GOOD,)
        answers = b""
        count = 0
        for address in found or ():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if kind == (28 if family == socket.AF_INET6 else 1):
                raw = socket.inet_pton(family, address)
                answers += b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 1, len(raw)) + raw
                count += 1
        flags = 0x8180 if found is not None else 0x8183
        return query[:2] + struct.pack(">HHHHH", flags, 1, count, 0, 0) + question + answers

    def _serve_datagrams(self) -> None:
        self._datagrams.settimeout(0.2)
        while not self._stop.is_set():
            try:
                data, _ = self._datagrams.recvfrom(4096)
                self.reached.append(Reached("datagram", 5353, data))
            except TimeoutError:
                continue
            except OSError:
                return

    # ── the engine in it ───────────────────────────────────────────────────────────────────────────

    def _start_keeper(self) -> "subprocess.Popen[bytes]":
        sources = str(Path(__file__).parents[2] / "src")
        program = f"import os, sys; sys.path[:0] = [{sources!r}]; os.dup2(1, 3); from cloche.cli.keeper import main; main()"
        keeper = subprocess.Popen(
            ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--", sys.executable, "-I", "-c", program, "", "tell"],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        return keeper

    def cloche(self, *words: str, stdin: bytes = b"") -> str:
        """The command line, as the owner of this world uses it."""
        sources = str(Path(__file__).parents[2] / "src")
        program = f"import sys; sys.path[:0] = [{sources!r}]; sys.argv[0] = 'cloche'; from cloche.cli.thin import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-I", "-c", program, *words], env=self.environment, input=stdin, capture_output=True, timeout=50
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.decode()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "CLOCHE_HOME": str(self.state), "CLOCHE_KEEPER": "on",
            "XDG_CONFIG_HOME": str(self.home / "c"),
        }  # fmt: skip

    @property
    def state(self) -> Path:
        return self.home / "s"

    def box(self, **options: Any) -> "Inmate":
        return Inmate(self, **options)

    def close(self) -> None:
        for process in (self._keeper, self._holder):
            process.send_signal(signal.SIGTERM)
        for process in (self._keeper, self._holder):
            process.communicate(timeout=30)
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        for listener in self._listeners:
            listener.close()


def _echo(request: bytes, path: bytes) -> bytes:
    """The request, sent back: whole, or in chunks of one byte so that nothing is found by looking at a piece."""
    if path.startswith(b"/echo-chunks"):
        chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in request)
        return (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            + chunks
            + b"0\r\n\r\n"
        )
    fields = [line for line in request.split(b"\r\n") if line.lower().startswith(b"authorization:")]
    told = (
        b"".join(b"X-Echo: " + field + b"\r\n" for field in fields) if path.startswith(b"/echo-head") else b""
    )
    size = str(len(request)).encode()
    return (
        b"HTTP/1.1 200 OK\r\n"
        + told
        + b"Content-Length: "
        + size
        + b"\r\nConnection: close\r\n\r\n"
        + request
    )


class Inmate(glass.Box):
    """A sandbox of this world's keeper, with a program in it that tries to get out."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.handle: AsyncSandbox = portal.run(
            AsyncSandbox.create(server=f"unix:{world.state / 'cloche.sock'}", timeout_s=None, **options)
        )
        self.write("/tmp/try.py", ATTEMPT)
        self.write("/tmp/ca.pem", world.certificate)

    def attempts(self, tries: "list[list[str | bytes]]") -> list[Any]:
        """Try things, each a way and its words; what the program saw. Its word is for debugging only."""
        coded = [[way, [_hex(word) for word in words]] for way, *words in tries]
        result = self.exec(["python3", "-I", "/tmp/try.py"], stdin=json.dumps(coded).encode(), timeout_s=100)
        assert result.exit_code == 0, result.stderr[-2000:]
        found: list[Any] = json.loads(result.stdout)
        assert len(found) == len(tries)
        return found

    def attempt(self, *words: "str | bytes") -> Any:
        return self.attempts([list(words)])[0]


def _hex(word: "str | bytes") -> str:
    return (word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word).hex()


ATTEMPT = (
    Path(__file__).with_name("attempt.py").read_text()
    if Path(__file__).with_name("attempt.py").exists()
    else ""
)


@contextlib.contextmanager
def opened() -> Iterator[World]:
    if os.geteuid() != 0:
        pytest.skip("a network namespace with addresses of its own needs root")
    with tempfile.TemporaryDirectory(prefix="cw-", ignore_cleanup_errors=True) as home:
        world = World(Path(home))
        try:
            yield world
        finally:
            world.close()
