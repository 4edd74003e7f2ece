"""The keeper, as a process of its own: who it serves, what it refuses, and what ends with whom."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import cloche
from cloche import engine as engines
from cloche import framing, model
from cloche.sdk import local, portal


class Kept:
    """A keeper in a subprocess, and ways to talk to it."""

    def __init__(self, home, until, settings=""):
        self.home = Path(home)
        self.path = self.home / "s" / "cloche.sock"
        self.server = f"unix:{self.path}"
        self._until = until
        (self.home / "c/cloche").mkdir(parents=True, exist_ok=True)
        (self.home / "c/cloche/settings.toml").write_text(settings)
        self.process = self.start()
        until(lambda: self.answers() or self.process.poll() is not None)

    def start(self):
        environment = {
            **os.environ,
            "CLOCHE_HOME": str(self.home / "s"),
            "XDG_CONFIG_HOME": str(self.home / "c"),
        }
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        return subprocess.Popen([sys.executable, "-m", "cloche.cli.keeper"], env=environment)

    def answers(self):
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(self.path)) == 0

    def connect(self):
        """A backend on a connection of its own, unlike the SDK's, which is shared by the process."""
        return portal.run(local.connect(str(self.path), missing_ok=False))

    def live(self):
        return {info.id for info in cloche.Sandbox.list(server=self.server)}

    def stop(self):
        self.process.terminate()
        return self.process.wait(20)


@pytest.fixture
def make_kept(until):
    made: list[Kept] = []
    with tempfile.TemporaryDirectory(prefix="ck-", ignore_cleanup_errors=True) as home:

        def make(**options):
            made.append(Kept(Path(home) / str(len(made)), until, **options))
            return made[-1]

        yield make
        for kept in made:
            if kept.process.poll() is None:
                kept.stop()
    portal.close()  # connections are kept per process; the next test has another server


@pytest.fixture
def kept(make_kept):
    return make_kept()


class Raw:
    """A client that speaks frames by hand."""

    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self.frames = []
        self._reader = framing.Reader()

    def send(self, kind, channel, body):
        self.sock.sendall(framing.pack(kind, channel, body))

    def call(self, method, arguments=None, channel=1, protocol=framing.PROTOCOL):
        call = {"method": method, "arguments": arguments or {}, "protocol": protocol}
        self.send(framing.CALL, channel, json.dumps(call).encode())
        return self.answer()

    def answer(self):
        while not self.frames:
            data = self.sock.recv(65536)
            if not data:
                return None, None
            self.frames += self._reader.feed(data)
        kind, _, body = self.frames.pop(0)
        return kind, json.loads(body)


@pytest.fixture
def dial(kept):
    """Makes raw clients of the keeper."""
    with contextlib.ExitStack() as stack:

        def make():
            raw = Raw(kept.path)
            stack.callback(raw.sock.close)
            return raw

        yield make


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    return caught.value.code


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("unix:/nowhere/cloche.sock", "server_unavailable"),
        ("http://localhost:1", "server_unavailable"),
        ("carrier-pigeon", "settings_invalid"),
    ],
)
def test_a_named_server_that_does_not_answer_is_an_error_and_never_a_fallback(monkeypatch, address, code):
    monkeypatch.setenv("CLOCHE_URL", address)
    assert code_of(cloche.Sandbox) == code


def test_the_argument_wins_over_the_environment(kept, monkeypatch):
    monkeypatch.setenv("CLOCHE_URL", "unix:/nowhere/cloche.sock")
    assert cloche.Sandbox.list(server=kept.server) == []


