"""A server that is told to stop, under load; one that is killed; and the one that comes after it."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as open_websocket

from cloche import framing, rpc
from cloche.server.http import answers
from tests.server import conftest
from tests.server.conftest import PATIENCE_S, Served
from tests.server.test_faults import dial, head, to_the_end, until
from tests.server.test_http import events


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Served]:
    """A server of this test's own, which the test itself may end."""
    made = conftest.serve(tmp_path, settings="[server]\ndrain_s = 30\n")
    yield made
    if made.process.poll() is None:
        conftest.stop(made)
    assert made.process.stdout is not None
    made.process.stdout.close()


def ended(served: Served) -> None:
    assert served.process.wait(PATIENCE_S) == 0
    assert served.process.stdout is not None
    served.process.stdout.close()


def ask(served: Served, done: dict, name: str, method: str, path: str, **body: object) -> threading.Thread:
    """A request in a thread of its own; its answer is put under `name`."""

    def work() -> None:
        with served.client() as client:
            try:
                done[name] = client.request(method, path, json=body)
            except httpx.HTTPError as problem:
                done[name] = problem

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def waiting_sandbox(client: httpx.Client) -> str:
    return client.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]


def has_begun(client: httpx.Client, sandbox: str) -> bool:
    return client.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "began"}).status_code == 200


def test_what_is_under_way_finishes_and_what_comes_is_refused(mine, tmp_path):
    """The commands wait for a file in a directory of ours: the server itself takes no more requests by then."""
    work = tmp_path / "work"
    work.mkdir()
    command = "echo began > began; until [ -e go ]; do sleep 0.02; done; echo finished"
    done: dict = {}
    created = mine.cloche("create", "--workspace", str(work), "--json")
    made = json.loads(created.stdout)["id"]
    with mine.client() as client, dial(mine) as pipelined:
        url = f"/v1/sandboxes/{made}"
        thread = ask(mine, done, "exec", "POST", f"{url}/exec", command=command)
        until((work / "began").exists)
        # Three that go on: a request, a stream of that command, and one that has no end of its own.
        body = json.dumps({"command": "until [ -e go ]; do sleep 0.02; done"}).encode()
        pipelined.sendall(head(mine, "POST", f"{url}/exec", Content_Length=str(len(body))) + body)
        execution = client.get(f"{url}/executions").json()["executions"][0]["id"]
        with (
            client.stream("GET", f"{url}/executions/{execution}/stream") as followed,
            mine.client() as other,
            other.stream("GET", "/v1/events/stream") as endless,
        ):
            coming = events(endless)
            assert next(coming)[0]
            until(lambda: len(client_executions(mine, url)) == 2)
            mine.process.send_signal(signal.SIGTERM)
            last = list(coming)[-1]
            assert (last[0], last[1]["code"]) == ("error", "server_stopping")
            until(lambda: not accepts(mine))
            pipelined.sendall(head(mine, "GET", "/healthz"))  # behind a request that is under way
            assert mine.process.poll() is None
            (work / "go").touch()
            assert [kind for kind, _, _ in events(followed)][-1] == "exit"
        thread.join(PATIENCE_S)
        assert done["exec"].json()["stdout"] == "finished\n"
        heard = to_the_end(pipelined)
        assert heard.startswith(b"HTTP/1.1 200")
        assert b'"exit_code":0' in heard
        if heard.count(b"HTTP/1.1 ") == 2:  # closed, or told
            assert b"HTTP/1.1 503" in heard
            assert b"server_stopping" in heard
    assert mine.process.wait(PATIENCE_S) == 0


def client_executions(served: Served, url: str) -> list:
    with served.client() as client:
        return client.get(f"{url}/executions").json()["executions"]


def accepts(served: Served) -> bool:
    try:
        dial(served).close()
    except OSError:
        return False
    return True


def test_who_does_not_finish_in_time_is_told(tmp_path):
    made = conftest.serve(tmp_path, settings="[server]\ndrain_s = 1\n")
    done: dict = {}
    with made.client() as client:
        sandbox = waiting_sandbox(client)
        url = f"/v1/sandboxes/{sandbox}"
        thread = ask(made, done, "exec", "POST", f"{url}/exec", command="echo > began; sleep 1000")
        until(lambda: has_begun(client, sandbox))
        with client.stream("POST", "/run/stream", json={"command": "echo here; sleep 1000"}) as response:
            coming = events(response)
            assert [next(coming)[0], next(coming)[0]] == ["start", "stdout"]
            made.process.send_signal(signal.SIGTERM)
            kind, told, _ = next(coming)
            assert (kind, told["code"]) == ("error", "server_stopping")
            assert list(coming) == []
    thread.join(PATIENCE_S)
    response = done["exec"]
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
    assert int(response.headers["retry-after"]) >= 1
    ended(made)


def test_a_second_signal_does_not_wait(tmp_path):
    made = conftest.serve(tmp_path, settings="[server]\ndrain_s = 3600\n")
    with (
        made.client() as client,
        client.stream("POST", "/run/stream", json={"command": "echo here; sleep 1000"}) as response,
    ):
        coming = events(response)
        assert [next(coming)[0], next(coming)[0]] == ["start", "stdout"]
        made.process.send_signal(signal.SIGTERM)
        until(lambda: not accepts(made))
        made.process.send_signal(signal.SIGTERM)
        assert next(coming)[1]["code"] == "server_stopping"
    ended(made)


