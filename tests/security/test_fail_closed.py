"""Where something is missing, broken or unknown, there is no sandbox: never one that holds less than was asked."""

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche import Policy, errors, model, policy
from cloche.drivers import namespaces, spawning
from cloche.engine import placement
from cloche.guest import wire
from cloche.linux import landlock, seccomp
from cloche.sdk.sandboxes import AsyncSandbox
from tests.security import glass

# --- what is not known is not guessed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "profile", ["", "Moderate", "moderate ", "none", "unrestricted", "../moderate", "restrictive\n", "nul\0"]
)
def test_an_unknown_profile_makes_nothing(profile: str) -> None:
    before = glass.wait(_listed())
    with pytest.raises(errors.ClocheError):
        glass.Box(profile=profile)
    assert glass.wait(_listed()) == before


@pytest.mark.parametrize("profile", policy.PROFILES)
def test_a_known_profile_makes_a_sandbox(profile: str) -> None:
    with glass.box(profile=profile) as box:
        assert box.works()


async def _listed() -> int:
    return len(await AsyncSandbox.list())


@pytest.mark.parametrize(
    "field",
    [
        "netwrok",
        "Network",
        "seccomp",
        "rootuser",
        "allow_all",
        "",
        "syscalls ",
        "unsafe",
        "minimum-isolation",
    ],
)
def test_an_unknown_field_of_a_policy_is_refused(field: str) -> None:
    with pytest.raises(errors.ClocheError):
        policy.parse({field: True})


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [("files", "root", "writable"), ("network", "mode", "on"), ("syscalls", "profile", "all"),
     ("isolation", "root_user", "yes"), ("isolation", "minimum", "none"), ("isolation", "required", "landlock"),
     ("files", "protected", None), ("files", "deny", 5), ("network", "mode", None), ("network", "allow", "pypi.org"),
     ("syscalls", "profile", ["permissive"])],
)  # fmt: skip
def test_an_ill_typed_field_of_a_policy_is_refused(group: str, field: str, value: object) -> None:
    with pytest.raises(errors.ClocheError):
        policy.parse({group: {field: value}})


@pytest.mark.parametrize("value", [None, True, "off", ["mode"], 5])
@pytest.mark.parametrize("group", ["files", "network", "syscalls", "isolation"])
def test_a_group_that_is_not_a_table_is_refused(group: str, value: object) -> None:
    with pytest.raises(errors.ClocheError):
        policy.parse({group: value})


@pytest.mark.parametrize("option", ["template", "driver", "minimum_isolation"])
@pytest.mark.parametrize("value", ["", "unknown", "../base", "BASE"])
def test_an_unknown_choice_makes_nothing(option: str, value: str) -> None:
    with pytest.raises((errors.ClocheError, ValueError)):
        glass.Box(**{option: value})


@pytest.mark.parametrize("level", ["gvisor", "microvm"])
def test_a_stronger_level_than_there_is_makes_nothing(level: str) -> None:
    with pytest.raises(errors.ClocheError) as refusal:
        glass.Box(minimum_isolation=level)
    assert refusal.value.code == "isolation_too_low"


@pytest.mark.parametrize("level", ["process", "namespaces"])
def test_the_level_had_is_never_below_the_level_asked(level: str) -> None:
    with glass.box(minimum_isolation=level) as box:
        had = glass.wait(box.handle.info()).isolation.level
        assert model.LEVELS.index(had) >= model.LEVELS.index(level)
        assert box.exec("true").isolation.level == had


@pytest.mark.parametrize(
    "feature", ["lanlock", "Landlock", "gvisor", "cgroup_gpu", "", "everything", "selinux"]
)
def test_a_required_feature_that_is_not_there_makes_nothing(feature: str) -> None:
    with pytest.raises(errors.ClocheError) as refusal:
        glass.Box(policy=Policy(isolation={"required": [feature]}))
    assert refusal.value.code == "kernel_feature_missing"


@pytest.mark.parametrize("feature", ["seccomp", "user_namespace"])
def test_a_required_feature_that_is_there_is_used(feature: str) -> None:
    with glass.box(policy=Policy(isolation={"required": [feature]})) as box:
        assert box.works()


@pytest.mark.parametrize("layer", [policy.Merged(), *(policy.profile(name) for name in policy.PROFILES)])
@pytest.mark.parametrize("profile", policy.PROFILES)
def test_a_tightening_layer_never_widens(profile: str, layer: policy.Merged) -> None:
    base = policy.profile(profile)
    merged = policy.tighten(base, layer)
    freedom = ("off", "rules", "open")
    assert policy.PROFILES.index(merged.syscalls.profile) <= policy.PROFILES.index(base.syscalls.profile)
    assert freedom.index(merged.network.mode) <= freedom.index(base.network.mode)
    assert merged.isolation.root_user <= base.isolation.root_user
    assert base.files.root == "overlay" or merged.files.root == "read-only"
    assert set(merged.files.deny) >= set(base.files.deny)
    assert set(merged.files.protected) >= set(base.files.protected)


