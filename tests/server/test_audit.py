"""What the audit log of a server says: who did it, by key and tenant, and whom it turned away."""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.server import conftest


@pytest.fixture
def own():
    """A server whose log nobody else writes to."""
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home))
        try:
            yield made
        finally:
            if made.process.poll() is None:
                conftest.stop(made)


def lines(served, *words):
    ran = served.cloche("audit", "list", "--json", *words)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def made_key(served, name, *words):
    ran = served.cloche("key", "create", name, "--json", *words)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)["key"]


def test_who_is_turned_away_is_on_record(own):
    with httpx.Client(base_url=own.url, trust_env=False) as stranger:
        stranger.get("/v1/sandboxes")
        stranger.get("/v1/sandboxes", headers={"X-API-Key": "cl_" + "0" * 40})
        stranger.get("/v1/sandboxes", headers={"Host": "evil.example"})
    narrow = made_key(own, "narrow", "--scope", "files")
    with own.client(narrow) as client:
        client.post("/v1/sandboxes", json={})
    told = [
        (line["actor"], line["data"]["code"], line["outcome"]) for line in lines(own, "--kind", "refused")
    ]
    assert told == [
        ("stranger", "key_missing", "refused"),
        ("stranger", "key_refused", "refused"),
        ("stranger", "peer_refused", "refused"),
        ("key:narrow", "scope_missing", "refused"),
    ]


def test_who_is_turned_away_from_a_connection_is_on_record(own):
    address = "ws" + own.url.removeprefix("http") + "/v1/connect"
    with connect(address, proxy=None) as opened:
        assert json.loads(opened.recv())["code"] == "key_missing"
    with connect(
        address, proxy=None, additional_headers={"X-API-Key": own.key}, origin=Origin("null")
    ) as opened:
        assert json.loads(opened.recv())["code"] == "peer_refused"
    with (
        socket.create_connection(("127.0.0.1", httpx.URL(own.url).port)) as sock,
        pytest.raises(InvalidStatus),
    ):
        connect(address.replace("127.0.0.1", "evil.example"), sock=sock, proxy=None)
    told = [(line["data"]["operation"], line["data"]["code"]) for line in lines(own, "--kind", "refused")]
    assert told == [
        ("connect", "key_missing"),
        ("connect", "peer_refused"),
        ("WEBSOCKET /v1/connect", "peer_refused"),
    ]


def test_an_act_is_its_key_s_and_its_tenant_s(own):
    acme, other = made_key(own, "ci", "--tenant", "acme"), made_key(own, "nosy", "--tenant", "other")
    with own.client(acme) as client, own.client(other) as nosy:
        box = client.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        assert nosy.delete(f"/v1/sandboxes/{box}").status_code == 404
        client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"}).raise_for_status()
        client.delete(f"/v1/sandboxes/{box}").raise_for_status()
    told = [(line["kind"], line["actor"]) for line in lines(own) if line["kind"] != "administered"]
    assert told == [
        ("created", "key:ci@acme"),
        ("refused", "key:nosy@other"),
        ("started", "key:ci@acme"),
        ("exited", "guest"),
        ("deleted", "key:ci@acme"),
    ]


def test_strangers_cannot_fill_the_log(own):
    with httpx.Client(base_url=own.url, trust_env=False) as stranger:
        for _ in range(100):
            assert stranger.get("/v1/sandboxes").status_code == 401
    assert 1 <= len(lines(own, "--actor", "stranger")) <= 60
    assert conftest.stop(own) == 0
    last = lines(own, "--actor", "stranger")[-1]
    assert (last["data"]["operation"], last["data"]["message"][:8]) == ("many", "50 more ")


def test_a_token_for_a_sandbox_that_never_was_is_on_record(own):
    headers = {"E2b-Sandbox-Id": "x" * 20, "E2b-Sandbox-Port": "49983", "X-Access-Token": "ffff"}
    with httpx.Client(base_url=own.url, trust_env=False) as stranger:
        assert stranger.get("/files", params={"path": "a"}, headers=headers).status_code in (404, 502)
    told = [(line["actor"], line["data"]["code"]) for line in lines(own, "--kind", "refused")]
    assert told == [("stranger", "sandbox_not_found")]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_at_the_socket_is_refused_by_what_the_kernel_says_and_is_on_record(own):
    """Permissions keep others away from the socket; where they are loosened, the peer's credentials still do."""
    for path in (own.home, own.home / "s"):
        path.chmod(0o755)
    (own.home / "s/cloche.sock").chmod(0o666)
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(40);"
        "data = b'\\0' * 0\nwhile part := s.recv(65536): data += part\nsys.stdout.buffer.write(data)"
    )
    ran = subprocess.run(
        ["/usr/bin/python3", "-c", program.replace("\\n", "\n"), str(own.home / "s/cloche.sock")],
        capture_output=True, user=65534, group=65534, extra_groups=[], timeout=50,
    )  # fmt: skip
    assert b"peer_refused" in ran.stdout, ran.stderr
    assert [(line["actor"], line["data"]["code"]) for line in lines(own, "--kind", "refused")] == [
        ("uid:65534", "peer_refused")
    ]
    assert own.cloche("list").returncode == 0
