"""What the tests of the rungs `bubblewrap` and `process` share: a sandbox to try things in, and the behaviours that
both must show. A behaviour is a coroutine over a `Box`; each test file runs all of them on its own rung."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from cloche import errors, interfaces, model, policy
from cloche.drivers import spawned
from cloche.linux import cgroups, processes

POLICY = policy.Merged(isolation=policy.Least(minimum="process"))


class Ran(NamedTuple):
    exit_code: int | None
    signal: int | None
    out: str
    err: str


class Box:
    """A machine, with the little of an engine that tests need."""

    def __init__(self, driver: spawned.SpawnedDriver, machine: spawned.SpawnedMachine, outside: Path) -> None:
        self.driver = driver
        self.machine = machine
        self.outside = outside
        """A directory of the host that no sandbox shows."""

    async def start(
        self, command: str | list[str], stdin: bytes = b"", **fields
    ) -> tuple[interfaces.Child, int, int]:
        read_in, write_in = os.pipe()
        out, write_out = os.pipe()
        err, write_err = os.pipe()
        os.write(write_in, stdin)
        os.close(write_in)
        request = {"env": {}, "cwd": None, "user": "user", "fds": [read_in, write_out, write_err], **fields}
        try:
            child = await self.machine.start(interfaces.Start(command, **request))
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            for fd in (read_in, write_out, write_err):
                os.close(fd)
        return child, out, err

    async def run(self, command: str | list[str], stdin: bytes = b"", **fields) -> Ran:
        child, out, err = await self.start(command, stdin, **fields)
        texts = await asyncio.gather(*(asyncio.to_thread(_drain, fd) for fd in (out, err)))
        status = await child.exited
        return Ran(status.exit_code, status.signal, *texts)

    async def python(self, code: str) -> Ran:
        return await self.run(["python3", "-c", code])

    async def write(self, path: str, text: str) -> None:
        fd = await self.machine.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, parents=True)
        with os.fdopen(fd, "w") as file:
            file.write(text)

    async def read(self, path: str) -> str:
        with os.fdopen(await self.machine.open_file(path, os.O_RDONLY)) as file:
            return file.read()


def _drain(fd: int) -> str:
    with os.fdopen(fd, "rb") as stream:
        return stream.read().decode("utf-8", "replace")


Work = Callable[[Box], Awaitable[None]]
Make = Callable[[str], spawned.SpawnedDriver]


async def started(make: Make, home: Path) -> spawned.SpawnedDriver:
    driver = make(str(home))
    try:
        await driver.start()
    except errors.NotSupported as problem:
        pytest.skip(problem.message)
    return driver


def in_box(make: Make, tmp_path: Path, work: Work, *, rules: policy.Merged = POLICY, **spec) -> None:
    """Run `work` in a new sandbox, and end it whatever happened."""

    async def whole() -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "canary").write_text("the canary sings")
        driver = await started(make, tmp_path / "home")
        try:
            machine = await driver.create(model.new_id(), model.SandboxSpec(**spec), rules)
            await work(Box(driver, machine, outside))
        finally:
            await driver.close()

    asyncio.run(whole())


# ── what is on the host ────────────────────────────────────────────────────────────────────────────


def carrying(mark: str) -> list[int]:
    """Living processes with `mark` in their command line or environment's place: their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words and processes.is_running(int(name)):
                found.append(int(name))
    return found


def limits_of(pid: int) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def groups_of(pid: int) -> list[str]:
    return [
        group.name for group in cgroups.detect().sweep("cloche-") if group.name.startswith(f"cloche-{pid}-")
    ]


def mounts_naming(text: str) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]


@contextmanager
def host_process() -> Iterator[int]:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


# ── refusals, then permissions: the behaviours of both rungs ───────────────────────────────────────


async def root_is_refused(box: Box) -> None:
    with pytest.raises(errors.NotSupported) as refusal:
        await box.run("true", user="root")
    assert refusal.value.code == "needs_subuids"


async def a_missing_directory_is_refused(box: Box) -> None:
    with pytest.raises(errors.ClocheError) as refusal:
        await box.run("true", cwd="/workspace/not-there")
    assert refusal.value.code == "cwd_not_found"


