"""The filters, three times over.

First by simulation: a small BPF machine runs every compiled program for every system call of both
architectures, and must agree with `explain`. Then against a list kept here, so that a rule lost from the
source is noticed. Last for real: a forked child loads the filter and tries what is forbidden, and the
permitted twin beside it.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from cloche.linux import seccomp, syscalls

InChild = Callable[[Callable[[], None]], None]

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028

KILL, ALLOW, NOTIFY, ERRNO = 0x80000000, 0x7FFF0000, 0x7FC00000, 0x00050000

combinations = pytest.mark.parametrize(
    ("profile", "arch"), [(p, a) for p in seccomp.PROFILES for a in syscalls.ARCHITECTURES]
)
native = pytest.mark.skipif(syscalls.ARCH not in AUDIT, reason=f"no filter for {syscalls.ARCH}")


def simulate(program: bytes, nr: int, arch: int, args: Sequence[int] = ()) -> int:
    """Run a classic BPF program on a `struct seccomp_data`; instructions it should not contain are errors."""
    padded = [*args, *[0] * (6 - len(args))]
    data = struct.pack("=IIQ6Q", nr & 0xFFFFFFFF, arch, 0, *(arg & 0xFFFFFFFFFFFFFFFF for arg in padded))
    lines = list(struct.iter_unpack("=HBBI", program))
    assert len(lines) <= 4096
    at, accumulator = 0, 0
    while True:
        code, jump_true, jump_false, operand = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x06:
            return int(operand)
        else:
            hit = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            at += jump_true if hit else jump_false


def outcome(action: int) -> str:
    if action == ALLOW:
        return "allow"
    if action == KILL:
        return "kill"
    if action == NOTIFY:
        return "notify"
    assert action & 0xFFFF0000 == ERRNO
    return "refuse:" + errno.errorcode[action & 0xFFFF]


# Arguments that reach every branch of every check: each single bit, the values in the rules, and high bits
# set above.
WORDS = sorted(
    {1 << bit for bit in range(32)}
    | {
        0,
        1,
        2,
        8,
        10,
        16,
        17,
        40,
        0x5412,
        0x541C,
        0x5413,
        0x20008,
        0x60000,
        0xFFFFFFFF,
        0x01200011,
        0x003D0F00,
    }
)
ARGUMENTS = [
    (first, second) for first in (*WORDS, *(w | 1 << 32 for w in WORDS)) for second in (0, 8, 0x5412)
] + [(0, word) for word in (*WORDS, *(w | 1 << 40 for w in WORDS))]


# --- by simulation ------------------------------------------------------------------------------------------


@combinations
@pytest.mark.parametrize("notify", [False, True], ids=["plain", "notify"])
def test_program_and_explanation_agree_on_every_call(profile: str, arch: str, notify: bool) -> None:
    program = seccomp.build(profile, arch=arch, notify=notify)
    tried = 0
    for name in syscalls.TABLE:
        nr = syscalls.number(name, arch=arch)
        if nr is None:
            continue
        conditional = seccomp.explain(profile, name).startswith("check:")
        for args in ARGUMENTS if conditional else [(0, 0), (0xFFFFFFFFFFFFFFFF,) * 6]:
            expected = seccomp.explain(profile, name, [*args, 0, 0, 0, 0][:6])
            if notify and expected == "refuse:EPERM":
                expected = "notify"
            assert outcome(simulate(program, nr, AUDIT[arch], args)) == expected, (name, args)
            tried += 1
    assert tried > 1000


@combinations
def test_unknown_numbers_are_absent(profile: str, arch: str) -> None:
    program = seccomp.build(profile, arch=arch)
    known = {syscalls.number(name, arch=arch) for name in syscalls.TABLE}
    for nr in [*range(1200), 0x3FFFFFFF, 0xFFFFFFFF]:
        if nr not in known:
            assert outcome(simulate(program, nr, AUDIT[arch])) == "refuse:ENOSYS", nr
    assert seccomp.explain(profile, "a_call_of_the_future") == "refuse:ENOSYS"


@combinations
def test_foreign_architectures_are_killed(profile: str, arch: str) -> None:
    program = seccomp.build(profile, arch=arch)
    others = {I386, ARM, 0, *AUDIT.values()} - {AUDIT[arch]}
    for nr in (*range(600), 0x40000000, 0xFFFFFFFF):
        assert {outcome(simulate(program, nr, other)) for other in others} == {"kill"}


@pytest.mark.parametrize("profile", seccomp.PROFILES)
def test_x32_numbers_are_killed(profile: str) -> None:
    program = seccomp.build(profile, arch="x86_64")
    for nr in (*range(0x40000000, 0x40000000 + 600), 0x7FFFFFFF, 0xC0000000, 0xFFFFFFFE):
        assert outcome(simulate(program, nr, AUDIT["x86_64"])) == "kill"


@combinations
def test_high_bits_do_not_hide_a_request(profile: str, arch: str) -> None:
    program = seccomp.build(profile, arch=arch)
    nr = syscalls.number("ioctl", arch=arch)
    assert nr is not None
    for request in (0x5412, 0x541C):
        for high in (0, 1 << 32, 0xFFFFFFFF << 32):
            assert outcome(simulate(program, nr, AUDIT[arch], (0, high | request))) == "refuse:EPERM"


@combinations
def test_programs_are_short(profile: str, arch: str) -> None:
    assert len(seccomp.build(profile, arch=arch, notify=True)) // 8 <= 128


def test_unknown_profile_and_architecture_are_refused() -> None:
    for call in (lambda: seccomp.build("lax"), lambda: seccomp.explain("lax", "read")):
        with pytest.raises(ValueError, match="unknown profile 'lax'"):
            call()
    with pytest.raises(ValueError, match="no filter for architecture 'riscv64'"):
        seccomp.build("moderate", arch="riscv64")


# --- against a list kept here -------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    return text.split()


ALWAYS_REFUSED = names("""
    mount umount2 pivot_root open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr
    setns bpf keyctl add_key request_key userfaultfd perf_event_open io_uring_setup io_uring_enter
    io_uring_register kcmp kexec_load kexec_file_load init_module finit_module delete_module reboot swapon
    swapoff acct quotactl quotactl_fd syslog settimeofday clock_settime clock_adjtime adjtimex iopl ioperm
    lookup_dcookie open_by_handle_at fanotify_init fanotify_mark vhangup pidfd_getfd process_madvise
    process_mrelease migrate_pages
