"""What every test gets: a state directory of its own, no keeper, and an inspection at the end.

The inspection is a test of the product: after the session no process, control group, mount or loop device of it may be
left. What belongs to this session is known by name (groups carry our pid), by place (mounts and disks below our state
directory) and by descent: this process adopts the orphans of its children, so a process that got away is still ours.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from cloche.linux import cgroups, processes
from cloche.sdk import portal
from cloche.testing import plugin

# A judgement is the same every time: examples are drawn from the test's own text. CLOCHE_EXPLORE=1 draws others.
hypothesis.settings.register_profile("judge", derandomize=not os.environ.get("CLOCHE_EXPLORE"))
hypothesis.settings.load_profile("judge")

_PRIVATE = ("CLOCHE_URL", "CLOCHE_API_KEY", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def pytest_configure(config: pytest.Config) -> None:
    # Under the name of its entry point: where the package is installed, pytest has loaded it already.
    if not config.pluginmanager.has_plugin("cloche"):
        config.pluginmanager.register(plugin, "cloche")


@pytest.fixture(scope="session", autouse=True)
def cloche_home() -> Iterator[Path]:
    """The state directory of this session; short, because a socket's path must be."""
    home = Path(tempfile.mkdtemp(prefix="cl-"))
    before = dict(os.environ)
    for name in _PRIVATE:
        os.environ.pop(name, None)
    os.environ.update(CLOCHE_HOME=str(home / "s"), CLOCHE_KEEPER="off", XDG_CONFIG_HOME=str(home / "c"))
    processes.become_subreaper()
    try:
        yield home / "s"
        portal.close()
        _until(lambda: not _left_behind(home), must=False)  # the kernel may be a moment late in letting go
        left = _left_behind(home)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(home, ignore_errors=True)
    assert left == [], "the session left something behind"


@pytest.fixture(autouse=True)
def reaped(cloche_home: Path) -> Iterator[None]:
    """Reap the launchers that this process has adopted, as init does elsewhere; nobody else's children are touched."""
    yield
    for pid in processes.descendants(os.getpid()):
        try:
            ended = Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
            if ended and Path(f"/proc/{pid}/comm").read_text() == "cloche-launcher\n":
                os.waitpid(pid, os.WNOHANG)
        except (OSError, IndexError):
            continue


Until = Callable[..., None]


def _until(condition: Callable[[], object], *, must: bool = True) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            assert not must, "what was waited for did not come"
            return
        time.sleep(0.01)


@pytest.fixture
def until() -> Until:
    """Wait for a state, never for a time: `until(lambda: not box.processes.list()[0].running)`."""
    return _until


def _left_behind(home: Path) -> list[str]:
    return [*_processes(), *_groups(), *_mounts(home), *_loops(home)]


def _processes() -> list[str]:
    """Our descendants that still run. Ended ones wait for a parent that went away; that is us, so they are reaped."""
    left = []
    for pid in processes.descendants(os.getpid()):
        try:
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                continue
        except ChildProcessError:
            pass  # somebody else's child, further down
        command = Path(f"/proc/{pid}/cmdline")
        try:
            words = command.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        if words:  # a zombie has none
            left.append(f"process {pid}: {words[:200]}")
    return left


def _groups() -> list[str]:
    own = f"cloche-{os.getpid()}-"
    return [
        f"control group {group.name}"
        for group in cgroups.detect().sweep("cloche-")
        if group.name.startswith(own)
    ]


def _mounts(home: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [f"mount {line}" for line in lines if str(home) in line]


def _loops(home: Path) -> list[str]:
    left = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = file.read_text().strip()
        except OSError:
            continue  # detached meanwhile
        if str(home) in backing:
            left.append(f"loop device {file.parent.parent.name}: {backing}")
    return left
