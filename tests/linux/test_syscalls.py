"""The table agrees with the kernel's headers, and each wrapper, tried in a child, does what its name says."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path

import pytest

from cloche.linux import syscalls

InChild = Callable[[Callable[[], None]], None]
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def header_numbers(text: str, pattern: str) -> dict[str, int]:
    return {match[1]: int(match[2]) for match in re.finditer(pattern, text, re.MULTILINE)}


def test_x86_64_numbers_match_the_headers() -> None:
    headers = glob("/usr/include/x86_64-linux-gnu/asm/unistd_64.h") + glob("/usr/include/asm/unistd_64.h")
    if not headers:
        pytest.skip("no x86_64 kernel headers (linux-libc-dev)")
    with open(headers[0]) as file:
        expected = header_numbers(file.read(), r"^#define __NR_(\w+)\s+(\d+)$")
    assert len(expected) > 300
    ours = {name: pair[0] for name, pair in syscalls.TABLE.items()}
    assert {name: ours.get(name) for name in expected} == expected


def test_aarch64_numbers_match_the_headers() -> None:
    path = "/usr/include/asm-generic/unistd.h"
    if not os.path.exists(path):
        pytest.skip("no generic kernel headers (linux-libc-dev)")
    with open(path) as file:
        text = file.read()
    expected = header_numbers(text, r"^#define __NR_(\w+)\s+(\d+)$")
    expected |= header_numbers(text, r"^#define __NR3264_(\w+)\s+(\d+)$")
    # Names that exist for 32-bit or for other architectures only, and one that 64-bit spells differently.
    for name in list(expected):
        if name.endswith("time64") or re.fullmatch(r"(clock|timer|timerfd)_\w+64", name):
            del expected[name]
    for name in ("syscalls", "arch_specific_syscall", "sync_file_range2"):
        expected.pop(name, None)
    expected["newfstatat"] = expected.pop("fstatat")
    assert len(expected) > 280
    ours = {name: pair[1] for name, pair in syscalls.TABLE.items()}
    assert {name: ours.get(name) for name in expected} == expected


@pytest.mark.parametrize("column", [0, 1], ids=syscalls.ARCHITECTURES)
def test_numbers_are_unique(column: int) -> None:
    numbers = [pair[column] for pair in syscalls.TABLE.values() if pair[column] is not None]
    assert len(numbers) == len(set(numbers))


def test_calls_newer_than_423_share_their_number() -> None:
    for name, (x86_64, aarch64) in syscalls.TABLE.items():
        if (x86_64 or 0) > 423 or (aarch64 or 0) > 423:
            assert x86_64 == aarch64, name


def test_table_is_sorted() -> None:
    assert list(syscalls.TABLE) == sorted(syscalls.TABLE)


def test_number() -> None:
    assert syscalls.number("read", arch="x86_64") == 0
    assert syscalls.number("read", arch="aarch64") == 63
    assert syscalls.number("open", arch="aarch64") is None
    assert syscalls.number("read", arch="riscv64") is None
    with pytest.raises(KeyError):
        syscalls.number("no_such_call")


def test_raw_returns_the_result_and_raises_the_errno() -> None:
    syscalls.prime()
    assert syscalls.raw("getpid") == os.getpid()
    with pytest.raises(OSError) as caught:
        syscalls.raw("close", -1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(FileNotFoundError):
        syscalls.raw("chdir", b"/no/such/place")


@pytest.mark.parametrize("module", ["syscalls", "seccomp", "landlock", "cgroups", "processes"])
def test_imports_stay_small(module: str) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport cloche.linux.{}; print('typing' in sys.modules)"
    )
    source = os.path.dirname(os.path.dirname(os.path.dirname(syscalls.__file__)))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script.format(module), source],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr


# --- namespaces and mounts ----------------------------------------------------------------------------------


@needs_root
def test_unshare_makes_a_new_namespace(in_child: InChild) -> None:
    def work() -> None:
        before = os.readlink("/proc/self/ns/uts")
        syscalls.unshare(syscalls.CLONE_NEWUTS)
        assert os.readlink("/proc/self/ns/uts") != before
        socket.sethostname("inside")

    name = socket.gethostname()
    in_child(work)
    assert socket.gethostname() == name


def test_clone_idle(in_child: InChild) -> None:
    """In a child with one thread: the idle one is in a namespace of its own, and only waits to be killed."""

    def work() -> None:
        idle = syscalls.clone_idle(syscalls.CLONE_NEWUSER)
        try:
            assert os.readlink(f"/proc/{idle}/ns/user") != os.readlink("/proc/self/ns/user")
            assert os.waitpid(idle, os.WNOHANG) == (0, 0)
        finally:
            os.kill(idle, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(idle, 0)[1]) == signal.SIGKILL

    in_child(work)


@needs_root
def test_setns_checks_the_kind(in_child: InChild) -> None:
    def work() -> None:
        fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
        with pytest.raises(OSError) as caught:
            syscalls.setns(fd, syscalls.CLONE_NEWNET)
        assert caught.value.errno == errno.EINVAL
        syscalls.setns(fd, syscalls.CLONE_NEWUTS)

    in_child(work)


@needs_root
def test_mount_wrappers(in_child: InChild, tmp_path: Path) -> None:
    """tmpfs, bind by descriptor, read-only by attribute, pivot, lazy unmount, in their own namespace."""

    def work() -> None:
        base = str(tmp_path)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("tmpfs", base, "tmpfs", syscalls.MS_NOSUID, "size=1m")
        for name in ("source", "target", "old"):
            os.mkdir(f"{base}/{name}")
        tree = syscalls.open_tree(syscalls.AT_FDCWD, f"{base}/source", syscalls.OPEN_TREE_CLONE)
        syscalls.mount_setattr(tree, "", syscalls.AT_EMPTY_PATH, set_attributes=syscalls.MOUNT_ATTR_RDONLY)
        target = os.open(f"{base}/target", os.O_PATH)
        both_empty = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
        syscalls.move_mount(tree, "", target, "", both_empty)
        os.close(tree)
        os.close(target)
        with open(f"{base}/source/file", "w") as file:
            file.write("seen")
        assert os.listdir(f"{base}/target") == ["file"]
        with pytest.raises(OSError) as caught:
            os.open(f"{base}/target/new", os.O_CREAT | os.O_WRONLY)
        assert caught.value.errno == errno.EROFS
        syscalls.umount2(f"{base}/target", syscalls.UMOUNT_NOFOLLOW)
        assert os.listdir(f"{base}/target") == []
        syscalls.pivot_root(base, f"{base}/old")
        os.chdir("/")
        syscalls.umount2("/old", syscalls.MNT_DETACH)
        assert sorted(os.listdir("/")) == ["old", "source", "target"]

    mounts = read("/proc/self/mountinfo")
    in_child(work)
    assert read("/proc/self/mountinfo") == mounts


def test_openat2_does_not_leave_the_directory(tmp_path: Path) -> None:
    base = str(tmp_path)
    os.mkdir(f"{base}/inner")
    with open(f"{base}/secret", "w") as file:
        file.write("secret")
    with open(f"{base}/inner/mine", "w") as file:
        file.write("mine")
    os.symlink("../secret", f"{base}/inner/relative")
    os.symlink(f"{base}/secret", f"{base}/inner/absolute")
    os.symlink("mine", f"{base}/inner/good")
    inner = os.open(f"{base}/inner", os.O_PATH)
    try:
        for name in ("relative", "absolute", "../secret", f"{base}/secret"):
            with pytest.raises(OSError) as caught:
                syscalls.openat2(inner, name, os.O_RDONLY, resolve=syscalls.RESOLVE_BENEATH)
            assert caught.value.errno == errno.EXDEV, name
        with pytest.raises(OSError) as caught:
            syscalls.openat2(inner, "good", os.O_RDONLY, resolve=syscalls.RESOLVE_NO_SYMLINKS)
        assert caught.value.errno == errno.ELOOP
        fd = syscalls.openat2(inner, "good", os.O_RDONLY, resolve=syscalls.RESOLVE_BENEATH)
        assert os.read(fd, 10) == b"mine"
        assert not os.get_inheritable(fd)
        os.close(fd)
    finally:
        os.close(inner)


# --- processes and rights -----------------------------------------------------------------------------------


def test_pidfd_send_signal() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    fd = os.pidfd_open(pid)
    syscalls.pidfd_send_signal(fd, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        syscalls.pidfd_send_signal(fd, 0)
    os.close(fd)


def test_close_range() -> None:
    def work() -> None:
        read_end, write_end = os.pipe()
        kept = os.dup2(0, 100, inheritable=True)
        syscalls.close_range(100, flags=syscalls.CLOSE_RANGE_CLOEXEC)
        assert not os.get_inheritable(kept)
        syscalls.close_range(min(read_end, write_end))
        for fd in (read_end, write_end, kept):
            with pytest.raises(OSError):
                os.fstat(fd)
        os.fstat(0)

    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the helper's own pipe would be closed too, so the child reports by its status alone
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(read_end)
    os.close(write_end)
    assert os.waitpid(pid, 0)[1] == 0


@needs_root
def test_capabilities_are_dropped(in_child: InChild) -> None:
    def work() -> None:
        assert syscalls.get_caps()[0] >> syscalls.CAP_SYS_ADMIN & 1
        syscalls.drop_bounding_set(keep=1 << syscalls.CAP_KILL)
        assert "CapBnd:\t0000000000000020" in read("/proc/self/status")
        syscalls.drop_bounding_set()
        syscalls.set_caps(0, 0, 0)
        assert syscalls.get_caps() == (0, 0, 0)
        status = read("/proc/self/status")
        for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{field}:\t0000000000000000" in status
        with pytest.raises(PermissionError):
            syscalls.set_caps(1 << syscalls.CAP_KILL, 1 << syscalls.CAP_KILL, 0)
        with pytest.raises(PermissionError):
            syscalls.unshare(syscalls.CLONE_NEWUTS)

    in_child(work)


@needs_root
def test_setfsuid_tells_a_refusal(in_child: InChild) -> None:
    def work() -> None:
        assert syscalls.setfsgid(12345) == 0
        assert syscalls.setfsuid(12345) == 0
        assert syscalls.setfsuid(0) == 12345
        os.setgroups([])
        os.setresgid(12345, 12345, 12345)
        os.setresuid(12345, 12345, 12345)
        with pytest.raises(PermissionError):
            syscalls.setfsuid(0)
        with pytest.raises(PermissionError):
            syscalls.setfsgid(0)

    in_child(work)


def test_syncfs(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        syscalls.syncfs(-1)
    assert caught.value.errno == errno.EBADF
    (tmp_path / "file").write_bytes(b"x")
    here = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syscalls.syncfs(here)
    finally:
        os.close(here)
    assert (tmp_path / "file").read_bytes() == b"x"
