"""HTTP on the unix socket of `cloche serve`: beside the frames, without a key, for its owner."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import PATIENCE_S, Served, serve, stop

# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def _by_socket(served: Served, **more: str) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(served.home / "s/cloche.sock"))
    return httpx.Client(transport=transport, base_url="http://localhost", headers=more, timeout=PATIENCE_S)


def test_who_shows_a_key_is_who_the_key_is(served: Served) -> None:
    """Nobody becomes more than they say they are; a proxy before the socket hands keys on."""
    with _by_socket(served, Authorization="Bearer cl_" + 40 * "0") as http:
        assert http.get("/v1/sandboxes").json()["error"]["code"] == "key_refused"
    made = json.loads(served.cloche("key", "create", "narrow", "--scope", "exec", "--json").stdout)
    with _by_socket(served, Authorization=f"Bearer {made['key']}") as http:
        assert http.get("/metrics").json()["error"]["code"] == "scope_missing"


def test_names_count_there_too(served: Served) -> None:
    with _by_socket(served, Host="evil.example") as http:
        assert http.get("/v1/sandboxes").json()["error"]["code"] == "peer_refused"
    with _by_socket(served, Origin="https://evil.example") as http:
        assert http.get("/v1/sandboxes").json()["error"]["code"] == "peer_refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_is_refused() -> None:
    """By the peer's credentials, where the directory would let them in."""
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        served = serve(Path(home))
        try:
            path = f"{home}/s/cloche.sock"
            for opened in (home, f"{home}/s"):
                os.chmod(opened, 0o711)
            os.chmod(path, 0o777)
            program = (
                "import os, socket, sys\n"
                "os.setresuid(23456, 23456, 23456)\n"
                f"s = socket.socket(socket.AF_UNIX); s.connect({path!r})\n"
                "try:\n    s.sendall(b'GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n')\n"
                "except OSError:\n    pass\n"
                "print(s.recv(1 << 16))\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert "peer_refused" in done.stdout, done.stderr
            assert "cloche_" not in done.stdout
        finally:
            stop(served)


def test_what_is_neither_is_dropped(served: Served) -> None:
    for garbage in (b"\0\0\0\0\x09garbage", b"hello there, who are you?\r\n\r\n", b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(served.home / "s/cloche.sock"))
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    with _by_socket(served) as http:
        assert http.get("/healthz").status_code == 200


# ── then ───────────────────────────────────────────────────────────────────────────────────────────


def test_no_key_is_needed(served: Served) -> None:
    with _by_socket(served) as http:
        assert "cloche_build_info" in http.get("/metrics").text
        said = http.post("/run", json={"command": "echo by the socket"}).json()
        assert said["stdout"] == "by the socket\n"
        with http.stream("POST", "/run/stream", json={"command": "echo 1; echo 2"}) as answer:
            assert "event: exit" in answer.read().decode()


def test_directories_of_the_host_mean_something_there(served: Served, tmp_path: Path) -> None:
    with served.client() as http:
        assert http.post("/v1/sandboxes", json={"workspace": str(tmp_path)}).json()["error"]["code"] == (
            "host_path_refused"
        )
    (tmp_path / "shown").write_text("here")
    with _by_socket(served) as http:
        made = http.post("/v1/sandboxes", json={"workspace": str(tmp_path)}).json()["id"]
        said = http.post(f"/v1/sandboxes/{made}/exec", json={"command": ["cat", "shown"]}).json()
        assert said["stdout"] == "here"
        http.delete(f"/v1/sandboxes/{made}")


def test_frames_and_requests_share_the_socket(served: Served) -> None:
    listed = served.cloche("list", "--json")
    assert listed.returncode == 0, listed.stderr
    with _by_socket(served) as http:
        for _ in range(3):
            assert http.get("/v1/sandboxes").status_code == 200


def test_it_is_on_record_as_the_owner(served: Served) -> None:
    owner = f"uid:{os.geteuid()}"
    with _by_socket(served) as http:
        made = http.post("/v1/sandboxes", json={}).json()["id"]
        http.delete(f"/v1/sandboxes/{made}")
        lines = http.get(f"/v1/audit?sandbox={made}&actor={owner}").json()["lines"]
        assert [line["event"]["kind"] if "event" in line else line.get("kind") for line in lines][:1] == [
            "created"
        ], lines
