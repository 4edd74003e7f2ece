"""Behaviours of commands: what reaches them, what comes back, and that nothing is changed on the way."""

from __future__ import annotations

import asyncio
import signal

from cloche import interfaces, model
from cloche.testing.conformance.bench import SECRET_VARIABLE, Bench, Box
from cloche.testing.conformance.registry import behaviour, expect, holds, lacks, refused, same

ALL_BYTES = bytes(range(256)) * 64
ALLOWED_VARIABLES = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "SHELL",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "TMPDIR",
        "TERM",
        "HOSTNAME",
        "TZ",
        "LC_ALL",
        "CLOCHE_WORKSPACE",
    ]
)

# ── how a command ended ────────────────────────────────────────────────────────────────────────────


@behaviour("exec")
async def exit_code_0_is_reported(bench: Bench) -> None:
    """A command that succeeds has exit code 0, no signal, and what it printed."""
    result = await (await bench.box()).exec("echo done")
    same((result.exit_code, result.signal, result.timed_out, result.stdout), (0, None, False, "done\n"))


@behaviour("exec")
async def exit_code_1_is_reported(bench: Bench) -> None:
    """A command that ends with 1 has exit code 1."""
    same((await (await bench.box()).exec(["false"])).exit_code, 1)


@behaviour("exec")
async def exit_code_42_is_reported(bench: Bench) -> None:
    """A command that ends with 42 has exit code 42; failing is a result, not an error."""
    same((await (await bench.box()).exec("exit 42")).exit_code, 42)


@behaviour("exec")
async def exit_code_255_is_reported(bench: Bench) -> None:
    """The largest exit code is not taken for a signal."""
    result = await (await bench.box()).exec("exit 255")
    same((result.exit_code, result.signal), (255, None))


@behaviour("exec")
async def a_file_that_cannot_be_executed_gives_126(bench: Bench) -> None:
    """What exists and may not be executed ends with 126, as in shells."""
    box = await bench.box()
    await box.write("plain.txt", "no program\n", mode=0o644)
    same((await box.exec(["./plain.txt"])).exit_code, 126)


@behaviour("exec")
async def a_program_that_is_not_there_gives_127(bench: Bench) -> None:
    """What does not exist ends with 127, and the program's name is on stderr."""
    result = await (await bench.box()).exec(["no-such-program-here", "argument"])
    same(result.exit_code, 127)
    holds(result.stderr, "no-such-program-here")


@behaviour("exec")
async def a_command_missing_in_a_shell_line_gives_127(bench: Bench) -> None:
    """The shell's own 127 comes through."""
    same((await (await bench.box()).exec("no-such-program-here")).exit_code, 127)


@behaviour("exec")
async def a_leader_killed_by_a_signal_says_which(bench: Bench) -> None:
    """Death by SIGSEGV is signal 11 and no exit code."""
    result = await (await bench.box()).exec("kill -SEGV $$")
    same((result.exit_code, result.signal), (None, signal.SIGSEGV))


@behaviour("exec")
async def a_signal_ends_a_started_command(bench: Bench) -> None:
    """SIGTERM sent through the engine ends a command, and the result names it."""
    running = await (await bench.box()).start("echo ready; exec sleep 60")
    await running.until(b"ready")
    await running.signal(signal.SIGTERM)
    result = await running.wait()
    same((result.exit_code, result.signal), (None, signal.SIGTERM))


@behaviour("exec")
async def a_signal_can_be_caught(bench: Bench) -> None:
    """A command that catches its signal ends as it likes."""
    running = await (await bench.box()).start("trap 'exit 7' USR1; echo ready; while :; do sleep 0.05; done")
    await running.until(b"ready")
    await running.signal(signal.SIGUSR1)
    same((await running.wait()).exit_code, 7)


@behaviour("exec")
async def a_signal_reaches_the_whole_group(bench: Bench) -> None:
    """A signal goes to the children in the leader's process group, too."""
    box = await bench.box()
    child = "trap 'echo child; exit' TERM; echo ready; while :; do sleep 0.05; done"
    running = await box.start(["bash", "-c", 'trap : TERM; sh -c "$1" & wait; wait', "bash", child])
    await running.until(b"ready")
    await running.signal(signal.SIGTERM)
    holds((await running.wait()).stdout, "child\n")


