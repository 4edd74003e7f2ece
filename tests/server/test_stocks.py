"""Templates, pools, claims, snapshots, policies and secrets over HTTP: refusals first."""

import pytest

from tests.server.test_http import refused


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/v1/templates/nope", None, "template_not_found"),
        ("GET", "/v1/pools/nope", None, "pool_not_found"),
        ("GET", "/v1/claims/nope", None, "claim_not_found"),
        ("GET", "/v1/snapshots/nope", None, "snapshot_not_found"),
        ("DELETE", "/v1/secrets/nope", None, "secret_not_found"),
        ("GET", "/v1/volumes/nope", None, "volume_not_found"),
        ("POST", "/v1/volumes", {"name": "v", "size_mib": 0}, "limit_invalid"),
        ("POST", "/v1/sandboxes", {"volumes": {"/data": {"volume": "nope"}}}, "volume_not_found"),
        ("PUT", "/v1/templates/a", {"name": "b"}, "argument_invalid"),
        ("PUT", "/v1/templates/a", {"name": "a", "colour": 1}, "field_unknown"),
        ("PUT", "/v1/templates/a", {"name": "a", "image": "dir:/etc"}, "host_path_refused"),
        (
            "PUT",
            "/v1/templates/a",
            {"name": "a", "policy": {"files": {"read": ["/etc"]}}},
            "host_path_refused",
        ),
        ("PUT", "/v1/pools/a", {"template": "base", "size": -1}, "pool_invalid"),
        ("PUT", "/v1/pools/a", {"template": "base", "min": 3, "max": 1}, "pool_invalid"),
        ("PUT", "/v1/pools/a", {"template": "nope"}, "template_not_found"),
        ("POST", "/v1/claims", {"pool": "nope"}, "pool_not_found"),
        (
            "POST",
            "/v1/claims",
            {"pool": "base", "policy": {"files": {"read": ["/etc"]}}},
            "host_path_refused",
        ),
    ],
)
def test_what_cannot_be_is_refused(http, method, path, body, code):
    refused(http.request(method, path, json=body), code)


def test_pools_and_secrets_are_the_operator_s(served):
    key = served.cloche("key", "create", "of-grey", "--tenant", "grey", "--role", "admin").stdout.strip()
    with served.client(key) as tenant:
        for method, path in (("GET", "/v1/secrets"), ("GET", "/v1/pools"), ("DELETE", "/v1/templates/base")):
            refused(tenant.request(method, path), "scope_missing")
        refused(tenant.post("/v1/claims", json={"pool": "base"}), "scope_missing")


def test_a_pool_serves_claims(http):
    made = http.put("/v1/templates/small", json={"name": "small", "resources": {"memory_mib": 128}}).json()
    assert made["version"] == http.get("/v1/templates/small").json()["version"]
    refused(
        http.put("/v1/templates/small", json={"name": "small"}, headers={"If-Match": '"another"'}),
        "version_conflict",
    )
    assert http.put("/v1/pools/small", json={"template": "small", "size": 1}).status_code == 200
    claim = http.post("/v1/claims", json={"pool": "small", "name": "mine", "env": {"A": "1"}}).json()
    ran = http.post(f"/v1/sandboxes/{claim['sandbox']}/exec", json={"command": "echo $A"}).json()
    assert ran["stdout"] == "1\n"
    assert (
        http.post("/v1/claims", json={"pool": "small", "name": "mine", "env": {"A": "1"}}).json()["sandbox"]
        == claim["sandbox"]
    )
    refused(http.post("/v1/claims", json={"pool": "small", "name": "mine"}), "name_conflict")
    refused(http.delete("/v1/templates/small"), "template_in_use")
    assert http.delete("/v1/claims/mine").status_code == 204
    refused(http.post(f"/v1/sandboxes/{claim['sandbox']}/exec", json={"command": "true"}), "sandbox_lost")
    assert http.delete("/v1/pools/small").status_code == 204
    assert http.delete("/v1/templates/small").status_code == 204