def call(method: str, **arguments: object) -> bytes:
    body = {"method": method, "arguments": arguments, "protocol": framing.PROTOCOL, "version": ""}
    return framing.pack(framing.CALL, 1, rpc.encode(body))


def test_calls_in_frames_finish_or_are_told(tmp_path):
    """On the local socket and on a WebSocket alike."""
    made = conftest.serve(tmp_path, settings="[server]\ndrain_s = 1\n")
    local = subprocess.Popen(
        conftest.argv("run", "--", "bash", "-c", "echo here; sleep 1000"), env=made.environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert local.stdout is not None
    assert local.stdout.readline() == "here\n"
    address = "ws" + made.url.removeprefix("http") + "/v1/connect"
    with open_websocket(address, additional_headers={"X-API-Key": made.key}, ping_interval=None) as far:
        far.send(call("follow_events"))
        assert far.recv(timeout=PATIENCE_S)
        made.process.send_signal(signal.SIGTERM)
        heard = b""
        try:
            while True:
                heard += bytes(far.recv(timeout=PATIENCE_S, decode=False))
        except ConnectionClosed:
            pass
    assert b"server_stopping" in heard
    _, told = local.communicate(timeout=PATIENCE_S)
    assert local.returncode == 125
    assert "server_stopping" in told or "told to stop" in told
    ended(made)


# ── killed ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_is_killed_under_load_and_the_one_after_it(tmp_path):
    """What died with it is `sandbox_lost`, what was archived is there, keys hold, and nothing is left behind."""
    first = conftest.serve(tmp_path)
    done: dict = {}
    key = {"Idempotency-Key": "once"}
    with first.client() as client:
        live, resting = (client.post("/v1/sandboxes", json={"labels": {"n": n}}).json()["id"] for n in "ab")
        client.put(f"/v1/sandboxes/{resting}/files", params={"path": "kept"}, content=b"still here")
        assert client.post(f"/v1/sandboxes/{resting}/suspend", params={"mode": "archive"}).status_code == 200
        created = client.post("/v1/sandboxes", json={}, headers=key)
        body = {"command": "echo begun > began; sleep 1000"}
        threads = [
            ask(first, done, f"exec{n}", "POST", f"/v1/sandboxes/{live}/exec", **body) for n in range(3)
        ]
        threads.append(ask(first, done, "run", "POST", "/run", command="sleep 1000"))
        until(lambda: has_begun(client, live))
        until(lambda: len(client.get("/v1/sandboxes").json()["sandboxes"]) == 4)
        with client.stream("POST", "/run/stream", json={"command": "echo here; sleep 1000"}) as response:
            coming = events(response)
            assert [next(coming)[0], next(coming)[0]] == ["start", "stdout"]
            first.process.kill()
            with pytest.raises(httpx.HTTPError):
                list(coming)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(isinstance(answer, httpx.HTTPError) for answer in done.values()), done
    assert first.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert first.process.stdout is not None
    first.process.stdout.close()

    second = conftest.serve(tmp_path)
    try:
        with second.client(first.key) as client:
            for gone in (live, created.json()["id"]):
                answer = client.post(f"/v1/sandboxes/{gone}/exec", json={"command": "true"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (410, "sandbox_lost"), (
                    answer.text
                )
            assert [box["id"] for box in client.get("/v1/sandboxes").json()["sandboxes"]] == [resting]
            assert client.get(f"/v1/sandboxes/{resting}/files", params={"path": "kept"}).text == "still here"
            again = client.post("/v1/sandboxes", json={}, headers=key)
            assert (again.status_code, again.content) == (created.status_code, created.content)
            other = client.post("/v1/sandboxes", json={"name": "x"}, headers=key)
            assert other.json()["error"]["code"] == "name_conflict"
            assert client.delete(f"/v1/sandboxes/{resting}").status_code == 204
            assert client.post("/run", json={"command": "echo new"}).json()["stdout"] == "new\n"
        kept = Path(second.environment["CLOCHE_HOME"]) / "answers.jsonl"
        assert kept.stat().st_mode & 0o077 == 0
        sandboxes = Path(second.environment["CLOCHE_HOME"]) / "sandboxes"
        until(lambda: not sandboxes.exists() or not any(sandboxes.iterdir()))
    finally:
        assert conftest.stop(second) == 0


def test_a_line_that_was_cut_short_is_skipped(tmp_path):
    file = answers.File(str(tmp_path / "a"), 3600)
    whole = answers.Kept(
        caller="key:a", key="k", digest="d", time=time.time(), status=201, headers=[], body=b"\xff{}"
    )
    old = msgspec.structs.replace(whole, key="old", time=1.0)
    assert file.read() == []
    file.append(whole)
    file.append(old)
    with (tmp_path / "a").open("ab") as raw:
        raw.write(msgspec.json.encode(whole)[:30])
    again = answers.File(str(tmp_path / "a"), 3600)
    assert again.read() == [whole]
    again.append(msgspec.structs.replace(whole, key="next"))
    assert [kept.key for kept in answers.File(str(tmp_path / "a"), 3600).read()] == ["k", "next"]
