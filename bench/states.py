"""Rows 30 to 34: what is kept, and what stands still.

A disk of 100 MiB: random bytes in 10 files (and, beside it, in 2,500), in one sandbox. *Settled* means that the kernel has
written them to the sandbox's disk image before the clock starts, as it does by itself within half a minute; *just written*
that it has not. Both end with a snapshot that is on the shelf. Nothing is forced to the platter in either case.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from typing import Any

import cloche
from bench import density, records, setup
from cloche.linux import processes

_MIB = 1 << 20
_WRITE = "rm -rf d; mkdir d; for i in $(seq {files}); do head -c {size} /dev/urandom > d/$i; done"
_BARE = """
import os, time
began = time.perf_counter()
pids, pipes = [], []
for _ in range({count}):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"x")
        os._exit(0)
    os.close(writing)
    pids.append(pid)
    pipes.append(reading)
for reading in pipes:
    os.read(reading, 1)
    os.close(reading)
taken = time.perf_counter() - began
for pid in pids:
    os.waitpid(pid, 0)
taken * 1e3
"""


def waking(bench: setup.Bench) -> list[records.Row]:
    """Row 30."""
    row = records.Row(
        key="row30", name="waking a paused sandbox by a request, on top of the request",
        boundary="`exec([\"true\"])` on a paused sandbox, less the same on a running one right after it",
        subject=records.Series(name="cloche"), beside=[records.Series(name="exec alone")], bars=[records.Bar(value=3)],
        anchor="Blaxel resumes within 25 ms",
    )  # fmt: skip
    with setup.sandbox() as box:
        setup.hold(row, box.info())
        for _ in range(bench.count(300)):
            box.suspend()
            asleep, awake = (setup.timed(lambda: box.exec(["true"]))() for _ in range(2))
            row.subject.add(asleep - awake)
            row.beside[0].add(awake)
    return [row]


def snapshots(bench: setup.Bench) -> list[records.Row]:
    """Rows 31 and 32, with 10 files and with 2,500."""
    rows = []
    for suffix, files in (("", 10), ("b", 2500)):
        bars = [[records.Bar(value=100)], [records.Bar(value=50)]] if not suffix else [[], []]
        taking = records.Row(
            key=f"row31{suffix}", name=f"snapshot of 100 MiB in {files:,} files", boundary="`snapshot()` is called → it is on the shelf",
            subject=records.Series(name="cloche"), beside=[records.Series(name="just written")], bars=bars[0],
            anchor="E2B pauses 1 GiB of memory in about 4 s", notes=["the subject's files are settled"],
        )  # fmt: skip
        back = records.Row(
            key=f"row32{suffix}", name=f"restore of 100 MiB in {files:,} files",
            boundary="`restore()` is called → the sandbox is ready, with the snapshot's files and no process",
            subject=records.Series(name="cloche"), beside=[records.Series(name="taken just before")], bars=bars[1],
            notes=["a loop device waits until its image is on the disk, so a snapshot that is a second old comes back faster"],
        )  # fmt: skip
        _keep_and_restore(bench, taking, back, files)
        rows += [taking, back]
    return rows


def _keep_and_restore(bench: setup.Bench, taking: records.Row, back: records.Row, files: int) -> None:
    for _ in range(bench.count(10)):
        with setup.sandbox() as box:
            setup.hold(taking, box.info())
            setup.hold(back, box.info())
            box.exec(_WRITE.format(files=files, size=100 * _MIB // files), check=True, timeout_s=120)
            fresh = _took(taking.beside[0], box)
            settled = _took(taking.subject, box)
            _restored(back.beside[0], box, settled)
            time.sleep(1)  # by then the kernel has written both to the disk
            _restored(back.subject, box, fresh)
            for snapshot in (fresh, settled):
                snapshot.delete()


def _took(series: records.Series, box: Any) -> Any:
    before = time.perf_counter()
    made = box.snapshot()
    series.add((time.perf_counter() - before) * 1e3)
    return made


def _restored(series: records.Series, box: Any, snapshot: Any) -> None:
    before = time.perf_counter()
    box.restore(snapshot)
    series.add((time.perf_counter() - before) * 1e3)


def copies(bench: setup.Bench) -> list[records.Row]:
    """Row 33."""
    count = 10 if bench.quick else 100
    row = records.Row(
        key="row33", name=f"`context.fork({count})` with numpy loaded", boundary="`fork()` is called → every copy has said that it is ready",
        subject=records.Series(name="cloche"), beside=[records.Series(name="bare fork loop")],
        bars=[records.Bar(value=1.5, of="bare fork loop")],
        anchor="", notes=["the bare loop runs in the very same context: fork, and each child writes a byte"],
    )  # fmt: skip
    archive = _numpy(bench)
    if archive is None:
        return []
    with cloche.Sandbox(timeout_s=None, memory_mib=4096, pids=1000, cpus=os.cpu_count() or 1) as box:
        setup.hold(row, box.info())
        box.files.upload(".", archive)
        context = box.contexts.create()
        context.run(
            "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; import sys; sys.path.insert(0, '/workspace')"
        )
        if (
            failed := context.run("import numpy; numpy.ones((50, 50)) @ numpy.ones((50, 50))").error
        ) is not None:
            bench.skip("row33", f"numpy does not load: {failed.value}")
            return []
        for _ in range(bench.count(20)):
            row.beside[0].add(float(context.run(_BARE.format(count=count)).text or "nan"))
            before = time.perf_counter()
            made = context.fork(count)
            row.subject.add((time.perf_counter() - before) * 1e3)
            for copy in made:
                copy.delete()
    return [row]


def _numpy(bench: setup.Bench) -> bytes | None:
    """numpy as an archive, for whichever interpreter the sandbox has; None where it cannot be had."""
    place = os.path.join(bench.scratch, "numpy")
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    for pip in ([sys.executable, "-m", "pip"], [shutil.which("pip") or "pip"], [python, "-m", "pip"]):
        version = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True)  # fmt: skip
        wanted = ["--only-binary", ":all:", "--python-version", version.stdout.strip(), "--target", place]
        try:
            done = subprocess.run(
                [*pip, "install", "-q", *wanted, "numpy"], check=False, capture_output=True, timeout=300
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            body = io.BytesIO()
            with tarfile.open(fileobj=body, mode="w") as archive:
                for name in ("numpy", "numpy.libs"):
                    archive.add(os.path.join(place, name), name)
            return body.getvalue()
    bench.skip("row33", "numpy cannot be installed here")
    return None


def paused(bench: setup.Bench) -> list[records.Row]:
    """Row 34."""
    count = 50 if bench.quick else 1000
    row = records.Row(
        key="row34", name=f"{count:,} paused sandboxes, memory of all",
        boundary="fall of MemAvailable, engine and kernel included, 2 s after the last was paused",
        subject=records.Series(name="cloche", unit="MiB"), bars=[records.Bar(value=2.5 * count * 1.024, unit="MiB")],
        anchor="Firecracker's monitor ≤ 5 MiB each",
    )  # fmt: skip
    boxes: list[Any] = []
    try:
        boxes.append(density._used())
        setup.hold(row, boxes[0].info())
        before = density._available_mib()
        while len(boxes) < count:
            boxes.append(density._used())
            boxes[-1].suspend()
        time.sleep(2)
        row.subject.add(before - density._available_mib())
        held = [processes.tree_pss_mib(pids) for pids in density.sandbox_trees()]
        row.notes.append(f"{sum(held):.0f} MiB of it proportional memory of {len(held)} sandboxes")
    except cloche.ClocheError as problem:
        bench.skip("row34", f"after {len(boxes)} sandboxes: {problem}")
        return []
    finally:
        for box in boxes:
            box.delete()
        setup.close_engine()
    return [row]
