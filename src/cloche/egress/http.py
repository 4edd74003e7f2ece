"""HTTP/1 heads and bodies as a proxy reads them: bytes in, facts out, no sockets.

    CONNECT pypi.org:443 HTTP/1.1        authority form: a tunnel; host and port are both required
    GET http://pypi.org/simple HTTP/1.1  absolute form: one request, forwarded in origin form
    GET /simple HTTP/1.1                 origin form: only where the destination is known already (captured traffic)

    head  = request-line *( field CRLF ) CRLF       at most 64 KiB, 128 fields
    field = token ":" OWS value OWS                 no folding, no blank before the colon, no control bytes

What two readers could frame differently is refused, not repaired: a bare CR or LF, NUL, two Host fields, a Host that is not
the target, Content-Length twice or beside Transfer-Encoding, codings other than `chunked`. One request is forwarded per
connection (`Connection: close` both ways), so nothing can follow it unseen; `Upgrade: websocket` is the exception, and then
bytes flow only after the server has answered 101.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from cloche.policy import names

MAX_HEAD = 64 * 1024
MAX_FIELDS = 128

_WORD = re.compile(rb"[A-Za-z]{1,16}")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_TARGET = re.compile(rb"[\x21-\x7e]+\Z")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9][0-9][0-9])( |\Z)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\x20-\x7e\t]*)?\Z")
_HOP_BY_HOP = {b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"te", b"upgrade"}
# A Connection field that names one of these would take the framing away from the next reader.
_NEVER_DROPPED = {
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"content-type",
    b"authorization",
    b"cookie",
    b"expect",
}


class BadRequest(ValueError):
    """What is refused; `status` is what the client is told."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Head(NamedTuple):
    method: str
    target: str
    version: str
    fields: tuple[tuple[bytes, bytes], ...]
    size: int

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    @property
    def wants_websocket(self) -> bool:
        upgrade = [value.lower() for value in self.values(b"upgrade")]
        return upgrade == [b"websocket"] and b"upgrade" in _listed(self.values(b"connection"))

    @property
    def keeps_alive(self) -> bool:
        """Whether the client means to send another request after this one."""
        return self.version == "HTTP/1.1" and b"close" not in _listed(self.values(b"connection"))


class Target(NamedTuple):
    """Where a request goes. `path` is in origin form; empty for a tunnel."""

    host: str
    port: int
    path: str
    tunnel: bool


class ResponseHead(NamedTuple):
    status: int
    size: int


class Answer(NamedTuple):
    """A response's head, read as strictly as a request's."""

    status: int
    reason: bytes
    version: str
    fields: tuple[tuple[bytes, bytes], ...]
    size: int

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    @property
    def keeps_alive(self) -> bool:
        return self.version == "HTTP/1.1" and b"close" not in _listed(self.values(b"connection"))


def looks_like_http(data: bytes | bytearray) -> bool | None:
    """Whether these first bytes begin an HTTP/1 request, by any method and in any case; None if it is too early to say.

    Empty lines before it count as HTTP (`parse_request` refuses them): lenient servers skip them."""
    start = bytes(data[: MAX_HEAD + 1]).lstrip(b"\r\n")
    if not start:
        return None
    word = _WORD.match(start)
    if word is None or (word.end() == len(start) and len(start) <= 16):
        return None if word else False
    if start[word.end() : word.end() + 1] != b" ":
        return False
    line, newline, _ = start.partition(b"\n")
    if not newline:
        return None if len(data) <= MAX_HEAD else True
    return b" HTTP/" in line.upper()


def parse_request(data: bytes | bytearray) -> Head | None:
    """The head at the start of `data`; None if it has not all arrived."""
    lines = _head_lines(data)
    if lines is None:
        return None
    request, *rest = lines
    parts = request.split(b" ")
    if len(parts) != 3 or not _TOKEN.match(parts[0]) or not _TARGET.match(parts[1]):
        raise BadRequest("the request line is not METHOD TARGET VERSION")
    method, target, version = (part.decode("ascii", "replace") for part in parts)
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
    fields = tuple(_field(line) for line in rest)
    size = sum(map(len, lines)) + 2 * len(lines) + 2
    return Head(method, target, version, fields, size)


