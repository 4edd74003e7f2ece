import asyncio
import fcntl
import os
import signal
import struct
from pathlib import Path

import pytest

from cloche import errors, interfaces, model, policy
from cloche.drivers import narrow, process, supervising
from cloche.linux import landlock, processes, seccomp, syscalls
from tests.drivers import rungs
from tests.drivers.rungs import Box, in_box

make = process.ProcessDriver


# ── the filter, as the kernel would run it ─────────────────────────────────────────────────────────

KILL, ALLOW = 0x80000000, 0x7FFF0000
NATIVE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, arch: int, nr: int, *args: int) -> int:
    """A classic BPF machine, as much of it as our filters use."""
    words = struct.pack("=IIQ6Q", nr, arch, 0, *args, *([0] * (6 - len(args))))
    lines = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, then, otherwise, operand = lines[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", words, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            at += operand
        elif code == 0x06:
            return operand
        else:
            hit = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            at += then if hit else otherwise


@pytest.fixture(params=["x86_64", "aarch64"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def filtered(arch: str, name: str, *args: int) -> int:
    program = narrow.before(seccomp.build("permissive", arch=arch, notify=True), narrow.PROCESS, arch=arch)
    number = syscalls.number(name, arch=arch)
    assert number is not None
    return decide(program, NATIVE[arch], number, *args)


def test_foreign_architectures_reach_the_profile(arch: str) -> None:
    program = narrow.before(seccomp.build("moderate", arch=arch), narrow.PROCESS, arch=arch)
    for number in (0, 41, 198, 359):
        assert decide(program, 0x40000003, number) == KILL


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("socket", (1, 1)), ("socket", (2, 2)), ("socket", (16, 3)), ("connect", (3,)), ("socketpair", (1, 2)),
        ("socketpair", (1, 3)), ("socketpair", (1, 0x80002)), ("shmget", ()), ("mq_open", ()), ("fsetxattr", ()),
        ("prlimit64", (1,)), ("prlimit64", (1 << 32 | 7,)), ("setpriority", (2, 0)), ("setpriority", (0, 5)),
        ("ioprio_set", (3, 0)), ("ioctl", (3, 0x40086602)), ("ioctl", (3, 1 << 32 | 0x401C5820)),
        ("sched_setaffinity", (9,)),
    ],
)  # fmt: skip
def test_what_landlock_leaves_open_is_refused(arch: str, name: str, args: tuple[int, ...]) -> None:
    assert filtered(arch, name, *args) & 0xFFFF0000 == narrow.ERRNO


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("socketpair", (1, 1)), ("socketpair", (1, 0x80005)), ("prlimit64", (0,)), ("setpriority", (0, 0)),
        ("ioprio_set", (1, 0)), ("ioctl", (1, 0x5401)), ("read", (0,)), ("sched_setaffinity", (0,)),
    ],
)  # fmt: skip
def test_what_a_program_does_to_itself_passes(arch: str, name: str, args: tuple[int, ...]) -> None:
    assert filtered(arch, name, *args) == ALLOW


def test_changes_of_files_wait_for_the_supervisor(arch: str) -> None:
    for name in narrow.SUPERVISED:
        if syscalls.number(name, arch=arch) is not None:
            assert filtered(arch, name) == narrow.NOTIFY, name


def test_the_profile_still_decides_the_rest(arch: str) -> None:
    profile = seccomp.build("moderate", arch=arch)
    whole = narrow.before(profile, narrow.PROCESS, arch=arch)
    touched = {rule[0] for rule in narrow.PROCESS}
    for name in syscalls.TABLE:
        number = syscalls.number(name, arch=arch)
        if number is not None and name not in touched:
            assert decide(whole, NATIVE[arch], number) == decide(profile, NATIVE[arch], number), name


# ── refusing to start ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("abi", [0, 1, 2])
def test_no_landlock_no_sandbox(abi: int, tmp_path: Path) -> None:
    with pytest.raises(errors.NotSupported, match="needs Landlock 3") as refusal:
        asyncio.run(make(str(tmp_path), landlock_abi=abi).start())
    assert refusal.value.hint is not None


def test_a_kernel_that_breaks_its_promise_makes_no_sandbox(tmp_path: Path) -> None:
    async def whole() -> None:
        driver = await rungs.started(make, tmp_path)
        driver.abi = 0  # what the supervisor is told: no Landlock after all
        with pytest.raises(errors.ClocheError):
            await driver.create("a" * 20, model.SandboxSpec(), rungs.POLICY)
        assert driver.machines == {}

    asyncio.run(whole())
    assert rungs.leftovers(tmp_path) == []