async def host_files_cannot_be_read(box: Box) -> None:
    for path in (box.outside / "canary", "/etc/shadow", Path.home() / ".bashrc", f"{box.driver.home}/secret"):
        ran = await box.run(["cat", str(path)])
        assert ran.exit_code == 1, path
        assert ran.out == ""
    assert (await box.run(["ls", "/root"])).out == ""
    with pytest.raises(errors.ClocheError):
        await box.read(str(box.outside / "canary"))
    assert (await box.run(["cat", "/usr/bin/env"])).exit_code == 0


async def host_files_cannot_be_written(box: Box) -> None:
    canary = box.outside / "canary"
    for line in (f"echo x > {canary}", f"echo x > {box.outside}/new", f"rm {canary}", f"truncate -s 0 {canary}",
                 f"ln {canary} stolen", f"mv {canary} stolen", f"touch -d 2001-01-01 {canary}", f"chmod 777 {canary}",
                 "echo x > /usr/bin/planted", "echo x > /etc/planted"):  # fmt: skip
        assert (await box.run(line)).exit_code != 0, line
    assert canary.read_text() == "the canary sings"
    assert canary.stat().st_mode & 0o777 != 0o777
    assert canary.stat().st_mtime > 1_000_000_000
    assert [p.name for p in box.outside.iterdir()] == ["canary"]
    assert "planted" not in os.listdir("/usr/bin")
    assert (
        await box.run("echo x > new && mv new newer && chmod 700 newer && touch -d 2001-01-01 newer")
    ).exit_code == 0


async def the_claims_hold_inside(box: Box) -> None:
    status = (await box.run("cat /proc/self/status")).out
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert box.machine.isolation.seccomp
    assert not box.machine.isolation.uid_range


async def nothing_can_be_gained(box: Box) -> None:
    for line in (
        "unshare -r true",
        "unshare -m true",
        "mount -t tmpfs none /tmp",
        "setpriv --reuid 0 cat /etc/shadow",
    ):
        assert (await box.run(line)).exit_code != 0, line


async def the_environment_is_not_the_callers(box: Box) -> None:
    os.environ["CLOCHE_TEST_SECRET"] = "hush"
    try:
        assert "hush" not in (await box.run("env; cat /proc/*/environ")).out
    finally:
        del os.environ["CLOCHE_TEST_SECRET"]


