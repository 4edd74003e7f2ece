"""Other people's sandboxes for commands, timed as ours: Codex's native sandbox and sandbox-runtime.

`--with-peers` installs both by npm below .cache/peers of the clone; otherwise they are used where they are found.
Both run with a home directory of their own, so that nothing of the user's is read or written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import NamedTuple

PACKAGES = ("@openai/codex", "@anthropic-ai/sandbox-runtime")


class Peer(NamedTuple):
    name: str
    command: list[str]
    environment: dict[str, str]


def install(directory: str) -> str:
    """Install the packages; what went wrong, or nothing."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    os.makedirs(directory, exist_ok=True)
    command = [npm, "install", "--prefix", directory, "--no-audit", "--no-fund", "--silent", *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return "" if done.returncode == 0 else f"npm install failed: {done.stderr.strip()[-200:]}"


def find(directory: str) -> tuple[list[Peer], list[tuple[str, str]]]:
    """The peers that work on this machine, and for each other one why it does not."""
    home = os.path.join(directory, "home")  # not below /tmp, which Codex refuses
    os.makedirs(home, exist_ok=True)
    environment = {**os.environ, "HOME": home, "CODEX_HOME": home}
    found, missing = [], []
    for name, command in _candidates(directory, home).items():
        reason = _why_not(command, environment)
        if reason:
            missing.append((name, reason))
        else:
            found.append(Peer(name, command, environment))
    return found, missing


def _candidates(directory: str, home: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    native = _native_codex(directory)
    found["codex (native)"] = [native, "sandbox", "--", "true"] if native else []
    launcher = _program(directory, "codex")
    found["codex (npm)"] = [launcher, "sandbox", "--", "true"] if launcher else []
    runtime = _program(directory, "srt")
    found["sandbox-runtime"] = [runtime, "--settings", _settings(home), "-c", "true"] if runtime else []
    return found


def _program(directory: str, name: str) -> str | None:
    local = os.path.join(directory, "node_modules", ".bin", name)
    return local if os.path.exists(local) else shutil.which(name)


def _native_codex(directory: str) -> str | None:
    """The binary that the npm package's launcher starts."""
    for root, _, files in os.walk(os.path.join(directory, "node_modules", "@openai")):
        if "codex" in files and os.access(os.path.join(root, "codex"), os.X_OK):
            return os.path.join(root, "codex")
    return None


def _settings(home: str) -> str:
    path = os.path.join(home, "srt-settings.json")
    rules = {
        "network": {"allowedDomains": ["example.com"], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": ["."], "denyWrite": []},
    }
    with open(path, "w") as file:
        json.dump(rules, file)
    return path


def _why_not(command: list[str], environment: dict[str, str]) -> str:
    if not command:
        return "not installed (scripts/bench --with-peers installs it)"
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    return (
        ""
        if done.returncode == 0
        else f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-160:]}"
    )
