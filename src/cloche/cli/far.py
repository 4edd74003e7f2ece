"""The command line's way to a server behind `http://…`: a socket like the keeper's, and behind it two threads and a WebSocket.

The verbs go on speaking frames to a socket and need not know how far away the server is.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from cloche import __version__, errors
from cloche.sdk import trust

_CHUNK = 1 << 18
_OPEN_S = 15.0


def connect(url: str, api_key: str | None, ca_file: str | None = None) -> socket.socket:
    """A socket whose other end is the server at `url`."""
    import ssl

    from websockets.exceptions import InvalidHandshake, WebSocketException
    from websockets.sync.client import connect as open_socket

    address = "ws" + url.rstrip("/").removeprefix("http") + "/v1/connect"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        far = open_socket(
            address,
            additional_headers=headers,
            user_agent_header=f"cloche-cli/{__version__}",
            max_size=None,
            open_timeout=_OPEN_S,
            proxy=None,
            compression=None,
            ssl=trust.context(url, ca_file),
        )
    except ssl.SSLError as problem:
        raise trust.distrusted(url, problem) from None
    except InvalidHandshake as problem:
        raise _unavailable(url, f"what answers there is not a Cloche server ({problem})") from None
    except (OSError, TimeoutError, WebSocketException) as problem:
        raise _unavailable(
            url, f"nothing answers ({getattr(problem, 'strerror', None) or problem})"
        ) from None
    here, there = socket.socketpair()
    for work in (_outwards, _inwards):
        threading.Thread(target=work, args=(there, far), daemon=True).start()
    return here


def _unavailable(url: str, why: str) -> errors.ClocheError:
    return errors.error(
        "server_unavailable", f"{url}: {why}", hint="start it, or unset CLOCHE_URL to run locally"
    )


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
