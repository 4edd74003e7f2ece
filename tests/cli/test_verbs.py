"""The other verbs, on a keeper: sandboxes, files, copying, history, upkeep."""

import json
import os
import stat
import subprocess
import sys

import pytest

from cloche.cli import copying, main


@pytest.fixture
def one(kept):
    """A keeper with a sandbox named `one`."""
    made = kept("create", "--name", "one", "--label", "a=b", "--env", "WORD=x")
    assert (made.returncode, made.stderr) == (0, b"")
    kept.id = made.stdout.decode().strip()
    return kept


def text(result):
    assert (result.returncode, result.stderr) == (0, b""), result.stderr
    return result.stdout.decode()


def data(result):
    return json.loads(text(result))


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info"], "the following arguments are required: ID"),
        (["info", "one", "two"], "does not take 'two'"),
        (["list", "--jsno"], "has no flag '--jsno'"),
        (["delete"], "which sandbox?"),
        (["extend", "one", "soon"], "the time is 'soon'"),
        (["create", "--timeout", "0"], "--timeout is '0'"),
        (["create", "--label", "x"], "the label 'x' is not K=V"),
        (["files", "fly", "one"], "invalid choice: 'fly'"),
        (["files", "cat", "one"], "needs a path"),
        (["files", "mv", "one", "a"], "`mv` takes a path and a target"),
        (["files", "rm", "one", "a", "b"], "`mv` takes a path and a target, and only it does"),
        (["cp", "a", "b"], "exactly one side"),
        (["cp", "x:a", "y:b"], "exactly one side"),
        (["completions", "tcsh"], "invalid choice: 'tcsh'"),
        (["help", "rn"], "there is no verb 'rn'"),
        (["shell", "--attach", "x"], "--attach needs the sandbox's id"),
        (["logs", "one", "--after", "x"], "invalid int value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused_with_words(bare, words, message):
    result = bare(*words)
    assert (result.returncode, result.stdout) == (125, b"")
    assert message in result.stderr.decode()
    assert "Traceback" not in result.stderr.decode()


@pytest.mark.parametrize(
    "words", [["info"], ["exec"], ["logs"], ["delete"], ["suspend"], ["usage"], ["files", "ls"]], ids=" ".join
)
def test_a_sandbox_that_is_not_there(kept, words):
    tail = ["--", "true"] if words == ["exec"] else []
    result = kept(*words, "nobody", *tail)
    assert (result.returncode, result.stdout) == (125, b"")
    assert "there is no sandbox 'nobody'" in result.stderr.decode()
    assert "hint: `cloche list`" in result.stderr.decode()


def test_a_name_that_is_taken_by_another_shape(one):
    result = one("create", "--name", "one", "--memory", "64")
    assert (result.returncode, b"is taken" in result.stderr) == (125, True)


def test_the_same_creation_twice_is_the_same_sandbox(one):
    again = one("create", "--name", "one", "--label", "a=b", "--env", "WORD=x")
    assert again.stdout.decode().strip() == one.id


# ── sandboxes ──────────────────────────────────────────────────────────────────────────────────────


def test_list_and_info_in_words_and_in_json(one):
    lines = text(one("list")).splitlines()
    assert lines[0].split() == ["ID", "NAME", "PHASE", "PROFILE", "AGE", "ENDS", "IN", "RUNS"]
    assert lines[1].split()[:4] == [one.id, "one", "running", "moderate"]
    assert max(len(line) for line in lines) <= 80
    [found] = data(one("list", "--json"))
    assert found == data(one("info", one.id, "--json")) | {"expires_at": found["expires_at"]}
    assert (found["labels"], found["server"]) == ({"a": "b"}, f"unix:{one.socket}")
    shown = text(one("info", "one"))
    assert f"id            {one.id}\n" in shown
    assert "isolation     namespaces by namespaces\n" in shown
    assert "label         a=b\n" in shown


def test_without_a_keeper_there_is_nothing_to_list(bare):
    result = bare("list")
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr == b"cloche: no sandboxes; `cloche create` makes one\n"
    assert data(bare("list", "--json")) == []


def test_create_waits_for_a_keeper_of_its_own(bare):
    made = text(bare("create")).strip()
    assert data(bare("list", "--json"))[0]["id"] == made
    assert text(bare("exec", made, "--", "echo", "hi")) == "hi\n"


def test_life(one):
    assert text(one("extend", "one", "900")) == "ends in 15m\n"
    assert text(one("extend", "one", "none")) == "ends in never\n"
    assert text(one("suspend", "one")) == "paused\n"
    assert data(one("info", "one", "--json"))["phase"] == "paused"
    assert text(one("exec", "one", "--", "sh", "-c", "echo $WORD")) == "x\n"
    assert text(one("suspend", "one")) == "paused\n"
    assert text(one("resume", "one")) == "running\n"
    assert data(one("usage", "--json"))[one.id]["pids"] >= 1
    assert text(one("usage", "one")).splitlines()[0].startswith("ID")
    assert text(one("delete", "one")) == ""
    assert data(one("list", "--json")) == []


def test_delete_all(one):
    one("create")
    assert len(data(one("delete", "--all", "--json"))["deleted"]) == 2
    assert data(one("list", "--json")) == []


# ── history ────────────────────────────────────────────────────────────────────────────────────────


def test_logs_of_the_last_command_and_of_any(one):
    one("exec", "one", "--", "sh", "-c", "echo first")
    one("exec", "one", "--", "sh", "-c", "echo second; echo no >&2; exit 3")
    result = one("logs", "one")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"second\n", b"no\n")
    first, second = data(one("logs", "one", "--list", "--json"))
    assert (first["exit_code"], second["exit_code"]) == (0, 3)
    assert text(one("logs", "one", first["id"])) == "first\n"
    lines = [
        json.loads(line) for line in text(one("logs", "one", second["id"], "--json", "--follow")).splitlines()
    ]
    assert {line["text"] for line in lines if line["type"] == "output"} == {"second\n", "no\n"}
    assert lines[-1]["result"]["exit_code"] == 3
    assert text(one("logs", "one", first["id"], "--after", "1")) == ""


