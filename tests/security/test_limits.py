"""What one sandbox takes is bounded, and taking it all leaves the others, the engine and the host at work.

Nothing here looks at a clock: a neighbour is unaffected if it completes its work.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import errors
from tests.security import glass

WORK = 25


@pytest.fixture(scope="module")
def neighbour() -> Iterator[glass.Box]:
    with glass.box() as made:
        yield made


def _completes(neighbour: glass.Box, count: int = WORK) -> bool:
    """Whether a neighbour runs `count` commands to their right end."""
    return all(neighbour.out(f"echo {n}; ls / | wc -l > /dev/null") == f"{n}\n" for n in range(count))


def _unhurt(box: glass.Box, neighbour: glass.Box) -> None:
    assert _completes(neighbour, 5)
    with glass.box() as fresh:
        assert fresh.works()
    box.delete()


# --- processes ----------------------------------------------------------------------------------------------

BOMBS = {
    "shell": ":(){ :|:& };:",
    "loop": "while true; do sleep 1000 & done",
    "fork": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(1000,)).start()\n    except RuntimeError: pass",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_fork_bomb_stays_inside(neighbour: glass.Box, bomb: str) -> None:
    with glass.box(pids=40) as box:
        command = (
            ["bash", "-c", BOMBS[bomb]] if bomb in ("shell", "loop") else ["python3", "-I", "-c", BOMBS[bomb]]
        )
        box.start(command)
        assert _completes(neighbour)
        _unhurt(box, neighbour)


def test_the_number_of_processes_is_bounded(neighbour: glass.Box) -> None:
    count = """
made = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            signal.pause()
        made += 1
    except OSError:
        break
say(made)
"""
    with glass.box(pids=30) as box:
        assert 0 < box.report(count) <= 30
    with glass.box(pids=120) as box:
        assert 30 < box.report(count) <= 120
    assert _completes(neighbour, 3)


# --- memory -------------------------------------------------------------------------------------------------

HOGS = {
    "heap": "kept = []\nwhile True:\n    kept.append(bytearray(8 << 20))",
    "children": "for _ in range(8):\n    if os.fork() == 0:\n        kept = bytearray(64 << 20)\n        signal.pause()\nkept = []\nwhile True:\n    kept.append(bytearray(8 << 20))",
    "mmap": "import mmap\nkept = []\nwhile True:\n    m = mmap.mmap(-1, 16 << 20)\n    m[:] = b'x' * (16 << 20)\n    kept.append(m)",
}


@pytest.mark.parametrize("hog", HOGS)
def test_memory_beyond_the_limit_kills_only_its_taker(neighbour: glass.Box, hog: str) -> None:
    with glass.box(memory_mib=128) as box:
        before = glass.resident_mib()
        result = box.python(HOGS[hog], timeout_s=50)
        assert result.oom_killed
        assert not result.timed_out
        assert glass.resident_mib() - before < 64
        assert _completes(neighbour, 5)
        assert box.works()  # the twin: the sandbox itself goes on


def test_memory_within_the_limit_can_be_had() -> None:
    with glass.box(memory_mib=256) as box:
        assert box.report("kept = bytearray(100 << 20); say(len(kept))") == 100 << 20


# --- disk ---------------------------------------------------------------------------------------------------

_FILL = """
written = 0
piece = b"x" * (1 << 20)
try:
    with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
        while written < 4 << 30:
            written += file.write(piece)
except OSError:
    pass
