"""CORS, for the web pages that the configuration names; for all others there is none, and their requests are refused at the door.

Never with credentials: a page shows its key like everybody else, so no cookie of a browser opens anything.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = "GET, POST, PUT, PATCH, DELETE"
_HEADERS = "Authorization, X-API-Key, Content-Type, Idempotency-Key, If-Match, If-None-Match, Last-Event-ID, X-Request-ID, traceparent"
_SHOWN = "X-Request-ID, ETag, Retry-After"


class Origins:
    """The application, as pages of other origins may read it."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin not in self._origins:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            allowed = {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": _HEADERS,
                "Access-Control-Max-Age": "600",
            }
            start: Message = {"type": "http.response.start", "status": 204, "headers": []}
            _allow(start, str(origin), allowed)
            await send(start)
            await send({"type": "http.response.body", "body": b""})
        else:

            async def allowing(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _allow(message, str(origin), {"Access-Control-Expose-Headers": _SHOWN})
                await send(message)

            await self._app(scope, receive, allowing)


def _allow(message: Message, origin: str, more: dict[str, str]) -> None:
    headers = MutableHeaders(scope=message)
    headers["Access-Control-Allow-Origin"] = origin
    headers.add_vary_header("Origin")
    for name, value in more.items():
        headers[name] = value
