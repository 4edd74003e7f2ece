"""Suspension: what is refused, what a pause does to clocks and connections, the ladder, and archives that outlive engines.

Time is simulated where it decides. Engines of the test's own share a state directory, one after the other.
"""

import asyncio
import os
import subprocess
import sys
import time

import pytest

import cloche
from cloche import engine as engines
from cloche import model, settings, store, wiring, workspaces
from cloche.linux import cgroups, processes
from cloche.sdk import portal
from cloche.testing.clocks import FakeClock
from cloche.testing.fakes import FakeDriver, FakeMachine, Script


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    return caught.value.code


class Own:
    """An engine of the test's own; `owner` lets a later one find it dead."""

    def __init__(self, home, drivers=None, owner=None, clock=None):
        self.config = settings.Settings(home=str(home))
        settings.make_home(self.config.home)
        self.clock = clock or FakeClock()
        self.dead = owner is not None
        self.engine = self.do(self._make(drivers, owner))

    async def _make(self, drivers, owner):
        return engines.Engine(
            self.config,
            store.Store(self.config.state_path),
            wiring.drivers(self.config.home) if drivers is None else drivers,
            owner=owner or wiring.owner(),
            interpreters=wiring.interpreters(),
            workspaces=workspaces.LocalWorkspaces(self.config.home, os.environ),
            egress=lambda: wiring.egress(self.config),
            secrets=lambda: wiring.secrets(self.config),
            policies=settings.PolicyFiles(self.config, {"HOME": self.config.home}),
            clock=self.clock,
        )

    def do(self, work):
        return portal.run(work)

    def create(self, **fields):
        made = self.do(self.engine.create(engines.spec_from(fields))).id
        if self.dead:
            self.do(self._swept())  # its sweep takes its own drafts for a dead engine's
        return made

    async def _swept(self):
        await asyncio.gather(*self.engine._background)

    def run(self, sandbox, line):
        return self.do(self.engine.exec(sandbox, model.ExecRequest(command=line))).stdout

    def phase(self, sandbox):
        """As a list shows it, which takes nothing over."""
        return {info.id: info.phase for info in self.do(self.engine.list())}.get(sandbox)

    def pass_time(self, seconds):
        async def turn():
            self.engine._reaper.sweep_once()
            await asyncio.gather(*self.engine._background)

        self.clock.advance(seconds)
        self.do(turn())

    def close(self):
        self.do(self.engine.aclose())

    def events(self, sandbox):
        return [event["kind"] for event in self.do(self.engine.events(0, sandbox))]


class Make:
    """Engines of one state directory, one after the other or side by side."""

    def __init__(self, home):
        self.home = home
        self.made = []

    def __call__(self, **options):
        self.made.append(Own(self.home, **options))
        return self.made[-1]


@pytest.fixture
def make(cloche_home):
    make = Make(cloche_home / f"suspending-{os.urandom(3).hex()}")
    yield make
    for own in make.made:
        own.close()


def fakes():
    return [("fake", lambda: FakeDriver({"true": Script()}))]


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_modes_that_are_none(sandbox):
    assert code_of(lambda: sandbox.suspend("sleep")) == "argument_invalid"
    assert code_of(lambda: sandbox.suspend("hibernate")) == "not_supported_by_driver"
    assert sandbox.info().phase == "running"
    assert sandbox.exec("echo alive").stdout == "alive\n"


@pytest.mark.parametrize(("pause", "archive"), [(-1, None), (0, None), (None, -1), (10, 10), (10, 5)])
def test_ladders_that_lead_nowhere(pause, archive):
    assert code_of(lambda: cloche.Sandbox(pause_after_s=pause, archive_after_s=archive)) == "limit_invalid"


def test_a_workspace_is_in_no_archive(tmp_path, make_sandbox):
    box = make_sandbox(workspace=str(tmp_path))
    assert code_of(lambda: box.suspend("archive")) == "argument_invalid"
    assert box.info().phase == "running"


def test_an_archived_sandbox_has_no_memory_to_keep(make):
    own = make(drivers=fakes())
    box = own.create()
    own.do(own.engine.suspend(box, "archive"))
    assert code_of(lambda: own.do(own.engine.suspend(box, "pause"))) == "sandbox_stopped"
    assert own.phase(box) == "archived"


# ── what a pause does ──────────────────────────────────────────────────────────────────────────────