def test_an_older_landlock_is_used_and_said(tmp_path: Path) -> None:
    if landlock.abi() < 5:
        pytest.skip("this kernel's Landlock is older itself")

    async def work(box: Box) -> None:
        assert box.machine.isolation.landlock_abi == 5
        assert any("signal" in sentence for sentence in box.machine.isolation.missing)
        await rungs.host_files_cannot_be_written(box)

    in_box(lambda home: make(home, landlock_abi=5), tmp_path, work)


# ── the behaviours of every rung ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("behaviour", rungs.BEHAVIOURS, ids=lambda work: work.__name__)
def test_behaviour(behaviour: rungs.Work, tmp_path: Path) -> None:
    in_box(make, tmp_path, behaviour)


def test_the_claims_are_the_lowest(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        claimed = box.machine.isolation
        assert (claimed.level, claimed.driver, claimed.root) == ("process", "process", "host")
        assert not claimed.user_namespace
        assert claimed.landlock_abi >= process.LEAST_ABI
        assert len(claimed.missing) >= 3
        assert box.machine.limits["disk_mib"].enforcement == "none"

    in_box(make, tmp_path, work)


def test_nothing_can_be_gained(tmp_path: Path) -> None:
    in_box(
        make,
        tmp_path,
        rungs.nothing_can_be_gained,
        rules=policy.Merged(syscalls=policy.Calls(profile="permissive")),
    )


# ── what Landlock has no word for ──────────────────────────────────────────────────────────────────


def test_modes_outside_cannot_be_changed(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        canary = box.outside / "canary"
        canary.chmod(0o600)
        room = box.machine.room  # type: ignore[attr-defined]
        for code in (
            f"os.chmod({str(canary)!r}, 0o777)",
            f"os.chmod({str(box.outside)!r}, 0o777)",
            f"os.symlink({str(canary)!r}, 'link'); os.chmod('link', 0o777)",
            f"os.chdir({str(box.outside)!r}); os.chmod('canary', 0o777)",
            f"os.chmod({room + '/../..'!r} + '/../../outside/canary', 0o777)",
            f"os.chmod({room!r}, 0o777)",
            f"os.chmod('/proc/self/root' + {str(canary)!r}, 0o777)",
            f"fd = os.open({str(box.outside)!r}, os.O_PATH); os.chmod('canary', 0o777, dir_fd=fd)",
            f"fd = os.open({str(canary)!r}, os.O_PATH); os.chmod('/proc/self/fd/%d' % fd, 0o777)",
            f"os.utime({str(canary)!r}, (1, 1))",
            f"os.chown({str(canary)!r}, os.getuid(), -1)",
            f"os.setxattr({str(canary)!r}, 'user.x', b'1')",
            "os.fchmod(os.open('/usr/bin/env', os.O_RDONLY), 0o777)",
            "os.chmod('/proc/version', 0o777)",
        ):
            ran = await box.python(f"import os; {code}")
            assert ran.exit_code == 1, code
            assert "Error" in ran.err
        assert canary.stat().st_mode & 0o777 == 0o600
        assert canary.stat().st_mtime > 1_000_000_000
        assert os.stat(room).st_mode & 0o777 == 0o700
        assert os.stat("/usr/bin/env").st_mode & 0o777 == 0o755

    in_box(make, tmp_path, work)


def test_modes_inside_are_the_programs_own(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        ran = await box.python("""
import os, shutil
open("a", "w").write("x")
os.mkdir("d")
os.chmod("a", 0o740)
os.chmod("d", 0o711)
os.fchmod(os.open("a", os.O_RDONLY), 0o741)
fd = os.open("d", os.O_RDONLY)
open("d/b", "w").close()
os.chmod("b", 0o600, dir_fd=fd)
os.utime("a", ns=(5_000_000_001, 7_000_000_003))
os.utime("b", (11, 12), dir_fd=fd)
os.symlink("a", "l")
os.utime("l", (21, 22), follow_symlinks=False)
os.chown("a", os.getuid(), os.getgid())
a = os.stat("a")
shutil.copy2("a", "c")
print(oct(a.st_mode), a.st_atime_ns, a.st_mtime_ns, oct(os.stat("d/b").st_mode), os.stat("d/b").st_mtime)
print(os.stat("c").st_mtime_ns, os.lstat("l").st_mtime)
""")
        assert ran.err == ""
        assert ran.out == "0o100741 5000000001 7000000003 0o100600 12.0\n7000000003 22.0\n"
        assert (await box.run("touch -a -d 2001-01-01T00:00:00Z a; stat -c '%X %Y' a")).out == "978307200 7\n"
        ran = await box.run(
            "tar cf x.tar a d && mkdir e && tar xpf x.tar -C e && stat -c %a e/a && git init -q r"
        )
        assert ran.out == "741\n"

    in_box(make, tmp_path, work)


def test_names_elsewhere_cannot_be_watched(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        code = (
            "import ctypes; l = ctypes.CDLL(None); print(l.inotify_add_watch(l.inotify_init(), {!r}, 0x100))"
        )
        assert (await box.python(code.format(str(box.outside).encode()))).out == "-1\n"
        assert (await box.python(code.format(b"."))).out == "-1\n"

    in_box(make, tmp_path, work)


def test_shared_memory_of_the_host_is_out_of_reach(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        code = "import ctypes; print(ctypes.CDLL(None).shmget(7, 4096, 0o1600))"
        assert (await box.python(code)).out == "-1\n"
        assert (await box.run("echo x > /dev/shm/planted")).exit_code != 0
        assert (await box.run("ls /dev/pts")).exit_code != 0

    in_box(make, tmp_path, work)


def test_ports_are_refused_with_the_reason(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        with pytest.raises(errors.NotSupported, match="no network of its own"):
            await box.machine.connect(8000)

    in_box(make, tmp_path, work)


# ── paths ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_workspace_exists_in_the_api_only(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        room = box.machine.room  # type: ignore[attr-defined]
        assert (await box.run("pwd")).out == f"{room}/workspace\n"
        assert (await box.run("pwd", cwd="/workspace")).out == f"{room}/workspace\n"
        assert (await box.run("pwd", cwd="/tmp")).out == f"{room}/tmp\n"
        assert (
            await box.run("echo $HOME $TMPDIR $CLOCHE_WORKSPACE")
        ).out == f"{room}/home {room}/tmp {room}/workspace\n"
        assert (await box.run("ls /workspace")).exit_code != 0

    in_box(make, tmp_path, work)


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/workspace", "R/workspace"), ("/workspace/a", "R/workspace/a"), ("/workspaces", "/workspaces"),
        ("/tmp/x", "R/tmp/x"), ("/var/tmp/x", "R/tmp/x"), ("/home/user/.x", "R/home/.x"), ("/home/users", "/home/users"),
        ("a/b", "a/b"), ("/usr/bin/env", "/usr/bin/env"),
    ],
)  # fmt: skip
def test_paths_are_translated(path: str, real: str, tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        machine = box.machine
        assert isinstance(machine, process.ProcessMachine)
        assert machine.real(path) == real.replace("R", machine.room)

    in_box(make, tmp_path, work)


# ── the end ────────────────────────────────────────────────────────────────────────────────────────


def test_tree_kill_spares_the_host(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        with rungs.host_process() as pid:
            child, out, err = await box.start("sleep 1000 & sleep 1000")
            await box.machine.signal(child.pid, signal.SIGKILL, scope="tree")
            assert (await child.exited).signal == signal.SIGKILL
            os.close(out)
            os.close(err)
            assert processes.is_running(pid)
            assert rungs.state_of(pid) != "T", "stopped by the look for the tree"
        assert (await box.run("echo on")).out == "on\n"

    # Without Landlock's scope nothing but the agent's own care would spare it.
    in_box(lambda home: make(home, landlock_abi=min(5, landlock.abi())), tmp_path, work)


def test_two_executions_have_their_own_trees(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        first, second = await box.start("sleep 1000 & wait"), await box.start("sleep 1000 & wait")
        await box.machine.signal(first[0].pid, signal.SIGKILL, scope="tree")
        await first[0].exited
        assert not second[0].exited.done()
        for _, out, err in (first, second):
            os.close(out)
            os.close(err)

    in_box(make, tmp_path, work)


@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_whoever_is_killed_nothing_survives(victim: str, tmp_path: Path) -> None:
    mark = f"1{os.getpid()}5"

    async def work(box: Box) -> None:
        _, out, err = await box.start(f"(setsid sh -c 'sleep {mark} & echo up' &); sleep {mark}")
        assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
        supervisor = box.machine.host_pid
        agent = processes.descendants(supervisor)[0]
        os.kill(agent if victim == "agent" else supervisor, signal.SIGKILL)
        await box.machine.ended
        await rungs.nothing_carries(mark)
        os.close(out)
        os.close(err)

    in_box(make, tmp_path, work)
    assert rungs.leftovers(tmp_path / "home") == []


def test_a_program_that_kills_all_it_can_ends_its_sandbox_only(tmp_path: Path) -> None:
    if landlock.abi() < process.SCOPED_ABI:
        pytest.skip("Landlock scopes signals from 6 on")

    async def work(box: Box) -> None:
        with rungs.host_process() as pid:
            with pytest.raises(errors.SandboxLost):
                await box.run("kill -9 -1")
            await box.machine.ended
            assert processes.is_running(pid)

    in_box(make, tmp_path, work)


def test_the_supervisor_is_out_of_reach(tmp_path: Path) -> None:
    if landlock.abi() < process.SCOPED_ABI:
        pytest.skip("Landlock scopes signals from 6 on")

    async def work(box: Box) -> None:
        pid = box.machine.host_pid
        assert (await box.run(f"kill -9 {pid}; kill -STOP {pid}; cat /proc/{pid}/environ")).exit_code != 0
        assert (await box.run("echo on")).out == "on\n"

    in_box(make, tmp_path, work)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    mark = f"1{os.getpid()}3"

    async def work(box: Box) -> None:
        child, out, err = await box.start(f"(setsid sh -c 'sleep {mark} & echo up' &); sleep {mark}")
        assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
        assert rungs.leftovers(tmp_path / "home") == [box.machine.id]
        await box.machine.kill("enough")
        assert rungs.carrying(mark) == []
        assert rungs.leftovers(tmp_path / "home") == []
        assert await box.machine.ended == "enough"
        with pytest.raises(errors.SandboxLost):
            await child.exited
        with pytest.raises(errors.SandboxLost):
            await box.run("true")
        await box.machine.kill("twice is harmless")
        os.close(out)
        os.close(err)

    descriptors = len(os.listdir("/proc/self/fd"))
    in_box(make, tmp_path, work)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert rungs.groups_of(os.getpid()) == []


def test_what_cannot_be_given_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    async def whole() -> None:
        driver = await rungs.started(make, tmp_path)
        with pytest.raises(errors.NotSupported, match="requires 'user_namespace'"):
            await driver.create(
                "a" * 20,
                model.SandboxSpec(),
                policy.Merged(isolation=policy.Least(required=("user_namespace",))),
            )
        exposure = interfaces.Exposure(root=str(tmp_path), owner=(0, 0))
        with pytest.raises(errors.NotSupported, match="workspace"):
            await driver.create("a" * 20, model.SandboxSpec(), rungs.POLICY, exposure)
        await driver.close()

    asyncio.run(whole())
    assert rungs.leftovers(tmp_path) == []


def test_a_killed_engine_leaves_nothing(tmp_path: Path) -> None:
    rungs.a_killed_engine_leaves_nothing(make, "process", "ProcessDriver", tmp_path)


def test_a_directory_made_to_stay_is_removed(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        ran = await box.run("mkdir -p a/b; touch a/b/c; chmod 000 a/b a; ln -s / root; mkfifo f")
        assert ran.exit_code == 0
        deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
        assert (await box.python(deep)).exit_code == 0

    in_box(make, tmp_path, work)
    assert rungs.leftovers(tmp_path / "home") == []


def test_removing_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "gone" / "in").mkdir(parents=True)
    (tmp_path / "gone" / "in" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    supervising.remove(str(tmp_path / "gone"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_sweeping_takes_what_nobody_holds(tmp_path: Path) -> None:
    for name in ("held", "abandoned", "kept", "foreign"):
        room = tmp_path / "sandboxes" / name
        (room / "workspace").mkdir(parents=True)
        if name != "foreign":
            (room / ".process").touch()
    lock = os.open(tmp_path / "sandboxes" / "held", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert make(str(tmp_path)).sweep({"kept"}) == ["abandoned"]
    os.close(lock)
    assert sorted(rungs.leftovers(tmp_path)) == ["foreign", "held", "kept"]


def test_a_living_sandbox_is_not_swept(tmp_path: Path) -> None:
    async def work(box: Box) -> None:
        assert box.machine.id not in box.driver.sweep(set())
        assert (await box.run("echo on")).out == "on\n"

    in_box(make, tmp_path, work)
