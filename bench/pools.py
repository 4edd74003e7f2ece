"""Rows 20 to 24: claims. What starts and stops each clock is docs/guides/benchmarking.md's TFFI, through the synchronous SDK.

Everything that a claim can bind is bound: a variable, a file, network rules. The pool refills beside the measurement, as it does for
a user; between two samples it gets a moment, because a caller who claims back to back is row 23's.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import cloche
from bench import baselines, noise, records, setup, throughput
from cloche import model
from cloche.linux import processes

_BOUND = {"env": {"TASK": "7"}, "files": {"task/in.txt": "hello"}, "allow": ["example.org"]}
_FIRST = ["/bin/cat", "task/in.txt"]


def first_output(bench: setup.Bench) -> list[records.Row]:
    """Rows 20 and 20b."""
    whole = records.Row(
        key="row20", name="warm claim → first output (TFFI): env, a file and network rules bound",
        boundary="`pool.claim(env, files, allow)` is called → first byte of `/bin/cat task/in.txt` is in the caller's hands",
        subject=records.Series(name="cloche"), beside=[records.Series(name="exec alone"), records.Series(name="subprocess")],
        bars=[records.Bar(value=3)], anchor="agentkernel 195 ms; CubeSandbox 48 ms; best public time to interactive 42 ms",
    )  # fmt: skip
    plain = records.Row(
        key="row20b", name="the same with nothing bound", boundary="`pool.claim()` is called → first byte of `/bin/echo`",
        subject=records.Series(name="cloche"), beside=whole.beside, anchor="as above",
    )  # fmt: skip
    with cloche.Pool("base", size=12, name="bench") as pool, setup.sandbox() as box:
        _warm_up(pool)
        contestants = (
            (whole.subject, lambda: _claimed(pool, whole, _BOUND, _FIRST)),
            (plain.subject, lambda: _claimed(pool, plain, {}, baselines.ECHO)),
            (whole.beside[0], setup.timed(lambda: box.exec(["true"]))),
            (whole.beside[1], lambda: baselines.first_byte(baselines.ECHO)),
        )
        setup.interleave(bench.count(300), *contestants)
        info = pool.info()
    whole.notes.append(
        f"p99 {whole.subject.p99:.1f} ms (bar 8 ms); {info.hits} of {info.hits + info.misses} claims were warm; "
        f"the claim itself p50 {info.claim.p50_ms:.2f} ms"
    )
    return [whole, plain]


def _warm_up(pool: Any) -> None:
    pool.wait_ready(timeout_s=120)
    for _ in range(setup.WARM_UP):
        with pool.claim(**_BOUND) as box:
            box.exec(["true"], check=True)
    pool.wait_ready(timeout_s=120)


def _claimed(pool: Any, row: records.Row, bound: dict[str, Any], command: list[str]) -> float:
    before = time.perf_counter()
    box = pool.claim(**bound, timeout_s=None)
    events = box.exec_stream(command)
    next(event for event in events if isinstance(event, model.Output))
    taken = (time.perf_counter() - before) * 1e3
    for _ in events:
        pass
    assert box.claim.warm, box.claim.cold_reason
    if not row.held:
        setup.hold(row, box.info())
    box.delete()
    pool.wait_ready(timeout_s=60)
    return taken


def first_result(bench: setup.Bench) -> list[records.Row]:
    """Row 21."""
    row = records.Row(
        key="row21", name="warm claim → first `run_code` result, context pre-started",
        boundary='`pool.claim(env)` is called → result of `run_code("1+1")` returned',
        subject=records.Series(name="cloche"), bars=[records.Bar(value=4)], anchor="–",
    )  # fmt: skip
    with cloche.Pool("python", size=8, name="bench-code") as pool:
        pool.wait_ready(timeout_s=120)

        def subject() -> float:
            before = time.perf_counter()
            box = pool.claim(env={"TASK": "7"}, timeout_s=None)
            assert box.run_code("1+1").text == "2"
            taken = (time.perf_counter() - before) * 1e3
            assert box.claim is not None
            assert box.claim.warm, box.claim.cold_reason
            if not row.held:
                setup.hold(row, box.info())
            box.delete()
            pool.wait_ready(timeout_s=60)
            return taken

        setup.interleave(bench.count(200), (row.subject, subject))
    return [row]


def burst(bench: setup.Bench) -> list[records.Row]:
    """Row 22."""
    count = 20 if bench.quick else 100
    row = records.Row(
        key="row22", name=f"burst of {count} claims on a pool of {count}, all answered",
        boundary="the first claim is called → the last is answered",
        subject=records.Series(name="cloche"), bars=[records.Bar(value=250)],
        anchor="ComputeSDK burst median 351 ms; OpenSandbox 0.92 s",
    )  # fmt: skip
    ran = records.Series(name="and each ran `true`")
    row.beside = [ran]

    async def once(pool: Any) -> None:
        started = time.perf_counter()

        async def one(number: int) -> Any:
            box = await pool.claim(env={"N": str(number)}, timeout_s=None)
            taken = (time.perf_counter() - started) * 1e3
            await box.exec(["true"], check=True)
            return box, taken

        done = await asyncio.gather(*(one(number) for number in range(count)))
        ran.add((time.perf_counter() - started) * 1e3)
        row.subject.add(max(taken for _, taken in done))
        assert all(box.claim.warm for box, _ in done)
        if not row.held:
            setup.hold(row, await done[0][0].info())
        await asyncio.gather(*(box.delete() for box, _ in done))

    async def run() -> None:
        async with cloche.AsyncPool("base", size=count, name="bench-burst") as pool:
            for _ in range(3 if bench.quick else 10):
                await pool.wait_ready(timeout_s=120)
                await once(pool)

    with throughput.two_cores():
        asyncio.run(run())
        setup.close_engine()
    return [row]


def sustained(bench: setup.Bench) -> list[records.Row]:
    """Row 23."""
    rate, seconds = (50, 2.0) if bench.quick else (150, 30.0)
    row = records.Row(
        key="row23", name=f"{rate} claims a second for {seconds:g} s, the pool refilling: each claim",
        boundary="a claim is due → it is answered (exec and delete follow)", subject=records.Series(name="cloche"),
        bars=[records.Bar(value=50)], anchor="agent-sandbox 151/s at best",
    )  # fmt: skip
    failed: list[BaseException] = []

    async def one(pool: Any, due: float) -> None:
        try:
            box = await pool.claim(env={"N": "1"}, timeout_s=None)
            row.subject.add((time.perf_counter() - due) * 1e3)
            await box.exec(["true"], check=True)
            await box.delete()
        except Exception as problem:
            failed.append(problem)

    async def run() -> Any:
        async with cloche.AsyncPool("base", size=100, name="bench-rate") as pool:
            await pool.wait_ready(timeout_s=120)
            async with cloche.AsyncSandbox() as box:
                setup.hold(row, await box.info())
            start = time.perf_counter()
            tasks = []
            for number in range(int(rate * seconds)):
                due = start + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(one(pool, due)))
            await asyncio.gather(*tasks)
            return await pool.info()

    with throughput.two_cores():
        info = asyncio.run(run())
        setup.close_engine()
    asked = info.hits + info.misses
    row.notes.append(
        f"p99 {row.subject.p99:.0f} ms (bar 50 ms); {len(failed)} failed; {info.hits} of {asked} claims were warm"
    )
    return [row]


def idle(bench: setup.Bench) -> list[records.Row]:
    """Row 24."""
    count, seconds = (50, 3.0) if bench.quick else (500, 20.0)
    row = records.Row(
        key="row24", name=f"a pool of {count} idle sandboxes, processor time",
        boundary=f"time of the engine, the launcher and all sandboxes over {seconds:g} s",
        subject=records.Series(name="cloche", unit="%"), bars=[records.Bar(value=1, unit="%")], anchor="–",
    )  # fmt: skip
    with cloche.Pool("base", size=count, name="bench-idle") as pool:
        pool.wait_ready(timeout_s=300)
        with pool.claim() as box:
            setup.hold(row, box.info())
        pool.wait_ready(timeout_s=60)
        time.sleep(3)
        before, began = _spent_ms(), time.perf_counter()
        time.sleep(seconds)
        row.subject.add((_spent_ms() - before) / (time.perf_counter() - began) / 10)
    return [row]


def _spent_ms() -> float:
    return processes.tree_cpu_ms([os.getpid(), *noise.tree(noise.look(), os.getpid())])
