"""Clients that mean ill or are ill: each is bounded, and a good one beside it is answered all the same."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from cloche.drivers import namespaces
from tests.server import conftest
from tests.server.conftest import PATIENCE_S, Served

STRICT = """
[server]
header_timeout_s = 2
body_timeout_s = 2
idle_timeout_s = 2
write_timeout_s = 2
ping_s = 2
max_body_mib = 1
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that loses patience soon."""
    made = conftest.serve(tmp_path_factory.mktemp("strict"), settings=STRICT)
    yield made
    assert conftest.stop(made) == 0


@pytest.fixture
def good(strict: Served) -> Iterator[httpx.Client]:
    with strict.client() as client:
        yield client


def address(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def dial(served: Served) -> socket.socket:
    return socket.create_connection(address(served), timeout=PATIENCE_S)


def head(served: Served, method: str = "POST", path: str = "/run", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {served.key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def to_the_end(sock: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def fault(answer: bytes) -> tuple[int, str]:
    """Status and code of the one answer that came."""
    told, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1, answer[:500]
    return int(told.split()[1]), json.loads(body)["error"]["code"]


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def dribble(sock: socket.socket, data: bytes, stop: threading.Event) -> None:
    """One byte at a time, far apart, until the other side has had enough."""
    with suppress(OSError):
        for byte in data:
            sock.send(bytes([byte]))
            if stop.wait(0.2):
                return


def answered(good: httpx.Client) -> None:
    result = good.post("/run", json={"command": "echo fine"})
    assert (result.status_code, result.json()["stdout"]) == (200, "fine\n")


# ── slow ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_dribbles_is_refused(strict, good):
    stop = threading.Event()
    with dial(strict) as sock:
        slow = head(strict, X_Padding="x" * 4000)
        thread = threading.Thread(target=dribble, args=(sock, slow, stop))
        thread.start()
        answered(good)
        assert fault(to_the_end(sock)) == (408, "request_too_slow")
        stop.set()
        thread.join()
    answered(good)


def test_a_body_that_dribbles_is_refused_although_it_never_stands_still(strict, good):
    stop = threading.Event()
    with dial(strict) as sock:
        sock.sendall(head(strict, Content_Length="100000"))
        thread = threading.Thread(target=dribble, args=(sock, b" " * 4000, stop))
        thread.start()
        answered(good)
        assert fault(to_the_end(sock)) == (408, "request_too_slow")
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "path", ["/run", "/run/stream", "/v1/sandboxes", "/v1/sandboxes/x/files?path=a"], ids=str
)
def test_a_body_that_stands_still_is_refused_and_leaves_nothing(strict, good, path):
    before = good.get("/v1/sandboxes").json()
    with dial(strict) as sock:
        sock.sendall(
            head(strict, "PUT" if "files" in path else "POST", path, Content_Length="100") + b'{"com'
        )
        assert fault(to_the_end(sock)) == (408, "request_too_slow")
    answered(good)
    assert good.get("/v1/sandboxes").json() == before


def test_a_slow_command_is_not_a_slow_client(strict, good):
    """Longer than every limit on clients: nothing is under way on the connection, and nothing has to be."""
    result = good.post("/run", json={"command": "sleep 5; echo late"}).json()
    assert result["stdout"] == "late\n"


def test_a_connection_without_a_request_is_closed_and_one_with_is_not(strict, good):
    with dial(strict) as idle, dial(strict) as used:
        used.sendall(head(strict, "GET", "/healthz"))
        assert used.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert to_the_end(idle) == b""
        assert to_the_end(used) == b""
    answered(good)


# ── too much ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"GET /" + b"a" * (20 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (414, "url_too_long")),
        (b"GET /" + b"a" * (900 << 10), (414, "url_too_long")),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (70 << 10) + b"\r\n\r\n", (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (900 << 10), (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n", (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\n" + b"a" * (900 << 10), (431, "head_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is TLS", (400, "request_malformed")),
        (b"\x00" * 4096, (400, "request_malformed")),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", (400, "request_malformed")),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", (400, "request_malformed")),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", (400, "request_malformed")),
    ],
    ids=[
        "address", "address without end", "header", "header without end", "many headers", "name without end", "TLS", "zeros",
        "two framings", "negative length", "two lengths",
    ],
)  # fmt: skip
def test_a_head_that_is_too_much_or_not_one_is_refused(strict, good, sent, told):
    with dial(strict) as sock:
        with suppress(OSError):  # it may be turned down before all of it is sent
            sock.sendall(sent)
        assert fault(to_the_end(sock)) == told
    answered(good)


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(strict, good):
    declared = good.post("/run", content=b" " * (2 << 20))
    chunked = good.post("/run", content=(b" " * 65536 for _ in range(32)))
    for response in (declared, chunked):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    answered(good)


def test_garbage_behind_a_request_does_not_get_into_its_answer(strict, good):
    """The request is cancelled, and what it had made goes."""
    body = b'{"command": "sleep 1000"}'
    before = good.get("/v1/sandboxes").json()
    with dial(strict) as sock:
        sock.sendall(head(strict, path="/run/stream", Content_Length=str(len(body))) + body)
        stream = sock.makefile("rb")
        assert any(line == b"event: start\r\n" or line == b"event: start\n" for line in stream)
        sock.sendall(b"\x00garbage\r\n\r\n" * 1000)
        with suppress(ConnectionResetError):
            assert b"request_malformed" not in stream.read()
    until(lambda: good.get("/v1/sandboxes").json() == before)


def test_requests_in_one_piece_are_answered_in_order_and_garbage_ends_it(strict):
    with dial(strict) as sock:
        ask = [head(strict, "GET", "/healthz", X_Request_ID=f"n{number}") for number in range(20)]
        sock.sendall(b"".join(ask))
        heard = b""
        while heard.count(b"HTTP/1.1 200") < 20:
            part = sock.recv(1 << 16)
            assert part, heard
            heard += part
        assert [int(n) for n in re.findall(rb"x-request-id: n(\d+)", heard)] == list(range(20))
        sock.sendall(b"NONSENSE\r\n\r\n")
        assert fault(to_the_end(sock)) == (400, "request_malformed")


# ── many ───────────────────────────────────────────────────────────────────────────────────────────

CROWD = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
port, wanted = int(sys.argv[1]), min(int(sys.argv[2]), most - 100)
held = []
for number in range(wanted):
    sock = socket.socket()
    sock.bind(("127.0.0.%d" % (2 + number % 50), 0))  # one address has ports for some 28,000 connections
    sock.connect(("127.0.0.1", port))
    held.append(sock)
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def crowd() -> Iterator:
    """A process that opens connections and says nothing."""
    with ExitStack() as stack:

        def come(served: Served, wanted: int) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", CROWD, str(address(served)[1]), str(wanted)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(process.kill)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
            return process

        yield come


def rss_mib(pid: int) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def established(served: Served) -> int:
    """Connections to the server's port that the server holds, as the kernel counts them."""
    port = f":{address(served)[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


