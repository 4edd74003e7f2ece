"""Commands, from the request to the result: what is refused, what comes back, what a time-out leaves."""

import resource
import signal

import pytest

import cloche
from cloche import errors, model

KIB = 1024
RUNNING = "for p in /proc/[0-9]*; do cat $p/comm 2>/dev/null; done"


def commands_inside(box):
    return box.exec(RUNNING).stdout.split()


def outputs(events, stream="stdout"):
    return b"".join(e.data for e in events if isinstance(e, cloche.Output) and e.stream == stream)


def read_until(process, wanted):
    seen = b""
    for event in process.stream():
        if isinstance(event, cloche.Output):
            seen += event.data
            if wanted in seen:
                return seen
    raise AssertionError(f"{wanted!r} is not in {seen!r}")


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "options", "code"),
    [
        pytest.param("", {}, "command_empty", id="an empty line"),
        pytest.param([], {}, "command_empty", id="no arguments"),
        pytest.param([""], {}, "command_empty", id="an empty program"),
        pytest.param("echo \0", {}, "argument_invalid", id="NUL in a line"),
        pytest.param(["echo", "a\0b"], {}, "argument_invalid", id="NUL in an argument"),
        pytest.param(["echo", "x" * 128 * KIB], {}, "argument_too_long", id="an argument of 128 KiB"),
        pytest.param(
            ["echo", "é" * 64 * KIB], {}, "argument_too_long", id="128 KiB of UTF-8 in 64 Ki characters"
        ),
        pytest.param(["echo", *["x" * 1000] * 3000], {}, "argument_too_long", id="3 MB of arguments"),
        pytest.param("true", {"env": {"": "x"}}, "environment_invalid", id="a variable without a name"),
        pytest.param("true", {"env": {"A=B": "x"}}, "environment_invalid", id="= in a variable's name"),
        pytest.param("true", {"env": {"A": "x\0"}}, "environment_invalid", id="NUL in a variable"),
        pytest.param(
            "true", {"env": {"A": "x" * 128 * KIB}}, "argument_too_long", id="a variable of 128 KiB"
        ),
        pytest.param("true", {"timeout_s": 0}, "limit_invalid", id="no time at all"),
        pytest.param("true", {"timeout_s": -1}, "limit_invalid", id="negative time"),
        pytest.param("true", {"timeout_s": float("nan")}, "limit_invalid", id="time that is no number"),
        pytest.param("true", {"background_after_s": -1}, "limit_invalid", id="background before the start"),
        pytest.param("true", {"output_limit": -1}, "limit_invalid", id="a negative amount of output"),
        pytest.param("true", {"cwd": "/nowhere"}, "cwd_not_found", id="a missing directory"),
        pytest.param("true", {"cwd": "/etc/passwd"}, "cwd_not_found", id="a file as the directory"),
        pytest.param("true", {"cwd": "../etc"}, "path_invalid", id=".. in the directory"),
        pytest.param("true", {"cwd": "a\nb"}, "path_invalid", id="a newline in the directory"),
        pytest.param("true", {"user": "bob"}, "user_not_found", id="a user who is not there"),
    ],
)
def test_a_bad_request_has_its_own_code_and_starts_nothing(sandbox, command, options, code):
    with pytest.raises(cloche.ClocheError) as caught:
        sandbox.exec(command, **options)
    assert caught.value.code == code
    assert sandbox.processes.list() == []
    assert sandbox.info().executions == 0


def test_a_missing_directory_says_what_to_do(sandbox):
    with pytest.raises(cloche.InvalidInput, match="/nowhere") as caught:
        sandbox.exec("true", cwd="/nowhere")
    assert "make_dir" in str(caught.value.hint)


@pytest.mark.parametrize("size", [(0, 24), (80, -1), (80, 70_000), (10_000, 24)])
def test_a_terminal_of_an_impossible_size_is_refused(sandbox, size):
    with pytest.raises(cloche.InvalidInput) as caught:
        sandbox.start("true", pty=size)
    assert caught.value.code == "limit_invalid"
    assert sandbox.processes.list() == []


@pytest.mark.parametrize("number", [0, -9, 65, 1000])
def test_an_unknown_signal_is_refused(sandbox, number):
    process = sandbox.start("cat")
    with pytest.raises(cloche.InvalidInput) as caught:
        process.signal(number)
    assert caught.value.code == "signal_unknown"
    process.close_stdin()
    assert process.wait().exit_code == 0


