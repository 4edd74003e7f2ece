"""Row 9: what thousands of runs leave behind, which must be nothing.

Counted twice: while the engine still lives, against a count taken after its first runs (what grows with the number of
runs is a leak); and after it has closed, against the state before it started. Only what is ours is counted, by
parentage, by the owner in a cgroup's name, and by the state directory, so that a busy machine does not matter.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import cloche
from bench import noise, records, setup
from cloche.linux import cgroups, processes

SETTLE_S = 10.0
_AT_ONCE = 8


def leftovers(bench: setup.Bench) -> list[records.Row]:
    """Row 9."""
    runs = 10_000 if bench.full else bench.count(500)
    row = records.Row(
        key="row9", name=f"left behind by {runs:,} runs", boundary="counted before the first and after the last run, and after the engine has closed",
        subject=records.Series(name="cloche", unit="things"), bars=[records.Bar(value=0, unit="things")], anchor="–",
    )  # fmt: skip
    setup.close_engine()
    before = count(bench.home)
    _run(40, row)
    _calm()
    early = settle(lambda: count(bench.home))
    assert early["processes"], "the launcher was not found, so its descriptors and mounts are not counted"
    open_early = opened()
    _run(runs, row)
    _calm()
    late = settle(lambda: count(bench.home), until=lambda now: not grown(early, now))
    more = opened() - open_early
    setup.close_engine()
    after = settle(lambda: count(bench.home), until=lambda now: not grown(before, now))
    left = {f"{name} (engine open)": n for name, n in grown(early, late).items()}
    # The engine's first start makes its store and its template once; they stay, and are counted from `early` on.
    left |= {f"{name} (engine closed)": n for name, n in grown(before, after).items() if name != "files"}
    if after["files"] > early["files"]:
        left["files (engine closed)"] = after["files"] - early["files"]
    row.subject.add(float(sum(left.values())))
    if "descriptors (engine open)" in left:
        row.notes.append("more of " + ", ".join(f"{kind} ({n})" for kind, n in more.items()))
    row.notes += [f"{n} {name}" for name, n in left.items()] or ["0 " + ", ".join(early)]
    return [row]


def _run(runs: int, row: records.Row) -> None:
    """Create, exec and delete, some at a time; every tenth is paused, killed by a time-out, or leaves an orphan."""
    boxes = []
    for number in range(runs):
        box = cloche.Sandbox(timeout_s=None)
        boxes.append(box)
        if not row.held:
            setup.hold(row, box.info())
        _use(box, number)
        if len(boxes) == _AT_ONCE:
            while boxes:
                boxes.pop().delete()
    while boxes:
        boxes.pop().delete()


def _calm() -> None:
    """A few unhurried runs: the launcher keeps more embryos ready after a rush, and fewer again when it is over."""
    for _ in range(30):
        with cloche.Sandbox():
            time.sleep(0.03)


def _use(box: cloche.Sandbox, number: int) -> None:
    if number % 30 == 0:
        box.exec(["sleep", "60"], timeout_s=0.01)
    elif number % 30 == 10:
        box.exec("sleep 60 & sleep 60 & echo started")
    elif number % 30 == 20:
        box.files.write("note", "x" * 100_000)
    else:
        box.exec(["true"], check=True)


def count(home: str) -> dict[str, int]:
    """All that a run could leave: processes, mounts, cgroups, descriptors, files, loop devices."""
    noise.reap()
    me = os.getpid()
    ours, launchers = _ours()
    return {
        "processes": len(ours),
        "mounts": sum(_lines(f"/proc/{pid}/mountinfo") for pid in (me, *launchers)),
        "cgroups": len(_groups()),
        "descriptors": sum(_entries(f"/proc/{pid}/fd") for pid in (me, *launchers)),
        "files": sum(len(files) for _, _, files in os.walk(home)),
        "loop devices": sum(
            1 for path in glob.glob("/sys/block/loop*/loop/backing_file") if _names(path, home)
        ),
    }


def _ours() -> tuple[set[int], list[int]]:
    """The processes below this one, and those of them that are launchers: an engine's child that has children is one, which we know as
    ours because we are a subreaper."""
    me = os.getpid()
    shot = noise.look()
    ours = noise.tree(shot, me) - {me}
    parents = {shot.processes[pid].parent for pid in ours}
    return ours, [pid for pid in ours if pid in parents and shot.processes[pid].parent == me]


def opened() -> Counter[str]:
    """What the descriptors that are counted lead to, numbers aside: a leak is easier to find by its kind."""
    found: Counter[str] = Counter()
    for pid in (os.getpid(), *_ours()[1]):
        for link in glob.glob(f"/proc/{pid}/fd/*"):
            with suppress(OSError):
                found[re.sub(r"\d+", "N", os.readlink(link))] += 1
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - n for name, n in before.items() if after[name] > n}


def settle(
    look: Callable[[], dict[str, int]], until: Callable[[dict[str, int]], bool] | None = None
) -> dict[str, int]:
    """A count that has stopped changing (or is as wanted): endings finish in the background, within seconds."""
    deadline = time.monotonic() + SETTLE_S
    last = look()
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = look()
        if until(now) if until is not None else now == last:
            return now
        last = now
    return last


def _groups() -> list[str]:
    mine = f"cloche-{os.getpid()}-{processes.start_time(os.getpid())}-"
    return [group.name for group in cgroups.detect().sweep(mine)]


def _lines(path: str) -> int:
    try:
        with open(path) as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def _entries(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


def _names(path: str, home: str) -> bool:
    try:
        with open(path) as file:
            return file.read().startswith(home)
    except OSError:
        return False
