"""`cloche run` from outside: codes, streams, signals, environment. Each both through a keeper and in process."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

LARGE = 40 << 20


def said(result):
    return result.returncode, result.stdout, result.stderr


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["run", "--profle", "x", "--", "true"], "has no flag '--profle'", "did you mean '--profile'?"),
        (["rnu"], "there is no verb 'rnu'", "did you mean 'run'?"),
        (["run"], "needs a command", "cloche run ..."),
        (["run", "--"], "needs a command", "cloche run ..."),
        (["run", "--profile"], "expected one argument", "`cloche help run`"),
        (["run", "--memory", "much", "--", "true"], "--memory is 'much'", None),
        (["run", "--timeout", "nan", "--", "true"], "--timeout is 'nan'", None),
        (
            ["run", "--network", "off", "--allow", "pypi.org", "--", "true"],
            "--allow gives a network",
            "leave one",
        ),
        (
            ["run", "--resolve", "a.test:443", "--", "true"],
            "HOST:PORT:ADDR:PORT",
            "cloche run --resolve api.test:443:",
        ),
        (["run", "--policy", "/no/such", "--", "true"], "'/no/such' cannot be read", "check path"),
        (["exec", "--", "true"], "the following arguments are required: ID", "`cloche help exec`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused_with_words(bare, words, code, hint):
    result = bare(*words)
    message = result.stderr.decode()
    assert result.returncode == 125
    assert message.startswith("cloche: error: ")
    assert code in message
    assert (f"\n\nhint: {hint}" in message) if hint else True
    assert result.stdout == b""
    assert not bare.state.exists(), "a wrong command line made something"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--profile", "nix"], "there is no profile 'nix'"),
        (["--template", "nix"], "there is no template 'nix'"),
        (["--memory", "-1"], "memory_mib is -1"),
        (["--pids", "1.5"], "the request is not valid"),
        (["--timeout", "-1"], "timeout_s is -1"),
        (["--cwd", "/nope"], "there is no directory '/nope' inside"),
        (["--cwd", "a/../b"], "contains '..'"),
        (["--name", "a\nb"], "the name 'a\\nb'"),
        (["--workspace", "/no/such"], "there is no directory '/no/such'"),
        (["--workspace", "/"], "'/'"),
        (["--minimum-isolation", "steel"], "the request is not valid"),
        (["--user", "root", "--profile", "restrictive"], "does not allow user='root'"),
    ],
    ids=lambda value: " ".join(value).replace("\n", "\\n") if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_and_nothing_runs(cloche, flags, words):
    result = cloche("run", *flags, "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (125, b"")
    assert words in result.stderr.decode()
    assert "Traceback" not in result.stderr.decode()


def test_the_callers_environment_stays_outside(cloche):
    result = cloche("run", "--", "env", env={"SECRET": "s3cret", "PYTHONPATH": "/x"})
    names = {line.partition(b"=")[0].decode() for line in result.stdout.splitlines()}
    assert names == {"PATH", "HOME", "USER", "LOGNAME", "LANG", "SHELL", "TMPDIR"}
    assert b"s3cret" not in result.stdout


def test_a_variable_that_the_caller_does_not_have_is_not_set(cloche):
    result = cloche("run", "--env", "ABSENT", "--", "sh", "-c", "echo ${ABSENT-unset}")
    assert said(result) == (0, b"unset\n", b"")


# ── codes ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "exit 255"], 255),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["sh", "-c", "kill -KILL $$"], 137),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes_are_a_shells(cloche, command, code):
    assert cloche("run", "--", *command).returncode == code


def test_a_time_out_is_124_and_what_was_written_arrives(cloche):
    result = cloche("run", "--timeout", "0.5", "--", "sh", "-c", "echo before; exec sleep 1000")
    assert said(result) == (124, b"before\n", b"")


def test_streams_are_kept_apart_and_flags_may_have_an_equals_sign(cloche):
    result = cloche("run", "--env=A=b=c", "--cwd=/tmp", "sh", "-c", 'echo "$A"; pwd; echo no >&2; exit 3')
    assert said(result) == (3, b"b=c\n/tmp\n", b"no\n")


def test_the_commands_own_flags_are_not_read(cloche):
    assert said(cloche("run", "echo", "--json", "--profile", "--", "x")) == (
        0,
        b"--json --profile -- x\n",
        b"",
    )


def test_a_variable_passes_the_callers_value(cloche):
    result = cloche("run", "--env", "WORD", "--", "sh", "-c", "echo $WORD", env={"WORD": "passed on"})
    assert said(result) == (0, b"passed on\n", b"")


def test_arguments_that_are_not_text_arrive_as_they_are(cloche):
    result = subprocess.run(
        [*(word.encode() for word in cloche.argv("run", "--", "printf", "%s")), b"a\xffb"],
        capture_output=True, env=cloche.environment, timeout=50,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, b"a\xffb")


def test_denials_are_told_once_and_only_when_the_command_failed(cloche):
    probe = "unshare -U true 2>/dev/null; unshare -U true 2>/dev/null; exit "
    failed = cloche("run", "--", "sh", "-c", probe + "4").stderr.decode().splitlines()
    assert failed
    assert all(line.startswith("cloche: denied: unshare") for line in failed)
    assert len(failed) == len(set(failed))
    assert cloche("run", "--", "sh", "-c", probe + "0").stderr == b""


# ── json ───────────────────────────────────────────────────────────────────────────────────────────


def test_json_gives_the_whole_result(cloche):
    result = cloche("run", "--json", "--", "sh", "-c", "echo out; echo err >&2; cat; exit 3", stdin=b"in")
    found = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (3, b"")
    assert {
        "code": 3,
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "oom_killed": False,
    }.items() <= found.items()
    assert (found["stdout"], found["stderr"], found["truncated"]) == ("out\nin", "err\n", False)
    assert found["isolation"]["level"] == "namespaces"
    assert set(found) == {
        "code", "exit_code", "signal", "timed_out", "oom_killed", "stdout", "stderr", "truncated", "stdout_total",
        "stderr_total", "duration_ms", "cpu_ms", "max_rss_mib", "denials", "isolation", "execution",
    }  # fmt: skip


def test_json_of_bytes_that_are_no_text(cloche):
    found = json.loads(cloche("run", "--json", "--", "printf", r"\377\376").stdout)
    assert (found["stdout"], found["stdout_base64"]) == ("��", "//4=")


def test_an_error_is_json_too(cloche):
    result = cloche("run", "--json", "--profile", "nix", "--", "true")
    assert result.returncode == 125
    assert json.loads(result.stdout)["error"]["code"] == "profile_unknown"


def test_json_of_a_signal(cloche):
    found = json.loads(cloche("run", "--json", "--", "sh", "-c", "kill -KILL $$").stdout)
    assert (found["code"], found["exit_code"], found["signal"]) == (137, None, 9)


# ── input and output ───────────────────────────────────────────────────────────────────────────────


def test_input_from_a_pipe_is_exact(cloche):
    data = os.urandom(3 << 20)
    result = cloche("run", "--", "cat", stdin=data)
    assert result.stdout == data


def test_input_from_a_file(cloche, tmp_path):
    (tmp_path / "in").write_bytes(b"from a file\n")
    with open(tmp_path / "in", "rb") as file:
        assert said(cloche("run", "--", "cat", stdin=file)) == (0, b"from a file\n", b"")


def test_input_from_nowhere(cloche):
    assert said(cloche("run", "--", "cat", stdin=subprocess.DEVNULL)) == (0, b"", b"")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_descriptors_do_not_become_ours(cloche, closed):
    line = f'exec "$@" {closed}'
    result = subprocess.run(
        ["/bin/sh", "-c", line, "sh", *cloche.argv("run", "--", "sh", "-c", "cat; echo x; echo y >&2; exit 7")],
        input=b"", capture_output=True, env=cloche.environment, timeout=50,
    )  # fmt: skip
    assert result.returncode == 7
    assert result.stdout == (b"" if "1>" in closed else b"x\n")
    assert result.stderr == (b"" if "2>" in closed else b"y\n")


def test_a_large_output_is_exact_although_its_reader_is_slow(cloche):
    process = cloche.start("run", "--", "sh", "-c", f"head -c {LARGE} /dev/zero | tr '\\0' 'x'; echo end >&2")
    process.stdin.close()
    digest, size = hashlib.sha256(), 0
    while data := process.stdout.read(1 << 16):
        digest.update(data)
        size += len(data)
    assert (size, digest.hexdigest()) == (LARGE, hashlib.sha256(b"x" * LARGE).hexdigest())
    assert process.wait(50) == 0


@pytest.mark.parametrize(
    "writer",
    ["exec yes", "python3 -c 'while True: print(1)'", "trap '' PIPE; while :; do echo y; done"],
    ids=["dies of SIGPIPE", "sees an error", "ignores it"],
)
def test_a_reader_that_leaves_ends_the_command(cloche, writer):
    process = cloche.start("run", "--", "sh", "-c", writer)
    process.stdin.close()
    assert process.stdout.read(1) in (b"y", b"1")
    process.stdout.close()
    assert process.wait(50) in (141, 137)


# ── signals ────────────────────────────────────────────────────────────────────────────────────────

WAITS = "echo ready; while :; do sleep 1; done"


def begin(cloche, script):
    process = cloche.start("run", "--", "sh", "-c", script)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT"])
def test_a_signal_reaches_the_command(cloche, name):
    process = begin(cloche, f"trap 'echo got {name}; exit 9' {name}; {WAITS}")
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.stdout.readline() == f"got {name}\n".encode()
    assert process.wait(50) == 9


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_a_signal_that_is_not_caught_ends_the_command_as_a_shell_says(cloche, name, code):
    process = begin(cloche, "echo ready; exec sleep 1000")
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.wait(50) == code


def test_a_second_interrupt_kills(cloche):
    process = begin(cloche, f"trap 'echo still here' INT; {WAITS}")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"still here\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(50) == 137


def test_a_signal_passes_a_command_that_does_not_read_its_input(cloche):
    process = begin(cloche, "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done")
    os.set_blocking(process.stdin.fileno(), False)
    written = 0
    while written < 8 << 20:  # until every buffer between here and there is full
        try:
            written += os.write(process.stdin.fileno(), b"x" * (1 << 16))
        except BlockingIOError:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(50) == 9


def test_background_output_of_an_orphan_does_not_hold_the_answer(cloche):
    result = cloche("run", "--", "sh", "-c", "sleep 1000 & echo done")
    assert said(result) == (0, b"done\n", b"")


# ── where state lives ──────────────────────────────────────────────────────────────────────────────


def test_a_state_directory_that_cannot_be_made_is_said(bare):
    result = bare("run", "--", "true", env={"CLOCHE_HOME": "/proc/nope"})
    assert result.returncode == 125
    assert "the state directory '/proc/nope' cannot be made" in result.stderr.decode()
    assert "hint: set CLOCHE_HOME" in result.stderr.decode()


def test_a_relative_state_directory_is_refused(bare):
    result = bare("run", "--", "true", env={"CLOCHE_HOME": "here"})
    assert (result.returncode, b"not an absolute path" in result.stderr) == (125, True)


def test_a_path_too_long_for_a_socket_is_said_when_a_keeper_is_needed(bare):
    long = {"CLOCHE_HOME": str(bare.home / ("x" * 100))}
    result = bare("create", env=long)
    assert result.returncode == 125
    assert "Linux takes 107" in result.stderr.decode()
    assert "CLOCHE_HOME" in result.stderr.decode()


def test_a_server_that_is_named_and_dead_is_an_error(bare):
    for address in (f"unix:{bare.home}/nobody.sock", "http://localhost:1"):
        result = bare("run", "--", "echo", "ran", env={"CLOCHE_URL": address})
        assert (result.returncode, result.stdout) == (125, b"")
        assert b"unset CLOCHE_URL to run locally" in result.stderr


def test_python_m_cloche_is_the_same(bare):
    result = subprocess.run(
        [sys.executable, "-m", "cloche", "run", "--", "echo", "hi"], capture_output=True, timeout=50,
        env={**bare.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert said(result) == (0, b"hi\n", b"")
