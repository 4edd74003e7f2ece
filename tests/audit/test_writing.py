"""Writers: their segments, their deaths, full disks, clocks that jump."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cloche import errors, events
from cloche.audit import reading, writing
from tests.audit.conftest import Bench, started

ROUNDS = int(os.environ.get("CLOCHE_FAULT_ROUNDS", "8"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def read(bench: Bench, **wanted: object) -> list[dict[str, Any]]:
    return list(reading.read(str(bench.directory), reading.Wanted(**wanted)))  # type: ignore[arg-type]


def test_a_line_has_what_an_audit_asks_for(bench):
    bench.whole(1)
    line = lines_of(bench.segments[0])[1]
    assert list(line) == ["seq", "time", "actor", "sandbox", "kind", "outcome", "data", "prev", "hash"]
    assert (line["seq"], line["actor"], line["sandbox"], line["kind"]) == (1, "uid:0", "k3", "started")
    assert line["data"] == {"execution": "e0", "command": "echo 0", "user": "user", "context": None}


def test_nothing_is_there_before_the_first_event(bench):
    log = bench.log()
    assert not log.flush()
    log.close()
    assert not bench.directory.exists()


def test_all_is_for_the_owner_alone(bench):
    bench.whole(2)
    for path in (bench.directory, bench.home / "keys"):
        assert path.stat().st_mode & 0o777 == 0o700
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in path.iterdir())


def test_a_key_that_others_may_read_is_not_used(bench):
    bench.whole(1)
    (bench.home / "keys/audit.key").chmod(0o644)
    log = bench.log("2:2")
    bench.write(log, 1)
    log.close()
    assert "others may read it" in (log.problem or "")
    assert [f.kind for f in bench.verify().findings] == ["unsigned"]
    (bench.home / "keys/audit.key").chmod(0o600)
    assert len(bench.log("3:3").recover()) == 1
    assert bench.verify().findings == []


def test_lines_are_there_before_anything_is_closed(bench):
    log = bench.log()
    bench.write(log, 3)
    assert [line["data"]["command"] for line in read(bench)] == ["echo 0", "echo 1", "echo 2"]
    (note,) = bench.verify().findings
    assert note.kind == "unsigned"
    assert "alive" in note.words
    log.close()


def test_every_thousand_lines_are_signed(bench):
    log = bench.log()
    bench.write(log, writing.SEAL_EVERY)
    bench.write(log, 5)
    report = bench.verify()
    assert report.signed == writing.SEAL_EVERY + 1  # the first line is the log's own
    assert [f.kind for f in report.findings] == ["unsigned"]
    file = bench.segments[0]
    cut = file.read_bytes().splitlines(keepends=True)[: writing.SEAL_EVERY - 1]
    log.close()
    bench.segments[0].write_bytes(b"".join(cut))
    assert bench.verify().damaged


def test_a_full_segment_is_signed_and_another_follows(bench):
    log = bench.log(max_segment_mib=1)
    for number in range(0, 6000, 500):
        bench.write(log, 500, start=number)
    log.close()
    first, second, *_ = bench.segments
    assert first.stat().st_size > 1 << 20
    opened = lines_of(second)[0]
    assert opened["data"]["follows"]["segment"] == first.stem
    assert bench.verify().findings == []
    assert [line["data"]["execution"] for line in read(bench)] == [f"e{n}" for n in range(6000)]


def test_a_segment_is_a_day_old_at_most(bench, monkeypatch):
    log = bench.log()
    bench.write(log, 1)
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    bench.write(log, 1, start=1)
    monkeypatch.undo()
    bench.write(log, 1, start=2)
    log.close()
    assert len(bench.segments) == 2
    assert bench.verify().findings == []


def test_a_clock_that_jumps_changes_nothing_but_the_times(bench):
    now = iter([5e9, 1.0, 7e9, 0.0, -5.0, 3e9, 1e9, 2.0, 4e9, 1e3])
    log = bench.log(clock=lambda: next(now))
    for moment in (1e9, 5.0, 2e9, 0.0, 1e9):
        log.append(events.Paused(sandbox="a", time=moment, actor="x"))
        log.flush()
    log.close()
    assert bench.verify().findings == []
    assert [line["time"] for line in read(bench)] == [1e9, 5.0, 2e9, 0.0, 1e9]


def test_two_writers_at_once_do_not_meet(bench):
    def work(owner: str) -> None:
        log = bench.log(owner, max_segment_mib=1)
        for number in range(0, 4000, 100):
            bench.write(log, 100, start=number)
        log.close()

    threads = [threading.Thread(target=work, args=(f"{n}:{n}",)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = bench.verify()
    assert report.findings == []
    assert len(read(bench)) == 12_000


def test_a_short_writer_leaves_signing_to_the_next(bench):
    bench.whole(3, owner="1:1", seal_later=True)
    assert not (bench.home / "keys").exists()
    assert [f.kind for f in bench.verify().findings] == ["unsigned"]
    assert bench.log("2:2", seal_later=True).recover() == []
    next_one = bench.log("3:3")
    assert len(next_one.recover()) == 1
    assert next_one.recover() == []
    assert bench.verify().findings == []


def test_what_a_live_writer_holds_is_not_taken_from_it(bench):
    log = bench.log("1:1")
    bench.write(log, 3)
    assert bench.log("2:2").recover() == []
    log.close()
    assert bench.verify().findings == []


def test_old_segments_go_and_are_known_to_have_gone(bench):
    bench.whole(3, owner="1:1")
    old = bench.segments[0]
    os.utime(old, (1, 1))
    assert bench.log("2:2", keep_days=None).recover() == []
    assert bench.log("2:2", keep_days=1).recover() == [old.stem]
    assert not old.exists()
    assert bench.verify().findings == []


def test_a_log_that_is_not_wanted_to_stay_open_can_be_closed_twice(bench):
    log = bench.log()
    bench.write(log, 1)
    log.close()
    log.close()
    log.append(started(9))
    assert not log.flush()
    assert bench.verify().findings == []


def test_a_forked_child_does_not_write_its_parents_log(bench):
    log = bench.log()
    bench.write(log, 1)
    child = os.fork()
    if child == 0:
        log.append(started(666))
        log.flush()
        log.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    bench.write(log, 1, start=1)
    log.close()
    assert [line["data"]["execution"] for line in read(bench)] == ["e0", "e1"]
    assert bench.verify().findings == []


@pytest.mark.parametrize("sync", [False, True])
def test_lines_can_be_forced_to_disk(bench, sync, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = bench.log(fsync=sync)
    bench.write(log, 1)
    assert bool(synced) is sync
    log.close()


# ── killed ─────────────────────────────────────────────────────────────────────────────────────────

WRITER = """
import sys
from cloche import events, settings
from cloche.audit import writing
writing.SEAL_EVERY = 50
log = writing.Log(sys.argv[1], settings.Audit(), sys.argv[2])
number = 0
while True:
    for _ in range(int(sys.argv[3])):
        log.append(events.Started(sandbox="k3", time=1, actor="uid:0", execution=f"e{number}", command="true"))
        number += 1
    due = log.flush()
    sys.stdout.write(f"{number}\\n"); sys.stdout.flush()
    if due:
        log.tend()