async def tcp_of_the_host_is_out_of_reach(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        ran = await box.python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert ran.exit_code == 1
        with pytest.raises(BlockingIOError):
            listener.accept()


async def udp_of_the_host_is_out_of_reach(box: Box) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        port = receiver.getsockname()[1]
        await box.python(f"import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))")
        with pytest.raises(BlockingIOError):
            receiver.recv(10)


async def unix_sockets_of_the_host_are_out_of_reach(box: Box) -> None:
    path = str(box.outside / "s")
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        for listener, address in ((named, path), (abstract, f"\0cloche-test-{os.getpid()}")):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            ran = await box.python(f"import socket; socket.socket(1).connect({address!r})")
            assert ran.exit_code == 1, address
            with pytest.raises(BlockingIOError):
                listener.accept()
    ran = await box.python("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))")
    assert ran.out == "b'x'\n"


async def host_processes_cannot_be_signalled(box: Box) -> None:
    if box.machine.isolation.level == "process" and box.machine.isolation.landlock_abi < 6:
        pytest.skip("Landlock scopes signals from 6 on")
    with host_process() as pid:
        assert (await box.run(f"kill -9 {pid}")).exit_code != 0
        assert processes.is_running(pid)
    assert (await box.run("sleep 100 & kill -9 $!")).exit_code == 0


async def limits_of_host_processes_cannot_be_changed(box: Box) -> None:
    with host_process() as pid:
        before = limits_of(pid)
        ran = await box.python(f"import resource as r; r.prlimit({pid}, r.RLIMIT_CPU, (1, 1))")
        assert ran.exit_code == 1
        await box.run(f"renice 5 {pid}")
        assert limits_of(pid) == before
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert (await box.run("ulimit -n 100; ulimit -n")).out == "100\n"


async def descriptors_are_the_commands_own(box: Box) -> None:
    assert (await box.run("ls /proc/self/fd | sort -n | tr '\\n' ' '")).out.split() in (
        ["0", "1", "2", "3"],
        ["0", "1", "2"],
    )


async def a_refused_call_is_told(box: Box) -> None:
    told: list[tuple[int, model.Denial]] = []
    heard = asyncio.Event()

    def hear(leader: int, denial: model.Denial) -> None:
        told.append((leader, denial))
        heard.set()

    box.machine.on_denial = hear
    child, out, err = await box.start("unshare -r true")
    await child.exited
    os.close(out)
    os.close(err)
    await asyncio.wait_for(heard.wait(), 20)
    assert told[0][0] == child.pid
    assert told[0][1].operation == "unshare"
    assert told[0][1].evidence == "seccomp"


async def exit_codes_are_exact(box: Box) -> None:
    for code in (0, 1, 42, 255):
        assert (await box.run(f"exit {code}")).exit_code == code
    assert (await box.run(["/usr/bin/not-there"])).exit_code == 127
    assert (await box.run(["/usr"])).exit_code == 126
    assert (await box.run("kill -TERM $$"))[:2] == (None, signal.SIGTERM)


async def streams_are_separate_and_stdin_ends(box: Box) -> None:
    ran = await box.run("cat; echo no >&2; exit 3", b"fed")
    assert ran == Ran(3, None, "fed", "no\n")


async def a_long_line_runs(box: Box) -> None:
    line = "# " + "x" * 200_000 + "\necho done"
    assert (await box.run(line)).out == "done\n"


async def a_script_reads_its_own_descriptors(box: Box) -> None:
    assert (await box.run("cat <(echo a) /dev/stdin <<< b; echo c > /dev/stdout")).out == "a\nb\nc\n"


async def files_go_both_ways(box: Box) -> None:
    await box.write("a/b.txt", "from outside")
    assert (await box.run("cat a/b.txt; echo from inside > /$PWD/c")).out == "from outside"
    assert await box.read("/workspace/c") == "from inside\n"
    await box.machine.file_act("move", "c", target="/workspace/d")
    await box.machine.file_act("make_dir", "/workspace/e")
    await box.machine.file_act("chmod", "d", mode=0o750)
    entry = (await box.machine.file_act("stat", "/workspace/d")).entry
    assert (entry.mode & 0o777, entry.size) == (0o750, 12)
    listed = await box.machine.file_act("list", ".")
    assert sorted(e.name for e in listed.entries) == ["a", "d", "e"]
    await box.machine.file_act("remove", "a", recursive=True)
    assert (await box.run("ls")).out == "d\ne\n"


async def temporary_files_work(box: Box) -> None:
    await box.write("/tmp/x", "1")
    await box.write("/home/user/y", "2")
    assert (await box.run("cat $TMPDIR/x $HOME/y; mktemp >/dev/null")).out == "12"


async def odd_paths_are_errors(box: Box) -> None:
    await box.run("mkfifo f; ln -s loop loop; ln -s /proc/self/root r")
    for path, code in (
        ("f", "not_regular_file"),
        ("loop", "path_loop"),
        ("none", "file_not_found"),
        (".", "is_directory"),
    ):
        with pytest.raises(errors.ClocheError) as refusal:
            await box.read(path)
        assert refusal.value.code == code, path


async def a_directory_can_be_watched(box: Box) -> None:
    watching = box.machine.watch("/workspace", recursive=False)
    first = asyncio.ensure_future(anext(watching))
    while not box.machine._watches:
        await asyncio.sleep(0)
    await box.run("echo x > seen")
    event = await asyncio.wait_for(first, 20)
    assert (event.type, event.path) == ("create", "seen")
    box.machine.kill_now()  # an end of the machine is an end of the watch
    async for event in watching:
        assert event.path == "seen"


async def a_terminal_is_one(box: Box) -> None:
    terminal = box.machine.open_terminal()
    start = interfaces.Start(
        "test -t 0 && stty size && echo on /dev/tty >/dev/tty", {}, None, "user", [terminal.slave_fd], True
    )
    child = await box.machine.start(start)
    os.close(terminal.slave_fd)
    try:
        assert (await child.exited).exit_code == 0
        assert b"on /dev/tty" in os.read(terminal.master_fd, 4096)
    finally:
        os.close(terminal.master_fd)


async def signals_reach_one_group(box: Box) -> None:
    child, out, err = await box.start("trap 'echo got; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
    await box.machine.signal(child.pid, signal.SIGTERM)
    assert (await child.exited).exit_code == 7
    os.close(out)
    os.close(err)


async def a_tree_dies_with_its_daemons(box: Box) -> None:
    mark = f"{os.getpid()}{id(box)}"
    child, out, err = await box.start(f"(setsid sh -c 'sleep 1{mark} & echo up' &) ; sleep 1{mark}")
    assert await asyncio.to_thread(os.read, out, 10) == b"up\n"
    assert len(carrying(f"1{mark}")) >= 2
    await box.machine.signal(child.pid, signal.SIGKILL, scope="tree")
    assert (await child.exited).signal == signal.SIGKILL
    os.close(out)
    os.close(err)
    await nothing_carries(f"1{mark}")


async def variables_can_be_bound_later(box: Box) -> None:
    await box.machine.bind(interfaces.Binding(env={"LATE": "1"}))
    assert (await box.run("echo $LATE")).out == "1\n"


_FORK_MANY = """
import os, signal
made = []
try:
    while len(made) < 1000:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        made.append(pid)
except BlockingIOError:
    pass
for pid in made:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
print(len(made))
"""


async def limits_are_told(box: Box) -> None:
    assert set(box.machine.limits) == {"memory_mib", "cpus", "pids", "disk_mib"}
    usage = box.machine.usage()
    assert usage.pids >= 1
    held = box.machine.limits["pids"]
    if held.enforcement == "enforced":
        started = int((await box.python(_FORK_MANY)).out)
        assert started < held.value
        assert (await box.run("echo on")).out == "on\n"


async def a_pause_stops_it(box: Box) -> None:
    try:
        await box.machine.pause()
    except errors.NotSupported:
        assert box.machine._group is None
        return
    assert box.machine._group is not None
    assert box.machine._group.frozen
    await box.machine.resume()
    assert (await box.run("echo on")).out == "on\n"
    await box.machine.pause()  # and is ended like that


async def nothing_carries(mark: str) -> None:
    """The kernel takes a moment to bury the dead; the test's own ceiling bounds it."""
    while carrying(mark):
        await asyncio.sleep(0)


BEHAVIOURS: list[Work] = [
    root_is_refused, a_missing_directory_is_refused, host_files_cannot_be_read, host_files_cannot_be_written,
    the_claims_hold_inside, nothing_can_be_gained, the_environment_is_not_the_callers, tcp_of_the_host_is_out_of_reach,
    udp_of_the_host_is_out_of_reach, unix_sockets_of_the_host_are_out_of_reach, host_processes_cannot_be_signalled,
    limits_of_host_processes_cannot_be_changed, descriptors_are_the_commands_own, a_refused_call_is_told,
    exit_codes_are_exact, streams_are_separate_and_stdin_ends, a_long_line_runs, a_script_reads_its_own_descriptors,
    files_go_both_ways, temporary_files_work, odd_paths_are_errors, a_directory_can_be_watched, a_terminal_is_one,
    signals_reach_one_group, a_tree_dies_with_its_daemons, variables_can_be_bound_later, limits_are_told, a_pause_stops_it,
]  # fmt: skip


# ── what both must leave behind: nothing ───────────────────────────────────────────────────────────

ENGINE = """
import asyncio, os, sys
from cloche import interfaces, model, policy
from cloche.drivers.{module} import {driver}

async def main():
    made = {driver}(sys.argv[1])
    await made.start()
    box = await made.create(model.new_id(), model.SandboxSpec(), policy.Merged(isolation=policy.Least(minimum="process")))
    null = os.open("/dev/null", os.O_RDWR)
    read, write = os.pipe()
    line = "(setsid sh -c 'sleep " + sys.argv[2] + " & echo up' &); sleep " + sys.argv[2]
    await box.start(interfaces.Start(line, {{}}, None, "user", [null, write, null]))
    os.close(write)
    assert os.read(read, 3) == b"up\\n"
    print("running", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def a_killed_engine_leaves_nothing(make: Make, module: str, driver: str, tmp_path: Path) -> None:
    asyncio.run(started(make, tmp_path / "home"))
    mark = f"1{os.getpid()}7"
    code = ENGINE.format(module=module, driver=driver)
    engine = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "home"), mark], stdout=subprocess.PIPE
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == b"running\n"
        inside = [pid for pid in carrying(mark) if pid != engine.pid]
        assert len(inside) >= 2
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()
    asyncio.run(nothing_carries(mark))
    while leftovers(tmp_path / "home"):  # a supervisor outlives its engine until it has tidied up
        time.sleep(0)
    make(str(tmp_path / "home")).sweep(set())
    assert groups_of(engine.pid) == []
    assert mounts_naming(str(tmp_path)) == []


def leftovers(home: Path) -> list[str]:
    sandboxes = home / "sandboxes"
    return os.listdir(sandboxes) if sandboxes.exists() else []