def test_snapshots_restore_and_fork(http, box):
    url = f"/v1/sandboxes/{box}"
    http.put(f"{url}/files", params={"path": "a.txt"}, content=b"one")
    first = http.post(f"{url}/snapshots", json={"name": "first", "tags": ["t"]}).json()
    http.put(f"{url}/files", params={"path": "a.txt"}, content=b"two")
    second = http.post(f"{url}/snapshots", json={}).json()
    changes = http.get(f"/v1/snapshots/{first['id']}/diff", params={"other": second["id"]}).json()["changes"]
    assert [change["path"] for change in changes if change["path"].endswith("a.txt")]
    assert [s["id"] for s in http.get("/v1/snapshots", params={"tag": "t"}).json()["snapshots"]] == [
        first["id"]
    ]
    forked = http.post(f"{url}/fork", json={"count": 1}).json()["sandboxes"][0]["id"]
    assert http.post(f"{url}/restore", json={"snapshot": "first"}).json()["id"] == box
    assert http.get(f"{url}/files", params={"path": "a.txt"}).content == b"one"
    assert http.get(f"/v1/sandboxes/{forked}/files", params={"path": "a.txt"}).content == b"two"
    for path in (f"/v1/sandboxes/{forked}", f"/v1/snapshots/{first['id']}", f"/v1/snapshots/{second['id']}"):
        assert http.delete(path).status_code == 204


def test_rules_change_on_a_live_sandbox(http, box):
    url = f"/v1/sandboxes/{box}/policy"
    assert http.get(url).json()["network"]["mode"] == "off"
    refused(http.patch(url, json={"network": {"mode": "sideways"}}), "policy_invalid")
    changed = http.patch(url, json={"network": {"mode": "rules", "allow": ["example.org:443"]}}).json()
    assert changed["network"]["allow"] == ["example.org:443"]


def test_a_secret_is_stored_and_not_shown(http):
    body = {
        "secret": {"name": "token", "hosts": ["api.example.org"], "env": "TOKEN"},
        "value": "s3cr3t-value-of-it",
    }
    assert http.put("/v1/secrets/token", json=body).status_code == 200
    listed = http.get("/v1/secrets")
    assert [secret["name"] for secret in listed.json()["secrets"]] == ["token"]
    assert "s3cr3t" not in listed.text
    assert http.delete("/v1/secrets/token").status_code == 204


def test_a_volume_outlives_its_sandboxes(http):
    assert http.post("/v1/volumes", json={"name": "kept", "size_mib": 16}).status_code == 201
    first = http.post("/v1/sandboxes", json={"volumes": {"/data": {"volume": "kept"}}}).json()["id"]
    http.post(f"/v1/sandboxes/{first}/exec", json={"command": "echo stays > /data/a.txt"})
    refused(http.delete("/v1/volumes/kept"), "volume_in_use")
    assert first in http.get("/v1/volumes/kept").json()["attached"]
    assert http.delete(f"/v1/sandboxes/{first}").status_code == 204
    second = http.post(
        "/v1/sandboxes", json={"volumes": {"/data": {"volume": "kept", "read_only": True}}}
    ).json()["id"]
    assert http.get(f"/v1/sandboxes/{second}/files", params={"path": "/data/a.txt"}).text == "stays\n"
    assert http.delete(f"/v1/sandboxes/{second}").status_code == 204
    assert http.delete("/v1/volumes/kept").status_code == 204


def test_metrics_need_their_scope_and_count(served, http):
    runner = served.cloche("key", "create", "no-metrics", "--role", "runner").stdout.strip()
    tenant = served.cloche(
        "key", "create", "of-brown", "--tenant", "brown", "--role", "viewer"
    ).stdout.strip()
    for key in (runner, tenant):
        with served.client(key) as client:
            assert client.get("/metrics").json()["error"]["code"] == "scope_missing"
    watcher = served.cloche("key", "create", "watcher", "--role", "viewer").stdout.strip()
    assert http.put("/v1/pools/metered", json={"template": "base", "size": 1}).status_code == 200
    claim = http.post("/v1/claims", json={"pool": "metered"}).json()
    with served.client(watcher) as client:
        text = client.get("/metrics").text
    assert 'cloche_pool_claim_seconds_count{pool="metered"} 1' in text
    hits, misses = (
        int(line.rpartition(" ")[2])
        for name in ("hits", "misses")
        for line in text.splitlines()
        if line.startswith(f'cloche_pool_{name}_total{{pool="metered"}}')
    )
    assert hits + misses == 1
    assert 'cloche_http_requests_total{operation="create_claim",status="201"} ' in text
    assert claim["sandbox"] not in text
    assert http.delete(f"/v1/claims/{claim['name']}").status_code == 204
    assert http.delete("/v1/pools/metered").status_code == 204
