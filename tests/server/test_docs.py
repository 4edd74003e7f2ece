"""What the README and the guide say about the server is done as they say it, by a shell and by other people's clients."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import PATIENCE_S, Served
from tests.wires.e2b.conftest import environment_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text().partition("## Serve it")[2].partition("\n## ")[0]
GUIDE = (ROOT / "docs/guides/server.md").read_text()
KEY_FILE = "~/.local/state/cloche/keys/default.key"


def _blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _run(served: Served, *command: str | Path, **more: str) -> str:
    """As a user would, but for the port and where the key is."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(served.home), **more}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _here(served: Served, text: str) -> str:
    assert "localhost:7777" in text or KEY_FILE in text
    return text.replace("localhost:7777", urlsplit(served.url).netloc).replace(
        KEY_FILE, str(served.home / "s/keys/default.key")
    )


def _events(said: str) -> list[str]:
    return re.findall(r"event: (\w+)$", said, re.MULTILINE)  # the answer before has no line end


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_shell_lines(served: Served, text: str) -> None:
    lines = next(block for block in _blocks(text, "sh") if "curl" in block)
    said = _run(served, "sh", "-ec", _here(served, lines))
    assert _events(said) == ["start", "stdout", "stdout", "stdout", "exit"]
    if text is GUIDE:
        assert '"stdout":"Linux ' in said


@pytest.mark.timeout(900)  # the client is installed first
def test_the_e2b_program(served: Served) -> None:
    [program] = [block for block in _blocks(README, "python") if "e2b" in block]
    variables = {"E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url}
    key = served.key.replace("cl_", "e2b_")
    assert _run(served, environment_of("newest"), "-c", program, E2B_API_KEY=key, **variables) == "3\n\n6\n"


def test_the_mcp_program(served: Served) -> None:
    [program] = [block for block in _blocks(README, "python") if "mcp" in block]
    assert _run(served, sys.executable, "-c", _here(served, program), KEY=served.key) == "42\n\n"


def test_the_program_with_a_token(served: Served) -> None:
    [program] = _blocks((ROOT / "docs/concepts/callers.md").read_text(), "python")
    variables = {"CLOCHE_API_KEY": served.key, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert _run(served, sys.executable, "-c", _here(served, program), **variables) == "as a guest\n\n"
