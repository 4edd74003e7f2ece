"""Quotas and rates on every wire of a real server."""

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import conftest
from tests.server.test_callers import ACCEPT, HELLO
from tests.server.test_frames import far
from tests.server.test_http import refused

SETTINGS = """
[quotas]
sandboxes = 10
memory_mib = 3000

[quotas.tenants.few]
sandboxes = 1

[quotas.tenants.slow]
creations_per_minute = 2

[quotas.tenants."-"]
sandboxes = 2
"""


@pytest.fixture(scope="module")
def house() -> Iterator[conftest.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home), settings=SETTINGS)
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


def tenant(house: conftest.Served, name: str, *more: str) -> str:
    made = house.cloche("key", "create", f"of-{name}", "--tenant", name, *more)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def clear(client: httpx.Client) -> None:
    for box in client.get("/v1/sandboxes").json()["sandboxes"]:
        client.delete(f"/v1/sandboxes/{box['id']}")


def test_a_hundred_at_once_admit_exactly_ten(house):
    key = tenant(house, "red")
    body = {"resources": {"memory_mib": 64}}

    async def storm() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=house.url, headers=headers, timeout=50, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(client.post("/v1/sandboxes", json=body) for _ in range(100)))

    answers = asyncio.run(storm())
    assert sorted({answer.status_code for answer in answers}) == [201, 429]
    assert sum(answer.status_code == 201 for answer in answers) == 10
    fault = refused(next(answer for answer in answers if answer.status_code == 429), "quota_exceeded")
    assert (fault["details"]["quota"], fault["details"]["limit"]) == ("sandboxes", 10)
    with house.client(key) as client:
        assert len(client.get("/v1/sandboxes").json()["sandboxes"]) == 10
        clear(client)


def test_every_wire_meets_the_same_quota(house):
    key = tenant(house, "few")
    with house.client(key) as client:
        box = client.post("/v1/sandboxes", json={"labels": {"mcp": "t"}}).raise_for_status().json()["id"]
        attempts: list[tuple[str, Any]] = [
            ("/v1/sandboxes", {}), ("/run", {"command": "id"}), ("/run", {"command": "id", "detach": True}),
            (f"/v1/sandboxes/{box}/fork", {"count": 1}),
        ]  # fmt: skip
        for path, body in attempts:
            assert refused(client.post(path, json=body), "quota_exceeded")["details"]["used"] == 1
        streamed = client.post("/run/stream", json={"command": "id"})
        assert "quota_exceeded" in streamed.text
        snapshot = client.post(f"/v1/sandboxes/{box}/snapshots", json={}).raise_for_status().json()["id"]
        refused(client.post("/v1/sandboxes", json={"snapshot": snapshot}), "quota_exceeded")
        e2b = client.post("/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": key})
        assert (e2b.status_code, e2b.json()["error_code"]) == (429, "quota_exceeded")
        opened = client.post("/mcp", json=HELLO, headers=ACCEPT).raise_for_status()
        session = {"Mcp-Protocol-Version": "2025-06-18"}
        if "mcp-session-id" in opened.headers:
            session["Mcp-Session-Id"] = opened.headers["mcp-session-id"]
        client.post(
            "/mcp",
            json={"jsonrpc": "2.0", "method": "notifications/initialized"},
            headers={**ACCEPT, **session},
        )
        for name, arguments in (
            ("sandbox_run", {"command": ["id"]}),
            ("sandbox_session_create", {}),
            ("sandbox_fork", {"sandbox": box}),
        ):
            body = {
                "jsonrpc": "2.0",
                "id": 2,
                "method": "tools/call",
                "params": {"name": name, "arguments": arguments},
            }
            assert "quota_exceeded" in client.post("/mcp", json=body, headers={**ACCEPT, **session}).text, (
                name
            )
        assert "(quota_exceeded)" in far(house, "Sandbox()", CLOCHE_API_KEY=key).stderr
        assert [found["id"] for found in client.get("/v1/sandboxes").json()["sandboxes"]] == [box]
        assert client.post(f"/v1/sandboxes/{box}/restore", json={"snapshot": snapshot}).is_success
        clear(client)
        assert (
            client.post("/run", json={"command": "echo there is room"}).json()["stdout"] == "there is room\n"
        )