# ── arguments ──────────────────────────────────────────────────────────────────────────────────────


async def _arguments(box: Box, *arguments: str) -> list[str]:
    said = await box.out(["printf", "%s\\0", *arguments])
    return said.split("\0")[:-1]


@behaviour("exec")
async def arguments_with_spaces_and_quotes_arrive_unchanged(bench: Bench) -> None:
    """No shell comes between an argument vector and the program."""
    arguments = ["a b", "'single'", '"double"', "$HOME", "`id`", "back\\slash", "*", ";", "-n", "--"]
    same(await _arguments(await bench.box(), *arguments), arguments)


@behaviour("exec")
async def arguments_with_newlines_arrive_unchanged(bench: Bench) -> None:
    """Newlines, tabs and carriage returns are bytes like others."""
    arguments = ["one\ntwo", "\n", "tab\there", "cr\rlf\r\n"]
    same(await _arguments(await bench.box(), *arguments), arguments)


@behaviour("exec")
async def arguments_in_unicode_arrive_unchanged(bench: Bench) -> None:
    """Letters beyond ASCII, and beyond the basic plane, arrive as UTF-8."""
    arguments = ["naïve", "жук", "玻璃", "🔔", "e\u0301", "\ufeff"]
    same(await _arguments(await bench.box(), *arguments), arguments)


@behaviour("exec")
async def an_empty_argument_stays_an_argument(bench: Bench) -> None:
    """Empty arguments are neither dropped nor joined."""
    same(await _arguments(await bench.box(), "", "x", "", ""), ["", "x", "", ""])


@behaviour("exec")
async def an_argument_that_is_not_utf8_arrives_unchanged(bench: Bench) -> None:
    """Bytes that are no text travel as surrogate escapes, as Python spells them."""
    result = await (await bench.box()).exec(["printf", "%s", "caf\udce9"])
    same(result.stdout_bytes, b"caf\xe9")


@behaviour("exec")
async def an_argument_vector_of_1_mib_succeeds(bench: Bench) -> None:
    """Many small arguments, a MiB in all, reach the program."""
    arguments = ["x" * 100] * 10_000
    counted = await (await bench.box()).out(["sh", "-c", 'echo "$#"', "sh", *arguments])
    same(counted, "10000\n")


@behaviour("exec")
async def a_shell_line_of_200_kib_succeeds(bench: Bench) -> None:
    """A shell line may be longer than the kernel takes for one argument."""
    line = f": {'x' * 200 * 1024}; echo end"
    same(await (await bench.box()).out(line), "end\n")


@behaviour("exec")
async def a_shell_line_keeps_its_quoting(bench: Bench) -> None:
    """Quotes, pipes, substitutions and here-documents of a shell line mean what they mean in a shell."""
    line = "printf '%s|' \"a  b\" 'c\"d' $(echo e) | tr '|' '\\n'; cat <<'END'\n$kept `as` is\nEND\n"
    same(await (await bench.box()).out(line), 'a  b\nc"d\ne\n$kept `as` is\n')


@behaviour("exec")
async def a_shell_line_does_not_run_in_a_login_shell(bench: Bench) -> None:
    """No profile is read: the shell is not a login shell and not interactive."""
    line = "shopt -q login_shell 2>/dev/null && echo login; case $- in *i*) echo interactive;; esac; echo end"
    same(await (await bench.box()).out(line), "end\n")


# ── input ──────────────────────────────────────────────────────────────────────────────────────────


@behaviour("exec")
async def input_is_empty_unless_given(bench: Bench) -> None:
    """A command that reads its input meets the end at once."""
    same(await (await bench.box()).out("cat; echo end"), "end\n")


