"""A token for one sandbox: what it must not open on any wire, then what it does, then how it ends."""

import base64
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloche import errors
from cloche.server import guarding, keys, tokens
from tests.server import conftest
from tests.server.conftest import Clock
from tests.server.test_callers import ACCEPT, HELLO
from tests.server.test_frames import far
from tests.server.test_http import refused


@pytest.fixture(scope="module")
def house() -> Iterator[conftest.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home))
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


@pytest.fixture
def owner(house) -> Iterator[httpx.Client]:
    with house.client() as client:
        yield client


@pytest.fixture
def boxes(owner) -> Iterator[tuple[str, str]]:
    """Two sandboxes of the same caller."""
    made = [
        owner.post("/v1/sandboxes", json={"name": name}).raise_for_status().json()["id"]
        for name in ("own", "other")
    ]
    yield made[0], made[1]
    for box in made:
        owner.delete(f"/v1/sandboxes/{box}")


def token(client: httpx.Client, box: str, *scopes: str, ttl_s: float = 600) -> str:
    body = {"scopes": scopes or ("exec", "files"), "ttl_s": ttl_s}
    made = client.post(f"/v1/sandboxes/{box}/tokens", json=body)
    assert made.status_code == 201, made.text
    told = made.json()
    assert told["sandbox"] == box or len(box) < 20
    assert abs(told["expires_at"] - time.time() - ttl_s) < 120
    return str(told["token"])


# ── what it does not open ──────────────────────────────────────────────────────────────────────────

EVERYTHING = ("sandboxes", "exec", "files", "ports", "events")


def test_it_opens_no_other_sandbox_and_nothing_that_is_not_in_one(house, owner, boxes):
    own, other = boxes
    with house.client(token(owner, own, *EVERYTHING)) as guest:
        for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "/exec", {"command": "id"}), ("GET", "/policy", None), ("POST", "/extend", {"timeout_s": 9}),
        ):  # fmt: skip
            for named in (other, "other", "x" * 20):
                refused(guest.request(method, f"/v1/sandboxes/{named}{path}", json=body), "sandbox_not_found")
        words = [
            refused(guest.get(f"/v1/sandboxes/{named}"), "sandbox_not_found")["message"].replace(named, "…")
            for named in (other, "x" * 20)
        ]
        assert words[0] == words[1]
        closed: list[tuple[str, str, Any]] = [
            ("GET", "/v1/sandboxes", None),
            ("POST", "/v1/sandboxes", {}),
            ("POST", "/run", {"command": "id"}),
            ("POST", f"/v1/sandboxes/{own}/tokens", {"scopes": ["exec"]}),
            ("POST", f"/v1/sandboxes/{own}/snapshots", {}),
            ("POST", f"/v1/sandboxes/{own}/fork", {"count": 1}),
            ("PATCH", f"/v1/sandboxes/{own}/policy", {"network": {"mode": "open"}}),
            ("GET", "/v1/events", None),
            ("GET", "/v1/events/stream", None),
            ("GET", "/v1/snapshots", None),
            ("GET", "/v1/pools", None),
            ("POST", "/v1/claims", {"pool": "base"}),
            ("GET", "/v1/secrets", None),
            ("GET", "/v1/volumes", None),
            ("GET", "/v1/templates", None),
            ("GET", "/metrics", None),
        ]
        for method, path, asked in closed:
            response = guest.request(method, path, json=asked)
            assert response.status_code == 403, (method, path, response.text)
            assert response.json()["error"]["code"] == "scope_missing"
    assert len(owner.get("/v1/sandboxes").json()["sandboxes"]) == 2


def test_a_method_that_nobody_has_thought_about_is_not_for_tokens():
    assert set(guarding.SCOPES) > guarding.BY_TOKEN
    assert not guarding.BY_TOKEN & {
        "create", "list", "create_token", "link", "fork", "snapshot", "restore", "update_policy", "answer_ask", "apply", "claim", "allow_always",
    }  # fmt: skip
    admin = {method for method, scope in guarding.SCOPES.items() if scope in ("admin", "pools", "volumes")}
    assert not guarding.BY_TOKEN & admin


