"""The operator's policy is a ceiling: no caller of a server loosens it, by any knob of any wire."""

import json
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

CEILING = """
[files]
root = "read-only"
protected = ["mine"]
[network]
mode = "rules"
allow = ["pypi.org"]
deny = ["gist.github.com"]
[syscalls]
profile = "restrictive"
deny = ["mkdir", "mkdirat"]
[limits]
memory_mib = 256
cpus = 0.5
pids = 100
disk_mib = 300
timeout_s = 600
[environment]
allow = ["APP_*"]
[secrets]
allow = []
[isolation]
minimum = "namespaces"
root_user = false
"""
SETTINGS = """
[policy]
ceiling = "{ceiling}"
[defaults.resources]
memory_mib = 128
cpus = 0.5
pids = 100
disk_mib = 256
"""
LIMITS = {"memory_mib": 256, "cpus": 0.5, "pids": 100, "disk_mib": 300, "timeout_s": 600}


@pytest.fixture(scope="module")
def house() -> Iterator[conftest.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        (Path(home) / "ceiling.toml").write_text(CEILING)
        made = conftest.serve(Path(home), settings=SETTINGS.format(ceiling=f"{home}/ceiling.toml"))
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


@pytest.fixture
def client(house) -> Iterator[httpx.Client]:
    with house.client() as made:
        yield made
        for box in made.get("/v1/sandboxes").json()["sandboxes"]:
            made.delete(f"/v1/sandboxes/{box['id']}")


def within(client: httpx.Client, box: str) -> None:
    """What holds for it is no more than the ceiling."""
    rules = client.get(f"/v1/sandboxes/{box}/policy").raise_for_status().json()
    assert rules["files"]["root"] == "read-only"
    assert "mine" in rules["files"]["protected"]
    assert (rules["files"]["read"], rules["files"]["write"]) == ([], [])
    assert rules["network"]["mode"] in ("off", "rules")
    assert set(rules["network"]["allow"]) <= {"pypi.org"}
    assert "gist.github.com" in rules["network"]["deny"]
    assert rules["network"]["resolve"] == {}
    assert rules["syscalls"]["profile"] == "restrictive"
    assert "mkdirat" in rules["syscalls"]["deny"]
    assert all(rules["limits"][name] <= most for name, most in LIMITS.items())
    assert rules["environment"]["allow"] == ["APP_*"]
    assert rules["secrets"]["allow"] == []
    assert rules["isolation"]["root_user"] is False
    assert rules["isolation"]["minimum"] == "namespaces"
    info = client.get(f"/v1/sandboxes/{box}").raise_for_status().json()
    assert info["isolation"]["level"] == "namespaces"
    assert info["expires_at"] is not None
    assert info["expires_at"] - info["created_at"] <= 601
    assert all(
        info["limits"][name]["value"] <= LIMITS[name] for name in ("memory_mib", "cpus", "pids", "disk_mib")
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"resources": {"memory_mib": 257}}, "limit_refused"),
    ({"resources": {"cpus": 0.51}}, "limit_refused"),
    ({"resources": {"pids": 101}}, "limit_refused"),
    ({"resources": {"disk_mib": 301}}, "limit_refused"),
    ({"resources": {"memory_mib": 257}, "policy": {"limits": {"memory_mib": 9999}}}, "limit_refused"),
    ({"timeout_s": None}, "limit_refused"),
    ({"timeout_s": 601}, "limit_refused"),
    ({"env": {"LD_PRELOAD": "x"}}, "environment_refused"),
    ({"env": {"X": "1"}, "policy": {"environment": {"allow": ["*"]}}}, "environment_refused"),
    ({"secrets": ["github"]}, "secret_refused"),
    ({"secrets": ["github"], "policy": {"secrets": {"allow": ["*"]}}}, "secret_refused"),
    ({"policy": {"files": {"read": ["/etc"]}}}, "host_path_refused"),
    ({"policy": {"files": {"write": ["/"]}}}, "host_path_refused"),
    ({"workspace": "/etc"}, "host_path_refused"),
    ({"image": "dir:/"}, "host_path_refused"),
]  # fmt: skip
LOOSE: list[dict[str, Any]] = [
    {"profile": "permissive"},
    {"mode": "codex"},
    {"minimum_isolation": "process"},
    {"policy": {"isolation": {"minimum": "process", "root_user": True}}},
    {"policy": {"files": {"root": "overlay", "protected": []}}},
    {"policy": {"network": {"mode": "open"}}},
    {"policy": {"network": {"mode": "open", "allow": ["evil.example"], "deny": []}}},
    {"policy": {"network": {"mode": "rules", "allow": ["evil.example", "*.pypi.org", "gist.github.com"]}}},
    {"policy": {"network": {"mode": "rules", "resolve": {"pypi.org:443": "127.0.0.1:22"}}}},
    {"policy": {"syscalls": {"profile": "permissive", "deny": []}}},
    {"policy": {"limits": {"memory_mib": 9999, "timeout_s": 1e6}}},
    {"policy": {"environment": {"allow": ["*"], "deny": []}}},
    {"policy": {"secrets": {"allow": ["*"]}}},
]  # fmt: skip


@pytest.mark.parametrize(("body", "code"), REFUSED, ids=repr)
def test_more_than_the_ceiling_is_refused(client, body, code):
    refused(client.post("/v1/sandboxes", json=body), code)
    refused(client.post("/run", json={"command": "id", "sandbox": body}), code)
    assert client.get("/v1/sandboxes").json()["sandboxes"] == []


