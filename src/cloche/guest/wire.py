"""Frames between a host process and a guest: one datagram, one JSON object, some descriptors.

The link is an AF_UNIX SOCK_SEQPACKET pair, so frames keep their edges and descriptors stay with their frame. A body
over `INLINE` travels in a memfd, named by `{"memfd": size}` as the frame and the first descriptor. The host treats
whatever comes *from* a guest as an attacker's: it reads at most `MAX_FRAME` bytes, takes at most `MAX_FDS`
descriptors, never follows a memfd, and decodes with a schema (drivers/link.py). A guest trusts its host.

Standard library only; the one module of the guest that hosts import too.
"""

import array
import json
import os
import socket

INLINE = 48 * 1024
MAX_FRAME = 256 * 1024
MAX_BODY = 8 * 1024 * 1024
MAX_FDS = 16

_FD_SIZE = array.array("i").itemsize


def pair() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_FRAME)
    return here, there


def encode(message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def send(
    link: socket.socket, message: object, fds: "list[int] | tuple[int, ...]" = (), *, lossy: bool = False
) -> None:
    """Send one message. A large one goes by memfd, so that it never has to fit a socket buffer.

    With `lossy`, bytes of file names that are not UTF-8 become "?": a host's schema takes text only.
    """
    body = encode(message)
    if lossy and b"\\ud" in body:
        body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
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


def receive(link: socket.socket) -> "tuple[dict[str, object], list[int]] | None":
    """The next message from a *trusted* peer, or None at its end. Used by guests and launchers only."""
    body, fds = receive_raw(link)
    if not body:
        return None
    message = json.loads(body)
    if "memfd" in message:
        memory = fds.pop(0)
        try:
            message = json.loads(os.pread(memory, min(int(message["memfd"]), MAX_BODY), 0))
        finally:
            os.close(memory)
    return message, fds


def receive_raw(link: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """One frame's bytes and descriptors. A frame or descriptor list that was cut counts as the peer's end."""
    body, ancillary, cut, _ = link.recvmsg(
        MAX_FRAME, socket.CMSG_SPACE(MAX_FDS * _FD_SIZE), flags | socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % _FD_SIZE])
            fds.extend(received)
    if cut & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        return b"", []
    return body, fds


def close_all(fds: "list[int] | tuple[int, ...]") -> None:
    for fd in fds:
        os.close(fd)


def _send(link: socket.socket, body: bytes, fds: "list[int] | tuple[int, ...]") -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([body], ancillary)
