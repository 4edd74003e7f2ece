"""Behaviours of a sandbox's life: it begins whole, ends whole, and says how it ended."""

from __future__ import annotations

import asyncio
import os
import time

from cloche import interfaces, model
from cloche.linux import processes
from cloche.testing.conformance.bench import Bench, Box, eventually, processes_with, unique_seconds
from cloche.testing.conformance.registry import behaviour, expect, refused, same

# ── beginning ──────────────────────────────────────────────────────────────────────────────────────


@behaviour("life")
async def sandboxes_can_be_made_side_by_side(bench: Bench) -> None:
    """Eight creations at once give eight sandboxes that work."""
    made = await asyncio.gather(*(bench.engine.create(bench.spec(env={"N": str(n)})) for n in range(8)))
    try:
        request = model.ExecRequest(command="echo $N; touch mine; ls")
        results = await asyncio.gather(*(bench.engine.exec(info.id, request) for info in made))
        same([r.stdout for r in results], [f"{n}\nmine\n" for n in range(8)])
    finally:
        await asyncio.gather(*(bench.engine.delete(info.id) for info in made))


@behaviour("life")
async def a_sandbox_says_how_strong_it_is(bench: Bench) -> None:
    """Level and driver are told; what the level promises and this host cannot give is a sentence each."""
    isolation = (await bench.box()).info.isolation
    same((isolation.level, isolation.driver), (bench.driver.level, bench.driver.name))
    expect(isolation.seccomp, "there is no filter, which every level has")
    expect(isolation.user_namespace or isolation.level == "process", "this level has a user namespace")
    expect(all(" " in sentence for sentence in isolation.missing), f"not sentences: {isolation.missing}")


@behaviour("life")
async def a_sandbox_starts_clean(bench: Bench) -> None:
    """Nothing of an earlier sandbox is in a new one."""
    first = await bench.box()
    await first.out('echo x >left; echo x >"$HOME/left"; echo x >"${TMPDIR:-/tmp}/left"')
    await bench.engine.delete(first.id)
    second = await bench.box()
    same(await second.out('ls -A . "$HOME" "${TMPDIR:-/tmp}" | grep left; ls -A'), "")


# ── ending ─────────────────────────────────────────────────────────────────────────────────────────


async def _daemons(box: Box, mark: str) -> None:
    """Processes of every sort that try to stay."""
    line = (
        f"nohup sleep {mark} >/dev/null 2>&1 & (setsid sleep {mark} &) ; trap '' TERM HUP INT; "
        f"setsid sh -c 'trap \"\" TERM HUP; sleep {mark} & sleep {mark}' & echo ready; exec sleep {mark}"
    )
    running = await box.start(line)
    await running.until(b"ready")
    await eventually(lambda: len(processes_with(mark)) >= 4, "the daemons did not start")


@behaviour("life")
async def deleting_leaves_no_process(bench: Bench) -> None:
    """When delete returns nothing of the sandbox runs, however it tried to hide."""
    box = await bench.box()
    mark = unique_seconds()
    await _daemons(box, mark)
    await bench.engine.delete(box.id)
    same(processes_with(mark), [], "processes left")


@behaviour("life")
async def deleting_twice_is_harmless(bench: Bench) -> None:
    """Two deletions at once both return; killing a machine that is gone does, too."""
    box = await bench.box()
    await asyncio.gather(bench.engine.delete(box.id), box.machine.kill("again"))
    await box.machine.kill("and again")
    box.machine.kill_now()
    expect(box.machine.ended.done(), "the machine does not say that it ended")


@behaviour("life")
async def a_deleted_sandbox_says_so(bench: Bench) -> None:
    """Every use of a sandbox after its end is sandbox_lost, by its engine and its machine."""
    box = await bench.box()
    await bench.engine.delete(box.id)
    with refused("sandbox_lost"):
        await bench.engine.info(box.id)
    with refused("sandbox_lost"):
        await box.exec("true")
    with refused("sandbox_lost"):
        await box.machine.file_act("stat", "/workspace")
    with refused("sandbox_lost"):
        await box.machine.bind(interfaces.Binding(env={"A": "1"}))


@behaviour("life")
async def the_end_is_announced_with_its_reason(bench: Bench) -> None:
    """`ended` resolves once, with the words given to kill, and not before."""
    box = await bench.box()
    expect(not box.machine.ended.done(), "a live machine says that it has ended")
    await box.machine.kill("a reason of mine")
    same(box.machine.ended.result(), "a reason of mine")


@behaviour("life")
async def a_command_under_way_learns_of_the_end(bench: Bench) -> None:
    """Whoever waits for a command when its sandbox is deleted gets SandboxLost, from the engine and from the machine."""
    box = await bench.box()
    running = await box.start("echo ready; sleep 600")
    await running.until(b"ready")
    with open(os.devnull, "r+b") as null:
        fds = [null.fileno()] * 3
        child = await box.machine.start(interfaces.Start(["sleep", "600"], {}, None, "user", fds))
    waiting = asyncio.ensure_future(running.wait())
    await bench.engine.delete(box.id)
    with refused("sandbox_lost"):
        await waiting
    with refused("sandbox_lost"):
        await child.exited


