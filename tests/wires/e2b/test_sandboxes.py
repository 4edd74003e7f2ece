"""Sandboxes through E2B's SDK; what became of them through our own API."""

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import Client

pytestmark = pytest.mark.timeout(900)


def info(http: httpx.Client, sandbox: str) -> dict:
    return http.get(f"/v1/sandboxes/{sandbox}").raise_for_status().json()


def test_create_list_info_and_kill(program: Client, http: httpx.Client) -> None:
    made = program("""
        box = Sandbox.create(timeout=600, metadata={"purpose": "test of create"}, envs={"GREETING": "hello"})
        answer = box.sandbox_id
    """)
    ours = info(http, made)
    assert ours["labels"] == {"purpose": "test of create"}
    assert ours["isolation"]["network"] == "open"
    assert 500 < ours["expires_at"] - ours["created_at"] <= 601
    assert (
        http.post(f"/v1/sandboxes/{made}/exec", json={"command": "echo $GREETING"}).json()["stdout"]
        == "hello\n"
    )

    told = program("i = box.get_info(); answer = [i.sandbox_id, i.state.value, i.metadata, i.memory_mb]")
    assert told == [made, "running", {"purpose": "test of create"}, 512]
    query = "answer = [s.sandbox_id for s in Sandbox.list(query=e2b.SandboxQuery(metadata={%r: %r})).next_items()]"
    assert program(query % ("purpose", "test of create")) == [made]
    assert program(query % ("purpose", "another")) == []
    assert program("answer = box.is_running()") is True

    assert program("answer = box.kill()") is True
    assert http.get(f"/v1/sandboxes/{made}").status_code in (404, 410)
    assert program("answer = box.kill()") is False


def test_pages_of_a_list(program: Client, box: str) -> None:
    program("more = [Sandbox.create(timeout=600, metadata={'pages': 'yes'}) for _ in range(3)]")
    try:
        found = program(
            """
            pages, pager = [], Sandbox.list(query=e2b.SandboxQuery(metadata={"pages": "yes"}), limit=2)
            while pager.has_next:
                pages.append([s.sandbox_id for s in pager.next_items()])
            answer = [pages, [b.sandbox_id for b in more]]
        """.replace("pages, pager", "from e2b import SandboxQuery\n            pages, pager")
        )
        assert [len(page) for page in found[0]] == [2, 1]
        assert sorted(found[0][0] + found[0][1]) == sorted(found[1])
    finally:
        program("for b in more: b.kill()")


def test_timeout_can_be_longer_and_shorter(program: Client, box: str, http: httpx.Client) -> None:
    program("box.set_timeout(3000)")
    long = info(http, box)["expires_at"]
    program("box.set_timeout(900)")
    short = info(http, box)["expires_at"]
    assert long - short > 2000
    program("Sandbox.connect(box.sandbox_id, timeout=60)")
    assert info(http, box)["expires_at"] == pytest.approx(short, abs=1)  # connecting never shortens


def test_pause_keeps_memory_and_connect_brings_it_back(program: Client, box: str, http: httpx.Client) -> None:
    program("box.run_code('kept = 42')\nbox.pause()")
    paused = info(http, box)
    assert paused["phase"] == "paused"
    assert paused["expires_at"] is None
    assert program("answer = box.is_running()") is False
    assert program("answer = box.get_info().state.value") == "paused"
    assert program("answer = box.pause()") is False
    assert info(http, box)["phase"] == "paused"  # looking woke nothing
    assert program("box.connect(timeout=600)\nanswer = box.run_code('kept').text") == "42"
    assert info(http, box)["phase"] == "running"
    assert info(http, box)["expires_at"] is not None


