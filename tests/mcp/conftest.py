"""The real thing: `cloche mcp` as a client starts it, and the official client, unmodified."""

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

Connect = Callable[..., AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def _connect(
    *flags: str, mode: str = "auto", name: str = "tests", errlog: Any = sys.stderr
) -> AsyncIterator[Client]:
    import mcp_types as types

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "cloche", "mcp", *flags], env=dict(os.environ)
    )
    info = types.Implementation(name=name, version="1")
    async with Client(stdio_client(server, errlog=errlog), mode=mode, client_info=info) as client:
        yield client


@pytest.fixture
def connect() -> Connect:
    return _connect


def failure(result: Any) -> dict[str, Any]:
    """What a tool that failed says."""
    assert result.is_error, result
    assert result.structured_content is None
    told: dict[str, Any] = json.loads(result.content[0].text)["error"]
    assert told["message"]
    return told


def success(result: Any) -> dict[str, Any]:
    assert not result.is_error, result.content[0].text
    assert json.loads(result.content[0].text) == result.structured_content
    given: dict[str, Any] = result.structured_content
    return given


def run(main: Callable[[], Awaitable[None]]) -> None:
    """The client's SDK is anyio's: a test is one run of it, with its own end."""

    async def bounded() -> None:
        with anyio.fail_after(50):
            await main()

    anyio.run(bounded)


def settings_file(directory: Path, text: str) -> str:
    path = directory / "settings.toml"
    path.write_text(text)
    return str(path)
