"""The operator's chores."""

from __future__ import annotations

from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.routes.table import operation


class Swept(wire.Answer, frozen=True, kw_only=True):
    swept: tuple[str, ...]


@operation("POST", "/v1/sweep", scope="admin")
async def sweep(call: Call) -> Swept:
    """Remove what dead engines left behind; the sandboxes concerned."""
    return Swept(swept=tuple(await call.backend.sweep()))
