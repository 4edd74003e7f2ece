"""When idleness suspends a sandbox, rung by rung.

    running ── pause_after_s ──► paused ── archive_after_s ──► archived

Both times count from the last use, so the ladder is one line and not a chain of delays; a rung that is left out is passed
by. A sandbox in use stands still on no rung. A suspension that somebody *asked for* is not idleness: it stays on the rung
it was put on until it is needed. The end of a sandbox is another matter (`expiry`) and comes first.

Pure: the caller passes in what it observed. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from cloche import model
from cloche.lifecycle import expiry

Rung = Literal["pause", "archive"]


class Step(NamedTuple):
    """The next rung, and the moment for it."""

    at: float
    rung: Rung


class Rest(NamedTuple):
    """What is known of a sandbox that may be put to rest."""

    life: expiry.Life
    ladder: model.Ladder
    phase: model.Phase


def next_step(rest: Rest) -> Step | None:
    """Where the sandbox goes if nothing more happens to it; None is nowhere."""
    return min(_steps(rest), key=lambda step: step.at, default=None)


def due(rest: Rest, now: float) -> Rung | None:
    """The lowest rung that has come by `now`, if one has."""
    come = [step for step in _steps(rest) if step.at <= now]
    return max(come, key=lambda step: step.at).rung if come else None


def next_deadline(rests: Iterable[Rest]) -> float | None:
    """The earliest moment at which any of them is due."""
    steps = (next_step(rest) for rest in rests)
    return min((step.at for step in steps if step is not None), default=None)


def _steps(rest: Rest) -> list[Step]:
    life = rest.life
    if life.running > 0 or life.paused or rest.phase not in ("running", "paused"):
        return []
    last_used = life.since if life.last_used_at is None else life.last_used_at
    steps: list[Step] = []
    if rest.ladder.pause_after_s is not None and rest.phase == "running":
        steps.append(Step(last_used + rest.ladder.pause_after_s, "pause"))
    if rest.ladder.archive_after_s is not None:
        steps.append(Step(last_used + rest.ladder.archive_after_s, "archive"))
    return steps
