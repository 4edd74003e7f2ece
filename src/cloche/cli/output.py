"""Data for people, on stdout: tables and fields that fit 80 columns; or JSON, when asked.

What does not fit a terminal is cut with an ellipsis there, and printed whole into a pipe.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from cloche.cli import talk

_GAP = "  "


def as_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Left-aligned columns; numbers to the right."""
    body = [list(row) for row in rows]
    texts = [[talk.clean(_text(cell)) for cell in row] for row in body]
    widths = [max(len(line[i]) for line in [list(headers), *texts]) for i in range(len(headers))]
    widths = _fit(widths, [len(h) for h in headers])
    numeric = [
        bool(body) and all(isinstance(row[i], (int, float)) for row in body) for i in range(len(headers))
    ]
    print(talk.paint(_line(headers, widths, numeric), "1", 1))
    for line in texts:
        print(_line(line, widths, numeric))
    sys.stdout.flush()


def fields(pairs: Iterable[tuple[str, object]]) -> None:
    """One fact a line, names aligned."""
    known = [(name, talk.clean(_text(value))) for name, value in pairs if value not in (None, "", (), [], {})]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        print(f"{talk.paint(name.ljust(width), '1', 1)}{_GAP}{value}")
    sys.stdout.flush()


def _fit(widths: list[int], least: list[int]) -> list[int]:
    """On a terminal the widest column gives way until the line fits."""
    if not os.isatty(1):
        return widths
    room = _columns() - len(_GAP) * (len(widths) - 1)
    widths = list(widths)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: widths[i] - max(least[i], 8))
        if widths[widest] <= max(least[widest], 8):
            break
        widths[widest] -= 1
    return widths


def _columns() -> int:
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    made = []
    for cell, width, right in zip(cells, widths, numeric, strict=True):
        cut = cell if len(cell) <= width else cell[: width - 1] + "…"
        made.append(cut.rjust(width) if right else cut.ljust(width))
    return _GAP.join(made).rstrip()


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


def span(seconds: float) -> str:
    """A length of time in its two largest units: 45s, 4m 10s, 2h 5m."""
    whole = max(0, round(seconds))
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def ago(moment: float) -> str:
    return span(time.time() - moment)


def until(moment: float | None) -> str:
    return "never" if moment is None else span(moment - time.time())


def clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
