"""How a client opens the WebSocket of a far server (`/v1/connect`), and whom it believes to be that: who shows a certificate of an authority in
`CLOCHE_CA_FILE`, or else in the system's store. The SDK opens it in a loop, the command line in threads; all else is the same."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cloche import __version__, errors

_OPEN_S = 15.0


def opening(url: str, api_key: str | None, ca_file: str | None, *, client: str) -> dict[str, Any]:
    """What the `connect` of websockets takes, in either of its kinds."""
    options: dict[str, Any] = {
        "uri": "ws" + url.rstrip("/").removeprefix("http") + "/v1/connect",
        "additional_headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        "user_agent_header": f"{client}/{__version__}",
        "max_size": None,
        "open_timeout": _OPEN_S,
        "proxy": None,
        "compression": None,
    }
    trusted = context(url, ca_file)
    return options if trusted is None else {**options, "ssl": trusted}


@contextmanager
def telling(url: str) -> Iterator[None]:
    """Whatever goes wrong while it is opened is `server_unavailable`, and says why."""
    from websockets.exceptions import InvalidHandshake, WebSocketException

    try:
        yield
    except ssl.SSLError as problem:
        raise distrusted(url, problem) from None
    except InvalidHandshake as problem:
        raise _unavailable(url, f"what answers there is not a Cloche server ({problem})") from None
    except (OSError, TimeoutError, WebSocketException) as problem:
        raise _unavailable(
            url, f"nothing answers ({getattr(problem, 'strerror', None) or problem})"
        ) from None


def _unavailable(url: str, why: str) -> errors.ClocheError:
    return errors.error(
        "server_unavailable",
        f"{url}: {why}",
        hint="start it with `cloche serve`, or unset CLOCHE_URL to run locally",
    )


def context(url: str, ca_file: str | None) -> ssl.SSLContext | None:
    """None for a server that is spoken to in the open."""
    if not url.startswith("https:"):
        return None
    if ca_file is not None and not os.path.isfile(ca_file):
        raise errors.error(
            "settings_invalid",
            f"CLOCHE_CA_FILE is {ca_file!r}, which is not a file",
            hint="name a PEM file of certificates",
        )
    try:
        made = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as problem:
        raise errors.error(
            "settings_invalid",
            f"CLOCHE_CA_FILE {ca_file!r} cannot be used: {problem}",
            hint="it is a PEM file of certificates",
        ) from None
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


def distrusted(url: str, problem: ssl.SSLError) -> errors.ClocheError:
    why = getattr(problem, "verify_message", "") or problem.reason or str(problem)
    return errors.error(
        "server_unavailable",
        f"{url}: no connection that can be trusted ({why})",
        hint="set CLOCHE_CA_FILE to the certificate of the authority that signed the server's",
    )
