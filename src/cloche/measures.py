"""What an engine counts about itself, for whoever publishes it; nothing here is kept beyond the process.

Every dictionary here is bounded: its keys are words of ours, never a sandbox, a host, a path or anything else that a client or a guest can
make up. Where a word comes from further away, only so many are taken and the rest is `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable
from typing import Literal, TypeVar

from cloche import errors, events, model

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds; the upper ends of a histogram's buckets."""
_MOST_WORDS = 100

Temperature = Literal["warm", "cold"]
Word = TypeVar("Word", bound=Hashable)


class Histogram:
    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


def bounded(counter: Counter[Word], word: Word, other: Word) -> Word:
    """The word, or `other` where there are too many already."""
    return word if word in counter or len(counter) < _MOST_WORDS else other


class Measures:
    """Filled by the engine, read by the server's metrics."""

    def __init__(self) -> None:
        self.created: dict[Temperature, Histogram] = {"warm": Histogram(), "cold": Histogram()}
        self.claimed: dict[Temperature, Histogram] = {"warm": Histogram(), "cold": Histogram()}
        self.first_instruction = Histogram()
        self.first_output = Histogram()
        self.running = 0
        self.executions: Counter[str] = Counter()
        self.code_runs = 0
        self.ended: Counter[str] = Counter()
        self.denials: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.credentials = 0
        self.bytes_up = self.bytes_down = 0

    def take(self, event: events.AnyEvent) -> None:
        """Count what the journal is told."""
        match event:
            case events.Started(context=context) if context is not None:
                self.code_runs += 1
            case events.Deleted(reason=reason):
                self.ended[reason] += 1
            case events.Lost():
                self.ended["lost"] += 1
            case events.Denied(denial=denial):
                self.denials[denial.kind] += 1
            case events.Refused(code=code):
                self.refusals[code if code in errors.TABLE else "other"] += 1
            case events.Decided(verdict=verdict, reason=reason):
                word = (verdict, reason or "other")
                self.decisions[bounded(self.decisions, word, (verdict, "other"))] += 1
            case events.CredentialUsed():
                self.credentials += 1

    def carried(self, up: int, down: int) -> None:
        """A connection out of a sandbox has ended."""
        self.bytes_up += up
        self.bytes_down += down

    def began(self) -> None:
        self.running += 1

    def exited(self, result: model.ExecResult | None, first_output_s: float | None) -> None:
        """A command has ended; None where its sandbox was lost with it."""
        self.running -= 1
        self.executions[_outcome(result)] += 1
        if first_output_s is not None:
            self.first_output.observe(first_output_s)


def _outcome(result: model.ExecResult | None) -> str:
    if result is None:
        return "lost"
    if result.timed_out:
        return "timed_out"
    if result.oom_killed:
        return "oom_killed"
    if result.signal is not None:
        return "signalled"
    return "ok" if result.exit_code == 0 else "failed"
