"""Behaviours of terminals: a command under one cannot tell it from a real one."""

from __future__ import annotations

import signal

from cloche.testing.conformance.bench import Bench
from cloche.testing.conformance.registry import behaviour, expect, holds, same


@behaviour("pty")
async def a_terminal_is_a_terminal(bench: Bench) -> None:
    """All three standard descriptors are one, and it is the controlling terminal."""
    line = "test -t 0 && test -t 1 && test -t 2 && echo yes >/dev/tty"
    result = await (await bench.box()).exec(line, pty=(80, 24))
    same((result.exit_code, result.stdout), (0, "yes\r\n"))


@behaviour("pty")
async def without_a_terminal_there_is_none(bench: Bench) -> None:
    """A command that was not given a terminal has none, not even the caller's."""
    line = "test -t 0 || test -t 1 || test -t 2 || { : </dev/tty; } 2>/dev/null && echo yes || echo none"
    same(await (await bench.box()).out(line), "none\n")


@behaviour("pty")
async def a_terminal_has_the_size_asked_for(bench: Bench) -> None:
    """Columns and rows are the caller's from the first moment."""
    result = await (await bench.box()).exec(["stty", "size"], pty=(132, 43))
    same(result.stdout, "43 132\r\n")


@behaviour("pty")
async def a_terminal_can_be_resized(bench: Bench) -> None:
    """A new size is seen, and SIGWINCH tells of it."""
    line = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.02; done"
    running = await (await bench.box()).start(line, pty=(80, 24))
    await running.until(b"ready\r\n")
    await running.resize(100, 50)
    await running.until(b"50 100\r\n")
    same((await running.wait()).exit_code, 0)


@behaviour("pty")
async def control_c_interrupts(bench: Bench) -> None:
    """Typing ^C sends SIGINT to what runs in the foreground."""
    running = await (await bench.box()).start("echo ready; exec sleep 600", pty=(80, 24))
    await running.until(b"ready")
    await running.write(b"\x03")
    same((await running.wait()).signal, signal.SIGINT)


@behaviour("pty")
async def control_d_ends_the_input(bench: Bench) -> None:
    """The end of input on a terminal is a character, and a reader meets the end by it."""
    running = await (await bench.box()).start("echo ready; cat; echo end", pty=(80, 24))
    await running.until(b"ready")
    await running.write(b"typed\n")
    await running.until(b"typed\r\ntyped\r\n")
    await running.write(b"", end=True)
    holds((await running.wait()).stdout, "end\r\n")


@behaviour("pty")
async def a_terminal_echoes_what_is_typed(bench: Bench) -> None:
    """What is typed appears, once by echo, and is what the command reads."""
    running = await (await bench.box()).start("echo ready; read word; echo read=$word", pty=(80, 24))
    await running.until(b"ready\r\n")
    await running.write(b"hello\n")
    same((await running.wait()).stdout, "ready\r\nhello\r\nread=hello\r\n")


@behaviour("pty")
async def a_terminal_has_one_stream_in_exact_order(bench: Bench) -> None:
    """Both streams are the terminal, in the order of writing."""
    result = await (await bench.box()).exec(
        "for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done", pty=(80, 24)
    )
    same(result.stdout, "".join(f"o{n}\r\ne{n}\r\n" for n in range(1, 6)))
    same(result.stderr, "")


@behaviour("pty")
async def a_shell_on_a_terminal_has_job_control(bench: Bench) -> None:
    """An interactive shell suspends, lists and resumes jobs."""
    running = await (await bench.box()).start(["bash", "--norc", "-i"], pty=(80, 24), env={"PS1": "$ "})
    await running.write(b"sleep 600 &\n")
    await running.write(b"jobs; kill %1; wait; echo fin''ished\n")
    said = await running.until(b"finished\r\n")
    holds(said, b"[1]")
    lost = b"no job control" in said
    expect(not lost, "the shell says that it has no job control")
    await running.write(b"exit 5\n")
    same((await running.wait()).exit_code, 5)


@behaviour("pty")
async def two_terminals_are_two(bench: Bench) -> None:
    """What is typed on one terminal does not appear on another."""
    box = await bench.box()
    one = await box.start("tty; read x; echo one=$x", pty=(80, 24))
    two = await box.start("tty; read x; echo two=$x", pty=(80, 24))
    names = {(await one.until(b"\n")).strip(), (await two.until(b"\n")).strip()}
    same(len(names), 2, "terminals")
    await one.write(b"first\n")
    await two.write(b"second\n")
    holds((await one.wait()).stdout, "one=first")
    holds((await two.wait()).stdout, "two=second")


@behaviour("pty")
async def the_end_of_a_terminal_hangs_up(bench: Bench) -> None:
    """When the leader of a terminal has ended the result comes, although a job still holds the terminal."""
    result = await (await bench.box()).exec("trap '' HUP; sleep 600 & echo left; exit 3", pty=(80, 24))
    same((result.exit_code, result.stdout), (3, "left\r\n"))