@behaviour("exec")
async def input_given_is_read_to_its_end(bench: Bench) -> None:
    """The bytes given are all that can be read, and then comes the end."""
    same(await (await bench.box()).out("cat; echo end", stdin=b"one\ntwo\n"), "one\ntwo\nend\n")


@behaviour("exec")
async def input_of_4_mib_arrives_whole(bench: Bench) -> None:
    """Input larger than any pipe is fed as fast as it is read."""
    data = ALL_BYTES * 256
    result = await (await bench.box()).exec(["cksum"], stdin=data)
    holds(result.stdout, f" {len(data)}\n")
    same(await (await bench.box()).out(["tail", "-c", "4"], stdin=data[:-4] + b"end\n"), "end\n")


@behaviour("exec")
async def input_that_nobody_reads_does_not_hang(bench: Bench) -> None:
    """A command may end without reading what it was given."""
    same((await (await bench.box()).exec("exit 3", stdin=b"x" * (4 << 20))).exit_code, 3)


@behaviour("exec")
async def input_can_be_written_while_the_command_runs(bench: Bench) -> None:
    """Open input takes writes until it is ended, and each is answered before the next."""
    running = await (await bench.box()).start(
        "while read line; do echo got $line; done; echo end", open_stdin=True
    )
    for word in ("one", "two"):
        await running.write(f"{word}\n".encode())
        await running.until(f"got {word}\n".encode())
    await running.write(b"", end=True)
    result = await running.wait()
    same((result.exit_code, result.stdout), (0, "got one\ngot two\nend\n"))


# ── output ─────────────────────────────────────────────────────────────────────────────────────────


@behaviour("exec")
async def output_of_every_byte_arrives_unchanged(bench: Bench) -> None:
    """Output is bytes: no decoding, no newline translation."""
    same((await (await bench.box()).exec(["cat"], stdin=ALL_BYTES)).stdout_bytes, ALL_BYTES)


@behaviour("exec")
async def output_without_a_last_newline_arrives(bench: Bench) -> None:
    """Nothing is added to output, and nothing waits for a newline."""
    same((await (await bench.box()).exec("printf half; printf wrong >&2")).stdout_bytes, b"half")


@behaviour("exec")
async def stdout_and_stderr_are_kept_apart(bench: Bench) -> None:
    """Each stream has its own bytes."""
    result = await (await bench.box()).exec("echo out; echo err >&2")
    same((result.stdout, result.stderr), ("out\n", "err\n"))


@behaviour("exec")
async def the_order_within_a_stream_is_exact(bench: Bench) -> None:
    """Twenty thousand lines arrive in the order in which they were written."""
    same(await (await bench.box()).out("seq 1 20000"), "".join(f"{n}\n" for n in range(1, 20001)))


@behaviour("exec")
async def merged_streams_keep_the_exact_order(bench: Bench) -> None:
    """With merge, both streams are one descriptor: the order is the order of writing."""
    line = "for i in $(seq 1 200); do echo out$i; echo err$i >&2; done"
    result = await (await bench.box()).exec(line, merge=True)
    same(result.stdout, "".join(f"out{n}\nerr{n}\n" for n in range(1, 201)))
    same(result.stderr, "")


@behaviour("exec")
async def large_output_keeps_its_head_and_tail(bench: Bench) -> None:
    """Past the cap the first and last bytes are kept, and all are counted."""
    result = await (await bench.box()).exec("seq 1 100000", output_limit=2000)
    expect(result.truncated, "it is not marked as truncated")
    same(result.stdout_total, len("".join(f"{n}\n" for n in range(1, 100001))))
    expect(result.stdout.startswith("1\n2\n3\n"), "the head is not the head")
    expect(result.stdout.endswith("99999\n100000\n"), "the tail is not the tail")


@behaviour("exec")
async def output_within_the_cap_is_not_truncated(bench: Bench) -> None:
    """Output of exactly the cap is whole, and says so."""
    result = await (await bench.box()).exec(["cat"], stdin=b"x" * 2000, output_limit=2000)
    same((result.truncated, result.stdout_total, len(result.stdout_bytes)), (False, 2000, 2000))


