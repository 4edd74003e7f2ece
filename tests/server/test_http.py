"""Our HTTP API against a real server: refusals first, then what is allowed, then what happens when people leave."""

import base64
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from http import server as http_server
from pathlib import Path

import httpx
import pytest

from cloche import errors
from cloche.server.http import serving
from tests.server import conftest


def refused(response: httpx.Response, code: str) -> dict:
    assert response.status_code == errors.TABLE[code].http, response.text
    fault = response.json()["error"]
    assert fault["code"] == code
    assert fault["message"]
    assert fault["request_id"] == response.headers["x-request-id"]
    return fault


def events(response: httpx.Response) -> Iterator[tuple[str, dict, str | None]]:
    kind, data, id_ = "", "", None
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif line.startswith("id: "):
            id_ = line[4:]
        elif not line and kind:
            yield kind, json.loads(data), id_
            kind, id_ = "", None


# ── the door ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/events", "/v1/sandboxes/nobody"])
def test_without_a_key_nothing_is_told(served, path):
    with httpx.Client(base_url=served.url, trust_env=False) as stranger:
        response = stranger.get(path)
    refused(response, "key_missing")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["cl_" + "0" * 40, "nonsense", "cl_", "Ω"])
def test_a_wrong_key_is_refused(served, key):
    with httpx.Client(base_url=served.url, trust_env=False) as stranger:
        refused(stranger.get("/v1/sandboxes", headers={"X-API-Key": key.encode()}), "key_refused")


def test_the_key_is_taken_in_every_spelling(served):
    digits = served.key.removeprefix("cl_")
    for headers in (
        {"Authorization": f"Bearer {served.key}"}, {"authorization": f"bearer {served.key}"}, {"X-API-Key": served.key},
        {"X-API-Key": f"e2b_{digits}"},
    ):  # fmt: skip
        with httpx.Client(base_url=served.url, trust_env=False) as client:
            assert client.get("/v1/sandboxes", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "169.254.169.254", ""])
def test_a_name_that_is_not_ours_is_refused(http, host):
    refused(http.get("/v1/sandboxes", headers={"Host": host}), "peer_refused")
    refused(http.get("/healthz", headers={"Host": host}), "peer_refused")


def test_a_web_page_is_refused(http):
    refused(http.get("/v1/sandboxes", headers={"Origin": "https://evil.example"}), "peer_refused")
    refused(http.post("/run", json={"command": "id"}, headers={"Origin": "null"}), "peer_refused")


def test_a_key_without_the_scope_is_refused(served):
    key = served.cloche("key", "create", "looker", "--role", "viewer").stdout.strip()
    with served.client(key) as client:
        assert "sandboxes" in refused(client.get("/v1/sandboxes"), "scope_missing")["message"]
        assert client.get("/v1/events").status_code == 200
    assert served.cloche("key", "revoke", "looker").returncode == 0
    with served.client(key) as client:
        refused(client.get("/v1/events"), "key_refused")


def test_an_expired_key_is_refused(served):
    key = served.cloche("key", "create", "brief", "--days", "0.00000001").stdout.strip()
    with served.client(key) as client:
        assert "expired" in refused(client.get("/v1/sandboxes"), "key_refused")["message"]


