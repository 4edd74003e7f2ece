"""Stubs come and go without a trace, whoever dies in between, and never take a user's file along."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche import workspaces
from cloche.workspaces import stubs


def test_what_the_user_put_in_a_stubs_place_stays(prepare, project: Path) -> None:
    prepared = prepare(project)
    (project / ".envrc").write_text("export A=1\n")  # written into the stub
    (project / ".npmrc").unlink()
    (project / ".npmrc").write_text("")  # another empty file
    (project / ".vscode/tasks.json").write_text("{}")
    os.utime(project / ".bashrc")  # touched
    (project / ".claude/commands").rmdir()
    (project / ".claude/commands").mkdir()
    (project / "new").write_text("mine")
    (project / "new").rename(project / ".zshrc")
    (project / ".mcp.json").unlink()
    (project / ".mcp.json").symlink_to("/etc/passwd")
    workspaces.finish(prepared)
    left = sorted(str(path.relative_to(project)) for path in project.rglob("*"))
    assert left == [
        ".bashrc",
        ".claude",
        ".claude/commands",
        ".envrc",
        ".mcp.json",
        ".npmrc",
        ".vscode",
        ".vscode/tasks.json",
        ".zshrc",
    ]


def test_nothing_is_left_and_finishing_twice_is_harmless(prepare, repository: Path, tree) -> None:
    before = tree(repository)
    prepared = prepare(repository)
    assert (repository / ".envrc").exists()
    report = workspaces.finish(prepared)
    assert tree(repository) == before
    assert str(repository / ".envrc") in report.stubs_removed
    assert report.control_files_changed == report.warnings == report.config_dropped == ()
    assert workspaces.finish(prepared) == workspaces.Report()
    assert os.listdir(prepared.state) == []


@pytest.mark.parametrize("step", range(1, 60, 7))
def test_a_crash_while_making_is_swept(
    step: int, prepare, project: Path, tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = stubs._make

    def make(want, others):
        nonlocal calls
        calls += 1
        if calls == step:
            os._exit(0)
        return real(want, others)

    before = tree(project)
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(stubs, "_make", make)
        try:
            prepare(project)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    workspaces.sweep(str(project.parent / "states/one"))
    assert tree(project) == before


def test_it_is_written_down_before_it_is_made(
    prepare, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = str(project.parent / "states/one")
    seen = []
    real = stubs._make

    def make(want, others):
        seen.append(f"{want.anchor}/{want.path}" in {stub.full for stub in stubs.recorded(state)})
        return real(want, others)

    monkeypatch.setattr(stubs, "_make", make)
    prepare(project)
    assert seen
    assert all(seen)


def test_a_torn_journal_is_read_up_to_the_tear(prepare, project: Path, tree) -> None:
    before = tree(project)
    prepared = prepare(project)
    with open(f"{prepared.state}/stubs", "ab") as file:
        file.write(b'{"anchor": "/x", "pa')
    workspaces.sweep(prepared.state)
    assert tree(project) == before


@pytest.mark.parametrize("first_to_end", ["one", "two"])
def test_two_sandboxes_share_stubs_and_the_last_removes_them(
    first_to_end: str, prepare, repository: Path, tree
) -> None:
    before = tree(repository)
    sessions = {name: prepare(repository, name=name) for name in ("one", "two")}
    assert sessions["one"].pinned == sessions["two"].pinned
    inode = (repository / ".claude/settings.json").stat().st_ino
    workspaces.finish(sessions.pop(first_to_end))
    assert (repository / ".claude/settings.json").stat().st_ino == inode
    assert (repository / ".git/commondir").exists()
    workspaces.finish(next(iter(sessions.values())))
    assert tree(repository) == before


def test_a_directory_that_cannot_be_written_needs_no_stubs(prepare, project: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    project.chmod(0o555)
    try:
        prepared = prepare(project)
        assert prepared.protect == ()
        workspaces.finish(prepared)
    finally:
        project.chmod(0o755)