@behaviour("exec")
async def a_flood_of_output_is_counted_to_the_last_byte(bench: Bench) -> None:
    """32 MiB pass through at a bounded cost, and the command ends normally."""
    result = await (await bench.box()).exec("head -c 33554432 /dev/zero; exit 5", output_limit=1000)
    same((result.exit_code, result.stdout_total, result.truncated), (5, 33554432, True))


@behaviour("exec")
async def the_full_log_is_readable_by_cursor(bench: Bench) -> None:
    """What the result cut is still in the log, and a follower can start in the middle of it."""
    running = await (await bench.box()).start("seq 1 50000; echo last >&2", output_limit=100)
    result = await running.wait()
    events = [event async for event in running.follow()]
    outputs = [event for event in events if isinstance(event, model.Output)]
    same(
        b"".join(o.data for o in outputs if o.stream == "stdout"),
        b"".join(b"%d\n" % n for n in range(1, 50001)),
    )
    same(b"".join(o.data for o in outputs if o.stream == "stderr"), b"last\n")
    same([event.seq for event in events], list(range(len(events))), "sequence numbers")
    same(events[-1], model.Exited(result=result, seq=len(events) - 1))
    cursor = events[len(events) // 2].seq
    same([event async for event in running.follow(cursor)], events[cursor:], "from the middle on")


@behaviour("exec")
async def output_can_be_followed_before_the_end(bench: Bench) -> None:
    """A follower sees what was written while the command still runs."""
    running = await (await bench.box()).start("echo first; read x; echo second", open_stdin=True)
    same(await running.until(b"first\n"), b"first\n")
    await running.write(b"go\n")
    same(await running.until(b"second\n"), b"first\nsecond\n")
    same((await running.wait()).exit_code, 0)


# ── where a command runs, and with what ────────────────────────────────────────────────────────────


@behaviour("exec")
async def commands_start_where_relative_paths_lead(bench: Bench) -> None:
    """The working directory of commands and the base of relative file paths are one."""
    box = await bench.box()
    await box.write("here.txt", "here")
    same(await box.out("cat here.txt; echo back >back.txt"), "here")
    same(await box.read("back.txt"), b"back\n")


@behaviour("exec")
async def commands_start_in_slash_workspace(bench: Bench) -> None:
    """The working directory is called /workspace."""
    same(await (await bench.box()).out("pwd"), "/workspace\n")


@behaviour("exec")
async def a_working_directory_is_obeyed(bench: Bench) -> None:
    """A command starts in the directory asked for."""
    box = await bench.box()
    await box.write("/workspace/deep/er/mark", "found")
    same(await box.out("cat mark; pwd | grep -o 'deep/er$'", cwd="/workspace/deep/er"), "founddeep/er\n")


@behaviour("exec")
async def a_missing_working_directory_is_refused(bench: Bench) -> None:
    """A directory that is not there is an error of its own, and nothing runs."""
    box = await bench.box()
    with refused("cwd_not_found"):
        await box.exec("touch ran", cwd="/workspace/nowhere")
    same(await box.names(), [])


@behaviour("exec")
async def changing_directory_stays_within_the_command(bench: Bench) -> None:
    """A `cd` ends with its shell; the next command starts where the first one did."""
    box = await bench.box()
    first = await box.out("mkdir -p sub; pwd; cd sub; touch in-sub")
    same(await box.out("pwd; ls"), first + "sub\n")


@behaviour("exec")
async def variables_of_the_sandbox_reach_commands(bench: Bench) -> None:
    """What the sandbox was created with is in the environment of every command, unchanged."""
    box = await bench.box(env={"ONE": "1", "ODD": "a b\n'c' $d ü"})
    same(await box.out(["printenv", "ONE", "ODD"]), "1\na b\n'c' $d ü\n")


@behaviour("exec")
async def variables_of_a_command_stay_with_it(bench: Bench) -> None:
    """A command's variables win over the sandbox's and are gone with it."""
    box = await bench.box(env={"WHO": "sandbox"})
    same(await box.out("echo $WHO $EXTRA", env={"WHO": "command", "EXTRA": "x"}), "command x\n")
    same(await box.out("echo $WHO $EXTRA"), "sandbox\n")


@behaviour("exec")
async def variables_can_be_bound_later(bench: Bench) -> None:
    """Variables bound to a running machine reach the commands to come."""
    box = await bench.box()
    await box.machine.bind(interfaces.Binding(env={"LATE": "bound"}))
    same(await box.out("echo $LATE"), "bound\n")


@behaviour("exec")
async def files_can_be_bound_later(bench: Bench) -> None:
    """Files bound to a running machine are there, with directories, bytes and modes; a bad path is its error."""
    box = await bench.box()
    await box.out("mkdir taken")
    with refused("is_directory"):
        await box.machine.bind(interfaces.Binding({}, files=[("taken", b"x", None)]))
    files = [
        ("/workspace/deep/er/a.bin", bytes(range(256)) * 300, None),
        ("b.sh", b"#!/bin/sh\necho ran", 0o755),
    ]
    await box.machine.bind(interfaces.Binding({}, files=files))
    same(await box.out("wc -c < deep/er/a.bin"), "76800\n")
    same(await box.out("./b.sh"), "ran\n")


@behaviour("exec")
async def nothing_of_the_callers_environment_enters(bench: Bench) -> None:
    """A secret in the caller's environment is not in a command's, and no variable is there that is not ours."""
    said = await (await bench.box()).out(["env", "-0"])
    lacks(said, bench.secret, f"{SECRET_VARIABLE} leaked")
    found = {entry.partition("=")[0] for entry in said.split("\0") if entry}
    same(found - ALLOWED_VARIABLES, set(), "variables")


@behaviour("exec")
async def home_locale_and_path_are_set(bench: Bench) -> None:
    """HOME is a writable directory, the locale is UTF-8, and PATH finds the tools."""
    line = 'touch "$HOME/mark" && echo "$LANG" && command -v sh cat >/dev/null && echo found'
    same(await (await bench.box()).out(line), "C.UTF-8\nfound\n")


@behaviour("exec")
async def temporary_files_can_be_made(bench: Bench) -> None:
    """mktemp works, TMPDIR or not, and what it makes can be used."""
    line = 'f=$(mktemp) && echo kept >"$f" && cat "$f" && d=$(mktemp -d) && touch "$d/x" && ls "$d"'
    same(await (await bench.box()).out(line), "kept\nx\n")


@behaviour("exec")
async def commands_run_side_by_side(bench: Bench) -> None:
    """Twenty commands at once each have their own streams, input and exit code."""
    box = await bench.box()
    results = await asyncio.gather(
        *(box.exec("cat; echo $N; exit $N", stdin=b"%d:" % n, env={"N": str(n)}) for n in range(20))
    )
    same([(r.exit_code, r.stdout) for r in results], [(n, f"{n}:{n}\n") for n in range(20)])


@behaviour("exec")
async def the_cost_of_a_command_is_reported(bench: Bench) -> None:
    """Processor time and peak memory of a command are in its result."""
    code = "import time; x = bytearray(32 << 20)\nwhile time.process_time() < 0.1: pass"
    result = await (await bench.box()).exec(["python3", "-I", "-c", code])
    expect(result.cpu_ms >= 90, f"100 ms of work were reported as {result.cpu_ms}")
    expect(result.max_rss_mib >= 32, f"32 MiB of memory were reported as {result.max_rss_mib}")


@behaviour("exec")
async def executions_are_listed_with_how_they_ended(bench: Bench) -> None:
    """The list of executions shows what runs and how what has ended did."""
    box = await bench.box()
    await box.exec("exit 9")
    running = await box.start("read x; exit 4", open_stdin=True)
    listed = {e.id: e for e in await bench.engine.executions(box.id)}
    same([e.exit_code for e in listed.values() if not e.running], [9])
    same([e.id for e in listed.values() if e.running], [running.id])
    await running.write(b"\n")
    same((await running.wait()).exit_code, 4)
