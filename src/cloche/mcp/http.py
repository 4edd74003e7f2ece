"""The tools over streamable HTTP, for a server's app to mount.

The server's doors have let the request in and said whose it is (`Guarded` of `scope["cloche"]`), for every request anew: a session id of the
protocol opens nothing. The SDK is loaded by the first request, because most servers never get one. Sandboxes made here belong to the engine, not
to a connection (the newest revision has none): they end by `sandbox_delete` or their times.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cloche import interfaces, model, settings


class HttpFace:
    """An ASGI application."""

    def __init__(self, config: settings.Settings) -> None:
        self._config = config
        self._serving: asyncio.Task[None] | None = None
        self._manager: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._ended.is_set():
            from starlette.responses import Response

            return await Response(status_code=503)(scope, receive, send)
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        await (await asyncio.shield(self._manager)).handle_request(scope, receive, send)

    async def _serve(self) -> None:
        """Enters and leaves in one task, as the SDK's task group must."""
        try:
            manager = self._make()
            async with manager.run():
                self._manager.set_result(manager)
                await self._ended.wait()
        except Exception as problem:
            if self._manager.done():
                raise
            self._manager.set_exception(problem)

    def _make(self) -> Any:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
        from mcp.server.transport_security import TransportSecuritySettings

        from cloche.mcp import serving, tools

        def open(ctx: serving.Context) -> tools.Calls:
            assert ctx.request is not None
            backend: interfaces.Backend = ctx.request.scope["cloche"]
            return tools.Calls(backend, self._config, serving.client_of(ctx), model.SandboxSpec())

        return StreamableHTTPSessionManager(
            serving.Face(open).server(),
            # The doors have looked at Host and Origin.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=self._config.server.max_body_mib << 20,
        )

    async def aclose(self) -> None:
        self._ended.set()
        if self._serving is not None:
            await self._serving
