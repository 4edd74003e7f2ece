"""Entries of `files.protected` and `files.deny`: names and patterns for paths of a workspace.

    entry  = name { "/" name } [ "/" ]         relative to the workspace's root, or absolute and then within it
    name   = letters, with "*" (any letters), "?" (one), "[a-z]" and "[!a-z]" (one of, one not of), or "**" alone (any depth)

    .env                 that one          **/.env              at any depth, the root too
    secrets/             it and all in it  deploy/*.pem         those in deploy

An entry covers what it names and everything below; a slash at its end changes nothing but how a missing one is made. No
letter of a pattern matches a slash. `..` is refused: what an entry means must be seen in the entry.

One automaton serves both askers: `step` advances by one name, whether the names come from a path that somebody asks about or
from a directory that enforcement walks through. So what is explained is what is enforced.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cloche import errors

MAX_LENGTH = 1024
_MAGIC = re.compile(r"[*?\[]")
_CLASSES = re.compile(r"(?:[^\[]|\[!?\]?[^\]]*\])*")


class Pattern(NamedTuple):
    """One entry, read."""

    entry: str
    parts: tuple[str, ...]
    is_magic: bool

    @property
    def literal(self) -> str:
        return "/".join(self.parts)


class State(NamedTuple):
    """Where in which patterns a walk stands: (pattern, how many of its parts are behind)."""

    positions: tuple[tuple[Pattern, int], ...]

    def __bool__(self) -> bool:
        return bool(self.positions)


def parse(entry: str, root: str = "") -> Pattern | None:
    """The pattern of an entry. None if it is absolute and names nothing within `root`."""
    check(entry)
    relative = entry
    if entry.startswith("/"):
        base = root.rstrip("/") + "/"
        if not root or not entry.startswith(base):
            return None
        relative = entry[len(base) :]
    parts = tuple(part for part in relative.split("/") if part not in ("", "."))
    return Pattern(entry, parts, bool(_MAGIC.search(relative))) if parts else None


def check(entry: str) -> None:
    """Raise `policy_invalid` for an entry that cannot be."""
    if not entry or len(entry) > MAX_LENGTH or any(mark in entry for mark in "\0\n\r"):
        raise _bad(entry, "it is empty, too long, or holds a NUL or a line break")
    parts = entry.split("/")
    if ".." in parts:
        raise _bad(entry, "it has '..'; name the path itself")
    if not entry.strip("/."):
        raise _bad(entry, "it names the whole workspace")
    if entry.startswith(("~", "!")):
        raise _bad(
            entry, "'~' is not a path of a workspace, and '!' takes back protection in your own files only"
        )
    for part in parts:
        _expression(part)


def starting(patterns: Iterable[Pattern]) -> State:
    """The state at the workspace's root."""
    return State(tuple(spot for pattern in patterns for spot in _closure(pattern, 0)))


def step(state: State, name: str) -> tuple[State, Pattern | None]:
    """One name further: where the walk stands then, and the pattern that covers what the name leads to, if one does."""
    found: dict[tuple[Pattern, int], None] = {}
    for pattern, place in state.positions:
        part = pattern.parts[place]
        if part == "**":
            found.update(dict.fromkeys(_closure(pattern, place)))
            if place + 1 == len(pattern.parts):  # a/** covers what is below a
                return State(()), pattern
        elif _expression(part).match(name):
            if place + 1 == len(pattern.parts):
                return State(()), pattern
            found.update(dict.fromkeys(_closure(pattern, place + 1)))
    return State(tuple(found)), None


def covering(patterns: Iterable[Pattern], path: str) -> Pattern | None:
    """The pattern that covers a path, given relative to the root and without `..`."""
    state = starting(patterns)
    for name in path.split("/"):
        state, pattern = step(state, name)
        if pattern is not None:
            return pattern
        if not state:
            return None
    return None


def _closure(pattern: Pattern, place: int) -> Iterator[tuple[Pattern, int]]:
    """A place, and those reached from it through a `**` that stands for no name at all."""
    yield pattern, place
    while pattern.parts[place] == "**" and place + 1 < len(pattern.parts):
        place += 1
        yield pattern, place


@functools.lru_cache(maxsize=1024)
def _expression(part: str) -> re.Pattern[str]:
    """One name as a regular expression, of the standard library's making: it does not backtrack over stars."""
    import fnmatch  # few policies have patterns

    if "**" in part and part != "**":
        raise _bad(part, "'**' stands alone between slashes")
    if "[" in part and not _CLASSES.fullmatch(part):
        raise _bad(part, "a '[' is not closed; write '[[]' for the letter")
    return re.compile(fnmatch.translate(part))


def _bad(entry: str, why: str) -> errors.ClocheError:
    return errors.error(
        "policy_invalid", f"the path {entry[:80]!r}: {why}", hint="see docs/reference/policy.md", entry=entry
    )