def test_it_does_what_its_scopes_say_only(house, owner, boxes):
    own, _ = boxes
    with house.client(token(owner, own, "files")) as guest:
        refused(guest.post(f"/v1/sandboxes/{own}/exec", json={"command": "id"}), "scope_missing")
        refused(guest.delete(f"/v1/sandboxes/{own}"), "scope_missing")
        refused(guest.post(f"/v1/sandboxes/{own}/extend", json={"timeout_s": 1e6}), "scope_missing")
        assert guest.get(f"/v1/sandboxes/{own}").json()["id"] == own
        assert guest.put(f"/v1/sandboxes/{own}/files", params={"path": "a"}, content=b"hi").is_success
    with house.client(token(owner, own, "exec")) as guest:
        refused(guest.get(f"/v1/sandboxes/{own}/files", params={"path": "a"}), "scope_missing")
        ran = guest.post(f"/v1/sandboxes/{own}/exec", json={"command": "cat a"}).raise_for_status().json()
        assert ran["stdout"] == "hi"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"scopes": []}, "argument_invalid"),
        ({"scopes": ["admin"]}, "argument_invalid"),
        ({"scopes": ["*"]}, "argument_invalid"),
        ({"scopes": "exec"}, "argument_invalid"),
        ({"ttl_s": 0}, "limit_invalid"),
        ({"ttl_s": -5}, "limit_invalid"),
        ({"ttl_s": 1e9}, "limit_invalid"),
        ({"tenant": "red"}, "field_unknown"),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(owner, boxes, body, code):
    refused(owner.post(f"/v1/sandboxes/{boxes[0]}/tokens", json=body), code)


def test_nobody_gives_more_than_they_have(house, owner):
    secret = house.cloche(
        "key", "create", "narrow", "--tenant", "red", "--scope", "sandboxes", "--scope", "exec"
    ).stdout.strip()
    with house.client(secret) as narrow:
        own = narrow.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        refused(
            narrow.post(f"/v1/sandboxes/{own}/tokens", json={"scopes": ["exec", "files"]}), "scope_missing"
        )
        theirs = owner.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        refused(narrow.post(f"/v1/sandboxes/{theirs}/tokens", json={"scopes": ["exec"]}), "sandbox_not_found")
        made = token(narrow, own, "exec")
        with house.client(made) as guest:
            refused(guest.get(f"/v1/sandboxes/{theirs}"), "sandbox_not_found")
            assert guest.post(f"/v1/sandboxes/{own}/exec", json={"command": "true"}).is_success
        by_operator = token(owner, own, "exec")
        assert house.cloche("key", "revoke", "narrow").returncode == 0
        with house.client(made) as guest:
            refused(guest.get(f"/v1/sandboxes/{own}"), "token_invalid")
        assert house.cloche("key", "create", "narrow", "--role", "admin").returncode == 0
        with house.client(made) as guest:
            refused(guest.get(f"/v1/sandboxes/{own}"), "token_invalid")
        with house.client(by_operator) as guest:
            assert guest.get(f"/v1/sandboxes/{own}").json()["tenant"] == "red"
    for box in (own, theirs):
        owner.delete(f"/v1/sandboxes/{box}")


def test_a_forged_token_is_refused_on_every_wire(house, owner, boxes):
    own, other = boxes
    good = token(owner, own)
    head, _, tail = good.removeprefix("ct_").partition(".")
    claims = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    claims["sandbox"] = other
    changed = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    flipped = ("A" if tail[0] != "A" else "B") + tail[1:]
    for bad in (
        f"ct_{changed}.{tail}",
        f"ct_{head}.{flipped}",
        f"ct_{head}.",
        f"ct_{head}",
        "ct_",
        "ct_.",
        "ct_!.!",
        f"ct_{head}.{tail}A" + "A" * 3000,
    ):
        with house.client(bad) as guest:
            assert (
                refused(guest.get(f"/v1/sandboxes/{own}"), "token_invalid")["message"]
                == "the token is not accepted here"
            )
            assert guest.post("/mcp", json=HELLO, headers=ACCEPT).status_code == 401
        with httpx.Client(base_url=house.url, trust_env=False, headers={"X-API-Key": bad}) as guest:
            assert guest.get(f"/sandboxes/{own}").status_code == 401
    assert (
        "(token_invalid)" in far(house, f"Sandbox.get({own!r})", CLOCHE_API_KEY=f"ct_{head}.{flipped}").stderr
    )