def _head_lines(data: bytes | bytearray) -> list[bytes] | None:
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD + 4)
    if end < 0:
        if len(data) > MAX_HEAD:
            raise BadRequest("the head is longer than 64 KiB", 431)
        if _BARE_LF.search(data):  # told now: a client that ends lines with LF alone would wait for ever
            raise BadRequest("lines end with CR LF")
        return None
    lines = bytes(data[:end]).split(b"\r\n")
    if any(_CONTROL.search(line) for line in lines):
        raise BadRequest("a control byte stands in the head")
    if len(lines) > MAX_FIELDS + 1:
        raise BadRequest("the head has more than 128 fields", 431)
    return lines


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.match(name):
        raise BadRequest("a header field is not NAME: VALUE")
    return name, value.strip(b" \t")


# ── where it goes ──────────────────────────────────────────────────────────────────────────────────


def proxy_target(head: Head) -> Target:
    """Where a request to a proxy goes; raises `BadRequest` for what is not for a proxy or contradicts itself."""
    try:
        if head.method == "CONNECT":
            host, port = names.split_authority(head.target)
            _check_host(head, host, port, tunnel=True)
            return Target(host, port, "", True)
        return _absolute(head)
    except names.BadHost as problem:
        raise BadRequest(f"the target is refused: {problem}") from None


def _absolute(head: Head) -> Target:
    scheme, mark, rest = head.target.partition("://")
    if not mark:
        raise BadRequest(
            "this is a proxy: the request needs an absolute address (http://host/path) or CONNECT"
        )
    if scheme.lower() != "http":
        raise BadRequest(f"a proxy does not speak {scheme[:16]}:// for you; use CONNECT", 501)
    end = next((place for place, mark in enumerate(rest) if mark in "/?#"), len(rest))
    host, port = names.split_authority(rest[:end], 80)
    path = rest[end:]
    if "#" in path:
        raise BadRequest("a request has no fragment")
    if not path.startswith("/"):
        path = "/" + path
    _check_host(head, host, port)
    return Target(host, port, path, False)


def origin_target(head: Head, host: str, port: int, *, default_port: int = 80) -> Target:
    """The same for a connection whose destination is known. Its Host must name that destination; towards an address it
    may be any one name (`named_host`), because an address has none of its own. Inside TLS the default port is 443."""
    if head.method == "CONNECT":
        raise NestedConnect
    if default_port == 80 and head.target.startswith("http://"):
        target = proxy_target(head)
        if (target.host, target.port) != (host, port):
            raise HostMismatch(host, target.host)
        return target
    if not head.target.startswith("/") and not (head.method == "OPTIONS" and head.target == "*"):
        raise BadRequest("the request target is neither a path nor an http:// address")
    if names.is_address(host):
        named_host(head)
    else:
        _check_host(head, host, port, default_port=default_port)
    return Target(host, port, head.target, False)


def named_host(head: Head) -> str | None:
    """The canonical host of the Host field, None without one."""
    found = head.values(b"host")
    if len(found) > 1:
        raise BadRequest("there are two Host fields")
    try:
        return names.split_authority(found[0].decode("utf-8"), 80)[0] if found else None
    except (names.BadHost, UnicodeDecodeError) as problem:
        raise BadRequest(f"the Host field is refused: {problem}") from None


class NestedConnect(BadRequest):
    """A tunnel through somebody we allowed, to somebody we cannot see."""

    def __init__(self) -> None:
        super().__init__("a CONNECT inside a connection is refused", 403)


class HostMismatch(BadRequest):
    """The Host field names another host than the connection: fronting, or a mistake."""

    def __init__(self, host: str, named: str) -> None:
        super().__init__(f"the Host field says {named}, the connection goes to {host}", 403)
        self.named = named


