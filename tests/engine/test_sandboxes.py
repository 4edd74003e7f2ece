"""The life of a sandbox: what is refused before anything is made, names, ends by time, and what an end leaves.

Time is simulated where it decides: an engine of its own on a `FakeClock`, whose reaper is asked for one turn.
"""

import asyncio
import contextlib
import os
import threading

import msgspec
import pytest

import cloche
from cloche import engine as engines
from cloche import errors, model, settings, store, wiring, workspaces
from cloche.linux import cgroups, processes
from cloche.sdk import portal
from cloche.testing.clocks import FakeClock


def spec(**fields):
    return engines.spec_from(fields)


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    return caught.value.code


class Own:
    """An engine of the test's own, in the portal's loop: `own.do(own.engine.info(id))`."""

    def __init__(self, home, drivers=None, clock=None, **limits):
        config = settings.Settings(home=str(home), limits=settings.Limits(**limits))
        settings.make_home(config.home)
        self.clock = clock
        self.engine = self.do(self._make(config, drivers))

    async def _make(self, config, drivers):
        return engines.Engine(
            config,
            store.Store(config.state_path),
            wiring.drivers(config.home) if drivers is None else drivers,
            owner=wiring.owner(),
            interpreters=wiring.interpreters(),
            workspaces=workspaces.LocalWorkspaces(config.home, os.environ),
            egress=lambda: wiring.egress(config),
            secrets=lambda: wiring.secrets(config),
            policies=settings.PolicyFiles(config, {"HOME": config.home}),
            clock=self.clock,
        )

    def do(self, work):
        return portal.run(work)

    def create(self, **fields):
        return self.do(self.engine.create(spec(**fields)))

    def exec(self, sandbox, command, **options):
        return self.do(self.engine.exec(sandbox, model.ExecRequest(command=command, **options)))

    def alive(self, sandbox):
        return sandbox in [info.id for info in self.do(self.engine.list())]

    def pass_time(self, seconds):
        """Let time pass, and let the reaper look once."""

        async def turn():
            self.engine._reaper.sweep_once()
            await asyncio.gather(*self.engine._background)

        self.clock.advance(seconds)
        self.do(turn())


@pytest.fixture
def make_own(cloche_home):
    made: list[Own] = []

    def make(**options):
        made.append(Own(cloche_home / f"own-{len(made)}-{os.urandom(3).hex()}", **options))
        return made[-1]

    yield make
    for own in made:
        own.do(own.engine.aclose())


@pytest.fixture
def timed(make_own):
    return make_own(clock=FakeClock())


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────

RESOURCES = [
    pytest.param({"resources": {field: value}}, "limit_invalid", id=f"{field}={value}")
    for field in ("memory_mib", "pids", "disk_mib")
    for value in (-1, 0, 1, 10**12)
]
BAD_SPECS = [
    *RESOURCES,
    pytest.param({"resources": {"cpus": -1}}, "limit_invalid", id="negative processors"),
    pytest.param({"resources": {"cpus": 0}}, "limit_invalid", id="no processors"),
    pytest.param({"resources": {"memory_mib": "much"}}, "argument_invalid", id="memory that is no number"),
    pytest.param({"resources": {"gpus": 1}}, "field_unknown", id="an unknown limit"),
    pytest.param({"colour": "blue"}, "field_unknown", id="an unknown field"),
    pytest.param({"timeout_s": 0}, "limit_invalid", id="no life"),
    pytest.param({"timeout_s": -5}, "limit_invalid", id="a negative life"),
    pytest.param({"idle_timeout_s": -5}, "limit_invalid", id="negative idleness"),
    pytest.param({"profile": "lax"}, "profile_unknown", id="an unknown profile"),
    pytest.param({"template": "windows"}, "template_not_found", id="an unknown template"),
    pytest.param({"driver": "docker"}, "argument_invalid", id="an unknown driver"),
    pytest.param({"policy": {"colour": "blue"}}, "field_unknown", id="an unknown field of the policy"),
    pytest.param({"minimum_isolation": "strong"}, "argument_invalid", id="an unknown level"),
    pytest.param({"env": {"A\0": ""}}, "environment_invalid", id="NUL in a variable's name"),
    pytest.param({"env": {"A": "x" * 200_000}}, "argument_too_long", id="a huge variable"),
    pytest.param({"labels": {"": "x"}}, "name_invalid", id="a label without a name"),
    pytest.param({"name": ""}, "name_invalid", id="an empty name"),
    pytest.param({"name": "a\0b"}, "name_invalid", id="NUL in the name"),
    pytest.param({"name": "a\nb"}, "name_invalid", id="a newline in the name"),
    pytest.param({"name": "a\n"}, "name_invalid", id="a newline after the name"),
    pytest.param({"name": "Upper"}, "name_invalid", id="an upper-case name"),
    pytest.param({"name": "-x"}, "name_invalid", id="a name like a flag"),
    pytest.param({"name": "x" * 64}, "name_invalid", id="a long name"),
    pytest.param({"workspace": "/no/such/place"}, "workspace_not_found", id="a missing workspace"),
    pytest.param({"workspace": "/"}, "workspace_refused", id="the root as workspace"),
]


