"""`cloche install mcp`: an entry in a coding agent's configuration, and out again. What would change is shown first."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys

from cloche.cli import talk
from cloche.mcp import clients


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    add("what", choices=["mcp"], metavar="WHAT", help="`mcp`: the tools of `cloche mcp`")
    add(
        "--client",
        metavar="NAME",
        required=True,
        choices=list(clients.CLIENTS),
        help="whose configuration: claude-code, codex, gemini, cursor or vscode",
    )
    add("--project", metavar="DIR", help="the project's configuration, instead of your own")
    add(
        "--workspace", metavar="DIR", help="what `cloche mcp --workspace` shows; `.` is where the agent works"
    )
    add("--dry-run", action="store_true", help="show what would change, and change nothing")
    add("--uninstall", action="store_true", help="take the entry out")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    client = clients.CLIENTS[chosen.client]
    path = clients.path_of(client, os.environ, chosen.project)
    before = clients.read(path)
    if chosen.uninstall:
        after = clients.uninstall(client, before, path)
    else:
        after = clients.install(client, before, clients.entry(client, _command(chosen)), path)
    changed = after != before
    diff = _diff(path, before, after)
    if changed and not chosen.dry_run:
        clients.write(path, after)
    if chosen.json:
        print(
            json.dumps(
                {"file": path, "changed": changed, "written": changed and not chosen.dry_run, "diff": diff}
            )
        )
        return 0
    print(diff, end="")
    if not changed:
        talk.say(f"{path}: nothing to change")
    elif chosen.dry_run:
        talk.say(f"{path}: would be changed so")
    else:
        talk.say(f"{path}: changed; restart {chosen.client} to use it")
    return 0


def _command(chosen: argparse.Namespace) -> list[str]:
    """For one's own file the program by its whole path: agents have other PATHs. A project's file is for others too."""
    if chosen.project is not None:
        command = ["cloche"]
    else:
        found = shutil.which("cloche")
        command = [found] if found else [sys.executable, "-m", "cloche"]
    workspace = chosen.workspace
    if workspace is not None and workspace != "." and chosen.project is None:
        workspace = os.path.abspath(workspace)
    return [*command, "mcp", *(["--workspace", workspace] if workspace is not None else [])]


def _diff(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), path, path, n=3
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
