"""Cloche opens no connection of its own accord: every socket that it or its children make is watched by strace.

The twin: the same watch sees a command that does try to connect, so an empty list means something.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCES = str(Path(__file__).parents[2] / "src")
CLI = f"import sys; sys.path[:0] = [{SOURCES!r}]; sys.argv[0] = 'cloche'; from cloche.cli.thin import main; sys.exit(main())"
CALL = re.compile(r"\b(?:connect|sendto|sendmsg|sendmmsg)\((?P<arguments>.*)")
FAR = ("AF_INET", "AF_INET6", "AF_VSOCK", "AF_PACKET")
WRITE_ONLY_LOCAL = ("AF_UNIX", "AF_NETLINK")  # a netlink socket speaks to the kernel

pytestmark = [
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
    pytest.mark.timeout(120),
]


class Watch:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "CLOCHE_HOME": str(home / "s"),
            "XDG_CONFIG_HOME": str(home / "c"),
            "CLOCHE_KEEPER": "off",
        }
        self.count = 0

    def command(
        self, *argv: str, more: dict[str, str] | None = None
    ) -> tuple["subprocess.Popen[bytes]", Path]:
        self.count += 1
        log = self.home / f"trace-{self.count}"
        watched = [
            "strace",
            "-f",
            "-qq",
            "-s",
            "0",
            "-o",
            str(log),
            "-e",
            "trace=connect,sendto,sendmsg,sendmmsg",
            *argv,
        ]
        process = subprocess.Popen(
            watched,
            env={**self.environment, **(more or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        return process, log

    def cloche(
        self, *words: str, more: dict[str, str] | None = None
    ) -> tuple["subprocess.Popen[bytes]", Path]:
        return self.command(sys.executable, "-I", "-c", CLI, *words, more=more)

    def run(self, *words: str, more: dict[str, str] | None = None) -> list[str]:
        process, log = self.cloche(*words, more=more)
        out, said = process.communicate(timeout=100)
        assert process.returncode == 0, (words, out, said)
        return far(log)


def far(log: Path) -> list[str]:
    """The calls that named a place beyond this machine's own sockets."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        call = CALL.search(line)
        if call and any(f"sa_family={family}" in call["arguments"] for family in FAR):
            found.append(line)
    return found


@pytest.fixture
def watch() -> Iterator[Watch]:
    with tempfile.TemporaryDirectory(prefix="cs-", ignore_cleanup_errors=True) as home:
        yield Watch(Path(home))


def test_the_watch_sees_a_connection(watch: Watch) -> None:
    program = "import socket; s = socket.socket(); s.settimeout(5); s.connect_ex(('127.0.0.1', 9))"
    process, log = watch.command(sys.executable, "-I", "-c", program)
    assert process.wait(60) == 0
    assert far(log)
    process.communicate()


def test_a_run_connects_to_nothing(watch: Watch) -> None:
    assert watch.run("run", "--", "true") == []


def test_doctor_version_gc_and_audit_connect_to_nothing(watch: Watch) -> None:
    for words in (["version"], ["doctor"], ["gc"], ["audit", "verify"]):
        process, log = watch.cloche(*words)
        process.communicate(timeout=100)
        # `doctor` tries whether a namespace's own loopback works, in a namespace that has nothing else.
        assert [line for line in far(log) if 'inet_addr("127.' not in line] == [], words


def test_a_keeper_and_its_clients_connect_to_nothing(watch: Watch, until: Callable[..., None]) -> None:
    program = f"import sys; sys.path[:0] = [{SOURCES!r}]; from cloche.cli.keeper import main; main()"
    keeper, log = watch.command(sys.executable, "-I", "-c", program, "")
    try:
        until((watch.home / "s/cloche.sock").exists)
        assert watch.run("create", "--name", "box") == []
        assert watch.run("exec", "box", "--", "echo", "hi") == []
        assert watch.run("run", "--", "true") == []
        assert watch.run("list") == []
        assert watch.run("delete", "box") == []
        assert watch.run("gc", "--restart") == []
        keeper.communicate(timeout=60)
    finally:
        if keeper.poll() is None:
            keeper.send_signal(signal.SIGKILL)
            keeper.communicate()
    assert log.read_text() != ""
    assert far(log) == []


def test_a_program_with_the_sdk_connects_to_nothing(watch: Watch) -> None:
    program = f"import sys; sys.path[:0] = [{SOURCES!r}]; import cloche; print(cloche.run('echo hi').stdout)"
    process, log = watch.command(sys.executable, "-I", "-c", program)
    out, said = process.communicate(timeout=100)
    assert out.strip() == b"hi", said
    assert far(log) == []
