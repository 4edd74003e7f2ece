"""Files that other programs obey: their state before and after, so that a person can look at what changed.

Protected files are in here too. They cannot change from inside as long as their mounts hold; a change that shows up here
came from the host, or after the host replaced the file and so detached the mount.
"""

from __future__ import annotations

import hashlib
import os
import stat

from cloche import policy
from cloche.workspaces import walking

# Beside policy.PROTECTED and policy.REPORTED: what builds, tests, editors, agents and CI run or follow.
FOLLOWED = (
    "GNUmakefile", "makefile", "justfile", "Justfile", "Taskfile.yml", "Rakefile", "Gemfile", "build.rs", "CMakeLists.txt",
    "setup.py", "setup.cfg", "pyproject.toml", "conftest.py", "tox.ini", "noxfile.py", "composer.json", "deno.json",
    ".lefthook.yml", "lefthook.yml", ".lfsconfig", ".tool-versions", "mise.toml", ".mise.toml", "flake.nix", "shell.nix",
    "Dockerfile", "docker-compose.yml", "compose.yaml", ".devcontainer/", ".github/workflows/", ".github/actions/",
    ".gitlab-ci.yml", ".circleci/", ".travis.yml", ".buildkite/", ".drone.yml", "Jenkinsfile", "azure-pipelines.yml",
    "bitbucket-pipelines.yml", "AGENTS.md", "CLAUDE.md", "GEMINI.md", ".cursorrules", ".github/copilot-instructions.md",
    ".yarn/plugins/", ".hg/hgrc", ".jj/repo/config.toml", ".git/objects/info/alternates", ".git/rebase-merge/git-rebase-todo",
    ".git/sequencer/todo",
)  # fmt: skip
_MAX_FILE = 16 << 20
_MAX_FILES = 2000


def snapshot(root: str, rules: policy.Merged) -> dict[str, str]:
    """A digest for each control file that is there, by its path relative to the root."""
    found: dict[str, str] = {}
    for name in dict.fromkeys((*rules.files.protected, *policy.REPORTED, *FOLLOWED)):
        _add(root, name.rstrip("/"), found)
    return found


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """'path (added)', '(changed)' or '(removed)', in order."""
    lines = []
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path):
            lines.append(
                f"{path} ({'added' if path not in before else 'changed' if path in after else 'removed'})"
            )
    return lines


def _add(root: str, relative: str, found: dict[str, str]) -> None:
    try:
        with walking.parent(root, relative) as (dir_fd, name):
            info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                found[_spoken(relative)] = _digest(dir_fd, name, info)
                return
            with walking.directory(dir_fd, name) as inner_fd:
                names = os.listdir(inner_fd)
    except OSError:
        return
    for inner in sorted(names):
        if len(found) < _MAX_FILES:
            _add(root, f"{relative}/{inner}", found)


def _digest(dir_fd: int, name: str, info: os.stat_result) -> str:
    if stat.S_ISLNK(info.st_mode):
        return "-> " + _spoken(os.readlink(name, dir_fd=dir_fd))
    if not stat.S_ISREG(info.st_mode):
        return f"special {info.st_mode:o}"
    if info.st_size == 0:
        return "empty"
    if info.st_size > _MAX_FILE:
        return f"large {info.st_size} {info.st_mtime_ns}"
    fd = walking.open_regular(name, dir_fd)
    with open(fd, "rb") as file:
        digest = hashlib.sha256(file.read(_MAX_FILE)).hexdigest()
    return f"{digest} {'x' if info.st_mode & 0o111 else '-'}"


def _spoken(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
