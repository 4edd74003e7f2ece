"""What E2B's clients are refused, and that each reason is told apart."""

import tempfile
from pathlib import Path

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b import table
from tests.wires.e2b.conftest import Client, Raised, client_of

pytestmark = pytest.mark.timeout(900)  # the first one makes the clients' environment
NOBODY = "a" * 20


def refused(program: Client, source: str) -> Raised:
    with pytest.raises(Raised) as caught:
        program(source)
    return caught.value


def alive(http: httpx.Client) -> list[str]:
    return [one["id"] for one in http.get("/v1/sandboxes").raise_for_status().json()["sandboxes"]]


def test_a_wrong_key_makes_nothing(served: server.Served, http: httpx.Client) -> None:
    before = alive(http)
    stranger = client_of("newest", served, "cl_" + "0" * 40)
    try:
        stranger("from e2b import Sandbox")
        assert refused(stranger, "Sandbox.create()").name == "AuthenticationException"
        assert refused(stranger, "Sandbox.list().next_items()").name == "AuthenticationException"
    finally:
        stranger.close()
    assert alive(http) == before


def test_a_sandbox_that_never_was(program: Client) -> None:
    assert refused(program, f"Sandbox.connect({NOBODY!r})").name in (
        "NotFoundException",
        "SandboxNotFoundException",
    )
    assert program(f"answer = Sandbox.kill({NOBODY!r})") is False
    problem = refused(program, f"Sandbox.get_info({NOBODY!r})")
    assert problem.name in ("NotFoundException", "SandboxNotFoundException")
    assert NOBODY in problem.words


def test_a_dead_sandbox_a_slow_command_and_a_missing_file_are_three_errors(
    program: Client, box: str, http: httpx.Client
) -> None:
    slow = refused(program, "box.commands.run('sleep 300', timeout=1)")
    lost = refused(program, "box.files.read('nothing-here')")
    http.delete(f"/v1/sandboxes/{box}").raise_for_status()
    dead = refused(program, "box.commands.run('true')")
    dead_file = refused(program, "box.files.read('a')")
    assert slow.name == "TimeoutException"
    assert lost.name == "FileNotFoundException"
    assert dead.name == dead_file.name == "SandboxNotRunningException"
    assert program("answer = box.is_running()") is False


def test_a_sandbox_that_ends_under_a_command(program: Client, box: str, http: httpx.Client) -> None:
    program("h = box.commands.run('sleep 302', background=True)")
    http.delete(f"/v1/sandboxes/{box}").raise_for_status()
    assert refused(program, "h.wait()").name == "SandboxNotRunningException"


def test_a_slow_command_is_killed(program: Client, box: str, http: httpx.Client, until) -> None:
    refused(program, "box.commands.run('sleep 301', timeout=1)")
    until(
        lambda: (
            not [e for e in http.get(f"/v1/sandboxes/{box}/executions").json()["executions"] if e["running"]]
        )
    )


def test_a_token_opens_its_own_sandbox_only(
    program: Client, box: str, served: server.Served, http: httpx.Client
) -> None:
    token = program("other = Sandbox.create(timeout=600)\nanswer = other._envd_access_token")
    try:
        for shown, status in (("0" * 64, 401), (token, 401)):
            answer = data_plane(served, box, 49983, "GET", "/files?path=a", {"X-Access-Token": shown})
            assert answer.status_code == status, answer.text
        assert data_plane(served, box, 49983, "GET", "/health").status_code == 401
        recorded = http.get("/v1/events", params={"limit": 1000}).json()["events"]
        assert any("not this sandbox's" in str(event) for event in recorded)
        assert data_plane(served, box, 49999, "GET", "/contexts").status_code == 401
    finally:
        program("other.kill()")


