"""What this server does, for programs and for people. Neither needs a key: both are in every copy of Cloche."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from cloche.server.http import openapi, reference
from cloche.server.http.answering import Call, unless_seen
from cloche.server.http.routes.table import TABLE, operation


@operation("GET", "/openapi.json", scope=None, whole=True)
async def get_description(call: Call) -> dict[str, Any]:
    """This document: OpenAPI 3.1."""
    response: Any = unless_seen(
        Response(openapi.encoded(TABLE), media_type="application/json"), call.request.headers
    )
    return response  # type: ignore[no-any-return]


@operation("GET", "/docs", scope=None, media="text/html", whole=True)
async def get_reference(call: Call) -> bytes:
    """The same as one page for people, which works offline."""
    made = reference.page(openapi.encoded(TABLE))
    response: Any = unless_seen(
        Response(made, media_type="text/html", headers=reference.HEADERS), call.request.headers
    )
    return response  # type: ignore[no-any-return]
