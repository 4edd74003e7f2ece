"""Frames on the keeper's socket: a header of nine bytes, then a body.

    length (4) · kind (1) · channel (4), little-endian; the body is JSON, or bytes where the kind says so

A channel is one call, numbered by the client. A call is answered by one RESULT, or by ITEMs and an END; either may be
an ERROR instead. `run` (one command, attached) answers with raw STDOUT and STDERR frames before its RESULT, and takes
INPUT frames (an empty one is the end of input) and CONTROL frames. Standard library only: the thin client uses it.
"""

import struct

PROTOCOL = 1
HEADER = struct.Struct("<IBI")
MAX_BODY = 1 << 30

CALL, INPUT, CONTROL, CANCEL = 1, 2, 3, 4
RESULT, ITEM, END, ERROR, STDOUT, STDERR = 16, 17, 18, 19, 20, 21


def pack(kind: int, channel: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind, channel) + body


class Reader:
    """Cuts a byte stream into frames; sans-io."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> "list[tuple[int, int, bytes]]":
        self._buffer += data
        frames = []
        while len(self._buffer) >= HEADER.size:
            length, kind, channel = HEADER.unpack_from(self._buffer)
            if length > MAX_BODY:
                raise ValueError("a frame exceeds 1 GiB")
            if len(self._buffer) < HEADER.size + length:
                break
            frames.append((kind, channel, bytes(self._buffer[HEADER.size : HEADER.size + length])))
            del self._buffer[: HEADER.size + length]
        return frames
