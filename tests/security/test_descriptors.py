"""No descriptor of the caller, of the engine or of another sandbox is open in a command."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.security import glass

_LOOK = """
found = {}
for name in os.listdir("/proc/self/fd"):
    target = tried(lambda: os.readlink(f"/proc/self/fd/{name}"))
    if target is not None and not target.endswith("/fd"):
        found[name] = target
say(found)
"""

STARTS = ("exec", "merge", "stdin", "long-line", "pty", "root", "env")


def _descriptors(box: glass.Box, how: str) -> dict[str, str]:
    command = ["python3", "-I", "-c", glass.PRELUDE + _LOOK]
    variants: dict[str, dict[str, Any]] = {
        "merge": {"merge": True},
        "stdin": {"stdin": b"x" * 100_000},
        "root": {"user": "root"},
        "env": {"env": {"A": "1"}},
    }
    options = variants.get(how, {})
    if how == "pty":
        said = glass.wait(glass.wait(box.handle.start(command, pty=True)).wait()).stdout
    elif how == "long-line":
        box.write("/tmp/look.py", glass.PRELUDE + _LOOK)
        said = box.out("python3 -I /tmp/look.py #" + "x" * 150_000)
    else:
        said = box.out(command, **options)
    return json.loads(said)


@pytest.mark.parametrize(
    "how", [pytest.param(h, marks=glass.needs_range) if h == "root" else h for h in STARTS]
)
@glass.profiles
def test_a_command_has_only_its_streams(boxes: dict[str, glass.Box], profile: str, how: str) -> None:
    if (profile, how) == ("restrictive", "root"):
        how = "exec"
    found = _descriptors(boxes[profile], how)
    extra = {fd: target for fd, target in found.items() if fd not in ("0", "1", "2")}
    if how == "long-line":  # the line itself, which the shell reads
        extra = {fd: target for fd, target in extra.items() if "memfd:line" not in target}
    assert extra == {}
    assert {"0", "1", "2"} <= set(found)


@pytest.mark.parametrize("inheritable", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory", "listener", "connection", "pipe"])
def test_descriptors_of_the_caller_do_not_enter(canary: glass.Canary, kind: str, inheritable: bool) -> None:
    """Open before the sandbox is made, with and without close-on-exec, at every number up to a few hundred."""
    opened = _open(kind, canary)
    for fd in opened:
        os.set_inheritable(fd, inheritable)
    try:
        with glass.box() as box:
            found = box.report(_LOOK)
            text = box.report(
                """
said = []
for fd in range(3, 1024):
    said += [tried(lambda: os.read(fd, 100)), tried(lambda: os.pread(fd, 100, 0)), tried(lambda: os.listdir(fd)),
             tried(lambda: open(os.open(sys.argv[1], 0, dir_fd=fd)).read()), tried(lambda: os.write(fd, b"x"))]
say([repr(s) for s in said if s is not None])
""",
                os.path.basename(canary.path),
            )
        assert set(found) == {"0", "1", "2"}
        assert text == []
        assert canary.is_untouched()
    finally:
        for fd in opened:
            os.close(fd)


def _open(kind: str, canary: glass.Canary) -> list[int]:
    if kind == "file":
        return [os.open(canary.path, os.O_RDWR) for _ in range(100)]
    if kind == "directory":
        return [os.open(os.path.dirname(canary.path), os.O_RDONLY) for _ in range(10)]
    if kind == "listener":
        with socket.socket() as made:
            made.bind(("127.0.0.1", 0))
            made.listen()
            return [made.detach()]
    if kind == "pipe":
        return list(os.pipe())
    one, other = socket.socketpair()
    return [one.detach(), other.detach()]


_SPAWN = """
import os, sys
canary = os.open(sys.argv[2], os.O_RDWR)
os.set_inheritable(canary, True)
os.dup2(canary, 250, inheritable=True)
os.environ["CLOCHE_HOME"], os.environ["CLOCHE_KEEPER"] = sys.argv[1], "off"
from cloche.sdk import portal
from cloche.sdk.sandboxes import AsyncSandbox
box = portal.run(AsyncSandbox.create())
held = []
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read()
        environment = open(f"/proc/{pid}/environ", "rb").read()
        links = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
        where = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        continue
    if b"cloche.drivers.launcher" in command:
        held += [link for link in links if link == sys.argv[2]]
        held += [where] if where == os.getcwd() else []
        held += ["environment"] if b"CLOCHE_HOME" in environment else []
print("held:", held)
portal.run(box.delete())
portal.get().close()
"""


def test_the_launcher_holds_nothing_of_the_caller(tmp_path: Path, canary: glass.Canary) -> None:
    """Neither inheritable descriptors, nor its working directory, nor its environment."""
    ran = subprocess.run(
        [sys.executable, "-c", _SPAWN, str(tmp_path / "state"), canary.path], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, close_fds=False,
    )  # fmt: skip
    assert ran.stdout == "held: []\n", ran.stderr


def test_the_link_to_the_engine_is_not_reachable(shared: glass.Box) -> None:
    """No socket of the agent can be opened, taken over or connected to by a command."""
    sockets = shared.report(
        """
found = []
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for fd in tried(lambda: os.listdir(f"/proc/{pid}/fd")) or []:
        target = tried(lambda: os.readlink(f"/proc/{pid}/fd/{fd}")) or ""
        if target.startswith("socket:"):
            found.append([pid, fd])
agent = call(434, 1, 0)
found += [n for n in range(64) if agent >= 0 and call(438, agent, n, 0) >= 0]
found += [line for line in open("/proc/net/unix").read().splitlines()[1:] if line.split()[-1].startswith(("@", "/"))]
say(found)
"""
    )
    assert sockets == []


def test_own_sockets_are_seen(shared: glass.Box) -> None:
    program = (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0own'); say('@own' in open('/proc/net/unix').read())"
    )
    assert shared.report(program) is True


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_caller_s_directory_is_not_the_command_s(
    tmp_path: Path, canary: glass.Canary, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "before":
        monkeypatch.chdir(tmp_path)
    with glass.box() as box:
        if where == "after":
            monkeypatch.chdir(tmp_path)
        result = box.exec(f"pwd; cat {os.path.basename(canary.path)}; ls -a . ..")
        assert canary.is_unknown_to(result.stdout)
        assert result.stdout.splitlines()[0] == "/workspace"


def test_descriptors_of_one_command_do_not_reach_the_next(box: glass.Box) -> None:
    holder = box.start(
        [
            "python3",
            "-I",
            "-c",
            glass.PRELUDE + "f = open('/tmp/held', 'w'); print('held', flush=True); signal.pause()",
        ]
    )
    glass.until(holder, b"held")
    assert set(box.report(_LOOK)) == {"0", "1", "2"}
    glass.wait(holder.kill())


def test_a_sandbox_leaves_no_descriptor_behind() -> None:
    """By count: forty sandboxes, and the engine holds no more than before."""
    with glass.box() as box:
        assert box.works()
    before = glass.open_descriptors()
    for _ in range(40):
        with glass.box() as box:
            box.exec("true")
    assert (
        glass.open_descriptors() < before + 80
    )  # a growing reserve of embryos is not a leak; one for each would be
