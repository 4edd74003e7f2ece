"""Behaviours in time: limits that hold for everything a command started, and ends that do not wait for strangers.

Who is still alive is asked of a lock, not of a clock. The command takes a lock on a file and passes the descriptor on to
whatever it starts, however that hides; when the lock can be taken again, nothing of it is left.
"""

from __future__ import annotations

import asyncio
import signal

from cloche import model
from cloche.testing.conformance.bench import Bench, Box
from cloche.testing.conformance.registry import behaviour, expect, same

LOCKED = "exec 9>lock; flock 9; "
_FREE = ["flock", "--timeout", "3", "--exclusive", "lock", "echo", "free"]
_HELD = ["flock", "--nonblock", "--exclusive", "lock", "echo", "free"]


async def _nothing_left(box: Box) -> None:
    said = await box.exec(_FREE)
    same(said.stdout, "free\n", "something of the command still runs and holds the lock")


async def _time_out(box: Box, line: str) -> model.ExecResult:
    """Run a line that says `ready` and goes on for ever, with a hard limit that is longer where the machine is slow."""
    limit = 0.25
    while True:
        result = await box.exec(LOCKED + line, timeout_s=limit)
        if "ready\n" in result.stdout or limit > 4:
            return result
        limit *= 2


async def _killed_whole(box: Box, line: str) -> None:
    result = await _time_out(box, line)
    same((result.timed_out, result.exit_code, result.signal), (True, None, signal.SIGKILL))
    same(result.stdout, "ready\n")
    await _nothing_left(box)


@behaviour("time")
async def a_hard_limit_kills_the_command(bench: Bench) -> None:
    """Past timeout_s the command is killed, and the result says so."""
    await _killed_whole(await bench.box(), "echo ready; sleep 600")


@behaviour("time")
async def a_hard_limit_kills_a_command_that_ignores_signals(bench: Bench) -> None:
    """There is no politeness to exploit."""
    await _killed_whole(
        await bench.box(), "trap '' TERM INT HUP QUIT; echo ready; while :; do sleep 600; done"
    )


@behaviour("time")
async def a_hard_limit_keeps_what_was_written(bench: Bench) -> None:
    """Output from before the limit is in the result, of both streams."""
    result = await _time_out(await bench.box(), "echo problem >&2; echo ready; sleep 600")
    same((result.timed_out, result.stdout, result.stderr), (True, "ready\n", "problem\n"))


@behaviour("time")
async def a_hard_limit_kills_background_jobs(bench: Bench) -> None:
    """What the shell put into the background dies with it."""
    await _killed_whole(await bench.box(), "sleep 600 & sleep 601 & echo ready; wait")


@behaviour("time")
async def a_hard_limit_kills_what_nohup_started(bench: Bench) -> None:
    """nohup does not help."""
    await _killed_whole(await bench.box(), "nohup sleep 600 >/dev/null 2>&1 & echo ready; wait")


@behaviour("time")
async def a_hard_limit_kills_what_setsid_started(bench: Bench) -> None:
    """A session of its own does not help."""
    await _killed_whole(await bench.box(), "setsid sleep 600 >/dev/null 2>&1 & echo ready; sleep 600")


@behaviour("time")
async def a_hard_limit_kills_what_was_forked_twice(bench: Bench) -> None:
    """A daemon, orphaned and in a session of its own, does not get away."""
    await _killed_whole(
        await bench.box(), "(setsid sh -c 'sleep 600 & sleep 601' >/dev/null 2>&1 &); echo ready; sleep 600"
    )


@behaviour("time")
async def a_hard_limit_kills_daemons_while_others_run(bench: Bench) -> None:
    """A daemon is known for its command's although another command is live beside it."""
    box = await bench.box()
    other = await box.start("echo up; read x", open_stdin=True)
    await other.until(b"up")
    await _killed_whole(
        box, "(setsid sh -c 'sleep 600 & sleep 601' >/dev/null 2>&1 &); echo ready; sleep 600"
    )


@behaviour("time")
async def a_hard_limit_kills_process_substitutions(bench: Bench) -> None:
    """What a process substitution started dies too."""
    await _killed_whole(await bench.box(), "echo ready; cat <(sleep 600)")