def _check_host(head: Head, host: str, port: int, *, tunnel: bool = False, default_port: int = 80) -> None:
    found = head.values(b"host")
    if len(found) > 1:
        raise BadRequest("there are two Host fields")
    if not found:
        # A tunnel's target says it all, and http.client sends no Host with CONNECT; HTTP/1.0 knows no Host.
        if tunnel or head.version == "HTTP/1.0":
            return
        raise BadRequest("the Host field is missing")
    try:
        named, named_port = names.split_authority(found[0].decode("utf-8"), port if tunnel else default_port)
    except (names.BadHost, UnicodeDecodeError):
        raise HostMismatch(host, ascii(found[0])[2:66]) from None
    if named != host:
        raise HostMismatch(host, named)
    if named_port != port:
        raise HostMismatch(f"{host}:{port}", f"{named}:{named_port}")


# ── passing it on ──────────────────────────────────────────────────────────────────────────────────


def end_to_end(
    head: Head | Answer, also_dropped: frozenset[bytes] = frozenset()
) -> list[tuple[bytes, bytes]]:
    """The fields that are meant for the other end, not for the next hop."""
    dropped = (_HOP_BY_HOP | _listed(head.values(b"connection"))) - _NEVER_DROPPED | also_dropped
    return [(name, value) for name, value in head.fields if name.lower() not in dropped]


def host_field(host: str, port: int, default_port: int = 80) -> bytes:
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}{'' if port == default_port else f':{port}'}".encode()


def forward(head: Head, target: Target) -> bytes:
    """The head as the server gets it: origin form, no field that was for the proxy, and no second request."""
    lines = [f"{head.method} {target.path} HTTP/1.1".encode()]
    if not head.values(b"host"):
        lines.append(b"Host: " + host_field(target.host, target.port))
    lines += [name + b": " + value for name, value in end_to_end(head)]
    lines += (
        [b"Connection: Upgrade", b"Upgrade: websocket"] if head.wants_websocket else [b"Connection: close"]
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_response(data: bytes | bytearray) -> ResponseHead | None:
    """The status and length of a response's head; None if it has not all arrived."""
    if not b"HTTP/1.".startswith(bytes(data[:7])) and not data.startswith(b"HTTP/1."):
        raise BadRequest("the server did not answer in HTTP", 502)
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD + 4)
    if end < 0:
        if len(data) > MAX_HEAD:
            raise BadRequest("the server's head is longer than 64 KiB", 502)
        return None
    status = _STATUS.match(bytes(data[:end]).split(b"\r\n", 1)[0])
    if status is None:
        raise BadRequest("the server did not answer in HTTP", 502)
    return ResponseHead(int(status[1]), end + 4)


def parse_answer(data: bytes | bytearray) -> Answer | None:
    """A response's whole head; None if it has not all arrived. What is not clearly HTTP is refused."""
    found = parse_response(data)
    if found is None:
        return None
    try:
        lines = _head_lines(data)
        assert lines is not None
        version, _, rest = lines[0].partition(b" ")
        fields = tuple(_field(line) for line in lines[1:])
    except BadRequest as problem:
        raise BadRequest(f"the server's answer is refused: {problem}", 502) from None
    return Answer(found.status, rest[4:], version.decode(), fields, found.size)


def answer_body(answer: Answer, method: str) -> Body | None:
    """How a response's body is framed; None if it ends with the connection."""
    if method == "HEAD" or answer.status < 200 or answer.status in (204, 304):
        return Body(0)
    lengths, codings = answer.values(b"content-length"), answer.values(b"transfer-encoding")
    if codings:
        if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            raise BadRequest("the server frames its answer in a way that is not spoken here", 502)
        return Body(None)
    if not lengths:
        return None
    if len(set(lengths)) > 1 or not (lengths[0].isdigit() and len(lengths[0]) <= 18):
        raise BadRequest("the server's Content-Length is not one number", 502)
    return Body(int(lengths[0]))