""")
REFUSED_UNLESS_PERMISSIVE = ["ptrace", "process_vm_readv", "process_vm_writev", "chroot", "modify_ldt"]
ABSENT = names("""
    clone3 nfsservctl _sysctl uselib create_module query_module get_kernel_syms afs_syscall tuxcall security
    vserver getpmsg putpmsg epoll_ctl_old epoll_wait_old
""")
CHECKED = {
    "clone": "EPERM",
    "unshare": "EPERM",
    "socket": "EAFNOSUPPORT",
    "socketpair": "EAFNOSUPPORT",
    "ioctl": "EPERM",
    "personality": "EPERM",
    "seccomp": "EPERM",
}


@pytest.mark.parametrize("profile", seccomp.PROFILES)
def test_each_call_has_the_rule_it_should(profile: str) -> None:
    expected = dict.fromkeys(syscalls.TABLE, "allow")
    expected |= dict.fromkeys(ALWAYS_REFUSED, "refuse:EPERM")
    if profile != "permissive":
        expected |= dict.fromkeys(REFUSED_UNLESS_PERMISSIVE, "refuse:EPERM")
    expected |= dict.fromkeys(ABSENT, "refuse:ENOSYS")
    expected |= {name: f"check:{code}" for name, code in CHECKED.items()}
    assert {name: seccomp.explain(profile, name) for name in expected} == expected


CLONE_NEW = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]


@pytest.mark.parametrize("profile", seccomp.PROFILES)
@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        *[("clone", (flag | 17, 0), "refuse:EPERM") for flag in CLONE_NEW],
        *[("unshare", (flag, 0), "refuse:EPERM") for flag in [*CLONE_NEW, 0x80]],
        ("clone", (0x1200011, 0), "allow"),
        ("clone", (0x3D0F00, 0), "allow"),
        ("clone", (0x4111, 0), "allow"),
        ("unshare", (0x400, 0), "allow"),
        *[("socket", (domain, 1), "allow") for domain in (1, 2, 10, 16)],
        *[
            ("socket", (domain, 1), "refuse:EAFNOSUPPORT")
            for domain in (0, 3, 4, 9, 17, 21, 29, 30, 31, 38, 40, 44)
        ],
        ("socketpair", (1, 1), "allow"),
        ("socketpair", (30, 1), "refuse:EAFNOSUPPORT"),
        ("ioctl", (0, 0x5412), "refuse:EPERM"),
        ("ioctl", (0, 0x541C), "refuse:EPERM"),
        ("ioctl", (0, 0x5401), "allow"),
        ("ioctl", (0, 0x5413), "allow"),
        ("personality", (0, 0), "allow"),
        ("personality", (0xFFFFFFFF, 0), "allow"),
        ("personality", (0x0400000, 0), "refuse:EPERM"),
        ("seccomp", (1, 0), "allow"),
        ("seccomp", (1, 8), "refuse:EPERM"),
        ("seccomp", (1, 0x28), "refuse:EPERM"),
    ],
)
def test_arguments_decide(profile: str, name: str, args: tuple[int, int], expected: str) -> None:
    assert seccomp.explain(profile, name, [*args, 0, 0, 0, 0]) == expected


def test_only_the_permissive_profile_lets_addresses_stay_put() -> None:
    answers = {profile: seccomp.explain(profile, "personality", [0x40000]) for profile in seccomp.PROFILES}
    assert answers == {"restrictive": "refuse:EPERM", "moderate": "refuse:EPERM", "permissive": "allow"}


# --- for real -----------------------------------------------------------------------------------------------


def refused(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == code, caught.value


@native
def test_load_sets_no_new_privs(in_child: InChild) -> None:
    def work() -> None:
        assert seccomp.load(seccomp.build("moderate")) is None
        with open("/proc/self/status") as file:
            status = file.read()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status

    in_child(work)


@native
@pytest.mark.parametrize("profile", seccomp.PROFILES)
def test_forbidden_things_have_no_effect(profile: str, in_child: InChild) -> None:
    def work() -> None:
        namespaces = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")}
        uts = os.open("/proc/self/ns/uts", os.O_RDONLY)
        with open("/proc/self/mountinfo") as file:
            mounts = file.read()
        seccomp.load(seccomp.build(profile))
        for flag in [*CLONE_NEW, 0x80]:
            refused(errno.EPERM, partial(syscalls.unshare, flag))
        refused(
            errno.EPERM, lambda: syscalls.raw("clone", syscalls.CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
        )
        refused(errno.ENOSYS, lambda: syscalls.raw("clone3", b"\0" * 88, 88))
        refused(errno.EPERM, lambda: syscalls.setns(uts))
        refused(errno.EPERM, lambda: syscalls.mount("tmpfs", "/tmp", "tmpfs"))
        refused(errno.EPERM, lambda: syscalls.umount2("/proc", syscalls.MNT_DETACH))
        refused(errno.EPERM, lambda: syscalls.open_tree(syscalls.AT_FDCWD, "/", syscalls.OPEN_TREE_CLONE))
        refused(errno.EPERM, lambda: syscalls.raw("fsopen", b"tmpfs", 0))
        refused(errno.EPERM, lambda: syscalls.raw("bpf", 0, bytes(64), 64))
        refused(errno.EPERM, lambda: syscalls.raw("keyctl", 0, -3, 1))
        refused(errno.EPERM, lambda: syscalls.raw("add_key", b"user", b"cloche", b"x", 1, -3))
        refused(errno.EPERM, lambda: syscalls.raw("userfaultfd", 0))
        refused(errno.EPERM, lambda: syscalls.raw("perf_event_open", bytes(128), 0, -1, -1, 0))
        refused(errno.EPERM, lambda: syscalls.raw("io_uring_setup", 1, ctypes.create_string_buffer(120)))
        refused(errno.EPERM, lambda: syscalls.raw("kcmp", os.getpid(), os.getpid(), 0, 0, 1))
        refused(errno.EPERM, lambda: syscalls.raw("pidfd_getfd", os.pidfd_open(os.getppid()), 0, 0))
        refused(errno.EPERM, lambda: syscalls.raw("syslog", 10, 0, 0))
        refused(errno.EPERM, lambda: syscalls.raw("adjtimex", ctypes.create_string_buffer(208)))
        refused(errno.EPERM, lambda: syscalls.raw("personality", 0x0400000))
        refused(errno.ENOSYS, unknown_call)
        refused(errno.EAFNOSUPPORT, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        refused(errno.EAFNOSUPPORT, lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
        refused(errno.EAFNOSUPPORT, lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
        assert {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces} == namespaces
        with open("/proc/self/mountinfo") as file:
            assert file.read() == mounts

    def unknown_call() -> None:
        if syscalls.libc.syscall(999) == -1:
            raise OSError(ctypes.get_errno(), "syscall")

    in_child(work)


@native
def test_terminal_injection_is_refused(in_child: InChild) -> None:
    """TIOCSTI into a terminal of one's own: without the filter the byte may arrive."""

    def work() -> None:
        import fcntl
        import pty
        import termios

        leader, follower = pty.openpty()
        os.setsid()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
        attributes = termios.tcgetattr(follower)
        attributes[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(follower, termios.TCSANOW, attributes)
        seccomp.load(seccomp.build("moderate"))
        for high in (0, 1 << 32, 0xFFFFFFFF << 32):
            refused(errno.EPERM, partial(syscalls.raw, "ioctl", follower, high | 0x5412, b"x"))
            refused(errno.EPERM, partial(syscalls.raw, "ioctl", follower, high | 0x541C, b"\x02"))
        assert select.select([follower], [], [], 0)[0] == []
        os.write(leader, b"y")  # the permitted twin: typing on the terminal
        assert os.read(follower, 1) == b"y"
        assert len(fcntl.ioctl(follower, termios.TIOCGWINSZ, bytes(8))) == 8

    in_child(work)


@native
def test_debugging_is_for_the_permissive_profile(in_child: InChild) -> None:
    def attach(profile: str) -> None:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        seccomp.load(seccomp.build(profile))
        buffer = ctypes.create_string_buffer(8)
        secret = ctypes.create_string_buffer(b"in here")
        local = struct.pack("PP", ctypes.addressof(buffer), 8)
        remote = struct.pack("PP", ctypes.addressof(secret), 8)
        calls = [
            lambda: syscalls.raw("process_vm_readv", os.getpid(), local, 1, remote, 1, 0),
            lambda: syscalls.raw("ptrace", 0x4206, pid, 0, 0),
        ]
        try:
            for call in calls:
                if profile == "permissive":
                    call()
                else:
                    refused(errno.EPERM, call)
            assert buffer.value == (b"in here" if profile == "permissive" else b"")
        finally:
            os.kill(pid, signal.SIGKILL)

    for profile in seccomp.PROFILES:
        in_child(partial(attach, profile))


@native
def test_chroot_is_for_the_permissive_profile(in_child: InChild) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, else the kernel refuses by itself")

    def change(profile: str) -> None:
        seccomp.load(seccomp.build(profile))
        if profile == "permissive":
            os.chroot("/tmp")
            assert not os.path.exists("/proc/self")
        else:
            refused(errno.EPERM, lambda: os.chroot("/tmp"))
            assert os.path.exists("/proc/self")

    for profile in seccomp.PROFILES:
        in_child(partial(change, profile))


@native
@pytest.mark.parametrize("profile", seccomp.PROFILES)
def test_ordinary_programs_work(profile: str, in_child: InChild) -> None:
    def work() -> None:
        seccomp.load(seccomp.build(profile))
        ran: list[int] = []
        thread = threading.Thread(target=ran.append, args=(1,))
        thread.start()
        thread.join()
        assert ran == [1]
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 8"], {})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        done = subprocess.run(
            ["/bin/sh", "-c", "echo out; ls / | wc -l"], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("out\n")
        assert subprocess.run([sys.executable, "-c", "import socket, ssl"], check=True).returncode == 0
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
            # The machine may lack a family; the filter must not be what refuses it.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as opened:
                assert opened.fileno() >= 0
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
            server.accept()[0] as accepted,
        ):
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
        left, right = socket.socketpair()
        left.sendall(b"pair")
        assert right.recv(4) == b"pair"
        syscalls.unshare(0x400)  # CLONE_FILES: no namespace

    in_child(work)