# ── what it opens ──────────────────────────────────────────────────────────────────────────────────


def test_the_sdk_works_with_it(house, boxes):
    own, other = boxes
    program = f"""
box = Sandbox.get({own!r})
made = box.token(scopes=["exec", "files", "sandboxes"], ttl_s=60)
import os
del os.environ["CLOCHE_API_KEY"]
guest = Sandbox.get({own!r}, server={house.url!r}, key=made.token)
print(guest.exec("echo hi").stdout.strip(), guest.run_code("6 * 7").text, guest.info().id == {own!r})
guest.files.write("b", "there")
print(guest.files.read("b"), made.scopes)
for attempt in (lambda: Sandbox.get({other!r}, server={house.url!r}, key=made.token), lambda: guest.token(), lambda: guest.fork(1),
                lambda: guest.policy.update(network="open"), lambda: guest.snapshot()):
    try:
        print(attempt())
    except Exception as problem:
        print(problem.code)
"""
    ran = far(house, program)
    assert ran.stdout.splitlines() == [
        "hi 42 True", "there ('exec', 'files', 'sandboxes')", "sandbox_not_found", *["scope_missing"] * 4,
    ], ran.stderr  # fmt: skip


def test_the_command_line_makes_and_uses_one(house, boxes):
    own, other = boxes
    assert "limit_invalid" in house.cloche("token", own, "--ttl", "0", "--json").stdout
    made = house.cloche("token", own, "--scope", "exec", "--scope", "files").stdout.strip()
    told = json.loads(house.cloche("token", "own", "--json").stdout)
    assert (told["sandbox"], told["scopes"]) == (own, ["exec", "files"])
    known = {
        **house.environment,
        "CLOCHE_HOME": str(house.home / "far"),
        "CLOCHE_URL": house.url,
        "CLOCHE_API_KEY": made,
    }

    def guest(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(conftest.argv(*words), capture_output=True, text=True, env=known, timeout=50)

    assert guest("exec", own, "--", "hostname").stdout == "cloche\n"
    assert "scope_missing" in guest("list", "--json").stdout
    assert "sandbox_not_found" in guest("info", other, "--json").stdout
    assert guest("run", "--", "true").returncode == 125


def test_mcp_works_with_it_in_its_sandbox(house, owner):
    own, other = (
        owner.post("/v1/sandboxes", json={"labels": {"mcp": "t"}}).raise_for_status().json()["id"]
        for _ in "12"
    )
    with house.client(token(owner, own)) as guest:

        def call(name: str, **arguments: object) -> str:
            body = {
                "jsonrpc": "2.0",
                "id": 2,
                "method": "tools/call",
                "params": {"name": name, "arguments": arguments},
            }
            return guest.post("/mcp", json=body, headers={**ACCEPT, **session}).raise_for_status().text

        opened = guest.post("/mcp", json=HELLO, headers=ACCEPT).raise_for_status()
        session = (
            {"Mcp-Session-Id": opened.headers["mcp-session-id"]} if "mcp-session-id" in opened.headers else {}
        )
        session["Mcp-Protocol-Version"] = "2025-06-18"
        guest.post(
            "/mcp",
            json={"jsonrpc": "2.0", "method": "notifications/initialized"},
            headers={**ACCEPT, **session},
        )
        assert "from inside" in call("sandbox_exec", sandbox=own, command=["echo", "from inside"])
        assert "there is no sandbox" in call("sandbox_exec", sandbox=other, command=["id"])
        assert "scope_missing" in call("sandbox_list")
        assert "scope_missing" in call("sandbox_run", command=["id"])
    for box in (own, other):
        owner.delete(f"/v1/sandboxes/{box}")


def test_e2b_works_with_it_in_its_sandbox(house, owner, boxes):
    own, other = boxes
    with httpx.Client(base_url=house.url, trust_env=False, timeout=50) as client:
        headers = {"X-API-Key": token(owner, own), "E2b-Sandbox-Port": "49983"}
        inside = client.get(
            "/files", params={"path": "/etc/hostname"}, headers={**headers, "E2b-Sandbox-Id": own}
        )
        assert (inside.status_code, inside.text) == (200, "cloche\n")
        outside = client.get(
            "/files", params={"path": "/etc/hostname"}, headers={**headers, "E2b-Sandbox-Id": other}
        )
        assert outside.status_code in (404, 502)
        assert client.post("/sandboxes", json={"templateID": "base"}, headers=headers).status_code == 403
        assert client.get("/sandboxes", headers=headers).status_code == 403


def test_it_is_on_record_who_made_it_and_who_used_it(house, owner, boxes):
    own, _ = boxes
    made = token(owner, own, "exec")
    with house.client(made) as guest:
        guest.post(f"/v1/sandboxes/{own}/exec", json={"command": "true"}).raise_for_status()
        guest.get("/v1/sandboxes")
    lines = [json.loads(line) for line in house.cloche("audit", "list", "--json").stdout.splitlines()]
    assert [line["actor"] for line in lines if line["data"].get("operation") == "token_made"][
        -1
    ] == "key:default"
    assert any(line["actor"].startswith("token:") and line["kind"] == "started" for line in lines)
    assert any(line["actor"].startswith("token:") and line["kind"] == "refused" for line in lines)
    assert made not in json.dumps(lines)
    assert stat.S_IMODE(os.stat(house.home / "s/keys/tokens.key").st_mode) == 0o600


# ── how it ends ────────────────────────────────────────────────────────────────────────────────────


def test_it_ends_with_its_sandbox(house, owner):
    own = owner.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
    made = token(owner, own, *EVERYTHING)
    with house.client(made) as guest:
        assert guest.get(f"/v1/sandboxes/{own}").status_code == 200
        assert guest.delete(f"/v1/sandboxes/{own}").status_code == 204
        gone = guest.post(f"/v1/sandboxes/{own}/exec", json={"command": "id"})
        assert gone.json()["error"]["code"] in ("sandbox_lost", "sandbox_not_found")


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def known(tmp_path, clock):
    return keys.Keys(str(tmp_path), clock)


@pytest.fixture
def made(tmp_path, known, clock):
    return tokens.AccessTokens(str(tmp_path), known, clock)


def refusal(made, token):
    with pytest.raises(errors.ClocheError) as caught:
        made.check(token)
    return caught.value


def issue(made, *, scopes=("exec", "files"), tenant="", issuer="uid:0", ttl_s=60):
    return made.issue("a" * 20, tenant, scopes, ttl_s, issuer).token


def test_it_ends_with_its_time(made, clock):
    token = issue(made)
    clock.now += 59.9
    assert made.check(token).sandbox == "a" * 20
    clock.now += 0.1
    assert refusal(made, token).code == "token_expired"


def test_it_ends_with_the_file_and_another_server_s_is_no_good(made, tmp_path, known, clock):
    token = issue(made)
    (tmp_path / "elsewhere").mkdir()
    other = tokens.AccessTokens(str(tmp_path / "elsewhere"), known, clock)
    assert refusal(other, token).code == "token_invalid"
    issue(other)
    assert refusal(other, token).code == "token_invalid"
    (tmp_path / "keys/tokens.key").unlink()
    assert refusal(made, token).code == "token_invalid"
    assert made.check(issue(made)).name.startswith("token:")
    assert refusal(made, token).code == "token_invalid"


def test_it_follows_the_key_that_made_it(made, known, clock):
    known.create("ci", ("exec",), tenant="red")
    token = issue(made, issuer="key:ci@red", tenant="red")
    found = made.check(token)
    assert (found.tenant, found.scopes, found.payer) == ("red", {"exec"}, "ci")
    known.rotate("ci")
    assert made.check(token) == found
    clock.now += 1
    known.revoke("ci")
    assert "revoked" in refusal(made, token).record
    known.create("ci", ("*",), tenant="red")
    assert "another" in refusal(made, token).record


def test_it_does_not_outlive_the_key_that_made_it(made, known, clock):
    known.create("ci", ("exec",), lifetime_s=30)
    token = issue(made, issuer="key:ci")
    assert made.check(token).scopes == {"exec"}
    clock.now += 30
    assert refusal(made, token).code == "token_invalid"


def test_who_has_no_key_made_it_too(made):
    assert (
        made.check(issue(made, issuer="jwt:a@example.org@red", tenant="red")).payer == "jwt:a@example.org@red"
    )
    assert made.check(issue(made, issuer="uid:0")).scopes == {"exec", "files"}