"""
ROOT = Path(__file__).parents[2]


def test_a_writer_killed_at_any_moment_looks_like_a_crash_and_not_like_a_crime(bench):
    """Every line that was written before the kill is there, and after the next start all of it is signed."""
    told: dict[str, int] = {}
    for round_ in range(ROUNDS):
        batch = random.choice([1, 7, 40])
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(bench.home), f"{round_}:1", str(batch)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert process.stdout is not None
        said = 0
        for _ in range(random.randint(1, 40)):
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        said = max([said, *(int(n) for n in process.stdout.read().split("\n")[:-1])])
        process.wait()
        process.stdout.close()
        told[f"{round_}:1"] = said
        report = bench.verify()
        assert not report.damaged, report.findings
        if round_ % 2:
            next_one = bench.log("9:9")
            assert next_one.recover()
            next_one.close()
            assert not bench.verify().damaged
    bench.log("9:9").recover()
    report = bench.verify()
    assert {f.kind for f in report.findings} <= {"torn"}
    found: dict[str, int] = {}
    for file in bench.segments:
        opened, *rest = [
            json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
        ]
        writer = opened["data"]["writer"]
        found[writer] = found.get(writer, 0) + sum(line["kind"] == "started" for line in rest)
    assert all(found[writer] >= said for writer, said in told.items())


def test_a_line_torn_at_any_byte_is_called_torn(benches):
    for place in range(1, 300, 23):
        bench = benches()
        log = bench.log()
        bench.write(log, 3)
        file = bench.segments[0]
        whole = file.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        os.truncate(file, len(whole) - min(place, len(last) - 1))
        log._segment.leave()
        kinds = [f.kind for f in bench.verify().findings]
        assert kinds == ["torn", "unsigned"]
        assert len(bench.log("2:2").recover()) == 1
        (finding,) = bench.verify().findings
        assert finding.kind == "torn"
        assert not bench.verify().damaged
        os.truncate(bench.segments[0], bench.segments[0].stat().st_size - 1)
        assert bench.verify().damaged  # what was found is signed as found


def test_a_manifest_torn_by_a_crash_is_mended_by_the_next_writer(bench):
    bench.whole(2, owner="1:1")
    with open(bench.manifest, "ab") as file:
        file.write(b'{"n":2,"time":17')
    assert [f.kind for f in bench.verify().findings] == ["torn"]
    bench.whole(2, owner="2:2")
    assert bench.verify().findings == []
    assert any(line.get("cut") == 16 for line in lines_of(bench.manifest))


def test_a_writer_killed_while_it_opens_is_no_crime(bench):
    bench.whole(2)
    (bench.directory / "20260101T000000-7-7-0001.open").write_bytes(b"")
    (note,) = bench.verify().findings
    assert note.kind == "unlisted"
    bench.log("2:2").recover()
    assert bench.verify().findings == []


# ── a full disk ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path: Path):
    """A state directory on a disk of 64 KiB."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    mounted = tmp_path / "small"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(mounted)], check=True)
    try:
        yield Bench(mounted)
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.root
def test_a_full_disk_is_said_and_what_waits_is_written_later(small):
    log = small.log()
    small.write(log, 2)
    ballast = small.home / "ballast"
    fill(ballast)
    size = small.segments[0].stat().st_size
    for number in range(2, 600):
        small.write(log, 1, start=number)
    assert log.problem is not None
    assert "No space left" in log.problem
    log.check()  # the owner was content with a warning
    assert small.segments[0].stat().st_size >= size
    assert small.segments[0].read_bytes().endswith(b"\n")  # no half line stays
    ballast.unlink()
    small.write(log, 1, start=600)
    while_full = [line for line in read(small) if line["kind"] == "administered"]
    assert [line["data"]["operation"] for line in while_full] == ["audit_resumed"] or log.problem is not None
    log.close()
    assert not small.verify().damaged


