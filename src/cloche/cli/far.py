"""The command line's way to a server behind `http://…`: a socket like the keeper's, and behind it two threads and a WebSocket.

The verbs go on speaking frames to a socket and need not know how far away the server is.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from cloche.sdk import trust

_CHUNK = 1 << 18


def connect(url: str, api_key: str | None, ca_file: str | None = None) -> socket.socket:
    """A socket whose other end is the server at `url`."""
    from websockets.sync.client import connect as open_socket

    with trust.telling(url):
        far = open_socket(**trust.opening(url, api_key, ca_file, client="cloche-cli"))
    here, there = socket.socketpair()
    for work in (_outwards, _inwards):
        threading.Thread(target=work, args=(there, far), daemon=True).start()
    return here


def _outwards(there: socket.socket, far: Any) -> None:
    from websockets.exceptions import ConnectionClosed

    with suppress(OSError, ConnectionClosed):
        while data := there.recv(_CHUNK):
            far.send(data)
    far.close()


def _inwards(there: socket.socket, far: Any) -> None:
    from websockets.exceptions import ConnectionClosed

    with suppress(OSError, ConnectionClosed):
        while True:
            data = far.recv(decode=False)
            if data[:1] == b"{":  # a refusal, in place of frames
                there.sendall(_refusal(data))
                break
            there.sendall(data)
    with suppress(OSError):
        there.shutdown(socket.SHUT_WR)  # what our side still writes is taken, so that it reads the last words


def _refusal(data: bytes) -> bytes:
    """Said as the answer to the first call, whatever it was."""
    from cloche import framing
    from cloche.cli import thin

    return framing.pack(framing.ERROR, thin.CHANNEL, data)