@pytest.mark.slow
def test_ten_thousand_connections_that_say_nothing(served, http, crowd):
    before = rss_mib(served.process.pid)
    process = crowd(served, 10_000)
    held = int(process.stdout.readline())
    assert held >= 5_000, "this machine allows too few descriptors to try"
    until(lambda: established(served) >= held)
    answered(http)
    with served.client() as newcomer:
        answered(newcomer)
    assert rss_mib(served.process.pid) - before < held * 20 / 1024, "more than 20 KiB each"
    process.kill()
    process.wait(PATIENCE_S)
    until(lambda: established(served) < 100)
    answered(http)


def test_a_full_server_makes_room_for_who_asks_something(tmp_path, crowd):
    made = conftest.serve(tmp_path, settings="[server]\nmax_connections = 20\n")
    try:
        process = crowd(made, 100)
        assert process.stdout.readline() == "100\n"
        until(lambda: established(made) <= 20)
        with made.client() as client:
            answered(client)
        process.kill()
        with ExitStack() as stack:
            busy = [stack.enter_context(dial(made)) for _ in range(20)]
            for sock in busy:
                sock.sendall(head(made, "GET", "/v1/events/stream"))
            for sock in busy:
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            late = stack.enter_context(dial(made))
            answer = to_the_end(late)
            assert fault(answer) == (503, "server_busy")
            assert b"Retry-After: 1" in answer
            busy[0].close()
            until(lambda: established(made) < 20)
            with made.client() as client:
                answered(client)
    finally:
        assert conftest.stop(made) == 0


