"""The log of a command: what it keeps, what it counts, and that no flood makes the engine grow."""

import asyncio

import pytest

from cloche import errors, model
from cloche.engine import output

ISOLATION = model.Isolation(level="namespaces", driver="none")


def make_log(tmp_path, keep=100, spool_limit=1 << 20):
    return output.Log(keep=keep, spool_limit=spool_limit, directory=str(tmp_path))


def collect(log, after=0):
    async def gather():
        return [event async for event in log.follow(after, wait=False)]

    return asyncio.run(gather())


def test_a_follower_of_a_lost_command_is_told_and_does_not_wait(tmp_path):
    log = make_log(tmp_path)
    log.add("stdout", b"x")

    async def follow():
        events = log.follow()
        seen = [await anext(events)]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        log.lose(errors.error("sandbox_lost", "it went"))
        with pytest.raises(errors.SandboxLost, match="it went"):
            await waiting
        return seen

    assert [e.data for e in asyncio.run(follow())] == [b"x"]


def test_a_closed_log_is_told_to_whoever_reads_it(tmp_path):
    log = make_log(tmp_path)
    log.add("stdout", b"x")
    log.close()
    log.close()
    with pytest.raises(errors.SandboxLost):
        collect(log)


def test_single_bytes_that_nobody_saw_are_joined(tmp_path):
    log = make_log(tmp_path)
    for _ in range(200_000):
        log.add("stdout", b"x")
    events = collect(log)
    assert b"".join(e.data for e in events) == b"x" * 200_000
    assert len(events) == 4


def test_a_frame_that_was_seen_does_not_change(tmp_path):
    log = make_log(tmp_path)
    log.add("stdout", b"a")
    (first,) = collect(log)
    log.add("stdout", b"b")
    assert [(e.data, e.seq) for e in collect(log)] == [(first.data, 0), (b"b", 1)]


def test_streams_are_not_joined_with_each_other(tmp_path):
    log = make_log(tmp_path)
    for stream, data in (("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c"), ("stdout", b"d")):
        log.add(stream, data)
    assert [(e.stream, e.data) for e in collect(log)] == [
        ("stdout", b"a"),
        ("stderr", b"b"),
        ("stdout", b"cd"),
    ]


def test_past_the_limit_bytes_are_counted_and_not_kept(tmp_path):
    log = make_log(tmp_path, spool_limit=10)
    for _ in range(30):
        log.add("stdout", b"123")
    kept, cut = collect(log)
    assert kept.data == b"123" * 3
    assert (type(cut), cut.skipped) == (model.Truncated, 81)
    assert (log.stdout.total, log.stdout.truncated) == (90, False)


def test_frames_have_a_limit_and_the_rest_is_told_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_MOST_FRAMES", 10)
    log = make_log(tmp_path)
    for _ in range(50):
        log.add("stdout", b"o")
        log.add("stderr", b"e")
    log.finish(model.ExecResult(exit_code=0, isolation=ISOLATION))
    events = collect(log)
    assert [type(e).__name__ for e in events] == ["Output"] * 10 + ["Truncated"] * 2 + ["Exited"]
    assert [e.skipped for e in events[10:12]] == [45, 45]
    assert [e.seq for e in events] == list(range(13))


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 10_000])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_head_and_tail(size, piece):
    whole = bytes(i % 251 for i in range(size))
    kept = output.HeadAndTail(100)
    for start in range(0, size, piece):
        kept.add(whole[start : start + piece])
    assert kept.total == size
    assert kept.truncated == (size > 100)
    if size <= 100:
        assert kept.bytes() == whole
    else:
        assert kept.bytes() == whole[:50] + b"\n[... %d bytes not kept ...]\n" % (size - 100) + whole[-50:]


def test_a_large_log_is_in_an_unnamed_file(tmp_path):
    log = make_log(tmp_path, spool_limit=64 << 20)
    for _ in range(10):
        log.add("stdout", b"x" * 100_000)
    assert list(tmp_path.iterdir()) == []
    assert b"".join(e.data for e in collect(log)) == b"x" * 1_000_000
    log.close()
