"""The plot: p50 and p99 of everything that is a time, as multiples of the floor, on a logarithmic axis.

Written as SVG by hand: it is a few rectangles, and a plotting library would be the largest dependency of the project.
Colours come from CSS variables with a dark variant, so that it reads on either background.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple
from xml.sax.saxutils import escape

from bench import records

Scale = Callable[[float], float]
_WIDTH, _LEFT, _RIGHT, _TOP, _STEP = 860, 330, 40, 56, 22
_STYLE = """
  svg { --ink: #1f2328; --faint: #d0d7de; --ours: #1a7f64; --theirs: #8c959f; --bar: #bc4c00; }
  @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #3d444d; --ours: #3fb68b; --theirs: #9198a1; --bar: #f0883e; } }
  text { font: 12px system-ui, sans-serif; fill: var(--ink); }
  .faint { stroke: var(--faint); } .ours { fill: var(--ours); stroke: var(--ours); }
  .theirs { fill: var(--theirs); stroke: var(--theirs); } .bar { stroke: var(--bar); stroke-width: 2; }
""".strip("\n")


class Mark(NamedTuple):
    """One line of the plot; all numbers are multiples of the floor's median."""

    label: str
    p50: float
    p99: float
    bar: float | None
    ours: bool


def marks(run: records.Run) -> list[Mark]:
    """What is shown, grouped by row: ours first, then what stands beside it."""
    floor = next((row.subject.p50 for row in run.rows if row.key == "row1"), None)
    if not floor:
        return []
    found = []
    for row in run.rows:
        if row.subject.unit != "ms" or row.key == "row1":
            continue
        found.append(
            Mark(_plain(row.name), row.subject.p50 / floor, row.subject.p99 / floor, _bar(row, floor), True)
        )
        found += [
            Mark(f"· {s.name}", s.p50 / floor, s.p99 / floor, None, False)
            for s in row.beside
            if s.samples and s.name != "floor"
        ]
    return found


def _bar(row: records.Row, floor: float) -> float | None:
    """The tightest bar of a row."""
    bases = [(bar, row.find(bar.of)) for bar in row.bars]
    found = [
        bar.value * (base.p50 if base is not None else 1) / floor
        for bar, base in bases
        if base is not None or not bar.of
    ]
    return min(found, default=None)


def _plain(text: str) -> str:
    return text.replace("`", "")


def svg(run: records.Run) -> str:
    shown = marks(run)
    highest = max([10.0, *(mark.p99 for mark in shown), *(mark.bar or 0 for mark in shown)])
    lowest = min([1.0, *(mark.p50 for mark in shown)])
    low, high = math.floor(math.log10(lowest)), math.log10(highest) + 0.05

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(value) - low) / (high - low)

    height = _TOP + _STEP * len(shown) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="p50 and p99 as multiples of the floor">',
        f"<style>\n{_STYLE}\n</style>",
        f'<text x="{_LEFT}" y="18">multiples of the floor (fork, all namespaces, exec in C); '
        "dot p50, line to p99, upright the bar</text>",
    ]
    parts += _axis(x, low, high, height)
    for number, mark in enumerate(shown):
        parts += _line(mark, x, _TOP + _STEP * number + _STEP / 2)
    return "\n".join([*parts, "</svg>", ""])


def _axis(x: Scale, low: float, high: float, height: float) -> list[str]:
    parts = []
    for power in range(int(low), math.floor(high) + 1):
        at = x(10**power)
        parts.append(f'<line class="faint" x1="{at:.1f}" y1="{_TOP - 8}" x2="{at:.1f}" y2="{height - 16}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_TOP - 14}" text-anchor="middle">{10**power:g}×</text>')
    return parts


def _line(mark: Mark, x: Scale, y: float) -> list[str]:
    kind = "ours" if mark.ours else "theirs"
    left, right = x(mark.p50), x(max(mark.p99, mark.p50))
    parts = [
        f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(mark.label)}</text>',
        f'<line class="{kind}" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke-width="2"/>',
        f'<circle class="{kind}" cx="{left:.1f}" cy="{y:.1f}" r="4"><title>{mark.p50:.2f}× / {mark.p99:.2f}×</title></circle>',
    ]
    if mark.bar is not None:
        at = x(mark.bar)
        parts.append(f'<line class="bar" x1="{at:.1f}" y1="{y - 8:.1f}" x2="{at:.1f}" y2="{y + 8:.1f}"/>')
    return parts