def test_a_tenant_sees_only_its_own(served, http):
    keys = [
        served.cloche("key", "create", f"of-{name}", "--tenant", name).stdout.strip()
        for name in ("red", "blue")
    ]
    with served.client(keys[0]) as red, served.client(keys[1]) as blue:
        mine = red.post("/v1/sandboxes", json={"name": "same"}).json()
        theirs = blue.post("/v1/sandboxes", json={"name": "same"}).json()
        assert mine["id"] != theirs["id"]
        unknown = refused(blue.get("/v1/sandboxes/" + "x" * 20), "sandbox_not_found")["message"]
        told = refused(blue.get(f"/v1/sandboxes/{mine['id']}"), "sandbox_not_found")["message"]
        assert told.replace(mine["id"], "x" * 20) == unknown
        refused(blue.post(f"/v1/sandboxes/{mine['id']}/exec", json={"command": "id"}), "sandbox_not_found")
        refused(blue.delete(f"/v1/sandboxes/{mine['id']}"), "sandbox_not_found")
        refused(blue.get("/v1/events", params={"sandbox": mine["id"]}), "sandbox_not_found")
        refused(blue.get("/v1/events"), "scope_missing")
        refused(blue.get("/v1/events/stream"), "scope_missing")
        refused(blue.get("/v1/events/stream", params={"sandbox": mine["id"]}), "sandbox_not_found")
        assert [box["id"] for box in blue.get("/v1/sandboxes").json()["sandboxes"]] == [theirs["id"]]
        assert blue.get("/v1/sandboxes/same").json()["id"] == theirs["id"]
        assert {mine["id"], theirs["id"]} <= {
            box["id"] for box in http.get("/v1/sandboxes").json()["sandboxes"]
        }
        assert red.delete("/v1/sandboxes/same").status_code == 204
        refused(red.get(f"/v1/sandboxes/{mine['id']}"), "sandbox_lost")
        refused(blue.get(f"/v1/sandboxes/{mine['id']}"), "sandbox_not_found")  # nor that it was
        assert blue.delete("/v1/sandboxes/same").status_code == 204


class Neighbour(http_server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "18")
        self.end_headers()
        self.wfile.write(b"from the neighbour")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def neighbour() -> Iterator[int]:
    """Another service on the loopback of the server's host, by its port."""
    with http_server.ThreadingHTTPServer(("127.0.0.1", 0), Neighbour) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made.server_port
        made.shutdown()


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("host.cloche.internal", {"allow": ["host.cloche.internal:{port}"]}),
        ("inside.test", {"allow": ["inside.test"], "resolve": {"inside.test:{port}": "127.0.0.1:{port}"}}),
    ],
    ids=["by its name", "by a name that leads there"],
)
def test_a_tenant_does_not_reach_the_server_s_own_network(served, http, neighbour, host, network):
    port = str(neighbour)
    rules = json.loads(json.dumps({"mode": "rules", **network}).replace("{port}", port))
    command = f"curl -s --max-time 20 http://{host}:{port}/"
    body = {"command": command, "sandbox": {"policy": {"network": rules}}}
    key = served.cloche("key", "create", f"in-{host.partition('.')[0]}", "--tenant", "violet").stdout.strip()
    with served.client(key) as tenant:
        refusal = tenant.post("/run", json=body).json()
        assert "from the neighbour" not in refusal["stdout"]
    assert http.post("/run", json=body).json()["stdout"] == "from the neighbour"


# ── bad input ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "argument_invalid"),
        (b'{"nmae": "a"}', "field_unknown"),
        (b'{"name": 3}', "argument_invalid"),
        (b'{"name": "UPPER"}', "name_invalid"),
        (b'{"resources": {"memory_mib": -1}}', "limit_invalid"),
        (b'{"resources": {"memory": 1}}', "argument_invalid"),
        (b'{"timeout_s": 0}', "limit_invalid"),
        (b'{"template": "nope"}', "template_not_found"),
        (b'{"profile": "nope"}', "profile_unknown"),
        (b'{"workspace": "/etc"}', "host_path_refused"),
        (b'{"policy": {"files": {"read": ["/srv"]}}}', "host_path_refused"),
        (b'{"mode": "nope"}', "mode_unknown"),
        (b'{"mode": "codex", "profile": "moderate"}', "policy_invalid"),
        (b'{"env": {"A=B": "1"}}', "environment_invalid"),
        (b'{"minimum_isolation": "microvm"}', "isolation_too_low"),
    ],
)
def test_a_sandbox_that_cannot_be_is_refused_and_none_is_made(http, body, code):
    before = len(http.get("/v1/sandboxes").json()["sandboxes"])
    refused(http.post("/v1/sandboxes", content=body), code)
    assert len(http.get("/v1/sandboxes").json()["sandboxes"]) == before


