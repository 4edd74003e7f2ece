"""Control groups: the real ones here, and version 2 layouts on a fake kernel that keeps its rules."""

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.linux import cgroups

CONTROLLERS = ("memory", "cpu", "pids")
KNOBS = {
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.current": "4096",
        "memory.peak": "8192",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1",
    },
    "cpu": {"cpu.max": "max 100000"},
    "pids": {"pids.max": "max", "pids.current": "2"},
}
STRANGER = 1


class FakeKernel(cgroups.Files):
    """cgroup2 on plain directories, with its rules for controllers and processes."""

    def __init__(
        self, mount: Path, *, root_has_type: bool = True, available: tuple[str, ...] = CONTROLLERS
    ) -> None:
        self.mount = mount
        self.read_only: set[str] = set()
        mount.mkdir(parents=True)
        self._populate(mount, " ".join(available))
        if not root_has_type:
            (mount / "cgroup.type").unlink()

    def _populate(self, group: Path, controllers: str) -> None:
        files = {
            "cgroup.procs": "",
            "cgroup.type": "domain",
            "cgroup.controllers": controllers,
            "cgroup.subtree_control": "",
            "cgroup.events": "populated 0\nfrozen 0",
            "cgroup.kill": "",
            "cgroup.freeze": "0",
            "cpu.stat": "usage_usec 2500\nuser_usec 2000",
        }
        for name in controllers.split() if group != self.mount else ():
            files |= KNOBS[name]
        for name, content in files.items():
            (group / name).write_text(content)

    def make(self, path: str) -> None:
        super().make(path)
        self._populate(Path(path), (Path(path).parent / "cgroup.subtree_control").read_text())

    def remove(self, path: str) -> None:
        group = Path(path)
        if (group / "cgroup.procs").read_text() or any(child.is_dir() for child in group.iterdir()):
            raise OSError(errno.EBUSY, "busy")
        shutil.rmtree(group)

    def writable(self, path: str) -> bool:
        return path not in self.read_only and super().writable(path)

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        if file.name == "cgroup.procs":
            self._join(file.parent, str(os.getpid()) if text == "0" else text)
        elif file.name == "cgroup.subtree_control":
            self._enable(file.parent, text[1:])
        elif file.name == "cgroup.freeze":
            (file.parent / "cgroup.events").write_text(f"populated 0\nfrozen {text}")
        elif file.name == "cgroup.kill":
            (file.parent / "cgroup.procs").write_text("")
        else:
            assert file.exists(), path
            file.write_text(text)

    def _join(self, group: Path, pid: str) -> None:
        if (group / "cgroup.type").exists() and (group / "cgroup.subtree_control").read_text():
            raise OSError(errno.EBUSY, "busy")
        for procs in self.mount.rglob("cgroup.procs"):
            procs.write_text("\n".join(line for line in procs.read_text().splitlines() if line != pid))
        (group / "cgroup.procs").write_text(f"{(group / 'cgroup.procs').read_text()}\n{pid}".strip())

    def _enable(self, group: Path, name: str) -> None:
        if name not in (group / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOENT, "no such controller")
        # The real kernel is laxer with threaded controllers and spoils the children instead; both are wrong.
        if (group / "cgroup.type").exists() and (group / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "busy")
        control = group / "cgroup.subtree_control"
        control.write_text(f"{control.read_text()} {name}".strip())


