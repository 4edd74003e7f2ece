"""The table: for a terminal, and as Markdown between markers in docs/benchmarks.md."""

from __future__ import annotations

import math

from bench import records

BEGIN = "<!-- bench: begin (written by `scripts/bench --publish`; do not edit) -->"
END = "<!-- bench: end -->"


def for_terminal(run: records.Run) -> str:
    head = ("row", "work", "n", "p50", "p99", "best", "bar", "figure", "", "beside (p50)")
    lines = [head, *(_cells(row) for row in run.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: records.Row) -> tuple[str, ...]:
    series = row.subject
    beside = ", ".join(f"{s.name} {show(s.p50, s.unit)} ({_times(row, s)})" for s in row.beside)
    return (
        row.key, row.name, str(series.n), show(series.p50, series.unit), show(series.p99, series.unit),
        show(series.best, series.unit), bars(row), figure(row), row.verdict, beside,
    )  # fmt: skip


def _times(row: records.Row, series: records.Series) -> str:
    ratio = row.ratio(series.name)
    return "–" if ratio is None else f"{ratio:.2f} ×"


def bars(row: records.Row) -> str:
    return ", ".join(map(str, row.bars)) or "–"


def figure(row: records.Row) -> str:
    """What the bars judge, one figure each."""
    return ", ".join(_judged(row, bar) for bar in row.bars) or show(row.subject.p50, row.subject.unit)


def _judged(row: records.Row, bar: records.Bar) -> str:
    value = row.figure(bar)
    if math.isnan(value):
        return "–"
    return f"{value:.2f} ×" if bar.of else show(value, row.subject.unit)


def show(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"
    return f"{value:.2f} {unit}" if unit == "MiB" else f"{value:.0f} {unit}"


# ── the published page ─────────────────────────────────────────────────────────────────────────────


def for_page(run: records.Run) -> str:
    """All that stands between the markers."""
    host = run.host
    who = "root" if host.get("root") else "an ordinary user"
    parts = [
        f"Measured {run.when} as {who} on {host.get('cpus')} CPUs ({host.get('cpu')}), "
        f"{host.get('memory_mib', 0) // 1024} GiB, Linux {host.get('kernel')}, Python {host.get('python')}."
    ]
    if run.objections:
        parts.append(
            "**Not a quiet run; take the ratios, not the milliseconds.** " + _sentence(run.objections)
        )
    parts += [
        _page_table(run),
        "![p50 and p99 as multiples of the floor](benchmarks/ratios.svg)",
        _misses(run),
    ]
    parts += [_details(run), "Every sample: [benchmarks/results.json](benchmarks/results.json)."]
    return "\n\n".join(part for part in parts if part)


def _sentence(objections: list[str]) -> str:
    shown = "; ".join(objections[:4])
    rest = len(objections) - 4
    return f"{shown}; and {rest} more." if rest > 0 else f"{shown}."


def _page_table(run: records.Run) -> str:
    lines = [
        "| work | n | p50 | p99 | bar | figure | | in the same run (p50) | anchor |",
        "|---|--:|--:|--:|---|--:|---|---|---|",
    ]
    for row in run.rows:
        beside = "<br>".join(f"{s.name} {show(s.p50, s.unit)}" for s in row.beside) or "–"
        verdict = {"pass": "✓", "miss": "**miss**", "–": ""}[row.verdict]
        cells = (
            row.name, str(row.subject.n), show(row.subject.p50, row.subject.unit), show(row.subject.p99, row.subject.unit),
            bars(row), figure(row), verdict, beside, row.anchor,
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _misses(run: records.Run) -> str:
    if not run.misses:
        return "No measured row misses its bar."
    lines = [f"- **{row.name}**: {figure(row)}, and the bar is {bars(row)}." for row in run.misses]
    return "\n".join(["Missed:", "", *lines])


def _details(run: records.Run) -> str:
    lines = ["What each row is, and what held the sandbox while it was measured:", ""]
    for row in run.rows:
        lines.append(
            f"- **{row.name}.** Clock: {row.boundary}. "
            + " ".join(f"{note[:1].upper()}{note[1:]}." for note in row.notes)
        )
    held: dict[str, list[str]] = {}
    for row in run.rows:
        held.setdefault(row.held or "nothing", []).append(row.name)
    lines += ["", "In force:", ""]
    lines += [f"- {words} — {'; '.join(names)}" for words, names in held.items()]
    if run.skipped:
        lines += [
            "",
            "Not measured:",
            "",
            *(f"- {skipped.name}: {skipped.reason}" for skipped in run.skipped),
        ]
    return "\n".join(line.rstrip() for line in lines)


def publish(page: str, content: str) -> str:
    """`page` with what is between the markers replaced; ValueError if they are not both there, once, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError("the page must hold both markers, once each, in order")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"
