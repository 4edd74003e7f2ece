"""Git's configuration format, and what may come out of a sandbox through it."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.workspaces import gitconfig

BASE = "[core]\n\tbare = false\n"
REMOTE = (
    '[remote "origin"]\n\turl = https://example.org/x.git\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n'
)

DANGEROUS = [
    "[core]\n\tfsmonitor = evil", "[core]\n\thooksPath = evil", "[core]\n\tsshCommand = evil", "[core]\n\tpager = evil",
    "[core]\n\teditor = evil", "[core]\n\tgitProxy = evil", "[core]\n\tattributesFile = evil", "[core]\n\tworktree = ../x",
    "[alias]\n\tst = !evil", '[filter "x"]\n\tclean = evil', '[diff "x"]\n\ttextconv = evil', "[diff]\n\texternal = evil",
    "[credential]\n\thelper = evil", '[url "ext::evil"]\n\tinsteadOf = https://', "[include]\n\tpath = evil",
    '[includeIf "gitdir:."]\n\tpath = evil', "[gpg]\n\tprogram = evil", "[http]\n\tproxy = evil", "[user]\n\tname = evil",
    '[remote "o"]\n\tproxy = evil', '[remote "o"]\n\tuploadpack = evil', '[remote "o"]\n\treceivepack = evil',
    '[remote "o"]\n\tvcs = evil', '[remote "o"]\n\tpushurl = evil', '[branch "b"]\n\tpushRemote = evil',
    '[branch "b"]\n\tremote = ext::evil', '[branch "b"]\n\tremote = ./evil', '[branch "b"]\n\tmerge = evil',
    '[submodule "s"]\n\tupdate = !evil', '[submodule "../evil"]\n\turl = https://x/y', '[submodule "s"]\n\tpath = ../evil',
    '[remote "o"]\n\turl = ext::sh -c evil', '[remote "o"]\n\turl = fd::7', '[remote "o"]\n\turl = -oProxyCommand=evil',
    '[remote "o"]\n\turl = ssh://-oProxyCommand=evil/x', '[remote "o"]\n\turl = "a\\nb"', '[remote "o"]\n\turl = evil://x',
    '[remote "o"]\n\turl', '[remote "o"]\n\tfetch = refs/heads/*:refs/heads/*', '[remote "-o"]\n\turl = https://x/y',
    "[extensions]\n\tworktreeConfig = true", "[protocol]\n\tallow = always", "[uploadpack]\n\tpackObjectsHook = evil",
    "[maintenance]\n\trepo = evil", "[merge]\n\ttool = evil", '[mergetool "x"]\n\tcmd = evil', "[sequence]\n\teditor = evil",
]  # fmt: skip


@pytest.mark.parametrize("text", DANGEROUS)
def test_what_could_run_a_program_is_dropped_and_named(text: str) -> None:
    merged = gitconfig.merge(BASE, BASE, BASE + text + "\n")
    assert merged.text == BASE
    assert merged.merged == []
    assert len(merged.dropped) == 1


@pytest.mark.parametrize("text", DANGEROUS)
def test_a_new_repository_gets_no_more_than_that(text: str) -> None:
    merged = gitconfig.merge("", "", text + "\n", fresh=lambda worktree: worktree == "../x")
    harmless = "worktree = ../x" in text
    assert "evil" not in merged.text
    assert harmless or merged.text == ""


def test_a_broken_file_changes_nothing() -> None:
    for text in ("[core", "x = 1", '[a]\nb = "open\n', "[a]\nb = \\q\n", "[a]\n9 = 1\n", "[a]\nb c\n"):
        merged = gitconfig.merge(BASE, BASE, text)
        assert merged.text == BASE
        assert merged.dropped


def test_where_the_host_changed_the_same_key_the_host_wins() -> None:
    host = REMOTE.replace("example.org", "host.example")
    merged = gitconfig.merge(host, REMOTE, REMOTE.replace("example.org", "sandbox.example"))
    assert merged.text == host
    assert "the host changed it too" in merged.dropped[0]


def test_a_branch_may_follow_only_a_remote_that_is_accepted() -> None:
    now = BASE + '[remote "o"]\n\turl = ext::evil\n[branch "b"]\n\tremote = o\n\tmerge = refs/heads/b\n'
    merged = gitconfig.merge(BASE, BASE, now)
    assert "ext::" not in merged.text
    assert "remote = o" not in merged.text


def test_credentials_are_left_out_of_what_goes_in() -> None:
    text = (
        '[http "https://x/"]\n\textraheader = AUTHORIZATION: basic s3cret\n[credential]\n\thelper = store --file s3cret\n'
        '[remote "o"]\n\turl = https://me:s3cret@x/y.git\n\tfetch = +refs/heads/*:refs/remotes/o/*\n'
        '[remote "p"]\n\turl = https://s3cret@x/y.git\n[remote "q"]\n\turl = ssh://git@x/y.git\n'
        '[url "https://u:s3cret@x/"]\n\tinsteadOf = https://x/\n[sendemail]\n\tsmtpPass = s3cret\n'
    )
    shown, hidden = gitconfig.without_credentials(text)
    assert "s3cret" not in shown
    assert "s3cret" not in str(hidden)
    assert "https://x/y.git" in shown
    assert "ssh://git@x/y.git" in shown
    merged = gitconfig.merge(text, shown, shown + '[branch "b"]\n\tremote = o\n')
    assert merged.text == text + '[branch "b"]\n\tremote = o\n'


def test_allowed_changes_touch_nothing_else() -> None:
    host = '# mine\n[core]\n\tbare = false ; note\n[Branch "main"]\n\tremote = origin\n\n[alias]\n  x = !y\n'
    base = host
    now = (
        host
        + REMOTE
        + '[branch "topic"]\n\tremote = origin\n\tmerge = refs/heads/topic\n[submodule "s"]\n\tactive = true\n'
    )
    merged = gitconfig.merge(host, base, now)
    assert merged.dropped == []
    assert merged.text.startswith(host)
    assert gitconfig.parse(merged.text).values() == gitconfig.parse(now).values()


def test_removing_a_branch_removes_its_section() -> None:
    host = BASE + REMOTE + '[branch "gone"]\n\tremote = origin\n\tmerge = refs/heads/gone\n[x]\n\ty = 1\n'
    now = BASE + REMOTE + "[x]\n\ty = 1\n"
    assert gitconfig.merge(host, host, now).text == now


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("[a]b=c", ("a", None, "b"), "c"),
        ('[A "Sub\\"x\\\\"] B = c', ("a", 'Sub"x\\', "b"), "c"),
        ("[a]\nb = one \\\n  two", ("a", None, "b"), "one   two"),
        ('[a]\nb = " x # y " z ; c', ("a", None, "b"), " x # y  z"),
        ("[a]\nb", ("a", None, "b"), None),
        ("[a]\nb =", ("a", None, "b"), ""),
        ("[a]\r\nb = c\r\n", ("a", None, "b"), "c"),
        ("[a.Sub]\nb = 1", ("a", "sub", "b"), "1"),
        ('[a]\nb = \\t\\n\\\\\\"x', ("a", None, "b"), '\t\n\\"x'),
    ],
)
def test_reads_what_git_reads(text: str, key: gitconfig.Key, value: str | None) -> None:
    assert gitconfig.parse(text).values() == {key: [value]}


_names = st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True)
_values = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=12
)
_subs = st.none() | st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=8)
_changes = st.lists(st.tuples(_names, _subs, _names, st.lists(st.none() | _values, max_size=3)), max_size=6)


@given(_changes)
def test_what_is_assigned_is_what_is_read(changes: list) -> None:
    text = "# head\n[core]\n\tbare = false # tail\n"
    wanted: gitconfig.Values = {("core", None, "bare"): ["false"]}
    for section, sub, name, values in changes:
        key = (section, sub, name)
        text = gitconfig.assign(text, key, values)
        wanted.pop(key, None)
        if values:
            wanted[key] = values
    assert gitconfig.parse(text).values() == wanted


@settings(max_examples=25, deadline=None)
@given(_changes)
def test_git_reads_the_same(changes: list) -> None:
    text = ""
    for section, sub, name, values in changes:
        text = gitconfig.assign(text, (section, sub, name), values)
    done = subprocess.run(
        ["git", "config", "--null", "--list", "--file", "-"],
        input=text.encode(),
        capture_output=True,
        cwd="/",
    )
    assert done.returncode == 0, text
    seen: dict[str, list] = {}
    for record in done.stdout.decode().split("\0")[:-1]:
        key, newline, value = record.partition("\n")
        seen.setdefault(key, []).append(value if newline else None)
    assert seen == {gitconfig.spell(key): values for key, values in gitconfig.parse(text).values().items()}


@given(st.text(max_size=60))
def test_no_text_makes_it_fail_otherwise_than_by_saying_so(text: str) -> None:
    try:
        gitconfig.parse(text)
    except gitconfig.ConfigInvalid:
        pass
    assert isinstance(gitconfig.merge(BASE, BASE, text).text, str)