class Machine:
    """A fake /proc/self beside a fake cgroup2 mount."""

    def __init__(self, base: Path, kernel: FakeKernel, own: str, *, mounted: str = "/") -> None:
        self.kernel = kernel
        self.proc = base / "proc"
        self.mounted = mounted
        self.proc.mkdir()
        self.move(own)

    def move(self, own: str) -> None:
        (self.proc / "cgroup").write_text(f"0::{own}\n")
        line = f"30 23 0:28 {self.mounted} {self.kernel.mount} rw - cgroup2 cgroup2 rw"
        (self.proc / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 /dev/a rw\n{line}\n")

    def detect(self) -> cgroups.Hierarchy:
        return cgroups.detect(proc=str(self.proc), files=self.kernel)


@pytest.fixture
def delegated(tmp_path: Path) -> Machine:
    """A group of our own with only ourselves in it, as `systemd-run --scope -p Delegate=yes` gives."""
    kernel = FakeKernel(tmp_path / "cgroup")
    for name in CONTROLLERS:
        kernel._enable(kernel.mount, name)
    kernel.make(str(kernel.mount / "scope"))
    kernel._join(kernel.mount / "scope", str(os.getpid()))
    return Machine(tmp_path, kernel, "/scope")


# --- version 2 layouts --------------------------------------------------------------------------------------


def test_a_delegated_group_enforces_everything(delegated: Machine) -> None:
    scope = delegated.kernel.mount / "scope"
    hierarchy = delegated.detect()
    assert hierarchy.enforceable == {"memory", "cpus", "pids"}
    assert hierarchy.reasons == {}
    assert hierarchy.kills
    assert {c.version for c in hierarchy.controllers.values()} == {2}
    assert (scope / "cgroup.subtree_control").read_text() == "", "detection must not change anything"

    group = hierarchy.create("cloche-a", memory_mib=256, cpus=0.5, pids=64)
    assert group.enforced == {"memory", "cpus", "pids"}
    assert group.reasons == {}
    assert group.paths == [f"{scope}/cloche-a/cgroup.procs"]
    made = scope / "cloche-a"
    assert (made / "memory.max").read_text() == str(256 << 20)
    assert (made / "memory.swap.max").read_text() == "0"
    assert (made / "cpu.max").read_text() == "50000 100000"
    assert (made / "pids.max").read_text() == "64"
    assert (scope / "cgroup.procs").read_text() == ""
    assert (scope / "cloche-host" / "cgroup.procs").read_text() == str(os.getpid())

    assert group.set_limits(memory_mib=1.5) == group.enforced
    assert (made / "memory.max").read_text() == str(3 << 19)
    stats = group.stats()
    assert (stats.memory_bytes, stats.memory_peak_bytes, stats.cpu_ms) == (4096, 8192, 2.5)
    assert (stats.oom_kills, stats.pids) == (1, 2)
    assert "memory_bytes=4096" in repr(stats)
    assert group.freeze()
    assert group.frozen
    group.thaw()
    assert not group.frozen
    assert group.remove()
    assert not made.exists()


def test_from_the_leaf_the_same_place_is_found(delegated: Machine) -> None:
    delegated.detect().create("cloche-a")
    delegated.move("/scope/cloche-host")
    group = delegated.detect().create("cloche-b", pids=3)
    assert group.paths == [f"{delegated.kernel.mount}/scope/cloche-b/cgroup.procs"]
    assert group.enforced == {"pids"}


def test_strangers_are_never_moved(delegated: Machine) -> None:
    scope = delegated.kernel.mount / "scope"
    hierarchy = delegated.detect()
    delegated.kernel._join(scope, str(STRANGER))  # after detection: a race
    group = hierarchy.create("cloche-a", memory_mib=256)
    assert group.enforced == frozenset()
    assert "cannot empty" in group.reasons["memory"]
    members = (scope / "cgroup.procs").read_text().split()
    assert sorted(members) == sorted([str(STRANGER), str(os.getpid())])
    assert (scope / "cgroup.subtree_control").read_text() == ""

    seen = delegated.detect()
    assert seen.enforceable == frozenset()
    assert "other processes share" in seen.reasons["memory"]
    assert "Delegate=yes" in seen.reasons["memory"]
    assert seen.kills, "killing and freezing need no controller"
    assert group.freeze()
    assert group.remove()


def test_the_root_group_may_hold_processes(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path / "cgroup", root_has_type=False)
    kernel._join(kernel.mount, str(STRANGER))
    group = Machine(tmp_path, kernel, "/").detect().create("cloche-a", memory_mib=1)
    assert group.enforced == {"memory"}
    assert (kernel.mount / "cgroup.procs").read_text() == str(STRANGER)
    assert not (kernel.mount / "cloche-host").exists()


def test_partial_delegation_is_told(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path / "cgroup", available=("pids",))
    hierarchy = Machine(tmp_path, kernel, "/").detect()
    assert hierarchy.enforceable == {"pids"}
    assert "memory is not delegated" in hierarchy.reasons["memory"]
    group = hierarchy.create("cloche-a", memory_mib=1, cpus=1, pids=5)
    assert group.enforced == {"pids"}
    assert set(group.reasons) == {"memory", "cpus"}


def test_a_foreign_group_is_told_and_left_alone(delegated: Machine) -> None:
    scope = f"{delegated.kernel.mount}/scope"
    delegated.kernel.read_only.add(f"{scope}/cgroup.procs")
    hierarchy = delegated.detect()
    assert hierarchy.enforceable == frozenset()
    assert not hierarchy.kills
    assert set(hierarchy.reasons) == {"memory", "cpus", "pids"}
    assert "not writable" in hierarchy.reasons["memory"]
    group = hierarchy.create("cloche-a", memory_mib=1)
    assert (group.paths, group.enforced) == ([], frozenset())
    assert not group.kill()
    assert not group.freeze()
    assert not group.frozen
    assert not group.populated
    assert group.stats().memory_bytes is None
    assert group.stats().pids is None
    assert group.remove()
    assert not (delegated.kernel.mount / "scope" / "cloche-a").exists()


def test_a_mounted_subtree_is_followed(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path / "cgroup", root_has_type=False)
    kernel.make(str(kernel.mount / "inner"))
    machine = Machine(tmp_path, kernel, "/pod/inner", mounted="/pod")
    assert machine.detect().controllers["unified"].directory == f"{kernel.mount}/inner"
    machine.move("/podium/inner")
    assert "not visible" in machine.detect().controllers["unified"].reason
    machine.move("/../sibling")
    assert "not visible" in machine.detect().reasons["memory"]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    hierarchy = cgroups.detect(proc=str(tmp_path))
    assert hierarchy.enforceable == frozenset()
    assert hierarchy.reasons["memory"] == "no cgroup file system with memory is mounted"
    assert hierarchy.create("cloche-a", memory_mib=5).enforced == frozenset()
    assert hierarchy.sweep() == []


def test_a_failure_leaves_nothing_half_made(delegated: Machine) -> None:
    class Failing(Exception):
        pass

    scope = delegated.kernel.mount / "scope"
    hierarchy = delegated.detect()
    hierarchy.create("cloche-a")
    with pytest.raises(FileExistsError):
        hierarchy.create("cloche-a")
    assert (scope / "cloche-a").exists(), "the older one stays"

    original = delegated.kernel.write

    def write(path: str, text: str) -> None:
        if path.endswith("pids.max"):
            raise Failing
        original(path, text)

    delegated.kernel.write = write  # type: ignore[method-assign]
    with pytest.raises(Failing):
        hierarchy.create("cloche-b", memory_mib=5, pids=5)
    assert not (scope / "cloche-b").exists()


@pytest.mark.parametrize(
    "name", ["other", "cloche-/x", "cloche-host", "", "cloche-\n", "cloche-" + "x" * 300]
)
def test_bad_names_are_refused(name: str, delegated: Machine) -> None:
    with pytest.raises(ValueError, match="no name for a group"):
        delegated.detect().create(name)


def test_sweep_lists_what_is_left_anywhere(delegated: Machine) -> None:
    hierarchy = delegated.detect()
    for name in ("cloche-a", "cloche-b", "cloche-b-2"):
        hierarchy.create(name)
    delegated.kernel.make(f"{delegated.kernel.mount}/elsewhere")
    delegated.kernel.make(f"{delegated.kernel.mount}/elsewhere/cloche-b")
    found = hierarchy.sweep("cloche-b", keep={"cloche-b-2"})
    assert sorted(path for group in found for path in group.paths) == [
        f"{delegated.kernel.mount}/elsewhere/cloche-b/cgroup.procs",
        f"{delegated.kernel.mount}/scope/cloche-b/cgroup.procs",
    ]
    assert all(group.remove() for group in found)
    assert [group.name for group in hierarchy.sweep(keep=["cloche-a"])] == ["cloche-b-2"]
    with pytest.raises(ValueError, match="does not start"):
        hierarchy.sweep("")


# --- the real ones ------------------------------------------------------------------------------------------

HERE = cgroups.detect()
_serial = iter(range(1_000_000))


def needs(*limits: str) -> pytest.MarkDecorator:
    missing = {name: HERE.reasons.get(name) for name in limits if name not in HERE.enforceable}
    return pytest.mark.skipif(bool(missing), reason=f"cannot be enforced here: {missing}")


@contextmanager
def group(
    *, memory_mib: float | None = None, cpus: float | None = None, pids: int | None = None
) -> Iterator[cgroups.Group]:
    made = HERE.create(
        f"cloche-test-{os.getpid()}-{next(_serial)}", memory_mib=memory_mib, cpus=cpus, pids=pids
    )
    try:
        yield made
    finally:
        assert made.remove()
        for path in made.paths:
            assert not os.path.exists(path)


def spawn(into: cgroups.Group, work: Callable[[], object]) -> int:
    """Start `work` in the group; a group has several directories, and the child is in all of them by then."""
    joined, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for path in into.paths:
                with open(path, "w") as file:
                    file.write("0")
            os.write(tell, b"1")
            work()
            os._exit(0)
        except MemoryError:
            os._exit(3)
        except BlockingIOError:
            os._exit(4)
        except BaseException:
            os._exit(1)
    os.close(tell)
    with open(joined, "rb") as file:
        assert file.read(1), "the child could not join the group"
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forever() -> None:
    while True:
        signal.pause()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_detection_never_fails_and_tells() -> None:
    assert set(HERE.controllers) >= {"memory", "cpu", "pids", "unified"}
    assert set(HERE.reasons) == {"memory", "cpus", "pids"} - HERE.enforceable
    assert "Hierarchy" in repr(HERE)


def test_create_works_for_every_user() -> None:
    with group(memory_mib=64, cpus=1, pids=10) as made:
        assert made.enforced == HERE.enforceable
        assert set(made.reasons) == {"memory", "cpus", "pids"} - made.enforced


@needs("memory")
def test_memory_is_limited() -> None:
    with group(memory_mib=32) as made:
        assert status(spawn(made, lambda: bytearray(8 << 20))) == 0
        assert made.stats().oom_kills == 0
        assert status(spawn(made, lambda: bytearray(128 << 20))) == -signal.SIGKILL
        stats = made.stats()
        assert stats.oom_kills == 1
        assert stats.memory_peak_bytes is None or 16 << 20 < stats.memory_peak_bytes <= 32 << 20


@needs("memory")
def test_limits_of_a_living_group_go_both_ways() -> None:
    with group(memory_mib=32) as made:
        assert made.set_limits(memory_mib=256) == {"memory"}
        assert status(spawn(made, lambda: bytearray(128 << 20))) == 0
        assert made.set_limits(memory_mib=16) == {"memory"}
        assert status(spawn(made, lambda: bytearray(128 << 20))) == -signal.SIGKILL


@needs("pids")
def test_processes_are_limited() -> None:
    def bomb() -> None:
        for _ in range(10):
            if os.fork() == 0:
                forever()

    with group(pids=5) as made:
        assert status(spawn(made, bomb)) == 4
        assert made.stats().pids == 4


@needs("cpus")
def test_processor_time_is_limited_and_counted() -> None:
    def burn() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass

    with group(cpus=0.1) as made:
        assert status(spawn(made, burn)) == 0
        used_ms = made.stats().cpu_ms
        assert used_ms is not None
        assert 10 < used_ms < 200


@pytest.mark.skipif(not HERE.kills, reason="no cgroup2 tree to kill in")
def test_kill_ends_the_whole_tree() -> None:
    def tree() -> None:
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                forever()
        forever()

    with group() as made:
        pid = spawn(made, tree)
        until(lambda: len(made.pids()) == 4)
        assert made.populated
        assert made.kill()
        assert status(pid) == -signal.SIGKILL
        until(lambda: not made.populated)


@pytest.mark.skipif(not HERE.kills, reason="no cgroup2 tree to freeze in")
def test_frozen_processes_stand_still_and_still_die() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def chatter() -> None:
        while True:
            os.write(write_end, b".")
            time.sleep(0.001)

    def drain() -> int:
        try:
            return len(os.read(read_end, 65536))
        except BlockingIOError:
            return 0

    with group() as made:
        pid = spawn(made, chatter)
        until(drain)
        assert made.freeze()
        assert made.frozen
        drain()
        time.sleep(0.02)
        assert drain() == 0
        made.thaw()
        until(drain)
        assert made.freeze()
        assert made.kill()
        assert status(pid) == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)