@behaviour("time")
async def a_killed_command_leaves_the_sandbox_usable(bench: Bench) -> None:
    """After a hard limit the next command runs as if nothing had been."""
    box = await bench.box()
    await _time_out(box, "echo ready; sleep 600")
    same(await box.out("echo still here"), "still here\n")


@behaviour("time")
async def a_hard_limit_spares_other_commands(bench: Bench) -> None:
    """Only the command that took too long is killed."""
    box = await bench.box()
    other = await box.start("echo up; read x; echo alive $x", open_stdin=True)
    await other.until(b"up")
    same((await _time_out(box, "echo ready; sleep 600")).timed_out, True)
    await other.write(b"still\n")
    result = await other.wait()
    same((result.exit_code, result.stdout), (0, "up\nalive still\n"))


@behaviour("time")
async def a_hard_limit_longer_than_the_command_changes_nothing(bench: Bench) -> None:
    """A command that is fast enough ends by itself, with its own exit code."""
    result = await (await bench.box()).exec("exit 6", timeout_s=60)
    same((result.exit_code, result.timed_out), (6, False))


@behaviour("time")
async def a_soft_limit_hands_back_a_running_command(bench: Bench) -> None:
    """Past background_after_s the result names the running command, which goes on to its end."""
    box = await bench.box()
    result = await box.exec(
        "while [ ! -e go ]; do sleep 0.01; done; echo went on; exit 8", background_after_s=0.05
    )
    same((result.exit_code, result.signal, result.timed_out), (None, None, False))
    expect(result.process, "the result names no process")
    await box.write("go", "")
    ended = await bench.engine.wait(box.id, result.process or "")
    same((ended.exit_code, ended.stdout), (8, "went on\n"))


@behaviour("time")
async def an_orphan_that_holds_the_pipes_does_not_delay_the_result(bench: Bench) -> None:
    """The result comes when the leader has ended, although a child keeps its pipes open."""
    box = await bench.box()
    result = await box.exec(f"{LOCKED} sleep 600 & echo done; exit 2")
    same((result.exit_code, result.stdout), (2, "done\n"))
    same((await box.exec(_HELD)).exit_code, 1, "the orphan should still run, and hold the lock")


@behaviour("time")
async def what_was_written_before_the_end_is_in_the_result(bench: Bench) -> None:
    """The pipes are read empty after the leader ended: no last line is lost, a hundred times."""
    box = await bench.box()
    for number in range(100):
        same(await box.out(["echo", str(number)]), f"{number}\n")


@behaviour("time")
async def cancelling_kills_the_command(bench: Bench) -> None:
    """A caller that is cancelled in the middle of a command leaves nothing running."""
    box = await bench.box()
    await box.out("mkfifo started")
    task = asyncio.ensure_future(box.exec(f"{LOCKED} setsid sleep 600 & echo >started; sleep 600"))
    await box.out("read x <started")
    task.cancel()
    await asyncio.wait({task})
    expect(task.cancelled(), "the cancelled call came back")
    await _nothing_left(box)


@behaviour("time")
async def a_follower_that_leaves_stops_nothing(bench: Bench) -> None:
    """Following is looking: who stops does not stop the command."""
    running = await (await bench.box()).start("echo one; read x; echo two", open_stdin=True)
    await running.until(b"one")  # the follower is gone when this returns
    await running.write(b"\n", end=True)
    result = await running.wait()
    same((result.exit_code, result.stdout), (0, "one\ntwo\n"))


@behaviour("time")
async def killing_the_tree_of_a_command_kills_all_of_it(bench: Bench) -> None:
    """A kill by the caller reaches daemons as a hard limit does."""
    box = await bench.box()
    running = await box.start(f"{LOCKED} (setsid sleep 600 &) ; nohup sleep 601 & echo ready; sleep 602")
    await running.until(b"ready")
    await running.signal(signal.SIGKILL, tree=True)
    same((await running.wait()).signal, signal.SIGKILL)
    await _nothing_left(box)
