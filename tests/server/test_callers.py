"""Who may call, on every wire of one real server: our HTTP API, the SDK's connection, MCP, E2B. Refusals first."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server import conftest, test_jwt
from tests.server.test_frames import PROGRAM, far
from tests.server.test_http import refused

SETTINGS = """
[jwt]
issuer = "https://id.example"
audience = ["cloche"]
jwks = "{jwks}"
"""
HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.fixture(scope="module")
def house() -> Iterator[conftest.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        place = Path(home) / "jwks.json"
        place.write_text(json.dumps({"keys": test_jwt.EVERY}))
        made = conftest.serve(Path(home), settings=SETTINGS.format(jwks=place))
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


def token(**more: object) -> str:
    now = time.time()
    said = {"iat": now, "exp": now + 600, "scope": "sandboxes exec files", **more}
    return test_jwt.signed(test_jwt.RSA, "RS256", test_jwt.claims(**said), kid="rsa")


def told(served: conftest.Served, *words: str) -> list[tuple[str, str, str]]:
    ran = served.cloche("audit", "list", "--kind", "refused", "--json", *words)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(line["actor"], line["data"]["operation"], line["data"]["code"]) for line in lines]


# ── tokens of an issuer, on every wire ─────────────────────────────────────────────────────────────

WRONG = {
    "token_invalid": lambda: test_jwt.signed(test_jwt.OTHER_RSA, "RS256", kid="rsa"),
    "token_expired": lambda: token(exp=time.time() - 3600),
}


@pytest.mark.parametrize("code", WRONG)
def test_a_bad_token_is_refused_on_every_wire_and_is_on_record(house, code):
    bad = WRONG[code]()
    before = len(told(house))
    with house.client(bad) as client:
        response = client.get("/v1/sandboxes")
        refused(response, code)
        assert response.headers["www-authenticate"] == "Bearer"
        assert client.post("/mcp", json=HELLO, headers=ACCEPT).status_code == 401
        assert client.get("/metrics").status_code == 401
        assert client.post("/run", json={"command": "id"}).status_code == 401
    with httpx.Client(base_url=house.url, trust_env=False, headers={"X-API-Key": bad}) as client:
        assert client.get("/sandboxes").status_code == 401
        assert client.post("/sandboxes", json={"templateID": "base"}).status_code == 401
    assert f"({code})" in far(house, "Sandbox()", CLOCHE_API_KEY=bad).stderr
    new = told(house)[before:]
    assert [(actor, what) for actor, _, what in new] == [("stranger", code)] * 7
    assert {"connect", "mcp", "metrics"} <= {operation for _, operation, _ in new}


def test_a_token_is_its_tenant_s_and_has_its_scopes_only(house):
    with house.client(token()) as red, house.client(token(tenant="blue")) as blue:
        mine = red.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        refused(blue.get(f"/v1/sandboxes/{mine}"), "sandbox_not_found")
        refused(blue.post(f"/v1/sandboxes/{mine}/exec", json={"command": "id"}), "sandbox_not_found")
        refused(red.get("/v1/events"), "scope_missing")
        refused(red.get("/v1/pools"), "scope_missing")
        result = red.post(f"/v1/sandboxes/{mine}/exec", json={"command": "echo hi"}).raise_for_status().json()
        assert result["stdout"] == "hi\n"
        assert red.post("/mcp", json=HELLO, headers=ACCEPT).status_code == 200
        ran = far(house, f"print(Sandbox.get({mine!r}).exec('id -u').stdout)", CLOCHE_API_KEY=token())
        assert ran.stdout == "1000\n\n", ran.stderr
        assert (
            "(sandbox_not_found)"
            in far(house, f"Sandbox.get({mine!r})", CLOCHE_API_KEY=token(tenant="x")).stderr
        )
        assert red.delete(f"/v1/sandboxes/{mine}").status_code == 204
    assert ("jwt:alice@blue", "info", "sandbox_not_found") in told(house)


def test_a_name_in_a_token_is_no_key_of_that_name(house):
    """Neither the rates nor what a key made idempotently is shared with a token that calls itself the same."""
    with house.client() as key, house.client(token(sub="default", tenant="red")) as guest:
        word = {"Idempotency-Key": "same"}
        first = key.post("/v1/sandboxes", json={}, headers=word).raise_for_status().json()["id"]
        second = guest.post("/v1/sandboxes", json={}, headers=word).raise_for_status().json()["id"]
        assert first != second
        for client, made in ((key, first), (guest, second)):
            client.delete(f"/v1/sandboxes/{made}")


def test_e2b_s_data_plane_works_for_who_came_with_a_token(house):
    with httpx.Client(base_url=house.url, trust_env=False, timeout=50) as client:
        headers = {"X-API-Key": token()}
        made = client.post("/sandboxes", json={"templateID": "base", "secure": True}, headers=headers)
        made.raise_for_status()
        routed = {"E2b-Sandbox-Id": made.json()["sandboxID"], "E2b-Sandbox-Port": "49983"}
        wrong = client.get(
            "/files", params={"path": "/etc/hostname"}, headers={**routed, "X-Access-Token": "no"}
        )
        assert wrong.status_code == 401
        with house.client(
            token(tenant="blue")
        ) as elsewhere:  # the same person in another tenant is somebody else
            assert elsewhere.get("/v1/sandboxes").json()["sandboxes"] == []
        right = client.get(
            "/files",
            params={"path": "/etc/hostname"},
            headers={**routed, "X-Access-Token": made.json()["envdAccessToken"]},
        )
        assert right.status_code == 200, right.text
        assert client.delete(f"/sandboxes/{made.json()['sandboxID']}", headers=headers).status_code == 204


def test_a_connection_does_not_outlive_its_key(house):
    secret = house.cloche("key", "create", "leaving").stdout.strip()
    program = """