def test_traffic_wakes_a_sandbox_that_asked_for_it(http: httpx.Client, served: server.Served) -> None:
    made = http.post("/v2/sandboxes", json={"templateID": "base", "autoResume": {"enabled": True}}).json()
    sandbox = made["sandboxID"]
    assert http.post(f"/sandboxes/{sandbox}/pause").status_code == 204
    assert http.get(f"/sandboxes/{sandbox}").json()["metadata"] == {}
    headers = {"E2b-Sandbox-Id": sandbox, "X-Access-Token": made["envdAccessToken"]}
    body = {"path": "/home/user"}
    answer = httpx.post(
        f"{served.url}/filesystem.Filesystem/Stat", json=body, headers=headers, trust_env=False, timeout=50
    )
    assert answer.status_code == 200, answer.text
    assert info(http, sandbox)["phase"] == "running"
    assert http.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_snapshot_and_what_starts_from_it(program: Client, box: str, http: httpx.Client) -> None:
    program("box.files.write('seed.txt', 'from the snapshot')")
    snapshot = program("snap = box.create_snapshot(); answer = snap.snapshot_id")
    assert http.get(f"/v1/snapshots/{snapshot}").json()["sandbox"] == box
    assert snapshot in program("answer = [s.snapshot_id for s in Sandbox.list_snapshots().next_items()]")
    copy = program("copy = Sandbox.create(template=snap.snapshot_id, timeout=600)\nanswer = copy.sandbox_id")
    there = http.get(f"/v1/sandboxes/{copy}/files", params={"path": "/home/user/seed.txt"})
    assert there.text == "from the snapshot"
    program("copy.kill()")
    assert program("answer = Sandbox.delete_snapshot(snap.snapshot_id)") is True
    assert http.get(f"/v1/snapshots/{snapshot}").status_code == 404
    assert program("answer = Sandbox.delete_snapshot(snap.snapshot_id)") is False


def test_forks_have_the_files_and_lives_of_their_own(program: Client, box: str, http: httpx.Client) -> None:
    program("box.files.write('seed.txt', 'before')")
    forks = program("forks = box.fork(count=2); answer = [f.sandbox_id for f in forks]")
    program("forks[0].files.write('seed.txt', 'after')")
    seeds = [
        http.get(f"/v1/sandboxes/{one}/files", params={"path": "/home/user/seed.txt"}).text
        for one in (box, *forks)
    ]
    assert seeds == ["before", "after", "before"]
    program("for f in forks: f.kill()")


def test_metrics_are_measured(program: Client, box: str) -> None:
    program("box.files.write('big', b'x' * 3_000_000)")
    found = program(
        "m = box.get_metrics()[0]; answer = [m.disk_used, m.disk_total, m.mem_used, m.mem_total, m.cpu_count]"
    )
    assert 3_000_000 <= found[0] < found[1]
    assert 0 < found[2] <= found[3] == 512 << 20
    assert found[4] == 1


def test_network_rules_are_replaced_as_a_whole(program: Client, box: str, http: httpx.Client) -> None:
    def rules() -> dict:
        return http.get(f"/v1/sandboxes/{box}/policy").json()["network"]

    assert rules()["mode"] == "open"
    program("box.update_network({'allow_out': ['pypi.org', '*.example.org'], 'deny_out': ['0.0.0.0/0']})")
    assert (rules()["mode"], sorted(rules()["allow"])) == ("rules", ["*.example.org", "pypi.org"])
    program("box.update_network({'deny_out': ['0.0.0.0/0']})")
    assert rules()["mode"] == "off"
    program("box.update_network({})")
    assert (rules()["mode"], rules()["deny"]) == ("open", [])


def test_no_internet_access_means_none(program: Client, http: httpx.Client) -> None:
    made = program(
        "shut = Sandbox.create(timeout=600, allow_internet_access=False); answer = shut.sandbox_id"
    )
    assert info(http, made)["isolation"]["network"] == "off"
    program("shut.kill()")


