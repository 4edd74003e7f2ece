"""`/mcp` of a real server with the official client, behind the server's doors. Refusals first."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError

from tests.mcp.conftest import failure, run, success
from tests.server.conftest import Served, serve, stop


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = serve(Path(home))
        try:
            yield made
        finally:
            assert stop(made) == 0


@asynccontextmanager
async def connect(served: Served, key: str, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with create_mcp_http_client(headers=headers) as http:
        transport = streamable_http_client(f"{served.url}/mcp", http_client=http)
        async with Client(transport, mode=mode) as client:
            yield client


def test_the_doors_come_first(served: Served) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=50) as http:
        assert http.post("/mcp", json=request).json()["error"]["code"] == "key_missing"
        wrong = http.post("/mcp", json=request, headers={"Authorization": "Bearer cl_00"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "key_refused")
        key = {"Authorization": f"Bearer {served.key}"}
        page = http.post("/mcp", json=request, headers={**key, "Origin": "https://evil.test"})
        assert (page.status_code, page.json()["error"]["code"]) == (403, "peer_refused")
        assert http.post("/mcp", json=request, headers={**key, "Host": "evil.test"}).status_code == 403


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_both_revisions(served: Served, mode: str) -> None:
    async def main() -> None:
        async with connect(served, served.key, mode) as client:
            with pytest.raises(MCPError):
                await client.call_tool("none", {})
            assert failure(await client.call_tool("sandbox_run", {}))["code"] == "argument_invalid"
            result = await client.call_tool("sandbox_run", {"command": ["bash", "-c", "echo hi; exit 3"]})
            assert (success(result)["exit_code"], success(result)["stdout"]) == (3, "hi\n")

            seen: list[str] = []

            async def heard(progress: float, total: float | None, message: str | None) -> None:
                seen.append(message or "")

            arguments = {"command": ["echo", "live"], "streaming": True}
            success(await client.call_tool("sandbox_run", arguments, progress_callback=heard))
            assert seen == ["live\n"]

    run(main)


def test_a_tenant_does_not_see_another(served: Served) -> None:
    keys = []
    for tenant in ("red", "blue"):
        made = served.cloche("key", "create", tenant, "--role", "runner", "--tenant", tenant, "--json")
        keys.append(json.loads(made.stdout)["key"])

    async def main() -> None:
        async with connect(served, keys[0]) as red:
            box = success(await red.call_tool("sandbox_session_create"))["sandbox"]
            async with connect(served, keys[1]) as blue:
                assert success(await blue.call_tool("sandbox_list"))["sandboxes"] == []
                told = failure(await blue.call_tool("sandbox_exec", {"sandbox": box, "command": ["true"]}))
                assert told["code"] == "sandbox_not_found"
        # The sandbox belongs to the key, not to the connection.
        async with connect(served, keys[0]) as red:
            result = await red.call_tool("sandbox_exec", {"sandbox": box, "command": ["echo", "still"]})
            assert success(result)["stdout"] == "still\n"
            await red.call_tool("sandbox_delete", {"sandbox": box})

    run(main)


def test_a_key_does_what_its_scopes_say(served: Served) -> None:
    made = served.cloche("key", "create", "looker", "--scope", "sandboxes", "--json")
    key = json.loads(made.stdout)["key"]

    async def main() -> None:
        async with connect(served, key) as client:
            told = failure(await client.call_tool("sandbox_run", {"command": ["true"]}))
            assert told["code"] == "scope_missing"
            assert success(await client.call_tool("sandbox_list"))["sandboxes"] == []

    run(main)


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_a_cancelled_call_leaves_no_sandbox(served: Served, mode: str) -> None:
    def live() -> int:
        with served.client() as http:
            return sum("mcp" in box["labels"] for box in http.get("/v1/sandboxes").json()["sandboxes"])

    async def main() -> None:
        async with connect(served, served.key, mode) as client, anyio.create_task_group() as group:
            group.start_soon(
                client.call_tool, "sandbox_run", {"command": ["sleep", "7779"], "timeout_ms": 600_000}
            )
            while not await anyio.to_thread.run_sync(live):
                await anyio.sleep(0.02)
            group.cancel_scope.cancel()
        while live():
            await anyio.sleep(0.02)

    run(main)
