"""What was measured, as data: series of samples, and rows that compare them with a bar.

Times are milliseconds. Percentiles are the nearest rank, so every figure shown is one that was really observed. A ratio
divides medians taken in the same run, never one run's figure by another's.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

Verdict = Literal["pass", "miss", "–"]


class Series(msgspec.Struct, kw_only=True):
    """Samples of one thing, in the order they were taken."""

    name: str
    samples: list[float] = []
    unit: str = "ms"

    @property
    def n(self) -> int:
        return len(self.samples)

    @property
    def p50(self) -> float:
        return percentile(self.samples, 50)

    @property
    def p99(self) -> float:
        return percentile(self.samples, 99)

    @property
    def best(self) -> float:
        return min(self.samples)

    def add(self, value: float) -> None:
        self.samples.append(round(value, 4))


class Bar(msgspec.Struct, kw_only=True, frozen=True):
    """The most a figure may be (or the least, with `at_least`)."""

    value: float
    unit: str = "ms"
    at_least: bool = False
    of: str = ""
    """For ratios: the name of the series that is 1."""

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        if self.of:
            return f"{sign} {self.value:g} × {self.of}"
        return f"{sign} {self.value:g} {self.unit}".rstrip()

    def met_by(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value


class Row(msgspec.Struct, kw_only=True):
    """One line of the table."""

    key: str
    name: str
    boundary: str
    """What starts the clock and what stops it."""
    subject: Series
    beside: list[Series] = []
    """Timed in the same run, interleaved where that is possible."""
    bars: list[Bar] = []
    """All must be met."""
    anchor: str = ""
    """Somebody's published figure for comparable work, for orientation; not measured here unless it says so."""
    held: str = ""
    """Isolation, limits and filter in force, as info() of the very sandbox told them."""
    whole: bool = True
    """Whether everything the sandbox promises was switched on; otherwise the row is not published."""
    notes: list[str] = []
    foreign: list[str] = []
    """Other processes that used the machine while this row was measured."""

    def find(self, name: str) -> Series | None:
        return next((s for s in self.beside if s.name == name), None)

    def ratio(self, to: str) -> float | None:
        base = self.find(to)
        if base is None or not base.samples or not self.subject.samples or base.p50 == 0:
            return None
        return self.subject.p50 / base.p50

    def figure(self, bar: Bar | None) -> float:
        """What a bar judges: the median, or its ratio to the series that the bar names. NaN if it was not measured."""
        if bar is None or not bar.of:
            return self.subject.p50
        ratio = self.ratio(bar.of)
        return math.nan if ratio is None else ratio

    @property
    def verdict(self) -> Verdict:
        judged = [bar for bar in self.bars if not math.isnan(self.figure(bar))]
        if not judged:
            return "–"
        return "pass" if all(bar.met_by(self.figure(bar)) for bar in judged) else "miss"


class Skipped(msgspec.Struct, kw_only=True):
    """A row, or something beside one, that was not measured, and why."""

    name: str
    reason: str


class Run(msgspec.Struct, kw_only=True):
    """Everything of one `python -m bench`."""

    when: str
    host: dict[str, Any]
    arguments: list[str]
    rows: list[Row] = []
    skipped: list[Skipped] = []
    noise: dict[str, Any] = {}
    objections: list[str] = []
    """Why this run must not be published; empty if it may."""

    @property
    def misses(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "miss"]


def percentile(samples: list[float], rank: float) -> float:
    """The nearest-rank percentile; NaN of nothing."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(rank / 100 * len(ordered)) - 1)]


def gaps(run: Run, *, quick: bool, partial: bool) -> list[str]:
    """What is missing from a run; no option publishes it."""
    found = []
    if quick:
        found.append("a quick run has too few samples")
    if partial:
        found.append("not every row was measured")
    off = [row for row in run.rows if not row.whole]
    return found + [
        f"{row.key}: not everything that holds a sandbox was switched on ({row.held})" for row in off
    ]


def noises(run: Run) -> list[str]:
    """Who else used the machine; published only on request, and with these words."""
    return [f"{row.key}: {who}" for row in run.rows for who in row.foreign]


def write(run: Run, path: str) -> None:
    with open(path, "wb") as file:
        file.write(
            msgspec.json.format(msgspec.json.encode(_shown(run)), indent=0).replace(b",\n", b", ") + b"\n"
        )


def _shown(run: Run) -> dict[str, Any]:
    """The raw data, and beside it the figures that the table shows."""
    plain: dict[str, Any] = msgspec.to_builtins(run)
    for row, shown in zip(run.rows, plain["rows"], strict=True):
        shown["p50"], shown["p99"], shown["n"] = row.subject.p50, row.subject.p99, row.subject.n
        shown["figures"], shown["verdict"] = [row.figure(bar) for bar in row.bars], row.verdict
    return plain


def read(path: str) -> Run:
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Run)
