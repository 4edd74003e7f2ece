import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cloche.linux import processes, syscalls

InChild = Callable[[Callable[[], None]], None]


@contextmanager
def sleeper(work: Callable[[], object] = lambda: None) -> Iterator[int]:
    """A child that does `work`, says so, and sleeps until it is killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            work()
            os.write(write_end, b".")
            os.close(write_end)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    assert os.read(read_end, 1) == b"."
    os.close(read_end)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


# --- one process --------------------------------------------------------------------------------------------


def test_start_time_names_one_life() -> None:
    own = processes.start_time(os.getpid())
    assert own is not None
    assert own == processes.start_time(os.getpid())
    with sleeper() as pid:
        started = processes.start_time(pid)
        assert started is not None
        assert started >= own
        assert processes.is_running(pid, started)
        assert not processes.is_running(pid, started + 1)
    assert processes.start_time(pid) is None
    assert not processes.is_running(pid)


def test_a_zombie_is_not_running() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_time(pid) is not None
    assert not processes.is_running(pid)
    os.waitpid(pid, 0)


def test_a_signal_to_a_process_that_is_gone_says_so() -> None:
    with sleeper() as pid:
        fd = os.pidfd_open(pid)
        assert not processes.wait_exit(fd, 0)
        assert processes.send_signal(fd, signal.SIGKILL)
        assert processes.wait_exit(fd, None)
        os.waitpid(pid, 0)
        assert not processes.send_signal(fd, signal.SIGKILL)
        os.close(fd)


def test_a_name_with_parentheses_does_not_confuse() -> None:
    def rename() -> None:
        syscalls.prctl(syscalls.PR_SET_NAME, b"a) Z 1 (b\0")

    with sleeper(rename) as pid:
        assert processes.is_running(pid)
        assert pid in processes.descendants(os.getpid())


# --- a tree -------------------------------------------------------------------------------------------------


def test_descendants_are_found_parents_first() -> None:
    read_end, write_end = os.pipe()

    def family() -> None:
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                grandchild = os.fork()
                if grandchild == 0:
                    while True:
                        signal.pause()
                os.write(write_end, f"{os.getpid()} {grandchild}\n".encode())
                while True:
                    signal.pause()

    with sleeper(family) as pid:
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(read_end, 100)
        pairs = [tuple(map(int, line.split())) for line in said.splitlines()]
        found = processes.descendants(pid)
        assert sorted(found) == sorted(sum(pairs, ()))
        for child, grandchild in pairs:
            assert found.index(child) < found.index(grandchild)
            assert child in processes.descendants(os.getpid())
        for each in reversed(found):
            os.kill(each, signal.SIGKILL)
    os.close(read_end)
    os.close(write_end)


def test_memory_of_a_tree_counts_what_it_touched() -> None:
    kept: list[bytes] = []
    with sleeper() as small, sleeper(lambda: kept.append(b"x" * (64 << 20))) as large:
        small_mib = processes.tree_pss_mib([small])
        large_mib = processes.tree_pss_mib([large])
        assert small_mib > 0
        assert 60 < large_mib - small_mib < 80
        assert processes.tree_pss_mib([small, large]) == pytest.approx(small_mib + large_mib, rel=0.1)
    assert processes.pss_kib(large) is None
    assert processes.tree_pss_mib([large]) == 0


# --- oneself ------------------------------------------------------------------------------------------------


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while processes.is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_pdeathsig_ends_the_child_with_its_parent() -> None:
    read_end, write_end = os.pipe()

    def parent_of_one() -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.set_pdeathsig(parent=parent)
            os.write(write_end, str(os.getpid()).encode())
            while True:
                signal.pause()

    with sleeper(parent_of_one) as pid:
        grandchild = int(os.read(read_end, 100))
        assert processes.is_running(grandchild)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert wait_gone(grandchild)
    os.close(read_end)
    os.close(write_end)


def test_pdeathsig_after_the_parent_ended() -> None:
    pid = os.fork()
    if pid == 0:
        processes.set_pdeathsig(signal.SIGKILL, parent=1 if os.getppid() != 1 else 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_subreaper_keeps_orphans(in_child: InChild) -> None:
    def work() -> None:
        processes.become_subreaper()
        pid = os.fork()
        if pid == 0:
            if os.fork() == 0:
                while True:
                    signal.pause()
            os._exit(0)
        os.waitpid(pid, 0)
        (orphan,) = processes.descendants(os.getpid())
        os.kill(orphan, signal.SIGKILL)
        assert os.waitpid(-1, 0)[0] == orphan

    in_child(work)


def test_undumpable_process_is_closed(in_child: InChild) -> None:
    def work() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        with sleeper() as pid:
            os.listdir(f"/proc/{pid}/fd")
        with sleeper(processes.set_undumpable) as pid, pytest.raises(PermissionError):
            os.listdir(f"/proc/{pid}/fd")

    in_child(work)


def test_the_time_of_a_tree_holds_that_of_reaped_children() -> None:
    before = processes.tree_cpu_ms([os.getpid()])
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-I", "-c", burn], check=True)
    assert processes.tree_cpu_ms([os.getpid()]) - before >= 150