TIMER = """
import signal, time
fired = []
signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
started = time.monotonic(); signal.setitimer(signal.ITIMER_REAL, 0.3)
print("set", flush=True)
while not fired: signal.pause()
print("fired", flush=True)
"""
TALK = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0)); near = socket.create_connection(server.getsockname()); far = server.accept()[0]
near.sendall(b"before"); print("open", flush=True)
sys.stdin.readline()
near.sendall(b" after"); near.close()
print(b"".join(iter(lambda: far.recv(100), b"")).decode(), flush=True)
"""


def lines_of(process):
    for event in process.stream():
        if isinstance(event, cloche.Output):
            yield from event.data.decode().split()


def test_a_timer_that_came_due_meanwhile_fires_afterwards(sandbox):
    process = sandbox.start(["python3", "-c", TIMER])
    lines = lines_of(process)
    assert next(lines) == "set"
    sandbox.suspend()
    time.sleep(0.5)  # the very thing that is tested: time passes while it stands still
    assert sandbox.processes.list()[-1].running
    sandbox.resume()
    assert next(lines) == "fired"
    assert process.wait().ok


def test_monotonic_time_goes_on_while_it_stands_still(sandbox):
    sandbox.run_code("import time; before = time.monotonic()")
    sandbox.suspend()
    time.sleep(0.3)
    assert float(sandbox.run_code("time.monotonic() - before").text) >= 0.3


def test_a_connection_inside_survives(sandbox):
    process = sandbox.start(["python3", "-c", TALK])
    assert next(lines_of(process)) == "open"
    sandbox.suspend()
    assert sandbox.info().phase == "paused"
    process.write("on\n")  # bytes on a stream wake it
    assert process.wait().stdout == "open\nbefore after\n"
    assert sandbox.info().phase == "running"


@pytest.mark.parametrize(
    "need",
    [
        lambda box, _: box.exec("true"),
        lambda box, _: box.files.write("a", "x"),
        lambda box, _: box.files.list(),
        lambda box, _: box.run_code("1"),
        lambda _, process: process.signal(0o17),
        lambda _, process: process.kill(),
    ],
    ids=["exec", "write", "list", "run_code", "signal", "kill"],
)
def test_whatever_needs_it_wakes_it_and_looking_does_not(sandbox, need):
    process = sandbox.start("trap '' 15; sleep 1000")
    sandbox.suspend()
    sandbox.info()
    sandbox.events()
    sandbox.usage()
    sandbox.processes.list()
    sandbox.contexts.list()
    assert sandbox.info().phase == "paused"
    need(sandbox, process)
    assert sandbox.info().phase == "running"


FREEZER = os.path.isdir("/sys/fs/cgroup/freezer") and os.geteuid() == 0


@pytest.mark.skipif(not FREEZER, reason="no freezer of version 1 here")
def test_a_freezer_of_the_first_kind_is_thawed_before_any_kill(monkeypatch, make):
    """A task that cgroup v1 froze does not die on SIGKILL."""
    monkeypatch.setattr(cgroups, "_version_2", lambda *_: cgroups.Controller("unified", reason="not now"))
    own = make(clock=engines.SystemClock())
    box = own.create(timeout_s=60)
    own.run(box, "echo before > a")
    own.do(own.engine.start(box, model.ExecRequest(command="sleep 1000")))
    own.do(own.engine.suspend(box))
    group = own.engine._sandboxes[box].machine._group
    assert group._text("freezer", "freezer.state").strip() == "FROZEN"
    assert own.run(box, "cat a") == "before\n"
    own.do(own.engine.suspend(box))
    own.do(asyncio.wait_for(own.engine.delete(box), 10))
    assert own.phase(box) is None


def test_without_a_freezer_every_process_is_stopped(monkeypatch, make):
    monkeypatch.setattr(cgroups.Group, "freeze", lambda self, timeout_s=1.0: False)
    own = make(clock=engines.SystemClock())
    box = own.create(timeout_s=60)
    forks = "while :; do (:); done"
    started = [
        own.do(own.engine.start(box, model.ExecRequest(command=line))) for line in (forks, "sleep 1000")
    ]
    own.run(box, "kill -STOP $(pgrep -x sleep)")
    assert own.do(own.engine.suspend(box)).phase == "paused"
    machine = own.engine._sandboxes[box].machine
    tree = [machine.host_pid, *processes.descendants(machine.host_pid)]
    assert {processes.state(pid) for pid in tree} <= {"T", "Z"}
    assert own.run(box, "ps -o stat= -C sleep | cut -c1") == "T\n"  # who was stopped before stays so
    own.do(own.engine.suspend(box))
    own.do(asyncio.wait_for(own.engine.delete(box), 10))
    assert len(started) == 2


# ── the ladder ─────────────────────────────────────────────────────────────────────────────────────


def test_down_the_ladder_and_back_by_use(make):
    own = make()
    box = own.create(ladder={"pause_after_s": 10, "archive_after_s": 60}, timeout_s=None)
    assert own.run(box, "echo kept > a; cat a") == "kept\n"
    own.pass_time(9)
    assert own.phase(box) == "running"
    own.pass_time(2)
    assert own.phase(box) == "paused"
    own.pass_time(40)
    assert own.phase(box) == "paused"
    own.pass_time(20)
    assert own.phase(box) == "archived"
    assert own.run(box, "cat a") == "kept\n"
    assert own.phase(box) == "running"
    own.pass_time(11)
    assert own.phase(box) == "paused"
    assert [k for k in own.events(box) if k in ("paused", "archived", "resumed")] == [
        "paused", "archived", "resumed", "paused",
    ]  # fmt: skip


def test_who_runs_something_is_not_idle(make):
    own = make()
    box = own.create(ladder={"pause_after_s": 10})
    started = own.do(own.engine.start(box, model.ExecRequest(command="sleep 1000")))
    own.pass_time(100)
    assert own.phase(box) == "running"
    own.do(own.engine.signal(box, started.id, 9))
    own.do(own.engine.wait(box, started.id))
    own.pass_time(11)
    assert own.phase(box) == "paused"


def test_looking_is_no_use(make):
    own = make(drivers=fakes())
    box = own.create(ladder={"pause_after_s": 10})
    for _ in range(4):
        own.do(own.engine.info(box))
        own.do(own.engine.usage(box))
        own.pass_time(3)
    assert own.phase(box) == "paused"


def test_idleness_ends_what_the_ladder_paused_and_not_what_somebody_paused(make):
    own = make(drivers=fakes())
    by_ladder = own.create(ladder={"pause_after_s": 10}, idle_timeout_s=100, timeout_s=None)
    asked = own.create(ladder={"archive_after_s": 20}, idle_timeout_s=100, timeout_s=None)
    own.do(own.engine.suspend(asked))
    own.pass_time(50)
    assert (own.phase(by_ladder), own.phase(asked)) == ("paused", "paused")
    own.pass_time(60)
    assert (own.phase(by_ladder), own.phase(asked)) == (None, "paused")


def test_time_counts_while_paused_and_while_archived(make):
    own = make(drivers=fakes())
    paused, archived = own.create(timeout_s=100), own.create(timeout_s=100)
    own.do(own.engine.suspend(paused))
    own.do(own.engine.suspend(archived, "archive"))
    own.pass_time(99)
    assert (own.phase(paused), own.phase(archived)) == ("paused", "archived")
    own.pass_time(2)
    assert (own.phase(paused), own.phase(archived)) == (None, None)
    assert os.listdir(make.home / "sandboxes") == []


def test_time_that_suspends_instead_of_ending(make):
    own = make()
    paused = own.create(ladder={"at_timeout": "pause"}, timeout_s=100)
    archived = own.create(ladder={"at_timeout": "archive"}, timeout_s=100)
    ended = own.create(timeout_s=100)
    for box in (paused, archived):
        own.run(box, "echo kept > a")
    own.pass_time(101)
    assert [own.phase(box) for box in (paused, archived, ended)] == ["paused", "archived", None]
    own.pass_time(10_000)
    for box, phase in ((paused, "paused"), (archived, "archived")):
        assert own.phase(box) == phase  # suspended, it has no end
        assert own.do(own.engine.info(box)).expires_at is None
        assert own.run(box, "cat a") == "kept\n"
        left = own.do(own.engine.info(box)).expires_at - own.clock.time()
        assert left == pytest.approx(100, abs=1)  # and awake a new life
    own.pass_time(101)
    assert [own.phase(box) for box in (paused, archived)] == ["paused", "archived"]


def test_time_suspends_what_runs_something(make):
    own = make()
    box = own.create(ladder={"at_timeout": "pause"}, timeout_s=100)
    started = own.do(own.engine.start(box, model.ExecRequest(command="sleep 1000")))
    own.pass_time(101)
    assert own.phase(box) == "paused"
    own.do(own.engine.signal(box, started.id, 9))
    assert own.do(own.engine.wait(box, started.id)).signal == 9


def test_what_cannot_be_suspended_ends_when_its_time_is_up(make, monkeypatch):
    async def pause(self):
        raise cloche.errors.error("not_supported_by_driver", "there is no freezer")

    monkeypatch.setattr(FakeMachine, "pause", pause)
    own = make(drivers=fakes())
    box = own.create(ladder={"at_timeout": "pause"}, timeout_s=100)
    own.pass_time(101)
    assert own.phase(box) is None


def test_where_lives_are_limited_suspension_is_one_more(make):
    os.makedirs(make.home, mode=0o700, exist_ok=True)
    own = make(drivers=fakes())
    box = own.create(ladder={"at_timeout": "pause"}, timeout_s=100, policy={"limits": {"timeout_s": 100}})
    own.pass_time(101)
    assert own.phase(box) == "paused"
    own.pass_time(99)
    assert own.phase(box) == "paused"
    own.pass_time(2)
    assert own.phase(box) is None


def test_a_driver_that_cannot_says_so_once(make, monkeypatch):
    async def pause(self):
        raise cloche.errors.error("not_supported_by_driver", "there is no freezer")

    monkeypatch.setattr(FakeMachine, "pause", pause)
    own = make(drivers=fakes())
    box = own.create(ladder={"pause_after_s": 10})
    own.pass_time(11)
    own.pass_time(11)
    info = own.do(own.engine.info(box))
    assert info.phase == "running"
    assert [w for w in info.warnings if "no freezer" in w] == [
        "it is not suspended when idle: there is no freezer"
    ]


# ── archives ───────────────────────────────────────────────────────────────────────────────────────


def test_an_archive_keeps_files_and_ends_processes(make):
    own = make()
    box = own.create(env={"WHO": "me"}, name="sleeper")
    own.run(box, "echo kept > a; mkdir d; chmod 700 d; head -c 12M /dev/urandom > big; sha256sum big > sum")
    started = own.do(own.engine.start(box, model.ExecRequest(command="sleep 1000")))
    info = own.do(own.engine.suspend(box, "archive"))
    assert (info.phase, info.id, info.name) == ("archived", box, "sleeper")
    with pytest.raises(cloche.SandboxLost):
        own.do(own.engine.wait(box, started.id))
    assert own.engine.live == 0
    assert own.do(own.engine.usage(box)).memory_mib == 0
    assert os.listdir(make.home / "sandboxes") == [box]
    assert own.do(own.engine.resume(box)).phase == "running"
    assert own.run(
        "sleeper", "cat a; stat -c %a d; sha256sum --status -c sum; echo $? $WHO; pgrep sleep"
    ) == ("kept\n700\n0 me\n")
    assert os.listdir(make.home / "sandboxes") == []


def test_many_requests_wake_one_machine(make):
    own = make()
    box = own.create()
    own.do(own.engine.suspend(box, "archive"))

    async def all_at_once():
        request = model.ExecRequest(
            command="cat /proc/sys/kernel/random/boot_id; cat /proc/1/stat | cut -d' ' -f22"
        )
        return await asyncio.gather(*(own.engine.exec(box, request) for _ in range(8)))

    assert len({result.stdout for result in own.do(all_at_once())}) == 1
    assert own.events(box).count("resumed") == 1


def test_an_archived_sandbox_outlives_its_engine(make):
    first = make(owner="999999999:1")
    box = first.create(name="stays", env={"A": "1"}, timeout_s=1000, labels={"k": "v"})
    first.run(box, "echo kept > a")
    other = first.create()
    first.do(first.engine.suspend(box, "archive"))
    before = first.do(first.engine.info(box))
    first.close()
    second = make()
    assert second.phase(box) == "archived"
    assert second.phase(other) is None
    found = second.do(second.engine.info("stays"))
    assert (found.id, found.labels, found.created_at) == (box, {"k": "v"}, before.created_at)
    assert found.expires_at == pytest.approx(before.expires_at, abs=1)
    assert second.phase(box) == "archived"  # looking does not wake it
    assert second.run("stays", "cat a; echo $A") == "kept\n1\n"


def test_it_belongs_to_one_engine(make):
    """The engine that archived it, while that lives: two machines of one sandbox would write the same files."""
    first = make(drivers=fakes())
    box = first.create(name="mine")
    first.do(first.engine.suspend(box, "archive"))
    second = make(drivers=fakes(), owner="999999999:1")
    assert code_of(lambda: second.do(second.engine.info(box))) == "sandbox_not_found"
    assert first.phase(box) == "archived"
    first.do(first.engine.delete(box))
    assert code_of(lambda: second.do(second.engine.info("mine"))) == "sandbox_not_found"


def test_its_time_may_come_while_nobody_looks(make):
    clock = FakeClock()
    first = make(drivers=fakes(), owner="999999999:1", clock=clock)
    short, long = first.create(timeout_s=10), first.create(timeout_s=1000)
    for box in (short, long):
        first.do(first.engine.suspend(box, "archive"))
    first.close()
    clock.advance(100)
    second = make(drivers=fakes(), clock=clock)
    assert short in second.do(second.engine.sweep())
    assert second.phase(short) is None
    assert second.phase(long) == "archived"
    assert os.listdir(make.home / "sandboxes") == [long]


def test_its_name_stays_its_own(make):
    first = make(drivers=fakes(), owner="999999999:1")
    box = first.create(name="taken")
    first.do(first.engine.suspend(box, "archive"))
    first.close()
    second = make(drivers=fakes())
    assert second.create(name="taken") == box
    assert second.phase(box) == "archived"
    assert code_of(lambda: second.create(name="taken", env={"A": "other"})) == "name_conflict"


def test_deleting_an_archived_sandbox_leaves_nothing(make):
    own = make(drivers=fakes())
    box = own.create()
    own.do(own.engine.suspend(box, "archive"))
    own.do(own.engine.delete(box))
    assert own.phase(box) is None
    assert os.listdir(make.home / "sandboxes") == []


# Engines that die in the middle of things, as a process of their own.
MIDDLE = """
import asyncio, os, sys
from cloche import model, wiring
from cloche.engine import archiving