@behaviour("life")
async def a_machine_that_dies_is_lost(bench: Bench) -> None:
    """A sandbox killed behind the engine's back is lost: it is told, it is not listed, others live."""
    box, other = await bench.box(), await bench.box()
    mark = unique_seconds()
    await _daemons(box, mark)
    box.machine.kill_now()
    expect(await asyncio.shield(box.machine.ended), "the end has no reason")
    await eventually(lambda: bench.engine.live == 1, "it is still listed")
    with refused("sandbox_lost"):
        await box.exec("true")
    await eventually(lambda: not processes_with(mark), "processes are left")
    same(await other.out("echo alive"), "alive\n")


@behaviour("life")
async def a_sandbox_ends_when_its_time_is_up(bench: Bench) -> None:
    """timeout_s of a sandbox ends it and whatever runs in it."""
    box = await bench.box(timeout_s=0.5)
    same(await asyncio.shield(box.machine.ended), "its time was up")
    with refused("sandbox_lost"):
        await box.exec("true")


@behaviour("life")
async def a_sandbox_that_nobody_uses_ends(bench: Bench) -> None:
    """idle_timeout_s counts from the last use, and a running command is use."""
    box = await bench.box(idle_timeout_s=0.3)
    same(await box.out("sleep 0.5; echo used"), "used\n")
    same(await asyncio.shield(box.machine.ended), "nobody used it")


# ── pausing ────────────────────────────────────────────────────────────────────────────────────────


async def _spinning(bench: Bench) -> Box:
    box = await bench.box()
    running = await box.start("echo ready; while :; do :; done")
    await running.until(b"ready")
    return box


def _spin(seconds: float) -> None:
    """Let others run for a while, by being busy ourselves."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        os.sched_yield()


@behaviour("life")
async def a_paused_sandbox_stands_still(bench: Bench) -> None:
    """While paused a busy loop uses no processor time; resumed, it goes on."""
    box = await _spinning(bench)
    same((await bench.engine.suspend(box.id)).phase, "paused")
    before = box.machine.usage().cpu_ms
    _spin(0.05)
    same(box.machine.usage().cpu_ms, before, "processor time while paused")
    same((await bench.engine.resume(box.id)).phase, "running")
    await eventually(lambda: box.machine.usage().cpu_ms > before, "it does not go on")


@behaviour("life")
async def use_wakes_a_paused_sandbox(bench: Bench) -> None:
    """A command wakes the sandbox by itself, and what ran before with it; looking does not."""
    box = await bench.box()
    running = await box.start("echo up; read x; echo alive", open_stdin=True)
    await running.until(b"up")
    await bench.engine.suspend(box.id)
    same((await bench.engine.info(box.id)).phase, "paused")
    same(await box.out("echo awake"), "awake\n")
    same((await bench.engine.info(box.id)).phase, "running")
    await running.write(b"\n")
    same((await running.wait()).stdout, "up\nalive\n")


@behaviour("life")
async def a_paused_sandbox_can_be_deleted(bench: Bench) -> None:
    """Deleting a sandbox while it is paused leaves nothing, too."""
    box = await bench.box()
    mark = unique_seconds()
    await _daemons(box, mark)
    await bench.engine.suspend(box.id)
    await bench.engine.delete(box.id)
    same(processes_with(mark), [], "processes left")


# ── the driver ─────────────────────────────────────────────────────────────────────────────────────


@behaviour("life")
async def sweeping_spares_the_living(bench: Bench) -> None:
    """A sweep removes what dead engines left, not what this one runs."""
    box = await bench.box()
    running = await box.start("echo up; read x; echo alive", open_stdin=True)
    await running.until(b"up")
    swept = await asyncio.to_thread(bench.driver.sweep, set())
    expect(box.machine.id not in swept, "a live sandbox was swept")
    await running.write(b"\n")
    same((await running.wait()).stdout, "up\nalive\n")
    same(await box.out("echo still"), "still\n")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@behaviour("life")
async def closing_the_driver_leaves_nothing(bench: Bench) -> None:
    """After close there is no process, descriptor or directory of a sandbox; closing twice is harmless."""
    await bench.retire()
    mark = unique_seconds()
    strangers, descriptors = processes.descendants(os.getpid()), _descriptors()
    async with Bench(bench.make_driver) as own:
        await _daemons(await own.box(), mark)
        await own.engine.delete((await own.box()).id)
        await own.engine.aclose()
        await own.driver.close()
        same(processes_with(mark), [], "processes left")
        left = os.path.join(own.home, "sandboxes")
        same(os.listdir(left) if os.path.isdir(left) else [], [], "directories left")
    await eventually(
        lambda: _descriptors() <= descriptors, f"{descriptors} descriptors before, {_descriptors()} after"
    )
    await eventually(lambda: not _running(strangers), f"processes left: {_running(strangers)}")


def _running(strangers: list[int]) -> list[int]:
    """Our descendants that run, but for the strangers' trees. Ended ones are reaped by whoever adopted them."""
    spared = {*strangers, *(pid for stranger in strangers for pid in processes.descendants(stranger))}
    return [
        pid for pid in processes.descendants(os.getpid()) if pid not in spared and _state(pid) not in "ZX"
    ]


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
