"""The rest of our HTTP API: what a request may not say, pages, versions, repeats, and the nouns that a server keeps."""

import concurrent.futures
import io
import json
import tarfile
import threading

import httpx
import pytest

from tests.server import conftest
from tests.server.test_http import events, live, refused, until

# ── what is refused before anything is done ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (
            b"a=1",
            "application/x-www-form-urlencoded",
            "argument_invalid",
        ),  # as of `curl -d`, which may be JSON
        (b"{}", "text/plain", "body_type_refused"),
        (b"{}", "application/json; charset=latin-1", "body_type_refused"),
        (b"{", "application/json", "argument_invalid"),
        (b"[]", "application/json", "argument_invalid"),
        (b'{"name": "\xff"}', "application/json", "argument_invalid"),
        (b'{"name": "\\ud800"}', "application/json", "argument_invalid"),
        (b'{"name": 7}', "application/json", "argument_invalid"),
        (b'{"nmae": "x"}', "application/json", "field_unknown"),
        (b'{"policy": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", "application/json", "argument_invalid"),
        (b"[" * 100_000, "application/json", "argument_invalid"),
        (b'{"policy": {"a": ' + b"[" * 5000, "application/json", "argument_invalid"),
    ],
)
def test_a_body_that_is_not_one_is_refused(http, content, kind, code):
    before = live(http)
    fault = refused(http.post("/v1/sandboxes", content=content, headers={"Content-Type": kind}), code)
    assert fault["hint"]
    assert live(http) == before


def test_brackets_in_text_are_not_nesting(http):
    body = json.dumps({"command": ["echo", '"' + "[{" * 200]})
    response = http.post("/run", content=body, headers={"Content-Type": "application/json; charset=utf-8"})
    assert response.json()["stdout"] == '"' + "[{" * 200 + "\n"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=1&limit=2", "argument_invalid"),
        ("limit=0", "limit_invalid"),
        ("limit=1001", "limit_invalid"),
        ("limit=9999999999999999999999", "limit_invalid"),
        ("limit=one", "argument_invalid"),
        ("label=%ff", "argument_invalid"),
        ("label=nothing", "argument_invalid"),
        ("cursor=nonsense", "argument_invalid"),
        ("cursor=W10", "argument_invalid"),
        ("lim=1", "field_unknown"),
        ("&".join(f"a{n}=1" for n in range(60)), "argument_invalid"),
    ],
)
def test_a_query_that_is_not_one_is_refused(http, box, query, code):
    refused(http.get(f"/v1/sandboxes?{query}"), code)


def test_another_method_is_told_what_there_is(http):
    response = http.request("PATCH", "/v1/sandboxes")
    refused(response, "method_refused")
    assert response.headers["allow"] == "GET, HEAD, POST"


# ── pages ──────────────────────────────────────────────────────────────────────────────────────────


def pages(http: httpx.Client, address: str, noun: str, **query: str | int) -> list[dict]:
    found, cursor = [], None
    while True:
        params: dict[str, str | int] = {**query, **({"cursor": cursor} if cursor else {})}
        page = http.get(address, params=params).raise_for_status().json()
        assert len(page[noun]) <= int(query["limit"])
        found += page[noun]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_pages_are_stable_while_others_create_and_delete(http, box):
    names = [f"page-{n}" for n in range(5)]
    for name in names:
        http.post("/v1/volumes", json={"name": name, "size_mib": 8}).raise_for_status()
    try:
        first = http.get("/v1/volumes", params={"limit": 2}).json()
        assert [v["spec"]["name"] for v in first["volumes"]] == names[:2]
        http.delete("/v1/volumes/page-1").raise_for_status()  # the place that the cursor names
        http.delete("/v1/volumes/page-3").raise_for_status()
        http.post("/v1/volumes", json={"name": "page-0a", "size_mib": 8}).raise_for_status()
        rest = http.get("/v1/volumes", params={"limit": 9, "cursor": first["next_cursor"]}).json()
        assert [v["spec"]["name"] for v in rest["volumes"]] == ["page-2", "page-4"]
        refused(http.get("/v1/sandboxes", params={"cursor": first["next_cursor"]}), "argument_invalid")
    finally:
        for name in (*names, "page-0a"):
            http.delete(f"/v1/volumes/{name}")


