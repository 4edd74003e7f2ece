import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from cloche import errors, interfaces, model, policy
from cloche.drivers import bubblewrap
from tests.drivers import rungs
from tests.drivers.rungs import Box, in_box

make = bubblewrap.BubblewrapDriver


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# ── refusing to start ──────────────────────────────────────────────────────────────────────────────


def test_a_host_without_bubblewrap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.NotSupported, match="not installed") as refusal:
        asyncio.run(make(str(tmp_path), program=str(tmp_path / "bwrap")).start())
    assert refusal.value.hint is not None
    assert "bubblewrap 0.8" in refusal.value.hint


def test_a_blocked_bubblewrap_is_refused_in_its_own_words(tmp_path: Path) -> None:
    blocked = script(tmp_path / "bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    with pytest.raises(errors.NotSupported, match="setting up uid map: Permission denied"):
        asyncio.run(make(str(tmp_path / "home"), program=blocked).start())


def test_an_old_bubblewrap_is_used_and_said(tmp_path: Path) -> None:
    real = shutil.which("bwrap") or pytest.skip("bubblewrap is not installed")
    old = script(
        tmp_path / "bwrap", f'[ "$1" = --version ] && echo bubblewrap 0.7.0 && exit; exec {real} "$@"'
    )

    async def work(box: Box) -> None:
        assert any("older than 0.8" in sentence for sentence in box.machine.isolation.missing)
        assert (await box.run("unshare -r true")).exit_code != 0

    in_box(lambda home: make(home, program=old), tmp_path, work)


@pytest.mark.parametrize(
    ("said", "version"),
    [("bubblewrap 0.8.0", (0, 8, 0)), ("bubblewrap 0.11", (0, 11)), ("", ()), ("bubblewrap unknown", ())],
)
def test_versions(said: str, version: tuple[int, ...]) -> None:
    assert bubblewrap.parse_version(said) == version


def test_an_interpreter_of_the_image_is_not_shown_twice() -> None:
    prefix = os.path.realpath(sys.base_prefix)
    assert bubblewrap.interpreter((prefix,)).prefix is None
    assert bubblewrap.interpreter(()).prefix == prefix


# ── the behaviours of every rung ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("behaviour", rungs.BEHAVIOURS, ids=lambda work: work.__name__)
def test_behaviour(behaviour: rungs.Work, tmp_path: Path) -> None:
    in_box(make, tmp_path, behaviour)


def test_the_claims_hold_inside(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        claimed = box.machine.isolation
        assert (claimed.level, claimed.driver, claimed.root) == ("namespaces", "bubblewrap", "read-only")
        for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            inside = (await box.run(["readlink", f"/proc/self/ns/{name}"])).out.strip()
            assert inside != os.readlink(f"/proc/self/ns/{name}"), name
        assert (await box.run("id -u; id -un; hostname; pwd")).out == "1000\nuser\ncloche\n/workspace\n"
        assert (await box.run("touch /planted /etc/planted")).exit_code == 1
        assert (await box.run("cat /proc/sys/user/max_user_namespaces")).out != "", (
            "the host's value is not ours to change"
        )

    in_box(make, tmp_path, work)


def test_host_processes_cannot_be_seen(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        pids = (await box.run("ls /proc | grep -c '^[0-9]'")).out
        assert int(pids) <= 6
        assert (await box.run("cat /proc/1/environ /proc/1/mem")).out == ""
        await box.run("kill -9 -1")
        assert (await box.run("echo on")).out == "on\n"

    in_box(make, tmp_path, work)


def test_what_the_host_owns_cannot_be_changed(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        before = {
            path: os.stat(path).st_mode
            for path in ("/dev/null", "/proc/version", "/proc/sys/kernel/hostname")
        }
        for path in before:
            assert (await box.run(["chmod", "0700", path])).exit_code == 1, path
        for name in ("kernel/core_pattern", "kernel/hostname", "vm/overcommit_memory"):
            assert (await box.run(f"echo x > /proc/sys/{name}")).exit_code != 0, name
        assert {path: os.stat(path).st_mode for path in before} == before
        assert (await box.run("echo x > /dev/null")).exit_code == 0

    in_box(make, tmp_path, work)


def test_private_directories_have_the_size_asked_for(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        for path in ("/workspace", "/tmp", "/home/user", "/var/tmp", "/dev/shm"):
            ran = await box.run(f"head -c 64M /dev/zero > {path}/big")
            assert "No space left" in ran.err, path
            assert (await box.run(f"rm {path}/big && echo x > {path}/small")).exit_code == 0
        assert (
            await box.run("head -c 100k /dev/zero > /dev/big; head -c 100k /dev/zero > /run/big")
        ).exit_code == 1

    in_box(make, tmp_path, work, resources=model.Resources(disk_mib=8, memory_mib=64))


def test_a_port_inside_can_be_reached(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        with pytest.raises(errors.ClocheError):
            await box.machine.connect(8000)
        code = "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True); s.accept()[0].send(b'hi')"
        child, out, err = await box.start(["python3", "-c", code])
        assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
        with socket.socket(fileno=await box.machine.connect(8000)) as link:
            assert await asyncio.to_thread(link.recv, 10) == b"hi"
        await child.exited
        os.close(out)
        os.close(err)

    in_box(make, tmp_path, work)


def test_a_policy_without_landlock_still_runs_and_says_so(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        assert "Landlock is not enabled in this kernel" in box.machine.isolation.missing
        await rungs.host_files_cannot_be_written(box)

    in_box(lambda home: make(home, landlock_abi=0), tmp_path, work)


# ── creation that fails, and ends ──────────────────────────────────────────────────────────────────


def test_what_cannot_be_given_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    async def whole() -> None:
        driver = await rungs.started(lambda home: make(home, landlock_abi=0), tmp_path)
        required = policy.Merged(isolation=policy.Least(required=("landlock",)))
        with pytest.raises(errors.NotSupported, match="requires 'landlock'"):
            await driver.create("a" * 20, model.SandboxSpec(), required)
        exposure = interfaces.Exposure(root=str(tmp_path), owner=(0, 0))
        with pytest.raises(errors.NotSupported, match="workspace"):
            await driver.create("a" * 20, model.SandboxSpec(), rungs.POLICY, exposure)
        assert driver.machines == {}
        await driver.close()
        with pytest.raises(errors.SandboxError, match="closed"):
            await driver.create("a" * 20, model.SandboxSpec(), rungs.POLICY)

    asyncio.run(whole())
    assert rungs.groups_of(os.getpid()) == []


def test_a_failing_creation_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    async def whole() -> None:
        driver = await rungs.started(make, tmp_path)
        driver._bwrap = script(tmp_path / "bwrap", "echo 'bwrap: no room' >&2; exit 1")  # type: ignore[attr-defined]
        with pytest.raises(errors.SandboxError, match="no room"):
            await driver.create("a" * 20, model.SandboxSpec(), rungs.POLICY)
        assert driver.machines == {}
        await driver.close()

    descriptors = len(os.listdir("/proc/self/fd"))
    asyncio.run(whole())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert rungs.groups_of(os.getpid()) == []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    mark = f"1{os.getpid()}3"

    async def work(box: Box) -> None:
        child, out, err = await box.start(f"(setsid sh -c 'sleep {mark} & echo up' &); sleep {mark}")
        assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
        assert rungs.mounts_naming("cloche") == []
        await box.machine.kill("enough")
        assert rungs.carrying(mark) == []
        assert await box.machine.ended == "enough"
        with pytest.raises(errors.SandboxLost):
            await child.exited
        with pytest.raises(errors.SandboxLost):
            await box.run("true")
        await box.machine.kill("twice is harmless")
        os.close(out)
        os.close(err)

    descriptors = len(os.listdir("/proc/self/fd"))
    in_box(make, tmp_path, work)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert rungs.groups_of(os.getpid()) == []
    assert rungs.mounts_naming(str(tmp_path)) == []


def test_a_killed_guest_is_a_lost_sandbox(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        os.kill(box.machine.host_pid, 9)
        await box.machine.ended
        with pytest.raises(errors.SandboxLost):
            await box.run("true")

    in_box(make, tmp_path, work)


def test_a_killed_engine_leaves_nothing(tmp_path: Path) -> None:
    rungs.a_killed_engine_leaves_nothing(make, "bubblewrap", "BubblewrapDriver", tmp_path)
