"""The keeper seen from the command line: when it starts, who uses it, what happens when it or its client dies."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from cloche import framing

STAYS = "echo ready; exec sleep 1000"


def test_no_keeper_is_started_in_ci_or_when_it_is_off(bare):
    for env in ({"CLOCHE_KEEPER": "off"}, {"CLOCHE_KEEPER": "", "CI": "true"}):
        assert bare("run", "--", "true", env=env).returncode == 0
        assert bare.keeper_pid() is None
        assert not (bare.state / "lock").exists()


def test_no_keeper_is_started_where_the_settings_say_so(bare):
    bare.settings("[keeper]\nstart = false\n")
    assert bare("run", "--", "true", env={"CLOCHE_KEEPER": ""}).returncode == 0
    assert not (bare.state / "lock").exists()


def test_the_first_run_leaves_a_keeper_behind_and_the_next_one_uses_it(bare, until):
    first = bare("run", "--", "echo", "one", env={"CLOCHE_KEEPER": "on"})
    assert (first.returncode, first.stdout, first.stderr) == (0, b"one\n", b"")
    until(lambda: bare.socket.exists() and bare.keeper_pid())
    pid = bare.keeper_pid()
    assert os.getsid(pid) == pid, "it left our session"
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)} == {"/dev/null"}
    assert os.readlink(f"/proc/{pid}/fd/2") == str(bare.state / "keeper.log")
    assert bare("run", "--", "echo", "two").stdout == b"two\n"
    seen = [json.loads(line) for line in bare("events", "--json").stdout.splitlines()]
    assert len({event["sandbox"] for event in seen if event["kind"] == "created"}) == 2
    assert bare.keeper_pid() == pid


def test_nothing_of_the_callers_environment_is_in_the_keeper(bare, until):
    bare("run", "--", "true", env={"CLOCHE_KEEPER": "on", "SECRET": "s3cret"})
    until(bare.keeper_pid)
    with open(f"/proc/{bare.keeper_pid()}/environ", "rb") as file:
        assert b"s3cret" not in file.read()


def test_an_idle_keeper_leaves_and_takes_its_socket_along(bare, until):
    bare.settings("[keeper]\nidle_exit_s = 0.2\n")
    keeper = bare.start_keeper()
    assert bare("run", "--", "true").returncode == 0
    assert keeper.wait(50) == 0
    assert not bare.socket.exists()
    assert bare("run", "--", "echo", "again").stdout == b"again\n"


def test_a_keeper_with_a_sandbox_does_not_leave(bare):
    bare.settings("[keeper]\nidle_exit_s = 0.5\n")
    name = bare("create").stdout.decode().strip()
    watch = os.pidfd_open(bare.keeper_pid())
    assert select.select([watch], [], [], 1.2)[0] == [], "it left a sandbox behind"
    assert bare("delete", name).returncode == 0
    assert select.select([watch], [], [], 50)[0] == [watch]
    os.close(watch)


def test_there_is_one_keeper_per_state_directory(kept):
    second = subprocess.run(
        [*kept.argv()[:3], "from cloche.cli.keeper import main; main()"], env=kept.environment, timeout=50,
        capture_output=True,
    )  # fmt: skip
    assert (second.returncode, second.stdout, second.stderr) == (0, b"", b"")
    assert kept.keeper_pid() == kept.keeper.pid


def test_a_stale_socket_does_not_matter(bare):
    bare.state.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(bare.socket))
    assert bare("run", "--", "echo", "hi").stdout == b"hi\n"
    bare.start_keeper()
    assert bare("run", "--", "echo", "hi").stdout == b"hi\n"


def test_two_clients_at_once(kept):
    first, second = (kept.start("run", "--", "sh", "-c", f"echo ready; read x; echo {n} $x") for n in (1, 2))
    for process in (first, second):
        assert process.stdout.readline() == b"ready\n"
    for process, word in ((second, b"b"), (first, b"a")):
        process.stdin.write(word + b"\n")
        process.stdin.flush()
    assert (first.stdout.read(), second.stdout.read()) == (b"1 a\n", b"2 b\n")
    assert (first.wait(50), second.wait(50)) == (0, 0)


def test_a_keeper_that_dies_is_told_and_is_our_failure(kept):
    process = kept.start("run", "--", "sh", "-c", STAYS)
    assert process.stdout.readline() == b"ready\n"
    kept.keeper.kill()
    assert process.wait(50) == 125
    assert b"the keeper ended while the command ran" in process.stderr.read()
    assert kept("run", "--", "echo", "on").stdout == b"on\n"


def test_a_client_that_dies_takes_its_sandbox_along(kept, until):
    process = kept.start("run", "--", "sh", "-c", STAYS)
    assert process.stdout.readline() == b"ready\n"
    assert len(json.loads(kept("list", "--json").stdout)) == 1
    process.kill()
    until(lambda: json.loads(kept("list", "--json").stdout) == [])


def test_a_kept_sandbox_outlives_its_command_and_its_client(kept):
    ran = kept("run", "--keep", "--name", "stays", "--", "sh", "-c", "echo x > file")
    assert ran.returncode == 0
    assert ran.stderr.startswith(b"cloche: kept: ")
    assert kept("exec", "stays", "--", "cat", "file").stdout == b"x\n"
    process = kept.start("run", "--keep", "--name", "too", "--", "sh", "-c", STAYS)
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait(50)
    assert kept("exec", "too", "--", "echo", "there").stdout == b"there\n"
    assert kept("delete", "stays", "too").returncode == 0


def test_keep_starts_a_keeper_even_where_none_starts_by_itself(bare):
    ran = bare("run", "--keep", "--json", "--", "true")
    assert bare.keeper_pid() is not None
    assert json.loads(bare("list", "--json").stdout)[0]["id"] == json.loads(ran.stdout)["sandbox"]


def test_a_keeper_of_another_version_is_replaced(bare, until):
    keeper = bare.start_keeper(version="0.0.1")
    ran = bare("run", "--", "echo", "hi", env={"CLOCHE_KEEPER": "on"})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"hi\n", b"")
    assert keeper.wait(50) == 0
    until(lambda: bare.keeper_pid() not in (None, keeper.pid))


def test_a_keeper_of_another_version_with_sandboxes_is_left_alone_and_that_is_said(bare):
    keeper = bare.start_keeper(version="0.0.1")
    _create_as(bare, version="0.0.1")
    ran = bare("run", "--", "echo", "hi", env={"CLOCHE_KEEPER": "on"})
    assert (ran.returncode, ran.stdout) == (0, b"hi\n")
    assert b"is of version 0.0.1, protocol 1 and has 1 live sandboxes; working without it" in ran.stderr
    assert keeper.poll() is None
    named = bare("run", "--", "true", env={"CLOCHE_URL": f"unix:{bare.socket}"})
    assert (named.returncode, b"the server is of version 0.0.1" in named.stderr) == (125, True)


def _create_as(cloche, version):
    call = {
        "method": "create",
        "protocol": framing.PROTOCOL,
        "version": version,
        "arguments": {"spec": {"stay": True}},
    }
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(cloche.socket))
        link.sendall(framing.pack(framing.CALL, 1, json.dumps(call).encode()))
        reader = framing.Reader()
        while not (frames := reader.feed(link.recv(65536))):
            pass
    assert frames[0][0] == framing.RESULT, frames


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another uid")
def test_a_socket_of_another_user_is_not_trusted(bare):
    bare.state.mkdir(mode=0o755)
    bare.home.chmod(0o755)
    bare.state.chmod(0o777)
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.bind({str(bare.socket)!r}); os.chmod({str(bare.socket)!r}, 0o777); s.listen(); print('up', flush=True)\n"
        "c, _ = s.accept(); print(len(c.recv(1 << 16)), flush=True)"
    )
    impostor = subprocess.Popen([_python(), "-I", "-c", program], stdout=subprocess.PIPE)
    assert impostor.stdout is not None
    try:
        assert impostor.stdout.readline() == b"up\n"
        bare.state.chmod(0o700)
        assert bare("run", "--", "echo", "hi").stdout == b"hi\n"
        assert impostor.stdout.readline() == b"0\n", "it was told something"
    finally:
        impostor.kill()
        impostor.wait(50)
        impostor.stdout.close()


def _python():
    import sys

    return sys.executable


def test_a_named_server_is_used(kept):
    elsewhere = {"CLOCHE_URL": f"unix:{kept.socket}", "CLOCHE_HOME": str(kept.home / "other")}
    assert kept("run", "--", "echo", "hi", env=elsewhere).stdout == b"hi\n"
    assert not (kept.home / "other").exists()


def test_a_run_may_outlast_the_life_of_sandboxes(bare):
    bare.settings("[defaults]\ntimeout_s = 0.2\n")
    bare.start_keeper()
    began = time.monotonic()
    ran = bare("run", "--", "sh", "-c", "sleep 0.6; echo lived")
    assert ran.stdout == b"lived\n"
    assert time.monotonic() - began > 0.5


def test_settings_reach_a_run_through_the_keeper(cloche_with_settings):
    found = json.loads(cloche_with_settings("run", "--json", "--", "true").stdout)
    assert found["isolation"]["root"] == "read-only"


@pytest.fixture(params=["in process", "keeper"])
def cloche_with_settings(bare, request):
    bare.settings('[defaults]\nprofile = "restrictive"\n')
    if request.param == "keeper":
        bare.start_keeper()
    return bare


def test_a_terminated_keeper_ends_what_it_kept(kept):
    assert kept("create", "--name", "one").returncode == 0
    kept.keeper.send_signal(signal.SIGTERM)
    assert kept.keeper.wait(50) == 0
    assert not kept.socket.exists()
    assert json.loads(kept("list", "--json").stdout) == []


def test_an_engine_in_the_client_ends_with_it(bare, until):
    mark = f"98765.{random.getrandbits(40)}"
    process = bare.start("run", "--", "sh", "-c", f"echo ready; exec sleep {mark}")
    assert process.stdout.readline() == b"ready\n"
    until(lambda: [words for words in _command_lines() if words[:1] == [b"sleep"] and mark.encode() in words])
    process.kill()
    until(lambda: not [words for words in _command_lines() if mark.encode() in words])


def _command_lines():
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield entry.read_bytes().split(b"\0")
        except OSError:
            continue
