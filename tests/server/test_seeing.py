"""What the server tells about itself: metrics, one line per request, and whose trace it was."""

import json
import os
import random
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloche import __version__, events
from cloche.server.http import clients, ledger
from cloche.server.http.meters import Meters
from tests.server import conftest
from tests.server.conftest import PATIENCE_S, Served
from tests.server.test_faults import dial, head, until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that writes JSON, and the file it writes to."""
    home = tmp_path_factory.mktemp("told")
    log = home / "log"
    with log.open("w") as file:
        made = conftest.serve(home, settings='[server]\nlog = "json"\n', stderr=file)
    yield made, log
    assert conftest.stop(made) == 0


def lines(log: Path, **wanted: object) -> list[dict]:
    """The lines about requests that say this; the last may be under way."""
    every = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
    return [
        line
        for line in every
        if line["message"] == "request" and all(line.get(k) == v for k, v in wanted.items())
    ]


def families(client: httpx.Client) -> dict:
    response = client.get("/metrics").raise_for_status()
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in families(http).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# ── metrics ────────────────────────────────────────────────────────────────────────────────────────


def test_labels_do_not_grow_with_what_strangers_send(served, http):
    """Ten thousand paths and programs, a hundred requests in one piece: not one of them becomes a label."""

    def labels() -> set:
        return {
            (s.name, tuple(s.labels.items())) for family in families(http).values() for s in family.samples
        }

    chance = random.Random(6)

    def word() -> str:
        return "".join(chance.choices(string.ascii_lowercase + string.digits, k=12))

    def batch() -> bytes:
        shapes = (
            f"/v1/sandboxes/{word()}",
            f"/{word()}/{word()}",
            f"/v1/sandboxes/{word()}/nothing?{word()}",
            f"/{word()}",
        )
        return b"".join(
            head(
                served, chance.choice(["GET", "DELETE", "PUT"]), shapes[number % 4], User_Agent=f"{word()}/{number}.{number}",
                **({"e2b_sandbox_id": word()} if number % 4 == 3 else {}),
            )
            for number in range(100)
        )  # fmt: skip

    families(http)  # which is a request itself
    seen = None
    with dial(served) as sock:
        for number in range(100):
            sock.sendall(batch())
            heard = 0
            while heard < 100:
                part = sock.recv(1 << 20)
                assert part
                heard += part.count(b"HTTP/1.1 ")
            if number == 20:
                seen = labels()
    assert labels() == seen


def test_ten_thousand_operations_and_agents_have_few_labels():
    meters = Meters()
    agents = random.Random(7)
    for number in range(10_000):
        name = agents.choice([*clients.KNOWN, "made-up", "x" * 30])
        agent = f"{name}/{agents.randrange(1000)}.{agents.randrange(1000)}.{number}".encode()
        entry = ledger.Entry("id", clients.of(agent))
        entry.status = 200
        entry.name_for(f"e2b GET /{agents.getrandbits(64)}")
        meters.observe(entry, 0.001)
    assert len(meters._clients) <= 200 + len(clients.KNOWN)
    assert set(meters._answers) == {("e2b", 200)}
    assert sum(meters._clients.values()) == 10_000


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("", ("other", "other")),
        ("Nobody/1.0", ("other", "other")),
        ("cloche-python/0.1.0", ("cloche-python", "0.1")),
        ("cloche-typescript/1.22.333 node/20", ("cloche-typescript", "1.22")),
        ("curl/8.5.0", ("curl", "8.5")),
        ("curl/99999999.1", ("curl", "other")),
        ("python-httpx/0.28", ("python-httpx", "0.28")),
        ('curl"} 1\nevil 1', ("curl", "other")),
        ("e2b-python-sdk/2.31.0", ("e2b-python-sdk", "2.31")),
        ("node", ("node", "other")),
    ],
)
def test_a_client_is_a_known_name_and_two_numbers(agent, told):
    assert clients.of(agent.encode()) == told


def test_the_whole_page_is_what_prometheus_reads_and_the_reference_lists_it(http):
    """Both ways: what is published is described, and what is described is published."""
    http.post("/run", json={"command": "true"})
    found = families(http)
    published = {family.name + ("_total" if family.type == "counter" else "") for family in found.values()}
    described = set(re.findall(r"^### `(\w+)`", REFERENCE.read_text(), re.M))
    assert published == described
    for family in found.values():
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
            assert bounds[:1] == ["0.001"] or not bounds
            assert "+Inf" in bounds or not bounds


def test_commands_are_counted_by_how_they_ended(http):
    names = {"ok": "true", "failed": "exit 3", "signalled": "kill -9 $$", "timed_out": "sleep 60"}
    before = {outcome: value(http, "cloche_executions_total", outcome=outcome) for outcome in names}
    for outcome, command in names.items():
        limit = {"timeout_s": 0.2} if outcome == "timed_out" else {}
        http.post("/run", json={"command": command, **limit}).raise_for_status()
    for outcome, count in before.items():
        assert value(http, "cloche_executions_total", outcome=outcome) == count + 1


def test_what_runs_is_counted_and_what_is_lost_too(http):
    running = value(http, "cloche_executions_running")
    lost = value(http, "cloche_executions_total", outcome="lost")
    made = http.post("/v1/sandboxes", json={}).json()["id"]
    http.post(f"/v1/sandboxes/{made}/executions", json={"command": "sleep 1000"})
    assert value(http, "cloche_executions_running") == running + 1
    http.delete(f"/v1/sandboxes/{made}")
    assert value(http, "cloche_executions_running") == running
    assert value(http, "cloche_executions_total", outcome="lost") == lost + 1


def test_creations_claims_and_first_instructions_are_timed(http):
    names = (
        "cloche_create_seconds_count",
        "cloche_claim_seconds_count",
        "cloche_first_instruction_seconds_count",
        "cloche_first_output_seconds_count",
    )
    before = [value(http, name) for name in names]
    made = http.post("/v1/sandboxes", json={}).json()["id"]
    claim = http.post("/v1/claims", json={"pool": "base"}).json()
    for sandbox in (made, claim["sandbox"]):
        for _ in range(2):  # the second command of a sandbox is not its first
            http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": "echo a"}).raise_for_status()
    assert [value(http, name) - old for name, old in zip(names, before, strict=True)] == [1, 1, 2, 4]
    http.delete(f"/v1/sandboxes/{made}")
    http.delete(f"/v1/claims/{claim['name']}")


def test_connections_out_are_counted_by_what_was_decided(http):
    denied = value(http, "cloche_egress_connections_total", verdict="deny")
    denials = value(http, "cloche_denials_total", kind="network")
    rules = {"network": {"mode": "rules", "allow": ["allowed.example"]}}
    body = {"command": "curl -s --max-time 20 http://denied.example/", "sandbox": {"policy": rules}}
    http.post("/run", json=body).raise_for_status()
    until(lambda: value(http, "cloche_egress_connections_total", verdict="deny") > denied)
    until(lambda: value(http, "cloche_denials_total", kind="network") > denials)


def test_clients_of_ours_say_who_they_are(served, http):
    version = ".".join(__version__.split(".")[:2])
    python = value(http, "cloche_clients_total", client="cloche-python", version=version)
    cli = value(http, "cloche_clients_total", client="cloche-cli", version=version)
    environment = {**os.environ, **served.environment, "CLOCHE_URL": served.url, "CLOCHE_API_KEY": served.key}
    ran = subprocess.run(
        conftest.argv("run", "--", "echo", "far"), capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )  # fmt: skip
    assert ran.stdout == "far\n", ran.stderr
    # A process of its own: this one would keep the connection, and its pings draw from the `random` that Hypothesis watches.
    program = "from cloche import Sandbox\nwith Sandbox() as box: print(box.exec('echo here').stdout)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )
    assert ran.stdout == "here\n\n", ran.stderr
    assert value(http, "cloche_clients_total", client="cloche-python", version=version) > python
    assert value(http, "cloche_clients_total", client="cloche-cli", version=version) > cli
    assert value(http, "cloche_calls_total", wire="websocket", operation="exec", outcome="ok") >= 1


def test_calls_on_the_socket_are_counted(served, http):
    before = value(http, "cloche_calls_total", wire="socket", operation="info", outcome="sandbox_not_found")
    assert served.cloche("info", "nobody").returncode == 125
    assert (
        value(http, "cloche_calls_total", wire="socket", operation="info", outcome="sandbox_not_found")
        == before + 1
    )


# ── lines ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_request_is_a_line_without_secrets(told):
    served, log = told
    secret = "cl_" + "5ec7e7" * 7
    with served.client() as client:
        client.get(
            "/v1/sandboxes/nobody/files",
            params={"path": "a", "token": secret},
            headers={"X-Request-ID": "mine-7"},
        )
        client.get(f"/preview/{secret}/x", headers={"X-Request-ID": "mine-8", "Cookie": secret})
        client.post("/run", json={"command": f"echo {secret}"}, headers={"X-Request-ID": "mine-9"})
        client.get("/v1/sandboxes", headers={"Authorization": f"Bearer {secret}", "X-Request-ID": "mine-10"})
    until(lambda: all(lines(log, request_id=f"mine-{number}") for number in (7, 8, 9, 10)))
    text = log.read_text()
    assert secret not in text
    assert served.key not in text
    (line,) = lines(log, request_id="mine-7")
    assert (line["operation"], line["status"], line["sandbox"], line["key"]) == (
        "read_file",
        400,
        "nobody",
        "default",
    )
    assert line["client"].startswith("python-httpx ")
    assert line["ms"] > 0
    assert "path" not in line
    (line,) = lines(log, request_id="mine-8")
    assert (line["operation"], line["path"], line["status"]) == ("unknown", "/preview/…/x", 404)
    (line,) = lines(log, request_id="mine-9")
    assert (line["operation"], line["status"]) == ("run", 200)
    (line,) = lines(log, request_id="mine-10")
    assert (line["status"], line["key"]) == (401, "-")


@pytest.mark.parametrize(
    "path",
    ["/a%0a%7b%22message%22:%22request%22%7d", "/%1b[31mred", "/%e2%80%a8", "/" + "a%20" * 300],
    ids=repr,
)
def test_no_request_can_write_a_line_of_its_own(told, path):
    served, log = told
    before = len(log.read_text().splitlines())
    with served.client() as client:
        client.get(path, headers={"X-Request-ID": "bad\tid"})
        client.get("/healthz", headers={"X-Request-ID": "after"})
    until(lambda: len(log.read_text().splitlines()) >= before + 2)
    fresh = log.read_text().splitlines()[before:]
    assert len(fresh) == 2
    for line in fresh:
        assert json.loads(line)["message"] == "request"
        assert len(line) < 1000
        assert "\x1b" not in line


def test_other_faces_have_lines_and_ids_too(told):
    served, log = told
    with served.client() as client:
        answer = client.get("/sandboxes/nobody", headers={"X-Request-ID": "e2b-1"})
        assert answer.headers["x-request-id"] == "e2b-1"
        answer = client.post("/mcp", json={}, headers={"X-Request-ID": "mcp-1"})
        assert answer.headers["x-request-id"] == "mcp-1"
    until(lambda: lines(log, request_id="e2b-1") and lines(log, request_id="mcp-1"))
    assert lines(log, request_id="e2b-1")[0]["operation"].startswith("e2b")
    assert lines(log, request_id="mcp-1")[0]["operation"] == "mcp"


def test_text_says_nothing_of_requests_that_went_well(tmp_path):
    with (tmp_path / "log").open("w") as file:
        made = conftest.serve(tmp_path, stderr=file)
    with made.client() as client:
        client.get("/healthz").raise_for_status()
        client.get("/nothing%00%0a")
    assert conftest.stop(made) == 0
    assert (tmp_path / "log").read_text() == ""


# ── traces ─────────────────────────────────────────────────────────────────────────────────────────

MALFORMED = [
    "", "garbage", PARENT.upper(), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}",
    f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-0x", f" {PARENT} x", "00-" + "a" * 5000, f"00-{TRACE}\n-{SPAN}-01",
]  # fmt: skip


@pytest.mark.parametrize("header", [None, *MALFORMED], ids=lambda header: repr(header)[:40])
def test_what_is_not_a_trace_is_none(header):
    assert events.read_trace(header) is None


@pytest.mark.parametrize("header", [PARENT, f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes"])
def test_a_trace_of_this_version_or_a_later_one_is_read(header):
    found = events.read_trace(header)
    assert found is not None
    assert found.id == TRACE
    assert found.parent == PARENT


@pytest.mark.parametrize("header", ["garbage", f"00-{'0' * 32}-{SPAN}-01"])
def test_a_malformed_trace_is_no_reason_to_refuse(http, header):
    response = http.post(
        "/run", json={"command": "echo ${TRACEPARENT-none}"}, headers={"traceparent": header}
    )
    assert response.json()["stdout"] == "none\n"


def test_two_traces_are_none(http):
    response = http.post(
        "/run",
        json={"command": "echo ${TRACEPARENT-none}"},
        headers=[("traceparent", PARENT), ("traceparent", PARENT)],
    )
    assert response.json()["stdout"] == "none\n"


def journal(http: httpx.Client, sandbox: str) -> list[tuple[str, str | None]]:
    page = http.get("/v1/events", params={"sandbox": sandbox}).json()["events"]
    return [(event["kind"], event["data"].get("trace")) for event in page]


def test_a_trace_reaches_the_command_the_journal_and_the_audit_log(served, http):
    traced = {"traceparent": PARENT}
    made = http.post("/v1/sandboxes", json={}, headers=traced).json()["id"]
    url = f"/v1/sandboxes/{made}"
    seen = http.post(f"{url}/exec", json={"command": "echo $TRACEPARENT"}, headers=traced).json()["stdout"]
    assert seen == PARENT + "\n"
    body = {"command": "echo $TRACEPARENT", "env": {"TRACEPARENT": "mine"}}
    assert http.post(f"{url}/exec", json=body, headers=traced).json()["stdout"] == "mine\n"
    http.put(f"{url}/files", params={"path": "a"}, content=b"x", headers=traced)
    assert http.post(f"{url}/exec", json={"command": "echo ${TRACEPARENT-none}"}).json()["stdout"] == "none\n"
    http.delete(url)
    assert journal(http, made) == [
        ("created", TRACE), ("started", TRACE), ("exited", TRACE), ("started", TRACE), ("exited", TRACE), ("file_written", TRACE),
        ("started", None), ("exited", None), ("deleted", None),
    ]  # fmt: skip
    audit = Path(served.environment["CLOCHE_HOME"]) / "audit"
    kept = [json.loads(line) for file in audit.glob("*.open") for line in file.read_text().splitlines()]
    assert [line["data"].get("trace") for line in kept if line["sandbox"] == made and line["kind"] == "exited"] == [
        TRACE, TRACE, None,
    ]  # fmt: skip
    assert served.cloche("audit", "verify").returncode == 0


def test_what_a_command_tries_outside_carries_its_trace(http):
    rules = {"network": {"mode": "rules", "allow": ["allowed.example"]}}
    made = http.post("/v1/sandboxes", json={"policy": rules}).json()["id"]
    command = {"command": "curl -s --max-time 20 http://denied.example/"}
    http.post(f"/v1/sandboxes/{made}/exec", json=command, headers={"traceparent": PARENT})
    until(lambda: ("denied", TRACE) in journal(http, made))
    assert ("decided", TRACE) in journal(http, made)
    http.delete(f"/v1/sandboxes/{made}")


def test_a_policy_that_lets_no_such_variable_in_keeps_it_out_and_runs_the_command(http):
    body = {
        "command": "echo ${TRACEPARENT-none}",
        "sandbox": {"policy": {"environment": {"allow": ["LANG"]}}},
    }
    result = http.post("/run", json=body, headers={"traceparent": PARENT}).json()
    assert result["stdout"] == "none\n", result


def test_e2b_carries_a_trace_too(http):
    traced = {"traceparent": PARENT}
    made = http.post("/sandboxes", json={"templateID": "base"}, headers=traced).json()["sandboxID"]
    assert ("created", TRACE) in journal(http, made)
    http.delete(f"/v1/sandboxes/{made}")


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_mcp_carries_the_trace_of_each_request(served, mode):
    """A session may outlive a trace: what counts is the header of the very request."""
    from mcp.client import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async def main() -> None:
        headers = {"Authorization": f"Bearer {served.key}"}
        async with create_mcp_http_client(headers=headers) as http:
            transport = streamable_http_client(f"{served.url}/mcp", http_client=http)
            async with Client(transport, mode=mode) as client:
                for header, seen in ((PARENT, PARENT), (None, "none")):
                    http.headers.pop("traceparent", None)
                    if header is not None:
                        http.headers["traceparent"] = header
                    command = ["bash", "-c", "echo ${TRACEPARENT-none}"]
                    result = await client.call_tool("sandbox_run", {"command": command})
                    assert result.structured_content["stdout"] == seen + "\n"

    anyio.run(main)
