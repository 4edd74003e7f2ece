"""What a protocol adds: the same command, asked for by a client of another wire."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import msgspec

from bench import records, setup
from cloche import model


def mcp(bench: setup.Bench) -> list[records.Row]:
    """Row 40."""
    row = records.Row(
        key="row40", name="MCP: `sandbox_exec` of `true` in a session", boundary="the official client's `call_tool` is called → its result returned, on stdio",
        subject=records.Series(name="cloche"), beside=[records.Series(name="a tool that runs nothing (sandbox_list)")],
        bars=[records.Bar(value=8)], anchor="–",
    )  # fmt: skip
    asyncio.run(_mcp(bench, row))
    return [row]


async def _mcp(bench: setup.Bench, row: records.Row) -> None:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    environment = {**os.environ, "CLOCHE_HOME": bench.home, "CLOCHE_KEEPER": "off"}
    server = StdioServerParameters(command=sys.executable, args=["-m", "cloche", "mcp"], env=environment)
    async with Client(stdio_client(server)) as client:

        async def call(tool: str, arguments: dict[str, Any]) -> float:
            start = time.perf_counter()
            result = await client.call_tool(tool, arguments)
            took = (time.perf_counter() - start) * 1000
            if result.is_error:
                raise RuntimeError(str(result.content))
            return took

        made: Any = (await client.call_tool("sandbox_session_create")).structured_content
        command = {"sandbox": made["sandbox"], "command": ["true"]}
        isolation = msgspec.convert(made["isolation"], model.Isolation)
        # The tool tells no limits; the defaults are those of the other rows.
        row.held = f"{isolation.level}; root {isolation.root}, network {isolation.network}; Landlock {isolation.landlock_abi}"
        row.whole = isolation.level == "namespaces" and isolation.seccomp and not isolation.missing
        for _ in range(setup.WARM_UP):
            await call("sandbox_exec", command)
        for _ in range(bench.count(1000)):
            row.subject.add(await call("sandbox_exec", command))
            row.beside[0].add(await call("sandbox_list", {}))