@pytest.mark.parametrize(("fields", "code"), BAD_SPECS)
def test_a_bad_description_has_its_own_code_and_nothing_is_made(make_own, fields, code):
    def never():
        raise AssertionError("a driver was asked for")

    own = make_own(drivers=[("namespaces", never)])
    assert code_of(lambda: own.create(**fields)) == code
    assert own.do(own.engine.list()) == []
    assert own.engine.live == 0


def test_every_refusal_says_what_to_do(make_own):
    own = make_own(drivers=[])
    for fields in (
        {"profile": "lax"},
        {"template": "windows"},
        {"resources": {"pids": -1}},
        {"driver": "docker"},
    ):
        with pytest.raises(cloche.ClocheError) as caught:
            own.create(**fields)
        assert caught.value.hint, fields


def test_isolation_is_never_lowered_silently(make_own):
    own = make_own()
    assert code_of(lambda: own.create(minimum_isolation="microvm")) == "isolation_too_low"
    assert own.do(own.engine.list()) == []


def test_a_missing_kernel_feature_that_the_policy_demands_makes_creation_fail(make_own):
    own = make_own()
    assert code_of(lambda: own.create(policy={"isolation": {"required": ["time_travel"]}})) in (
        "kernel_feature_missing",
        "policy_invalid",
    )
    assert own.do(own.engine.list()) == []


def test_an_unknown_sandbox_is_not_found_and_an_ended_one_is_lost(make_sandbox):
    assert code_of(lambda: cloche.Sandbox.get("nobody")) == "sandbox_not_found"
    box = make_sandbox()
    box.delete()
    for act in (
        box.info,
        box.delete,
        box.usage,
        lambda: box.extend(5),
        lambda: box.exec("true"),
        box.files.list,
    ):
        assert code_of(act) == "sandbox_lost"
    assert code_of(lambda: cloche.Sandbox.get(box.id)) == "sandbox_lost"


def test_extending_by_nonsense_is_refused(sandbox):
    before = sandbox.info().expires_at
    for seconds in (0, -1, float("inf"), float("nan")):
        assert code_of(lambda seconds=seconds: sandbox.extend(seconds)) == "limit_invalid"
    assert sandbox.info().expires_at == pytest.approx(before, abs=1)


# ── what it is ─────────────────────────────────────────────────────────────────────────────────────


def test_info_says_how_it_is_held(make_sandbox):
    box = make_sandbox(
        memory_mib=64, pids=32, cpus=0.5, disk_mib=64, labels={"team": "blue"}, idle_timeout_s=50
    )
    info = box.info()
    assert info.id == box.id
    assert (len(info.id), info.id.isalnum(), info.id.islower()) == (20, True, True)
    assert (info.phase, info.template, info.profile, info.server) == (
        "running",
        "base",
        "moderate",
        "in process",
    )
    assert (info.labels, info.idle_timeout_s) == ({"team": "blue"}, 50)
    assert info.expires_at - info.created_at == pytest.approx(300, abs=2)
    assert info.isolation.level == "namespaces"
    assert info.isolation.seccomp
    assert set(info.limits) == {"memory_mib", "pids", "cpus", "disk_mib"}
    assert all(
        limit.enforcement in ("enforced", "watched", "none") and limit.by for limit in info.limits.values()
    )
    assert info.limits["memory_mib"].value == 64


def test_usage_is_told(sandbox, until):
    sandbox.start(["python3", "-c", "x = bytearray(40 << 20); input()"])
    until(lambda: sandbox.usage().memory_mib > 40)
    assert sandbox.usage().pids >= 1


def test_executions_are_counted(sandbox):
    assert sandbox.info().executions == 0
    sandbox.exec("true")
    sandbox.exec("false")
    assert sandbox.info().executions == 2


