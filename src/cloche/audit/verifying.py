"""Is the log as it was written? What is wrong with it, where first, and of which kind.

*Damage* is what no crash explains: `edited`, `removed`, `truncated`, `reordered`, `appended`, `wrong_key`. A *note* is what honest
use leaves: `torn` (an unfinished last line: the writer was killed in mid-write), `unsigned` (lines since the last seal; somebody
who can write the file could have changed them and reckoned the hashes anew), `unlisted` (a writer that was killed while it opened its
segment).

A live writer is no hindrance: the manifest is read before the segments, which only grow, and once more after them, because a
segment may speak of a line of the manifest that came meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from cloche.audit import keys, lines, manifest, reading, writing

Kind = Literal[
    "edited", "removed", "truncated", "reordered", "appended", "wrong_key", "torn", "unsigned", "unlisted"
]
NOTES = ("torn", "unsigned", "unlisted")
MANIFEST = "manifest"


class Finding(NamedTuple):
    kind: Kind
    segment: str
    """A segment's name, or `manifest`."""
    line: int
    """Counted from 1, as an editor does."""
    words: str

    @property
    def damage(self) -> bool:
        return self.kind not in NOTES


class Report(NamedTuple):
    segments: int
    lines: int
    signed: int
    """Of those lines, how many a signature covers."""
    head: str
    """`N:HASH`, the manifest's last line. Keep it elsewhere, and `verify --head` shows a log that was set back."""
    findings: list[Finding]

    @property
    def damaged(self) -> bool:
        return any(finding.damage for finding in self.findings)

    def to_builtins(self) -> dict[str, Any]:
        findings = [{**found._asdict(), "damage": found.damage} for found in self.findings]
        return {**self._asdict(), "damaged": self.damaged, "findings": findings}


class _Chain(NamedTuple):
    """A file as far as it is sound."""

    members: list[dict[str, Any]]
    raw: list[bytes]
    size: int
    """Bytes of whole lines."""
    torn: int
    bad: Finding | None


def verify(directory: str, verifier: keys.Verifier | None, head: str | None = None) -> Report:
    """`verifier` is None where there is no key yet: then nothing may be signed."""
    before = _manifest(directory, verifier)
    found = reading.segments(directory)
    findings, checked = [], []
    for name, path in found.items():
        checked.append((name, _read_segment(name, path)))
    after = _manifest(directory, verifier)
    seals = _by_segment(before.members)
    findings += [after.bad] if after.bad else []
    if after.torn and not after.bad:
        findings.append(_finding("torn", MANIFEST, len(after.raw), "its last line is unfinished"))
    total = signed = 0
    for name, chain in checked:
        covered, problem = _segment(name, chain, seals.get(name, []), after, _lives(found[name]))
        findings += problem
        total += len(chain.members)
        signed += covered
    findings += _missing(after.members, found)
    if head is not None:
        findings += _anchored(after.members, head)
    last = after.members[-1] if after.members else None
    where = f"{last['n']}:{last['hash']}" if last else f"-:{lines.ZERO}"
    return Report(len(checked), total, signed, where, findings)


def _finding(kind: Kind, segment: str, index: int, words: str) -> Finding:
    return Finding(kind, segment, index + 1, words)


# ── a chain, whatever it is of ─────────────────────────────────────────────────────────────────────


def _chain(file: Iterable[bytes], name: str, counter: str) -> _Chain:
    members: list[dict[str, Any]] = []
    raw: list[bytes] = []
    size = 0
    prev = lines.ZERO
    rest = iter(file)
    for line in rest:
        index = len(members)
        if not line.endswith(b"\n"):
            return _Chain(members, raw, size, len(line), None)
        found = lines.opened(line[:-1])
        if found is None:
            return _Chain(members, raw, size, 0, _finding("edited", name, index, "its hash does not fit it"))
        if found.get("prev") != prev or found.get(counter) != index:
            return _Chain(members, raw, size, 0, _out_of_order(found, prev, index, rest, name, counter))
        members.append(found)
        raw.append(line[:-1])
        size += len(line)
        prev = found["hash"]
    return _Chain(members, raw, size, 0, None)