def test_an_unknown_execution_is_not_found(sandbox):
    with pytest.raises(cloche.NotFound) as caught:
        sandbox.processes.get("x" * 20)
    assert caught.value.code == "execution_not_found"


def test_a_finished_command_takes_no_input_signal_or_size(sandbox):
    process = sandbox.start("true", pty=True)
    process.wait()
    for attempt in (lambda: process.write("x"), lambda: process.signal(15), lambda: process.resize(10, 10)):
        with pytest.raises(cloche.Conflict) as caught:
            attempt()
        assert caught.value.code == "execution_finished"
    process.kill()  # harmless


def test_root_is_refused_where_no_uid_exists_for_it_and_is_root_where_one_does(sandbox):
    if sandbox.info().isolation.uid_range:
        assert sandbox.exec("id -u", user="root").stdout == "0\n"
    else:
        with pytest.raises(cloche.NotSupported) as caught:
            sandbox.exec("id -u", user="root")
        assert caught.value.code == "needs_subuids"


# ── results ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", [0, 1, 3, 124, 137, 255])
def test_the_exit_code_is_the_commands(sandbox, code):
    result = sandbox.exec(f"exit {code}")
    assert (result.exit_code, result.signal, result.ok) == (code, None, code == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT])
def test_a_signal_is_told_as_one(sandbox, number):
    result = sandbox.exec(["sh", "-c", f"kill -{int(number)} $$"])
    assert (result.exit_code, result.signal, result.shell_code) == (None, number, 128 + number)
    assert not result.timed_out


@pytest.mark.parametrize("command", [["no-such-program"], "no-such-program", ["/no/such/program"]], ids=str)
def test_a_command_that_is_not_there_is_127(sandbox, command):
    result = sandbox.exec(command)
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr or "/no/such/program" in result.stderr


@pytest.mark.parametrize("command", [["./data.txt"], "./data.txt", ["/etc"]], ids=str)
def test_a_command_that_cannot_be_executed_is_126(sandbox, command):
    sandbox.files.write("data.txt", "x")
    assert sandbox.exec(command).exit_code == 126


def test_a_script_without_a_first_line_runs_in_the_shell(sandbox):
    sandbox.files.write("script", "echo $1", mode=0o755)
    assert sandbox.exec(["./script", "hello"]).stdout == "hello\n"


def test_a_failing_command_raises_only_if_asked_to(sandbox):
    assert sandbox.exec("echo why >&2; exit 3").exit_code == 3
    with pytest.raises(cloche.CommandFailed, match="ended with 3") as caught:
        sandbox.exec("echo why >&2; exit 3", check=True)
    assert caught.value.result.exit_code == 3
    assert caught.value.result.stderr == "why\n"
    assert caught.value.hint == "why\n"
    assert sandbox.exec("true", check=True).ok


def test_a_result_says_what_it_cost_and_how_it_was_held(sandbox):
    result = sandbox.exec("true")
    assert result.duration_ms > 0
    assert result.max_rss_mib > 0
    assert result.isolation == sandbox.info().isolation
    assert result.denials == ()
    assert (result.truncated, result.oom_killed, result.process) == (False, False, None)


def test_streams_are_apart_and_bytes_are_exact(sandbox):
    result = sandbox.exec(r"printf '\377\000out'; printf err >&2")
    assert result.stdout_bytes == b"\xff\x00out"
    assert result.stdout == "\ufffd\x00out"
    assert result.stderr == "err"


def test_merged_streams_keep_their_exact_order(sandbox):
    result = sandbox.exec("for i in $(seq 300); do echo out $i; echo err $i >&2; done", merge=True)
    assert result.stdout == "".join(f"out {i}\nerr {i}\n" for i in range(1, 301))
    assert result.stderr == ""


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
def test_stdin_is_fed_whole_and_ends(sandbox, size):
    assert sandbox.exec(["wc", "-c"], stdin=b"x" * size).stdout.strip() == str(size)


def test_stdin_is_empty_if_none_is_given(sandbox):
    assert sandbox.exec("cat; echo end").stdout == "end\n"


def test_stdin_as_text_is_utf_8(sandbox):
    assert sandbox.exec("cat", stdin="é").stdout_bytes == "é".encode()


def test_a_command_that_does_not_read_its_input_still_ends(sandbox):
    assert sandbox.exec("exit 4", stdin=b"x" * 3_000_000).exit_code == 4


def test_a_line_runs_in_bash_and_not_as_a_login(sandbox):
    result = sandbox.exec("shopt -q login_shell && echo login; [[ a == a ]] && echo $0")
    assert result.stdout == "/bin/bash\n"


