"""Frames on the keeper's socket: a header of nine bytes, then a body.

    length (4) · kind (1) · channel (4), little-endian; the body is JSON, or bytes where the kind says so

A channel is one call, numbered by the client. A call is answered by one RESULT, or by ITEMs and an END; either may be
an ERROR instead. `run` (one command, attached) answers with an ITEM that names the execution, raw STDOUT and STDERR
frames and a RESULT. It takes INPUT frames (an empty one is the end of input) and CONTROL frames; a TAKEN frame says how
many bytes of input the command has been given, and a client has at most WINDOW bytes on the way, so that a command that
never reads cannot keep a signal from passing.

`dial` (a tunnel to a port inside) answers with an ITEM once it is there, and goes on with INPUT frames towards the sandbox and
STDOUT frames from it, an empty one being the end of that direction. Both sides say by TAKEN what they have passed on, and
have at most WINDOW bytes on the way, so that one tunnel that nobody reads holds up no other. END closes what ended in both
directions, ERROR what was cut; a client leaves by CANCEL.

What stays the same in every protocol, so that strangers can part politely: this header, CALL, RESULT, ERROR, and the
methods `hello` and `stop`. Standard library only: the thin client uses it.
"""

import struct

PROTOCOL = 1
HEADER = struct.Struct("<IBI")
COUNT = struct.Struct("<I")
MAX_BODY = 1 << 30
WINDOW = 1 << 20

CALL, INPUT, CONTROL, CANCEL = 1, 2, 3, 4
RESULT, ITEM, END, ERROR, STDOUT, STDERR, TAKEN = 16, 17, 18, 19, 20, 21, 22


def pack(kind: int, channel: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind, channel) + body


class Reader:
    """Cuts a byte stream into frames; sans-io."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> "list[tuple[int, int, bytes]]":
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length, kind, channel = HEADER.unpack_from(self._buffer, start)
            if length > MAX_BODY:
                raise ValueError("a frame exceeds 1 GiB")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, channel, bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return frames