def test_who_has_no_tenant_counts_as_one_and_so_do_local_callers(house):
    with house.client() as client:
        made = house.cloche("create", "--json")
        assert made.returncode == 0, made.stderr
        client.post("/v1/sandboxes", json={}).raise_for_status()
        refused(client.post("/v1/sandboxes", json={}), "quota_exceeded")
        refused(client.post("/v1/claims", json={"pool": "base"}), "quota_exceeded")
        assert "quota_exceeded" in house.cloche("create", "--json").stdout
        clear(client)


def test_too_many_creations_say_when_to_come_again(house):
    key = tenant(house, "slow")
    with house.client(key) as client:
        for _ in range(2):
            client.post("/run", json={"command": "true"}).raise_for_status()
        response = client.post("/v1/sandboxes", json={})
        assert refused(response, "quota_exceeded")["details"]["quota"] == "creations_per_minute"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        e2b = client.post("/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": key})
        assert (e2b.status_code, 1 <= int(e2b.headers["retry-after"]) <= 60) == (429, True)


def test_a_refused_creation_is_on_record(house):
    key = tenant(house, "logged")
    with house.client(key) as client:
        refused(client.post("/v1/sandboxes", json={"resources": {"memory_mib": 4000}}), "quota_exceeded")
    ran = house.cloche("audit", "list", "--kind", "refused", "--actor", "key:of-logged@logged", "--json")
    told = [json.loads(line)["data"] for line in ran.stdout.splitlines()]
    assert [(line["operation"], line["code"]) for line in told] == [("create", "quota_exceeded")]


# ── rates ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_that_asks_too_often_waits_on_every_wire(tmp_path):
    made = conftest.serve(tmp_path, settings="[server]\nrequests_per_s = 0.001\nburst = 5\n")
    try:
        with made.client() as client:
            statuses = [client.get("/v1/sandboxes").status_code for _ in range(6)]
            assert statuses == [200] * 5 + [429]
            response = client.get("/v1/sandboxes")
            assert refused(response, "rate_exceeded")["details"]["retry_after_s"] > 1
            assert int(response.headers["retry-after"]) > 1
            assert client.post("/mcp", json=HELLO, headers=ACCEPT).status_code == 429
            assert client.get("/metrics").status_code == 429
            assert client.get("/sandboxes", headers={"X-API-Key": made.key}).status_code == 429
            assert client.get("/healthz").status_code == 200
        assert "(rate_exceeded)" in far(made, "Sandbox()").stderr
        other = made.cloche("key", "create", "other").stdout.strip()
        with made.client(other) as client:
            box = client.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
            token = client.post(f"/v1/sandboxes/{box}/tokens", json={}).raise_for_status().json()["token"]
            with made.client(token) as guest:
                statuses = [guest.get(f"/v1/sandboxes/{box}").status_code for _ in range(4)]
            assert statuses == [200, 200, 200, 429], "a token takes from its maker's rate"
            assert client.get("/v1/sandboxes").status_code == 429
        ran = made.cloche("audit", "list", "--kind", "refused", "--json")
        told = [json.loads(line) for line in ran.stdout.splitlines()]
        assert {line["data"]["code"] for line in told} == {"rate_exceeded"}
        assert len(told) >= 8
    finally:
        conftest.stop(made)


def test_each_call_on_a_connection_counts(tmp_path):
    made = conftest.serve(tmp_path, settings="[server]\nrequests_per_s = 0.001\nburst = 6\n")
    try:
        program = """
count = 0
try:
    while count < 50:
        Sandbox.list()
        count += 1
except Exception as problem:
    print(count, problem.code)
"""
        ran: subprocess.CompletedProcess[str] = far(made, program)
        count, code = ran.stdout.split()
        assert code == "rate_exceeded", ran.stderr
        assert 1 <= int(count) <= 6
    finally:
        conftest.stop(made)