def test_get_and_list(make_sandbox):
    box = make_sandbox(name="by-name")
    assert cloche.Sandbox.get("by-name").id == cloche.Sandbox.get(box.id).id == box.id
    assert box.id in [info.id for info in cloche.Sandbox.list()]
    box.delete()
    assert box.id not in [info.id for info in cloche.Sandbox.list()]


def test_sandboxes_see_nothing_of_each_other(make_sandbox):
    one, two = make_sandbox(), make_sandbox()
    one.files.write("/tmp/x", "one's")
    one.start("sleep 1000")
    assert not two.files.exists("/tmp/x")
    assert "sleep" not in two.exec("cat /proc/[0-9]*/comm 2>/dev/null").stdout
    assert one.exec("readlink /proc/self/ns/pid").stdout != two.exec("readlink /proc/self/ns/pid").stdout


def test_too_much_memory_is_told_as_such_and_the_sandbox_lives(make_sandbox):
    box = make_sandbox(memory_mib=48)
    result = box.exec(
        ["python3", "-c", "import time; x = bytearray(400 << 20); time.sleep(1000)"], timeout_s=30
    )
    assert result.oom_killed
    assert not result.timed_out
    assert [d.kind for d in result.denials] == ["limit"]
    assert box.exec("echo alive").stdout == "alive\n"


FORKS = """
import os, time
made = 0
try:
    while os.fork():
        made += 1
    time.sleep(1000)
except OSError:
    print(made)
"""


def test_processes_have_a_limit(make_sandbox):
    box = make_sandbox(pids=16)
    process = box.start(["python3", "-c", FORKS])
    made = next(event for event in process.stream() if isinstance(event, cloche.Output))
    assert 4 < int(made.data) < 16
    process.kill()
    process.wait()
    assert box.exec("echo alive").stdout == "alive\n"


# ── names and capacity ─────────────────────────────────────────────────────────────────────────────


def test_a_name_makes_creation_idempotent(make_sandbox):
    first = make_sandbox(name="same", memory_mib=64)
    again = make_sandbox(name="same", memory_mib=64)
    assert again.id == first.id
    assert code_of(lambda: make_sandbox(name="same", memory_mib=65)) == "name_conflict"
    assert first.exec("true").ok
    first.delete()
    assert make_sandbox(name="same", memory_mib=65).id != first.id


def test_callers_that_ask_for_one_name_at_once_get_one_sandbox(make_own):
    own = make_own()

    async def together():
        return await asyncio.gather(*(own.engine.create(spec(name="shared")) for _ in range(8)))

    assert len({info.id for info in own.do(together())}) == 1
    assert own.engine.live == 1


def test_a_name_is_free_again_after_a_failure(make_own):
    own = make_own()
    assert code_of(lambda: own.create(name="again", minimum_isolation="microvm")) == "isolation_too_low"
    assert own.create(name="again").name == "again"


def test_capacity_has_a_limit_even_at_once(make_own):
    own = make_own(max_sandboxes=3)

    async def together():
        return await asyncio.gather(*(own.engine.create(spec()) for _ in range(6)), return_exceptions=True)

    outcomes = own.do(together())
    made = [o for o in outcomes if isinstance(o, model.SandboxInfo)]
    assert len(made) == 3
    assert {o.code for o in outcomes if isinstance(o, errors.ClocheError)} == {"capacity_exceeded"}
    assert all(o.retryable for o in outcomes if isinstance(o, errors.ClocheError))
    own.do(own.engine.delete(made[0].id))
    assert own.create().id


# ── time ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_sandbox_ends_when_its_time_is_up_and_not_before(timed):
    box = timed.create(timeout_s=100).id
    timed.pass_time(99)
    assert timed.alive(box)
    timed.pass_time(1)
    assert not timed.alive(box)
    with pytest.raises(cloche.SandboxLost, match="time was up"):
        timed.do(timed.engine.info(box))


def test_time_counts_although_it_is_used_and_runs(timed):
    box = timed.create(timeout_s=100, idle_timeout_s=1000).id
    running = timed.do(timed.engine.start(box, model.ExecRequest(command="sleep 1000")))
    timed.pass_time(60)
    assert timed.exec(box, "true").ok
    timed.pass_time(40)
    assert not timed.alive(box)
    assert code_of(lambda: timed.do(timed.engine.wait(box, running.id))) == "sandbox_lost"