def test_a_stale_socket_is_passed_over_unless_it_was_named(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ck-", ignore_cleanup_errors=True) as home:
        monkeypatch.setenv("CLOCHE_HOME", home)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(f"{home}/cloche.sock")
        assert code_of(lambda: cloche.Sandbox(server=f"unix:{home}/cloche.sock")) == "server_unavailable"
        with cloche.Sandbox() as box:
            assert box.info().server == "in process"
            # Not even the engine that is in this process by now stands in for it.
            assert code_of(lambda: cloche.Sandbox(server=f"unix:{home}/cloche.sock")) == "server_unavailable"
        portal.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"not json", "argument_invalid"),
        (b"[]", "argument_invalid"),
        (b'{"method": "fly", "protocol": 1}', "argument_invalid"),
        (b'{"method": "info", "protocol": 1}', "argument_invalid"),
        (b'{"method": "info", "protocol": 1, "arguments": {"sandbox": "x", "colour": 1}}', "field_unknown"),
        (b'{"method": "info", "protocol": 1, "arguments": {"sandbox": 7}}', "argument_invalid"),
        (b'{"method": "create", "protocol": 1, "arguments": {"spec": {"colour": 1}}}', "field_unknown"),
        (b'{"method": "aclose", "protocol": 1}', "argument_invalid"),
        (b'{"method": "__init__", "protocol": 1}', "argument_invalid"),
        (b'{"method": "info", "protocol": 1, "arguments": {"sandbox": "nobody"}}', "sandbox_not_found"),
        (b'{"method": "list", "protocol": 99}', "server_version_mismatch"),
        (b'{"method": "run", "protocol": 1}', "argument_invalid"),
    ],
)
def test_a_bad_call_is_answered_with_its_code(dial, body, code):
    raw = dial()
    raw.send(framing.CALL, 5, body)
    kind, answer = raw.answer()
    assert (kind, answer["code"]) == (framing.ERROR, code)
    assert raw.call("list") == (framing.RESULT, [])  # and the connection goes on


def test_bytes_that_are_no_frames_end_that_connection_only(dial):
    rude, polite = dial(), dial()
    rude.sock.sendall(b"\xff" * 64)
    assert rude.answer() == (None, None)
    assert polite.call("list") == (framing.RESULT, [])


def test_frames_for_no_call_are_ignored(dial):
    raw = dial()
    for kind in (framing.INPUT, framing.CONTROL, framing.CANCEL, framing.RESULT, 200):
        raw.send(kind, 77, b"x")
    assert raw.call("list") == (framing.RESULT, [])


def test_the_socket_and_its_directory_are_the_owners(kept):
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700


def test_a_second_keeper_leaves_quietly(kept):
    assert kept.start().wait(20) == 0
    assert kept.live() == set()


# ── the SDK through it ─────────────────────────────────────────────────────────────────────────────


def test_a_sandbox_is_the_same_through_a_server(kept):
    with cloche.Sandbox(server=kept.server, env={"A": "1"}, memory_mib=64) as box:
        info = box.info()
        assert info.server == kept.server
        assert info.limits["memory_mib"].value == 64
        result = box.exec(r"printf '\377'; echo $A; cat; exit 3", stdin=b"\x00in")
        assert (result.exit_code, result.stdout_bytes) == (3, b"\xff1\n\x00in")
        assert box.exec(["printf", "%s", "a\udcffb"]).stdout_bytes == b"a\xffb"
        box.files.write("a/b.bin", b"\x00\xff")
        assert box.files.read("a/b.bin", format="bytes") == b"\x00\xff"
        assert b"".join(box.files.read("a/b.bin", format="stream")) == b"\x00\xff"
        assert [f.path for f in box.files.list(depth=2)] == ["a", "a/b.bin"]
        box.run_code("x = 41")
        assert box.run_code("x + 1").text == "42"
        events = list(box.exec_stream("echo out; echo err >&2"))
        assert sorted(e.data for e in events if isinstance(e, cloche.Output)) == [b"err\n", b"out\n"]
        assert isinstance(events[-1], cloche.Exited)
        process = box.start("cat", pty=(90, 20))
        process.resize(100, 30)
        process.kill()
        assert process.wait().signal == signal.SIGKILL
        assert box.usage().memory_mib >= 0
        assert box.events()[0]["kind"] == "created"
        assert cloche.Sandbox.get(box.id, server=kept.server).exec("true").ok
    assert kept.live() == set()


def test_errors_cross_the_wire_whole(kept):
    with cloche.Sandbox(server=kept.server) as box:
        with pytest.raises(cloche.InvalidInput) as caught:
            box.exec("true", cwd="/nowhere")
        assert caught.value.code == "cwd_not_found"
        assert caught.value.hint
        with pytest.raises(cloche.CommandFailed) as failed:
            box.exec("exit 9", check=True)
        assert failed.value.result.exit_code == 9
        with pytest.raises(cloche.NotFound):
            box.files.read("nothing")
        with pytest.raises(cloche.NotFound):
            list(box.files.read("nothing", format="stream"))
    assert code_of(lambda: cloche.Sandbox(server=kept.server, profile="lax")) == "profile_unknown"