@native
def test_a_guest_may_filter_itself_but_not_listen(in_child: InChild) -> None:
    def work() -> None:
        program = seccomp.build("restrictive")
        seccomp.load(seccomp.build("moderate"))
        refused(errno.EPERM, lambda: seccomp.load(program, listener=True))
        seccomp.load(program)

    in_child(work)


@pytest.mark.skipif(syscalls.ARCH != "x86_64", reason="x32 and the 32-bit entry are x86_64's")
def test_second_entries_kill() -> None:
    """getpid by its x32 number and by `int 0x80` from machine code: both end the process by SIGSYS."""

    def x32() -> None:
        syscalls.libc.syscall(0x40000000 + 39)

    def int80() -> None:
        import mmap

        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        ctypes.CFUNCTYPE(ctypes.c_long)(address)()

    for attempt in (x32, int80):
        pid = os.fork()
        if pid == 0:
            seccomp.load(seccomp.build("permissive"))
            attempt()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSYS, attempt.__name__


# --- notifications ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def notified(work: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """A child that loads a notifying filter, hands its listener over, and exits with what `work` returns."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            fd = seccomp.load(seccomp.build("moderate", notify=True), listener=True)
            assert fd is not None
            socket.send_fds(there, [b"."], [fd])
            os.close(fd)
            os._exit(work())
        except BaseException:  # a child must never return into pytest
            os._exit(99)
    there.close()
    _, fds, _, _ = socket.recv_fds(here, 1, 1)
    here.close()
    try:
        yield pid, fds[0]
    finally:
        with contextlib.suppress(OSError):
            os.close(fds[0])
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def try_mount() -> int:
    try:
        syscalls.mount("nothing", "/some/place", "tmpfs")
    except OSError as error:
        return error.errno or 0
    return 0