# --- filters ------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], object]) -> bool:
    """Whether `work` came to its end in a forked child."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _broken(kind: str) -> bytes:
    good = seccomp.build("moderate")
    instruction = struct.Struct("=HBBI")
    return {
        "empty": b"",
        "cut": good[: len(good) // 2 // 8 * 8],
        "no-return": instruction.pack(0x20, 0, 0, 0),
        "jump-out": instruction.pack(0x15, 200, 200, 0) + instruction.pack(0x06, 0, 0, 0x7FFF0000),
        "bad-code": instruction.pack(0xFFFF, 0, 0, 0) + instruction.pack(0x06, 0, 0, 0x7FFF0000),
        "bad-load": instruction.pack(0x20, 0, 0, 4096) + instruction.pack(0x06, 0, 0, 0x7FFF0000),
        "too-long": instruction.pack(0x06, 0, 0, 0x7FFF0000) * 5000,
    }[kind]


@pytest.mark.parametrize(
    "kind", ["empty", "cut", "no-return", "jump-out", "bad-code", "bad-load", "too-long"]
)
def test_a_broken_filter_is_not_loaded(kind: str) -> None:
    assert not _in_child(lambda: seccomp.load(_broken(kind)))
    assert _in_child(lambda: seccomp.load(seccomp.build("moderate")))


@pytest.mark.parametrize("profile", ["", "none", "Moderate", "off"])
def test_there_is_no_filter_for_an_unknown_profile(profile: str) -> None:
    with pytest.raises(ValueError, match="unknown profile"):
        seccomp.build(profile)


def test_landlock_rules_that_cannot_be_made_fail() -> None:
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    assert not _in_child(lambda: landlock.restrict([("/nowhere/at/all", landlock.ALL)], abi=landlock.abi()))


# --- a launcher that cannot do its work ---------------------------------------------------------------------


@asynccontextmanager
async def _driver(home: Path) -> AsyncIterator[namespaces.NamespacesDriver]:
    made = namespaces.NamespacesDriver(str(home))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def _create(driver: namespaces.NamespacesDriver, change: Callable[[dict[str, Any]], None]) -> Any:
    """A sandbox whose set-up message was changed on its way."""
    original = driver._message

    def changed(*positional: Any, **named: Any) -> dict[str, Any]:
        message = original(*positional, **named)
        change(message)
        return message

    driver._message = changed  # type: ignore[method-assign]
    spec = model.SandboxSpec()
    return await driver.create(model.new_id(), spec, policy.profile("moderate"))


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda message: message.pop(key)


BREAKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no-filter": _without("syscalls"),
    "unknown-filter": lambda m: m.update(syscalls="none"),
    "no-mounts": _without("steps"),
    "mount-of-nothing": lambda m: m["steps"].append(
        ["bind", "/x", "/nowhere/at/all", {"writable": False, "make": True}]
    ),
    "unknown-step": lambda m: m["steps"].append(["teleport", "/x", "/y", {}]),
    "mask-cannot-be": lambda m: m["steps"].insert(0, ["overlay", "/nowhere/at/all", "/nowhere", {}]),
    "no-limits": _without("rlimits"),
    "unknown-limit": lambda m: m["rlimits"].update(TELEPORTS=1),
    "bad-affinity": lambda m: m.update(affinity=[99999]),
    "no-landlock": _without("landlock"),
    "landlock-of-nothing": lambda m: m.update(landlock=[["/nowhere/at/all", landlock.ALL]]),
    "no-disk": _without("disk"),
}


@pytest.mark.parametrize("break_", BREAKS)
def test_a_step_that_fails_leaves_no_sandbox(tmp_path: Path, break_: str) -> None:
    """Each part of the set-up taken away or broken: creation fails, and nothing half-made runs."""
    if "landlock" in break_ and not landlock.abi():
        pytest.skip("this kernel has no Landlock")

    async def scenario() -> None:
        async with _driver(tmp_path) as driver:
            with pytest.raises(errors.ClocheError):
                await _create(driver, BREAKS[break_])
            # Only embryos are left, which run nothing but the launcher's own code.
            assert all(machine.id == "" for machine in driver._machines.values())

    asyncio.run(scenario())


def test_a_whole_message_makes_a_sandbox(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _driver(tmp_path) as driver:
            made = await _create(driver, lambda _message: None)
            assert not made.ended.done()
            await made.kill("over")

    asyncio.run(scenario())


class _Unable(namespaces.NamespacesDriver):
    async def start(self) -> None:
        raise errors.error("kernel_feature_missing", "this host makes no namespaces", hint="none")


@pytest.mark.parametrize("minimum", ["namespaces", "gvisor", "microvm"])
def test_no_weaker_driver_steps_in(minimum: model.Level, tmp_path: Path) -> None:
    class Weak(_Unable):
        name, level = "process", "process"

        async def start(self) -> None:
            return

    async def scenario() -> None:
        chooser = placement.Placement(
            [("namespaces", lambda: _Unable(str(tmp_path))), ("process", lambda: Weak(str(tmp_path)))]
        )
        with pytest.raises(errors.ClocheError) as refusal:
            await chooser.choose(minimum)
        assert refusal.value.code == "isolation_too_low"
        assert (await chooser.choose("process")).level == "process"

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [{"ready": False, "reason": "refused"}, {}, {"ready": None}, "end"])
def test_a_launcher_that_is_not_ready_makes_nothing(tmp_path: Path, answer: "dict[str, Any] | str") -> None:
    async def scenario() -> None:
        here, there = wire.pair()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        if answer == "end":
            there.close()
        else:
            wire.send(there, answer)
            if answer != {"ready": False, "reason": "refused"}:
                there.close()
        driver = namespaces.NamespacesDriver(str(tmp_path), launch=spawning.Launch(here, pid), rootless=True)
        with pytest.raises((errors.ClocheError, OSError)):
            await driver.start()
        if answer == {"ready": False, "reason": "refused"}:
            there.close()

    asyncio.run(scenario())


# --- deaths -------------------------------------------------------------------------------------------------


def _processes_of(home: Path) -> set[int]:
    """Launchers and agents whose mounts lie in this state directory, and whatever runs behind them."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if str(home) in Path(f"/proc/{name}/mountinfo").read_text():
                    found.add(int(name))
            except OSError:
                continue
    return found


