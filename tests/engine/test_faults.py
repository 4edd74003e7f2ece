"""SIGKILL of any or all of our processes, at any point: what ran inside is gone by the kernel's own means, and the next
start removes what has a name on the host (cgroups, files)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cloche import wiring
from cloche.linux import cgroups, processes

ROUNDS = int(os.environ.get("CLOCHE_FAULT_ROUNDS", "12"))

# An engine with three busy sandboxes, one of them paused where the host can pause; then it waits to be killed.
VICTIM = """
import asyncio, os, sys
from cloche import model, wiring

async def main():
    engine = wiring.make_engine(os.environ)
    for number in range(3):
        made = await engine.create(model.SandboxSpec(timeout_s=None))
        for line in (f"exec -a {sys.argv[1]} sleep 1000", f"setsid -f bash -c 'exec -a {sys.argv[1]} sleep 1000'"):
            await engine.start(made.id, model.ExecRequest(command=line))
        both = f"until [ $(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\\\0' '\\\\n' | grep -c ^{sys.argv[1]}) -ge 2 ]; do :; done"
        await engine.exec(made.id, model.ExecRequest(command=both))
        print("made", number, flush=True)
    try:
        await engine.suspend(made.id)
    except Exception:
        pass
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

# The same with many, and all of them paused.
SLEEPERS = """
import asyncio, os, sys
from cloche import model, wiring

async def main():
    engine = wiring.make_engine(os.environ)
    for number in range(50):
        made = await engine.create(model.SandboxSpec(timeout_s=None))
        await engine.start(made.id, model.ExecRequest(command=f"echo; exec -a {sys.argv[1]} sleep 1000"))
        await engine.exec(made.id, model.ExecRequest(command=f"until pgrep -f ^{sys.argv[1]}; do :; done"))
        await engine.suspend(made.id)
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class Victim:
    """An engine in a process of its own, with everything that it started."""

    def __init__(self, home: Path, marker: str, program: str = VICTIM) -> None:
        self.marker = marker
        environment = {**os.environ, "CLOCHE_HOME": str(home), "CLOCHE_KEEPER": "off"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, marker], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return

    def pids(self) -> dict[str, list[int]]:
        """Who is who: from a marked process the way up leads over its guest to the launcher, whose own parent is gone."""
        guests, launchers = set(), set()
        for pid in self._marked():
            line = [pid]
            while (above := self._parent(line[-1])) and _runs_launcher(above):
                line.append(above)
            if len(line) > 2:
                launchers.add(line[-1])
                guests.add(line[-2])
        return {"engine": [self.process.pid], "launcher": list(launchers), "guest": list(guests)}

    def _marked(self) -> list[int]:
        marked = []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdecimal() and Path(f"/proc/{name}/cmdline").read_bytes().startswith(
                    self.marker.encode() + b"\0"
                ):
                    marked.append(int(name))
        return marked

    @staticmethod
    def _parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    def watches(self) -> list[int]:
        """A pidfd of everything that was started from inside its sandboxes."""
        found = []
        for pid in self._marked():
            with suppress(ProcessLookupError):
                found.append(os.pidfd_open(pid))
        return found

    def finish(self) -> None:
        for pids in self.pids().values():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _runs_launcher(pid: int) -> bool:
    try:
        return b"launcher import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(victim: Victim, whom: list[str]) -> None:
    roles = victim.pids()
    for role in whom:
        for pid in roles[role]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def all_gone(watches: list[int]) -> bool:
    try:
        return all(processes.wait_exit(watch, 10) for watch in watches)
    finally:
        for watch in watches:
            os.close(watch)


def own_groups(pid: int) -> list[str]:
    return [group.name for group in cgroups.detect().sweep(f"cloche-{pid}-")]


def sweep(home: Path) -> None:
    async def run() -> None:
        engine = wiring.make_engine({**os.environ, "CLOCHE_HOME": str(home)})
        await engine.sweep()
        await engine.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    "whom", [["engine"], ["launcher"], ["engine", "launcher"], ["engine", "launcher", "guest"]], ids="+".join
)
def test_nothing_survives_sigkill(tmp_path: Path, whom: list[str]) -> None:
    victim = Victim(tmp_path, f"cloche-victim-{random.getrandbits(48):x}")
    try:
        victim.wait_for("ready")
        watches = victim.watches()
        assert len(watches) == 6
        kept = sorted(path.name for path in (tmp_path / "images").iterdir())
        kill(victim, whom)
        assert all_gone(watches)
        assert victim.watches() == []
    finally:
        victim.finish()
    sweep(tmp_path)
    assert own_groups(victim.process.pid) == []
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == kept


def test_nothing_survives_of_fifty_that_stand_still(tmp_path: Path) -> None:
    victim = Victim(tmp_path, f"cloche-victim-{random.getrandbits(48):x}", SLEEPERS)
    try:
        victim.wait_for("ready")
        watches = victim.watches()
        assert len(watches) == 50
        kill(victim, ["engine", "launcher"])
        assert all_gone(watches)
        assert victim.watches() == []
    finally:
        victim.finish()
    sweep(tmp_path)
    assert own_groups(victim.process.pid) == []


@pytest.mark.skipif(not os.path.isdir("/sys/fs/cgroup/freezer"), reason="no freezer of version 1 here")
@pytest.mark.skipif(os.geteuid() != 0, reason="groups of version 1 are root's")
@pytest.mark.parametrize("whom", [["engine"], ["engine", "launcher"]], ids="+".join)
def test_what_the_first_freezer_froze_is_thawed(tmp_path: Path, whom: list[str]) -> None:
    """By the launcher when its engine is gone, by the next sweep when the launcher is too."""
    only_first = "from cloche.linux import cgroups\ncgroups._version_2 = lambda *_: cgroups.Controller('unified', reason='hidden by this test')\n"
    victim = Victim(tmp_path, f"cloche-victim-{random.getrandbits(48):x}", only_first + VICTIM)
    try:
        victim.wait_for("ready")
        watches = victim.watches()
        assert len(watches) == 6
        kill(victim, whom)
        victim.process.wait()
        if "launcher" in whom:
            sweep(tmp_path)
        assert all_gone(watches)
    finally:
        victim.finish()
    sweep(tmp_path)
    assert own_groups(victim.process.pid) == []


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_kill_at_any_moment_of_making_leaves_nothing(tmp_path: Path, seed: int) -> None:
    """The moment is chosen by what the victim has said so far and by a bounded number of scheduler turns after it."""
    dice = random.Random(seed)
    victim = Victim(tmp_path, f"cloche-victim-{random.getrandbits(48):x}")
    try:
        victim.wait_for(dice.choice(["made 0", "made 1", "made 2", "ready"]))
        for _ in range(dice.randrange(2000)):
            os.sched_yield()
        watches = victim.watches()
        kill(victim, dice.choice([["engine"], ["launcher"], ["guest"], ["engine", "launcher", "guest"]]))
        kill(victim, ["engine"])
        assert all_gone(watches)
        victim.process.wait()
        late = victim.watches()  # what was being started while we looked
        assert all_gone(late)
    finally:
        victim.finish()
    sweep(tmp_path)
    assert own_groups(victim.process.pid) == []


def test_a_surviving_launcher_removes_the_groups_of_its_engine(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    victim = Victim(tmp_path, f"cloche-victim-{random.getrandbits(48):x}")
    try:
        victim.wait_for("ready")
        if not own_groups(victim.process.pid):
            pytest.skip("this host gives no cgroup")
        kill(victim, ["engine"])
        victim.process.wait()
        until(lambda: own_groups(victim.process.pid) == [])
    finally:
        victim.finish()


def test_one_guest_s_death_is_told_and_its_neighbours_go_on(tmp_path: Path) -> None:
    from cloche import errors, model

    async def run() -> None:
        engine = wiring.make_engine({**os.environ, "CLOCHE_HOME": str(tmp_path)})
        one, two = [await engine.create(model.SandboxSpec()) for _ in range(2)]
        machine = engine._sandboxes[one.id].machine
        os.kill(machine.host_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        await machine.ended
        with pytest.raises(errors.SandboxLost):
            await engine.exec(one.id, model.ExecRequest(command="true"))
        assert (await engine.exec(two.id, model.ExecRequest(command="echo on"))).stdout == "on\n"
        await engine.aclose()

    asyncio.run(run())
