"""What of the kernel is closed: capabilities, namespaces, dangerous calls, foreign architectures, set-uid programs."""

import json
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.linux import namespaces, seccomp, syscalls
from tests.security import glass

_X86 = platform.machine() == "x86_64"
x86 = pytest.mark.skipif(not _X86, reason="this entry to the kernel exists on x86-64 only")

# --- the state that a command starts in ---------------------------------------------------------------------


@glass.identities
@pytest.mark.parametrize("field", ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
def test_capabilities_are_empty(boxes: dict[str, glass.Box], profile: str, user: str, field: str) -> None:
    assert int(_status(boxes[profile], user)[field], 16) == 0


@glass.identities
@pytest.mark.parametrize(("field", "value"), [("NoNewPrivs", "1"), ("Seccomp", "2")])
def test_locks_are_on(boxes: dict[str, glass.Box], profile: str, user: str, field: str, value: str) -> None:
    assert _status(boxes[profile], user)[field] == value


@glass.identities
@pytest.mark.parametrize("how", ["pty", "context"])
def test_locks_are_on_however_a_program_was_started(
    boxes: dict[str, glass.Box], profile: str, user: str, how: str
) -> None:
    if how == "pty":
        said = glass.wait(
            glass.wait(boxes[profile].handle.start("cat /proc/self/status", pty=True, user=user)).wait()
        ).stdout
    else:
        said = glass.wait(boxes[profile].handle.run_code("print(open('/proc/self/status').read())")).stdout
    fields = _fields(said)
    assert [int(fields[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def _status(box: glass.Box, user: str) -> dict[str, str]:
    return _fields(box.out("cat /proc/self/status", user=user))


def _fields(text: str) -> dict[str, str]:
    return {line.split(":")[0]: line.split(":")[1].strip() for line in text.splitlines() if ":" in line}


@glass.identities
def test_groups_of_the_caller_do_not_enter(boxes: dict[str, glass.Box], profile: str, user: str) -> None:
    own = "0" if user == "root" else "1000"
    groups = set(boxes[profile].out("id -G", user=user).split())
    assert groups - {"65534"} == {
        own
    }  # what cannot be dropped without privilege has no name and no meaning inside


# --- calls that do not happen -------------------------------------------------------------------------------

# What could be seen if a call had an effect: namespaces, mounts, open descriptors, root, working directory, names.
# Each call is made in a child of its own, and the child looks.
_PROGRAM = """
def state():
    fds = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
    return {"ns": {n: os.readlink(f"/proc/self/ns/{n}") for n in sorted(os.listdir("/proc/self/ns"))},
            "mounts": open("/proc/self/mountinfo").read(), "fds": sorted(f for f in fds if not f.startswith("/proc/")),
            "root": os.stat("/").st_ino, "cwd": os.getcwd(), "uname": list(os.uname()), "keys": tried(lambda: open("/proc/keys").read())}
def n(arm, x86=None):
    return arm if ARM or x86 is None else x86
def attempt(expression):
    reading, writing = os.pipe()
    if os.fork() == 0:
        own = (os.open("/proc/self/ns/net", 0), call(434, 1, 0))
        before = state()
        result = eval(expression)
        os.write(writing, json.dumps([result, before == state()]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    os.wait()
    return json.loads(said) if said else None
path = b"/mnt"
os.makedirs("/tmp/jail", exist_ok=True)
say({name: attempt(expression) for name, expression in json.load(sys.stdin).items()})
"""

# name → (expression that makes the call, given n(generic number, number on x86-64))
CALLS = {
    "mount-tmpfs": "call(n(40, 165), b'x', path, b'tmpfs', 0, 0)",
    "mount-proc": "call(n(40, 165), b'proc', path, b'proc', 0, 0)",
    "mount-bind": "call(n(40, 165), b'/', path, 0, 4096, 0)",
    "mount-remount": "call(n(40, 165), 0, b'/', 0, 32, 0)",
    "mount-overlay": "call(n(40, 165), b'overlay', path, b'overlay', 0, b'lowerdir=/')",
    "umount-proc-mask": "call(n(39, 166), b'/proc/keys', 2)",
    "umount-dev": "call(n(39, 166), b'/dev', 2)",
    "umount-root": "call(n(39, 166), b'/', 2)",
    "pivot-root": "call(n(41, 155), b'/', b'/')",
    "open-tree": "call(428, -100, path, 1)",
    "move-mount": "call(429, -100, path, -100, b'/tmp', 0)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "fspick": "call(433, -100, b'/', 0)",
    "mount-setattr": "call(442, -100, b'/', 0, struct.pack('QQQQ', 0, 1, 0, 0), 32)",
    "open-tree-attr": "call(467, -100, path, 1, struct.pack('QQQQ', 0, 1, 0, 0), 32)",
    "setns": "call(n(268, 308), own[0], 0)",
    "bpf-map": "call(n(280, 321), 0, struct.pack('IIII', 1, 4, 4, 1) + b'\\0' * 112, 128)",
    "bpf-prog": "call(n(280, 321), 5, struct.pack('II', 1, 2) + b'\\0' * 120, 128)",
    "io-uring-setup": "call(425, 8, b'\\0' * 120)",
    "userfaultfd": "call(n(282, 323), 0)",
    "userfaultfd-user": "call(n(282, 323), 1)",
    "perf-event-open": "call(n(241, 298), struct.pack('IIQ', 1, 112, 0) + b'\\0' * 96, 0, -1, -1, 0)",
    "add-key": "call(n(217, 248), b'user', b'canary', b'x', 1, -3)",
    "keyctl-session": "call(n(219, 250), 1, 0)",
    "request-key": "call(n(218, 249), b'user', b'canary', 0, -3)",
    "init-module": "call(n(105, 175), b'\\x7fELF', 4, b'')",
    "finit-module": "call(n(273, 313), 0, b'', 0)",
    "kexec": "call(n(104, 246), 0, 0, 0, 0)",
    "reboot": "call(n(142, 169), 0xfee1dead, 672274793, 0, 0)",
    "swapon": "call(n(224, 167), b'/tmp/x', 0)",
    "acct": "call(n(89, 163), b'/tmp/x')",
    "sethostname": "call(n(161, 170), b'canary', 6)",
    "setdomainname": "call(n(162, 171), b'canary', 6)",
    "settimeofday": "call(n(170, 164), struct.pack('qq', 0, 0), 0)",
    "clock-settime": "call(n(112, 227), 0, struct.pack('qq', 0, 0))",
    "adjtimex": "call(n(171, 159), struct.pack('I', 1) + b'\\0' * 204)",
    "syslog-read": "call(n(116, 103), 3, ctypes.create_string_buffer(4096), 4096)",
    "open-by-handle": "call(n(265, 304), -100, struct.pack('II', 8, 1) + b'\\x02' + b'\\0' * 7, 0)",
    "fanotify": "call(n(262, 300), 0, 0)",
    "chroot": "call(n(51, 161), b'/tmp/jail')",
    "lookup-dcookie": "call(n(18, 212), 0, b' ' * 64, 64)",
    "quotactl": "call(n(60, 179), 0x80000200, 0, 0, 0)",
    "kcmp": "call(n(272, 312), 1, os.getpid(), 0, 0, 0)",
    "pidfd-getfd": "call(438, own[1], 0, 0)",
    "process-madvise": "call(440, own[1], 0, 0, 4, 0)",
    "personality-read-implies-exec": "libc.personality(0x0400000)",
    "personality-bug": "libc.personality(0x0000006)",
    "seccomp-listener": "tried(lambda: call(n(277, 317), 1, 8, struct.pack('HP', 1, ctypes.addressof(ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000), 8)))))",
    "iopl": "-1 if ARM else call(172, 3)",
    "ioperm": "-1 if ARM else call(173, 0, 8, 1)",
    "modify-ldt": "-1 if ARM else call(154, 1, b'\\0' * 16, 16)",
    "vhangup": "call(n(58, 153))",
    "af-packet": "call(n(198, 41), 17, 3, 0)",
    "af-alg": "call(n(198, 41), 38, 5, 0)",
    "af-vsock": "call(n(198, 41), 40, 1, 0)",
    "af-bluetooth": "call(n(198, 41), 31, 3, 0)",
    "af-can": "call(n(198, 41), 29, 3, 1)",
    "af-xdp": "call(n(198, 41), 44, 3, 0)",
    "af-tipc": "call(n(198, 41), 30, 1, 0)",
    "af-rds": "call(n(198, 41), 21, 5, 0)",
    "af-key": "call(n(198, 41), 15, 3, 2)",
    "af-smc": "call(n(198, 41), 43, 1, 0)",
    "af-kcm": "call(n(198, 41), 41, 5, 0)",
    "raw-socket": "call(n(198, 41), 2, 3, 1)",
    "raw-socket-v6": "call(n(198, 41), 10, 3, 58)",
    "unknown-number": "call(700, 0, 0, 0)",
    "clone3-newuser": "call(435, struct.pack('Q', 0x10000000) + b'\\0' * 80, 88)",
}


_reports: dict[tuple[str, str], dict[str, list[object]]] = {}


def _attempts(box: glass.Box, profile: str, user: str) -> dict[str, list[object]]:
    """Every call of the table, made by one program for each profile and user."""
    if (profile, user) not in _reports:
        _reports[profile, user] = box.report(_PROGRAM, stdin=json.dumps(CALLS), user=user)
    return _reports[profile, user]


_OPEN_WHERE_PERMISSIVE = ("modify-ldt",)


@pytest.mark.parametrize("name", CALLS)
@glass.identities
def test_a_dangerous_call_has_no_effect(
    boxes: dict[str, glass.Box], profile: str, user: str, name: str
) -> None:
    result, unchanged = _attempts(boxes[profile], profile, user)[name]
    expected = 0 if profile == "permissive" and name in _OPEN_WHERE_PERMISSIVE and _X86 else -1
    assert (result, unchanged) == (expected, True)
    assert os.uname().nodename != "canary"


TWINS = {
    "statfs": "os.statvfs('/').f_bsize > 0",
    "epoll": "__import__('select').epoll().fileno() >= 0",
    "memfd": "os.memfd_create('x') >= 0",
    "eventfd": "os.eventfd(0) >= 0",
    "inotify": "libc.inotify_init1(0) >= 0",
    "threads": "(lambda t: (t.start(), t.join(), True)[2])(__import__('threading').Thread(target=int))",
    "fork": "os.waitpid(os.fork() or os._exit(0), 0)[1] == 0",
    "posix-spawn": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)[1] == 0",
    "tcp-socket": "socket.socket(socket.AF_INET).fileno() >= 0",
    "udp-v6-socket": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).fileno() >= 0",
    "unix-socketpair": "len(socket.socketpair()) == 2",
    "netlink-route": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).fileno() >= 0",
    "personality-query": "libc.personality(0xffffffff) == 0",
    "own-filter": "libc.prctl(38, 1, 0, 0, 0) == 0",
    "unshare-files": "call(97 if ARM else 272, 0x400) == 0",
    "futex-and-mmap": "len(__import__('mmap').mmap(-1, 1 << 20)) == 1 << 20",
    "getrandom": "len(os.getrandom(8)) == 8",
    "priority-down": "os.nice(1) >= 1",
    "posix-timer": "signal.setitimer(signal.ITIMER_REAL, 100) == (0.0, 0.0)",
    "sendfile": "os.sendfile(os.memfd_create('a'), os.open('/etc/passwd', 0), 0, 10) == 10",
}


_TWIN_PROGRAM = """
def attempt(expression):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"yes" if tried(lambda: eval(expression)) else b"no")
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    os.wait()
    return said
say({name: attempt(expression) for name, expression in json.load(sys.stdin).items()})
"""


@pytest.fixture(scope="module")
def permitted(boxes: dict[str, glass.Box]) -> dict[str, dict[str, str]]:
    return {profile: box.report(_TWIN_PROGRAM, stdin=json.dumps(TWINS)) for profile, box in boxes.items()}


@pytest.mark.parametrize("name", TWINS)
@glass.profiles
def test_an_ordinary_call_works(permitted: dict[str, dict[str, str]], profile: str, name: str) -> None:
    assert permitted[profile][name] == "yes"


# --- namespaces ---------------------------------------------------------------------------------------------

FLAGS = {
    "NEWUSER": 0x10000000, "NEWNS": 0x00020000, "NEWPID": 0x20000000, "NEWNET": 0x40000000, "NEWIPC": 0x08000000,
    "NEWUTS": 0x04000000, "NEWCGROUP": 0x02000000, "NEWTIME": 0x00000080,
    "NEWUSER-and-NEWNS": 0x10020000, "everything": 0x7E020000,
}  # fmt: skip

_MAKE = """
before = {n: os.readlink(f"/proc/self/ns/{n}") for n in os.listdir("/proc/self/ns")}
def look():
    now = {n: os.readlink(f"/proc/self/ns/{n}") for n in before}
    return json.dumps([n for n in before if now[n] != before[n]]).encode() + b"\\n"
def attempt(flag):
    reading, writing = os.pipe()
    for word in (flag, flag | 1 << 40):  # the second would slip past a filter that compares all 64 bits
        if os.fork() == 0:
            call(97 if ARM else 272, word)
            os.write(writing, look())
            os._exit(0)
        os.wait()
        if flag == 0x80:
            continue  # in clone's flags these bits are a signal
        child = call(220 if ARM else 56, word | 17, 0, 0, 0, 0)  # as fork does it: the child goes on behind the call
        if child == 0:
            os.write(writing, look())
            os._exit(0)
        if child > 0:
            os.waitpid(child, 0)
    os.close(writing)
    with open(reading) as file:
        return [line.strip() for line in file if line.strip() != "[]"]
say({name: attempt(flag) for name, flag in json.load(sys.stdin).items()})
"""

_made: dict[tuple[str, str], dict[str, list[str]]] = {}


@pytest.mark.parametrize("flag", FLAGS)
@glass.identities
def test_no_namespace_can_be_made(boxes: dict[str, glass.Box], profile: str, user: str, flag: str) -> None:
    if (profile, user) not in _made:
        _made[profile, user] = boxes[profile].report(_MAKE, stdin=json.dumps(FLAGS), user=user)
    assert _made[profile, user][flag] == []


def _in_child(work: Callable[[], bool]) -> bool:
    """What `work` said in a forked child, which it may leave in any state."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b"yes" if work() else b"no")
        except BaseException as problem:
            os.write(writing, repr(problem).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    assert said in ("yes", "no"), said
    return said == "yes"


def _makes_user_namespace() -> bool:
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("closed", [True, False])
def test_user_namespaces_are_closed(closed: bool) -> None:
    """Without any filter: the limit in the sandbox's own user namespace is enough by itself."""
    maps = [(0, os.getuid(), 1)], [(0, os.getgid(), 1)]

    def enter() -> bool:
        # A mapping of one's own uid is written from inside, which `make_user` leaves to somebody privileged.
        if os.getuid() == 0:
            bounds = namespaces.Bounds()
            syscalls.setns(namespaces.make_user(*maps), syscalls.CLONE_NEWUSER)
            if closed:
                bounds.apply()
        else:
            uid, gid = os.getuid(), os.getgid()
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            for name, text in (("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1")):
                Path(f"/proc/self/{name}").write_text(text)
            if closed:
                Path("/proc/sys/user/max_user_namespaces").write_text("0")
        return _makes_user_namespace()

    before = Path("/proc/sys/user/max_user_namespaces").read_text()
    assert _in_child(enter) is not closed
    assert Path("/proc/sys/user/max_user_namespaces").read_text() == before


@glass.profiles
def test_the_limit_inside_is_nought(boxes: dict[str, glass.Box], profile: str) -> None:
    assert boxes[profile].out("cat /proc/sys/user/max_user_namespaces") == "0\n"
    assert Path("/proc/sys/user/max_user_namespaces").read_text() != "0\n"


@pytest.mark.parametrize("profile", glass.PROFILES)
def test_the_filter_alone_refuses_user_namespaces(profile: str) -> None:
    def work() -> bool:
        seccomp.load(seccomp.build(profile))
        return _makes_user_namespace()

    assert _in_child(work) is False
    assert _in_child(_makes_user_namespace) is True


# --- other ways into the kernel -----------------------------------------------------------------------------

_INT80 = r"""
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
int main(void) {
    /* mkdir by the number that it has for 32-bit programs; the path must lie below 4 GiB. */
    char *low = mmap((void *)0x10000000, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    strcpy(low, "/workspace/made-by-int80");
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "0"(39L), "b"(low), "c"(0755L) : "memory");
    puts("went on");
    return 0;
}
"""

_X32 = r"""
#include <stdio.h>
int main(void) {
    long result;
    const char *path = "/workspace/made-by-x32";
    __asm__ volatile("syscall" : "=a"(result) : "0"(0x40000000L + 83), "D"(path), "S"(0755L) : "rcx", "r11", "memory");
    puts("went on");
    return 0;
}
"""

_NATIVE = r"""
#include <stdio.h>
#include <sys/stat.h>
int main(void) { mkdir("/workspace/made-natively", 0755); puts("went on"); return 0; }
"""


@x86
@pytest.mark.parametrize("entry", ["int80", "x32"])
@glass.profiles
def test_foreign_entries_to_the_kernel_kill(profile: str, entry: str) -> None:
    with glass.box(profile=profile) as box:
        result = box.exec([box.install({"int80": _INT80, "x32": _X32}[entry])])
        assert box.out("ls /workspace") == ""
        assert "went on" not in result.stdout
        assert result.signal == 31  # SIGSYS


@glass.profiles
def test_a_native_program_runs(profile: str) -> None:
    with glass.box(profile=profile) as box:
        assert box.out([box.install(_NATIVE)]) == "went on\n"
        assert box.out("ls /workspace") == "made-natively\n"


@x86
def test_a_32_bit_program_does_not_run(box: glass.Box) -> None:
    """A whole program of the other architecture, hand-made: exit(42) by int 0x80."""
    code = bytes.fromhex("b801000000bb2a000000cd80")
    header = (
        b"\x7fELF\x01\x01\x01"
        + b"\0" * 9
        + bytes.fromhex("020003000100000054800408340000000000000000000000340020000100000000000000")
    )
    size = (84 + len(code)).to_bytes(4, "little")
    program = (
        bytes.fromhex("01000000000000000080040800800408") + size + size + bytes.fromhex("0500000000100000")
    )
    box.write("/tmp/thirty-two", header + program + code, mode=0o755)
    assert box.exec(["/tmp/thirty-two"]).exit_code != 42


# --- set-uid programs and root ------------------------------------------------------------------------------

_WHO = r"""
#include <stdio.h>
#include <unistd.h>
#include <sys/stat.h>
int main(void) { setuid(0); setgid(0); printf("%d %d %d\n", getuid(), geteuid(), getegid()); return 0; }
"""


@pytest.mark.parametrize("program", ["su", "mount", "passwd", "newgrp", "sudo", "chsh"])
@glass.profiles
def test_set_uid_programs_of_the_host_gain_nothing(
    boxes: dict[str, glass.Box], profile: str, program: str
) -> None:
    path = f"/usr/bin/{program}"
    if not os.path.exists(path) or not os.stat(path).st_mode & stat.S_ISUID:
        pytest.skip(f"this host has no set-uid {program}")
    look = f"""
import subprocess
child = subprocess.Popen([{path!r}], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
status = tried(lambda: open(f"/proc/{{child.pid}}/status").read()) or ""
child.kill()
child.wait()
say([line.split()[1:] for line in status.splitlines() if line.startswith(("Uid", "CapEff", "CapPrm"))])
"""
    for line in boxes[profile].report(look):
        assert line in ([["1000"] * 4][0], ["0000000000000000"])


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
@glass.users
def test_an_own_set_uid_program_gains_nothing(user: str, mode: int) -> None:
    """Made by root inside, if there is one, and run by the user."""
    with glass.box() as box:
        box.install(_WHO, "/tmp/who")
        box.exec(f"cp /tmp/who /tmp/setuid && chmod {mode:o} /tmp/setuid && ls -l /tmp/setuid", user=user)
        assert box.out(["/tmp/setuid"]) == "1000 1000 1000\n"


def test_file_capabilities_cannot_be_given(shared: glass.Box) -> None:
    set_capability = """
import shutil
shutil.copy("/bin/cat", "/tmp/cat")
tried(lambda: os.setxattr("/tmp/cat", "security.capability", struct.pack("<IIIII", 0x02000001, 0xffffffff, 0, 0xffffffff, 0)))
say(tried(lambda: len(os.getxattr("/tmp/cat", "security.capability"))))
"""
    assert shared.report(set_capability) is None


@glass.needs_range
@pytest.mark.parametrize(
    "act",
    [
        "os.chown('/workspace/owned', 0, 0) or os.stat('/workspace/owned').st_uid == 0",
        "os.setuid(1001) or True", "os.setgid(1001) or True", "os.setgroups([4]) or True", "os.setresuid(5, 5, 5) or True",
        "os.kill(1, 0) and False", "open('/home/user/private').read() == 'private'",
        "os.mknod('/tmp/node', 0o600 | stat.S_IFCHR, os.makedev(1, 1)) or True",
        "os.chroot('/tmp') or True", "os.sethostname('x') or True" if hasattr(os, "sethostname") else "False",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) or True", "os.nice(-5) < 0",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).fileno() >= 0",
        "socket.socket(socket.AF_INET).bind(('127.0.0.1', 80)) or True",
        "__import__('resource').setrlimit(__import__('resource').RLIMIT_CORE, (1 << 20, 1 << 20)) or True",
    ],
)  # fmt: skip
def test_root_inside_has_no_privilege(shared: glass.Box, act: str) -> None:
    shared.exec(
        "echo owned > /workspace/owned; echo private > /home/user/private; chmod 600 /home/user/private"
    )
    assert shared.report(f"say(bool(tried(lambda: {act})))", user="root") is False


