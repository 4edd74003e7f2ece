"""Entries in the configuration files of agents: nothing of the user's is lost, and nothing that differs is overwritten."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cloche import errors
from cloche.mcp import clients

CLAUDE, CODEX, VSCODE = (clients.CLIENTS[name] for name in ("claude-code", "codex", "vscode"))
WANTED = {"type": "stdio", "command": "cloche", "args": ["mcp"]}
PLAIN = {"command": "cloche", "args": ["mcp"]}

WITH_COMMENTS = """\
// mine
{
    "inputs": [], /* none yet */
    "servers": {
        // the other one
        "other": {"command": "other", "args": ["// no comment", "}"]}, // stays
    },
    "last": 1e3
}
"""


def refusal(code: str, function: object, *arguments: object) -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        function(*arguments)  # type: ignore[operator]
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a": }',
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        '{"a": "b}',
        '{"a": 1} x',
        "nonsense",
        '{"servers": 5}',
        "[" * 9999,
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text: str) -> None:
    refusal("settings_invalid", clients.install, VSCODE, text, WANTED, "f")
    refusal("settings_invalid", clients.uninstall, VSCODE, text, "f")


def test_another_entry_is_not_overwritten() -> None:
    text = '{"servers": {"cloche": {"command": "mine"}}}'
    told = refusal("name_conflict", clients.install, VSCODE, text, WANTED, "f")
    assert "--uninstall" in str(told.hint)
    refusal("name_conflict", clients.install, CODEX, '[mcp_servers.cloche]\ncommand = "mine"\n', PLAIN, "f")


@pytest.mark.parametrize(
    "text", ['mcp_servers = { other = { command = "x" } }\n', "[[mcp_servers]]\na = 1\n", "a = \n"]
)
def test_toml_that_cannot_be_changed_without_touching_the_rest_is_refused(text: str) -> None:
    refusal("settings_invalid", clients.install, CODEX, text, PLAIN, "f")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{ }\n",
        "{\n  // empty\n}\n",
        '{"servers": {}}\n',
        '{"servers": {"other": {"command": "x"}}}',
        '{\n\t"servers": {\n\t\t"other": {}\n\t}\n}\n',
        '{\n  "a": [1, 2,],\n  "b": "käse \\" , }"\n}',
        WITH_COMMENTS,
    ],
)
def test_json_in_and_out_again(text: str) -> None:
    before = clients._parse(VSCODE, text, "f")
    new = clients.install(VSCODE, text, WANTED, "f")
    assert clients._parse(VSCODE, new, "f")["servers"]["cloche"] == WANTED
    assert clients.install(VSCODE, new, WANTED, "f") == new
    # Every line that had something of the user's in it is there, in order.
    lines = iter(new.splitlines())
    if text.count("\n") > 1:
        for line in text.splitlines():
            assert any(line.rstrip(",") == other.rstrip(",") for other in lines), line
    after = clients._parse(VSCODE, clients.uninstall(VSCODE, new, "f"), "f")
    assert {**before, "servers": before.get("servers", {})} == after


def test_comments_and_order_stay() -> None:
    new = clients.install(VSCODE, WITH_COMMENTS, WANTED, "f")
    assert clients.uninstall(VSCODE, new, "f") == WITH_COMMENTS
    assert list(clients._parse(VSCODE, new, "f")) == ["inputs", "servers", "last"]
    assert "// the other one" in new
    assert '        "cloche": {\n            "type": "stdio",' in new


@pytest.mark.parametrize(
    "text",
    [
        "",
        'model = "x" # mine',
        '# mine\n[mcp_servers.other]\ncommand = "other"\n\n[profiles.a]\nb = [\n  [1, 2],\n]\n',
    ],
)
def test_toml_in_and_out_again(text: str) -> None:
    new = clients.install(CODEX, text, PLAIN, "f")
    assert tomllib.loads(new)["mcp_servers"]["cloche"] == PLAIN
    assert new.startswith(text)
    assert clients.install(CODEX, new, PLAIN, "f") == new
    assert clients.uninstall(CODEX, new, "f").rstrip() == text.rstrip()


def test_toml_between_other_tables_goes_with_what_is_below_it() -> None:
    text = '[a]\nb = 1\n\n[mcp_servers.cloche]\ncommand = "x"\nargs = [\n  "a",\n]\n[mcp_servers.cloche.env]\nC = "1"\n\n# d\n[d]\ne = 2\n'
    assert tomllib.loads(clients.uninstall(CODEX, text, "f")) == {"a": {"b": 1}, "d": {"e": 2}}


def run(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home)}
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "cloche", "install", "mcp", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("name", list(clients.CLIENTS))
def test_the_command_for_each_client(name: str, tmp_path: Path) -> None:
    client = clients.CLIENTS[name]
    path = tmp_path / client.user.removeprefix("~/")
    dry = run(tmp_path, "--client", name, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "+" in dry.stdout
    assert str(path) in dry.stdout
    assert list(tmp_path.iterdir()) == []

    done = run(tmp_path, "--client", name, "--workspace", ".")
    assert (done.returncode, str(path) in done.stderr) == (0, True)
    text = path.read_text()
    entry = (tomllib.loads(text) if client.toml else json.loads(text))[client.table]["cloche"]
    assert os.path.isabs(entry["command"])
    assert entry["args"][-3:] == ["mcp", "--workspace", "."]
    assert path.stat().st_mode & 0o777 == 0o600

    other = run(tmp_path, "--client", name)
    assert (other.returncode, path.read_text()) == (125, text)
    gone = run(tmp_path, "--client", name, "--uninstall")
    assert gone.returncode == 0, gone.stderr
    assert "cloche" not in path.read_text()


def test_a_project_and_a_link(tmp_path: Path) -> None:
    """A file behind a link is changed where it is, and keeps its mode."""
    (tmp_path / "dotfiles").mkdir()
    real = tmp_path / "dotfiles/mcp.json"
    real.write_text("{}\n")
    real.chmod(0o644)
    (tmp_path / "p").mkdir()
    (tmp_path / "p/.mcp.json").symlink_to(real)
    done = run(tmp_path, "--client", "claude-code", "--project", str(tmp_path / "p"), "--json")
    assert json.loads(done.stdout)["written"] is True
    assert json.loads(real.read_text()) == {"mcpServers": {"cloche": WANTED}}
    assert (tmp_path / "p/.mcp.json").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o644


def test_wrong_flags_are_told(tmp_path: Path) -> None:
    for flags in ((), ("--client", "emacs"), ("--client", "codex", "--force")):
        assert run(tmp_path, *flags).returncode == 125
    assert list(tmp_path.iterdir()) == []