import sys
box = Sandbox()
print(box.exec("echo one").stdout, flush=True)
sys.stdin.readline()
try:
    box.exec("echo two")
except Exception as problem:
    print(problem.code)
"""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(house.home), "CLOCHE_HOME": str(house.home / "far"), "CLOCHE_URL": house.url,
        "CLOCHE_API_KEY": secret,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM + program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as client:  # fmt: skip
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "one\n"
        assert house.cloche("key", "revoke", "leaving").returncode == 0
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.read().split() == ["key_refused"]


def test_a_stream_does_not_outlive_its_key(house):
    secret = house.cloche("key", "create", "listening").stdout.strip()
    with house.client() as owner:
        box = owner.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        command = {"command": "while echo tick; do sleep 0.2; done"}
        started = owner.post(f"/v1/sandboxes/{box}/executions", json=command).raise_for_status().json()["id"]
        path = f"/v1/sandboxes/{box}/executions/{started}/stream"
        with house.client(secret) as client, client.stream("GET", path) as stream:
            lines = stream.iter_lines()
            assert any("tick" in line for line in lines)
            assert house.cloche("key", "revoke", "listening").returncode == 0
            rest = list(lines)
        assert "event: error" in rest
        assert any("key_refused" in line for line in rest)
        running = owner.get(f"/v1/sandboxes/{box}/executions").json()["executions"]
        assert [one["running"] for one in running] == [True], "the execution is the sandbox's, and goes on"
        owner.delete(f"/v1/sandboxes/{box}")


def test_a_stream_on_a_connection_does_not_outlive_its_key(house):
    secret = house.cloche("key", "create", "following").stdout.strip()
    program = """
import sys
box = Sandbox()
try:
    for event in box.exec_stream("while echo tick; do sleep 0.2; done"):
        print("tick", flush=True)
except Exception as problem:
    print(problem.code, flush=True)