def test_calls_of_one_connection_run_beside_each_other(kept):
    with cloche.Sandbox(server=kept.server) as box:
        events = box.exec_stream("echo on; until [ -e go ]; do sleep 0.02; done; echo off")
        first = next(events)
        assert isinstance(first, cloche.Output)
        box.files.write("go", "")
        assert [e.data for e in events if isinstance(e, cloche.Output)] == [b"off\n"]


def test_a_stream_left_early_is_cancelled_there(kept, until):
    with cloche.Sandbox(server=kept.server) as box:
        for event in box.exec_stream("echo on; sleep 1000"):
            assert isinstance(event, cloche.Output)
            break
        until(lambda: not any(p.running for p in box.processes.list()))


def test_a_caller_that_gives_up_kills_its_command(kept, until):
    async def scenario():
        async with cloche.AsyncSandbox(server=kept.server) as box:
            task = asyncio.ensure_future(box.exec("sleep 1000"))
            while not await box.processes.list():
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while any(p.running for p in await box.processes.list()):
                pass

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_long_output_passes(kept):
    with cloche.Sandbox(server=kept.server) as box:
        total = sum(
            len(e.data)
            for e in box.exec_stream(["head", "-c", "50000000", "/dev/zero"])
            if isinstance(e, cloche.Output)
        )
    assert total == 50_000_000


# ── who ends with whom ─────────────────────────────────────────────────────────────────────────────


def test_a_sandbox_ends_with_its_connection_unless_it_stays(kept, until):
    client = kept.connect()
    mortal = portal.run(client.create(engines.spec_from({}))).id
    staying = portal.run(client.create(engines.spec_from({"stay": True, "name": "staying"}))).id
    execution = portal.run(
        client.start(staying, model.ExecRequest(command="until [ -e go ]; do sleep 0.02; done; echo done"))
    )
    assert kept.live() == {mortal, staying}
    portal.run(client.aclose())
    until(lambda: mortal not in kept.live())
    box = cloche.Sandbox.get("staying", server=kept.server)
    assert box.id == staying
    process = box.processes.get(execution.id)  # nobody killed it
    box.files.write("go", "")
    assert process.wait().stdout == "done\n"
    box.delete()


def test_a_sandbox_ends_with_a_killed_client(kept, until):
    program = (
        "import sys, cloche; box = cloche.Sandbox(server=sys.argv[1]); print(box.id, flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    client = subprocess.Popen(
        [sys.executable, "-c", program, kept.server],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with client:
        assert client.stdout is not None
        made = client.stdout.readline().strip()
        assert made in kept.live()
        client.kill()
        client.wait()
    until(lambda: made not in kept.live())


def test_a_terminated_keeper_ends_everything_and_its_clients_are_told(kept):
    box = cloche.Sandbox(server=kept.server)
    process = box.start("cat")
    assert kept.stop() == 0
    assert not kept.path.exists()
    for act in (lambda: box.exec("true"), process.wait):
        assert code_of(act) == "connection_lost"
    assert code_of(lambda: cloche.Sandbox(server=kept.server)) == "server_unavailable"


def test_a_warm_sandbox_is_used_once(kept):
    for _ in range(4):
        with cloche.Sandbox(server=kept.server) as box:
            assert box.exec("ls -A /workspace /tmp").stdout.split() == ["/tmp:", "/workspace:"]
            box.exec("touch /workspace/mine /tmp/mine", check=True)


def test_nobody_there_and_nothing_to_keep_it_leaves(make_kept, until):
    kept = make_kept(settings="[keeper]\nidle_exit_s = 0.3\n")
    client = kept.connect()
    staying = portal.run(client.create(engines.spec_from({"stay": True}))).id
    portal.run(client.aclose())
    again = kept.connect()  # a sandbox that stays kept it
    assert [info.id for info in portal.run(again.list())] == [staying]
    portal.run(again.delete(staying))
    portal.run(again.aclose())
    assert kept.process.wait(20) == 0
    assert not kept.path.exists()


def test_the_unnamed_socket_is_found(kept, monkeypatch):
    monkeypatch.setenv("CLOCHE_HOME", str(kept.path.parent))
    with cloche.Sandbox() as box:
        assert box.info().server == kept.server
