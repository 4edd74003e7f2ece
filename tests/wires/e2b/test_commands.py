"""Commands and terminals through E2B's SDK."""

import json
import struct

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import Client, Raised

pytestmark = pytest.mark.timeout(900)


def running(http: httpx.Client, sandbox: str) -> list[str]:
    found = http.get(f"/v1/sandboxes/{sandbox}/executions").raise_for_status().json()["executions"]
    return [one["command"] for one in found if one["running"]]


def test_run_gives_both_streams_and_the_code(program: Client, box: str) -> None:
    told = program("""
        r = box.commands.run("echo out; echo err >&2; echo $A $USER; pwd", envs={"A": "1"}, cwd="/tmp")
        answer = [r.stdout, r.stderr, r.exit_code]
    """)
    assert told == ["out\n1 user\n/tmp\n", "err\n", 0]
    assert program("answer = box.commands.run('pwd').stdout") == "/home/user\n"


def test_a_failing_command_and_one_that_cannot_start(program: Client, box: str) -> None:
    with pytest.raises(Raised) as failed:
        program("box.commands.run('echo why >&2; exit 3')")
    assert failed.value.name == "CommandExitException"
    with pytest.raises(Raised) as nowhere:
        program("box.commands.run('true', cwd='/no/such/place')")
    assert nowhere.value.name == "InvalidArgumentException"
    with pytest.raises(Raised) as nobody:
        program("box.commands.run('true', user='mallory')")
    assert nobody.value.name == "AuthenticationException"


def test_output_comes_while_the_command_runs(program: Client, box: str) -> None:
    told = program("""
        h = box.commands.run("echo first; while [ ! -e go ]; do sleep 0.05; done; echo second", background=True)
        seen = []
        for out, err, pty in h:
            seen.append(out)
            if "first" in out:
                box.files.write("go", "")
        answer = "".join(seen)
    """)
    assert told == "first\nsecond\n"


def test_input_is_sent_and_ended(program: Client, box: str, http: httpx.Client) -> None:
    program("h = box.commands.run('cat', background=True, stdin=True)")
    assert any("cat" in command for command in running(http, box))
    assert program("answer = [p.args for p in box.commands.list()]") == [["-l", "-c", "cat"]]
    told = program(
        "box.commands.send_stdin(h.pid, 'typed\\n'); box.commands.close_stdin(h.pid); answer = h.wait().stdout"
    )
    assert told == "typed\n"
    assert running(http, box) == []


def test_input_as_a_stream(program: Client, box: str) -> None:
    told = program("""
        h = box.commands.run('cat', background=True, stdin=True)
        box.commands.stream_input(h.pid, iter([b"one\\n", b"two\\n"])) if hasattr(box.commands, "stream_input") else None
        box.commands.close_stdin(h.pid)
        answer = h.wait().stdout
    """)
    assert told == "one\ntwo\n"


def test_kill(program: Client, box: str, http: httpx.Client, until) -> None:
    program("h = box.commands.run('sleep 300', background=True)")
    assert running(http, box)
    assert program("answer = box.commands.kill(h.pid)") is True
    until(lambda: running(http, box) == [])
    assert program("answer = box.commands.kill(h.pid)") is False
    with pytest.raises(Raised) as ended:
        program("h.wait()")
    assert "137" in ended.value.words


def test_a_command_outlives_its_client_and_can_be_joined(
    program: Client, box: str, http: httpx.Client
) -> None:
    program(
        "h = box.commands.run('while [ ! -e go ]; do sleep 0.05; done; echo done', background=True)\npid = h.pid; h.disconnect()"
    )
    assert running(http, box)
    told = program("""
        again = box.commands.connect(pid)
        box.files.write("go", "")
        answer = again.wait().stdout
    """)
    assert told == "done\n"
    assert program("answer = box.commands.connect(pid).wait().exit_code") == 0  # ended, and still told
    with pytest.raises(Raised) as nobody:
        program("box.commands.connect(99999)")
    assert nobody.value.name == "NotFoundException"