def test_nothing_of_the_callers_environment_enters(sandbox, monkeypatch):
    monkeypatch.setenv("CALLERS_SECRET", "s3cret")
    seen = sandbox.exec("env; cat /proc/self/environ /proc/1/environ 2>/dev/null").stdout
    assert "s3cret" not in seen
    assert "CLOCHE_HOME" not in seen


def test_the_environment_is_the_sandboxs_then_the_commands(make_sandbox):
    box = make_sandbox(env={"A": "1", "B": "1"})
    assert box.exec("echo $A $B $C", env={"B": "2", "C": "3"}).stdout == "1 2 3\n"
    assert box.exec("echo $A $B $C").stdout == "1 1\n"


def test_who_and_where(sandbox):
    assert sandbox.exec("id -u; id -un; echo $HOME; pwd").stdout == "1000\nuser\n/home/user\n/workspace\n"


def test_a_relative_directory_is_below_the_workspace(sandbox):
    sandbox.files.make_dir("deep/er")
    assert sandbox.exec("pwd", cwd="deep/er").stdout == "/workspace/deep/er\n"
    assert sandbox.exec("pwd", cwd="/tmp").stdout == "/tmp\n"


@pytest.mark.parametrize("size", [99_999, 100_000, 200 * KIB, 1_000_000])
def test_a_long_shell_line_runs_and_its_stdin_stays_its_own(sandbox, size):
    line = "cat; echo $#; : " + "x" * size
    assert sandbox.exec(line, stdin=b"input ").stdout == "input 0\n"