@pytest.mark.skipif(not HERE.kills, reason="no cgroup2 tree")
def test_remove_ends_frozen_and_nested_groups() -> None:
    made = HERE.create(f"cloche-test-{os.getpid()}-nested")
    pid = spawn(made, forever)
    until(made.pids)
    tree = next(path for path in made.paths if os.path.exists(path.replace("cgroup.procs", "cgroup.kill")))
    os.mkdir(tree.replace("cgroup.procs", "below"))
    assert made.freeze()
    assert made.remove()
    assert status(pid) == -signal.SIGKILL
    assert not os.path.exists(tree)
    assert made.remove(), "twice is harmless"


@pytest.mark.skipif(not HERE.kills, reason="no cgroup2 tree")
def test_a_process_halfway_in_is_killed() -> None:
    with group() as made:
        pid = os.fork()
        if pid == 0:
            with open(made.paths[0], "w") as file:
                file.write("0")
            forever()
        until(made.pids)
        assert made.kill()
        assert status(pid) == -signal.SIGKILL


@pytest.mark.skipif(not HERE.enforceable, reason=f"no controller: {HERE.reasons}")
def test_without_a_tree_processes_are_killed_one_by_one() -> None:
    """As on a machine with version 1 alone."""
    alone = {name: c for name, c in HERE.controllers.items() if c.version == 1}
    if "freezer" not in alone:
        pytest.skip("no version 1 here")
    missing = cgroups.Controller("unified", reason="not mounted")
    hierarchy = cgroups.Hierarchy({"unified": missing} | alone, cgroups.Files())
    made = hierarchy.create(f"cloche-test-{os.getpid()}-first", pids=50)
    try:
        pids = [spawn(made, forever) for _ in range(5)]
        until(lambda: len(made.pids()) == 5)
        assert made.freeze()
        assert made.frozen
        cpu_ms = made.stats().cpu_ms
        assert cpu_ms is not None
        assert cpu_ms > 0
        assert made.kill()
        assert {status(pid) for pid in pids} == {-signal.SIGKILL}
        assert status(spawn(made, lambda: None)) == 0, "the limit on processes is as before"
    finally:
        assert made.remove()


def test_sweep_and_open_find_real_groups() -> None:
    with group() as made:
        if not made.paths:
            pytest.skip("no group could be made")
        (found,) = HERE.sweep(made.name)
        assert sorted(found.paths) == sorted(made.paths)
        assert sorted(HERE.open(made.name).paths) == sorted(made.paths)
        assert HERE.sweep(made.name, keep=[made.name]) == []
