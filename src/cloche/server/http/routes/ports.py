"""Ports: what listens inside, and preview links. The ports themselves are passed on by `server.http.ports`."""

from __future__ import annotations

from cloche import model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation

_HERE = "/v1/sandboxes/{sandbox}/ports"


@operation("GET", _HERE, scope="ports", errors="sandbox_not_found sandbox_lost not_supported_by_driver")
async def list_ports(
    call: Call, sandbox: str, *, limit: Limit = 1000, cursor: Cursor | None = None
) -> wire.Ports:
    """The TCP ports that something in a sandbox listens on. Wakes it, and counts as no use of it."""
    ports = await call.backend.ports(sandbox)
    found, more = page(ports, lambda info: (info.port, info.address), limit, cursor)
    return wire.Ports(ports=found, next_cursor=more)


@operation(
    "POST", _HERE + "/{port}/link", scope="ports", status=201,
    errors="sandbox_not_found sandbox_lost limit_invalid argument_invalid",
)  # fmt: skip
async def make_link(call: Call, sandbox: str, port: str, body: wire.MakeLink) -> model.LinkInfo:
    """A preview link: an address that reaches the port without a key until it expires, or the sandbox ends."""
    return await call.backend.link(sandbox, wire.port(port), body.ttl_s)