@pytest.mark.root
def test_where_the_record_is_the_point_nothing_is_done_without_it(small):
    log = small.log(on_failure="refuse")
    small.write(log, 2)
    ballast = small.home / "ballast"
    fill(ballast)
    for number in range(2, 40):
        small.write(log, 1, start=number)
    with pytest.raises(
        errors.ServerUnavailable, match="nothing is done that could not be recorded"
    ) as refused:
        log.check()
    assert refused.value.code == "audit_unavailable"
    ballast.unlink()
    log.check()
    assert [line["data"].get("execution") for line in read(small, kinds=("started",))] == [
        f"e{n}" for n in range(40)
    ]
    log.close()
    assert small.verify().findings == []


@pytest.mark.root
def test_a_disk_that_is_full_from_the_start_leaves_no_half_made_segment(small):
    ballast = small.home / "ballast"
    small.directory.mkdir(mode=0o700)
    fill(ballast)
    log = small.log()
    small.write(log, 1)
    assert log.problem is not None
    assert small.segments == []
    ballast.unlink()
    small.write(log, 1, start=1)
    log.close()
    assert [line["data"].get("execution") for line in read(small, kinds=("started",))] == ["e0", "e1"]
    assert small.verify().findings == []


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass


def test_what_does_not_fit_into_memory_either_is_counted(bench, monkeypatch):
    monkeypatch.setattr(writing, "MOST_WAITING", 10)
    log = bench.log()
    bench.directory.write_text("no directory")
    bench.write(log, 25)
    assert log.problem is not None
    bench.directory.unlink()
    log.flush()
    resumed, *rest = read(bench)
    assert resumed["kind"] == "administered"
    assert "15 events were lost" in resumed["data"]["detail"]
    assert resumed["outcome"] == "failed"
    assert len(rest) == 10
    log.close()
    assert bench.verify().findings == []