def test_a_repeated_create_is_the_same_sandbox(http: httpx.Client) -> None:
    def create(word: str, **more: object) -> httpx.Response:
        return http.post(
            "/v2/sandboxes", json={"templateID": "base", **more}, headers={"Idempotency-Key": word}
        )

    first = create("e2b-once")
    assert create("e2b-once", timeout=77).status_code == 409
    again, other = create("e2b-once"), create("e2b-twice")
    assert first.status_code == again.status_code == other.status_code == 201
    assert first.json() == again.json()
    assert other.json()["sandboxID"] != first.json()["sandboxID"]
    for made in (first, other):
        assert http.delete(f"/sandboxes/{made.json()['sandboxID']}").status_code == 204


def test_a_query_that_means_nothing_is_refused_and_one_that_does_is_obeyed(
    http: httpx.Client, box: str
) -> None:
    for query in ({"limit": "many"}, {"nextToken": "x"}, {"startedAfter": "yesterday"}):
        assert http.get("/v2/sandboxes", params=query).status_code == 400

    def after(moment: str) -> list[str]:
        found = http.get("/v2/sandboxes", params={"startedAfter": moment}).raise_for_status().json()
        return [one["sandboxID"] for one in found]

    assert box in after("2020-01-01T00:00:00Z")
    assert box not in after("2999-01-01T00:00:00Z")


def test_pages_of_snapshots(program: Client, box: str) -> None:
    made = program("made = [box.create_snapshot().snapshot_id for _ in range(3)]; answer = made")
    pages = program("""
        pages, pager = [], Sandbox.list_snapshots(sandbox_id=box.sandbox_id, limit=2)
        while pager.has_next:
            pages.append([s.snapshot_id for s in pager.next_items()])
        for one in made:
            Sandbox.delete_snapshot(one)
        answer = pages
    """)
    assert [len(page) for page in pages] == [2, 1]
    assert sorted(pages[0] + pages[1]) == sorted(made)


def test_rules_are_enforced(program: Client, box: str, http: httpx.Client) -> None:
    def denied(host: str) -> list[str]:
        line = f"python3 -c 'import urllib.request; urllib.request.urlopen(\"http://{host}/\", timeout=20)'"
        ran = http.post(f"/v1/sandboxes/{box}/exec", json={"command": line}).raise_for_status().json()
        return [denial["target"] for denial in ran["denials"] if denial["kind"] == "network"]

    rules = (
        "box.update_network({'allow_out': ['allowed.test', '198.51.100.0/24'], 'deny_out': ['0.0.0.0/0']})"
    )
    program(rules)
    assert any("refused.test" in target for target in denied("refused.test"))
    assert any("203.0.113.9" in target for target in denied("203.0.113.9"))
    assert not any(
        "allowed.test" in target for target in denied("allowed.test")
    )  # not there, which is no denial


def test_logs_are_the_journal_and_are_filtered_as_asked(
    program: Client, box: str, http: httpx.Client
) -> None:
    for query in ({"level": "loud"}, {"limit": "many"}, {"direction": "up"}):
        assert http.get(f"/v2/sandboxes/{box}/logs", params=query).status_code == 400
    assert http.get(f"/sandboxes/{'a' * 20}/logs").status_code == 404
    program("box.commands.run('echo logged-by-a-test')")
    old = http.get(f"/sandboxes/{box}/logs").raise_for_status().json()
    assert len(old["logs"]) == len(old["logEntries"]) > 0
    assert any("logged-by-a-test" in entry["message"] for entry in old["logEntries"])

    def new(**query: str) -> list[dict]:
        return http.get(f"/v2/sandboxes/{box}/logs", params=query).raise_for_status().json()["logs"]

    assert [entry["timestamp"] for entry in new(direction="backward")] == sorted(
        (entry["timestamp"] for entry in new()), reverse=True
    )
    assert all("logged-by-a-test" in entry["message"] for entry in new(search="logged-by-a-test"))
    assert len(new(limit="1")) == 1
    assert new(cursor="9999999999999") == []
    assert new(level="error") == []


