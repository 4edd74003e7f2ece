"""`cloche forward`: what is refused, how it ends, and that bytes pass. tests/server/test_tunnels.py has it over HTTP."""

import json
import signal
import socket

import pytest


def refused(ran, code):
    assert ran.returncode == 125, ran.stderr
    assert json.loads(ran.stdout)["error"]["code"] == code


@pytest.fixture
def box(kept):
    made = json.loads(kept("create", "--json").stdout)["id"]
    yield made
    kept("delete", made)


def serve_inside(cloche, box, port):
    code = f"import http.server as h; h.HTTPServer(('127.0.0.1', {port}), h.SimpleHTTPRequestHandler).serve_forever()"
    return cloche.start("exec", box, "--", "python3", "-Ic", code)


def get(port):
    with socket.create_connection(("127.0.0.1", port), timeout=50) as link:
        link.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return link.recv(12)


def test_what_is_no_port_and_who_is_not_there(kept, box):
    for word in ("0", "70000", "http", "80:x", "-1"):
        refused(kept("forward", box, word, "--json"), "argument_invalid")
    refused(kept("forward", "nobody", "80", "--json"), "sandbox_not_found")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(kept("forward", box, f"80:{taken.getsockname()[1]}", "--json"), "address_unavailable")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_passes_bytes_and_ends_when_told(kept, box, until, number):
    serve_inside(kept, box, 8000)
    running = kept.start("forward", box, "8000", "8001:0", "--json")
    said = [json.loads(running.stdout.readline()) for _ in range(2)]
    assert [line["port"] for line in said] == [8000, 8001]
    local = int(said[0]["address"].rpartition(":")[2])
    until(lambda: _answers(local))
    assert get(local) == b"HTTP/1.0 200"
    running.send_signal(number)
    assert running.wait(50) == 0
    assert f"127.0.0.1:{local} is port 8000 of {box}".encode() in running.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", local))


def _answers(port):
    try:
        return get(port) != b""
    except ConnectionResetError:
        return False


def test_it_says_when_the_sandbox_goes(kept):
    box = json.loads(kept("create", "--json").stdout)["id"]
    running = kept.start("forward", box, "8000", "--json")
    running.stdout.readline()
    assert kept("delete", box).returncode == 0
    assert running.wait(50) == 125
    assert json.loads(running.stdout.read())["error"]["code"] == "sandbox_lost"
