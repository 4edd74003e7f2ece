"""Processes outside cannot be seen, signalled, traced or limited from inside, and nothing inside stops the engine."""

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cloche import errors
from tests.security import glass

# Each program gets the pid of a process on the host, of the same user as the caller, and does its worst.
ATTACKS = {
    "kill": "tried(lambda: os.kill(pid, 9))",
    "stop": "tried(lambda: os.kill(pid, signal.SIGSTOP))",
    "kill-everything": "tried(lambda: os.kill(-1, 0)); [tried(lambda: os.kill(p, 9)) for p in range(2, 40000) if p != os.getpid()]",
    "kill-group": "tried(lambda: os.killpg(pid, 9))",
    "tgkill": "call(131 if ARM else 234, pid, pid, 9)",
    "sigqueue": "call(240 if ARM else 297, pid, pid, 9, b'\\0' * 128)",
    "pidfd": "fd = call(434, pid, 0); call(424, fd, 9, 0, 0)",
    "pidfd-of-all": "[call(424, fd, 9, 0, 0) for p in range(2, 4000) if p != os.getpid() and (fd := call(434, p, 0)) >= 0]",
    "attach": "call(117 if ARM else 101, 16, pid, 0, 0)",
    "seize": "call(117 if ARM else 101, 0x4206, pid, 0, 0)",
    "read-memory": "b = ctypes.create_string_buffer(64); call(270 if ARM else 310, pid, struct.pack('PP', ctypes.addressof(b), 64), 1, struct.pack('PP', 0x400000, 64), 1, 0)",
    "mem-file": "tried(lambda: open(f'/proc/{pid}/mem', 'r+b').write(b'x'))",
    "limit": "call(261 if ARM else 302, pid, 0, struct.pack('QQ', 1, 1), 0)",
    "priority": "tried(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))",
    "affinity": "tried(lambda: os.sched_setaffinity(pid, {0}))",
    "oom-score": "tried(lambda: open(f'/proc/{pid}/oom_score_adj', 'w').write('1000'))",
    "take-descriptors": "fd = call(434, pid, 0); [call(438, fd, n, 0) for n in range(8)]",
    "enter-namespaces": "[tried(lambda: call(268 if ARM else 308, os.open(f'/proc/{pid}/ns/{n}', 0), 0)) for n in ('mnt', 'pid', 'net', 'user')]",
}


@pytest.mark.parametrize("attack", ATTACKS)
@glass.identities
def test_a_host_process_cannot_be_reached(
    boxes: dict[str, glass.Box], canary_process: glass.CanaryProcess, profile: str, user: str, attack: str
) -> None:
    nice, cpus = os.getpriority(os.PRIO_PROCESS, canary_process.pid), os.sched_getaffinity(canary_process.pid)
    limits = Path(f"/proc/{canary_process.pid}/limits").read_text()
    score = Path(f"/proc/{canary_process.pid}/oom_score_adj").read_text()
    result = boxes[profile].python(
        f"pid = int(sys.argv[1]); {ATTACKS[attack]}", str(canary_process.pid), user=user
    )
    assert canary_process.is_well
    assert canary_process.token not in result.stdout
    assert os.getpriority(os.PRIO_PROCESS, canary_process.pid) == nice
    assert os.sched_getaffinity(canary_process.pid) == cpus
    assert Path(f"/proc/{canary_process.pid}/limits").read_text() == limits
    assert Path(f"/proc/{canary_process.pid}/oom_score_adj").read_text() == score


def test_every_host_process_survives_a_sweep_of_signals(canary_process: glass.CanaryProcess) -> None:
    with glass.box() as box:
        box.exec("kill -9 -1")
        box.exec("kill -STOP -1")
        assert canary_process.is_well
        assert box.works()


@glass.profiles
def test_own_processes_can_be_signalled(boxes: dict[str, glass.Box], profile: str) -> None:
    assert boxes[profile].out("sleep 1000 & kill -9 $!; wait $!; echo $?") == "137\n"


@glass.identities
def test_host_processes_are_not_seen(
    boxes: dict[str, glass.Box], canary_process: glass.CanaryProcess, profile: str, user: str
) -> None:
    seen = boxes[profile].out(
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/comm /proc/[0-9]*/environ 2>/dev/null; true", user=user
    )
    assert canary_process.token not in seen
    assert "cat" in boxes[profile].out(["cat", "/proc/self/comm"], user=user)


@glass.identities
def test_the_pid_namespace_is_private(boxes: dict[str, glass.Box], profile: str, user: str) -> None:
    seen = boxes[profile].report(
        "say({n: os.readlink(f'/proc/self/ns/{n}') for n in os.listdir('/proc/self/ns')})", user=user
    )
    private = ("pid", "mnt", "net", "ipc", "uts", "user", "cgroup", "time")
    assert all(seen[name] != os.readlink(f"/proc/self/ns/{name}") for name in private if name in seen)


# --- debugging, where a profile has it ----------------------------------------------------------------------