@native
def test_a_notified_call_is_refused_and_told() -> None:
    with notified(try_mount) as (pid, fd):
        seen = seccomp.receive(fd)
        assert seen is not None
        assert (seen.name, seen.nr, seen.pid) == ("mount", syscalls.number("mount"), pid)
        assert seccomp.read_string(fd, seen, seen.args[1]) == "/some/place"
        assert seccomp.read_string(fd, seen, seen.args[1], 5) == "/some"
        assert seccomp.read_string(fd, seen, 8) is None
        assert "mount" in repr(seen)
        assert seccomp.refuse(fd, seen.id, errno.EROFS)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EROFS


@native
def test_without_a_supervisor_a_notified_call_does_not_exist() -> None:
    with notified(try_mount) as (pid, fd):
        assert seccomp.receive(fd) is not None
        os.close(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.ENOSYS


@native
def test_read_string_of_a_dead_caller() -> None:
    with notified(try_mount) as (pid, fd):
        seen = seccomp.receive(fd)
        assert seen is not None
        assert seccomp.is_waiting(fd, seen.id)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not seccomp.is_waiting(fd, seen.id)
        assert seccomp.read_string(fd, seen, seen.args[1]) is None
        assert not seccomp.refuse(fd, seen.id)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(1000) == [(fd, select.POLLHUP)]


@native
def test_a_waiting_caller_is_not_woken_by_ordinary_signals() -> None:
    def work() -> int:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.siginterrupt(
            signal.SIGALRM, False
        )  # until it is received, a call is interrupted and made again
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        return try_mount()

    with notified(work) as (pid, fd):
        seen = seccomp.receive(fd)
        assert seen is not None
        select.select([], [], [], 0.02)
        delivered = seccomp.refuse(fd, seen.id)
        if not delivered:
            pytest.skip("kernel before 5.19")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EPERM