@pytest.mark.parametrize("body", LOOSE, ids=repr)
def test_looser_rules_come_to_no_more_than_the_ceiling(client, body):
    answer = client.post("/v1/sandboxes", json=body)
    if answer.status_code == 201:
        within(client, answer.json()["id"])
    else:
        assert answer.status_code in (400, 403), answer.text


def test_nothing_that_is_done_later_loosens_it(client):
    box = client.post("/v1/sandboxes", json={"timeout_s": 500}).raise_for_status().json()["id"]
    here = f"/v1/sandboxes/{box}"
    changes: list[dict[str, Any]] = [
        {"mode": "open"},
        {"mode": "rules", "allow": ["evil.example"]},
        {"deny": []},
        {"resolve": {"pypi.org:443": "127.0.0.1:22"}},
    ]
    for network in changes:
        client.patch(f"{here}/policy", json={"network": network})
        within(client, box)
    for timeout_s in (601, 1e6, None):
        client.post(f"{here}/extend", json={"timeout_s": timeout_s})
        within(client, box)
    for body in ({"command": "id -u", "user": "root"}, {"command": "env", "env": {"LD_PRELOAD": "x"}}):
        answer = client.post(f"{here}/exec", json=body)
        assert answer.status_code == 403, answer.text
    assert client.post(f"{here}/exec", json={"command": "mkdir /tmp/d"}).json()["exit_code"] != 0
    assert client.post(f"{here}/exec", json={"command": "touch /usr/x /opt/x"}).json()["exit_code"] != 0


def test_neither_templates_nor_claims_snapshots_nor_forks_loosen_it(client):
    loose = {
        "name": "loose",
        "resources": {"memory_mib": 128, "cpus": 0.5, "pids": 100, "disk_mib": 256},
        "profile": "permissive",
        "policy": {"network": {"mode": "open"}, "isolation": {"root_user": True}},
    }
    assert client.put("/v1/templates/loose", json=loose).is_success
    box = (
        client.post("/v1/sandboxes", json={"template": "loose", "timeout_s": 300})
        .raise_for_status()
        .json()["id"]
    )
    within(client, box)
    claim = client.post(
        "/v1/claims", json={"pool": "loose", "timeout_s": 300, "policy": {"network": {"mode": "open"}}}
    )
    if claim.is_success:
        within(client, claim.json()["sandbox"])
    refused(
        client.post("/v1/claims", json={"pool": "loose", "resources": {"memory_mib": 1000}}), "limit_refused"
    )
    refused(client.post("/v1/claims", json={"pool": "loose", "timeout_s": 5000}), "limit_refused")
    snapshot = client.post(f"/v1/sandboxes/{box}/snapshots", json={}).raise_for_status().json()["id"]
    made = (
        client.post("/v1/sandboxes", json={"snapshot": snapshot, "profile": "permissive"})
        .raise_for_status()
        .json()["id"]
    )
    within(client, made)
    for child in (
        client.post(f"/v1/sandboxes/{box}/fork", json={"count": 1}).raise_for_status().json()["sandboxes"]
    ):
        within(client, child["id"])


def test_no_other_wire_loosens_it(house, client):
    headers = {"X-API-Key": house.key}
    for body in ({}, {"allow_internet_access": True}, {"network": {"allowOut": ["evil.example"]}}):
        made = client.post("/sandboxes", json={"templateID": "base", "timeout": 300, **body}, headers=headers)
        if made.status_code == 201:
            within(client, made.json()["sandboxID"])
        else:
            assert made.status_code in (400, 403), made.text
    assert client.post(
        "/sandboxes", json={"templateID": "base", "timeout": 5000}, headers=headers
    ).status_code in (400, 403)
    opened = client.post("/mcp", json=HELLO, headers=ACCEPT).raise_for_status()
    session = {"Mcp-Protocol-Version": "2025-06-18"}
    if "mcp-session-id" in opened.headers:
        session["Mcp-Session-Id"] = opened.headers["mcp-session-id"]
    client.post(
        "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers={**ACCEPT, **session}
    )
    arguments = {"profile": "permissive", "network": {"enabled": True, "allowed_domains": ["evil.example"]}}
    call = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "sandbox_session_create", "arguments": arguments},
    }
    client.post("/mcp", json=call, headers={**ACCEPT, **session}).raise_for_status()
    for box in client.get("/v1/sandboxes").json()["sandboxes"]:
        within(client, box["id"])
    program = """
from cloche import Policy
box = Sandbox(profile="permissive", network="open", timeout_s=300)
print(box.policy.get().network.mode, box.policy.get().isolation.root_user)
for attempt in (lambda: Sandbox(memory_mib=1000), lambda: box.exec("id", user="root"), lambda: box.exec("id", env={"X": "1"}), lambda: Sandbox(timeout_s=None)):
    try:
        print(attempt())
    except Exception as problem:
        print(problem.code)
"""
    ran = far(house, program)
    assert ran.stdout.split() == [
        "rules",
        "False",
        "limit_refused",
        "user_refused",
        "environment_refused",
        "limit_refused",
    ], ran.stderr


def test_the_local_socket_meets_it_too(house):
    ran = house.cloche("run", "--memory", "1000", "--json", "--", "true")
    assert json.loads(ran.stdout)["error"]["code"] == "limit_refused"