def _out_of_order(
    found: dict[str, Any], prev: str, index: int, rest: Iterator[bytes], name: str, counter: str
) -> Finding:
    """A line that is sound in itself does not follow the one before it: is what belongs here elsewhere, or gone?"""
    number = found.get(counter)
    if not isinstance(number, int) or number == index:
        return _finding("edited", name, index, "it does not name the line before it")
    if number < index:
        return _finding("reordered", name, index, f"it is number {number}, and stands at {index}")
    for line in rest:
        later = lines.opened(line.rstrip(b"\n"))
        if later is not None and later.get("prev") == prev:
            return _finding("reordered", name, index, f"number {index} stands further down")
    return _finding("removed", name, index, f"number {index} is not there; {number} stands in its place")


# ── the manifest ───────────────────────────────────────────────────────────────────────────────────


def _manifest(directory: str, verifier: keys.Verifier | None) -> _Chain:
    try:
        with open(os.path.join(directory, manifest.NAME), "rb") as file:
            chain = _chain(file, MANIFEST, "n")
    except FileNotFoundError:
        return _Chain([], [], 0, 0, None)
    for index, (members, raw) in enumerate(zip(chain.members, chain.raw, strict=True)):
        problem = _signature(members, raw, index, verifier)
        if problem is not None:
            return chain._replace(members=chain.members[:index], bad=problem)
    return chain


def _signature(
    members: dict[str, Any], raw: bytes, index: int, verifier: keys.Verifier | None
) -> Finding | None:
    if members.get("act") == "opened":
        return None
    parts = lines.signed_part(raw)
    if parts is None:
        return _finding("edited", MANIFEST, index, "its signature is missing")
    if verifier is None or members.get("key") != verifier.fingerprint:
        used = verifier.fingerprint if verifier is not None else "none"
        return _finding(
            "wrong_key", MANIFEST, index, f"signed with key {members.get('key')}; checked with {used}"
        )
    if not verifier.holds(*parts):
        return _finding("edited", MANIFEST, index, "its signature does not fit it")
    return None


