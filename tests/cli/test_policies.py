"""`cloche policy`, and policy files as `cloche run` obeys them. Refusals first."""

import json
import os

import pytest


@pytest.fixture
def work(tmp_path):
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def own(bare):
    """Your own policy file."""
    path = bare.home / "c/cloche/policy.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def said(ran) -> str:
    return (ran.stdout + ran.stderr).decode()


# ── what cannot be ──


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["explain"], "takes a kind and a name"),
        (["explain", "host"], "takes a kind and a name"),
        (["explain", "hots", "a.org"], "did you mean 'host'?"),
        (["explain", "syscall", "moutn"], "did you mean 'mount'?"),
        (["explain", "host", "a.org", "--profile", "moderat"], "did you mean 'moderate'?"),
        (["explain", "host", "a.org", "--mode", "codec"], "did you mean 'codex'?"),
        (["explain", "host", "a.org", "--mode", "codex", "--profile", "moderate"], "both given"),
        (["explain", "path", "x", "--workspace", "/nowhere"], "there is no directory"),
        (["show", "x"], "takes no further words"),
        (["check"], "takes one file"),
        (["check", "nowhere.toml"], "cannot be read"),
        (["test", "nowhere.toml"], "cannot be read"),
        (["trust", "nowhere.toml"], "cannot be read"),
        (["chek", "x"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_said(bare, words, part):
    ran = bare("policy", *words)
    assert ran.returncode == 125
    assert part in said(ran)
    assert "Traceback" not in said(ran)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (
            "[files]\nroot = 'overlay'\n\n[network]\nallow = [\n  'a.org',\n  'https://b.org',\n]\n",
            7,
            "scheme",
        ),
        ("[netwrok]\n", 1, "did you mean 'network'?"),
        ("[network]\nmode = 'off'\nallow = ['a.org']\n", 2, "one of them is meant"),
        ("[files]\ndeny = ['a',\n'../b']\n", 3, "'..'"),
        ("[syscalls]\ndeny = ['moutn']\n", 2, "no system call"),
        ("[profiles.x.syscalls]\ndeny = ['execve']\n", 2, "nothing could run"),
        ("[profiles.x]\nbase = 'y'\n", None, "no profile 'y'"),
        ("[profiles.x]\nbase = 'x'\n", None, "circle"),
        ("[files]\nprotected = ['a', '!a']\n", 2, "both"),
        ("source = 'x'\n", 1, "no key 'source'"),
        ("[limits]\npids = -1\n", 2, "pids"),
        ("[limits\n", 1, "not TOML"),
    ],
)
def test_check_names_file_line_and_cause(bare, work, text, line, part):
    (work / "p.toml").write_text(text)
    ran = bare("policy", "check", str(work / "p.toml"))
    assert ran.returncode == 125
    assert part in said(ran)
    if line is not None:
        assert f"p.toml, line {line}: " in said(ran) or f"p.toml:{line}: " in said(ran)


def test_check_of_a_good_file_says_what_needs_trust(bare, work):
    (work / "p.toml").write_text("[files]\ndeny = ['a']\n")
    ran = bare("policy", "check", str(work / "p.toml"), "--json")
    assert json.loads(ran.stdout) == {"file": str(work / "p.toml"), "valid": True, "needs_trust": ""}
    (work / "p.toml").write_text("[environment.set]\nA = '1'\n")
    assert (
        json.loads(bare("policy", "check", str(work / "p.toml"), "--json").stdout)["needs_trust"]
        == "environment.set"
    )


# ── a project's file ──


def test_a_broken_project_file_refuses_the_sandbox(bare, work):
    (work / "cloche.toml").write_text("[files]\ndenny = ['a']\n")
    ran = bare("run", "--workspace", str(work), "--", "true")
    assert ran.returncode == 125
    assert "cloche.toml, line 2" in said(ran)
    assert "did you mean 'deny'?" in said(ran)
    assert bare("run", "--", "true").returncode == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_project_file_that_is_no_file_refuses_the_sandbox(bare, work, kind):
    path = work / "cloche.toml"
    if kind == "link":
        (work.parent / "elsewhere.toml").write_text("")
        path.symlink_to(work.parent / "elsewhere.toml")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    ran = bare("run", "--workspace", str(work), "--", "true")
    assert ran.returncode == 125
    assert "cannot be read" in said(ran)