_TRACE = """
memory = ctypes.create_string_buffer(b"unchanged")
child = os.fork()
if child == 0:
    signal.pause()
nr = 117 if ARM else 101
attached = call(nr, 16, child, 0, 0) == 0
if attached:
    os.waitpid(child, 0)
    call(nr, 17, child, 0, 0)
read = ctypes.create_string_buffer(9)
local, remote = (struct.pack("PP", ctypes.addressof(b), 9) for b in (read, memory))
copied = call(270 if ARM else 310, child, local, 1, remote, 1, 0) == 9
source = ctypes.create_string_buffer(b"overwrite")
local = struct.pack("PP", ctypes.addressof(source), 9)
written = call(271 if ARM else 311, child, local, 1, remote, 1, 0) == 9
os.kill(child, 9)
os.waitpid(child, 0)
say([attached, copied and read.raw == b"unchanged", written])
"""


@glass.identities
def test_tracing_is_for_the_permissive_profile_only(
    boxes: dict[str, glass.Box], profile: str, user: str
) -> None:
    assert boxes[profile].report(_TRACE, user=user) == [profile == "permissive"] * 3


_TRACE_FIRST = """
nr = 117 if ARM else 101
memory = ctypes.create_string_buffer(8)
pair = struct.pack("PP", ctypes.addressof(memory), 8)
far = struct.pack("PP", 0x400000, 8)
say([call(nr, 16, 1, 0, 0) == 0, call(nr, 0x4206, 1, 0, 0) == 0, call(270 if ARM else 310, 1, pair, 1, far, 1, 0) > 0,
     tried(lambda: open("/proc/1/mem", "rb")) is not None])
"""


@glass.identities
def test_the_first_process_cannot_be_traced(boxes: dict[str, glass.Box], profile: str, user: str) -> None:
    assert boxes[profile].report(_TRACE_FIRST, user=user) == [False] * 4
    assert boxes[profile].works()


# --- the first process --------------------------------------------------------------------------------------


@glass.users
@pytest.mark.parametrize(
    "number", [*(n.value for n in signal.Signals if n.name not in ("SIGRTMIN", "SIGRTMAX"))]
)
def test_the_first_process_survives_every_signal(shared: glass.Box, user: str, number: int) -> None:
    shared.exec(["bash", "-c", f"kill -{number} 1"], user=user)
    assert shared.works()


LIMITS = {"NOFILE": 7, "AS": 9, "FSIZE": 1, "NPROC": 6, "DATA": 2, "STACK": 3, "CPU": 0}


@glass.users
@pytest.mark.parametrize("limit", LIMITS)
def test_limits_of_the_first_process_hurt_only_its_own_sandbox(user: str, limit: str) -> None:
    """With one uid inside and outside the kernel lets a command limit the agent: that ends its own sandbox at most."""
    program = "call(261 if ARM else 302, 1, int(sys.argv[1]), struct.pack('QQ', 0, 0), 0)"
    with glass.box() as box, glass.box() as other:
        acts = (
            lambda: box.python(program, str(LIMITS[limit]), user=user),
            lambda: box.exec("true", timeout_s=20),
            lambda: box.files.list("/workspace"),
        )
        for act in acts * 2:
            try:
                act()
            except errors.ClocheError:
                continue
        assert other.works()
        box.delete()
    with glass.box() as another:
        assert another.works()


@glass.users
def test_a_leaked_namespace_leads_nowhere(shared: glass.Box, user: str) -> None:
    """Every namespace that can be opened inside, entered: nothing but the sandbox's own remains."""
    entered = shared.report(
        """
before = {n: os.readlink(f"/proc/self/ns/{n}") for n in os.listdir("/proc/self/ns")}
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for name in before:
        fd = tried(lambda: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
        if fd is not None:
            call(268 if ARM else 308, fd, 0)
say(before == {n: os.readlink(f"/proc/self/ns/{n}") for n in before})
""",
        user=user,
    )
    assert entered is True


# --- terminals ----------------------------------------------------------------------------------------------

_TYPE = """
import termios
for request in (0x5412, 0x100005412, 0xdead00005412):
    for letter in b"INJECTED\\n":
        libc.ioctl(0, ctypes.c_ulong(request), bytes([letter]))
for sub in (2, 3, 4, 10, 11):
    libc.ioctl(0, ctypes.c_ulong(0x541C), bytes([sub, 0, 0, 0]))
import select
ready, _, _ = select.select([0], [], [], 0)
print("typed:", os.read(0, 100) if ready else b"")
print("size:", os.get_terminal_size(0).columns)
"""


@glass.identities
def test_nothing_can_be_typed_into_a_terminal(boxes: dict[str, glass.Box], profile: str, user: str) -> None:
    command = ["python3", "-I", "-c", glass.PRELUDE + _TYPE]
    started = boxes[profile].start(command, pty=(91, 24), user=user)
    result = glass.wait(started.wait())
    assert "INJECTED" not in result.stdout
    assert "typed: b''" in result.stdout
    assert "size: 91" in result.stdout  # the twin: other requests of a terminal work


