"""Two sandboxes of one engine see nothing of each other, and nothing of those that were there before."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security import glass


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[glass.Box, glass.Box]]:
    one, other = glass.Box(env={"ONLY": "one-secret"}), glass.Box()
    yield one, other
    one.delete()
    other.delete()


Pair = tuple[glass.Box, glass.Box]


@pytest.mark.parametrize("place", ["/tmp", "/workspace", "/home/user", "/var/tmp", "/dev/shm"])
def test_files_are_not_shared(pair: Pair, place: str) -> None:
    one, other = pair
    token = secrets.token_hex(8)
    one.out(f"echo {token} > {place}/{token}; chmod 777 {place}/{token}")
    assert one.out(f"cat {place}/{token}") == token + "\n"
    assert (
        token
        not in other.exec(f"cat {place}/{token}; ls -a {place}; ls -a /proc/*/root{place} 2>/dev/null").stdout
    )


@glass.needs_range
@pytest.mark.parametrize("place", ["/usr/local/bin", "/etc", "/opt", "/root", "/"])
def test_what_root_of_one_changes_is_its_own(pair: Pair, place: str) -> None:
    one, other = pair
    token = "t" + secrets.token_hex(8)
    one.out(f"echo {token} > {place.rstrip('/')}/{token} && cat {place.rstrip('/')}/{token}", user="root")
    assert token not in other.exec(f"ls -a {place}", user="root").stdout
    assert not os.path.exists(f"{place}/{token}")


def test_variables_are_not_shared(pair: Pair) -> None:
    one, other = pair
    assert one.out("echo $ONLY") == "one-secret\n"
    assert "one-secret" not in other.out("env; cat /proc/*/environ 2>/dev/null; true")


def test_processes_are_not_seen(pair: Pair) -> None:
    one, other = pair
    token = secrets.token_hex(8)
    running = one.start(["bash", "-c", f"echo up; exec -a {token} sleep 1000"])
    glass.until(running, b"up")
    assert token not in other.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    other.exec("kill -9 -1")
    other.python("[tried(lambda: os.kill(p, 9)) for p in range(2, 40000) if p != os.getpid()]")
    assert any(info.running for info in glass.wait(one.handle.processes.list()))
    glass.wait(running.kill())


SHARED_NAMES = {
    # name → (what one makes and keeps, what the other finds)
    "abstract-socket": (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + t); s.listen()",
        "socket.socket(socket.AF_UNIX).connect('\\0' + t) is None",
    ),
    "abstract-datagram": (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('\\0' + t)",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect('\\0' + t) is None",
    ),
    "loopback-port": (
        "s = socket.socket(); s.bind(('127.0.0.1', 18099)); s.listen()",
        "socket.create_connection(('127.0.0.1', 18099), 5) is not None",
    ),
    "loopback-port-v6": (
        "s = socket.socket(socket.AF_INET6); s.bind(('::1', 18098)); s.listen()",
        "socket.create_connection(('::1', 18098), 5) is not None",
    ),
    "shared-memory-segment": (
        "assert libc.shmget(4711, 4096, 0o1666) >= 0",
        "libc.shmget(4711, 4096, 0o666) >= 0",
    ),
    "semaphores": ("assert libc.semget(4712, 1, 0o1666) >= 0", "libc.semget(4712, 1, 0o666) >= 0"),
    "message-queue": ("assert libc.msgget(4713, 0o1666) >= 0", "libc.msgget(4713, 0o666) >= 0"),
    "posix-queue": (
        "assert call(180 if ARM else 240, t.encode(), 0o102, 0o666, 0) >= 0",
        "call(180 if ARM else 240, t.encode(), 2, 0, 0) >= 0",
    ),
    "posix-shared-memory": (
        "fd = os.open('/dev/shm/' + t, os.O_CREAT | os.O_RDWR, 0o666)",
        "os.open('/dev/shm/' + t, os.O_RDWR) >= 0",
    ),
    "fifo": ("os.mkfifo('/tmp/' + t)", "os.stat('/tmp/' + t) is not None"),
    "path-socket": (
        "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/' + t); s.listen()",
        "socket.socket(socket.AF_UNIX).connect('/tmp/' + t) is None",
    ),
}


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_names_of_the_kernel_are_not_shared(pair: Pair, name: str) -> None:
    one, other = pair
    token = "t" + secrets.token_hex(6)
    if name == "loopback-port-v6" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this kernel has no IPv6")
    if name == "posix-queue" and not os.path.exists("/proc/sys/fs/mqueue"):
        pytest.skip("this kernel has no POSIX message queues")
    make, find = SHARED_NAMES[name]
    keep = f"t = sys.argv[1]\n{make}\nprint('kept', flush=True)\nsignal.pause()"
    holder = one.start(["python3", "-I", "-c", glass.PRELUDE + keep, token])
    if b"kept" not in glass.until(holder, b"kept"):
        assert (
            name == "posix-queue"
        )  # a kernel's Landlock may take these for files beyond the root, and so for none's
        return
    look = f"t = sys.argv[1]\nsay(bool(tried(lambda: {find})))"
    assert one.report(look, token) is True
    assert other.report(look, token) is False
    glass.wait(holder.kill())


@pytest.mark.parametrize("kind", ["mnt", "pid", "net", "ipc", "uts", "user", "cgroup"])
def test_namespaces_differ(pair: Pair, kind: str) -> None:
    one, other = (box.out(["readlink", f"/proc/self/ns/{kind}"]) for box in pair)
    assert one != other


@glass.needs_range
def test_uid_ranges_differ(pair: Pair) -> None:
    """As the host counts: what one sandbox's user owns is nobody's in the other, even if a file came into both."""
    ranges = [box.out("cat /proc/self/uid_map").split() for box in pair]
    first, second = (range(int(line[1]), int(line[1]) + int(line[2])) for line in ranges)
    assert not set(first) & set(second)
    assert min(first.start, second.start) >= 1 << 30  # of no user of the host
    assert all(line[0] == "0" for line in ranges)


def test_nobody_inside_is_root_outside(pair: Pair) -> None:
    token = "uid-" + secrets.token_hex(8)
    running = pair[0].start(["bash", "-c", "echo up; read line", token])
    glass.until(running, b"up")
    found = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _has(p, token)]
    owners = {p.stat().st_uid for p in found}
    glass.wait(running.kill())
    assert len(found) == 1
    assert owners.isdisjoint({0})


def _has(process: Path, argument: str) -> bool:
    try:
        return f"\0{argument}\0".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_one_s_end_is_not_the_other_s(pair: Pair) -> None:
    with glass.box() as short:
        assert short.works()
    assert all(box.works() for box in pair)


def test_nothing_of_a_former_sandbox_is_found() -> None:
    """Ten after one another, each leaving its name everywhere: files, memory, processes, sockets."""
    token = "former-" + secrets.token_hex(6)
    places = "/tmp /workspace /home/user /var/tmp /dev/shm"
    for _ in range(10):
        with glass.box(env={"FORMER": token}) as box:
            seen = box.out(
                f"ls -aR {places}; cat /proc/*/cmdline /proc/*/environ /proc/net/unix /proc/sysvipc/* 2>/dev/null"
                f" | tr '\\0' ' ' | grep -v 'FORMER={token}'; true"
            )
            assert token not in seen.replace(f"FORMER={token}", "").replace(f"grep -v {token}", "")
            box.out(f"for p in {places}; do echo x > $p/{token}; mkdir $p/{token}.d; done")
            box.start(
                [
                    "python3",
                    "-I",
                    "-c",
                    f"import socket, signal; socket.socket(1).bind('\\0{token}'); signal.pause()",
                ]
            )


def test_free_space_holds_nothing_of_a_former_sandbox() -> None:
    """What was on a disk that is gone cannot be read from the next one's unwritten blocks."""
    token = secrets.token_bytes(64)
    with glass.box(disk_mib=16, memory_mib=256) as box:
        for number in range(4):
            box.write(f"/workspace/{number}", token * 16384)
    with glass.box(disk_mib=16, memory_mib=256) as box:
        found = box.report(
            """
token = bytes.fromhex(sys.argv[1])
fd = os.open("/workspace/sparse", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 8 << 20)
tried(lambda: os.posix_fallocate(fd, 0, 8 << 20))
data = os.pread(fd, 8 << 20, 0)
say([token in data, data.count(0) == len(data)])
""",
            token.hex(),
        )
    assert found == [False, True]


def test_contexts_of_two_sandboxes_share_nothing(pair: Pair) -> None:
    one, other = pair
    glass.wait(one.handle.run_code("secret = 'context-secret'; import builtins; builtins.leak = secret"))
    result = glass.wait(
        other.handle.run_code("import builtins; (globals().get('secret'), getattr(builtins, 'leak', None))")
    )
    assert result.text == "(None, None)"
    assert glass.wait(one.handle.run_code("secret")).text == "'context-secret'"
