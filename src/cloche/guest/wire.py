"""Frames between a host process and a guest: one datagram, one JSON object, some descriptors.

The link is an AF_UNIX SOCK_SEQPACKET pair, so frames keep their edges and descriptors stay with their frame. A body
over `INLINE` travels in a memfd, named by `{"memfd": size}` as the frame and the first descriptor. The host treats
whatever comes *from* a guest as an attacker's: it reads at most `MAX_FRAME` bytes, takes at most `MAX_FDS`
descriptors, never follows a memfd, and decodes with a schema (drivers/link.py). A guest trusts its host.

Standard library only; the one module of the guest that hosts import too. Of the standard library only the C parts: `json`,
`socket` and `array` would bring `re`, `enum` and `collections`, a megabyte that every sandbox would be forked with.
"""

import _socket
import os
import struct
from _json import encode_basestring, encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

Socket = _socket.socket

INLINE = 48 * 1024
MAX_FRAME = 64 * 1024  # a receiver holds this much for each: less than malloc would ask the kernel for
MAX_BODY = 8 * 1024 * 1024
MAX_FDS = 16
_SEND_BUFFER = 512 * 1024

_FD_SIZE = struct.calcsize("i")


class _Rules:
    """How JSON is read: as the standard library does by default."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} does not travel")


_scan = make_scanner(_Rules)  # type: ignore[arg-type]  # any object with these attributes
_ascii = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
_plain = make_encoder(None, _refuse, encode_basestring, None, ":", ",", False, False, True)


def pair() -> "tuple[socket.socket, socket.socket]":
    """For hosts; a guest is born with its end."""
    import socket

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return here, there


def encode(message: object) -> bytes:
    return "".join(_ascii(message, 0)).encode()


def decode(body: bytes) -> "dict[str, object]":
    try:
        message, _ = _scan(body.decode("utf-8", "surrogatepass"), 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def send(
    link: Socket, message: object, fds: "list[int] | tuple[int, ...]" = (), *, lossy: bool = False
) -> None:
    """Send one message. A large one goes by memfd, so that it never has to fit a socket buffer.

    With `lossy`, bytes of file names that are not UTF-8 become "?": a host's schema takes text only.
    """
    body = encode(message)
    if lossy and b"\\ud" in body:
        body = "".join(_plain(message, 0)).encode("utf-8", "replace")
    if len(body) <= INLINE:
        _send(link, body, fds)
        return
    memory = os.memfd_create("cloche-frame", os.MFD_CLOEXEC)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(memory, view) :]
        _send(link, b'{"memfd":%d}' % len(body), [memory, *fds])
    finally:
        os.close(memory)


def receive(link: Socket) -> "tuple[dict[str, object], list[int]] | None":
    """The next message from a *trusted* peer, or None at its end. Used by guests and launchers only."""
    body, fds = receive_raw(link)
    if not body:
        return None
    message = decode(body)
    if "memfd" in message:
        memory = fds.pop(0)
        try:
            message = decode(os.pread(memory, min(int(message["memfd"]), MAX_BODY), 0))  # type: ignore[call-overload]
        finally:
            os.close(memory)
    return message, fds


def receive_raw(link: Socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """One frame's bytes and descriptors. A frame or descriptor list that was cut counts as the peer's end."""
    body, ancillary, cut, _ = link.recvmsg(
        MAX_FRAME, _socket.CMSG_SPACE(MAX_FDS * _FD_SIZE), flags | _socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds += struct.unpack_from(f"{len(data) // _FD_SIZE}i", data)
    if cut & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC):
        close_all(fds)
        return b"", []
    return body, fds


def close_all(fds: "list[int] | tuple[int, ...]") -> None:
    for fd in fds:
        os.close(fd)


def _send(link: Socket, body: bytes, fds: "list[int] | tuple[int, ...]") -> None:
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    link.sendmsg([body], ancillary)