def test_the_traffic_token_does_not_open_files(program: Client, box: str, served: server.Served) -> None:
    token = program("answer = box.traffic_access_token")
    for header in ("X-Access-Token", "E2B-Traffic-Access-Token"):
        assert data_plane(served, box, 49983, "GET", "/files?path=a", {header: token}).status_code == 401
    assert (
        data_plane(served, box, 49999, "GET", "/contexts", {"E2B-Traffic-Access-Token": token}).status_code
        == 200
    )


def test_the_tokens_of_a_revoked_key_open_nothing(served: server.Served) -> None:
    key = served.cloche("key", "create", "e2b-short", "--role", "runner").stdout.split()
    secret = next(word for word in key if word.startswith("cl_"))
    visitor = client_of("newest", served, secret)
    try:
        visitor("from e2b import Sandbox\nbox = Sandbox.create(timeout=600)\nbox.commands.run('true')")
        assert served.cloche("key", "revoke", "e2b-short").returncode == 0
        assert refused(visitor, "box.commands.run('true')").name == "AuthenticationException"
        assert refused(visitor, "box.files.read('a')").name == "AuthenticationException"
    finally:
        sandbox = visitor("answer = box.sandbox_id")
        visitor.close()
        with served.client() as http:
            http.delete(f"/v1/sandboxes/{sandbox}").raise_for_status()