def _by_segment(members: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in members:
        found.setdefault(line["segment"], []).append(line)
    return found


def _missing(members: list[dict[str, Any]], found: dict[str, str]) -> list[Finding]:
    findings = []
    for name, seals in _by_segment(members).items():
        if name not in found and not any(seal["act"] == "dropped" for seal in seals):
            words = f"the whole segment is gone; the manifest (line {seals[-1]['n'] + 1}) knows of it"
            findings.append(_finding("removed", name, 0, words))
    return findings


def _anchored(members: list[dict[str, Any]], head: str) -> list[Finding]:
    number, _, digest = head.partition(":")
    if number == "-":
        return []
    index = int(number)
    if index >= len(members):
        return [
            _finding("truncated", MANIFEST, len(members), f"line {index + 1}, which was seen, is not there")
        ]
    if members[index]["hash"] != digest:
        return [_finding("edited", MANIFEST, index, "it is not the line that was seen")]
    return []


# ── a segment ──────────────────────────────────────────────────────────────────────────────────────


def _read_segment(name: str, path: str) -> _Chain:
    for candidate in (path, path.removesuffix(writing.OPEN) + writing.DONE):
        try:
            with open(candidate, "rb") as file:
                return _chain(file, name, "seq")
        except FileNotFoundError:
            continue
    return _Chain([], [], 0, 0, None)


def _lives(path: str) -> bool:
    """Whether a writer still holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _segment(
    name: str, chain: _Chain, seals: list[dict[str, Any]], after: _Chain, lives: bool
) -> tuple[int, list[Finding]]:
    """How many of its lines are signed, and what is wrong, at most one damage."""
    signed = [seal for seal in seals if seal["act"] in ("sealed", "closed", "died")]
    damage = (
        _short(name, chain, signed)
        or chain.bad
        or _rewritten(name, chain, signed)
        or _beyond_the_end(name, chain, signed)
        or _references(name, chain, after)
    )
    if damage is not None:
        return 0, [damage]
    covered = signed[-1]["lines"] if signed else 0
    return covered, _notes(name, chain, seals, covered, after, lives)


def _short(name: str, chain: _Chain, signed: list[dict[str, Any]]) -> Finding | None:
    """Fewer lines than were signed, and nothing wrong up to there: its end is gone."""
    if chain.bad is None and signed and len(chain.members) < max(seal["lines"] for seal in signed):
        most = max(seal["lines"] for seal in signed)
        return _finding("truncated", name, len(chain.members), f"{most} lines were signed")
    return None


def _rewritten(name: str, chain: _Chain, signed: list[dict[str, Any]]) -> Finding | None:
    for seal in signed:
        count = seal["lines"]
        head = chain.members[count - 1]["hash"] if count else lines.ZERO
        if head != seal["head"]:
            return _finding("edited", name, max(count - 1, 0), "it is not the line that was signed")
    return None


def _beyond_the_end(name: str, chain: _Chain, signed: list[dict[str, Any]]) -> Finding | None:
    final = signed[-1] if signed and signed[-1]["act"] in ("closed", "died") else None
    if final is None:
        return None
    extra = chain.members[final["lines"] :]
    if extra and final["act"] == "closed" and extra[0]["kind"] == lines.CLOSED:
        extra = extra[1:] if extra[0]["data"].get("manifest") == final["n"] else extra
    torn = final.get("torn", 0)
    if extra or (chain.torn != torn and final["act"] == "died"):
        return _finding("appended", name, final["lines"], f"it had ended after {final['lines']} lines")
    return None


def _references(name: str, chain: _Chain, after: _Chain) -> Finding | None:
    """A segment names the manifest's lines about it, so the manifest cannot lose its end alone."""
    for line in chain.members:
        number = line["data"].get("manifest") if line["kind"] in (lines.SEALED, lines.CLOSED) else None
        if number is None or after.bad is not None:
            continue
        if number >= len(after.members):
            words = f"line {number + 1} is not there, which line {line['seq'] + 1} of {name} names"
            return _finding("truncated", MANIFEST, len(after.members), words)
        if after.members[number]["hash"] != line["data"].get("head"):
            return _finding("edited", MANIFEST, number, f"it is not the line that {name} names")
    return None


def _notes(
    name: str, chain: _Chain, seals: list[dict[str, Any]], covered: int, after: _Chain, lives: bool
) -> list[Finding]:
    if not seals:
        return _unlisted(name, chain, after, lives)
    notes = []
    final = seals[-1]["act"] in ("closed", "died")
    if chain.torn and not lives:
        words = f"{chain.torn} bytes of an unfinished line; its writer was killed"
        notes.append(_finding("torn", name, len(chain.members), words))
    rest = len(chain.members) - covered
    if final and seals[-1]["act"] == "closed" and not rest and not chain.torn and _must_say_closed(chain):
        notes.append(_finding("torn", name, len(chain.members), "it does not say that it was closed"))
    if rest > 0 and not final:
        state = (
            "its writer is alive" if lives else "its writer has ended; the next engine that stays signs it"
        )
        notes.append(_finding("unsigned", name, covered, f"{rest} lines since the last seal; {state}"))
    return notes


def _must_say_closed(chain: _Chain) -> bool:
    return not chain.members or chain.members[-1]["kind"] != lines.CLOSED


def _unlisted(name: str, chain: _Chain, after: _Chain, lives: bool) -> list[Finding]:
    if any(line["segment"] == name for line in after.members) or after.bad is not None:
        return []  # it came while we looked; or the manifest is damaged, which is said already
    if len(chain.members) > 1:
        words = f"it does not list {name}, which has {len(chain.members)} lines"
        return [_finding("truncated", MANIFEST, len(after.members), words)]
    return [] if lives else [_finding("unlisted", name, 0, "its writer was killed while it opened it")]
