"""Which paths the policy hides, and which it protects: decided here, once, for the sandbox and for whoever asks why.

`make` looks at the host and touches nothing. `session.prepare` turns the plan into mounts; `explain` looks a path up in the
same plan. So the answer of `cloche policy explain path` is what a sandbox made at that moment does.

    a name that is there         covered, and what a link leads to
    a name that is not there     a stub is made and covered, so that it can be neither made nor replaced
    a pattern                    covers what it finds when the sandbox is made; what comes later it does not know

A pattern is looked for in the whole workspace, as far as it can match. A workspace too large for that is refused: a secret
must not stay visible because the search was given up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

from cloche import errors, policy
from cloche.policy import explaining, paths
from cloche.workspaces import places, protection

MAX_DIRECTORIES = 100_000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
_PRIVATE = ("/tmp", "/home/user", "/workspace", "/dev/shm")


class Plan:
    """What is covered in one workspace and in the directories shown beside it."""

    def __init__(self, root: str, rules: policy.Merged, cover: protection.Cover, main: str | None) -> None:
        self.root = root
        self.rules = rules
        self.cover = cover
        self.shown = (root, *rules.files.write, *rules.files.read)
        self.protected: dict[str, str] = {}
        """Covered path → the entry that says so."""
        self.denied: dict[str, str] = {}
        self._main = main

    def make(self) -> Plan:
        for entry in self.rules.files.protected:
            if self._main == ".git" or not entry.startswith(".git/"):
                self._protect(entry)
        for entry in self.rules.files.deny:
            self._deny(entry)
        return self

    def _protect(self, entry: str) -> None:
        pattern = paths.parse(entry, self.root)
        if pattern is None:
            return
        before = set(self.cover.protect)
        if pattern.is_magic:
            for path in find(self.root, (pattern,)):
                self.cover.add(path[len(self.root) + 1 :], present_only=True)
        else:
            self.cover.add(pattern.literal + ("/" if entry.endswith("/") else ""))
        for path in self.cover.protect.keys() - before:
            self.protected[path] = entry

    def _deny(self, entry: str) -> None:
        for root in self.shown if entry.startswith("/") else (self.root,):
            pattern = paths.parse(entry, root)
            if pattern is None:
                continue
            if pattern.is_magic:
                found = [os.path.realpath(path) for path in find(root, (pattern,))]
            else:
                found = self._named(root, pattern, entry)
            for path in found:
                if any(places.beneath(path, shown) for shown in self.shown):
                    self.denied.setdefault(path, entry)

    def _named(self, root: str, pattern: paths.Pattern, entry: str) -> list[str]:
        """A link is followed here, on the host: inside, only what it leads to can be covered."""
        real = os.path.realpath(f"{root}/{pattern.literal}")
        if os.path.lexists(real):
            return [real]
        if root != self.root or not places.beneath(real, root):
            return []
        covered = self.cover.add(pattern.literal + ("/" if entry.endswith("/") else ""))
        return [covered] if covered is not None else []


def find(root: str, patterns: Iterable[paths.Pattern]) -> list[str]:
    """The paths beneath `root` that patterns cover, the uppermost of each; links to directories are followed within it."""
    found: dict[str, None] = {}
    waiting = [(root, paths.starting(patterns))]
    seen: set[tuple[str, paths.State]] = set()
    while waiting:
        directory, state = waiting.pop()
        if (directory, state) in seen:
            continue
        seen.add((directory, state))
        if len(seen) > MAX_DIRECTORIES:
            raise errors.error(
                "workspace_refused",
                f"{root!r} has more than {MAX_DIRECTORIES} directories, too many to look for the patterns of files.deny "
                "and files.protected",
                hint="write names or narrower patterns: 'config/*.pem' instead of '**/*.pem'",
            )
        for name, is_directory in _entries(directory):
            after, pattern = paths.step(state, name)
            path = f"{directory}/{name}"
            if pattern is not None:
                found[path] = None
            elif after and is_directory is not False:
                real = path if is_directory else os.path.realpath(path)
                if is_directory or (places.beneath(real, root) and os.path.isdir(real)):
                    waiting.append((real, after))
    return list(found)


def _entries(directory: str) -> list[tuple[str, bool | None]]:
    """Names, and whether each is a directory; None for a link. What cannot be read has nothing to hide from anybody."""
    try:
        with os.scandir(directory) as entries:
            return [
                (entry.name, None if entry.is_symlink() else entry.is_dir(follow_symlinks=False))
                for entry in entries
            ]
    except OSError:
        return []


def shown(
    rules: policy.Merged, *, home: str, state: str, environment: Mapping[str, str]
) -> list[tuple[str, bool]]:
    """(directory, writable) of `files.read` and `files.write`; one that must not be shown is refused by name."""
    made: dict[str, bool] = {}
    for field, writable in (("read", False), ("write", True)):
        for path in getattr(rules.files, field):
            reason = places.why_not_shown(path, home=home, state=state, environment=environment)
            if reason:
                raise errors.error(
                    "host_path_refused",
                    f"files.{field} names {path!r}, which cannot be shown: {reason}",
                    hint="name a directory that exists, holds no credentials and belongs to no system",
                    path=path,
                    rule=f"files.{field}",
                )
            made[path] = made.get(path, False) or writable
    return sorted(made.items())


# ── explaining ─────────────────────────────────────────────────────────────────────────────────────


def explain(made: Plan, path: str, *, write: bool) -> explaining.Explanation:
    """Whether code inside may read a path, or write it."""
    full = os.path.normpath(os.path.join(made.root, path))
    real = os.path.realpath(full)
    if not any(places.within(real, shown) for shown in made.shown):
        return _elsewhere(full, made.rules, write=write)
    for above in _upwards(real):
        if above in made.denied:
            return explaining.Explanation(verdict="deny", rule=made.denied[above], field="files.deny")
    if write:
        for above in _upwards(real):
            if above in made.cover.protect:
                return _protected(made, above)
        inner = max((shown for shown in made.shown if places.within(real, shown)), key=len)
        if inner in made.rules.files.read and inner not in made.rules.files.write:
            return explaining.Explanation(
                verdict="deny", rule=inner, field="files.read", reason="shown read-only"
            )
    return _free(made, real)


def _protected(made: Plan, path: str) -> explaining.Explanation:
    if made.cover.protect[path] != path:
        words = "a private copy is written; what is harmless in it is taken over at the end"
        return explaining.Explanation(verdict="allow", rule="git configuration", reason=words)
    entry = made.protected.get(path)
    if entry is not None:
        return explaining.Explanation(verdict="deny", rule=entry, field="files.protected")
    return explaining.Explanation(
        verdict="deny", rule="git directory", reason="what git obeys cannot be written"
    )


def _free(made: Plan, real: str) -> explaining.Explanation:
    reason = "no entry covers it"
    if places.beneath(real, made.root) and not os.path.lexists(real):
        by_name = explaining.path(made.rules, real[len(made.root) + 1 :], write=True, root=made.root)
        if by_name.verdict == "deny":
            reason = (
                f"the pattern {by_name.rule!r} covers what is there when the sandbox is made, and this is not"
            )
    return explaining.Explanation(verdict="allow", rule="workspace", reason=reason)


def _elsewhere(full: str, rules: policy.Merged, *, write: bool) -> explaining.Explanation:
    if any(places.within(full, path) for path in _PRIVATE):
        return explaining.Explanation(
            verdict="allow", rule="template base", reason="it is the sandbox's own, not the host's"
        )
    if any(places.within(full, path) for path in _SYSTEM):
        if not write:
            return explaining.Explanation(
                verdict="allow", rule="template base", reason="programs of the host, read-only"
            )
        verdict: Literal["allow", "deny"] = "deny" if rules.files.root == "read-only" else "allow"
        words = (
            "in a layer of the sandbox's own, by its root user"
            if verdict == "allow"
            else "the root is read-only"
        )
        return explaining.Explanation(
            verdict=verdict, rule=rules.files.root, field="files.root", reason=words
        )
    return explaining.Explanation(
        verdict="deny",
        rule="not shown",
        reason="a sandbox sees its template, its workspace and files.read and files.write",
    )


def _upwards(path: str) -> list[str]:
    found = [path]
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found
