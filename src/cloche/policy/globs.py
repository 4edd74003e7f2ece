"""Names with `*`: variables and secrets. One list is narrowed by another to what both have."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from cloche import errors

_GLOB = re.compile(r"[A-Za-z0-9_.*-]{1,128}\Z")


def check(entry: str) -> None:
    if not _GLOB.match(entry):
        raise errors.error(
            "policy_invalid",
            f"the name {entry[:80]!r} is not letters, digits, '_', '.', '-' and '*'",
            hint="such as PATH or AWS_*",
            entry=entry,
        )


def matching(entries: Iterable[str], name: str) -> str | None:
    """The first entry that has the name."""
    return next((entry for entry in entries if _expression(entry).match(name)), None)


def both(one: Iterable[str], other: Iterable[str]) -> tuple[str, ...]:
    """Entries for what both lists have; of two that merely overlap, nothing: less than both allow, never more.

    If `wide` matches the text of `narrow`, each star of `narrow` is taken in by one of `wide`, so whatever `narrow` matches
    `wide` does too.
    """
    other = tuple(other)
    kept = [
        narrow
        for left in one
        for right in other
        for narrow, wide in ((left, right), (right, left))
        if _expression(wide).match(narrow)
    ]
    return tuple(dict.fromkeys(kept))


@functools.lru_cache(maxsize=1024)
def _expression(entry: str) -> re.Pattern[str]:
    # Lookaheads are not taken back, so that a row of stars costs no more than its length.
    first, *rest = (re.escape(part) for part in entry.split("*"))
    if not rest:
        return re.compile(first + r"\Z")
    *middle, last = rest
    inner = "".join(f"(?=(?P<g{n}>.*?{part}))(?P=g{n})" for n, part in enumerate(p for p in middle if p))
    return re.compile(f"{first}{inner}.*{last}\\Z", re.DOTALL)
