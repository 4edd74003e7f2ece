"""Git works inside, its work is on the host at once, and nothing planted in a repository runs on the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cloche import workspaces
from cloche.workspaces import repositories
from tests.workspaces import glass

FILE = "-c protocol.file.allow=always"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "bare.git"
    glass.git(str(tmp_path), "init", "-q", "--bare", "-b", "main", str(path))
    return path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Another repository, to be a submodule."""
    path = tmp_path / "library"
    path.mkdir()
    glass.git(str(path), "init", "-q", "-b", "main")
    (path / "lib.txt").write_text("lib\n")
    glass.git(str(path), "add", ".")
    glass.git(str(path), "commit", "-qm", "lib")
    return path


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that leaves a mark; planted inside, it must never run on the host."""
    program = tmp_path / "trap.sh"
    program.write_text(f'#!/bin/sh\ntouch {tmp_path}/sprung."$CLOCHE_TEST_SIDE"\nexit 1\n')
    program.chmod(0o755)
    return program


def _run(prepared: workspaces.Prepared, line: str) -> str:
    ran = glass.run(prepared, "set -e\n" + line, env={"CLOCHE_TEST_SIDE": "inside"})
    assert ran.status == 0, ran.output
    return ran.output


def _use_git_on_the_host(root: Path) -> None:
    """What people, prompts and editors run without thinking."""
    for folder in (
        root,
        *(path.parent for path in root.rglob(".git")),
        *(path.parent for path in root.rglob("HEAD")),
    ):
        for command in (
            "status",
            "diff",
            "log -1 -p --ext-diff",
            "stash list",
            "branch -vv",
            "submodule status",
            "st",
            "fetch --all",
        ):
            glass.git(str(folder), *command.split(), check=False, env={"CLOCHE_TEST_SIDE": "host"})
    glass.git(
        str(root), "commit", "--allow-empty", "-qm", "host", check=False, env={"CLOCHE_TEST_SIDE": "host"}
    )


def _sprung(root: Path) -> list[str]:
    return sorted(path.name for path in root.parent.glob("sprung.*"))


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────

PLANTS = {
    "fsmonitor": "git config core.fsmonitor $TRAP",
    "hooks path": "mkdir h; cp $TRAP h/pre-commit; git config core.hooksPath $PWD/h",
    "hook": "cp $TRAP .git/hooks/pre-commit || { mv .git/hooks .git/h2; mkdir .git/hooks; cp $TRAP .git/hooks/pre-commit; }",
    "alias": "git config alias.st '!'$TRAP",
    "external diff": "git config diff.external $TRAP; echo change >> a.txt",
    "filter": "git config filter.x.clean $TRAP; echo '* filter=x' > .gitattributes; echo '* filter=x' > .git/info/attributes || true; echo c >> a.txt",
    "pager": "git config core.pager $TRAP; git config pager.log $TRAP",
    "common directory": "mkdir evil; cp -r .git/HEAD .git/objects .git/refs evil/; git config -f evil/config core.fsmonitor $TRAP; "
    "echo ../evil > .git/commondir || true; rm -f .git/commondir || true; echo ../evil > .git/commondir || true",
    "worktree configuration": "git config extensions.worktreeConfig true; git config -f .git/config.worktree core.fsmonitor $TRAP || true",
    "include": "git config -f .git/inc core.fsmonitor $TRAP; git config include.path inc",
    "other .git": "mv .git old || true; rm -rf .git || true; git init -q . || true; git config core.fsmonitor $TRAP",
    "embedded repository": "git init -q sub; git -C sub commit -q --allow-empty -m x; git -C sub config core.fsmonitor $TRAP; git add sub; git commit -qm sub",
    "submodule": "git -c protocol.file.allow=always submodule add -q $LIBRARY sub; git commit -qm sub; git -C sub config core.fsmonitor $TRAP; "
    "cp $TRAP .git/modules/sub/hooks/post-checkout || true",
    "hidden repository": "git init -q --bare .git/objects/zz; git -C .git/objects/zz config core.fsmonitor $TRAP; git -C .git/objects/zz config core.bare false; "
    "mkdir sub; echo 'gitdir: ../.git/objects/zz' > sub/.git; git -C sub commit -q --allow-empty -m x; git add sub; git commit -qm sub",
    "bare repository": "git init -q --bare b; git -C b config core.fsmonitor $TRAP; git -C b config core.bare false; git -C b config core.worktree $PWD; "
    "mkdir b/hooks; cp $TRAP b/hooks/pre-commit",
    "linked worktree": "git worktree add -q wt; mkdir evil; cp -r .git/HEAD .git/objects .git/refs evil/; git config -f evil/config core.fsmonitor $TRAP; "
    "echo $PWD/evil > .git/worktrees/wt/commondir",
    "linked worktree by a link": "git worktree add -q wt; mkdir -p evil/a/b; cp -r .git/HEAD .git/objects .git/refs evil/; "
    "git config -f evil/config core.fsmonitor $TRAP; ln -s $PWD/evil/a/b .git/worktrees/wt/x; echo x/../.. > .git/worktrees/wt/commondir; "
    "mkdir -p .git/worktrees/a",
    "remote": "git remote add up ext::$TRAP; git config protocol.ext.allow always; mkdir .git/remotes || true; echo URL: ext::$TRAP > .git/remotes/up || true",
    "config as a link": "rm /run/cloche/git/0/config; ln -s /etc/passwd /run/cloche/git/0/config",
    "config as a fifo": "rm /run/cloche/git/0/config; mkfifo /run/cloche/git/0/config",
    "no config": "rm -rf /run/cloche/git/0/config",
}
NEEDS_MORE = {"pager", "config as a link", "config as a fifo", "no config"}  # a terminal; a sandbox


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_does_not_run_on_the_host(
    plant: str, prepare, repository: Path, trap: Path, library: Path
) -> None:
    config = (repository / ".git/config").read_bytes()
    prepared = prepare(repository)
    setting = f"TRAP={trap} LIBRARY={library}\n"
    glass.run(prepared, setting + PLANTS[plant], env={"CLOCHE_TEST_SIDE": "inside"})
    report = workspaces.finish(prepared)
    _use_git_on_the_host(repository)
    assert "sprung.host" not in _sprung(repository)
    assert trap.name.encode() not in (repository / ".git/config").read_bytes()
    assert config in (repository / ".git/config").read_bytes()
    said = " ".join((*report.config_dropped, *report.warnings, *report.control_files_changed))
    if plant not in ("hook", "common directory"):
        assert said


@pytest.mark.parametrize(
    "plant", ["fsmonitor", "hook", "alias", "common directory", "worktree configuration", "other .git"]
)
def test_nor_while_the_sandbox_runs(plant: str, prepare, repository: Path, trap: Path) -> None:
    prepared = prepare(repository)
    glass.run(prepared, f"TRAP={trap}\n" + PLANTS[plant], env={"CLOCHE_TEST_SIDE": "inside"})
    _use_git_on_the_host(repository)
    assert "sprung.host" not in _sprung(repository)


@pytest.mark.parametrize("plant", PLANTS)
def test_nor_after_a_crash(plant: str, prepare, repository: Path, trap: Path, library: Path) -> None:
    prepared = prepare(repository)
    glass.run(
        prepared, f"TRAP={trap} LIBRARY={library}\n" + PLANTS[plant], env={"CLOCHE_TEST_SIDE": "inside"}
    )
    workspaces.sweep(prepared.state)
    _use_git_on_the_host(repository)
    assert "sprung.host" not in _sprung(repository)


def test_a_directory_without_repository_cannot_be_given_a_trap(prepare, project: Path, trap: Path) -> None:
    prepared = prepare(project)
    _run(
        prepared,
        f"git init -q -b main; echo x > x; git add -A; git commit -qm first; git config core.fsmonitor {trap}; git config alias.st '!{trap}'",
    )
    _use_git_on_the_host(project)
    report = workspaces.finish(prepared)
    _use_git_on_the_host(project)
    assert _sprung(project) in ([], ["sprung.inside"])
    assert glass.git(str(project), "log", "--format=%s %an", "-1", "--", "x") == "first Ada\n"
    assert glass.git(str(project), "ls-files") == "x\n"
    assert any("core.fsmonitor" in line for line in report.config_dropped)


BARE_ROOT = (
    "git init -q --bare x; mv x/* .; git config -f config core.fsmonitor $TRAP; git config -f config core.bare false; "
    "git config -f config core.worktree $PWD"
)


@pytest.mark.parametrize("inside", [True, False])
def test_a_directory_turned_into_a_bare_repository_is_harmless_only_with_a_glass(
    inside: bool, prepare, project: Path, trap: Path
) -> None:
    if inside:
        prepared = prepare(project)
        glass.run(prepared, f"TRAP={trap}\n" + BARE_ROOT)
        report = workspaces.finish(prepared)
        assert any("bare repository" in line for line in report.warnings)
    else:
        subprocess.run(
            ["bash", "-c", BARE_ROOT], cwd=project, env={**os.environ, "TRAP": str(trap)}, check=True
        )
    glass.git(str(project), "status", check=False, env={"CLOCHE_TEST_SIDE": "host"})
    assert _sprung(project) == ([] if inside else ["sprung.host"])


def test_a_repository_that_exists_in_the_workspace_is_protected_too(
    prepare, repository: Path, library: Path, trap: Path
) -> None:
    glass.git(str(repository), *FILE.split(), "submodule", "add", "-q", str(library), "sub")
    glass.git(str(repository), "commit", "-qm", "sub")
    glass.git(str(repository), "init", "-q", "nested")
    before = [(repository / path).read_bytes() for path in (".git/modules/sub/config", "nested/.git/config")]
    prepared = prepare(repository)
    _run(
        prepared,
        f"for d in sub nested; do git -C $d config core.fsmonitor {trap}; git -C $d checkout -q -b topic; git -C $d remote add up https://x/y; done",
    )
    glass.run(
        prepared, f"cp {trap} .git/modules/sub/hooks/post-commit; cp {trap} nested/.git/hooks/post-commit"
    )
    _use_git_on_the_host(repository)
    report = workspaces.finish(prepared)
    _use_git_on_the_host(repository)
    assert "sprung.host" not in _sprung(repository)
    after = [(repository / path).read_bytes() for path in (".git/modules/sub/config", "nested/.git/config")]
    assert all(new.startswith(old) and b"https://x/y" in new for old, new in zip(before, after, strict=True))
    assert len(report.config_dropped) == 2


@pytest.mark.parametrize(
    "place", ["{outside}", "../../../outside", "../../.git", "../../x/../../outside", "../../link"]
)
def test_a_new_repository_cannot_have_its_files_elsewhere(place: str, prepare, repository: Path) -> None:
    outside = repository.parent / "outside"
    outside.mkdir()
    prepared = prepare(repository)
    _run(
        prepared,
        f"ln -s {outside} link; git init -q sub; git -C sub config core.worktree '{place.format(outside=outside)}'",
    )
    report = workspaces.finish(prepared)
    assert any("core.worktree" in line for line in report.config_dropped)
    assert glass.git(str(repository / "sub"), "rev-parse", "--show-toplevel") == f"{repository}/sub\n"


def test_a_rebase_left_with_commands_is_reported(prepare, repository: Path) -> None:
    prepared = prepare(repository)
    _run(
        prepared,
        "git commit -q --allow-empty -m x; GIT_SEQUENCE_EDITOR=: git rebase -q -x false HEAD~1 || true; echo 'exec evil' >> .git/rebase-merge/git-rebase-todo",
    )
    assert any("rebase is under way" in line for line in workspaces.finish(prepared).warnings)


def test_a_change_on_the_host_meanwhile_is_said(prepare, repository: Path) -> None:
    prepared = prepare(repository)
    glass.git(str(repository), "config", "core.editor", "vim")
    _run(prepared, "git branch x")
    report = workspaces.finish(prepared)
    assert any("core.editor = vim" in line for line in report.warnings)
    assert glass.git(str(repository), "config", "core.editor") == "vim\n"


def test_a_locked_configuration_is_left_alone(prepare, repository: Path) -> None:
    prepared = prepare(repository)
    _run(prepared, "git remote add up https://x/y")
    (repository / ".git/config.lock").write_text("")
    before = (repository / ".git/config").read_bytes()
    report = workspaces.finish(prepared)
    assert (repository / ".git/config").read_bytes() == before
    assert any("locked" in line for line in report.warnings)
    assert (repository / ".git/config.lock").exists()


def test_a_git_file_that_its_repository_does_not_name_is_not_followed(
    prepare, project: Path, library: Path
) -> None:
    (project / ".git").write_text(f"gitdir: {library}/.git\n")
    prepared = prepare(project)
    assert [bind.source for bind in prepared.binds if bind.writable] == [str(project)]
    assert any("not shown" in line for line in prepared.warnings)
    glass.run(prepared, "rm -f .git; echo 'gitdir: /tmp/evil' > .git")
    assert str(library) in (project / ".git").read_text()


# ── permissions ────────────────────────────────────────────────────────────────────────────────────


def test_everyday_git_works_and_is_on_the_host(prepare, repository: Path, bare: Path, library: Path) -> None:
    prepared = prepare(repository)
    said = _run(
        prepared,
        f"""
        test -z "$(git status --porcelain)"
        echo 2 > b.txt; git add -A; git commit -qm second; git tag v1
        git branch feature; git branch -m feature renamed
        git checkout -q -b topic; echo 3 > c.txt; git add c.txt; git commit -qm third
        git checkout -q main; echo 4 > d.txt; git add .; git commit -qm fourth
        git rebase -q main topic; git checkout -q main
        git worktree add -q wt topic; (cd wt; echo w > w.txt; git add .; git commit -qm inworktree)
        git remote add origin {bare}; git push -q -u origin main
        git {FILE} submodule add -q {library} sub; git commit -qm submodule
        git submodule deinit -q -f sub; git {FILE} submodule update -q --init
        git checkout -q -b tracking origin/main; git checkout -q main
        git config user.name Eve; test "$(git config user.name)" = Eve; git commit -q --allow-empty -m byeve
        git config --global user.email eve@example.org; git config --unset user.name
        git gc -q; git pack-refs --all
        echo kept > a.txt; echo new > u.txt; git stash -q -u
        git status -sb
        """,
    )
    assert "## main...origin/main [ahead 2]" in said

    def git(*arguments: str) -> str:
        return glass.git(str(repository), *arguments)

    # Live, before the session ends:
    assert git("log", "--format=%s", "main") == "byeve\nsubmodule\nfourth\nsecond\nfirst\n"
    assert git("log", "--format=%an", "-1") == "Eve\n"
    assert git("log", "--format=%s", "-2", "topic") == "inworktree\nthird\n"
    assert git("stash", "list").count("\n") == 1

    report = workspaces.finish(prepared)
    assert (
        git("branch", "--format=%(refname:short) %(upstream:short)")
        == "main origin/main\nrenamed \ntopic \ntracking origin/main\n"
    )
    assert git("remote", "get-url", "origin") == f"{bare}\n"
    assert git("submodule", "status").strip().endswith("sub (heads/main)")
    assert str(repository / "wt") in git("worktree", "list")
    assert glass.git(str(repository / "wt"), "status", "--porcelain") == ""
    assert git("status", "--porcelain") == "?? wt/\n"
    assert git("stash", "show", "-u", "--name-only") == "a.txt\nu.txt\n"
    git("stash", "pop", "-q")
    assert (repository / "u.txt").read_text() == "new\n"
    assert git("tag") == "v1\n"
    assert glass.git(str(bare), "log", "--format=%s", "-1", "main") == "fourth\n"
    git("fsck", "--strict")
    assert report.config_dropped == ()
    assert report.warnings == ()
    assert report.control_files_changed == (".gitmodules (added)",)


def test_a_commit_survives_the_death_of_everything(prepare, repository: Path) -> None:
    prepared = prepare(repository)
    _run(
        prepared,
        "git checkout -q -b topic; echo 2 > b; git add b; git commit -qm second; git gc -q; git remote add up https://x/y",
    )
    workspaces.sweep(prepared.state)
    assert glass.git(str(repository), "log", "--format=%s", "topic") == "second\nfirst\n"
    assert glass.git(str(repository), "status", "--porcelain") == ""
    assert glass.git(str(repository), "remote") == ""
    assert os.listdir(prepared.state) == []


def test_a_repositorys_own_name_and_address_win(prepare, repository: Path) -> None:
    glass.git(str(repository), "config", "user.email", "work@example.org")
    prepared = prepare(repository)
    _run(prepared, "git commit -q --allow-empty -m x")
    assert glass.git(str(repository), "log", "-1", "--format=%an <%ae>") == "Ada <work@example.org>\n"


def test_a_linked_worktree_brings_its_repository(prepare, repository: Path, trap: Path) -> None:
    tree = repository.parent / "tree"
    glass.git(str(repository), "worktree", "add", "-q", str(tree), "-b", "topic")
    config = (repository / ".git/config").read_bytes()
    prepared = prepare(tree)
    assert [bind.source for bind in prepared.binds if bind.writable] == [str(tree), str(repository / ".git")]
    _run(
        prepared,
        f'test -z "$(git status --porcelain)"; echo t > t; git add -A; git commit -qm intree; git remote add up https://x/y; git config core.fsmonitor {trap}',
    )
    glass.run(
        prepared,
        f"cp {trap} {repository}/.git/hooks/pre-commit; echo {repository} > {repository}/.git/worktrees/tree/commondir; mv .git g",
    )
    _use_git_on_the_host(repository)
    _use_git_on_the_host(tree)
    workspaces.finish(prepared)
    _use_git_on_the_host(tree)
    assert "sprung.host" not in _sprung(repository)
    assert glass.git(str(repository), "log", "--format=%s", "topic", "--", "t") == "intree\n"
    text = (repository / ".git/config").read_bytes()
    assert text.startswith(config)
    assert b"https://x/y" in text
    assert b"fsmonitor" not in text
    assert sorted(os.listdir(repository)) == [".git", "a.txt"]


def test_here_documents_work_in_both_shells(prepare, repository: Path) -> None:
    prepared = prepare(repository)
    for shell in ("/bin/bash", "/usr/bin/zsh"):
        if os.path.exists(shell):
            assert glass.run(prepared, "cat <<E\nhello $((1+1))\nE", shell=shell) == (0, "hello 2\n")


def test_the_search_says_when_it_was_cut(prepare, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (repository / f"d{number}").mkdir()
    monkeypatch.setattr(repositories, "MAX_DIRECTORIES", 3)
    prepared = prepare(repository)
    assert any("were searched" in line for line in prepared.warnings)
    subprocess.run(["git", "init", "-q", str(repository / "d1")], check=True)
    workspaces.finish(prepared)


@pytest.mark.parametrize("plant", sorted(set(PLANTS) - NEEDS_MORE))
def test_the_traps_are_real(plant: str, home: Path, repository: Path, trap: Path, library: Path) -> None:
    """Planted without a glass each of them does run on the host; else the tests above would prove nothing."""
    env = {
        **os.environ,
        "HOME": str(home),
        "TRAP": str(trap),
        "LIBRARY": str(library),
        "CLOCHE_TEST_SIDE": "inside",
    }
    subprocess.run(["bash", "-c", PLANTS[plant]], cwd=repository, env=env, capture_output=True)
    _use_git_on_the_host(repository)
    assert "sprung.host" in _sprung(repository)
