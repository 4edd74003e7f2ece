"""The namespaces driver without an engine: births, ends, and what a launcher must keep to itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloche import errors, interfaces, model, policy
from cloche.drivers import namespaces, spawning
from cloche.guest import wire
from cloche.linux import processes

Work = Callable[[namespaces.NamespacesDriver], Awaitable[None]]


def with_driver(home: Path, work: Work) -> None:
    async def run() -> None:
        driver = namespaces.NamespacesDriver(str(home))
        await driver.start()
        try:
            await work(driver)
        finally:
            await driver.close()

    asyncio.run(run())


async def create(
    driver: namespaces.NamespacesDriver, profile: str = "moderate", **spec: object
) -> namespaces.NamespacesMachine:
    return await driver.create(model.new_id(), model.SandboxSpec(**spec), policy.profile(profile))  # type: ignore[arg-type]


async def output_of(machine: interfaces.Machine, *argv: str) -> bytes:
    reading, writing = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        child = await machine.start(interfaces.Start(argv, {}, None, "user", [null, writing, writing]))
    finally:
        os.close(writing)
        os.close(null)
    await child.exited
    try:
        return os.read(reading, 65536)
    finally:
        os.close(reading)


def namespaces_of(pid: int) -> dict[str, str]:
    return {
        name: os.readlink(f"/proc/{pid}/ns/{name}")
        for name in ("pid", "net", "mnt", "user", "ipc", "uts", "cgroup")
    }


def test_a_required_feature_that_is_missing_refuses_creation_and_leaves_nothing(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        rules = policy.parse({"isolation": {"required": ["microvm"]}})
        with pytest.raises(errors.NotSupported) as refusal:
            await driver.create(model.new_id(), model.SandboxSpec(), rules)
        assert refusal.value.code == "kernel_feature_missing"

    with_driver(tmp_path, work)


def test_a_failing_step_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        missing = interfaces.Exposure(
            root="/", owner=(0, 0), binds=(interfaces.Shown("/does/not/exist", "/x"),), cwd="/"
        )
        with pytest.raises(errors.SandboxError) as failure:
            await driver.create(model.new_id(), model.SandboxSpec(), policy.profile("moderate"), missing)
        assert "bind /x" in failure.value.message
        machine = await create(driver)  # and the next one works
        assert await output_of(machine, "echo", "hi") == b"hi\n"

    with_driver(tmp_path, work)


def test_sandboxes_share_no_namespace_with_each_other_or_with_us(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        machines = [await create(driver) for _ in range(3)]
        seen = [namespaces_of(m.host_pid) for m in machines] + [namespaces_of(os.getpid())]
        for name in seen[0]:
            assert len({one[name] for one in seen}) == len(seen), name

    if os.geteuid() != 0:
        pytest.skip("namespaces of an agent are readable by root only: it is not dumpable")
    with_driver(tmp_path, work)


def test_uid_ranges_differ_between_live_sandboxes(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        machines = [await create(driver) for _ in range(3)]
        maps = {Path(f"/proc/{m.host_pid}/uid_map").read_text() for m in machines}
        assert len(maps) == 3

    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid")
    with_driver(tmp_path, work)


def test_the_launcher_stays_in_its_own_namespaces(tmp_path: Path, until: Callable[..., None]) -> None:
    """After making sandboxes it sits where it sat, or its next children would share a sandbox's network or pids. While it
    makes a network namespace it is in that one for a moment, hence the waiting."""

    async def work(driver: namespaces.NamespacesDriver) -> None:
        first = await create(driver)
        launcher = int(Path(f"/proc/{first.host_pid}/stat").read_text().rpartition(")")[2].split()[1])
        samples = [namespaces_of(launcher)]
        while samples[-10:] != samples[-1:] * 10:  # where it sits, not where it just is
            await asyncio.sleep(0.01)
            samples.append(namespaces_of(launcher))
        before = samples[-1]
        for _ in range(4):
            await create(driver)
        until(lambda: namespaces_of(launcher) == before)

    if os.geteuid() != 0:
        pytest.skip("another user's namespaces are not readable")
    with_driver(tmp_path, work)


def test_the_end_of_the_launcher_is_the_end_of_its_sandboxes(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        machine = await create(driver)
        pid = machine.host_pid
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        watch = os.pidfd_open(pid)
        os.kill(parent, signal.SIGKILL)
        # Told by the launcher's socket or by the guest's, whichever the loop looks at first; by nothing else.
        assert await asyncio.wait_for(machine.ended, 10) in ("the launcher ended", "the guest ended")
        assert processes.wait_exit(watch, 10)
        os.close(watch)
        with pytest.raises(errors.SandboxLost):
            await output_of(machine, "true")
        assert await output_of(await create(driver), "echo", "again") == b"again\n"

    with_driver(tmp_path, work)


def test_the_end_of_the_engine_s_socket_ends_the_launcher() -> None:
    launch = spawning.start()
    pidfd = os.pidfd_open(launch.pid)
    launch.link.close()
    assert processes.wait_exit(pidfd, 10)
    os.close(pidfd)
    os.waitpid(launch.pid, 0)


def test_killing_twice_is_harmless(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        machine = await create(driver)
        await asyncio.gather(machine.kill("one"), machine.kill("two"))
        await machine.kill("three")
        assert machine.ended.result() == "one"

    with_driver(tmp_path, work)


def test_a_disk_of_another_size_than_the_usual_one_is_exactly_that_size(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        resources = model.Resources(disk_mib=96)
        machine = await create(driver, resources=resources)
        size = int((await output_of(machine, "df", "--output=size", "-B1", "/")).split()[1])
        assert 60 << 20 < size <= 96 << 20

    with_driver(tmp_path, work)


def test_sweeping_spares_the_living(tmp_path: Path) -> None:
    async def work(driver: namespaces.NamespacesDriver) -> None:
        machine = await create(driver)
        driver.sweep(set())
        assert await output_of(machine, "echo", "alive") == b"alive\n"

    with_driver(tmp_path, work)


def test_no_frame_of_the_wire_is_larger_than_a_socket_takes() -> None:
    here, there = wire.pair()
    with here, there:
        wire.send(here, {"text": "x" * (3 * wire.MAX_FRAME)}, [0])
        received = wire.receive(there)
        assert received is not None
        message, fds = received
        wire.close_all(fds)
        assert len(str(message["text"])) == 3 * wire.MAX_FRAME
        assert len(fds) == 1
