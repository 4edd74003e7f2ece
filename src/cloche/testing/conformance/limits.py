"""Behaviours of limits: held, and told honestly. Nothing here takes more than an unlimited host can give without harm."""

from __future__ import annotations

import asyncio

from cloche import model
from cloche.testing.conformance.bench import Bench, Box
from cloche.testing.conformance.registry import behaviour, expect, holds, refused, same

_HOG = "import time\nheld = [b'x' * (8 << 20) for _ in range(24)]\ntime.sleep(20)\nprint('survived')"
_MOST = 32  # under a limit of 24: where it can only be held per user, the user's other processes come and go meanwhile
_BOMB = """
import signal
children = []
try:
    for _ in range(120):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            signal.pause()
        children.append(pid)
except OSError: pass
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(json.dumps(len(children)))
"""


@behaviour("limits")
async def every_limit_says_how_it_is_held(bench: Bench) -> None:
    """Memory, processors, processes and disk each have a value, an enforcement, and what does it."""
    limits = (await bench.box()).info.limits
    same(sorted(limits), ["cpus", "disk_mib", "memory_mib", "pids"])
    for name, limit in limits.items():
        expect(limit.enforcement in ("enforced", "watched", "none"), f"{name} is {limit.enforcement!r}")
        expect(limit.by.strip(), f"{name} does not say by what")


@behaviour("limits")
async def limits_are_the_ones_asked_for(bench: Bench) -> None:
    """The values told are the values asked for."""
    limits = (await bench.box(memory_mib=96, pids=77, disk_mib=48)).info.limits
    same([limits[name].value for name in ("memory_mib", "pids", "disk_mib")], [96, 77, 48])


async def _hog(box: Box) -> model.ExecResult:
    return await box.exec(["python3", "-I", "-c", _HOG])


@behaviour("limits")
async def a_memory_hog_is_killed(bench: Bench) -> None:
    """A command that takes three times its memory is killed, and the result says why."""
    result = await _hog(await bench.box(memory_mib=64))
    same((result.stdout, result.ok, result.oom_killed), ("", False, True))
    same([(d.kind, d.evidence) for d in result.denials], [("limit", "limit")])


@behaviour("limits")
async def a_memory_hog_does_not_take_its_sandbox_along(bench: Bench) -> None:
    """After a hog was killed the sandbox answers, and later results do not say that they were killed."""
    box = await bench.box(memory_mib=64)
    expect((await _hog(box)).oom_killed, "the hog was not killed for its memory")
    result = await box.exec("echo here")
    same((result.stdout, result.oom_killed), ("here\n", False))


@behaviour("limits")
async def a_memory_hog_spares_other_sandboxes(bench: Bench) -> None:
    """A sandbox beside one whose memory is used up does not notice."""
    hog, other = await bench.box(memory_mib=64), await bench.box(memory_mib=64)
    running = await other.start("echo up; read x; echo alive", open_stdin=True)
    await running.until(b"up")
    expect((await _hog(hog)).oom_killed, "the hog was not killed for its memory")
    await running.write(b"\n")
    same((await running.wait()).stdout, "up\nalive\n")


@behaviour("limits")
async def memory_within_the_limit_is_granted(bench: Bench) -> None:
    """A command may use what was asked for."""
    code = "held = b'x' * (96 << 20); print(json.dumps(len(held)))"
    same(await (await bench.box(memory_mib=256)).python(code), 96 << 20)


@behaviour("limits")
async def a_fork_bomb_meets_its_limit(bench: Bench) -> None:
    """No more processes than asked for run at once, and the sandbox can be used afterwards."""
    box = await bench.box(pids=24)
    count = await box.python(_BOMB)
    expect(4 <= count <= _MOST, f"{count} processes were forked under a limit of 24")
    same(await box.out("echo here"), "here\n")


@behaviour("limits")
async def a_fork_bomb_spares_other_sandboxes(bench: Bench) -> None:
    """A sandbox beside a fork bomb starts its processes."""
    bomb, other = await bench.box(pids=24), await bench.box(pids=24)
    count, said = await asyncio.gather(
        bomb.python(_BOMB), other.out("for i in 1 2 3 4 5; do /bin/echo $i; done")
    )
    same(said, "1\n2\n3\n4\n5\n")
    expect(count <= _MOST, f"{count} processes were forked under a limit of 24")


@behaviour("limits")
async def the_disk_has_the_size_asked_for(bench: Bench) -> None:
    """Files beyond disk_mib are not written, in one piece or in several, and what fits is."""
    box = await bench.box(disk_mib=16)
    result = await box.exec("for i in 1 2 3 4 5; do head -c 8388608 /dev/zero >file$i || exit 9; done")
    same(result.exit_code, 9)
    holds(result.stderr, "No space left on device")
    size = int(await box.out("cat file* | wc -c"))
    expect(4 << 20 <= size <= 16 << 20, f"{size} bytes were written to 16 MiB")


@behaviour("limits")
async def a_full_disk_is_told_by_the_api(bench: Bench) -> None:
    """A file that does not fit is sandbox_disk_full, leaves nothing, and when there is room again all is well."""
    box = await bench.box(disk_mib=16)
    with refused("sandbox_disk_full"):
        await box.write("large", b"x" * (24 << 20))
    same(await box.out("ls -A"), "")
    await box.write("small", "fits")
    same(await box.read("small"), b"fits")


@behaviour("limits")
async def a_full_disk_spares_other_sandboxes(bench: Bench) -> None:
    """Each sandbox has a disk of its own."""
    full, other = await bench.box(disk_mib=16), await bench.box(disk_mib=16)
    expect((await full.exec("head -c 25165824 /dev/zero >large")).exit_code, "24 MiB fitted on 16")
    same(await other.out("head -c 8388608 /dev/zero >file && wc -c <file"), "8388608\n")


@behaviour("limits")
async def usage_shows_what_is_used(bench: Bench) -> None:
    """Memory and processes of a sandbox are told while they are used."""
    box = await bench.box()
    code = "held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    running = await box.start(["python3", "-I", "-c", f"import sys\n{code}"], open_stdin=True)
    await running.until(b"ready")
    usage = await bench.engine.usage(box.id)
    expect(64 <= usage.memory_mib < 512, f"64 MiB in use are told as {usage.memory_mib:.1f}")
    expect(1 <= usage.pids < 20, f"a process or two are told as {usage.pids}")


@behaviour("limits")
async def processor_time_is_counted(bench: Bench) -> None:
    """The processor time that a sandbox has used adds up."""
    box = await bench.box()
    await box.python("import time\nwhile time.process_time() < 0.2: pass\nprint(1)")
    used = (await bench.engine.usage(box.id)).cpu_ms
    expect(used >= 150, f"200 ms are told as {used:.0f}")


@behaviour("limits")
async def a_feature_that_is_missing_fails_the_creation(bench: Bench) -> None:
    """What the policy requires and the driver cannot give makes creation fail, by name, and nothing is made."""
    before = bench.engine.live
    with refused("kernel_feature_missing"):
        await bench.box(policy={"isolation": {"required": ["a_feature_that_no_kernel_has"]}})
    same(bench.engine.live, before)
