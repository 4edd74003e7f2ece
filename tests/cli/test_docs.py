"""The reference page and the guide are held to the code: every verb and flag has its heading, every command works."""

import re
import shlex
import subprocess
from pathlib import Path

from cloche.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference/cli.md").read_text()
GUIDE = (DOCS / "guides/getting-started.md").read_text()


def headings(level):
    return re.findall(rf"^{'#' * level} (.*)$", PAGE, re.MULTILINE)


def test_every_verb_has_its_heading_and_no_other_is_documented():
    assert [name for name in headings(2) if name not in ("Exit codes", "Where commands run")] == list(
        main.VERBS
    )


def test_every_flag_has_its_heading_and_no_other_is_documented():
    known = [
        f"{verb} {flag}"
        for verb in main.VERBS
        for action in main.flags_of(verb)
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    assert headings(3) == known


def test_no_flag_is_without_help():
    for verb in main.VERBS:
        assert all(action.help for action in main.flags_of(verb)), verb


def sessions(text):
    """(command line, what it prints) of every console block; `...` stands for anything."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            yield line, shown


def test_the_commands_of_the_guide_print_what_it_says(kept, tmp_path):
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/cloche"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(kept.argv())} "$@"\n')
    wrapper.chmod(0o755)
    environment = {**kept.environment, "PATH": f"{wrapper.parent}:{kept.environment['PATH']}"}
    (tmp_path / "work").mkdir()
    tried = 0
    for line, shown in sessions(GUIDE):
        if not re.search(r"\bcloche\b", line) or line.startswith(("pip ", "source ")):
            continue
        ran = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path / "work",
            timeout=50,
        )
        pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, (ran.stdout + ran.stderr).strip(), re.DOTALL), (
            line,
            ran.stdout,
            ran.stderr,
        )
        tried += 1
    assert tried >= 12


def test_the_commands_of_the_policy_guide_print_what_it_says(kept, tmp_path):
    """From top to bottom in one directory: a TOML block whose first line is a path is that file from there on."""
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/cloche"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(kept.argv())} "$@"\n')
    wrapper.chmod(0o755)
    environment = {**kept.environment, "PATH": f"{wrapper.parent}:{kept.environment['PATH']}"}
    work = tmp_path / "work"
    work.mkdir()
    own = Path(environment["XDG_CONFIG_HOME"]) / "cloche"
    own.mkdir(parents=True, exist_ok=True)
    tried = 0
    text = (DOCS / "guides/policy.md").read_text()
    for kind, block in re.findall(r"```(toml|console)\n(.*?)```", text, re.DOTALL):
        if kind == "toml":
            path = block.partition("\n")[0].removeprefix("# ")
            if not path.startswith("/etc/"):
                (own / "policy.toml" if path.startswith("~") else work / path).write_text(block)
            continue
        for line, shown in sessions(f"```console\n{block}```"):
            ran = subprocess.run(
                ["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=work, timeout=50
            )
            pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*")
            found = (ran.stdout + ran.stderr).strip()
            assert re.fullmatch(pattern, found, re.DOTALL), (line, found)
            tried += 1
    assert tried >= 18
