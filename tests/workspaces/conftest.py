"""A caller's home, a place for states, and a way to open a session on a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche import policy, workspaces
from tests.workspaces import glass


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    (path / ".gitconfig").write_text(
        "[user]\n\tname = Ada\n\temail = ada@example.org\n[alias]\n\tst = status\n"
    )
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A plain directory."""
    path = tmp_path / "project"
    path.mkdir()
    return path


@pytest.fixture
def repository(project: Path) -> Path:
    """A repository with one commit."""
    glass.git(str(project), "init", "-q", "-b", "main")
    (project / "a.txt").write_text("one\n")
    glass.git(str(project), "add", "a.txt")
    glass.git(str(project), "commit", "-qm", "first")
    return project


@pytest.fixture
def prepare(tmp_path: Path, home: Path) -> Iterator[Callable[..., workspaces.Prepared]]:
    """Open sessions; what a test leaves open is swept."""
    states = tmp_path / "states"
    states.mkdir(mode=0o700)
    opened: list[str] = []

    def open_session(
        directory: object, *, name: str = "one", rules: policy.Merged | None = None, **options: Any
    ):
        state = states / name
        state.mkdir(mode=0o700, exist_ok=True)
        opened.append(str(state))
        environment = {"PATH": os.environ["PATH"], **options.pop("environment", {})}
        return workspaces.prepare(
            str(directory),
            rules=rules or policy.Merged(),
            home=str(home),
            state=str(state),
            environment=environment,
            **options,
        )

    yield open_session
    for state in opened:
        workspaces.sweep(state)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Path], dict[str, bytes]]:
    """Everything in a directory, to be compared with itself later."""

    def look(directory: Path) -> dict[str, bytes]:
        found = {}
        for path in sorted(directory.rglob("*")):
            key = str(path.relative_to(directory))
            found[key] = (
                os.readlink(path).encode()
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else b"/"
            )
        return found

    return look
