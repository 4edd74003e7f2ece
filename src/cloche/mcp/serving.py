"""The official SDK's server around the tools.

It speaks every revision that the SDK does: those with a handshake, and those without (each request then says who asks). What a
client sees of an error is told apart as MCP wants it: a tool that does not exist, or a resource, is a protocol error; anything
that the model might do better next time is a result with `isError`, in JSON, with code, message and hint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

import mcp_types as types
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from cloche import __version__, errors, interfaces, model, settings
from cloche.mcp import nouns, tools

SCHEME = "cloche://sandbox/"
_MOST_RESOURCES = 500
_INSTRUCTIONS = (
    "Runs commands and code in sandboxes: no network unless asked for, nothing of the user's machine but its programs. "
    "sandbox_run is for one command; sandbox_session_create makes a sandbox that stays for sandbox_exec, sandbox_run_code and "
    "the file tools. A result's `denials` say what the sandbox stopped and how to ask for it; do not retry without a change."
)
_log = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
Open = Callable[[Context], tools.Calls]


def client_of(ctx: Context) -> str:
    """The client's name, as it tells it itself."""
    params = ctx.session.client_params
    return params.client_info.name if params is not None else ""


def listing() -> list[types.Tool]:
    return [
        types.Tool(
            name=name,
            title=row.title,
            description=row.summary,
            input_schema=nouns.schema(row.takes),
            output_schema=nouns.schema(row.gives),
            annotations=types.ToolAnnotations(
                title=row.title,
                read_only_hint=row.reads_only,
                destructive_hint=row.destroys,
                idempotent_hint=row.idempotent or row.reads_only,
                open_world_hint=row.open_world,
            ),
        )
        for name, row in tools.TABLE.items()
    ]


class Face:
    """The handlers; `open` finds whose call it is."""

    def __init__(self, open: Open) -> None:
        self._open = open
        self._tools = listing()

    def server(self) -> Server[Any]:
        return Server(
            "cloche",
            version=__version__,
            title="Cloche sandboxes",
            instructions=_INSTRUCTIONS,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read_resource,
        )

    async def list_tools(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._tools)

    async def call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in tools.TABLE:
            raise MCPError(
                types.INVALID_PARAMS,
                f"there is no tool {params.name[:100]!r}",
                {"hint": errors.nearest(params.name[:100], tools.TABLE)},
            )
        said = 0

        async def say(text: str) -> None:
            nonlocal said
            said += len(text)
            await ctx.session.report_progress(said, message=text)

        try:
            outcome, pictures = await self._open(ctx).call(params.name, params.arguments, say)
        except errors.ClocheError as problem:
            return _failure(problem)
        except Exception as problem:
            _log.exception("%s failed", params.name)
            return _failure(errors.error("internal_error", f"{type(problem).__name__}: {problem}"))
        plain = msgspec.to_builtins(outcome)
        content: list[types.ContentBlock] = [
            types.TextContent(type="text", text=msgspec.json.encode(outcome).decode())
        ]
        for picture in pictures:
            content.append(types.ImageContent(type="image", data=picture["data"], mime_type=picture["mime"]))
        return types.CallToolResult(content=content, structured_content=plain)

    # ── resources ───────────────────────────────────────────────────────────────────────────────

    async def list_templates(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="file",
            title="A file of a sandbox",
            uri_template=SCHEME + "{id}/{+path}",
            description="A file below the root of a sandbox that sandbox_session_create made.",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def list_resources(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """The files in the working directories of the sandboxes that run; those that sleep are not woken for it."""
        found: list[types.Resource] = []
        with _told():
            calls = self._open(ctx)
            for info in await calls.live():
                if info.phase == "running" and len(found) < _MOST_RESOURCES:
                    found += [_resource(info, file) for file in await calls.resources(info.id)]
        return types.ListResourcesResult(resources=found[:_MOST_RESOURCES])

    async def read_resource(
        self, ctx: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        with _told():
            sandbox, slash, path = uri.removeprefix(SCHEME).partition("/")
            if not uri.startswith(SCHEME) or not sandbox or not slash or not path:
                raise errors.error(
                    "path_invalid", f"{uri[:200]!r} is not a file of a sandbox", hint=f"use {SCHEME}ID/PATH"
                )
            content, encoding = await self._open(ctx).resource(sandbox, "/" + unquote(path).lstrip("/"))
        if encoding == "base64":
            blob = types.BlobResourceContents(uri=uri, blob=content, mime_type="application/octet-stream")
            return types.ReadResourceResult(contents=[blob])
        text = types.TextResourceContents(uri=uri, text=content, mime_type="text/plain")
        return types.ReadResourceResult(contents=[text])


def _resource(info: model.SandboxInfo, file: model.FileInfo) -> types.Resource:
    return types.Resource(
        uri=f"{SCHEME}{info.id}{quote(file.path)}", name=file.path, title=file.name, size=file.size
    )


def _failure(problem: errors.ClocheError) -> types.CallToolResult:
    # No structured content: clients hold that against the schema of a success.
    told = {**problem.to_dict(), "retryable": problem.retryable}
    text = msgspec.json.encode({"error": told}, enc_hook=str).decode()
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)


class _told:
    """Errors of ours as protocol errors."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, problem: BaseException | None, tb: object) -> None:
        if isinstance(problem, errors.ClocheError):
            data = msgspec.to_builtins(problem.to_dict(), enc_hook=str)
            raise MCPError(errors.TABLE[problem.code].mcp, problem.message, data) from None


async def serve_stdio(
    backend: interfaces.Backend, config: settings.Settings, base: model.SandboxSpec
) -> None:
    """Serve the client at standard input and output until it leaves."""
    views: dict[str, tools.Calls] = {}

    def open(ctx: Context) -> tools.Calls:
        client = client_of(ctx)
        if client not in views:
            views[client] = tools.Calls(backend, config, client, base)
        return views[client]

    server = Face(open).server()
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
