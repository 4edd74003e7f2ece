"""The reference page and the guide are held to the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

from cloche.mcp import clients, nouns, tools

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "reference/mcp.md").read_text(), re.M | re.S)
)


def test_every_tool_has_its_heading_and_no_other_is_documented() -> None:
    assert list(SECTIONS) == list(tools.TABLE)


def test_every_argument_and_field_is_named() -> None:
    for name, row in tools.TABLE.items():
        taken = re.findall(r"^\| `(\w+)`", SECTIONS[name], re.M)
        assert taken == list(nouns.schema(row.takes)["properties"]), name
        given = re.findall(r"`(\w+)`", SECTIONS[name].partition("\nGives ")[2])
        assert given == list(nouns.schema(row.gives)["properties"]), name
        assert row.summary in SECTIONS[name]


def test_the_guide_names_every_file() -> None:
    text = (DOCS / "guides/mcp.md").read_text()
    for name, client in clients.CLIENTS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert all(f"`{word}`" in row for word in (client.user, client.project, client.table)), name


def test_the_program_of_the_guide_prints_what_it_says(tmp_path: Path) -> None:
    text = (DOCS / "guides/mcp.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    shown = re.findall(r"```text\n(.*?)```", text, re.S)[0]
    wrapper = tmp_path / "cloche"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m cloche "$@"\n')
    wrapper.chmod(0o755)
    # The client hands few variables on to servers; HOME and PATH are among them.
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (ran.returncode, ran.stdout) == (0, shown), ran.stderr