def test_extending_counts_from_now(timed):
    box = timed.create(timeout_s=100).id
    timed.pass_time(90)
    info = timed.do(timed.engine.extend(box, 50))
    assert info.expires_at == timed.clock.time() + 50
    timed.pass_time(49)
    assert timed.alive(box)
    timed.pass_time(1)
    assert not timed.alive(box)


def test_without_a_time_out_it_stays(timed):
    box = timed.create(timeout_s=None).id
    timed.pass_time(10**6)
    assert timed.alive(box)
    assert timed.do(timed.engine.info(box)).expires_at is None


def test_the_wall_clock_ends_nothing(timed):
    box = timed.create(timeout_s=100).id
    timed.clock.jump(10**6)
    timed.pass_time(50)
    assert timed.alive(box)


def test_looking_is_no_use(timed):
    box = timed.create(timeout_s=None, idle_timeout_s=60).id
    execution = timed.do(timed.engine.start(box, model.ExecRequest(command="true")))
    timed.do(timed.engine.wait(box, execution.id))
    for _ in range(3):
        timed.pass_time(19)
        timed.do(timed.engine.info(box))
        timed.do(timed.engine.list())
        timed.do(timed.engine.events(sandbox=box))
        timed.do(timed.engine.executions(box))
        timed.do(timed.engine.usage(box))
    timed.pass_time(3)
    assert not timed.alive(box)
    with pytest.raises(cloche.SandboxLost, match="nobody used it"):
        timed.do(timed.engine.info(box))


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda own, box: own.exec(box, "true"), id="exec"),
        pytest.param(lambda own, box: own.do(own.engine.write_file(box, "a", b"x")), id="write"),
        pytest.param(lambda own, box: own.do(own.engine.list_files(box, ".")), id="list"),
        pytest.param(lambda own, box: own.do(own.engine.run_code(box, "1")), id="run_code"),
        pytest.param(lambda own, box: own.do(own.engine.extend(box, None)), id="extend"),
    ],
)
def test_using_it_keeps_it(timed, use):
    box = timed.create(timeout_s=None, idle_timeout_s=60).id
    for _ in range(4):
        timed.pass_time(50)
        use(timed, box)
    timed.pass_time(59)
    assert timed.alive(box)
    timed.pass_time(1)
    assert not timed.alive(box)


def test_a_running_command_is_use(timed):
    box = timed.create(timeout_s=None, idle_timeout_s=60).id
    execution = timed.do(timed.engine.start(box, model.ExecRequest(command="cat", open_stdin=True)))
    timed.pass_time(1000)
    assert timed.alive(box)
    timed.do(timed.engine.write_stdin(box, execution.id, b"", True))
    timed.do(timed.engine.wait(box, execution.id))
    timed.pass_time(59)
    assert timed.alive(box)
    timed.pass_time(1)
    assert not timed.alive(box)


def test_running_code_is_use(timed, until):
    box = timed.create(timeout_s=None, idle_timeout_s=60).id
    waiting = (
        "import os, time\nopen('on', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n'done'"
    )
    results = []
    thread = threading.Thread(target=lambda: results.append(timed.do(timed.engine.run_code(box, waiting))))
    thread.start()
    until(lambda: "on" in [f.name for f in timed.do(timed.engine.list_files(box, "."))])
    timed.pass_time(1000)
    assert timed.alive(box)
    timed.do(timed.engine.write_file(box, "go", b""))
    thread.join(20)
    assert results[0].text == "'done'"
    timed.pass_time(60)
    assert not timed.alive(box)


def test_real_time_ends_it_too(make_sandbox, until):
    box = make_sandbox(timeout_s=0.3)

    def ended():
        with contextlib.suppress(cloche.SandboxLost):
            return box.info() is None
        return True

    until(ended)
    assert box.id not in [info.id for info in cloche.Sandbox.list()]


def test_a_pause_stops_everything_and_use_wakes_it(sandbox):
    process = sandbox.start("while :; do echo tick; sleep 0.02; done")
    next(process.stream())
    try:
        paused = sandbox.suspend()
    except cloche.NotSupported:
        pytest.skip("this host has no freezer for us")
    assert paused.phase == "paused"
    assert sandbox.info().phase == "paused"  # looking does not wake it
    assert sandbox.exec("echo awake").stdout == "awake\n"
    assert sandbox.info().phase == "running"