def test_a_terminal_can_be_typed_on_from_outside(box: glass.Box) -> None:
    started = box.start(["head", "-n1"], pty=True)
    glass.wait(started.write(b"from outside\n"))
    assert "from outside" in glass.wait(started.wait()).stdout


_UNBLOCK = """
import termios
for fd in (0, 1, 2):
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    for path in (f"/proc/self/fd/{fd}", "/dev/tty", "/dev/ptmx"):
        again = tried(lambda: os.open(path, os.O_RDWR))
        if again is not None:
            fcntl.fcntl(again, fcntl.F_SETFL, 0)
    for more in (os.O_ASYNC | os.O_DIRECT | os.O_APPEND, 0):
        tried(lambda: fcntl.fcntl(fd, fcntl.F_SETFL, more))
    tried(lambda: fcntl.fcntl(fd, 1031, 4096))  # F_SETPIPE_SZ
if os.isatty(0):
    for action in (0, 1, 2, 3):
        tried(lambda: termios.tcflow(0, action))
    raw = termios.tcgetattr(0)
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 255, 255
    raw[3] &= ~termios.ICANON
    termios.tcsetattr(0, termios.TCSANOW, raw)
print("done", flush=True)
os.close(0)
"""


@pytest.mark.parametrize("kind", ["pipes", "terminal", "merged"])
def test_a_guest_that_clears_flags_does_not_hang_the_engine(box: glass.Box, kind: str) -> None:
    """Whatever is done to the descriptors inside, their other ends stay non-blocking: input of any size returns."""
    options = {"pty": True} if kind == "terminal" else {"merge": kind == "merged"}
    started = box.start(["python3", "-I", "-c", glass.PRELUDE + _UNBLOCK + "signal.pause()"], **options)
    assert b"done" in glass.until(started, b"done")
    for _ in range(8):
        try:
            glass.wait(started.write(b"x" * 32768))
        except errors.ClocheError:
            break
    with glass.box() as other:
        assert other.works()
    glass.wait(started.kill())
    glass.wait(started.wait())
    assert box.works()


def test_an_orphan_that_keeps_the_pipes_does_not_hold_the_result(box: glass.Box) -> None:
    result = box.exec("setsid sleep 1000 & (setsid yes >/dev/null &) ; echo leader", timeout_s=50)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "leader\n", False)


@pytest.mark.parametrize(
    "how", ["nohup sleep 1000 &", "setsid sleep 1000 &", "(setsid sh -c 'sleep 1000 & sleep 1000' &);"]
)
def test_nothing_survives_its_sandbox(how: str) -> None:
    with glass.box() as box:
        marker = f"1{os.getpid()}{abs(hash(how)) % 10000}"
        started = f"until grep -qz '^{marker}$' /proc/[0-9]*/cmdline 2>/dev/null; do :; done"
        box.exec(f"{how.replace('1000', marker)} {started}")
        assert _find(marker)  # the twin: while the sandbox lives it runs
    assert not _find(marker)


def _find(marker: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and f"sleep\0{marker}\0".encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(name)
        except OSError:
            continue
    return found


# --- the caller's own terminal and session ------------------------------------------------------------------

_WITH_TERMINAL = """
import os, pty, sys
os.environ["CLOCHE_HOME"], os.environ["CLOCHE_KEEPER"] = sys.argv[1], "off"
from cloche.sdk import portal
from cloche.sdk.sandboxes import AsyncSandbox
def fields(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
box = portal.run(AsyncSandbox.create())
portal.run(box.start("sleep 1000"))
ours = fields(os.getpid())[4]
# The launcher's parent has left, so it is not a descendant: look for the sandboxes by their command.
pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and p != str(os.getpid())]
def is_cloche(pid):
    try:
        return b"cloche.drivers.launcher" in open(f"/proc/{pid}/cmdline", "rb").read() and fields(pid)[4] == ours
    except OSError:
        return False
sharing = [pid for pid in pids if is_cloche(pid)]
told = portal.run(box.exec("exec 3<>/dev/tty && echo CANARY-ON-TERMINAL >&3"))
portal.run(box.delete())
portal.get().close()
print("sharing", len(sharing), "has-terminal", ours != "0")
"""


def test_the_caller_s_terminal_is_not_the_sandbox_s(tmp_path: Path) -> None:
    """A caller at a terminal: neither the launcher nor anything it forks has that terminal as its own."""
    master, slave = pty.openpty()
    said = bytearray()

    def drain() -> None:
        while True:
            try:
                said.extend(os.read(master, 4096))
            except OSError:
                return

    reader = threading.Thread(target=drain)
    reader.start()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + _WITH_TERMINAL, str(tmp_path)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment,
    )  # fmt: skip
    assert child.wait() == 0, said.decode()
    os.close(slave)
    reader.join()
    os.close(master)
    assert b"CANARY-ON-TERMINAL" not in said
    assert b"sharing 0 has-terminal True" in said
