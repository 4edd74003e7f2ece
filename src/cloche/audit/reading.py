"""The lines of the log, of all writers, in the order of their time.

Within one segment the order is the file's, whatever the clock did. Reading believes every line it can parse: whether they are
genuine is `verifying`'s question.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from cloche.audit import lines, manifest, writing


class Wanted(NamedTuple):
    since: float | None = None
    until: float | None = None
    sandbox: str | None = None
    """An id, or a name: then those of every sandbox that was made with it."""
    kinds: tuple[str, ...] = ()
    actor: str | None = None
    outcome: str | None = None


def segments(directory: str) -> dict[str, str]:
    """Name and path of every segment, by name."""
    try:
        found = sorted(os.listdir(directory))
    except FileNotFoundError:
        return {}
    return {
        name.removesuffix(ending): os.path.join(directory, name)
        for ending in (writing.OPEN, writing.DONE)
        for name in found
        if name.endswith(ending) and name != manifest.NAME
    }


def read(directory: str, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """What was asked for, each line with its `segment`."""
    files = [_lines(name, path) for name, path in segments(directory).items()]
    names = {wanted.sandbox}
    for line in heapq.merge(*files, key=_time):
        if (
            wanted.sandbox is not None
            and line["kind"] == "created"
            and line["data"].get("name") == wanted.sandbox
        ):
            names.add(line["sandbox"])
        if _matches(line, wanted, names):
            yield line


def page(
    directory: str, wanted: Wanted, after: tuple[float, str, int] | None, limit: int
) -> list[dict[str, Any]]:
    """So many of them after a place, by (time, segment, seq)."""
    later = (line for line in read(directory, wanted) if after is None or place(line) > after)
    return heapq.nsmallest(limit, later, key=place)


def place(line: dict[str, Any]) -> tuple[float, str, int]:
    return _time(line), line["segment"], line["seq"] if isinstance(line["seq"], int) else 0


def _lines(name: str, path: str) -> Iterator[dict[str, Any]]:
    if not os.path.exists(path):  # finished meanwhile, and named so
        path = path.removesuffix(writing.OPEN) + writing.DONE
    with open(path, "rb") as file:
        for raw in file:
            try:
                line = msgspec.json.decode(raw, type=dict[str, Any])
            except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
                continue
            if {"seq", "time", "kind", "data", "sandbox", "actor", "outcome"} <= line.keys():
                yield {**line, "segment": name}


def _time(line: dict[str, Any]) -> float:
    time = line["time"]
    return time if isinstance(time, (int, float)) else 0.0


def _matches(line: dict[str, Any], wanted: Wanted, names: set[str | None]) -> bool:
    if line["kind"] not in wanted.kinds if wanted.kinds else line["kind"] in lines.BOOKKEEPING:
        return False
    at = _time(line)
    return (
        (wanted.since is None or at >= wanted.since)
        and (wanted.until is None or at < wanted.until)
        and (wanted.sandbox is None or line["sandbox"] in names)
        and (wanted.actor is None or line["actor"] == wanted.actor)
        and (wanted.outcome is None or line["outcome"] == wanted.outcome)
    )