def test_what_the_server_may_open_is_not_what_a_sandbox_may(tmp_path):
    """The server raises its own limit; the soft limit of what runs inside stays what the server was started with."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 512
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        made = conftest.serve(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        limits = Path(f"/proc/{made.process.pid}/limits").read_text()
        assert re.findall(r"Max open files\s+(\d+)", limits) == [str(hard)]
        with made.client() as client:
            told = client.post("/run", json={"command": "ulimit -Sn; ulimit -Hn"}).json()["stdout"].split()
        assert told == ["512", str(hard)]
    finally:
        assert conftest.stop(made) == 0


# ── deaf ───────────────────────────────────────────────────────────────────────────────────────────

LOUD = "yes 'a line that nobody reads'"


def loud(good: httpx.Client) -> tuple[str, str]:
    made = good.post("/v1/sandboxes", json={}).json()["id"]
    started = good.post(f"/v1/sandboxes/{made}/executions", json={"command": LOUD}).json()["id"]
    return made, started


def cut(good: httpx.Client, code: str) -> int:
    found = re.search(
        rf'^cloche_connections_cut_total\{{code="{code}"\}} (\d+)$', good.get("/metrics").text, re.M
    )
    return int(found[1]) if found else 0


def test_a_stream_that_nobody_reads_is_cut_and_its_execution_goes_on(strict, good):
    made, started = loud(good)
    url = f"/v1/sandboxes/{made}/executions"
    before, size = cut(good, "reader_too_slow"), rss_mib(strict.process.pid)
    with dial(strict) as deaf:
        deaf.sendall(head(strict, "GET", f"{url}/{started}/stream"))
        with good.stream("GET", f"{url}/{started}/stream") as response:
            lines = response.iter_lines()
            while cut(good, "reader_too_slow") == before:
                assert next(lines) is not None  # whoever reads is served meanwhile
        assert to_the_end(deaf).startswith(b"HTTP/1.1 200")
    assert good.get(url).json()["executions"][0]["running"]
    assert rss_mib(strict.process.pid) - size < 150
    assert good.delete(f"/v1/sandboxes/{made}").status_code == 204


def test_a_run_that_nobody_reads_ends_with_its_sandbox(strict, good):
    """The stream of /run/stream owns its sandbox: cut, it takes the sandbox along."""
    before = good.get("/v1/sandboxes").json()
    body = json.dumps({"command": LOUD}).encode()
    with dial(strict) as deaf:
        deaf.sendall(head(strict, path="/run/stream", Content_Length=str(len(body))) + body)
        until(lambda: good.get("/v1/sandboxes").json() != before)
        until(lambda: good.get("/v1/sandboxes").json() == before)
    answered(good)


def test_a_file_that_nobody_reads_is_cut(strict, good):
    made = good.post("/v1/sandboxes", json={}).json()["id"]
    good.post(f"/v1/sandboxes/{made}/exec", json={"command": "head -c 30000000 /dev/zero > big"})
    before, size = cut(good, "reader_too_slow"), rss_mib(strict.process.pid)
    with ExitStack() as stack:
        for _ in range(3):
            deaf = stack.enter_context(dial(strict))
            deaf.sendall(head(strict, "GET", f"/v1/sandboxes/{made}/files?path=big"))
        until(lambda: cut(good, "reader_too_slow") == before + 3)
    assert len(good.get(f"/v1/sandboxes/{made}/files", params={"path": "big"}).content) == 30_000_000
    assert rss_mib(strict.process.pid) - size < 200
    assert good.delete(f"/v1/sandboxes/{made}").status_code == 204


def descriptors(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


def test_a_websocket_whose_client_has_gone_without_a_word_is_found_out(strict, good):
    """Half open: the handshake is made, then nothing is read or answered, not even a ping."""
    before = cut(good, "connection_lost")
    with dial(strict) as sock:
        upgrade = head(
            strict, "GET", "/v1/connect", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Version="13",
            Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
        )  # fmt: skip
        sock.sendall(upgrade)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 101")
        until(lambda: cut(good, "connection_lost") == before + 1)
        to_the_end(sock)
    websocket = "ws" + strict.url.removeprefix("http") + "/v1/connect"
    with (
        open_websocket(websocket, additional_headers={"X-API-Key": strict.key}, ping_interval=None) as alive,
        pytest.raises(TimeoutError),
    ):
        alive.recv(timeout=6)  # pings are answered: it stays
    answered(good)


def ended(websocket: ClientConnection) -> bool:
    try:
        websocket.recv(timeout=PATIENCE_S)
    except ConnectionClosed:
        return True
    return False


def test_a_websocket_that_nobody_reads_is_cut(strict, good):
    from cloche import framing, rpc

    made, started = loud(good)
    websocket = "ws" + strict.url.removeprefix("http") + "/v1/connect"
    before = cut(good, "reader_too_slow") + cut(good, "connection_lost")
    with open_websocket(
        websocket, additional_headers={"X-API-Key": strict.key}, max_queue=1, ping_interval=None
    ) as deaf:
        call = {"method": "attach", "arguments": {"sandbox": made, "execution": started}}
        deaf.send(
            framing.pack(framing.CALL, 1, rpc.encode({**call, "protocol": framing.PROTOCOL, "version": ""}))
        )
        until(lambda: cut(good, "reader_too_slow") + cut(good, "connection_lost") > before)
        until(lambda: ended(deaf))
    assert good.get(f"/v1/sandboxes/{made}/executions").json()["executions"][0]["running"]
    assert good.delete(f"/v1/sandboxes/{made}").status_code == 204


# ── gone ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that keeps nothing warm, so that what it has open can be counted."""
    made = conftest.serve(tmp_path_factory.mktemp("bare"), settings="[keeper]\nwarm_sandboxes = 0\n")
    with made.client() as client:
        answered(client)
    yield made
    assert conftest.stop(made) == 0


