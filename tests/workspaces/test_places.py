"""Which directories are refused as a workspace, with which code, and that nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche import errors
from cloche.workspaces import places


def _code(directory: str, home: Path, state: str = "/nonexistent/state", **environment: str) -> str:
    with pytest.raises(errors.ClocheError) as caught:
        places.resolve(directory, home=str(home), state=state, environment=environment)
    assert caught.value.message
    return caught.value.code


@pytest.mark.parametrize(
    "directory",
    [
        "/",
        "/usr",
        "/usr/lib",
        "/etc",
        "/proc",
        "/proc/self",
        "/dev",
        "/sys",
        "/run",
        "/var",
        "/var/lib",
        "/home",
        "/tmp",
        "/opt",
        "//",
        "/usr/../etc",
    ],
)
def test_the_system_is_refused(directory: str, home: Path) -> None:
    assert _code(directory, home) == "workspace_refused"


@pytest.mark.parametrize("directory", ["", "/no/such/place", "/etc/passwd/x"])
def test_what_is_not_there_is_said_to_be_missing(directory: str, home: Path) -> None:
    assert _code(directory, home) == "workspace_not_found"


@pytest.mark.parametrize("directory", ["/tmp/a\0b", "/tmp/a\nb", "/tmp/a\rb", "/tmp/\udcff"])
def test_unprintable_paths_are_invalid(directory: str, home: Path) -> None:
    assert _code(directory, home) == "path_invalid"


def test_a_file_and_a_loop_are_no_directories(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert _code(str(tmp_path / "file"), home) == "not_directory"
    assert _code(str(tmp_path / "loop"), home) == "path_loop"


def test_home_and_what_holds_it_are_refused_by_any_name(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    for name in (home, tmp_path, tmp_path / "link", home / ".." / "home"):
        assert _code(str(name), home) == "workspace_refused"


@pytest.mark.parametrize("name", [".ssh", ".aws/sso", ".config/gh", ".claude"])
def test_credentials_are_refused(name: str, home: Path) -> None:
    (home / name).mkdir(parents=True)
    assert _code(str(home / name), home) == "workspace_refused"


def test_our_own_state_is_refused_from_above_and_below(home: Path) -> None:
    state = home / ".local/state/cloche/sandboxes/x"
    state.mkdir(parents=True)
    for name in (state, state.parent.parent, home / ".local/state", home / ".local"):
        assert _code(str(name), home, str(state)) == "workspace_refused"
    other = home / "elsewhere/images"
    other.mkdir(parents=True)
    assert _code(str(other), home, CLOCHE_HOME=str(home / "elsewhere")) == "workspace_refused"


def test_a_refusal_leaves_nothing_behind(prepare, home: Path, tree) -> None:
    before = tree(home)
    with pytest.raises(errors.InvalidInput):
        prepare(home)
    assert tree(home) == before
    assert os.listdir(home.parent / "states/one") == []


def test_a_project_is_resolved_to_its_real_path(home: Path, tmp_path: Path) -> None:
    project = home / "src/project"
    project.mkdir(parents=True)
    (tmp_path / "link").symlink_to(project)
    real = places.resolve(str(tmp_path / "link"), home=str(home), state="/nonexistent", environment={})
    assert real == str(project)
