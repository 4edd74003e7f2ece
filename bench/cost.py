"""Row 8b: the processor time of one create, exec, delete, by who spends it. It explains row 8.

Wall time on a shared machine says little; processor time says what there is to save. Each sample is the mean over one
batch of cycles from two threads: the client with its engine, the launcher, the sandboxes (with their commands, from birth
to reaping), and the kernel's own threads, which free namespaces, loop devices and cgroups afterwards. The last are the
whole machine's, so they are noise where somebody else works; they are left out where /proc does not show them.
"""

from __future__ import annotations

import glob
import os
import threading
import time
from contextlib import suppress

import cloche
from bench import noise, records, setup, throughput

_THREADS, _CYCLES = 2, 25
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_SETTLE_S = 0.3  # what deletion leaves to the kernel belongs to the batch


def per_cycle(bench: setup.Bench) -> list[records.Row]:
    """Row 8b."""
    names = ("engine and client", "launcher", "sandboxes", "kernel threads")
    row = records.Row(
        key="row8b", name="create, exec, delete: processor time", boundary="processor time of all processes, per cycle",
        subject=records.Series(name="all"), beside=[records.Series(name=name) for name in names],
    )  # fmt: skip
    with throughput.two_cores(), cloche.Sandbox() as box:
        setup.hold(row, box.info())
        _batch()
        for _ in range(bench.count(20)):
            before = _spent()
            _batch()
            time.sleep(_SETTLE_S)
            parts = [(now - then) / (_THREADS * _CYCLES) for now, then in zip(_spent(), before, strict=True)]
            for series, part in zip(row.beside, parts, strict=True):
                series.add(part)
            row.subject.add(sum(parts))
    setup.close_engine()
    return [row]


def _batch() -> None:
    def work() -> None:
        for _ in range(_CYCLES):
            with cloche.Sandbox() as box:
                box.exec(["true"], check=True)

    workers = [threading.Thread(target=work) for _ in range(_THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _spent() -> tuple[float, float, float, float]:
    """Milliseconds so far, in the order of the series."""
    launchers = _launchers()
    return (
        time.process_time() * 1e3,
        sum(_run_ms(pid) for pid in launchers),
        sum(_reaped_ms(pid) for pid in launchers),
        sum(_run_ms(pid) for pid in _kernel_threads()),
    )


def _launchers() -> list[int]:
    """Ours, because we are a subreaper."""
    me, shot = os.getpid(), noise.look()
    parents = {process.parent for process in shot.processes.values()}
    return [pid for pid, process in shot.processes.items() if process.parent == me and pid in parents]


def _kernel_threads() -> list[int]:
    return [pid for pid, process in noise.look().processes.items() if process.parent == 2]


def _run_ms(pid: int) -> float:
    total = 0
    for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
        with suppress(OSError), open(path) as file:
            total += int(file.read().split()[0])
    return total / 1e6


def _reaped_ms(pid: int) -> float:
    """Of the children it has waited for, and theirs."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) * _TICK_MS