def test_every_list_has_pages(http, box):
    for name in ("b", "a", "c"):
        http.put(f"/v1/sandboxes/{box}/files", params={"path": f"d/{name}"}, content=b"x").raise_for_status()
        http.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"}).raise_for_status()
        http.post(f"/v1/sandboxes/{box}/contexts", json={}).raise_for_status()
        http.post(f"/v1/sandboxes/{box}/snapshots", json={"tags": ["paged"]}).raise_for_status()
    here = f"/v1/sandboxes/{box}"
    files = pages(http, f"{here}/files/list", "files", path="d", limit=1)
    assert [file["name"] for file in files] == ["a", "b", "c"]
    assert len(pages(http, f"{here}/executions", "executions", limit=2)) == 3
    assert len({c["id"] for c in pages(http, f"{here}/contexts", "contexts", limit=2)}) == 3
    snapshots = pages(http, "/v1/snapshots", "snapshots", limit=2, tag="paged")
    assert len(snapshots) == 3
    assert [s["created_at"] for s in snapshots] == sorted(s["created_at"] for s in snapshots)
    assert pages(
        http, f"/v1/snapshots/{snapshots[0]['id']}/diff", "changes", other=snapshots[2]["id"], limit=1
    )
    kinds = [event["kind"] for event in pages(http, "/v1/events", "events", sandbox=box, limit=3)]
    assert kinds[0] == "created"
    assert kinds.count("started") == 3
    for snapshot in snapshots:
        http.delete(f"/v1/snapshots/{snapshot['id']}")


# ── versions ───────────────────────────────────────────────────────────────────────────────────────


def test_a_stale_version_changes_nothing(http, box):
    here = f"/v1/sandboxes/{box}/policy"
    seen = http.get(here)
    assert http.get(here, headers={"If-None-Match": seen.headers["etag"]}).status_code == 304
    change = {"network": {"allow": ["one.example"]}}
    refused(http.patch(here, json=change, headers={"If-Match": '"other"'}), "version_conflict")
    refused(http.patch(here, json=change, headers={"If-Match": "other"}), "argument_invalid")
    assert http.get(here).headers["etag"] == seen.headers["etag"]
    changed = http.patch(here, json=change, headers={"If-Match": seen.headers["etag"]})
    assert changed.status_code == 200
    assert changed.headers["etag"] == http.get(here).headers["etag"] != seen.headers["etag"]
    refused(http.patch(here, json=change, headers={"If-Match": seen.headers["etag"]}), "version_conflict")


def test_of_two_changes_of_one_version_one_wins(http, box):
    here = f"/v1/sandboxes/{box}/policy"
    tag = http.get(here).headers["etag"]

    def change(n: int) -> int:
        body = {"network": {"allow": [f"n{n}.example"]}}
        return http.patch(here, json=body, headers={"If-Match": tag}).status_code

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(change, range(4))) == [200, 412, 412, 412]


