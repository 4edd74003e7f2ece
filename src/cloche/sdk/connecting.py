"""Which backend a handle talks to: `server=`, else CLOCHE_URL, else the keeper's socket if it answers, else this process.

A server that was named and does not answer is an error; only the unnamed socket is passed over when nobody listens.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib import import_module

import msgspec

from cloche import errors, interfaces, settings
from cloche.sdk import local, portal


async def connect(server: str | None, home: portal.Portal, api_key: str | None = None) -> interfaces.Backend:
    """The backend of an address, one per portal and key. Runs in the portal's loop."""
    config = settings.load(os.environ)
    if api_key is not None:
        config = msgspec.structs.replace(config, api_key=api_key)
    address = server or config.url
    # Not the socket's address: what was found for nobody in particular may be an engine in this process, and never stands in
    # for a server that was named.
    key = address or f"found by {config.socket_path}"
    if api_key is not None:
        import hashlib

        # By its digest: what is kept shows up in tracebacks and debuggers.
        key += " " + hashlib.sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()
    while True:
        # The task, not its outcome, is what is kept: callers that arrive together share one engine.
        opening = home.backends.get(key)
        if opening is None:
            opening = home.backends[key] = home.loop.create_task(
                _open(address, config, home), name=f"connect {key}"
            )
        try:
            backend = await asyncio.shield(opening)
        except Exception:
            home.backends.pop(key, None)  # the next caller tries anew
            raise
        if not getattr(backend, "closed", False):
            return backend
        if home.backends.get(key) is opening:
            del home.backends[key]  # the server went away; who asks now may find another


async def _open(address: str | None, config: settings.Settings, home: portal.Portal) -> interfaces.Backend:
    backend = await find(address, config, _in_process)
    home.on_close(backend.aclose)
    return backend


async def find(
    address: str | None, config: settings.Settings, make: Callable[[], interfaces.Backend]
) -> interfaces.Backend:
    """The backend of an address, else the keeper's if it answers, else the one that is made here. The caller closes it."""
    if address is not None:
        return await _named(address, config)
    found = await local.connect(config.socket_path, missing_ok=True)
    if found is not None:
        return found
    _need_linux()
    return make()


async def _named(address: str, config: settings.Settings) -> interfaces.Backend:
    if address.startswith("unix:"):
        found = await local.connect(address.removeprefix("unix:").removeprefix("//"), missing_ok=False)
        assert found is not None
        return found
    if address.startswith(("http://", "https://")):
        from cloche.sdk import remote

        return await remote.connect(address, config.api_key, config.ca_file)
    raise errors.error(
        "server_unavailable",
        f"{address!r} is not the address of a server",
        hint="use http://host:port, https://host or unix:/path/to/cloche.sock, or leave it out to run locally",
    )


def _need_linux() -> None:
    if sys.platform != "linux":
        raise errors.error(
            "linux_only",
            f"sandboxes run on Linux only, and this is {sys.platform}",
            hint="point CLOCHE_URL at a Cloche server",
        )


def _in_process() -> interfaces.Backend:
    # By name, because clients do not depend on the engine: the one exemption in the import contract.
    backend: interfaces.Backend = import_module("cloche.wiring").make_engine(os.environ)
    return backend
