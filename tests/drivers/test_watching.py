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