def leave(served: Served, data: bytes, listen: bool) -> None:
    """Send this much, hear the first bytes of the answer or do not, and go without a word (a reset, not an end)."""
    with dial(served) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(data)
        if listen:
            sock.recv(1)


STAGES = (0.0, 0.3, "head", 0.98, 1.0, "answer")
EMBRYOS = 2 * namespaces._MOST_EMBRYOS + 2
"""Descriptors that the driver may have more than before: it makes ready what was used up too fast."""


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/run", {"command": "echo a; sleep 0.3"}),
        ("POST", "/run/stream", {"command": "echo a; sleep 1000"}),
        ("POST", "/v1/sandboxes", {"labels": {"left": "yes"}}),
        ("POST", "/v1/sandboxes/{box}/exec", {"command": "echo a; sleep 0.3"}),
        ("PUT", "/v1/sandboxes/{box}/files?path=up", {"filling": "x" * 300_000}),
        ("PUT", "/v1/sandboxes/{box}/files/tree?path=t", {"filling": "x" * 300_000}),
        ("POST", "/v1/sandboxes/{box}/code", {"code": "import time; time.sleep(0.1)"}),
        ("POST", "/v1/sandboxes/{box}/snapshots", {}),
        ("GET", "/v1/events/stream", None),
        ("GET", "/v1/sandboxes/{box}/files/watch", None),
    ],
    ids=["run", "run stream", "create", "exec", "upload", "tree", "code", "snapshot", "events", "watch"],
)
def test_a_client_that_leaves_at_any_stage_leaves_nothing(bare, method, path, body):
    with bare.client() as good:
        box = good.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
        good.post(f"/v1/sandboxes/{box}/code", json={"code": "1"})  # the interpreter is there from now on
        before = descriptors(bare)
        data = b"" if body is None else json.dumps(body).encode()
        top = head(bare, method, path.format(box=box), Content_Length=str(len(data)))
        whole = top + data
        repeats = 1 + EMBRYOS // len(STAGES)  # what is left behind each time shows
        for stage in STAGES:
            part = {"head": top[:-2], "answer": whole}.get(str(stage))
            for _ in range(repeats):
                leave(
                    bare, whole[: int(len(whole) * float(stage))] if part is None else part, stage == "answer"
                )
        answered(good)
        until(lambda: clear(bare, good, box) and descriptors(bare) <= before + EMBRYOS)
        result = good.post(f"/v1/sandboxes/{box}/exec", json={"command": "echo still"}).json()
        assert result["stdout"] == "still\n"
        good.delete(f"/v1/sandboxes/{box}")