def test_templates_are_read(http: httpx.Client) -> None:
    assert http.get("/templates/no-such").status_code == 404
    assert http.get("/templates/aliases/no-such").status_code == 404
    ours = [one["spec"]["name"] for one in http.get("/v1/templates").json()["templates"]]
    for path in ("/templates", "/v2/templates"):
        shown = http.get(path).raise_for_status().json()
        assert sorted(one["templateID"] for one in shown) == sorted(ours)
    one = http.get("/templates/base").raise_for_status().json()
    assert one["builds"][0]["buildID"] == one["buildID"]
    assert "code-interpreter-v1" in one["aliases"]
    assert http.get("/templates/aliases/code-interpreter-v1").json() == {"templateID": "base", "public": True}


def test_the_network_is_told_as_it_was_said(program: Client, http: httpx.Client) -> None:
    made = http.post(
        "/v2/sandboxes",
        json={"templateID": "base", "network": {"allowOut": ["8.8.8.8"], "denyOut": ["8.8.0.0/16"]}},
    ).json()["sandboxID"]
    told = http.get(f"/sandboxes/{made}").json()
    assert told["network"] == {"allowPublicTraffic": True, "allowOut": ["8.8.8.8"], "denyOut": ["8.8.0.0/16"]}
    assert http.put(f"/sandboxes/{made}/network", json={"denyOut": ["0.0.0.0/0"]}).status_code == 204
    assert http.get(f"/sandboxes/{made}").json()["network"]["denyOut"] == ["0.0.0.0/0"]
    assert http.delete(f"/sandboxes/{made}").status_code == 204


def test_metrics_of_a_time(http: httpx.Client, box: str) -> None:
    assert http.get(f"/sandboxes/{box}/metrics", params={"start": "soon"}).status_code == 400
    [first] = http.get(f"/sandboxes/{box}/metrics").json()
    assert http.get(f"/sandboxes/{box}/metrics", params={"end": first["timestampUnix"] - 10}).json() == []
    assert len(http.get(f"/sandboxes/{box}/metrics", params={"start": first["timestampUnix"]}).json()) >= 2
    many = http.get("/sandboxes/metrics", params={"sandbox_ids": f"{box},{'a' * 20}"}).json()["sandboxes"]
    assert list(many) == [box]


def test_a_state_that_is_none_is_refused(http: httpx.Client) -> None:
    assert http.get("/v2/sandboxes", params={"state": "asleep"}).status_code == 400
    assert http.get("/v2/sandboxes", params={"order": "random"}).status_code == 400


def test_a_pool_of_the_template_serves_what_clients_make(program: Client, http: httpx.Client, until) -> None:
    http.put("/v1/pools/base", json={"template": "base", "size": 2}).raise_for_status()
    try:
        until(lambda: http.get("/v1/pools/base").json()["ready"] == 2)
        members = http.get("/v1/pools/base").json()["members"]
        made = program("""
            own = Sandbox.create(timeout=700, metadata={"pooled": "yes"}, envs={"A": "bound late"},
                                 network={"allow_out": ["a.test"], "deny_out": ["0.0.0.0/0"]})
            answer = [own.sandbox_id, own.commands.run("echo $A").stdout]
        """)
        assert made[0] in members
        assert made[1] == "bound late\n"
        ours = info(http, made[0])
        assert ours["labels"] == {"pooled": "yes"}
        assert 600 < ours["expires_at"] - ours["created_at"] <= 701
        assert http.get(f"/v1/sandboxes/{made[0]}/policy").json()["network"]["allow"] == ["a.test"]
        program("own.kill()")
        assert http.get("/v1/pools/base").json()["hits"] == 1
    finally:
        assert http.delete("/v1/pools/base").status_code == 204


def test_who_is_paused_by_its_time_never_lives_without_end(program: Client, http: httpx.Client) -> None:
    made = program("""
        own = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause"})
        own.pause(); answer = own.sandbox_id
    """)
    assert info(http, made)["phase"] == "paused"
    woken = http.post(f"/v1/sandboxes/{made}/exec", json={"command": "echo up"}).raise_for_status().json()
    assert woken["stdout"] == "up\n"  # our own API wakes what it touches
    assert info(http, made)["expires_at"] is not None
    program("own.kill()")
