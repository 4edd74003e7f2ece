"""Row 7: the memory of idle sandboxes, 100 and 1,000 at once.

Proportional set size of every process of a sandbox: pages that are shared with the launcher are divided among those who
share them, so the figure falls a little as sandboxes are added, and the sum over all is what they really take. Kernel
memory (namespaces, cgroups, page tables, file systems) is in no PSS; the fall of MemAvailable, which includes it and
everything of the engine, is noted beside. Each sandbox has run one command before: idle is not untouched.
"""

from __future__ import annotations

import os
import time
from typing import Any

import cloche
from bench import noise, records, setup
from cloche.linux import processes

_MIB = 1024


def memory(bench: setup.Bench) -> list[records.Row]:
    """Rows 7a and 7b."""
    rows = []
    for key, count in (("row7a", 100), ("row7b", 1000)):
        rows += _live(bench, key, count // 10 if bench.quick else count)
    return rows


def _live(bench: setup.Bench, key: str, count: int) -> list[records.Row]:
    row = records.Row(
        key=key, name=f"idle sandbox, memory, {count:,} live at once", boundary="PSS of all its processes, 2 s after its only command",
        subject=records.Series(name="cloche", unit="MiB"), bars=[records.Bar(value=2.5, unit="MiB")],
        anchor="Firecracker's monitor ≤ 5 MiB; CubeSandbox ≈ 25 MB",
    )  # fmt: skip
    boxes: list[Any] = []
    try:
        _fill(row, boxes, count)
    except cloche.ClocheError as problem:
        bench.skip(key, f"after {len(boxes)} sandboxes: {problem}")
        return []
    finally:
        before = time.perf_counter()
        for box in boxes:
            box.delete()
        row.notes.append(f"{time.perf_counter() - before:.1f} s to delete them")
        setup.close_engine()
    return [row]


def _fill(row: records.Row, boxes: list[Any], count: int) -> None:
    boxes.append(_used())
    setup.hold(row, boxes[0].info())
    available = _available_mib()
    before = time.perf_counter()
    while len(boxes) < count:
        boxes.append(_used())
    taken = time.perf_counter() - before
    time.sleep(2)
    for pids in sandbox_trees():
        row.subject.add(sum(processes.pss_kib(pid) or 0 for pid in pids) / _MIB)
    if row.subject.n != count:
        raise LookupError(f"{row.subject.n} sandboxes were found in /proc, and {count} were made")
    whole = available - _available_mib()
    row.notes += [
        f"{taken:.1f} s to make them and run one command in each",
        f"{whole:.0f} MiB less memory available, {whole / max(1, count - 1):.1f} MiB each, with kernel and engine",
    ]


def _used() -> Any:
    box = cloche.Sandbox(timeout_s=None)
    box.exec(["true"], check=True)
    return box


def sandbox_trees() -> list[list[int]]:
    """The processes of each live sandbox of ours. Embryos, which have no filter yet, are not counted."""
    shot = noise.look()
    ours = noise.tree(shot, os.getpid())
    firsts = [pid for pid in ours if _is_filtered(pid) and not _is_filtered(shot.processes[pid].parent)]
    return [sorted(noise.tree(shot, pid)) for pid in firsts]


def _is_filtered(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            return any(line.split() == ["Seccomp:", "2"] for line in file)
    except OSError:
        return False


def _available_mib() -> float:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / _MIB