def test_secrets_and_templates_have_versions(http):
    body = {"secret": {"name": "v", "hosts": ["api.example"], "env": "V"}, "value": "open sesame"}
    refused(http.put("/v1/secrets/w", json=body), "argument_invalid")
    made = http.put("/v1/secrets/v", json=body)
    assert "open sesame" not in made.text
    tag = made.headers["etag"]
    assert http.get("/v1/secrets/v").headers["etag"] == tag
    refused(http.put("/v1/secrets/v", json=body, headers={"If-Match": '"1"'}), "version_conflict")
    refused(http.delete("/v1/secrets/v", headers={"If-Match": '"1"'}), "version_conflict")
    assert http.put("/v1/secrets/v", json=body, headers={"If-Match": tag}).status_code == 200
    assert http.delete("/v1/secrets/v").status_code == 204
    refused(http.get("/v1/secrets/v"), "secret_not_found")

    template = {"name": "etag", "env": {"A": "1"}}
    tag = http.put("/v1/templates/etag", json=template).headers["etag"]
    template["env"] = {"A": "2"}
    refused(http.put("/v1/templates/etag", json=template, headers={"If-Match": '"x"'}), "version_conflict")
    newer = http.put("/v1/templates/etag", json=template, headers={"If-Match": tag})
    assert newer.headers["etag"] == http.get("/v1/templates/etag").headers["etag"] != tag
    refused(http.delete("/v1/templates/etag", headers={"If-Match": tag}), "version_conflict")
    gone = http.delete("/v1/templates/etag", headers={"If-Match": newer.headers["etag"]})
    assert gone.status_code == 204
    refused(http.get("/v1/templates/etag"), "template_not_found")


def test_a_condition_where_there_is_no_version_is_refused(http, box):
    refused(http.delete(f"/v1/sandboxes/{box}", headers={"If-Match": '"1"'}), "argument_invalid")
    assert box in live(http)


def test_who_has_seen_an_answer_does_not_get_it_again(http, box):
    seen = http.get("/v1/templates")
    again = http.get("/v1/templates", headers={"If-None-Match": f'"x", {seen.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/v1/templates", headers={"If-None-Match": '"x"'}).json() == seen.json()


# ── repeats ────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_for_one_request(http, box):
    headers = {"Idempotency-Key": "one"}
    here = f"/v1/sandboxes/{box}"
    first = http.post(f"{here}/exec", json={"command": "date +%N"}, headers=headers).json()
    assert http.post(f"{here}/exec", json={"command": "date +%N"}, headers=headers).json() == first
    refused(http.post(f"{here}/exec", json={"command": "date"}, headers=headers), "name_conflict")
    refused(http.post(f"{here}/suspend", headers=headers), "name_conflict")
    refused(
        http.post(f"{here}/exec", json={"command": "x"}, headers={"Idempotency-Key": "a b"}),
        "argument_invalid",
    )
    refused(http.post("/run/stream", json={"command": "x"}, headers=headers), "argument_invalid")


def test_one_key_at_once_is_one_execution(http, box):
    body = {"command": "echo x >> ran; while [ ! -e go ]; do sleep 0.01; done; cat ran"}
    headers = {"Idempotency-Key": "together"}
    here = f"/v1/sandboxes/{box}"
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(http.post, f"{here}/exec", json=body, headers=headers) for _ in range(3)]
        until(lambda: http.get(f"{here}/files/stat", params={"path": "ran"}).status_code == 200)
        http.put(f"{here}/files", params={"path": "go"}, content=b"").raise_for_status()
        answers = {future.result().json()["stdout"] for future in asked}
    assert answers == {"x\n"}


def test_work_with_a_key_goes_on_when_its_client_leaves(served, http, box):
    body = {"command": "echo x >> ran; while [ ! -e go ]; do sleep 0.01; done; cat ran"}
    headers = {"Idempotency-Key": "lost"}
    here = f"/v1/sandboxes/{box}"
    with served.client() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(f"{here}/exec", json=body, headers=headers, timeout=1)
    http.put(f"{here}/files", params={"path": "go"}, content=b"").raise_for_status()
    assert http.post(f"{here}/exec", json=body, headers=headers).json()["stdout"] == "x\n"


def test_a_run_with_a_key_still_ends_with_its_request(served, http):
    before = live(http)
    headers = {"Idempotency-Key": "a-run"}
    with served.client() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post("/run", json={"command": "sleep 300"}, headers=headers, timeout=1)
    until(lambda: live(http) <= before)
    until(lambda: http.post("/run", json={"command": "echo free"}, headers=headers).status_code == 200)


# ── streams that refuse before they begin ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/v1/sandboxes/nobody/asks", None, "sandbox_not_found"),
        ("GET", "/v1/sandboxes/nobody/files/watch", None, "sandbox_not_found"),
        ("GET", "/v1/sandboxes/{box}/files/watch?path=nowhere", None, "file_not_found"),
        ("GET", "/v1/sandboxes/{box}/executions/nope/stream", None, "execution_not_found"),
        ("GET", "/v1/sandboxes/{box}/files?path=nowhere", None, "file_not_found"),
        ("POST", "/run/stream", {"command": "x", "sandbox": {"template": "none"}}, "template_not_found"),
        ("POST", "/run/stream", {"command": ""}, "command_empty"),
        ("POST", "/v1/images/pull", {"reference": "dir:/etc"}, "host_path_refused"),
        ("POST", "/v1/images/pull", {"reference": "\n"}, "image_reference_invalid"),
        ("POST", "/v1/images/build", {"recipe": {"from": "dir:/etc"}}, "host_path_refused"),
        ("POST", "/v1/images/build", {"recipe": {"from": "host", "steps": [{"copy": {"from": "a", "to": "/a"}}]}}, "host_path_refused"),
        ("POST", "/v1/images/build", {"recipe": {}}, "recipe_invalid"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_be_is_an_answer(http, box, method, path, body, code):
    refused(http.request(method, path.replace("{box}", box), json=body), code)


# ── the nouns ──────────────────────────────────────────────────────────────────────────────────────


def test_a_tree_goes_in_and_out(http, box):
    here = f"/v1/sandboxes/{box}/files/tree"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("sub/file.txt")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"hello"))
    sent = http.put(here, params={"path": "tree"}, content=packed.getvalue())
    assert sent.json() == {"count": 1}
    got = http.get(here, params={"path": "tree"})
    assert got.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        assert any(name.endswith("sub/file.txt") for name in tar.getnames())
    refused(http.put(here, params={"path": "t2"}, content=b"not a tar at all"), "argument_invalid")


