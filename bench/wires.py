"""What a protocol adds: the same command, asked for by a client of another wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from bench import records, serving, setup
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


# ── E2B ────────────────────────────────────────────────────────────────────────────────────────────

_E2B = ("e2b==2.63.0", "e2b-code-interpreter==2.11.5")
_ONE_BY_ONE = """
import json, sys, time
from e2b_code_interpreter import Sandbox
for line in sys.stdin:
    start = time.perf_counter()
    box = Sandbox.create()
    made = time.perf_counter()
    ran = box.commands.run("true")
    end = time.perf_counter()
    box.kill()
    print(json.dumps([(end - start) * 1e3, (made - start) * 1e3, ran.exit_code]), flush=True)
"""
_AT_ONCE = """
import asyncio, json, sys, time
from e2b_code_interpreter import AsyncSandbox
async def one():
    start = time.perf_counter()
    box = await AsyncSandbox.create()
    await box.commands.run("true")
    return box, (time.perf_counter() - start) * 1e3
async def main():
    warm, _ = await one()
    await warm.kill()
    for line in sys.stdin:
        start = time.perf_counter()
        done = await asyncio.gather(*(one() for _ in range(int(line))))
        whole = (time.perf_counter() - start) * 1e3
        await asyncio.gather(*(box.kill() for box, _ in done))
        print(json.dumps([whole, sorted(took for _, took in done)]), flush=True)
asyncio.run(main())
"""
_PAUSE_S = 0.1
"""Between two sandboxes: the pool replaces the one that was taken."""


def e2b(bench: setup.Bench) -> list[records.Row]:
    """Rows 41 and 42."""
    single = records.Row(
        key="row41", name="E2B: create and first command, from a warm pool", boundary="the unmodified Python SDK's `Sandbox.create()` is called → `commands.run('true')` returned, over TCP",
        subject=records.Series(name="cloche"), beside=[records.Series(name="create alone")], bars=[records.Bar(value=15)],
        anchor="public record: 42 ms, 351 ms median",
    )  # fmt: skip
    burst = records.Row(
        key="row42", name="E2B: 100 at once, from a pool of 100", boundary="the first `AsyncSandbox.create()` is called → the last `commands.run('true')` returned",
        subject=records.Series(name="cloche"), beside=[records.Series(name="one of them")], bars=[records.Bar(value=500)], anchor="–",
    )  # fmt: skip
    with serving.serving(bench) as served:
        key = served.key.replace("cl_", "e2b_")
        environment = {
            "PATH": os.environ["PATH"], "HOME": served.home,
            "E2B_API_KEY": key, "E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url,
        }  # fmt: skip
        with _client(_ONE_BY_ONE, environment) as ask:
            _ready(served, 10)
            for index in range(setup.WARM_UP + bench.count(500)):
                whole, made, code = ask("")
                if code != 0:
                    raise RuntimeError(f"the command ended with {code}")
                if index >= setup.WARM_UP:
                    single.subject.add(whole)
                    single.beside[0].add(made)
                time.sleep(_PAUSE_S)
        with _client(_AT_ONCE, environment) as ask:
            for _ in range(bench.count(20)):
                _ready(served, 100)
                whole, each = ask("100")
                burst.subject.add(whole)
                for took in each:
                    burst.beside[0].add(took)
    with setup.sandbox() as box:  # of the same shape; the wire tells no limits
        for row in (single, burst):
            setup.hold(row, box.info())
    single.notes.append(
        f"p99 {single.subject.p99:.1f} ms (bar 40 ms); the client's own work is in the figure"
    )
    return [single, burst]


def _ready(served: serving.Served, size: int) -> None:
    """Wait until a pool of the default template has so many ready."""
    import httpx

    with httpx.Client(
        base_url=served.url, headers={"X-API-Key": served.key}, trust_env=False, timeout=60
    ) as http:
        if http.get("/v1/pools/base").status_code == 404:
            http.put("/v1/pools/base", json={"template": "base", "size": size}).raise_for_status()
        else:
            http.post("/v1/pools/base/scale", json={"size": size}).raise_for_status()
        while http.get("/v1/pools/base").raise_for_status().json()["ready"] < size:
            time.sleep(0.05)


@contextlib.contextmanager
def _client(program: str, environment: dict[str, str]) -> Iterator[Callable[[str], Any]]:
    process = subprocess.Popen(
        [_python(), "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:

        def ask(line: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
            told = process.stdout.readline()
            if not told:
                raise RuntimeError("the client's program ended")
            return json.loads(told)

        yield ask
    finally:
        process.kill()
        process.communicate(timeout=60)


def _python() -> str:
    """The Python that has the SDKs: below `.cache`, made by whoever needs it first."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    place = os.path.join(root, ".cache", "e2b", f"bench-{sys.version_info.major}.{sys.version_info.minor}")
    python = os.path.join(place, "bin", "python")
    done = os.path.join(place, "done")
    if not os.path.exists(done):
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *_E2B], check=True
        )
        with open(done, "w") as file:
            file.write(" ".join(_E2B))
    return python