def test_a_key_that_may_not_run_commands_gets_none_run(served: server.Served, http: httpx.Client) -> None:
    told = served.cloche("key", "create", "e2b-maker", "--scope", "sandboxes").stdout.split()
    visitor = client_of("newest", served, next(word for word in told if word.startswith("cl_")))
    try:
        visitor("from e2b import Sandbox\nbox = Sandbox.create(timeout=600)")
        problem = refused(visitor, "box.commands.run('touch /home/user/done')")
        assert "exec" in problem.words
        assert "scope" in problem.words
        listed = http.get(
            f"/v1/sandboxes/{visitor('answer = box.sandbox_id')}/files/list", params={"path": "/home/user"}
        ).json()
        assert "done" not in [entry["name"] for entry in listed["files"]]
        visitor("box.kill()")
    finally:
        visitor.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "word"),
    [
        ("POST", "/v3/templates", {"name": "x"}, "template builds"),
        ("GET", "/volumes", None, "volumes"),
        ("GET", "/secrets", None, "secrets"),
        ("POST", "/templates/tags", {"target": "base", "tags": ["a"]}, "template tags"),
        ("POST", "/sandboxes", {"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ("POST", "/sandboxes", {"templateID": "base", "mcp": {"a": {}}}, "mcp"),
        ("POST", "/v2/sandboxes", {"templateID": "base", "network": {"egressProxy": {"address": "x"}}}, "egressProxy"),
        ("POST", "/v2/sandboxes", {"templateID": "base", "network": {"rules": {"a.test": [{}]}}}, "network.rules"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_has_a_name(
    http: httpx.Client, method: str, path: str, body: object, word: str
) -> None:
    before = alive(http)
    answer = http.request(method, path, json=body)
    assert answer.status_code == 501, answer.text
    assert word in answer.json()["message"]
    assert alive(http) == before


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "templateID"),
        ({"templateID": "base", "surprise": 1}, "surprise"),
        ({"templateID": "base", "timeout": "long"}, "timeout"),
        ({"templateID": "base", "metadata": {"e2b.auto-resume": "yes"}}, "e2b."),
        (
            {
                "templateID": "base",
                "autoPause": True,
                "autoPauseMemory": False,
                "autoResume": {"enabled": True},
            },
            "autoResume",
        ),
        ({"templateID": "base", "timeout": -5}, "timeout"),
        ({"templateID": "base", "network": {"allowOut": ["example.org"]}}, "0.0.0.0/0"),
        ({"templateID": "base", "network": {"denyOut": ["example.org"]}}, "denyOut"),
    ],
)
def test_a_create_that_cannot_be_is_said_to_be(http: httpx.Client, body: object, word: str) -> None:
    answer = http.post("/v2/sandboxes", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == 400
    assert word in answer.json()["message"]


@pytest.mark.parametrize("case", table.REFUSED, ids=[case.call for case in table.REFUSED])
def test_a_call_that_is_not_honoured_does_nothing(
    case: table.Refused, program: Client, box: str, http: httpx.Client
) -> None:
    before = alive(http)
    problem = refused(program, case.source)
    assert case.words in problem.words, problem
    assert alive(http) == before


@pytest.mark.parametrize("act", ["connect", "resume", "timeout", "refreshes", "pause", "fork", "snapshots"])
def test_fields_that_nobody_knows_change_nothing(act: str, box: str, http: httpx.Client) -> None:
    before = alive(http), http.get(f"/v1/sandboxes/{box}").json()["phase"]
    answer = http.post(
        f"/sandboxes/{box}/{act}", json={"timeout": 900, "count": 1, "duration": 9, "surprise": 1}
    )
    assert answer.status_code == 400, answer.text
    assert (alive(http), http.get(f"/v1/sandboxes/{box}").json()["phase"]) == before


def test_a_sandbox_that_is_resumed_keeps_what_its_time_does(box: str, http: httpx.Client) -> None:
    assert http.post(f"/sandboxes/{box}/resume", json={}).status_code == 409
    assert http.post(f"/sandboxes/{box}/pause", json={"requireHealthyGuest": True}).status_code == 204
    assert http.post(f"/sandboxes/{box}/resume", json={"autoPause": True}).status_code == 501
    assert http.get(f"/v1/sandboxes/{box}").json()["phase"] == "paused"
    resumed = http.post(f"/sandboxes/{box}/resume", json={"timeout": 600, "autoPause": False})
    assert (resumed.status_code, resumed.json()["sandboxID"]) == (201, box)


def test_an_unknown_template(program: Client) -> None:
    assert "no-such-template" in refused(program, "Sandbox.create(template='no-such-template')").words


def test_a_signed_address_is_for_one_file_and_one_act(
    program: Client, box: str, served: server.Served
) -> None:
    program("box.files.write('mine.txt', 'x'); box.files.write('other.txt', 'y')")
    url = program("answer = box.download_url('mine.txt', use_signature_expiration=600)")
    with httpx.Client(trust_env=False, timeout=50) as anybody:
        assert anybody.get(url).text == "x"
        assert anybody.get(url.replace("mine.txt", "other.txt")).status_code == 401
        assert anybody.post(url, content=b"z").status_code == 401
        assert anybody.get(url.replace("signature_expiration=", "signature_expiration=9")).status_code == 401
        over = program("answer = box.download_url('mine.txt', use_signature_expiration=-5)")
        assert anybody.get(over).status_code == 401


def test_a_closed_port_is_neither_a_dead_sandbox_nor_an_open_one(
    program: Client, box: str, served: server.Served, http: httpx.Client
) -> None:
    token = {"E2B-Traffic-Access-Token": program("answer = box.traffic_access_token")}
    assert data_plane(served, box, 0, "GET", "/", token).status_code == 502
    closed = data_plane(served, box, 8123, "GET", "/", token)
    assert (closed.status_code, closed.json()["sandboxId"]) == (502, box)
    assert "port is not open" in closed.json()["message"]
    program("""
        h = box.commands.run("python3 -u -m http.server 8123 --bind 127.0.0.1", background=True)
        next(iter(h))
    """)
    opened = data_plane(served, box, 8123, "GET", "/", token)
    assert opened.status_code == 200, opened.text
    assert "Directory listing" in opened.text
    http.delete(f"/v1/sandboxes/{box}").raise_for_status()
    dead = data_plane(served, box, 8123, "GET", "/", token)
    assert dead.status_code == 502
    assert "was not found" in dead.json()["message"]


def test_another_tenants_sandbox_is_not_found(
    program: Client, box: str, served: server.Served, http: httpx.Client
) -> None:
    told = served.cloche("key", "create", "e2b-blue", "--role", "runner", "--tenant", "blue").stdout.split()
    visitor = client_of("newest", served, next(word for word in told if word.startswith("cl_")))
    try:
        visitor("from e2b import Sandbox\nown = Sandbox.create(timeout=600)")
        assert visitor("answer = [s.sandbox_id == own.sandbox_id for s in Sandbox.list().next_items()]") == [
            True
        ]
        problem = refused(visitor, f"Sandbox.connect({box!r})")
        never = refused(visitor, f"Sandbox.connect({NOBODY!r})")
        assert problem.name == never.name
        assert problem.words.replace(box, "X") == never.words.replace(NOBODY, "X")
        assert visitor(f"answer = Sandbox.kill({box!r})") is False
        assert http.get(f"/v1/sandboxes/{box}").json()["phase"] == "running"
        assert visitor("answer = own.commands.run('echo mine').stdout") == "mine\n"
        visitor("own.kill()")
    finally:
        visitor.close()


def data_plane(
    served: server.Served,
    sandbox: str,
    port: int,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    routing = {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": str(port)}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=50) as client:
        return client.request(method, path, headers={**routing, **(headers or {})})


def test_who_asks_too_often_is_told_so_on_both_planes() -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        slow = server.serve(Path(home), settings="[server]\nrequests_per_s = 0.001\n")
        visitor = client_of("newest", slow)
        try:
            visitor("from e2b import Sandbox\nbox = Sandbox.create(timeout=600)")
            sources = (
                "for _ in range(50): Sandbox.list().next_items()", "box.commands.run('true')", "box.files.read('a')",
                "box.files.list('.')",
            )  # fmt: skip
            for source in sources:
                assert refused(visitor, source).name == "RateLimitException"
        finally:
            visitor.close()
            assert server.stop(slow) == 0


def test_a_full_disk(program: Client, http: httpx.Client) -> None:
    http.put("/v1/templates/tiny", json={"name": "tiny", "resources": {"disk_mib": 16}}).raise_for_status()
    try:
        program("own = Sandbox.create('tiny', timeout=600)")
        full = refused(program, "own.files.write('big', b'x' * (32 << 20))")
        assert full.name == "NotEnoughSpaceException"
        assert program("own.files.write('small', 'x'); answer = own.files.read('small')") == "x"
        program("own.kill()")
    finally:
        http.delete("/v1/templates/tiny").raise_for_status()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("InvalidArgumentException", "box.files.read('/tmp')"),
        ("InvalidArgumentException", "box.files.list('/etc/hosts')"),
        ("InvalidArgumentException", "box.files.make_dir('/etc/hosts')"),
        ("FileNotFoundException", "box.files.list('nowhere')"),
        ("FileNotFoundException", "box.files.get_info('nowhere')"),
        ("FileNotFoundException", "box.files.rename('nowhere', 'there')"),
        ("FileNotFoundException", "box.files.watch_dir('nowhere')"),
        ("NotFoundException", "box.commands.connect(99999)"),
        ("NotFoundException", "box.commands.send_stdin(99999, 'x')"),
        ("AuthenticationException", "box.files.read('a', user='mallory')"),
        ("SandboxException", "Sandbox.set_timeout('a' * 20, 100)"),
        ("SandboxNotFoundException", "Sandbox.get_info('a' * 20)"),
        ("SandboxNotFoundException", "Sandbox.connect('a' * 20)"),
        ("SandboxException", "Sandbox.create(timeout=-1)"),
    ],
)
def test_the_class_of_what_is_raised(program: Client, box: str, name: str, source: str) -> None:
    problem = refused(program, source)
    kinds = program(f"answer = [k.__name__ for k in getattr(e2b, {problem.name!r}, Exception).__mro__]")
    assert name in (problem.name, *kinds), problem
    assert problem.name == name or name == "SandboxException", problem