def test_a_large_file_is_sent_in_pieces(http, box):
    http.post(f"/v1/sandboxes/{box}/exec", json={"command": "head -c 9000000 /dev/zero > big"})
    with http.stream("GET", f"/v1/sandboxes/{box}/files", params={"path": "big"}) as response:
        assert "content-length" not in response.headers
        assert sum(map(len, response.iter_bytes())) == 9_000_000
    http.put(f"/v1/sandboxes/{box}/files", params={"path": "empty"}, content=b"").raise_for_status()
    assert http.get(f"/v1/sandboxes/{box}/files", params={"path": "empty"}).content == b""


def test_a_directory_is_watched(http, box):
    with http.stream("GET", f"/v1/sandboxes/{box}/files/watch") as response:
        http.put(f"/v1/sandboxes/{box}/files", params={"path": "new.txt"}, content=b"x").raise_for_status()
        kind, data, _ = next(e for e in events(response) if "new.txt" in e[1]["path"])
    assert kind == data["type"] in ("create", "write", "rename")


def test_rules_are_checked_and_explained(http, box):
    refused(http.post("/v1/policies/check", json={"policy": {"netwrok": {}}}), "field_unknown")
    refused(http.post("/v1/policies/check", json={"profile": "lax"}), "profile_unknown")
    rules = {"network": {"mode": "rules", "allow": ["pypi.org"]}}
    assert http.post("/v1/policies/check", json={"policy": rules}).json()["network"]["allow"] == ["pypi.org"]
    ask = {"kind": "host", "target": "pypi.org:443"}
    refused(
        http.post("/v1/policies/explain", json={**ask, "sandbox": box, "profile": "strict"}),
        "argument_invalid",
    )
    refused(http.post("/v1/policies/explain", json={**ask, "sandbox": "nobody"}), "sandbox_not_found")
    assert http.post("/v1/policies/explain", json={**ask, "sandbox": box}).json()["verdict"] == "deny"
    allowed = http.post("/v1/policies/explain", json={**ask, "policy": rules}).json()
    assert (allowed["verdict"], allowed["source"]) == ("allow", "arguments")
    secret = {"kind": "path", "target": ".git/hooks/x", "write": True}
    assert http.post("/v1/policies/explain", json=secret).json()["verdict"] == "deny"


