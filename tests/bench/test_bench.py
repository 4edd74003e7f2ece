"""The harness: figures from known samples, markers, and one small real run. Times are never asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import leaks, noise, plots, records, tables

ROOT = Path(__file__).parents[2]


def series(name: str, *samples: float) -> records.Series:
    return records.Series(name=name, samples=list(samples))


def a_row(key: str = "row2", **fields: object) -> records.Row:
    made = records.Row(
        key=key, name="work", boundary="a → b", subject=series("cloche", 4.0, 6.0, 8.0), held="all of it"
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def a_run(*rows: records.Row) -> records.Run:
    return records.Run(when="2030-01-01", host={"cpus": 2, "memory_mib": 2048}, arguments=[], rows=list(rows))


# ── figures ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("samples", "rank", "expected"),
    [
        pytest.param([5.0], 50, 5.0, id="one sample is every percentile"),
        pytest.param([3.0, 1.0, 2.0], 50, 2.0, id="order does not matter"),
        pytest.param([1.0, 2.0], 50, 1.0, id="nearest rank takes what was observed"),
        pytest.param([float(n) for n in range(1, 101)], 99, 99.0, id="p99 of a hundred is the 99th"),
        pytest.param([float(n) for n in range(1, 11)], 99, 10.0, id="p99 of ten is the worst"),
    ],
)
def test_percentiles_are_observed_values(samples: list[float], rank: float, expected: float) -> None:
    assert records.percentile(samples, rank) == expected


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(records.percentile([], 50))


def test_a_ratio_divides_medians_of_the_same_run() -> None:
    assert a_row(beside=[series("floor", 1.0, 2.0, 30.0)]).ratio("floor") == 3.0


def test_a_ratio_to_what_was_not_measured_is_none() -> None:
    assert a_row().ratio("floor") is None
    assert a_row(beside=[series("floor")]).ratio("floor") is None


@pytest.mark.parametrize(
    ("bars", "verdict"),
    [
        pytest.param([], "–", id="no bar, no verdict"),
        pytest.param([records.Bar(value=6)], "pass", id="the bar itself passes"),
        pytest.param([records.Bar(value=5.9)], "miss", id="above the bar"),
        pytest.param([records.Bar(value=200, at_least=True)], "miss", id="below a least"),
        pytest.param([records.Bar(value=3, of="floor")], "pass", id="a ratio"),
        pytest.param(
            [records.Bar(value=3, of="floor"), records.Bar(value=1, of="bwrap")], "miss", id="all bars count"
        ),
        pytest.param([records.Bar(value=3, of="absent")], "–", id="nothing to compare with"),
    ],
)
def test_verdicts(bars: list[records.Bar], verdict: str) -> None:
    row = a_row(bars=bars, beside=[series("floor", 2.0), series("bwrap", 5.0)])
    assert row.verdict == verdict


# ── what may be published ──────────────────────────────────────────────────────────────────────────


def test_a_quiet_whole_run_has_no_objections() -> None:
    run = a_run(a_row())
    assert records.gaps(run, quick=False, partial=False) == []
    assert records.noises(run) == []


@pytest.mark.parametrize(
    ("row", "quick", "partial"),
    [
        pytest.param(a_row(), True, False, id="too few samples"),
        pytest.param(a_row(), False, True, id="rows left out"),
        pytest.param(a_row(whole=False), False, False, id="something switched off"),
    ],
)
def test_gaps_are_told(row: records.Row, quick: bool, partial: bool) -> None:
    assert len(records.gaps(a_run(row), quick=quick, partial=partial)) == 1


def test_a_busy_machine_is_told_with_the_row_and_the_culprit() -> None:
    assert records.noises(a_run(a_row(foreign=["make used 90%"]))) == ["row2: make used 90%"]


def test_a_busy_process_outside_our_tree_is_named() -> None:
    def shot(at: float, busy: float, ours: float) -> noise.Look:
        all_ = [
            noise.Process(10, 1, "bench", 0, 0.0),
            noise.Process(11, 10, "sandbox", 0, ours),
            noise.Process(20, 1, "make", 0, busy),
            noise.Process(30, 2, "kworker", 0, busy),
        ]
        return noise.Look(at, {p.pid: p for p in all_})

    found = noise.foreign(shot(0, 0, 0), shot(10, 5, 10), me=10)
    assert found == ["make (pid 20) used 50% of a CPU"]
    assert noise.foreign(shot(0, 0, 0), shot(10, 1, 10), me=10) == []


def test_a_reused_pid_counts_from_zero() -> None:
    before = noise.Look(0, {20: noise.Process(20, 1, "old", 5, 100.0)})
    after = noise.Look(10, {20: noise.Process(20, 1, "new", 9, 6.0)})
    assert noise.foreign(before, after, me=10) == ["new (pid 20) used 60% of a CPU"]


def test_a_child_that_is_reaped_meanwhile_does_not_count_for_its_whole_life() -> None:
    shell, job = noise.Process(20, 1, "bash", 0, 0.0), noise.Process(21, 20, "make", 1, 100.0)
    before = noise.Look(0, {20: shell, 21: job})
    after = noise.Look(10, {20: shell._replace(cpu_s=101.0)})
    assert noise.foreign(before, after, me=10) == []
    assert noise.foreign(before, after, me=10, least=0.05) == ["bash (pid 20) used 10% of a CPU"]


def test_growth_is_what_is_more_than_before() -> None:
    assert leaks.grown({"mounts": 3, "files": 2}, {"mounts": 5, "files": 1}) == {"mounts": 2}


# ── showing ────────────────────────────────────────────────────────────────────────────────────────


def test_publishing_replaces_what_is_between_the_markers_and_nothing_else() -> None:
    page = f"# Title\n\n{tables.BEGIN}\nold\n{tables.END}\n\n## Method\n"
    once = tables.publish(page, "new")
    assert "old" not in once
    assert once.startswith("# Title\n\n")
    assert once.endswith("\n\n## Method\n")
    assert tables.publish(once, "new") == once


@pytest.mark.parametrize(
    "page", ["", tables.BEGIN, f"{tables.END}{tables.BEGIN}", f"{tables.BEGIN}{tables.END}" * 2]
)
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="markers"):
        tables.publish(page, "new")


def test_the_page_in_docs_has_its_markers() -> None:
    tables.publish((ROOT / "docs" / "benchmarks.md").read_text(), "new")


def test_the_page_says_misses_plainly_and_names_what_was_in_force() -> None:
    miss = a_row(bars=[records.Bar(value=1)])
    content = tables.for_page(a_run(miss))
    assert "**miss**" in content
    assert "Missed:" in content
    assert "all of it" in content
    assert "a → b" in content


def test_a_noisy_page_says_that_it_is_noisy() -> None:
    run = a_run(a_row())
    run.objections = ["make was busy"]
    assert "Not a quiet run" in tables.for_page(run)
    run.objections = []
    assert "Not a quiet run" not in tables.for_page(run)


def test_the_plot_shows_times_as_multiples_of_the_floor() -> None:
    floor = a_row("row1", subject=series("floor", 2.0))
    ours = a_row(
        bars=[records.Bar(value=4, of="floor")], beside=[series("floor", 2.0), series("bwrap", 10.0)]
    )
    memory = a_row("row7a", subject=records.Series(name="cloche", unit="MiB", samples=[2.0]))
    run = a_run(floor, ours, memory)
    assert plots.marks(run) == [
        plots.Mark("work", 3.0, 4.0, 4.0, True),
        plots.Mark("· bwrap", 5.0, 5.0, None, False),
    ]
    assert plots.svg(run).count("<circle") == 2


def test_a_plot_without_a_floor_is_still_a_picture() -> None:
    assert plots.svg(a_run(a_row())).startswith("<svg")


def test_runs_survive_their_file(tmp_path: Path) -> None:
    path = str(tmp_path / "run.json")
    run = a_run(a_row(bars=[records.Bar(value=1)]))
    records.write(run, path)
    assert records.read(path) == run
    assert json.loads(Path(path).read_text())["rows"][0]["verdict"] == "miss"


# ── the command ────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert command.chosen("row10, row3") == ["row3", "row10"]
    assert command.chosen("row1") == ["row2"]
    assert command.chosen("") == list(command.ROWS)


def test_an_unknown_row_is_named() -> None:
    with pytest.raises(SystemExit, match="row99"):
        command.chosen("row99")


def test_a_quick_run_of_one_row_leaves_samples_and_is_not_publishable() -> None:
    name = f"test-{os.getpid()}"
    kept = ROOT / "bench" / "results" / "local" / f"{name}.json"
    arguments = [sys.executable, "-m", "bench", "--quick", "--only", "row3", "--name", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stderr
        run = records.read(str(kept))
    finally:
        kept.unlink(missing_ok=True)
    assert [row.key for row in run.rows] == ["row3"]
    assert run.rows[0].subject.n == 50
    assert [s.n for s in run.rows[0].beside] == [50]
    assert run.rows[0].held
    assert run.objections
    assert "exec of `true`" in done.stdout