def test_a_body_that_is_too_large_is_refused_before_it_is_read(http):
    refused(http.post("/run", content=b"x" * (9 << 20)), "body_too_large")


def test_an_unknown_query_is_refused_with_the_likely_one(http, box):
    fault = refused(http.get(f"/v1/sandboxes/{box}/files", params={"pth": "a"}), "field_unknown")
    assert fault["hint"] == "did you mean 'path'?"
    refused(http.get(f"/v1/sandboxes/{box}/files"), "argument_invalid")
    refused(http.get("/v1/sandboxes", params={"limit": "many"}), "argument_invalid")
    refused(http.get("/v1/sandboxes", params={"limit": 0}), "limit_invalid")
    refused(http.get("/v1/sandboxes", params={"cursor": "?"}), "argument_invalid")


def test_what_is_not_there_is_said_in_our_words(http):
    response = http.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "route_not_found"
    response = http.patch("/v1/sandboxes")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_refused"


def test_a_dead_sandbox_a_missing_one_and_a_slow_command_are_three_things(http):
    made = http.post("/v1/sandboxes", json={}).json()["id"]
    slow = http.post(f"/v1/sandboxes/{made}/exec", json={"command": "sleep 60", "timeout_s": 0.2}).json()
    assert (slow["timed_out"], slow["code"]) == (True, 124)
    http.delete(f"/v1/sandboxes/{made}")
    refused(http.post(f"/v1/sandboxes/{made}/exec", json={"command": "true"}), "sandbox_lost")
    refused(http.post("/v1/sandboxes/nobody/exec", json={"command": "true"}), "sandbox_not_found")
    refused(http.get("/v1/sandboxes/nobody/executions/none/stream"), "sandbox_not_found")


# ── what it does ───────────────────────────────────────────────────────────────────────────────────


def test_run_gives_the_whole_result_and_leaves_no_sandbox(http):
    before = http.get("/v1/sandboxes").json()["sandboxes"]
    result = http.post("/run", json={"command": "echo out; echo err >&2; exit 3", "env": {"A": "1"}}).json()
    assert (result["exit_code"], result["stdout"], result["stderr"], result["code"]) == (
        3,
        "out\n",
        "err\n",
        3,
    )
    assert result["isolation"]["level"] == "namespaces"
    assert result["sandbox"] is None
    assert http.get("/v1/sandboxes").json()["sandboxes"] == before


def test_run_detached_keeps_its_sandbox(http):
    result = http.post("/run", json={"command": "echo kept > a.txt", "detach": True}).json()
    assert http.get(f"/v1/sandboxes/{result['sandbox']}/files", params={"path": "a.txt"}).text == "kept\n"
    assert http.delete(f"/v1/sandboxes/{result['sandbox']}").status_code == 204


def test_bytes_that_are_not_text_arrive_as_base64(http):
    result = http.post("/run", json={"command": r"printf '\377\376'"}).json()
    assert base64.b64decode(result["stdout_base64"]) == b"\xff\xfe"