def test_an_mebibyte_of_small_arguments_runs(sandbox):
    arguments = ["y" * 63] * (1024 * KIB // 64)
    assert sandbox.exec(["sh", "-c", "echo $#", "sh", *arguments]).stdout == f"{len(arguments)}\n"


def test_an_argument_just_below_the_limit_runs(sandbox):
    assert len(sandbox.exec(["echo", "x" * (128 * KIB - 1)]).stdout) == 128 * KIB


def test_arguments_that_are_not_utf_8_arrive_as_they_are(sandbox):
    assert sandbox.exec(["printf", "%s", "a\udcffb"]).stdout_bytes == b"a\xffb"


# ── time ───────────────────────────────────────────────────────────────────────────────────────────

ESCAPES = """
setsid sleep 1001 &
nohup sleep 1002 >/dev/null 2>&1 &
(setsid sh -c 'sleep 1003 & sleep 1004' &)
python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1005"])
    os._exit(0)
os.wait()'
echo started
sleep 1000
"""


def test_a_kill_ends_the_tree_and_whoever_left_it(sandbox, until):
    process = sandbox.start(ESCAPES)
    read_until(process, b"started")
    process.kill()
    assert process.wait().signal == signal.SIGKILL
    until(lambda: "sleep" not in commands_inside(sandbox))


def test_a_kill_ends_the_tree_beside_another_command(sandbox, until):
    other = sandbox.start("cat")
    process = sandbox.start(ESCAPES)
    read_until(process, b"started")
    process.kill()
    until(lambda: "sleep" not in commands_inside(sandbox))
    other.close_stdin()
    assert other.wait().exit_code == 0


def test_a_kill_spares_what_earlier_commands_left_running(sandbox, until):
    sandbox.exec("setsid sleep 1000 >/dev/null 2>&1 &")
    process = sandbox.start(["sh", "-c", "echo started; cat"])
    read_until(process, b"started")
    process.kill()
    process.wait()
    assert commands_inside(sandbox).count("sleep") == 1


def test_a_time_out_kills_the_tree_too(sandbox, until):
    result = sandbox.exec("setsid sleep 1001 & nohup sleep 1002 & (sleep 1003 &); sleep 1000", timeout_s=0.5)
    assert (result.timed_out, result.signal, result.exit_code) == (True, signal.SIGKILL, None)
    assert result.shell_code == 124
    until(lambda: "sleep" not in commands_inside(sandbox))


def test_a_time_out_spares_the_other_commands(sandbox):
    other = sandbox.start("cat")
    assert sandbox.exec("sleep 1000", timeout_s=0.1).timed_out
    other.write("still here")
    other.close_stdin()
    assert other.wait().stdout == "still here"


def test_a_command_that_ignores_signals_is_killed_too(sandbox):
    result = sandbox.exec("trap '' TERM INT HUP; while :; do :; done", timeout_s=0.2)
    assert result.timed_out


def test_an_orphan_that_holds_the_pipe_does_not_delay_the_result(sandbox):
    result = sandbox.exec("sleep 1000 & echo done")
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert "sleep" in commands_inside(sandbox)


def test_what_an_orphan_writes_later_reaches_the_log(sandbox, until):
    result = sandbox.exec("(until [ -e go ]; do sleep 0.02; done; echo late) & echo early")
    assert result.stdout == "early\n"
    sandbox.files.write("go", "")
    process = sandbox.processes.get(result.execution)
    until(lambda: outputs(process.stream()) == b"early\nlate\n")


def test_past_the_soft_limit_a_command_goes_on_in_the_background(sandbox):
    line = "echo before; until [ -e go ]; do sleep 0.02; done; echo after; exit 5"
    result = sandbox.exec(line, background_after_s=0.5, check=True)
    assert (result.exit_code, result.signal, result.stdout) == (None, None, "before\n")
    process = sandbox.processes.get(result.process)
    sandbox.files.write("go", "")
    ended = process.wait()
    assert (ended.exit_code, ended.stdout, ended.process) == (5, "before\nafter\n", None)


def test_before_the_soft_limit_nothing_is_different(sandbox):
    result = sandbox.exec("exit 5", background_after_s=100)
    assert (result.exit_code, result.process) == (5, None)


def test_the_hard_limit_holds_in_the_background_too(sandbox):
    result = sandbox.exec("sleep 1000", background_after_s=0.05, timeout_s=0.3)
    assert sandbox.processes.get(result.process).wait().timed_out


# ── streams and logs ───────────────────────────────────────────────────────────────────────────────


def test_events_are_numbered_in_order_and_end_with_the_result(sandbox):
    events = list(sandbox.exec_stream("for i in $(seq 200); do echo $i; echo $i >&2; done; exit 7"))
    assert [e.seq for e in events] == list(range(len(events)))
    assert isinstance(events[-1], cloche.Exited)
    result = events[-1].result
    assert result.exit_code == 7
    assert outputs(events) == result.stdout_bytes == "".join(f"{i}\n" for i in range(1, 201)).encode()
    assert outputs(events, "stderr") == result.stderr_bytes


def test_output_comes_while_the_command_runs(sandbox):
    events = sandbox.exec_stream("echo first; until [ -e go ]; do sleep 0.02; done; echo second")
    assert next(events).data == b"first\n"
    sandbox.files.write("go", "")
    assert outputs(events) == b"second\n"


def test_leaving_a_stream_ends_its_command(sandbox, until):
    for event in sandbox.exec_stream("echo on; sleep 1000"):
        assert event.data == b"on\n"
        break
    until(lambda: "sleep" not in commands_inside(sandbox))


def test_a_stream_refuses_what_exec_refuses(sandbox):
    with pytest.raises(cloche.InvalidInput) as caught:
        next(sandbox.exec_stream(""))
    assert caught.value.code == "command_empty"


def test_a_follower_comes_back_at_its_cursor(sandbox, until):
    process = sandbox.start("for i in 1 2 3; do read line; echo got $line; done")
    seen: list[cloche.StreamEvent] = []
    for number in (1, 2):
        process.write(f"{number}\n")
        for event in process.stream(after=len(seen)):
            seen.append(event)
            break
    assert outputs(seen) == b"got 1\ngot 2\n"
    process.write("3\n")
    rest = list(process.stream(after=len(seen)))
    assert [e.seq for e in rest] == list(range(len(seen), len(seen) + len(rest)))
    assert outputs(rest) == b"got 3\n"
    assert outputs(process.stream()) == b"got 1\ngot 2\ngot 3\n"


def test_both_ends_of_long_output_are_kept_and_all_of_it_is_counted(sandbox):
    result = sandbox.exec("seq 100000; echo short >&2", output_limit=1000)
    whole = "".join(f"{i}\n" for i in range(1, 100_001)).encode()
    assert (result.truncated, result.stdout_total, result.stderr_total) == (True, len(whole), 6)
    head, _, tail = result.stdout_bytes.partition(b"\n[... %d bytes not kept ...]\n" % (len(whole) - 1000))
    assert (head, tail) == (whole[:500], whole[-500:])
    assert result.stderr == "short\n"
    process = sandbox.processes.get(result.execution)
    assert outputs(process.stream()) == whole  # the log has it all


def test_output_of_exactly_the_limit_is_whole(sandbox):
    result = sandbox.exec(["head", "-c", "1000", "/dev/zero"], output_limit=1000)
    assert (result.truncated, len(result.stdout_bytes)) == (False, 1000)


@pytest.mark.slow
def test_a_stream_of_a_gigabyte_succeeds_in_little_memory(sandbox):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.exec(["head", "-c", "1000000000", "/dev/zero"])
    assert (result.exit_code, result.stdout_total, result.truncated) == (0, 1_000_000_000, True)
    assert len(result.stdout_bytes) < 2 << 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 128 * KIB, f"{grown} KiB more"


def test_a_flood_of_single_bytes_is_joined(sandbox):
    events = list(sandbox.start(["dd", "if=/dev/zero", "bs=1", "count=100000", "status=none"]).stream())
    assert len(outputs(events)) == 100_000


# ── terminals and open input ───────────────────────────────────────────────────────────────────────


def test_a_terminal_is_one_and_has_its_size(sandbox):
    process = sandbox.start("test -t 0 && test -t 1 && test -t 2 && stty size", pty=(100, 30))
    result = process.wait()
    assert (result.exit_code, result.stdout) == (0, "30 100\r\n")
    assert sandbox.processes.list()[0].pty


def test_a_pipe_is_no_terminal(sandbox):
    assert sandbox.exec("test -t 0 || test -t 1 || test -t 2").exit_code == 1


def test_a_new_size_reaches_the_command(sandbox):
    process = sandbox.start(
        "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.02; done", pty=True
    )
    read_until(process, b"ready")
    process.resize(132, 50)
    assert process.wait().stdout == "ready\r\n50 132\r\n"


def test_control_c_on_a_terminal_interrupts(sandbox):
    process = sandbox.start(["sh", "-c", "echo ready; exec sleep 1000"], pty=True)
    read_until(process, b"ready")
    process.write(b"\x03")
    assert process.wait().signal == signal.SIGINT


def test_the_end_of_input_on_a_terminal(sandbox):
    process = sandbox.start("cat", pty=True)
    process.write("hello\n")
    read_until(process, b"hello\r\nhello\r\n")
    process.close_stdin()
    assert process.wait().exit_code == 0


def test_an_interactive_interpreter(sandbox):
    process = sandbox.start(["python3", "-q", "-i"], pty=True)
    process.write(b"6*7\n")
    read_until(process, b"\n42")
    process.kill()
    assert process.wait().signal == signal.SIGKILL


def test_open_input_is_a_conversation(sandbox):
    process = sandbox.start("read a; echo got $a; cat; exit 6")
    process.write("x\n")
    read_until(process, b"got x\n")
    process.write(b"rest")
    process.close_stdin()
    result = process.wait()
    assert (result.exit_code, result.stdout) == (6, "got x\nrest")
    assert process.wait() == result  # again, for whoever else waits


def test_a_signal_reaches_the_group(sandbox):
    process = sandbox.start("trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.02; done")
    read_until(process, b"ready")
    process.signal(signal.SIGTERM)
    result = process.wait()
    assert (result.exit_code, result.stdout) == (3, "ready\ncaught\n")


def test_the_list_shows_what_runs_and_what_ran(sandbox):
    process = sandbox.start(["cat", "-"])
    (shown,) = sandbox.processes.list()
    assert (shown.id, shown.pid, shown.command) == (process.id, process.pid, "cat -")
    assert (shown.running, shown.exit_code, shown.pty) == (True, None, False)
    process.close_stdin()
    process.wait()
    (shown,) = sandbox.processes.list()
    assert (shown.running, shown.exit_code) == (False, 0)


def test_a_command_lost_with_its_sandbox_says_so(sandbox):
    process = sandbox.start("cat")
    sandbox.delete()
    for attempt in (process.wait, lambda: sandbox.exec("true"), lambda: list(process.stream())):
        with pytest.raises(errors.SandboxLost) as caught:
            attempt()
        assert caught.value.code == "sandbox_lost"


def test_a_wait_under_way_ends_with_the_sandbox(sandbox, until):
    events = sandbox.exec_stream("echo on; sleep 1000")
    next(events)
    sandbox.delete()
    with pytest.raises(errors.SandboxLost):
        list(events)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"exit_code": 3}, 3),
        ({"exit_code": None, "signal": 15}, 143),
        ({"exit_code": None, "signal": 9, "timed_out": True}, 124),
    ],
)
def test_a_result_as_shells_say_it(fields, code):
    isolation = model.Isolation(level="namespaces", driver="none")
    assert model.ExecResult(isolation=isolation, **fields).shell_code == code