@glass.needs_range
def test_root_inside_cannot_mount(shared: glass.Box) -> None:
    before = shared.out("cat /proc/self/mountinfo", user="root")
    shared.exec(
        "mount -t tmpfs x /mnt; mount --bind / /mnt; mount -o remount,rw /proc/sys; umount -l /proc/keys",
        user="root",
    )
    assert shared.out("cat /proc/self/mountinfo", user="root") == before


@glass.needs_range
def test_root_inside_is_root_of_its_own_files(shared: glass.Box) -> None:
    assert shared.out(
        "id -u; touch /etc/new && chmod 600 /etc/new && stat -c %u /etc/new; rm /usr/bin/yes; ls /usr/bin/yes || true",
        user="root",
    ).split()[:2] == ["0", "0"]
    assert os.path.exists("/usr/bin/yes")


@pytest.fixture
def private_file(owner: int) -> Iterator[Path]:
    """A file in /opt, which is shown, that only its owner on the host may read."""
    path = Path(f"/opt/.cloche-test-{os.getpid()}-{owner}")
    public = Path(f"{path}-public")
    for file, mode in ((path, 0o600), (public, 0o644)):
        file.write_text("canary-private")
        file.chmod(mode)
        os.chown(file, owner, owner)
    yield path
    path.unlink()
    public.unlink()


@glass.needs_range
@pytest.mark.parametrize(
    ("owner", "user"),
    [
        (0, "user"),
        (1000, "user"),
        (1000, "root"),
        (1001, "user"),
        (1001, "root"),
        (65534, "user"),
        (65534, "root"),
    ],
)
def test_private_files_of_the_host_stay_private(private_file: Path, shared: glass.Box, user: str) -> None:
    """The system's owners keep their numbers inside, so that root may read what is root's below /opt: see "What is shown"
    in docs/concepts/threat-model.md. People's files are nobody's inside, also those of the uid that the user has there."""
    assert "canary-private" not in shared.exec(["cat", str(private_file)], user=user).stdout
    assert shared.out(["cat", f"{private_file}-public"], user=user) == "canary-private"


def test_a_core_dump_starts_nothing_on_the_host(shared: glass.Box) -> None:
    """Zero is no limit to a core pattern that is a pipe; one byte is, by a special case of the kernel."""
    soft, hard = shared.report("import resource; say(resource.getrlimit(resource.RLIMIT_CORE))")
    assert (soft, hard) == (1, 1)
