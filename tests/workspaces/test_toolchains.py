"""Which host paths are shown for the caller's PATH; never a home, never credentials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloche import workspaces
from cloche.workspaces import gitconfig, places, toolchains


def _find(home: Path, *path: object, **environment: str) -> toolchains.Toolchains:
    environment["PATH"] = ":".join(map(str, path))
    return toolchains.find(home=str(home), environment=environment, root=str(home / "project"))


def _program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        "",
        ".",
        "bin",
        "/no/such",
        "{home}",
        "{home}/.ssh",
        "{home}/.claude/local/bin",
        "{home}/..",
        "/",
        "/etc",
        "/root/../{home}",
        "/proc/self",
    ],
)
def test_what_must_not_be_shown_is_not(entry: str, home: Path) -> None:
    for name in (".ssh", ".claude/local/bin", ".cargo"):
        (home / name).mkdir(parents=True)
    found = _find(home, entry.format(home=home))
    assert found.paths == ()
    assert found.env["PATH"] == toolchains.BASE_PATH


@pytest.mark.parametrize("place", [".ssh", ".aws/bin", ".config/gh/bin"])
def test_a_link_into_credentials_is_not_followed(place: str, home: Path) -> None:
    target = _program(home / place / "tool")
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(target)
    (home / ".local/bin/all").symlink_to(home)
    assert _find(home, home / ".local/bin").paths == (str(home / ".local/bin"),)


def test_cargo_is_shown_without_its_credentials(home: Path) -> None:
    _program(home / ".cargo/bin/cargo")
    (home / ".cargo/credentials.toml").write_text("token")
    (home / ".rustup/toolchains").mkdir(parents=True)
    found = _find(home, home / ".cargo/bin")
    assert found.paths == (str(home / ".cargo/bin"), str(home / ".rustup"))
    assert found.env["RUSTUP_HOME"] == str(home / ".rustup")


def test_nothing_shown_ever_holds_a_credential(home: Path) -> None:
    for name in places.CREDENTIALS:
        _program(home / name / "bin/tool")
    (home / ".local/bin").mkdir(parents=True)
    for number, name in enumerate(places.CREDENTIALS):
        (home / f".local/bin/t{number}").symlink_to(home / name / "bin/tool")
    every = [path for path in home.rglob("*") if path.is_dir()]
    for shown in _find(home, *every, home).paths:
        assert not places.shows_credentials(shown, str(home)), shown


def test_a_virtual_environment_brings_its_interpreter(home: Path) -> None:
    base = home / ".local/share/uv/python/cpython-3.12"
    _program(base / "bin/python3.12")
    venv = home / "envs/v"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python3").symlink_to(base / "bin/python3.12")
    (venv / "pyvenv.cfg").write_text(f"home = {base}/bin\nversion = 3.12\n")
    found = _find(home, venv / "bin", "/usr/bin")
    assert found.paths == (str(base), str(venv))
    assert found.env["VIRTUAL_ENV"] == str(venv)
    assert found.env["PATH"].split(":")[0] == str(venv / "bin")


def test_an_environment_in_the_workspace_brings_its_interpreter(home: Path) -> None:
    _program(home / ".pyenv/versions/3.12/bin/python3")
    venv = home / "project/.venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python3").symlink_to(home / ".pyenv/versions/3.12/bin/python3")
    (venv / "pyvenv.cfg").write_text(f"home = {home}/.pyenv/versions/3.12/bin\n")
    found = _find(home, venv / "bin")
    assert found.paths == (str(home / ".pyenv/versions/3.12"),)
    assert found.env["PATH"].startswith(f"{venv}/bin:")


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        (".pyenv/shims/python", ".pyenv"), (".nvm/versions/node/v20/bin/node", ".nvm"), (".volta/bin/node", ".volta"),
        (".asdf/shims/ruby", ".asdf"), ("go/bin/gopls", "go/bin"), ("bin/mine", "bin"),
    ],
)  # fmt: skip
def test_managers_are_shown(program: str, shown: str, home: Path) -> None:
    path = _program(home / program)
    assert _find(home, path.parent).paths == (str(home / shown),)


def test_tools_behind_local_bin_are_shown(home: Path) -> None:
    tool = home / ".local/share/pipx/venvs/black"
    _program(tool / "bin/black")
    (tool / "pyvenv.cfg").write_text("home = /usr/bin\n")
    single = _program(home / "Downloads/single")
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/black").symlink_to(tool / "bin/black")
    (home / ".local/bin/single").symlink_to(single)
    assert _find(home, home / ".local/bin").paths == (str(home / ".local/bin"), str(tool), str(single))


def test_what_the_base_shows_is_not_shown_again(home: Path) -> None:
    found = _find(home, "/usr/local/bin", "/usr/bin", "/bin")
    assert found == ((), {"PATH": toolchains.BASE_PATH})


def test_the_interpreter_of_this_test_is_found(home: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    real = Path(sys.executable).resolve()
    found = toolchains.find(
        home="/nonexistent-home", environment={"PATH": f"{tmp_path}/v/bin"}, root=str(tmp_path)
    )
    assert any(places.within(str(real), shown) for shown in (*found.paths, "/usr", "/opt")) or str(
        real
    ).startswith(("/tmp", "/home"))


def test_name_and_address_come_from_the_callers_configuration(home: Path) -> None:
    text = toolchains.git_settings(
        home=str(home), environment={"PATH": "/usr/bin:/bin"}, directories=('/a "b"',)
    )
    values = gitconfig.parse(text).values()
    assert values["user", None, "name"] == ["Ada"]
    assert values["user", None, "email"] == ["ada@example.org"]
    assert values["safe", None, "directory"] == ['/a "b"']
    assert ("alias", None, "st") not in values


def test_without_git_there_is_no_name(home: Path) -> None:
    text = toolchains.git_settings(home=str(home), environment={"PATH": "/nonexistent"}, directories=("/a",))
    assert "Ada" not in text


def test_the_description_names_what_is_shown(prepare, project: Path, home: Path) -> None:
    _program(home / ".pyenv/shims/python")
    prepared = prepare(project, environment={"PATH": f"{home}/.pyenv/shims:/usr/bin"})
    assert prepared.shown == (str(project), str(home / ".pyenv"))
    assert prepared.env["TMPDIR"] == "/tmp"
    assert prepared.env["TMPPREFIX"] == "/tmp/zsh"
    assert prepared.cwd == prepared.root == str(project)
    assert prepared.binds == (
        workspaces.Bind(str(project), str(project), writable=True, owner=True),
        workspaces.Bind(str(home / ".pyenv"), str(home / ".pyenv")),
    )
