"""The bootstrap of bash contexts, run for real over a socket pair."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.guest import shells

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="shell contexts need bash")


class Shell:
    def __init__(self) -> None:
        self.channel, there = socket.socketpair()
        high = fcntl.fcntl(there.fileno(), fcntl.F_DUPFD_CLOEXEC, 20)
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{high} {high}<&-; exec "$@"', "bash", *shells.command()],
            pass_fds=[high],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        there.close()
        os.close(high)

    def send(self, code: str) -> None:
        self.channel.sendall(code.encode() + b"\0")

    def status(self) -> int | None:
        """The status of the run, or None if the shell has ended."""
        text = b""
        while not text.endswith(b"\0"):
            part = self.channel.recv(1)
            if not part:
                return None
            text += part
        return int(text[:-1])

    def output(self) -> str:
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 65536).decode()

    def run(self, code: str) -> int | None:
        self.send(code)
        return self.status()

    def text(self, code: str) -> str:
        """What a run that succeeds prints."""
        assert self.run(code) == 0
        return self.output()

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def shell() -> Iterator[Shell]:
    shell = Shell()
    yield shell
    shell.close()


def test_state_is_kept(shell: Shell, tmp_path: Path) -> None:
    shell.run(f"cd {tmp_path}; x='a  b'; f() {{ echo \"f $1\"; }}; export E=env")
    assert shell.text('pwd; echo "$x"; f 1; printenv E') == f"{tmp_path}\na  b\nf 1\nenv\n"


def test_status_is_that_of_the_last_command(shell: Shell) -> None:
    assert [shell.run(code) for code in ("true", "false", "(exit 42)", "", "nowhere")] == [0, 1, 42, 0, 127]


def test_code_may_have_many_lines_and_quotes(shell: Shell) -> None:
    assert shell.text("cat <<'EOF'\n$x \"y\"\nEOF\nfor i in 1 2; do\n  echo $i\ndone") == '$x "y"\n1\n2\n'


def test_syntax_error_names_the_line_of_the_code(shell: Shell) -> None:
    assert shell.run("echo ok\nif then") == 2
    assert "line 2: syntax error" in shell.output()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("exit 3", 3),
        ("g() { exit 4; }; g", 4),
        ("set -e; false; echo never", 1),
        ("set -u; echo $nowhere; echo never", 127),
        ("set -eu; echo $nowhere; echo never", 1),
        ("echo ${nowhere:?gone}", 127),
        ("break; echo never", 0),
        ("continue; echo never", 0),
        ("kill -INT $$; echo never", shells.INTERRUPTED),
    ],
)
def test_only_the_run_ends(shell: Shell, code: str, status: int) -> None:
    shell.run(
        "x=kept; a=(1 '2 3'); declare -A m=([k]=v); f() { echo \"$x ${a[1]} ${m[k]}\"; }; cd /usr; trap 'echo t' USR1"
    )
    pid = shell.text("echo $$")
    for _ in range(2):
        assert shell.run(code) == status
    assert "never" not in shell.text("set +eu; echo --; f; pwd").partition("--")[0]
    assert shell.text("f; pwd; kill -USR1 $$; echo $$") == f"kept 2 3 v\n/usr\nt\n{pid}"


def test_options_survive_an_exit(shell: Shell) -> None:
    shell.run("set -eo pipefail; shopt -s extglob; shopt -s expand_aliases; alias hi='echo hi'")
    assert shell.run("exit 5") == 5
    assert shell.text("hi; [[ $- == *e* ]]; shopt -qo pipefail; shopt -q extglob") == "hi\n"


def test_interrupt_ends_the_run_only(shell: Shell) -> None:
    shell.run("x=kept")
    shell.send("sh -c 'echo started; exec sleep 600'; echo never")  # said by the child: there is one now
    assert shell.output() == "started\n"
    os.killpg(shell.process.pid, signal.SIGINT)
    assert shell.status() == shells.INTERRUPTED
    assert shell.text("echo $x") == "kept\n"
    shell.send("echo started; while :; do :; done")
    assert shell.output() == "started\n"
    os.killpg(shell.process.pid, signal.SIGINT)
    assert shell.status() == shells.INTERRUPTED
    assert shell.text("echo $x") == "kept\n"


def test_interrupt_while_idle_is_ignored(shell: Shell) -> None:
    assert shell.run("true") == 0
    os.killpg(shell.process.pid, signal.SIGINT)
    assert shell.text("echo still") == "still\n"


def test_commands_do_not_inherit_the_channel(shell: Shell) -> None:
    assert shell.text("ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3 is the directory that ls reads
    shell.run("exit 1")
    assert shell.text("ls /proc/self/fd").split() == ["0", "1", "2", "3"]


def test_trace_hides_the_loop(shell: Shell) -> None:
    shell.run("set -x")
    assert shell.text("echo hi") == "+ eval 'echo hi'\n++ echo hi\nhi\n"


@pytest.mark.parametrize("code", ["exec true", "trap 'true' EXIT; exit 0", "kill -KILL $$"])
def test_end_of_the_shell_is_the_end_of_the_channel(shell: Shell, code: str) -> None:
    assert shell.run(code) is None


def test_shell_ends_with_its_host(shell: Shell) -> None:
    shell.run("true")
    shell.channel.close()
    assert shell.process.wait() == 0