def test_a_project_file_cannot_give_until_it_is_trusted(bare, work):
    (work / "cloche.toml").write_text("[environment.set]\nGIVEN = 'yes'\n")
    words = ("run", "--workspace", str(work), "--", "sh", "-c", "echo GIVEN=$GIVEN")
    ran = bare(*words)
    assert ran.returncode == 125
    assert "cloche policy trust" in said(ran)
    assert bare("policy", "trust", str(work / "cloche.toml")).returncode == 0
    assert bare(*words).stdout == b"GIVEN=yes\n"
    (work / "cloche.toml").write_text("[environment.set]\nGIVEN = 'more'\n")
    assert bare(*words).returncode == 125
    (work / "cloche.toml").write_text("[environment.set]\nGIVEN = 'yes'\n")
    assert bare(*words).returncode == 0
    assert bare("policy", "untrust", str(work / "cloche.toml")).returncode == 0
    assert bare(*words).returncode == 125


def test_trust_is_of_one_file_and_not_of_its_copy(bare, work, tmp_path):
    (work / "cloche.toml").write_text("[environment.set]\nGIVEN = 'yes'\n")
    assert bare("policy", "trust", str(work / "cloche.toml")).returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "cloche.toml").write_bytes((work / "cloche.toml").read_bytes())
    assert bare("run", "--workspace", str(other), "--", "true").returncode == 125
    assert bare("run", "--workspace", str(work), "--", "true").returncode == 0


def test_trust_that_cannot_be_read_refuses(bare, work):
    (work / "cloche.toml").write_text("[files]\ndeny = ['a']\n")
    assert bare("run", "--workspace", str(work), "--", "true").returncode == 0
    (bare.state / "trusted.json").write_text("{")
    ran = bare("run", "--workspace", str(work), "--", "true")
    assert ran.returncode == 125
    assert "trusted.json" in said(ran)


# ── ceilings, limits, environment ──


def test_a_ceiling_that_is_named_and_missing_refuses_every_sandbox(bare, work):
    (bare.home / "c/cloche").mkdir(parents=True, exist_ok=True)
    (bare.home / "c/cloche/settings.toml").write_text(f"[policy]\nceiling = '{work}/ceiling.toml'\n")
    ran = bare("run", "--", "true")
    assert ran.returncode == 125
    assert "ceiling.toml" in said(ran)
    (work / "ceiling.toml").write_text("[isolation]\nroot_user = false\n[limits]\npids = 64\n")
    assert bare("run", "--", "true").returncode == 0
    over = bare("run", "--pids", "128", "--", "true")
    assert "limits.pids of the policy allows 64" in said(over)
    allowed = work / "mine.toml"
    allowed.write_text("[isolation]\nroot_user = true\n[limits]\npids = 5000\n")
    shown = json.loads(bare("policy", "show", "--policy", str(allowed), "--json").stdout)
    assert shown["policy"]["isolation"]["root_user"] is False
    assert shown["policy"]["limits"]["pids"] == 64
    source = {row["field"]: row["source"] for row in shown["origins"]}
    assert source["limits.pids"] == f"{work}/ceiling.toml:4"


def test_a_variable_that_may_not_enter_is_refused(bare, own):
    own.write_text("[environment]\ndeny = ['AWS_*']\n[environment.set]\nMODE = 'inside'\n")
    ran = bare("run", "--env", "AWS_KEY=x", "--", "true")
    assert (ran.returncode, b"AWS_KEY may not be passed in" in ran.stderr) == (125, True)
    assert bare("run", "--env", "A=x", "--", "sh", "-c", "echo $A $MODE").stdout == b"x inside\n"
    assert bare("run", "--env", "MODE=mine", "--", "sh", "-c", "echo $MODE").stdout == b"mine\n"


def test_modes_and_profiles_of_one_s_own(bare, own):
    own.write_text(
        "[profiles.tight]\nbase = 'restrictive'\n[agents.helper]\nprofile = 'tight'\n[agents.helper.environment.set]\nWHO = 'helper'\n"
    )
    assert (
        bare("run", "--mode", "helper", "--", "sh", "-c", "touch /etc/x || echo $WHO").stdout == b"helper\n"
    )
    assert "both given" in said(bare("run", "--mode", "helper", "--profile", "tight", "--", "true"))
    assert bare("run", "--profile", "tight", "--", "sh", "-c", "touch /etc/x || echo no").stdout == b"no\n"


