"""A TLS server that repeats what it is told, in every way a server might, and remembers what it got."""

import base64
import contextlib
import gzip
import hashlib
import http.server
import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from cloche.egress import authority


class Got:
    """One request as it arrived."""

    def __init__(self, handler: "_Handler", body: bytes) -> None:
        self.method = handler.command
        self.path = handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self.raw = handler.headers.as_bytes()
        self.body = body
        self.host = handler.server.host


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "Echo"
    protocol_version = "HTTP/1.1"
    timeout = 20

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _serve(self) -> None:
        body = b"" if self.path.startswith("/sink") or self.path.startswith("/early") else self._body()
        got = Got(self, body)
        self.server.got.append(got)
        way = urlsplit(self.path).path.split("/")[1]
        getattr(self, f"_{way}", self._plain)(got)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_TRACE = _serve

    def _said(self, got: Got) -> bytes:
        said = got.headers.get("authorization") or got.headers.get("x-api-key") or ""
        return (said or parse_qs(urlsplit(self.path).query).get("key", [""])[0]).encode()

    def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _plain(self, got: Got) -> None:
        self._send(
            json.dumps(
                {"path": got.path, "headers": got.headers, "body": got.body.decode("latin-1")}
            ).encode()
        )

    def _inheader(self, got: Got) -> None:
        said = self._said(got).decode()
        self._send(
            b"see the head\n", X_Echo=said, Set_Cookie=f"a={quote(said)}", X_Token=said.rpartition(" ")[2]
        )

    def _spelt(self, got: Got) -> None:
        said = self._said(got).rpartition(b" ")[2]
        lines = [
            said,
            base64.b64encode(said),
            base64.b64encode(b"user:" + said),
            base64.b64encode(b"u:" + said),
        ]
        lines += [
            base64.urlsafe_b64encode(said),
            quote(said, "").encode(),
            json.dumps(said.decode()).encode(),
        ]
        self._send(b"\n".join([*lines, said.hex().encode()]))

    def _gzip(self, got: Got) -> None:
        self._send(gzip.compress(self._said(got)), Content_Encoding="gzip")

    def _tegzip(self, got: Got) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "gzip, chunked")
        self.end_headers()
        data = gzip.compress(self._said(got))
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n")

    def _split(self, got: Got) -> None:
        """Chunks of one byte."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Trailer", "X-Last")
        self.end_headers()
        for byte in b"before " + self._said(got) + b" after":
            self.wfile.write(b"1;ext=1\r\n" + bytes([byte]) + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\nX-Last: " + self._said(got) + b"\r\n\r\n")

    def _big(self, got: Got) -> None:
        """/big/SIZE: that many bytes, the echo in the middle of them."""
        size = int(self.path.split("/")[2])
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        said = self._said(got)
        piece = b"x" * 65536
        left = size - len(said)
        middle = left // 2
        while left:
            if left <= middle and said:
                self.wfile.write(said)
                said = b""
            count = min(left, len(piece), left - middle if left > middle else left)
            self.wfile.write(piece[:count])
            left -= count

    def _sink(self, got: Got) -> None:
        """Reads a body without keeping it."""
        left = count = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 65536)))
        self._send(f"{count} bytes".encode())

    def _early(self, got: Got) -> None:
        """Refuses before it has read the body."""
        self.close_connection = True
        self._send(b"too large\n", 413, Connection="close")

    def _redirect(self, got: Got) -> None:
        self._send(b"", 302, Location=f"{self.server.elsewhere}/landed?was={quote(self._said(got), '')}")

    def _ranged(self, got: Got) -> None:
        said = self._said(got)
        asked = got.headers.get("range")
        if asked is None:
            self._send(said)
            return
        first, last = map(int, asked.partition("=")[2].split("-"))
        self._send(said[first : last + 1], 206, Content_Range=f"bytes {first}-{last}/{len(said)}")

    def _untilend(self, got: Got) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"until the end: " + self._said(got))
        self.wfile.flush()
        self.request.unwrap()

    def _both(self, got: Got) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"0\r\n\r\n")

    def _garbage(self, got: Got) -> None:
        self.close_connection = True
        self.wfile.write(b"\x00\x01\x02 this is not HTTP\r\n\r\n")

    def _cut(self, got: Got) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _events(self, got: Got) -> None:
        """One event, and then the next only after it was read (the test says so by `go`)."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in (b"data: first\n\n", b"data: " + self._said(got) + b"\n\n"):
            self.wfile.write(b"%x\r\n" % len(text) + text + b"\r\n")
            self.wfile.flush()
            self.server.go.wait(15)
        self.wfile.write(b"0\r\n\r\n")

    def _socket(self, got: Got) -> None:
        """A WebSocket that says what the handshake was authorised by, then repeats frames."""
        self.close_connection = True
        key = got.headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        if "extended" in self.path:
            self.send_header("Sec-WebSocket-Extensions", "permessage-deflate")
        self.end_headers()
        said = self._said(got)
        self.wfile.write(bytes([0x81, len(said)]) + said)
        self.wfile.flush()
        data = self.connection.recv(65536)
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class Echo(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host = host
        self.context = context
        self.got: list[Got] = []
        self.connections = 0
        self.elsewhere = ""
        self.go = threading.Event()
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def get_request(self) -> Any:
        client, peer = super().get_request()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # heads and bodies are written apart
        self.connections += 1
        if self.context is not None:
            client.settimeout(20)
            client = self.context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, peer

    def handle_error(self, *_: object) -> None: ...

    def close(self) -> None:
        self.go.set()
        self.shutdown()
        self.server_close()
        self._thread.join(5)


def context_for(made: authority.Authority, host: str, directory: Path) -> ssl.SSLContext:
    file = directory / f"{host}.pem"
    file.write_text(made.leaf(host))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@contextlib.contextmanager
def serving(host: str, context: ssl.SSLContext | None) -> Iterator[Echo]:
    made = Echo(host, context)
    try:
        yield made
    finally:
        made.close()
