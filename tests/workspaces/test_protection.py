"""Protected names cannot be written, made, removed, renamed or replaced from inside, whatever they are at the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche import errors, policy, workspaces
from cloche.workspaces import plan
from tests.workspaces import glass

ATTACKS = (
    'echo evil > "$P"', 'echo evil >> "$P"', 'mkdir -p "$(dirname "$P")"; echo evil > "$P"', 'rm -rf "$P"; echo evil > "$P"',
    'mv "$P" x; echo evil > "$P"', 'echo evil > y; mv -f y "$P"', 'ln -sfn /tmp/evil "$P"', 'mkdir -p "$P"; echo evil > "$P/evil"',
    'D="$(dirname "$P")"; [ "$D" = . ] || { mv "$D" z; mkdir -p "$D"; echo evil > "$P"; }', 'ln -f a.txt "$P"', 'rm -f "$P"; ln a.txt "$P"',
    'P2="$P"; T="$(readlink -f "$P")"; rm -rf "$T"; echo evil > "$T"', 'chmod 777 "$P"; truncate -s 5 "$P"', 'mount --bind a.txt "$P"; umount "$P"; echo evil > "$P"',
)  # fmt: skip


def _everything(root: Path) -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    for folder, names, files in os.walk(root):
        for name in names + files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            text = (
                os.readlink(path).encode()
                if os.path.islink(path)
                else Path(path).read_bytes()
                if os.path.isfile(path)
                else b""
            )
            found[os.path.relpath(path, root)] = (oct(info.st_mode), text)
    return found


def _assault(prepared: workspaces.Prepared, names: tuple[str, ...]) -> None:
    for name in names:
        for attack in ATTACKS:
            # In a process of its own each, without privilege to undo mounts, and always from the root.
            glass.run(prepared, f"cd {prepared.root}; P='{name}'; ( {attack} ) 2>/dev/null; true")


@pytest.mark.parametrize("state", ["absent", "present"])
@pytest.mark.slow
def test_every_protected_name_withstands_every_attack(state: str, prepare, repository: Path) -> None:
    names = tuple(name.rstrip("/") for name in policy.PROTECTED)
    if state == "present":
        for name in policy.PROTECTED:
            path = repository / name.rstrip("/")
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                (path / "inner").write_text("mine")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("mine")
    before = dict(_everything(repository).items())
    prepared = prepare(repository)
    line = "\n".join(
        f"cd {prepared.root}; P='{name}'; ( {attack} ) 2>/dev/null"
        for name in (*names, ".git/config", ".git/commondir")
        for attack in ATTACKS
    )
    glass.run(prepared, "trap '' TERM; " + line + "\ntrue")
    workspaces.finish(prepared)
    after = _everything(repository)
    wanted = {
        name: value
        for name, value in before.items()
        if any(name == n or name.startswith(n + "/") for n in names)
    }
    got = {
        name: value
        for name, value in after.items()
        if any(name == n or name.startswith(n + "/") for n in names)
    }
    assert got == wanted
    assert after[".git/config"] == before[".git/config"]
    assert ".git/commondir" not in after


def test_a_symlinked_name_and_what_it_leads_to_hold(prepare, repository: Path) -> None:
    (repository / "dot").mkdir()
    (repository / "dot/bashrc").write_text("mine")
    (repository / ".bashrc").symlink_to("dot/bashrc")
    (repository / ".claude").symlink_to(repository / "dot/claude")
    (repository / ".zshrc").symlink_to("/nonexistent/zshrc")
    (repository / ".vscode").symlink_to("dot/vscode")
    prepared = prepare(repository)
    names = (
        ".bashrc",
        "dot/bashrc",
        ".claude/settings.json",
        "dot/claude/settings.json",
        ".claude",
        ".zshrc",
        ".vscode",
        "dot/vscode/tasks.json",
        "dot",
    )
    _assault(prepared, names[:-1])
    glass.run(prepared, "mv dot gone; rm -rf dot; mkdir dot")
    workspaces.finish(prepared)
    assert (repository / ".bashrc").readlink() == Path("dot/bashrc")
    assert (repository / "dot/bashrc").read_text() == "mine"
    assert (repository / ".claude").readlink() == repository / "dot/claude"
    assert (repository / ".zshrc").readlink() == Path("/nonexistent/zshrc")
    assert (repository / ".vscode").readlink() == Path("dot/vscode")
    assert sorted(os.listdir(repository / "dot")) == ["bashrc"]


def test_a_file_in_the_way_of_a_directory_cannot_become_one(prepare, project: Path) -> None:
    (project / ".claude").write_text("mine")
    prepared = prepare(project)
    glass.run(prepared, "rm -f .claude; mkdir .claude; echo evil > .claude/settings.json")
    assert (project / ".claude").read_text() == "mine"


def test_the_rest_of_the_workspace_is_writable(prepare, repository: Path) -> None:
    (repository / ".claude").mkdir()
    prepared = prepare(repository)
    ran = glass.run(
        prepared,
        "set -e; mkdir -p src/deep; echo x > src/deep/f; mv src lib; echo y > .claude/notes.md; rm a.txt; echo z > .git/description",
    )
    assert ran == (0, "")
    assert (repository / "lib/deep/f").read_text() == "x\n"
    assert (repository / ".claude/notes.md").read_text() == "y\n"


def _denying(*entries: str) -> policy.Merged:
    return policy.parse({"files": {"deny": list(entries)}})


def test_denied_paths_are_named_by_what_they_lead_to(prepare, project: Path) -> None:
    (project / "secret").mkdir()
    (project / "link").symlink_to("secret")
    (project / "out").symlink_to("/etc")
    prepared = prepare(project, rules=_denying("link", "out"))
    assert prepared.deny == (str(project / "secret"),)


def test_a_denied_name_that_is_not_there_cannot_be_made(prepare, project: Path) -> None:
    prepared = prepare(project, rules=_denying("not-there", "deep/er/one"))
    assert set(prepared.deny) == {f"{project}/not-there", f"{project}/deep/er/one"}
    for name in ("not-there", "deep/er/one"):
        assert glass.run(prepared, f"echo x > {name}").status != 0
    workspaces.finish(prepared)
    assert not (project / "not-there").exists()
    assert not (project / "deep").exists()


def test_patterns_hide_what_is_there(prepare, project: Path) -> None:
    (project / "a/b").mkdir(parents=True)
    for name in (".env", "a/.env", "a/b/.env", "a/b/key.pem", "a/key.txt"):
        (project / name).write_text("secret")
    (project / "inside").symlink_to("a")
    prepared = prepare(project, rules=_denying("**/.env", "inside/*/*.pem"))
    hidden = {".env", "a/.env", "a/b/.env", "a/b/key.pem"}
    assert set(prepared.deny) == {f"{project}/{name}" for name in hidden}


def test_a_workspace_too_large_to_search_is_refused(prepare, project: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "MAX_DIRECTORIES", 3)
    for name in "abcd":
        (project / name).mkdir()
    with pytest.raises(errors.ClocheError) as caught:
        prepare(project, rules=_denying("**/.env"))
    assert caught.value.code == "workspace_refused"
    assert prepare(project, rules=_denying("a/*.pem")).deny == ()


def test_losing_a_mount_is_noticed(prepare, repository: Path) -> None:
    (repository / ".envrc").write_text("mine")
    prepared = prepare(repository)
    line = "cat /proc/self/mountinfo; echo go; read answer < fifo; echo ======; cat /proc/self/mountinfo"
    os.mkfifo(repository / "fifo")
    assert workspaces.lost(prepared, "") == (
        *prepared.pinned,
        *(t for _s, t in (*prepared.private, *prepared.protect)),
    )
    before, after = _across_a_host_rename(prepared, repository, line)
    assert workspaces.lost(prepared, before) == ()
    assert workspaces.lost(prepared, after) == (str(repository / ".envrc"),)


def _across_a_host_rename(prepared: workspaces.Prepared, repository: Path, line: str) -> tuple[str, str]:
    """Let the host replace a protected file while the sandbox waits."""
    child = os.fork()
    if child == 0:
        with open(repository / "fifo", "w") as fifo:  # opens when the sandbox has come to its `read`
            (repository / "new").write_text("edited")
            os.rename(repository / "new", repository / ".envrc")
            fifo.write("\n")
        os._exit(0)
    output = glass.run(prepared, line).output
    os.waitpid(child, 0)
    before, _, after = output.partition("======")
    return before, after
