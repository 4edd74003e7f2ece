"""A protection that the host tears off by replacing the file is put back while the sandbox runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cloche


def test_a_protected_file_replaced_on_the_host_is_protected_again(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    settings = tmp_path / ".mcp.json"
    settings.write_text("{}")
    tmp_path.chmod(0o755)
    with cloche.Sandbox(workspace=str(tmp_path)) as box:
        assert box.exec("echo evil > .mcp.json").exit_code != 0
        draft = tmp_path / "draft"
        draft.write_text('{"mine": 1}')
        os.rename(draft, settings)  # as editors save; the kernel detaches the mount inside
        until(lambda: box.exec("grep -c ' .*/.mcp.json ' /proc/self/mountinfo").stdout == "1\n")
        assert box.exec("echo evil > .mcp.json").exit_code != 0
        assert box.exec("cat .mcp.json").stdout == '{"mine": 1}'
    assert settings.read_text() == '{"mine": 1}'


def test_a_denied_file_replaced_on_the_host_is_hidden_again(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    secret, keys = tmp_path / ".env", tmp_path / "keys"
    secret.write_text("old")
    keys.mkdir()
    tmp_path.chmod(0o755)
    with cloche.Sandbox(
        workspace=str(tmp_path), policy=cloche.Policy(files={"deny": [".env", "keys/"]})
    ) as box:
        assert box.exec("cat .env").exit_code != 0
        draft, other = tmp_path / "draft", tmp_path / "other"
        draft.write_text("new")
        other.mkdir()
        (other / "key").write_text("new")
        os.rename(draft, secret)
        os.rename(other, keys)
        # Two losses close to each other may be mended twice, one mount on the other.
        count = (
            f"cut -d' ' -f5 /proc/self/mountinfo | sort -u | grep -c -x -e {tmp_path}/.env -e {tmp_path}/keys"
        )
        until(lambda: box.exec(count).stdout == "2\n")
        for look in ("cat .env", "ls keys", "cat keys/key"):
            ran = box.exec(look)
            assert ran.exit_code != 0
            assert "new" not in ran.stdout
        assert box.exec("echo free > notes; cat notes").stdout == "free\n"
    assert secret.read_text() == "new"