def clear(served: Served, good: httpx.Client, box: str) -> bool:
    """Whether there is one sandbox, without anything that runs. Who creates and leaves in the same moment may own what was made."""
    for made in good.get("/v1/sandboxes", params={"label": "left=yes"}).json()["sandboxes"]:
        good.delete(f"/v1/sandboxes/{made['id']}")
    for kept in good.get("/v1/snapshots").json()["snapshots"]:
        good.delete(f"/v1/snapshots/{kept['id']}")
    executions = good.get(f"/v1/sandboxes/{box}/executions").json()["executions"]
    left = [made["id"] for made in good.get("/v1/sandboxes").json()["sandboxes"]]
    return left == [box] and not any(execution["running"] for execution in executions)


# ── a dead sandbox and a slow command, on every wire (E2B's: tests/wires/e2b/test_refusals.py) ─────


def test_a_dead_sandbox_and_a_slow_command_are_two_things_on_the_local_socket(served, http):
    box = http.post("/v1/sandboxes", json={}).json()["id"]
    slow = served.cloche("exec", "--timeout", "0.2", box, "--", "sleep", "60")
    assert slow.returncode == 124
    assert http.delete(f"/v1/sandboxes/{box}").status_code == 204
    dead = served.cloche("exec", "--json", box, "--", "true")
    assert dead.returncode == 125
    assert "sandbox_lost" in dead.stdout + dead.stderr
    missing = served.cloche("exec", "--json", "nobody", "--", "true")
    assert "sandbox_not_found" in missing.stdout + missing.stderr


def test_a_dead_sandbox_and_a_slow_command_are_two_things_in_mcp(served, http):
    import anyio
    from mcp.client import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async def main() -> None:
        headers = {"Authorization": f"Bearer {served.key}"}
        async with (
            create_mcp_http_client(headers=headers) as carrier,
            Client(streamable_http_client(f"{served.url}/mcp", http_client=carrier)) as client,
        ):
            made = (await client.call_tool("sandbox_session_create", {})).structured_content
            box = made["sandbox"]
            arguments = {"sandbox": box, "command": ["sleep", "60"], "timeout_ms": 200}
            slow = (await client.call_tool("sandbox_exec", arguments)).structured_content
            assert slow["timed_out"]
            assert http.delete(f"/v1/sandboxes/{box}").status_code == 204
            dead = await client.call_tool("sandbox_exec", {"sandbox": box, "command": ["true"]})
            assert dead.is_error
            assert "sandbox_lost" in str(dead)

    anyio.run(main)
