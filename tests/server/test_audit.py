"""What the audit log of a server says: who did it, by key and tenant, and whom it turned away."""

import json
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.server import conftest


@pytest.fixture
def own():
    """A server whose log nobody else writes to."""
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home))
        try:
            yield made
        finally:
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