def test_directories_of_the_host_are_shown_by_one_s_own_file_only(bare, own, work, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("shown")
    look = ("sh", "-c", f"cat {data}/a; echo x > {data}/b")
    assert b"shown" not in bare("run", "--", *look).stdout
    (work / "cloche.toml").write_text(f"[files]\nread = ['{data}']\n")
    assert b"shown" not in bare("run", "--workspace", str(work), "--", *look).stdout
    (work / "cloche.toml").unlink()
    own.write_text(f"[files]\nread = ['{data}']\n")
    for words in ((), ("--workspace", str(work))):
        ran = bare("run", *words, "--", *look)
        assert ran.stdout == b"shown"
        assert b"Read-only file system" in ran.stderr
    own.write_text(f"[files]\nwrite = ['{data}']\n")
    assert bare("run", "--", *look).returncode == 0
    assert (data / "b").read_text() == "x\n"


@pytest.mark.parametrize("path", ["/", "/etc", "HOME", "HOME/.ssh", "HOME/.aws", "STATE", "/nowhere"])
def test_directories_that_hold_credentials_or_the_system_are_refused(bare, own, path):
    (bare.home / ".ssh").mkdir()
    (bare.home / ".aws").mkdir()
    bare.state.mkdir(exist_ok=True)
    path = path.replace("HOME", str(bare.home)).replace("STATE", str(bare.state))
    own.write_text(f"[files]\nread = ['{path}']\n")
    ran = bare("run", "--json", "--", "true")
    assert ran.returncode == 125
    assert json.loads(ran.stdout or ran.stderr)["error"]["code"] == "host_path_refused"


# ── explain and test ──


def test_explain_as_json_says_all(bare, work):
    (work / "cloche.toml").write_text("[files]\ndeny = ['a']\n")
    found = json.loads(bare("policy", "explain", "path", "a", "--workspace", str(work), "--json").stdout)
    assert found == {
        "kind": "path", "target": "a", "verdict": "deny", "rule": "a", "field": "files.deny",
        "source": f"{work}/cloche.toml:2", "reason": "",
    }  # fmt: skip


def test_explain_asks_about_requests_too(bare, work):
    (work / "p.toml").write_text("[network]\nallow = ['a.org:80 methods=GET path=/simple']\n")
    ask = ("policy", "explain", "host", "a.org:80", "--policy", str(work / "p.toml"), "--json")
    assert json.loads(bare(*ask, "--method", "GET", "--path", "/simple/x").stdout)["verdict"] == "allow"
    assert json.loads(bare(*ask, "--method", "PUT", "--path", "/simple/x").stdout)["verdict"] == "deny"
    assert json.loads(bare(*ask).stdout)["verdict"] == "deny"


def test_expectations_that_do_not_hold_fail_with_a_table(bare, work):
    (work / "p.toml").write_text("[network]\nallow = ['a.org']\n")
    good = "policy = 'p.toml'\n[[expect]]\nhost = 'a.org'\nverdict = 'allow'\n[[expect]]\nhost = 'b.org'\nverdict = 'deny'\n"
    (work / "t.toml").write_text(good)
    assert bare("policy", "test", str(work / "t.toml")).returncode == 0
    (work / "t.toml").write_text(good + "[[expect]]\nhost = 'c.org'\nverdict = 'allow'\n")
    ran = bare("policy", "test", str(work / "t.toml"))
    assert ran.returncode == 1
    assert "host c.org" in said(ran)
    assert "host b.org" not in said(ran)
    shown = json.loads(bare("policy", "test", str(work / "t.toml"), "--json").stdout)
    assert [row["line"] for row in shown["failures"]] == [8]


@pytest.mark.parametrize(
    "text",
    ["[[expect]]\nhost = 'a'\npath = 'b'\nverdict = 'deny'\n", "[[expect]]\nhost = 'a'\nverdict = 'maybe'\n",
     "[[expect]]\nhots = 'a'\nverdict = 'deny'\n", "[[expect]]\nverdict = 'deny'\n", "expect = 3\n", "profile = 'x'\n"],
)  # fmt: skip
def test_expectations_that_cannot_be_are_refused(bare, work, text):
    (work / "t.toml").write_text(text)
    ran = bare("policy", "test", str(work / "t.toml"))
    assert ran.returncode == 125
    assert "Traceback" not in said(ran)
