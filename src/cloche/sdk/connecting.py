"""Which backend a handle talks to: `server=`, else CLOCHE_URL, else the keeper's socket if it answers, else this process.

A server that was named and does not answer is an error; only the unnamed socket is passed over when nobody listens.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from cloche import errors, interfaces, settings
from cloche.sdk import local, portal

_backends: dict[tuple[int, str], interfaces.Backend] = {}


async def connect(server: str | None) -> interfaces.Backend:
    """Runs in the portal's loop; one backend per address."""
    config = settings.load(os.environ)
    address = server or config.url
    key = (os.getpid(), address or "")
    if key in _backends and not getattr(_backends[key], "closed", False):
        return _backends[key]
    if address is not None:
        backend = await _named(address)
    else:
        backend = await local.connect(config.socket_path, missing_ok=True) or _in_process()
    _backends[key] = backend
    portal.get().on_close(backend.aclose)
    return backend


async def _named(address: str) -> interfaces.Backend:
    if address.startswith("unix:"):
        found = await local.connect(address.removeprefix("unix:").removeprefix("//"), missing_ok=False)
        assert found is not None
        return found
    raise errors.error(
        "server_unavailable", f"{address!r} is not an address that this version can reach",
        hint="use unix:/path/to/cloche.sock, or unset CLOCHE_URL to run locally",
    )  # fmt: skip


def _in_process() -> interfaces.Backend:
    if sys.platform != "linux":
        raise errors.error(
            "linux_only", f"sandboxes run on Linux only, and this is {sys.platform}",
            hint="point CLOCHE_URL at a Cloche server",
        )  # fmt: skip
    # By name, because clients do not depend on the engine: the one exemption in the import contract.
    backend: interfaces.Backend = import_module("cloche.wiring").make_engine(os.environ)
    return backend