def test_time_counts_while_paused_and_idleness_does_not(timed):
    box = timed.create(timeout_s=100, idle_timeout_s=10).id
    try:
        timed.do(timed.engine.suspend(box))
    except cloche.NotSupported:
        pytest.skip("this host has no freezer for us")
    timed.pass_time(99)
    assert timed.alive(box)
    timed.pass_time(1)
    assert not timed.alive(box)


# ── the journal ────────────────────────────────────────────────────────────────────────────────────


def test_the_journal_tells_the_story(make_own):
    own = make_own()
    box = own.create(name="story").id
    own.exec(box, ["sh", "-c", "exit 3"])
    own.do(own.engine.write_file(box, "a", b"xyz"))
    own.do(own.engine.extend(box, 10))
    own.do(own.engine.delete(box))
    told = own.do(own.engine.events(sandbox=box))
    assert [event["kind"] for event in told] == [
        "created",
        "started",
        "exited",
        "file_written",
        "extended",
        "deleted",
    ]
    assert told[0]["data"]["name"] == "story"
    assert told[2]["data"]["exit_code"] == 3
    assert (told[3]["data"]["path"], told[3]["data"]["size"]) == ("a", 3)
    assert (told[5]["data"]["reason"], told[5]["data"]["executions"]) == ("asked", 1)
    assert all(event["sandbox"] == box for event in told)
    assert own.do(own.engine.events(after=told[3]["seq"], sandbox=box)) == told[4:]


def test_the_journal_is_followed_as_it_grows(make_own):
    own = make_own()

    async def follow():
        seen = []
        box = (await own.engine.create(spec())).id
        async for event in own.engine.follow_events():
            seen.append(event["kind"])
            if event["kind"] == "created":
                await own.engine.delete(box)
            if event["kind"] == "deleted":
                return seen

    assert own.do(follow()) == ["created", "deleted"]


def test_the_journal_survives_its_engine(make_own, cloche_home):
    own = make_own()
    box = own.create().id
    home = own.engine.settings.home
    own.do(own.engine.aclose())
    kept = store.Store(os.path.join(home, "state.db"))
    try:
        last = kept.events()[-1]
        assert (last["kind"], last["sandbox"], last["data"]["reason"]) == ("deleted", box, "engine_stopped")
    finally:
        kept.close()


def test_an_event_of_a_sandbox_through_the_sdk(sandbox):
    sandbox.exec("true")
    assert [event["kind"] for event in sandbox.events()] == ["created", "started", "exited"]


# ── the end ────────────────────────────────────────────────────────────────────────────────────────


def footprint(own):
    """What this engine has outside itself: its launcher and all below it, and its control groups."""
    groups = {group.name for group in cgroups.detect().sweep("cloche-") if str(os.getpid()) in group.name}
    return set(processes.descendants(os.getpid())), groups


def running(pids):
    return {pid for pid in pids if processes.is_running(pid)}


def test_an_engine_that_closes_leaves_nothing(make_own, until):
    elsewhere = make_own()  # so that what is shared by engines exists before
    elsewhere.create()
    elsewhere.do(
        elsewhere.engine.aclose()
    )  # a live one makes sandboxes ahead of need, which would be taken for ours
    before_pids, before_groups = footprint(elsewhere)
    own = make_own()
    for _ in range(3):
        box = own.create().id
        own.do(own.engine.start(box, model.ExecRequest(command="setsid sleep 1000 & sleep 1000")))
        own.do(own.engine.run_code(box, "1"))
    pids, groups = footprint(own)
    mine = pids - before_pids
    assert len(mine) > 9
    own.do(own.engine.aclose())
    own.do(own.engine.aclose())
    until(lambda: not running(mine))
    until(lambda: not (footprint(own)[1] & (groups - before_groups)))
    assert own.engine.live == 0
    assert code_of(own.create) == "server_unavailable"


def test_descriptors_do_not_grow(make_own):
    own = make_own()

    def cycle():
        box = own.create().id
        own.exec(box, "echo x")
        own.do(own.engine.run_code(box, "1"))
        own.do(own.engine.write_file(box, "a", b"x"))
        own.do(own.engine.delete(box))

    for _ in range(5):
        cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(25):
        cycle()
    assert len(os.listdir("/proc/self/fd")) <= before + 10  # embryos come and go