async def main():
    engine = wiring.make_engine(os.environ)
    box = (await engine.create(model.SandboxSpec(timeout_s=None, name="box"))).id
    await engine.exec(box, model.ExecRequest(command="echo kept > a"))
    if sys.argv[1] == "before the row":
        engine._store.put_sandbox = lambda *_: os.kill(os.getpid(), 9)
    if sys.argv[1] == "before the rename":
        archiving.Archive._publish = lambda *_: os.kill(os.getpid(), 9)
    await engine.suspend(box, "archive")
    if sys.argv[1] == "while waking":
        engine._store.put_sandbox = lambda *_: os.kill(os.getpid(), 9)
    if sys.argv[1] == "after waking":
        archiving.Archive.forget = lambda *_: os.kill(os.getpid(), 9)
    if sys.argv[1] != "archived":
        await engine.resume(box)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("moment", "comes_back"),
    [
        ("before the rename", False),
        ("before the row", False),
        ("archived", True),
        ("while waking", True),
        ("after waking", False),
    ],
)
def test_a_killed_engine_leaves_it_archived_or_lost_and_nothing_between(make, moment, comes_back):
    environment = {**os.environ, "CLOCHE_HOME": str(make.home), "CLOCHE_KEEPER": "off"}
    done = subprocess.run([sys.executable, "-c", MIDDLE, moment], env=environment, timeout=60, check=False)
    assert done.returncode == -9
    own = make()
    own.do(own.engine.sweep())
    found = [info for info in own.do(own.engine.list()) if info.name == "box"]
    assert [info.phase for info in found] == (["archived"] if comes_back else [])
    assert os.listdir(make.home / "sandboxes") == [info.id for info in found]
    if comes_back:
        assert own.run("box", "cat a") == "kept\n"


# ── snapshots that nobody named ────────────────────────────────────────────────────────────────────


def test_old_snapshots_without_a_name_are_swept(make):
    own = make(drivers=fakes())
    box = own.create(timeout_s=None)
    named, tagged, unnamed = (own.do(own.engine.snapshot(box, *a)) for a in (("kept",), (None, ["kept"]), ()))
    own.do(own.engine.sweep())
    assert len(own.do(own.engine.snapshots())) == 3
    own.clock.advance(8 * 86_400)
    assert own.do(own.engine.sweep()) == [unnamed.id]
    assert {info.id for info in own.do(own.engine.snapshots())} == {named.id, tagged.id}