def test_logs_follow_a_command_that_runs(one):
    command = one.start("exec", "one", "--", "sh", "-c", "echo ready; read x; echo got $x")
    assert command.stdout.readline() == b"ready\n"
    follower = one.start("logs", "one", "--follow")
    assert follower.stdout.readline() == b"ready\n"
    command.stdin.write(b"word\n")
    command.stdin.close()
    assert follower.stdout.readline() == b"got word\n"
    assert follower.wait(50) == 0


def test_events_are_told_and_followed(one):
    follower = one.start("events", "one", "--follow", "--json")
    assert json.loads(follower.stdout.readline())["kind"] == "created"
    one("exec", "one", "--", "true")
    assert json.loads(follower.stdout.readline())["kind"] == "started"
    assert json.loads(follower.stdout.readline())["kind"] == "exited"
    follower.send_signal(2)
    assert follower.wait(50) == 130
    assert follower.stderr.read() == b""
    lines = text(one("events")).splitlines()
    assert [line.split()[3] for line in lines] == ["created", "started", "exited"]


# ── files ──────────────────────────────────────────────────────────────────────────────────────────


def test_files(one):
    assert text(one("files", "write", "one", "d/a.txt", "--mode", "600", stdin=b"content\n")) == ""
    assert text(one("files", "cat", "one", "d/a.txt")) == "content\n"
    assert data(one("files", "cat", "one", "d/a.txt", "--json")) == {"path": "d/a.txt", "text": "content\n"}
    assert text(one("files", "ls", "one", "d")).splitlines()[1].split()[:3] == ["-rw-------", "user", "8"]
    assert [entry["name"] for entry in data(one("files", "ls", "one", "--json"))] == ["d"]
    assert data(one("files", "stat", "one", "d/a.txt", "--json"))["size"] == 8
    assert "mode      0600\n" in text(one("files", "stat", "one", "d/a.txt"))
    assert data(one("files", "mkdir", "one", "e/f", "--json")) == {"path": "e/f", "made": True}
    assert text(one("files", "mv", "one", "d/a.txt", "e/f/b.txt")) == ""
    assert text(one("files", "cat", "one", "e/f/b.txt")) == "content\n"
    refused = one("files", "rm", "one", "e")
    assert (refused.returncode, b"cloche: error: " in refused.stderr) == (125, True)
    assert text(one("files", "rm", "one", "e", "--recursive")) == ""
    missing = one("files", "cat", "one", "e/f/b.txt")
    assert (missing.returncode, missing.stdout) == (125, b"")


