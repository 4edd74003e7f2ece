"""Everything that the thin client leaves: the verbs, their flags, and what is said about a wrong one.

A verb is a row of `VERBS`: its group's module is imported when it is used, so a command pays for itself only. A group
module has `flags(parser, verb)` and `execute(verb, chosen)`. The command after `--` is cut off before argparse sees the
rest, because what belongs to the command is not ours to read.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from cloche import errors
from cloche.cli import results, talk


class Verb(NamedTuple):
    group: str
    summary: str
    positionals: int = -1
    """How many words come before a command; -1 for a verb that takes none."""


VERBS: dict[str, Verb] = {
    "run": Verb("running", "run one command in a sandbox of its own", 0),
    "create": Verb("sandboxes", "make a sandbox that stays"),
    "exec": Verb("running", "run a command in a sandbox that is there", 1),
    "shell": Verb("running", "open a shell in a sandbox; ctrl-p ctrl-q detaches", 1),
    "list": Verb("sandboxes", "the live sandboxes"),
    "info": Verb("sandboxes", "one sandbox: isolation, limits, life"),
    "logs": Verb("history", "what a command wrote"),
    "forward": Verb("forwarding", "reach ports of a sandbox on this machine's loopback"),
    "cp": Verb("copying", "copy files and trees in and out"),
    "files": Verb("files", "look at and change a sandbox's files"),
    "diff": Verb("sandboxes", "what was changed above an overlaid workspace"),
    "apply": Verb("sandboxes", "take over what was changed above an overlaid workspace"),
    "delete": Verb("sandboxes", "end sandboxes"),
    "extend": Verb("sandboxes", "let a sandbox live on from now"),
    "suspend": Verb("sandboxes", "put a sandbox to sleep: pause or archive it"),
    "resume": Verb("sandboxes", "let a suspended sandbox go on"),
    "template": Verb("pools", "named starting points: create, list, info, delete"),
    "pool": Verb("pools", "sandboxes kept warm: create, list, info, scale, delete"),
    "claim": Verb("pools", "get a sandbox of a pool, with env, files and rules bound to it"),
    "snapshot": Verb("states", "a sandbox's files at one moment: create, list, diff, delete"),
    "restore": Verb("states", "set a sandbox back to a snapshot"),
    "fork": Verb("states", "sandboxes with the same files"),
    "volume": Verb("states", "directories that outlive sandboxes: create, list, delete"),
    "events": Verb("history", "what happened, oldest first"),
    "audit": Verb("auditing", "who did what, and whether the record of it is whole"),
    "usage": Verb("sandboxes", "what sandboxes cost now"),
    "serve": Verb("serving", "serve HTTP and the local socket until stopped"),
    "mcp": Verb("mcp", "the tools for a coding agent, on standard input and output"),
    "install": Verb("installing", "put the tools into a coding agent's configuration"),
    "token": Verb("sandboxes", "a token for one sandbox, for whoever should work in it"),
    "key": Verb("keys", "the keys of the server: create, list, rotate, revoke"),
    "secret": Verb("secrets", "credentials that sandboxes use and never see"),
    "policy": Verb("policies", "what a sandbox may touch, and which rule says so"),
    "image": Verb("images", "what sandboxes start from: pull, build, list, remove"),
    "gc": Verb("upkeep", "remove what dead engines left behind"),
    "bench": Verb("benching", "how fast it is on this machine"),
    "doctor": Verb("doctor", "what this host can do, and what would improve it"),
    "version": Verb("upkeep", "the version of Cloche"),
    "completions": Verb("completions", "a completion script for your shell"),
    "help": Verb("upkeep", "this list, or a verb's flags"),
}
_PROGRAM = "cloche"


class Parser(argparse.ArgumentParser):
    """argparse, saying its complaints our way."""

    def error(self, message: str) -> NoReturn:
        raise errors.error(
            "argument_invalid", f"{self.prog}: {message}", hint=f"`{_help(self.prog)}` shows its flags"
        )


def _help(prog: str) -> str:
    return prog.replace(f"{_PROGRAM} ", f"{_PROGRAM} help ", 1)


def parser_of(verb: str) -> Parser:
    row = VERBS[verb]
    parser = Parser(f"{_PROGRAM} {verb}", description=row.summary, allow_abbrev=False)
    import_module(f"cloche.cli.{row.group}").flags(parser, verb)
    if "--json" not in options_of(parser):
        parser.add_argument("--json", action="store_true", help="print JSON")
    if row.positionals >= 0:
        parser.epilog = f"{parser.format_usage().strip()[len('usage: ') :]} [--] CMD..."
    return parser


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def main(arguments: list[str]) -> int:
    """Run a verb; every failure is a sentence and an exit code."""
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except errors.ClocheError as problem:
        return results.tell(problem, as_json=as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 141
    except OSError as problem:
        return results.tell(_of_the_host(problem), as_json=as_json)
    except Exception as problem:
        return results.internal(problem, as_json=as_json)


def _of_the_host(problem: OSError) -> errors.ClocheError:
    code = {
        2: "file_not_found",
        13: "permission_denied",
        20: "not_directory",
        21: "is_directory",
        28: "disk_full",
    }
    where = f"{problem.filename!r}: " if problem.filename else ""
    return errors.error(
        code.get(problem.errno or 0, "internal_error"), f"{where}{problem.strerror or problem}"
    )


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        show_help()
        return 0 if arguments else 125
    verb, *rest = arguments
    if verb in ("-V", "--version"):
        verb = "version"
    if verb not in VERBS:
        kind = "flag" if verb.startswith("-") else "verb"
        raise errors.error("flag_unknown", f"there is no {kind} {verb!r}", hint=errors.nearest(verb, VERBS))
    chosen = parse(verb, rest)
    code: int = import_module(f"cloche.cli.{VERBS[verb].group}").execute(verb, chosen)
    return code


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(verb)
    head: list[str] = list(words)
    command: list[str] = []
    if VERBS[verb].positionals >= 0:
        head, command = split(parser, words, VERBS[verb].positionals)
    if "-h" in head or "--help" in head:
        parser.print_help()
        sys.stdout.flush()
        raise SystemExit(0)
    chosen, unknown = parser.parse_known_args(head)
    if unknown:
        _refuse(parser, unknown[0])
    chosen.command = command
    return chosen


def _refuse(parser: Parser, word: str) -> NoReturn:
    if not word.startswith("-"):
        raise errors.error(
            "argument_invalid",
            f"{parser.prog} does not take {word!r}",
            hint=f"`{_help(parser.prog)}` says what it takes",
        )
    flag = word.partition("=")[0]
    raise errors.error(
        "flag_unknown",
        f"{parser.prog} has no flag {flag!r}",
        hint=errors.nearest(flag, _long(options_of(parser))),
    )


def _long(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if flag.startswith("--")]


def split(
    parser: argparse.ArgumentParser, words: Sequence[str], positionals: int
) -> tuple[list[str], list[str]]:
    """What is ours, and the command: after `--`, or from the first word that is neither flag nor value nor wanted."""
    valued = {f for a in parser._actions if a.nargs != 0 for f in a.option_strings}
    position, seen = 0, 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return list(words[:position]), list(words[position + 1 :])
        if word.startswith("-") and word != "-":
            position += 2 if word in valued else 1
            continue
        if seen == positionals:
            return list(words[:position]), list(words[position:])
        seen += 1
        position += 1
    return list(words), []


def show_help() -> None:
    print("usage: cloche VERB ...\n")
    for name, row in VERBS.items():
        print(f"  {name:<12} {row.summary}")
    print(
        f"\n`{_PROGRAM} help VERB` shows a verb's flags. {talk.paint('--json', '1', 1)} works with all of them."
    )


def flags_of(verb: str) -> list[argparse.Action]:
    """For the reference page, the completions and their tests."""
    actions: list[Any] = list(parser_of(verb)._actions)
    return [action for action in actions if "--help" not in action.option_strings]