def _launcher_of(driver: namespaces.NamespacesDriver) -> int:
    """The host's number of the process at the other end of the driver's socket."""
    machine = next(iter(driver._machines.values()))
    stat = Path(f"/proc/{machine.host_pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


async def _unlinked(driver: namespaces.NamespacesDriver) -> None:
    """Until the driver has seen the end of its launcher's socket too."""
    for _ in range(1_000_000):
        if not driver.alive:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_a_death_ends_what_depended_on_it(tmp_path: Path, victim: str) -> None:
    """SIGKILL: every sandbox behind it is lost, says so, and nothing goes on unprotected."""

    async def scenario() -> None:
        async with _driver(tmp_path) as driver:
            made = await driver.create(model.new_id(), model.SandboxSpec(), policy.profile("moderate"))
            other = await driver.create(model.new_id(), model.SandboxSpec(), policy.profile("moderate"))
            inside = made.host_pid
            os.kill(_launcher_of(driver) if victim == "launcher" else inside, signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(made.ended), 30)
            with pytest.raises(errors.SandboxLost):
                await made.file_act("stat", "/")
            if victim == "launcher":
                await asyncio.wait_for(asyncio.shield(other.ended), 30)
                await _unlinked(driver)
            else:
                assert (await other.file_act("stat", "/")).entry is not None
            again = await driver.create(model.new_id(), model.SandboxSpec(), policy.profile("moderate"))
            assert (await again.file_act("stat", "/")).entry is not None
            assert again.isolation.level == "namespaces"

    asyncio.run(scenario())
    for _ in range(500):  # what was killed is gone when the kernel has come round to it
        if not _processes_of(tmp_path):
            break
    assert _processes_of(tmp_path) == set()


def test_a_lost_sandbox_is_not_silently_replaced(box: glass.Box) -> None:
    assert box.works()
    box.delete()
    for act in (lambda: box.exec("true"), lambda: box.read("/etc/passwd"), lambda: box.write("/tmp/x", "x")):
        with pytest.raises((errors.SandboxLost, errors.NotFound)):
            act()


@pytest.mark.parametrize("address", ["unix:/nowhere/cloche.sock", "http://127.0.0.1:1", "ftp://x", "unix:"])
def test_a_server_that_was_named_and_is_not_there_is_an_error(address: str) -> None:
    with pytest.raises(errors.ClocheError):
        glass.Box(server=address)


@pytest.mark.parametrize(
    "content", ["not toml [", "unknown = 1", "[policy]\nnetwork = 'all'", "[limits]\nmax_sandboxes = 'x'"]
)
def test_unreadable_settings_make_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(content)
    with pytest.raises(errors.ClocheError):
        Policy.load(str(path))
    with pytest.raises((errors.ClocheError, OSError)):
        Policy.load(str(tmp_path / "missing.toml"))