def test_a_stream_is_sent_as_it_happens(http):
    """The command waits for us after its first line: if that were held back, neither would ever go on."""
    made = http.post("/v1/sandboxes", json={}).json()["id"]
    body = {"command": "echo first; until [ -e go ]; do sleep 0.01; done; echo second"}
    started = http.post(f"/v1/sandboxes/{made}/executions", json=body).json()
    with http.stream("GET", f"/v1/sandboxes/{made}/executions/{started['id']}/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        coming = events(response)
        kind, data, _ = next(coming)
        assert (kind, data["text"]) == ("stdout", "first\n")
        http.put(f"/v1/sandboxes/{made}/files", params={"path": "go"}, content=b"")
        rest = list(coming)
    assert [(kind, data.get("text")) for kind, data, _ in rest] == [("stdout", "second\n"), ("exit", None)]
    assert rest[-1][1]["exit_code"] == 0
    last = rest[0][2]
    with http.stream(
        "GET", f"/v1/sandboxes/{made}/executions/{started['id']}/stream", headers={"Last-Event-ID": str(last)}
    ) as response:
        assert [kind for kind, _, _ in events(response)] == ["exit"]
    http.delete(f"/v1/sandboxes/{made}")


def test_run_stream_tells_the_whole_story(http):
    with http.stream("POST", "/run/stream", json={"command": "echo a; exit 2"}) as response:
        story = list(events(response))
    assert [kind for kind, _, _ in story] == ["start", "stdout", "exit"]
    assert (story[-1][1]["exit_code"], story[-1][1]["code"]) == (2, 2)
    assert story[-1][1]["duration_ms"] > 0


def test_files_go_in_and_out(http, box):
    url = f"/v1/sandboxes/{box}/files"
    assert http.put(url, params={"path": "d/a.bin"}, content=b"\x00\xff").json()["size"] == 2
    assert http.get(url, params={"path": "d/a.bin"}).content == b"\x00\xff"
    assert [f["name"] for f in http.get(url + "/list", params={"path": "d"}).json()["files"]] == ["a.bin"]
    assert http.post(url + "/move", json={"path": "d/a.bin", "target": "d/b.bin"}).status_code == 204
    refused(http.get(url, params={"path": "d/a.bin"}), "file_not_found")
    refused(http.get(url, params={"path": "../etc/passwd"}), "path_invalid")
    assert http.post(url + "/directories", json={"path": "e"}).json() == {"made": True}
    tree = http.get(url + "/tree", params={"path": "d"}).content
    assert http.put(url + "/tree", params={"path": "copy"}, content=tree).json()["count"] >= 1
    assert http.get(url + "/stat", params={"path": "copy/b.bin"}).json()["size"] == 2
    assert http.delete(url, params={"path": "d", "recursive": True}).status_code == 204


def test_code_keeps_its_state(http, box):
    assert http.post(f"/v1/sandboxes/{box}/code", json={"code": "x = 41"}).json()["text"] is None
    assert http.post(f"/v1/sandboxes/{box}/code", json={"code": "x + 1"}).json()["text"] == "42"
    error = http.post(f"/v1/sandboxes/{box}/code", json={"code": "1/0"}).json()["error"]
    assert error["name"] == "ZeroDivisionError"
    made = http.post(f"/v1/sandboxes/{box}/contexts", json={}).json()["id"]
    assert made in [c["id"] for c in http.get(f"/v1/sandboxes/{box}/contexts").json()["contexts"]]
    assert http.delete(f"/v1/sandboxes/{box}/contexts/{made}").status_code == 204


def test_code_is_told_as_it_runs(http, box):
    refused(http.post("/v1/sandboxes/nobody/code/stream", json={"code": "1"}), "sandbox_not_found")
    refused(
        http.post(f"/v1/sandboxes/{box}/code/stream", json={"code": "1", "language": "c"}), "language_unknown"
    )
    code = "import os, time\nprint('x')\nwhile not os.path.exists('go'): time.sleep(0.01)\n1 / 0"
    kinds = []
    with http.stream("POST", f"/v1/sandboxes/{box}/code/stream", json={"code": code}) as response:
        for kind, data, _ in events(response):
            kinds.append(kind)
            if kind == "stdout":
                assert data == {"text": "x\n"}
                http.put(f"/v1/sandboxes/{box}/files", params={"path": "go"}, content=b"").raise_for_status()
    assert kinds == ["start", "stdout", "failed", "exit"]
    assert data["error"]["name"] == "ZeroDivisionError"
    assert data["stdout"] == "x\n"


def test_stdin_and_signals_reach_a_command(http, box):
    url = f"/v1/sandboxes/{box}/executions"
    started = http.post(url, json={"command": ["cat"], "open_stdin": True}).json()["id"]
    assert http.post(f"{url}/{started}/stdin", json={"data": "hello", "end": True}).status_code == 204
    assert http.get(f"{url}/{started}/result").json()["stdout"] == "hello"
    started = http.post(url, json={"command": ["sleep", "1000"]}).json()["id"]
    assert http.post(f"{url}/{started}/signal", json={"signal": 15}).status_code == 204
    assert http.get(f"{url}/{started}/result").json()["signal"] == 15


def test_pages_have_a_cursor(http):
    made = [http.post("/v1/sandboxes", json={"labels": {"page": "yes"}}).json()["id"] for _ in range(3)]
    seen, cursor = [], None
    while True:
        query = {"limit": 1, "label": "page=yes"} | ({"cursor": cursor} if cursor else {})
        page = http.get("/v1/sandboxes", params=query).json()
        seen += [box["id"] for box in page["sandboxes"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made
    for id_ in made:
        http.delete(f"/v1/sandboxes/{id_}")


def test_a_name_and_an_idempotency_key_make_creation_safe_to_repeat(http):
    first = http.post("/v1/sandboxes", json={"name": "one"}).json()["id"]
    assert http.post("/v1/sandboxes", json={"name": "one"}).json()["id"] == first
    refused(http.post("/v1/sandboxes", json={"name": "one", "profile": "restrictive"}), "name_conflict")
    key = {"Idempotency-Key": "abc"}
    second = http.post("/v1/sandboxes", json={}, headers=key).json()["id"]
    assert http.post("/v1/sandboxes", json={}, headers=key).json()["id"] == second
    refused(http.post("/v1/sandboxes", json={"profile": "restrictive"}, headers=key), "name_conflict")
    for id_ in (first, second):
        assert http.delete(f"/v1/sandboxes/{id_}").status_code == 204


def test_extend_suspend_resume(http, box):
    info = http.post(f"/v1/sandboxes/{box}/extend", json={"timeout_s": None}).json()
    assert info["expires_at"] is None
    assert http.post(f"/v1/sandboxes/{box}/suspend").json()["phase"] == "paused"
    assert http.get(f"/v1/sandboxes/{box}").json()["phase"] == "paused"
    assert http.post(f"/v1/sandboxes/{box}/exec", json={"command": "echo woke"}).json()["stdout"] == "woke\n"
    assert http.get(f"/v1/sandboxes/{box}/usage").json()["pids"] >= 1


def test_events_can_be_paged_and_followed(http, box):
    http.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"})
    page = http.get("/v1/events", params={"sandbox": box, "limit": 1}).json()
    assert page["events"][0]["kind"] == "created"
    after = http.get("/v1/events", params={"sandbox": box, "cursor": page["next_cursor"]}).json()["events"]
    assert after[0]["kind"] == "started"
    last = str(page["events"][0]["seq"])
    with http.stream(
        "GET", "/v1/events/stream", params={"sandbox": box}, headers={"Last-Event-ID": last}
    ) as response:
        kind, data, id_ = next(events(response))
    assert (kind, data["sandbox"], id_) == ("started", box, str(data["seq"]))


def test_a_request_id_is_carried_or_made(http):
    assert http.get("/healthz", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get("/healthz", headers={"X-Request-ID": "not ours!"}).headers["x-request-id"] != "not ours!"


# ── when people leave ──────────────────────────────────────────────────────────────────────────────


def until(condition) -> None:
    ready = threading.Event()
    for _ in range(2000):
        if condition():
            return
        ready.wait(0.02)
    raise AssertionError("it did not come true")


def live(http: httpx.Client) -> set[str]:
    return {box["id"] for box in http.get("/v1/sandboxes").json()["sandboxes"]}


@pytest.mark.parametrize("path", ["/run", "/run/stream"])
def test_the_sandbox_of_a_run_ends_with_its_request(served, http, path):
    before = live(http)
    data = json.dumps({"command": "sleep 1000"}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {served.key}\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: live(http) - before)
        made = live(http) - before
    until(lambda: not live(http) & made)


def test_an_execution_survives_its_follower(served, http, box):
    url = f"/v1/sandboxes/{box}/executions"
    started = http.post(url, json={"command": "echo here; until [ -e go ]; do sleep 0.01; done"}).json()["id"]
    with served.client() as other, other.stream("GET", f"{url}/{started}/stream") as response:
        assert next(events(response))[0] == "stdout"
    assert http.get(url).json()["executions"][0]["running"]
    http.put(f"/v1/sandboxes/{box}/files", params={"path": "go"}, content=b"")
    assert http.get(f"{url}/{started}/result").json()["exit_code"] == 0


# ── the server itself ──────────────────────────────────────────────────────────────────────────────


def test_a_second_server_says_who_holds_the_state(served):
    second = served.cloche("serve", "--port", "0")
    assert second.returncode == 125
    assert f"pid {served.process.pid}, {served.url}" in second.stderr


def test_an_address_that_is_taken_is_said(served, tmp_path):
    port = served.url.rpartition(":")[2]
    environment = {**served.environment, "CLOCHE_HOME": str(tmp_path / "s")}
    second = subprocess.run(
        conftest.argv("serve", "--port", port), capture_output=True, text=True, env=environment, timeout=50
    )
    assert second.returncode == 125
    assert "address_unavailable" in second.stderr or "cannot listen" in second.stderr


def test_local_commands_use_the_server(served):
    result = served.cloche("run", "--", "echo", "through the socket")
    assert result.stdout == "through the socket\n", result.stderr


def test_the_key_file_is_private_and_the_key_is_hashed(served):
    keys = Path(served.environment["CLOCHE_HOME"]) / "keys"
    assert (keys / "default.key").stat().st_mode & 0o077 == 0
    assert served.key.removeprefix("cl_") not in (keys / "api.json").read_text()


def test_probes_need_no_key_and_tell_something(served):
    with httpx.Client(base_url=served.url, trust_env=False) as stranger:
        assert stranger.get("/healthz").json()["status"] == "ok"
        assert stranger.get("/readyz").status_code == 200


def test_a_rate_is_held_and_told(tmp_path):
    made = conftest.serve(tmp_path, settings="[server]\nrequests_per_s = 2\n")
    try:
        with made.client() as client:
            answers = [client.get("/v1/sandboxes") for _ in range(4)]
        refused(answers[-1], "rate_exceeded")
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert answers[0].status_code == 200
    finally:
        assert conftest.stop(made) == 0


def test_the_document_describes_every_route(http):
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described = {(m.upper(), p) for p, methods in document["paths"].items() for m in methods}
    from cloche.server.http.routes import TABLE

    assert described == {(o.method, o.path) for o in TABLE.operations.values()}
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert "default" in operation["responses"]


def test_what_the_server_accepts_is_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY on sockets that name their protocol, and no others."""
    listener = serving.listen("127.0.0.1", 0)
    try:
        assert listener.proto == socket.IPPROTO_TCP
    finally:
        listener.close()


def test_past_its_soft_limit_a_command_goes_on_and_what_it_wrote_is_told(http, box):
    body = {"command": "echo so far; read line; echo $line", "open_stdin": True, "background_after_s": 3}
    told = http.post(f"/v1/sandboxes/{box}/exec", json=body).json()
    assert (told["exit_code"], told["stdout"], told["process"]) == (None, "so far\n", told["execution"])
    execution = f"/v1/sandboxes/{box}/executions/{told['process']}"
    http.post(f"{execution}/stdin", json={"data": "more\n", "end": True})
    assert http.get(f"{execution}/result").json()["stdout"] == "so far\nmore\n"


def test_a_command_goes_on_without_who_asked_for_it(http, box, until):
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            f"/v1/sandboxes/{box}/exec",
            json={"command": "sleep 3; echo done > here"},
            timeout=httpx.Timeout(30, read=1),
        )
    until(lambda: http.get(f"/v1/sandboxes/{box}/files", params={"path": "here"}).status_code == 200)