def answer_once(head: bytes) -> bytes:
    """A final response's head, telling the client that the connection ends with it."""
    status, *lines = head[:-4].split(b"\r\n")
    kept = [
        line for line in lines if line.partition(b":")[0].strip().lower() not in _HOP_BY_HOP - {b"upgrade"}
    ]
    return b"\r\n".join([status, *kept, b"Connection: close"]) + b"\r\n\r\n"


def refusal(status: int, error: str, text: str, *, head_only: bool = False) -> bytes:
    """An answer of ours: one header that programs look for, one line that people read."""
    words = {400: "Bad Request", 403: "Forbidden", 431: "Request Header Fields Too Large", 501: "Not Implemented",
             502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported",
             408: "Request Timeout", 413: "Content Too Large"}  # fmt: skip
    body = _one_line(text).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {words.get(status, 'Error')}\r\nX-Proxy-Error: {error}\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)


def _one_line(text: str) -> str:
    return "".join(mark if mark.isprintable() else " " for mark in text)[:2000]


def _listed(values: list[bytes]) -> set[bytes]:
    return {word.strip(b" \t").lower() for value in values for word in value.split(b",")} - {b""}


# ── how long a body is ─────────────────────────────────────────────────────────────────────────────

_State = Literal["size", "data", "data-end", "trailer", "done"]


class Body:
    """Counts a request's body: `feed` says how many of the given bytes belong to it; `done` when it is complete."""

    def __init__(self, length: int | None) -> None:
        """`length` None is chunked."""
        self.length = length
        self._chunked = length is None
        self._left = length or 0
        self._line = bytearray()
        self._state: _State = "size" if self._chunked else ("data" if length else "done")

    @property
    def done(self) -> bool:
        return self._state == "done"

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        return self._walk(data, None)

    def take(self, data: bytes | bytearray) -> tuple[int, bytes]:
        """The same, and the content without its chunks' sizes and trailers."""
        content: list[memoryview] = []
        used = self._walk(memoryview(data), content)
        return used, b"".join(content)

    def _walk(self, data: bytes | bytearray | memoryview, content: list[memoryview] | None) -> int:
        used = 0
        while used < len(data) and self._state != "done":
            if self._state == "data":
                taken = min(self._left, len(data) - used)
                self._left -= taken
                if content is not None:
                    content.append(memoryview(data)[used : used + taken])
                used += taken
                if not self._left:
                    self._state = "data-end" if self._chunked else "done"
            else:
                used += self._take_line(data[used : used + 4096])
        return used

    def _take_line(self, data: bytes | bytearray | memoryview) -> int:
        piece = bytes(data)
        end = piece.find(b"\n")
        taken = len(piece) if end < 0 else end + 1
        self._line += piece[:taken]
        if len(self._line) > 8192:
            raise BadRequest("a line of the chunked body is too long")
        if end >= 0:
            if not self._line.endswith(b"\r\n"):
                raise BadRequest("a line of the chunked body does not end with CR LF")
            line = bytes(self._line[:-2])
            self._line.clear()
            self._next(line)
        return taken

    def _next(self, line: bytes) -> None:
        if self._state == "data-end":
            if line:
                raise BadRequest("a chunk is longer than it says")
            self._state = "size"
        elif self._state == "trailer":
            if not line:
                self._state = "done"
            elif _CONTROL.search(line):
                raise BadRequest("a control byte stands in a trailer")
        else:
            size = _CHUNK.match(line)
            if size is None:
                raise BadRequest("a chunk's size is not a number")
            self._left = int(size[1], 16)
            self._state = "data" if self._left else "trailer"


def body_of(head: Head) -> Body:
    """How a request's body is framed; what could be framed in two ways is refused."""
    lengths, codings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if codings:
        if lengths or head.version == "HTTP/1.0" or [coding.lower() for coding in codings] != [b"chunked"]:
            raise BadRequest(
                "the body's length is given in more than one way, or in a way that is not spoken here"
            )
        return Body(None)
    if not lengths:
        return Body(0)
    if len(lengths) > 1 or not (lengths[0].isdigit() and len(lengths[0]) <= 18):
        raise BadRequest("Content-Length is not one number")
    return Body(int(lengths[0]))
