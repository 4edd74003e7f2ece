"""Our own SDK over HTTP: the whole backend through `/v1/connect`, with the same refusals as every route."""

import asyncio
import os
import subprocess
import sys

import pytest

from cloche import AsyncSandbox, errors
from tests.server import conftest

PROGRAM = f"import sys; sys.path[:0] = [{conftest.SOURCES!r}]; from cloche import Sandbox; "


def far(served: conftest.Served, program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A client in another process, that knows the server by its URL only."""
    known = {
        "PATH": os.environ["PATH"], "HOME": str(served.home), "CLOCHE_HOME": str(served.home / "far"),
        "CLOCHE_URL": served.url, "CLOCHE_API_KEY": served.key,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM + program],
        capture_output=True, text=True, env={**known, **environment}, timeout=conftest.PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"CLOCHE_API_KEY": "cl_" + "0" * 40}, "key_refused"),
        ({"CLOCHE_API_KEY": ""}, "key_missing"),
        ({"CLOCHE_URL": "http://127.0.0.1:1"}, "server_unavailable"),
    ],
)
def test_a_caller_without_a_key_or_server_is_told_so(served, environment, code):
    ran = far(served, "Sandbox()", **environment)
    assert ran.returncode == 1
    assert f"({code})" in ran.stderr


def test_host_paths_do_not_travel(served):
    ran = far(served, "Sandbox(workspace='/etc')")
    assert "(host_path_refused)" in ran.stderr


def test_a_tenant_is_a_tenant_here_too(served, http):
    key = served.cloche("key", "create", "of-green", "--tenant", "green").stdout.strip()
    mine = http.post("/v1/sandboxes", json={}).json()["id"]
    ran = far(served, f"print(Sandbox.list()); Sandbox.get({mine!r})", CLOCHE_API_KEY=key)
    assert ran.stdout == "[]\n"
    assert "(sandbox_not_found)" in ran.stderr
    http.delete(f"/v1/sandboxes/{mine}")


def test_the_sdk_does_far_away_what_it_does_here(served):
    program = """
with Sandbox(env={"A": "1"}) as box:
    print(box.exec("echo $A; exit 3").exit_code, box.run_code("41 + 1").text, box.info().server)
    box.files.write("a.bin", b"x" * 3_000_000)
    print(len(box.files.read("a.bin", format="bytes")), [e.data for e in box.exec_stream("printf hi") if hasattr(e, "data")])
    p = box.start("python3 -i", pty=True)
    p.write(b"print(6*7)\\n")
    seen = b""
    for event in p.stream():
        seen += getattr(event, "data", b"")
        if b"42\\r" in seen:
            p.kill()
"""
    ran = far(served, program)
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first == f"3 42 {served.url}"
    assert second == "3000000 [b'hi']"


def test_the_command_line_reaches_far_too(served):
    known = {**served.environment, "CLOCHE_HOME": str(served.home / "far"), "CLOCHE_URL": served.url}

    def cloche(*words: str, key: str = served.key) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            conftest.argv(*words), capture_output=True, text=True, env={**known, "CLOCHE_API_KEY": key}, timeout=50,
            input="from here",
        )  # fmt: skip

    assert "key_refused" in cloche("list", "--json", key="cl_nothing").stdout
    assert cloche("run", "--", "true", key="cl_nothing").returncode == 125
    ran = cloche("run", "--", "sh", "-c", "cat; echo; echo far >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "from here\n", "far\n")
    assert cloche("create", "--name", "afar").returncode == 0
    assert "afar" in cloche("list").stdout
    assert cloche("exec", "afar", "--", "hostname").stdout == "cloche\n"
    assert cloche("delete", "afar").returncode == 0


def test_a_sandbox_ends_with_the_connection_that_made_it(served, http):
    program = "import os; box = Sandbox(); print(box.id, flush=True); os.kill(os.getpid(), 9)"
    made = far(served, program).stdout.strip()
    assert len(made) == 20

    async def gone() -> None:
        while http.get(f"/v1/sandboxes/{made}").status_code == 200:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(gone(), conftest.PATIENCE_S))


def test_a_server_that_stops_says_so_or_is_a_lost_connection(tmp_path):
    made = conftest.serve(tmp_path)

    async def use() -> str:
        os.environ["CLOCHE_API_KEY"] = made.key
        try:
            box = await AsyncSandbox.create(server=made.url)
            running = asyncio.ensure_future(box.exec("sleep 1000"))
            while not await box.processes.list():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(conftest.stop, made)
            try:
                await running
            except errors.ClocheError as problem:
                return problem.code
            return "none"
        finally:
            del os.environ["CLOCHE_API_KEY"]

    assert asyncio.run(use()) in ("connection_lost", "sandbox_lost", "server_stopping")
