"""Whether the machine was ours while we measured.

Nothing here changes the machine (no governor, no pinning, no priorities): the figures are those a user would get. We
only look. CPU time is read per process at both ends of a row, with that of its dead children, so that a loop of
short-lived processes shows as its parent. Ours are the descendants of this process, which is a subreaper for that
reason, and the kernel's own threads, which work for us as for anybody.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

FOREIGN_SHARE = 0.20  # of one CPU; more than that by one other process spoils a row
_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    started: int
    cpu_s: float


class Look(NamedTuple):
    at: float
    processes: dict[int, Process]


def look() -> Look:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := _process(int(entry))) is not None:
            found[process.pid] = process
    return Look(time.monotonic(), found)


def _process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            head, _, tail = file.read().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    ticks = sum(int(value) for value in fields[11:15])  # utime, stime, and those of reaped children
    return Process(pid, int(fields[1]), head.partition("(")[2], int(fields[19]), ticks / _TICKS)


def foreign(before: Look, after: Look, *, me: int | None = None, least: float = FOREIGN_SHARE) -> list[str]:
    """The processes outside our tree that used more than `least` of one CPU between two looks."""
    elapsed = after.at - before.at
    if elapsed < 0.1:
        return []  # a clock tick is 10 ms: too short to say
    ours = {pid for shot in (before, after) for pid in tree(shot, me or os.getpid())}
    already = _spent(before, after)
    found = []
    for process in after.processes.values():
        if process.pid in ours or 2 in (process.pid, process.parent):
            continue
        share = (process.cpu_s - already.get(process.pid, 0.0)) / elapsed
        if share > least:
            found.append((share, f"{process.name} (pid {process.pid}) used {share:.0%} of a CPU"))
    return [words for _, words in sorted(found, reverse=True)]


def _spent(before: Look, after: Look) -> dict[int, float]:
    """CPU time that each process had to its name before: its own, and that of children which it has reaped since."""
    found: dict[int, float] = {}
    for process in before.processes.values():
        heir: Process | None = process
        while heir is not None and not _lives(heir, after):
            heir = before.processes.get(heir.parent)
        if heir is not None:
            found[heir.pid] = found.get(heir.pid, 0.0) + process.cpu_s
    return found


def _lives(process: Process, shot: Look) -> bool:
    later = shot.processes.get(process.pid)
    return later is not None and later.started == process.started


def reap() -> None:
    """Bury what became ours by being orphaned (launchers, bwrap's inner processes). Not while a child is waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def tree(shot: Look, root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for process in shot.processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, waiting = set(), [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children.get(pid, [])
    return found


def weather() -> dict[str, Any]:
    """The load average and CPU pressure, as the kernel words them."""
    return {"load": _read("/proc/loadavg"), "pressure": _read("/proc/pressure/cpu").splitlines()[:1]}


def host() -> dict[str, Any]:
    """What a reader needs to know about the machine; nothing that names it."""
    uname = os.uname()
    model = [
        line.partition(":")[2].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    memory = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")]
    return {
        "kernel": uname.release.split("-")[0], "machine": uname.machine, "cpus": os.cpu_count(),
        "cpu": model[0] if model else "", "memory_mib": int(memory[0]) // 1024 if memory else 0,
        "python": ".".join(map(str, sys.version_info[:3])), "root": os.geteuid() == 0,
    }  # fmt: skip


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
