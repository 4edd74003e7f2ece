"""A server inside a sandbox that does what tests ask for by path, in the standard library; it says its port first."""

import base64
import hashlib
import http.server
import json
import struct
import sys
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body=b"", status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            for each in value if isinstance(value, list) else [value]:
                self.send_header(name.replace("_", "-"), each)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do(self):
        path = self.path.partition("?")[0]
        act = getattr(self, "on_" + path.strip("/").partition("/")[0], None)
        if act is None:
            told = {
                "method": self.command,
                "path": self.path,
                "headers": [[k.lower(), v] for k, v in self.headers.items()],
                "body": hashlib.sha256(self.body()).hexdigest(),
            }
            self.answer(json.dumps(told).encode(), Content_Type="application/json")
        else:
            act()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_PURGE = do

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", "1234")
        self.end_headers()

    def on_large(self):
        size = int(self.path.rpartition("/")[2]) << 20
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        piece = b"x" * (1 << 20)
        for _ in range(size >> 20):
            self.wfile.write(piece)

    def on_events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(3):
            self.wfile.write(b"data: %d\n\n" % number)
            self.wfile.flush()
            GO.wait(30)
            GO.clear()
        self.close_connection = True

    def on_go(self):
        GO.set()
        self.answer(b"ok")

    def on_headers(self):
        self.answer(
            b"<script>1</script>",
            Content_Type="text/html",
            Access_Control_Allow_Origin="*",
            Clear_Site_Data='"*"',
            Strict_Transport_Security="max-age=1",
            Alt_Svc="h3=':1'",
            X_Cloche_Error="forged",
            X_Own="kept",
            X_Hop="1",
            Set_Cookie=["a=1; Domain=localhost; Path=/", "cloche_link=forged", "b=2"],
            Service_Worker_Allowed="/",
            WWW_Authenticate="Basic",
            Connection="X-Hop",
        )

    def on_away(self):
        self.answer(b"", 302, Location=self.path.partition("?")[2])

    def on_garbage(self):
        self.wfile.write(b"\x00\x01 not http at all\r\n\r\n")
        self.close_connection = True

    def on_nothing(self):
        self.close_connection = True

    def on_never(self):
        time.sleep(3600)

    def on_short(self):
        self.answer(b"half", Content_Length="1000")
        self.close_connection = True

    def on_strange(self):
        self.wfile.write(b"HTTP/1.1 799 Strange\r\nContent-Length: 0\r\n\r\n")
        self.close_connection = True

    def on_early(self):
        self.answer(b"no", 413)
        self.close_connection = True

    def on_gone(self):
        self.answer(json.dumps(LEFT).encode())

    def on_slow(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            LEFT.append("slow")

    def on_socket(self):
        if "upgrade" not in self.headers:
            self.answer(b"sockets only", 426)
            return
        seal = base64.b64encode(
            hashlib.sha1(
                (self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
            ).digest()
        )
        offered = self.headers.get("Sec-WebSocket-Protocol", "")
        chosen = f"Sec-WebSocket-Protocol: {offered.split(',')[0]}\r\n" if offered else ""
        self.wfile.write(
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + seal
            + b"\r\nX-Own: kept\r\n"
            + chosen.encode()
            + b"\r\n"
            + self.frame(1, b"welcome")
        )
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                (size,) = struct.unpack("!H", self.rfile.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = bytearray(self.rfile.read(size))
            for index in range(0, size if size < 100_000 else 0):
                data[index] ^= mask[index & 3]
            if first & 15 == 8:
                LEFT.append(f"socket {struct.unpack('!H', data[:2])[0]}")
                self.wfile.write(self.frame(8, bytes(data)))
                break
            if data == b"close me":
                self.wfile.write(self.frame(8, struct.pack("!H", 4321) + b"as you like"))
                break
            if data == b"garbage":
                self.wfile.write(b"\xff" * 100)
                break
            self.wfile.write(self.frame(first & 15, bytes(data)))
        self.close_connection = True

    def frame(self, opcode, data):
        size = len(data)
        if size < 126:
            return bytes([0x80 | opcode, size]) + data
        if size < 65536:
            return struct.pack("!BBH", 0x80 | opcode, 126, size) + data
        return struct.pack("!BBQ", 0x80 | opcode, 127, size) + data


GO = threading.Event()
LEFT: list = []
# Room for all that come at once: where it is full, the kernel tries again after 1, 2, 4, … seconds.
http.server.ThreadingHTTPServer.request_queue_size = 512
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