def test_binary_files_are_exact(one):
    content = os.urandom(3 << 20)
    one("files", "write", "one", "b", stdin=content)
    assert one("files", "cat", "one", "b").stdout == content


def test_watch(one):
    watcher = one.start("files", "watch", "one", ".", "--json")
    writer = one.start("exec", "one", "--", "sh", "-c", "while :; do echo x > a; sleep 0.01; done")
    assert json.loads(watcher.stdout.readline())["path"].endswith("a")
    writer.terminate()
    watcher.send_signal(2)
    assert watcher.wait(50) == 130


# ── copying ────────────────────────────────────────────────────────────────────────────────────────


def tree(root):
    return {
        str(path.relative_to(root)): (
            os.readlink(path) if path.is_symlink() else stat.S_IMODE(path.stat().st_mode), path.is_file() and path.read_bytes()
        )
        for path in root.rglob("*")
    }  # fmt: skip


def test_a_file_goes_in_and_comes_out(one, tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff")
    (tmp_path / "a").chmod(0o750)
    assert text(one("cp", str(tmp_path / "a"), "one:")) == ""
    assert text(one("cp", str(tmp_path / "a"), "one:new/name")) == ""
    assert text(one("exec", "one", "--", "stat", "-c", "%a %s", "a", "new/name")) == "750 2\n750 2\n"
    assert data(one("cp", "one:a", str(tmp_path / "out"), "--json"))["files"] == 1
    assert (tmp_path / "out").read_bytes() == b"\x00\xff"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    (tmp_path / "d").mkdir()
    assert text(one("cp", "one:new/name", str(tmp_path / "d"))) == ""
    assert (tmp_path / "d/name").exists()


def test_a_tree_goes_in_and_comes_out(one, tmp_path):
    source = tmp_path / "tree"
    (source / "sub/deep").mkdir(parents=True)
    (source / "sub/file").write_text("x")
    (source / "sub/run").write_text("#!/bin/sh\n")
    (source / "sub/run").chmod(0o755)
    (source / "link").symlink_to("sub/file")
    os.mkfifo(source / "fifo")
    put = one("cp", str(source), "one:copy")
    assert (put.returncode, b"fifo is neither" in put.stderr) == (0, True)
    os.unlink(source / "fifo")
    assert text(one("exec", "one", "--", "cat", "copy/link")) == "x"
    assert text(one("cp", "one:copy", str(tmp_path / "back"))) == ""
    assert tree(tmp_path / "back") == tree(source)
    assert text(one("cp", "one:copy", str(tmp_path / "back"))) == "", "into a directory that is there"
    assert tree(tmp_path / "back/copy") == tree(source)


def test_what_comes_out_cannot_write_elsewhere(one, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    one(
        "exec",
        "one",
        "--",
        "sh",
        "-c",
        f"mkdir t; ln -s {victim} t/a; ln -s ../../x t/b; ln -s c t/ok; echo y > t/c",
    )
    first = one("cp", "one:t", str(tmp_path / "out"))
    assert first.returncode == 0
    assert first.stderr.count(b"is left out") == 2
    assert sorted(os.listdir(tmp_path / "out")) == ["c", "ok"]
    (tmp_path / "out/a").symlink_to(victim)  # as an older copy may have left
    one("exec", "one", "--", "sh", "-c", "rm t/a; mkdir t/a; echo evil > t/a/file; rm t/c; ln -s ok t/c")
    assert one("cp", "one:t/.", str(tmp_path / "out")).returncode == 0
    assert os.listdir(victim) == []
    assert (tmp_path / "out/a/file").read_text() == "evil\n"


def test_a_missing_source_is_said(one, tmp_path):
    for source, target in (("one:nope", str(tmp_path / "x")), (str(tmp_path / "nope"), "one:x")):
        result = one("cp", source, target)
        assert (result.returncode, result.stdout) == (125, b"")
        assert b"nope" in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("word", "place"),
    [("a", ("", "a")), ("./a:b", ("", "./a:b")), ("/x:y", ("", "/x:y")), ("id:p", ("id", "p")), ("id:", ("id", ".")),
     ("id:/a:b", ("id", "/a:b")), (":x", ("", ":x"))],
)  # fmt: skip
def test_sides_of_a_copy(word, place):
    assert copying.Place.parse(word) == place


# ── upkeep ─────────────────────────────────────────────────────────────────────────────────────────


def test_version_and_help(bare):
    assert text(bare("version")).startswith("cloche 0.")
    assert text(bare("--version")) == text(bare("version"))
    assert set(data(bare("version", "--json"))) == {"version", "protocol", "python", "system"}
    shown = text(bare("help"))
    assert all(f"\n  {verb} " in shown for verb in main.VERBS)
    assert text(bare("--help")) == shown
    assert text(bare("help", "run")) == text(bare("run", "--help"))
    nothing = bare()
    assert (nothing.returncode, nothing.stdout.decode()) == (125, shown)
    assert max(len(line) for line in shown.splitlines()) <= 80


@pytest.mark.alone  # what engines of other tests left would be found too
def test_gc_says_what_it_found_and_restarts_a_keeper_only_without_sandboxes(one):
    found = one("gc")
    assert (found.returncode, found.stderr) == (0, b"cloche: nothing was left behind\n")
    refused = one("gc", "--restart")
    assert (refused.returncode, b"has 1 live sandboxes" in refused.stderr) == (125, True)
    one("delete", "one")
    assert one("gc", "--restart", "--json").returncode == 0
    assert one.keeper.wait(50) == 0


def test_doctor_names_each_primitive_and_tries_a_sandbox(bare):
    found = data(bare("doctor", "--json"))
    assert found["ok"] is True
    assert {fact["name"] for fact in found["facts"]} >= {"user_namespaces", "overlay", "seccomp", "landlock"}
    assert (found["sandbox"]["level"], found["sandbox"]["exit_code"]) == ("namespaces", 0)
    shown = text(bare("doctor"))
    assert "a new sandbox gets: namespaces (driver namespaces), `true` exits with 0\n" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_parse_and_know_every_verb(bare, shell):
    script = text(bare("completions", shell))
    assert all(verb in script for verb in main.VERBS)
    assert "--minimum-isolation" in script.replace("-l minimum", "--minimum")
    try:
        checked = subprocess.run([shell, "-n"], input=script.encode(), capture_output=True, timeout=50)
    except FileNotFoundError:
        pytest.skip(f"{shell} is not installed here")
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_bash_completes_verbs_and_flags(bare):
    script = text(bare("completions", "bash"))
    ask = script + '\nCOMP_WORDS=({words}); COMP_CWORD={at}; _cloche; printf "%s\\n" "${{COMPREPLY[@]}}"'
    for words, at, expected in (("cloche ru", 1, ["run"]), ("cloche run --min", 2, ["--minimum-isolation"])):
        program = script + ask[len(script) :].replace("{words}", words).replace("{at}", str(at)).replace(
            "{{", "{"
        ).replace("}}", "}")
        found = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=50)
        assert (found.stdout.split(), found.stderr) == (expected, "")


def test_a_defect_of_ours_is_a_sentence_too(bare):
    program = (
        "import sys; sys.path[:0] = {path!r}; from cloche.cli import main, upkeep;"
        "upkeep._version = lambda chosen: 1 / 0; sys.exit(main.main(['version']))"
    ).format(path=bare.argv()[3:] or [os.path.join(os.path.dirname(main.__file__), "../..")])
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, env=bare.environment, timeout=50
    )
    assert ran.returncode == 125
    assert ran.stderr.startswith(b"cloche: error: ZeroDivisionError: division by zero\n\nhint: ")


def test_a_closed_reader_of_a_listing_is_no_error(one):
    process = one.start("help")
    process.stdout.close()
    assert process.wait(50) in (0, 141)
    assert b"Traceback" not in process.stderr.read()