say(written >> 20)
"""


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/home/user", "/var/tmp"])
@glass.profiles
def test_disk_is_limited(neighbour: glass.Box, profile: str, place: str) -> None:
    """As an ordinary user the disk is memory, so that the memory limit may come first."""
    with glass.box(profile=profile, disk_mib=24, memory_mib=256) as box:
        assert box.report(_FILL, place) <= 24
        assert _completes(neighbour, 2)
        box.out(f"rm {place}/fill")
        assert box.works()


@pytest.mark.parametrize("place", ["/dev/shm"])
def test_shared_memory_is_limited(neighbour: glass.Box, place: str) -> None:
    with glass.box(memory_mib=128) as box:
        result = box.python(_FILL, place)
        written = int(result.stdout) if result.exit_code == 0 else 0
        assert written <= 128
        assert _completes(neighbour, 3)


_INODES = """
made = 0
try:
    while made < 200000:
        os.close(os.open(f"{sys.argv[1]}/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError:
    pass
say(made)
"""


@pytest.mark.parametrize("place", ["/workspace", "/dev/shm"])
def test_the_number_of_files_is_limited(neighbour: glass.Box, place: str) -> None:
    """An empty file takes memory of the kernel: there are no more of them than the size pays for."""
    with glass.box(disk_mib=8, memory_mib=64) as box:
        box.out(f"mkdir {place}/many")
        result = box.python(_INODES, f"{place}/many")
        assert not result.timed_out
        made = int(result.stdout) if result.exit_code == 0 else 0
        assert made <= 64 * 256
        assert _completes(neighbour, 3)
        box.delete()


def test_the_files_api_says_that_the_disk_is_full() -> None:
    with glass.box(disk_mib=8, memory_mib=256) as box:
        with pytest.raises(errors.ClocheError) as refusal:
            box.write("/workspace/big", b"x" * (64 << 20))
        assert refusal.value.code == "sandbox_disk_full"
        box.write("/workspace/small", b"x" * (1 << 20))
        assert box.works()


# --- output -------------------------------------------------------------------------------------------------

FLOODS: "dict[str, str | list[str]]" = {
    "stdout": ["head", "-c", "600M", "/dev/zero"],
    "stderr": "head -c 300M /dev/zero >&2",
    "both": "head -c 200M /dev/zero & head -c 200M /dev/zero >&2; wait",
    "small-pieces": ["python3", "-I", "-c", "import os\nfor _ in range(300000): os.write(1, b'x')"],
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_output_is_counted_and_not_kept(neighbour: glass.Box, flood: str) -> None:
    with glass.box() as box:
        before = glass.resident_mib()
        result = box.exec(FLOODS[flood], timeout_s=55)
        assert result.exit_code == 0
        total = result.stdout_total + result.stderr_total
        assert (
            total
            == {"stdout": 600 << 20, "stderr": 300 << 20, "both": 400 << 20, "small-pieces": 300_000}[flood]
        )
        assert len(result.stdout_bytes) + len(result.stderr_bytes) < 32 << 20
        assert glass.resident_mib() - before < 100
        assert _completes(neighbour, 3)


def test_floods_side_by_side_let_others_work(neighbour: glass.Box) -> None:
    boxes = [glass.Box() for _ in range(3)]
    running = [box.start("yes") for box in boxes]
    before = glass.resident_mib()
    assert _completes(neighbour)
    assert glass.resident_mib() - before < 200
    for process in running:
        glass.wait(process.kill())
    for box in boxes:
        assert box.works()
        box.delete()


def test_moderate_output_is_kept_whole() -> None:
    with glass.box() as box:
        assert box.exec(["head", "-c", "200000", "/dev/zero"]).stdout_bytes == b"\0" * 200_000


# --- processor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 16])
def test_a_busy_sandbox_does_not_starve_another(neighbour: glass.Box, count: int) -> None:
    with glass.box(cpus=1) as box:
        running = [box.start("while :; do :; done") for _ in range(count)]
        assert _completes(neighbour)
        assert neighbour.report("say(sum(n * n for n in range(300000)))") == sum(n * n for n in range(300000))
        for process in running:
            glass.wait(process.kill())
        assert box.works()


# --- descriptors, terminals, watches: what the kernel counts for everybody together -------------------------

_OPEN_MANY = """
kept = []
try:
    while len(kept) < 100000:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print("full", flush=True)
signal.pause()
"""


def test_many_open_files_are_one_s_own_affair(neighbour: glass.Box) -> None:
    with glass.box(memory_mib=256) as box:
        holder = box.start(["python3", "-I", "-c", glass.PRELUDE + _OPEN_MANY])
        glass.until(holder, b"full")
        assert _completes(neighbour, 5)
        assert box.works()


_TERMINALS = """
kept = []
for _ in range(6):
    if os.fork() == 0:
        try:
            while True:
                kept.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
        except OSError:
            pass
        os.write(1, b"full\\n")
        signal.pause()
signal.pause()
"""


def test_one_sandbox_cannot_take_all_terminals(neighbour: glass.Box) -> None:
    """The kernel has one number of them for all; without a bound of its own one sandbox would leave none."""
    with glass.box() as box:
        holder = box.start(["python3", "-I", "-c", glass.PRELUDE + _TERMINALS])
        glass.until(holder, b"full\n" * 6)
        shown = glass.wait(glass.wait(neighbour.handle.start("tty", pty=True)).wait()).stdout
        assert "/dev/pts/" in shown
        master, slave = os.openpty()
        os.close(master)
        os.close(slave)
    with glass.box() as fresh:
        started = glass.wait(fresh.handle.start("tty", pty=True))
        assert "/dev/pts/" in glass.wait(started.wait()).stdout


def test_a_sandbox_without_terminals_says_so() -> None:
    with glass.box() as box:
        holder = box.start(["python3", "-I", "-c", glass.PRELUDE + _TERMINALS])
        glass.until(holder, b"full\n" * 6)
        with pytest.raises(errors.ClocheError) as refusal:
            box.start("tty", pty=True)
        assert refusal.value.code == "capacity_exceeded"
        assert box.works()


def test_some_terminals_can_be_had(box: glass.Box) -> None:
    assert box.report("kept = [os.openpty() for _ in range(16)]; say(len(kept))") == 16


_WATCHES = """
kept = []
while len(kept) < 100000:
    fd = libc.inotify_init1(0)
    if fd < 0:
        break
    kept.append(fd)
print("full", len(kept), flush=True)
signal.pause()
"""


def test_one_sandbox_cannot_take_all_watches(neighbour: glass.Box) -> None:
    """Instances of inotify are counted for the user on the host who made the sandbox, beside all that user's programs."""
    with glass.box() as box:
        holder = box.start(["python3", "-I", "-c", glass.PRELUDE + _WATCHES])
        said = glass.until(holder, b"full")
        assert b"full" in said
        assert neighbour.report("say(libc.inotify_init1(0) >= 0)") is True
        with glass.box() as fresh:
            assert fresh.report("say(libc.inotify_init1(0) >= 0)") is True


_PIPES = """
kept = []
for _ in range(2000):
    reading, writing = os.pipe()
    tried(lambda: fcntl.fcntl(writing, 1031, 1 << 20))
    kept.append((reading, writing))
print("full", flush=True)
signal.pause()
"""


def test_many_large_pipes_leave_others_theirs(neighbour: glass.Box) -> None:
    with glass.box(memory_mib=256) as box:
        holder = box.start(["python3", "-I", "-c", glass.PRELUDE + _PIPES])
        glass.until(holder, b"full")
        assert _completes(neighbour, 5)
        assert neighbour.exec(["head", "-c", "1M", "/dev/zero"]).stdout_total == 1 << 20


# --- what is said about them --------------------------------------------------------------------------------


def test_each_limit_says_who_holds_it(neighbour: glass.Box) -> None:
    info = glass.wait(neighbour.handle.info())
    assert set(info.limits) == {"memory_mib", "cpus", "pids", "disk_mib"}
    assert all(limit.enforcement in ("enforced", "watched", "none") for limit in info.limits.values())
    if info.limits["memory_mib"].by == "cgroup":
        inside = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if "cloche-" in line]
        assert inside == []  # the engine itself is not held by a sandbox's group


@pytest.mark.parametrize("limit", ["memory_mib", "pids", "disk_mib", "cpus"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_absurd_limits_are_refused(limit: str, value: int) -> None:
    with pytest.raises(errors.ClocheError) as refusal:
        glass.Box(**{limit: value})
    assert refusal.value.code == "limit_invalid"