def test_a_question_is_asked_and_answered(http, box):
    http.patch(f"/v1/sandboxes/{box}/policy", json={"network": {"mode": "rules"}}).raise_for_status()
    refused(http.post(f"/v1/sandboxes/{box}/asks/none", json={"answer": "once"}), "question_not_found")
    refused(http.post(f"/v1/sandboxes/{box}/asks/none", json={"answer": "always"}), "argument_invalid")
    command = "curl -sS http://new.test/"
    with http.stream("GET", f"/v1/sandboxes/{box}/asks") as response:
        told = events(response)
        assert next(told)[0] == "ready"
        http.post(f"/v1/sandboxes/{box}/executions", json={"command": command}).raise_for_status()
        kind, question, _ = next(told)
        assert (kind, question["host"], question["port"]) == ("question", "new.test", 80)
        answer = http.post(
            f"/v1/sandboxes/{box}/asks/{question['id']}", json={"answer": "deny", "reason": "no"}
        )
        assert answer.status_code == 204


def test_the_audit_log_is_read_and_verified(served, http, box):
    http.post(f"/v1/sandboxes/{box}/exec", json={"command": "echo audited"}).raise_for_status()
    lines = pages(http, "/v1/audit", "lines", sandbox=box, limit=2)
    assert [line["kind"] for line in lines][:2] == ["created", "started"]
    assert lines[1]["data"]["command"] == "echo audited"
    only = pages(http, "/v1/audit", "lines", sandbox=box, kind="created,exited", limit=9)
    assert {line["kind"] for line in only} == {"created", "exited"}
    refused(http.get("/v1/audit", params={"kind": "creatd"}), "argument_invalid")
    refused(http.get("/v1/audit", params={"outcome": "fine"}), "argument_invalid")
    refused(http.get("/v1/audit/verify", params={"head": "x"}), "argument_invalid")
    report = http.get("/v1/audit/verify").json()
    assert report["damaged"] is False
    assert report["lines"] > 0
    assert http.get("/v1/audit/verify", params={"head": report["head"]}).json()["damaged"] is False
    key = json.loads(served.cloche("key", "create", "reader", "--scope", "exec", "--json").stdout)["key"]
    with served.client(key) as reader:
        refused(reader.get("/v1/audit"), "scope_missing")


def test_images_are_the_operator_s(served, http):
    refused(http.get("/v1/images/find", params={"reference": "sha256:" + "0" * 64}), "image_not_found")
    refused(http.delete("/v1/images", params={"reference": "sha256:" + "0" * 64}), "image_not_found")
    assert http.get("/v1/images").json()["next_cursor"] is None
    assert http.post("/v1/images/collect").json()["images"] == []
    made = json.loads(served.cloche("key", "create", "imagine", "--tenant", "t", "--json").stdout)
    with served.client(made["key"]) as tenant:
        refused(tenant.get("/v1/images"), "scope_missing")
        refused(tenant.get("/v1/audit"), "scope_missing")


def test_the_operator_s_chores(http):
    assert http.post("/v1/sweep").json() == {"swept": []}
    assert http.post("/v1/secret-keys/rotate").json() == {
        "count": len(http.get("/v1/secrets").json()["secrets"])
    }


