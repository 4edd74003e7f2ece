"""Row 8: how many sandboxes a second are made, used for one command and deleted, sustained.

One process, one engine, two cores: the client, the engine, the launcher and the sandboxes share them. The engine is
tried at several degrees of concurrency, from threads through the synchronous SDK and from tasks through the asynchronous
one; the best is the figure, measured again for the full time, and the others are noted.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cloche
from bench import records, setup

Load = Callable[[float], list[float]]
_LEVELS = (2, 4, 8, 16)


def sustained(bench: setup.Bench) -> list[records.Row]:
    """Row 8."""
    row = records.Row(
        key="row8", name="create, exec, delete, sustained on 2 cores",
        boundary="cycles completed per second, counted over each second",
        subject=records.Series(name="cloche", unit="/s"), bars=[records.Bar(value=200, unit="/s", at_least=True)],
        anchor="Firecracker 5 per core and second",
    )  # fmt: skip
    with two_cores(), cloche.Sandbox() as box:
        setup.hold(row, box.info())
        trial_s, whole_s = (0.5, 1.0) if bench.quick else (3.0, 20.0)
        rates = {name: rate(load(trial_s), trial_s) for name, load in _loads().items()}
        best = max(rates, key=lambda name: rates[name])
        ends = _loads()[best](whole_s)
        for second in range(max(1, int(whole_s))):
            row.subject.add(float(sum(1 for end in ends if second <= end < second + 1)))
    tried = ", ".join(f"{name} {value:.0f}" for name, value in rates.items())
    row.notes += [f"best: {best}, {rate(ends, whole_s):.0f}/s over {whole_s:g} s", f"tried (/s): {tried}"]
    setup.close_engine()
    return [row]


def rate(ends: list[float], seconds: float) -> float:
    return sum(1 for end in ends if end <= seconds) / seconds


def _loads() -> dict[str, Load]:
    found: dict[str, Load] = {}
    for level in _LEVELS:
        found[f"{level} threads"] = functools.partial(_threads, level)
        found[f"{level} tasks"] = functools.partial(_run_tasks, level)
    return found


def _run_tasks(level: int, seconds: float) -> list[float]:
    return asyncio.run(_tasks(level, seconds))


def _threads(level: int, seconds: float) -> list[float]:
    ends: list[float] = []
    start = time.perf_counter()

    def work() -> None:
        while time.perf_counter() - start < seconds:
            with cloche.Sandbox() as box:
                box.exec(["true"], check=True)
            ends.append(time.perf_counter() - start)

    workers = [threading.Thread(target=work) for _ in range(level)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return ends


async def _tasks(level: int, seconds: float) -> list[float]:
    ends: list[float] = []
    start = time.perf_counter()

    async def work() -> None:
        while time.perf_counter() - start < seconds:
            async with cloche.AsyncSandbox() as box:
                await box.exec(["true"], check=True)
            ends.append(time.perf_counter() - start)

    await asyncio.gather(*(work() for _ in range(level)))
    return ends


@contextmanager
def two_cores() -> Iterator[None]:
    """Keep this process, and what it starts from now on, to two of the machine's cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