def test_deleting_ends_everything_inside(sandbox, until):
    sandbox.start("setsid sleep 1234 & sleep 1234")
    inside = [pid for pid in processes.descendants(os.getpid()) if b"1234" in cmdline(pid)]
    until(lambda: any(b"1234" in cmdline(pid) for pid in processes.descendants(os.getpid())))
    sandbox.delete()
    assert not [pid for pid in processes.descendants(os.getpid()) if b"1234" in cmdline(pid)], inside


def cmdline(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_spec_survives_the_wire():
    wanted = spec(name="x", resources={"memory_mib": 64}, labels={"a": "b"})
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=model.SandboxSpec) == wanted


# ── policy files ───────────────────────────────────────────────────────────────────────────────────


def test_a_ceiling_binds_arguments_and_changes_of_a_live_sandbox(make_own, tmp_path):
    own = make_own()
    ceiling = tmp_path / "ceiling.toml"
    ceiling.write_text('[network]\nallow = ["**.a.test"]\ndeny = ["b.a.test"]\n[limits]\ntimeout_s = 100\n')
    own.engine._policies = settings.PolicyFiles(
        settings.Settings(home=str(tmp_path)), {"HOME": str(tmp_path)}, ceiling=str(ceiling)
    )
    box = own.create(policy={"network": {"allow": ["a.test", "evil.test"]}})
    rules = own.do(own.engine.get_policy(box.id))
    assert (rules.network.allow, rules.network.deny) == (("a.test",), ("b.a.test",))
    changed = own.do(
        own.engine.update_policy(box.id, {"network": {"allow": ["evil.test", "c.a.test"], "deny": []}})
    )
    assert (changed.network.allow, changed.network.deny) == (("c.a.test",), ("b.a.test",))
    opened = own.do(own.engine.update_policy(box.id, {"network": {"mode": "open"}}))
    assert (opened.network.mode, opened.network.deny) == ("rules", ("b.a.test",))
    assert code_of(lambda: own.do(own.engine.extend(box.id, 101))) == "limit_refused"
    assert code_of(lambda: own.create(timeout_s=None)) == "limit_refused"
    own.do(own.engine.extend(box.id, 100))


def test_a_file_that_changes_counts_for_the_next_sandbox(make_own, tmp_path):
    own = make_own()
    file = tmp_path / ".config/cloche/policy.toml"
    file.parent.mkdir(parents=True)
    own.engine._policies = settings.PolicyFiles(
        settings.Settings(home=str(tmp_path)), {"HOME": str(tmp_path)}
    )
    assert own.do(own.engine.get_policy(own.create().id)).files.root == "overlay"
    file.write_text('[files]\nroot = "read-only"\n')
    assert own.do(own.engine.get_policy(own.create().id)).files.root == "read-only"
    file.write_text("[files]\nroot = 3\n")
    assert code_of(own.create) == "policy_invalid"
    file.unlink()
    assert own.do(own.engine.get_policy(own.create().id)).files.root == "overlay"


def test_denied_files_are_hidden_in_an_overlaid_workspace(make_own, tmp_path):
    own = make_own()
    work = tmp_path / "work"
    (work / "keys").mkdir(parents=True)
    (work / "keys/a").write_text("hush")
    (work / ".env").write_text("hush")
    box = own.create(workspace=str(work), overlay=True, policy={"files": {"deny": ["keys/", "**/.env"]}}).id
    for path in ("keys/a", ".env"):
        ran = own.exec(box, ["cat", f"{work}/{path}"])
        assert ran.exit_code != 0
        assert "hush" not in ran.stdout
    assert own.exec(box, f"echo x > {work}/notes; cat {work}/notes").stdout == "x\n"
    assert [change.path for change in own.do(own.engine.diff(box))] == ["notes"]


def test_variables_that_may_not_enter_are_refused_with_every_command(make_own):
    own = make_own()
    box = own.create(policy={"environment": {"allow": ["APP_*"], "set": {"WHERE": "inside"}}}).id
    assert code_of(lambda: own.exec(box, "true", env={"PATH": "/evil"})) == "environment_refused"
    assert code_of(lambda: own.do(own.engine.run_code(box, "1", env={"X": "1"}))) == "environment_refused"
    assert own.exec(box, "echo $APP_A $WHERE", env={"APP_A": "1"}).stdout == "1 inside\n"


def test_a_mode_and_a_profile_make_nothing(make_own):
    own = make_own()
    assert code_of(lambda: own.create(mode="codex", profile="restrictive")) == "policy_invalid"
    assert code_of(lambda: own.create(mode="codecs")) == "mode_unknown"
    assert own.create(mode="codex").profile == "codex"