def test_a_terminal(program: Client, box: str) -> None:
    told = program("""
        from e2b import PtySize
        shown = []
        t = box.pty.create(PtySize(rows=30, cols=90))
        box.pty.resize(t.pid, PtySize(rows=41, cols=101))
        box.pty.send_stdin(t.pid, b"stty size; tty; exit 5\\n")
        try:
            t.wait(on_pty=shown.append)
        except e2b.CommandExitException as problem:
            code = problem.exit_code
        answer = [b"".join(shown).decode(), code]
    """)
    assert "41 101" in told[0]
    assert "/dev/pts/" in told[0]
    assert told[1] == 5
    assert program("t = box.pty.create(PtySize(rows=30, cols=90)); answer = box.pty.kill(t.pid)") is True


def test_root_is_another_user(program: Client, box: str, http: httpx.Client) -> None:
    ours = http.post(f"/v1/sandboxes/{box}/exec", json={"command": "id -u", "user": "root"})
    if ours.status_code != 200:
        pytest.skip(f"no root inside here: {ours.json()['error']['message']}")
    assert program("answer = box.commands.run('id -u', user='root').stdout") == "0\n"


def test_git_comes_for_free(program: Client, box: str, http: httpx.Client) -> None:
    program(
        "box.git.init('repo'); box.files.write('repo/a', 'x'); box.git.add('repo'); box.git.configure_user('A', 'a@b.test', path='repo')"
    )
    program("box.git.commit('repo', 'first', author_name='A', author_email='a@b.test')")
    told = http.post(
        f"/v1/sandboxes/{box}/exec", json={"command": "git -C /home/user/repo log --format=%s"}
    ).json()
    assert told["stdout"] == "first\n"


def test_async_commands(program: Client, box: str) -> None:
    told = program("""
        async def main():
            other = await e2b.AsyncSandbox.connect(box.sandbox_id)
            results = await asyncio.gather(*(other.commands.run(f"echo {n}") for n in range(5)))
            return [r.stdout for r in results]
        answer = asyncio.run(main())
    """)
    assert told == [f"{n}\n" for n in range(5)]


def test_who_waits_is_told_that_nothing_is_broken(program: Client, box: str, served: server.Served) -> None:
    headers = {
        "E2b-Sandbox-Id": box, "X-Access-Token": program("answer = box._envd_access_token"), "Keepalive-Ping-Interval": "1",
        "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
    }  # fmt: skip
    message = json.dumps({"process": {"cmd": "/bin/sleep", "args": ["600"]}, "unknown": 1}).encode()
    body = struct.pack(">BI", 0, len(message)) + message
    seen: list[str] = []
    with (
        httpx.Client(base_url=served.url, trust_env=False, timeout=50) as client,
        client.stream("POST", "/process.Process/Start", content=body, headers=headers) as stream,
    ):
        buffer = b""
        for part in stream.iter_raw():
            buffer += part
            while len(buffer) >= 5 and len(buffer) >= 5 + int.from_bytes(buffer[1:5], "big"):
                size = 5 + int.from_bytes(buffer[1:5], "big")
                seen += list(json.loads(buffer[5:size])["event"])
                buffer = buffer[size:]
            if "keepalive" in seen:
                break
    assert seen[0] == "start"
    assert seen[-1] == "keepalive"
    assert program("answer = [box.commands.kill(p.pid) for p in box.commands.list()]") == [True]


def test_who_is_no_user_and_what_is_no_message(program: Client, box: str, served: server.Served) -> None:
    headers = {"E2b-Sandbox-Id": box, "X-Access-Token": program("answer = box._envd_access_token")}
    with httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=50) as client:
        stream = {"Content-Type": "application/connect+json"}
        for content, word in (
            (b"", "no message"),
            (b"\x00\x00\x00\x00\x05{}", "ends within"),
            (b"\x01\x00\x00\x00\x02{}", "compressed"),
            (b"\x00\x00\x00\x00\x02[]", "not an object"),
            (b"\x00\x7f\xff\xff\xff", "larger"),
            (b"\x00\x00\x00\x00\x02{}", "cmd"),
        ):
            answer = client.post("/process.Process/Start", content=content, headers=stream)
            assert (
                answer.status_code == 200
            )  # as the protocol has it: how a stream ended is in its last message
            assert answer.content[0] == 2
            assert word in json.loads(answer.content[5:])["error"]["message"]
        for content in (b"[]", b"{", b'{"process": 1}'):
            answer = client.post("/process.Process/SendSignal", content=content)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert program("answer = box.commands.list()") == []