"""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(house.home), "CLOCHE_HOME": str(house.home / "far"), "CLOCHE_URL": house.url,
        "CLOCHE_API_KEY": secret,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM + program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as client:  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "tick\n"
        assert house.cloche("key", "revoke", "following").returncode == 0
        assert client.stdout.read().split()[-1] == "key_refused"


# ── by which name, from which page ─────────────────────────────────────────────────────────────────

EVIL = [
    "evil.example", "evil.example:7777", "localhost.evil.example", "127.0.0.1.evil.example", "169.254.169.254", "", "[::2]",
    "localhost:7777:1", "localhost:x", "user@localhost", "127.0.0.1 ", "[::1", "::1", "localhost/", "0x7f.1", "2130706433", "*",
    "3000-aaaaaaaaaaaaaaaaaaaa.evil.example", "localhost, evil.example",
]  # fmt: skip
PATHS = ["/v1/sandboxes", "/healthz", "/openapi.json", "/metrics", "/mcp", "/sandboxes", "/nowhere", "/files"]


def get(
    served: conftest.Served, path: str, *headers: tuple[str, str], version: int = 11
) -> http.client.HTTPResponse:
    """A request exactly as it is written."""
    address = httpx.URL(served.url)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=50)
    connection._http_vsn, connection._http_vsn_str = version, f"HTTP/{version // 10}.{version % 10}"  # type: ignore[attr-defined]
    connection.putrequest("GET", path, skip_host=True)
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize("host", EVIL)
def test_who_calls_us_by_another_name_gets_nothing_on_any_path(house, host):
    key = ("Authorization", f"Bearer {house.key}")
    for path in PATHS:
        assert get(house, path, ("Host", host), key).status in (400, 403), path


def test_who_names_nobody_or_two_gets_nothing(house):
    for path in PATHS:
        assert get(house, path, version=10).status in (400, 403)
        assert get(house, path, ("Host", "localhost"), ("Host", "evil.example")).status in (400, 403)
        assert get(house, path, ("Host", "evil.example"), ("Host", "localhost")).status in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:7777", "a.localhost"]
)
def test_our_own_names_are_ours_at_any_port(house, host):
    assert get(house, "/healthz", ("Host", host)).status == 200


@pytest.mark.parametrize("origin", ["null", "https://evil.example", "http://localhost:7777", "", "file://"])
def test_no_web_page_gets_through_on_any_wire(house, origin):
    key = ("Authorization", f"Bearer {house.key}")
    for path in ("/v1/sandboxes", "/metrics", "/mcp", "/sandboxes", "/healthz"):
        assert get(house, path, ("Host", "localhost"), ("Origin", origin), key).status == 403, path


def test_no_web_page_opens_a_connection(house):
    from websockets.exceptions import ConnectionClosed, InvalidStatus
    from websockets.sync.client import connect
    from websockets.typing import Origin

    address = "ws" + house.url.removeprefix("http") + "/v1/connect"
    key = {"Authorization": f"Bearer {house.key}"}
    with connect(
        address, additional_headers=key, origin=Origin("https://evil.example"), proxy=None
    ) as opened:
        assert json.loads(opened.recv())["code"] == "peer_refused"
        with pytest.raises(ConnectionClosed) as caught:
            opened.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4403
    with socket.create_connection(("127.0.0.1", httpx.URL(house.url).port)) as sock:
        evil = address.replace("127.0.0.1", "evil.example")
        with pytest.raises(InvalidStatus) as refusal:
            connect(evil, additional_headers=key, sock=sock, proxy=None)
    assert refusal.value.response.status_code == 403


def test_the_names_that_the_operator_gives_count(tmp_path):
    lines = 'server.hosts = ["box.example", "*.apps.example"]\nserver.origins = ["https://app.example"]\n'
    made = conftest.serve(tmp_path, settings=lines)
    try:
        good = ["box.example", "Box.Example:443", "a.apps.example", "3000-aaaaaaaaaaaaaaaaaaaa.box.example"]
        bad = ["xbox.example", "apps.example", "evilapps.example", "a.box.example", "evil.example"]
        assert [get(made, "/healthz", ("Host", host)).status for host in good[:3]] == [200] * 3
        assert get(made, "/nowhere", ("Host", good[3])).status != 403
        assert [get(made, "/healthz", ("Host", host)).status for host in bad] == [403] * 5
        assert get(made, "/healthz", ("Host", "localhost"), ("Origin", "https://app.example")).status == 200
        assert (
            get(made, "/healthz", ("Host", "localhost"), ("Origin", "https://app.example.evil")).status == 403
        )
    finally:
        conftest.stop(made)