def test_a_pool_is_waited_for(http):
    refused(http.get("/v1/pools/none/wait"), "pool_not_found")
    made = http.put("/v1/pools/waited", json={"template": "base", "size": 1, "stay": True})
    try:
        assert made.headers["etag"] == f'"{made.json()["generation"]}"'
        assert http.get("/v1/pools/waited/wait", params={"ready": 1}).json()["ready"] == 1
        refused(http.get("/v1/pools/waited/wait", params={"ready": 9, "timeout_s": 0.1}), "wait_timeout")
        refused(
            http.post("/v1/pools/waited/scale", json={"size": 0}, headers={"If-Match": '"99"'}),
            "version_conflict",
        )
        assert (
            http.post(
                "/v1/pools/waited/scale", json={"size": 0}, headers={"If-Match": made.headers["etag"]}
            ).json()["size"]
            == 0
        )
        refused(http.delete("/v1/pools/waited", headers={"If-Match": '"99"'}), "version_conflict")
        refused(http.delete("/v1/pools/waited", headers={"If-Match": '"x"'}), "argument_invalid")
    finally:
        assert http.delete("/v1/pools/waited").status_code == 204


# ── the sandbox of a run, at every stage ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("stage", ["sent", "started", "written"])
@pytest.mark.parametrize("path", ["/run", "/run/stream"])
def test_who_leaves_a_run_at_any_stage_leaves_nothing(served, http, path, stage):
    before = live(http)
    label = f"{path[1:].replace('/', '-')}-{stage}"
    body = {"command": "echo on; sleep 300", "sandbox": {"labels": {"left": label}}}
    mine = lambda: http.get("/v1/sandboxes", params={"label": f"left={label}"}).json()["sandboxes"]  # noqa: E731
    left = threading.Event()

    def leave() -> None:
        with served.client() as leaving, leaving.stream("POST", path, json=body) as response:
            wanted = "start" if stage == "started" else "stdout"
            next(kind for kind, *_ in events(response) if kind == wanted)
        left.set()

    if path == "/run/stream" and stage != "sent":
        leave()
        assert left.is_set()
    else:
        patience = httpx.Timeout(50, read={"sent": 0.001, "started": 0.5, "written": 2}[stage])
        with served.client() as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post(path, json=body, timeout=patience)
    until(lambda: not mine())
    until(lambda: live(http) <= before)


# ── web pages ──────────────────────────────────────────────────────────────────────────────────────


def test_a_page_that_is_named_may_read_answers_and_no_other(tmp_path):
    ours, other = "https://app.example.org", "https://evil.example"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    made = conftest.serve(tmp_path, settings=f'[server]\norigins = ["{ours}"]\n')
    try:
        with made.client() as http:
            refused(http.get("/v1/sandboxes", headers={"Origin": other}), "peer_refused")
            denied = http.options("/v1/sandboxes", headers={"Origin": other, **preflight})
            assert "access-control-allow-origin" not in denied.headers
            assert denied.status_code >= 400
            assert "access-control-allow-origin" not in http.get("/v1/sandboxes").headers
            allowed = http.options("/v1/sandboxes", headers={"Origin": ours, **preflight})
            assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, ours)
            assert "Authorization" in allowed.headers["access-control-allow-headers"]
            read = http.get("/v1/sandboxes", headers={"Origin": ours})
            assert (read.status_code, read.headers["access-control-allow-origin"]) == (200, ours)
            assert "access-control-allow-credentials" not in read.headers
            assert read.headers["vary"] == "Origin"
            failed = http.get("/v1/sandboxes/nobody", headers={"Origin": ours})
            assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (404, ours)
    finally:
        assert conftest.stop(made) == 0


def test_without_a_word_there_is_no_cors(http):
    answer = http.options(
        "/v1/sandboxes", headers={"Origin": "https://app.example.org", "Access-Control-Request-Method": "GET"}
    )
    assert "access-control-allow-origin" not in answer.headers
    assert answer.status_code >= 400
