"""Files of the host cannot be read, changed or named from inside, by programs or through the files API."""

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche import errors
from cloche.linux import mounts, syscalls
from tests.security import glass

_ROOTS_PLACES = ("/root", "/run", "/var/lib", "/var/cache", "/srv", "/etc", "/mnt", "/")
_PLACES = ("home", "state", "tmp", "var-tmp", "cwd", "dev-shm")
PLACES = [*_PLACES, *(pytest.param(p, marks=glass.needs_range) for p in _ROOTS_PLACES)]


def _directory(place: str, state: Path) -> str:
    named = {
        "home": str(Path.home()), "state": str(state), "tmp": "/tmp", "var-tmp": "/var/tmp", "cwd": os.getcwd(),
        "dev-shm": "/dev/shm",
    }  # fmt: skip
    return named.get(place, place)


@pytest.fixture
def planted(place: str, state_directory: Path) -> Iterator[glass.Canary]:
    """A world-writable canary where the test's parameter says."""
    directory = _directory(place, state_directory)
    if not os.access(directory, os.W_OK):
        pytest.skip(f"{directory} cannot be written by this user")
    made = glass.Canary(directory)
    yield made
    made.remove()


# Each is tried by the shell inside; $1 is the canary's path on the host.
READS = {
    "plainly": 'cat "$1"',
    "through-own-root": 'cat "/proc/self/root$1"',
    "through-the-first-process": 'cat "/proc/1/root$1" "/proc/1/cwd$1"',
    "upwards": 'cd /proc/self/cwd && cat "../../../../../../../../../..$1"',
    "by-a-symlink": 'd=$(mktemp -d) && ln -s "$1" "$d/s" && cat "$d/s"',
    "by-a-hard-link": 'd=$(mktemp -d -p /home/user) && ln "$1" "$d/h" && cat "$d/h"',
    "through-any-process": 'for p in /proc/[0-9]*; do cat "$p/root$1" "$p/cwd/$1"; done',
}
WRITES = {
    "overwrite": 'echo x > "$1"',
    "append": 'echo x >> "$1"',
    "remove": 'rm -f "$1"',
    "truncate": 'truncate -s 0 "$1"',
    "change-mode": 'chmod 000 "$1"',
    "rename": 'mv "$1" "$1.moved"',
    "replace": 'mkdir -p "$(dirname "$1")"; n=$(mktemp); echo x > "$n"; mv "$n" "$1"; touch "$1.beside"',
    "through-own-root": 'echo x > "/proc/self/root$1"',
    "by-a-symlink": 'd=$(mktemp -d) && ln -s "$1" "$d/s" && echo x > "$d/s"',
}


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("place", PLACES)
def test_a_host_file_cannot_be_read(shared: glass.Box, planted: glass.Canary, way: str) -> None:
    result = shared.exec(["bash", "-c", READS[way], "sh", planted.path])
    assert planted.is_unknown_to(result.stdout_bytes, result.stderr_bytes)
    assert planted.is_untouched()


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("place", ["home", "state", "tmp", "cwd"])
def test_a_host_file_cannot_be_changed(shared: glass.Box, planted: glass.Canary, way: str) -> None:
    shared.exec(["bash", "-c", WRITES[way], "sh", planted.path])
    assert planted.is_untouched()


@glass.needs_range
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("place", ["/root", "/etc", "/usr/local", "/opt"])
def test_root_inside_cannot_change_a_host_file(planted: glass.Canary, shared: glass.Box, way: str) -> None:
    """/usr and /opt are shown, so that here the very same file is in view."""
    shared.exec(["bash", "-c", WRITES[way], "sh", planted.path], user="root")
    assert planted.is_untouched()


@pytest.mark.parametrize("way", [w for w in READS if w not in ("through-the-first-process",)])
def test_the_sandbox_s_own_file_can_be_read(shared: glass.Box, way: str) -> None:
    shared.write("/home/user/own", "own-token")
    result = shared.exec(["bash", "-c", READS[way], "sh", "/home/user/own"])
    assert "own-token" in result.stdout


@pytest.mark.parametrize("way", WRITES)
def test_the_sandbox_s_own_file_can_be_changed(shared: glass.Box, way: str) -> None:
    shared.write("/home/user/own", "own-token")
    shared.exec(["bash", "-c", WRITES[way], "sh", "/home/user/own"])
    before = "-rw-r--r-- 9\n"
    assert shared.exec("stat -c '%A %s' /home/user/own").stdout != before


@glass.profiles
@pytest.mark.parametrize("place", ["/tmp", "/home/user", "/workspace", "/var/tmp", "/dev/shm"])
def test_private_places_can_be_written(boxes: dict[str, glass.Box], profile: str, place: str) -> None:
    name = f"{place}/{os.path.basename(place)}-private"
    assert boxes[profile].out(f"echo mine > {name} && cat {name}") == "mine\n"
    assert not os.path.exists(name)


@glass.identities
@pytest.mark.parametrize("place", ["/", "/usr/bin", "/usr/lib", "/etc", "/opt", "/var/lib", "/bin", "/root"])
def test_system_places_stay_as_they_are_on_the_host(
    boxes: dict[str, glass.Box], profile: str, place: str, user: str
) -> None:
    name = f"{place.rstrip('/')}/cloche-canary-{os.getpid()}"
    result = boxes[profile].exec(f"touch {name} && test -e {name}", user=user)
    assert not os.path.exists(name)
    if profile == "restrictive":
        assert result.exit_code != 0
    elif user == "root":
        assert result.exit_code == 0  # the permitted twin: in its own layer root may


def test_nothing_of_the_host_is_found_by_name(shared: glass.Box, canary: glass.Canary) -> None:
    name = os.path.basename(canary.path)
    shared.exec(["touch", f"/tmp/{name}"])
    found = shared.exec(["find", "/", "-xdev", "-name", name, "-not", "-path", "/proc/*"]).stdout.split()
    assert found == [f"/tmp/{name}"]


@pytest.mark.parametrize(
    "name", ["HOME", "PATH", "CANARY_SECRET", "SSH_AUTH_SOCK", "CLOCHE_HOME", "AWS_SECRET_ACCESS_KEY"]
)
def test_the_caller_s_environment_does_not_enter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, os.environ.get(name, "") + ":canary-environment")
    with glass.box() as box:
        everything = box.out("env; cat /proc/self/environ; cat /proc/*/environ 2>/dev/null; true")
    assert "canary-environment" not in everything


def test_the_given_environment_does_enter() -> None:
    with glass.box(env={"GIVEN": "at birth"}) as box:
        assert box.out("echo $GIVEN, $LATER", env={"LATER": "per command"}) == "at birth, per command\n"


# --- the old root and the first process ---------------------------------------------------------------------

_CLIMB = """
found = []
token = sys.argv[1]
starts = ["/", "/proc/self/root", "/proc/self/cwd", "/proc/1/root", "/proc/1/cwd", "/dev", "/dev/pts", "/dev/shm", "/usr",
          *(f"/proc/self/fd/{n}" for n in range(16)), *(f"/proc/1/fd/{n}" for n in range(16))]
for start in starts:
    directory = tried(lambda: os.open(start, os.O_PATH))
    if directory is None:
        continue
    for _ in range(12):
        up = tried(lambda: os.open("..", os.O_PATH, dir_fd=directory))
        if up is None:
            break
        directory = up
        text = tried(lambda: open(os.open(token[1:], os.O_RDONLY, dir_fd=directory)).read())
        if text:
            found.append(text)
root, top = os.stat("/"), os.stat("/..")
say({"found": found, "top": (root.st_ino, root.st_dev) == (top.st_ino, top.st_dev)})
"""


@glass.identities
def test_old_root_is_unreachable(canary: glass.Canary, profile: str, user: str) -> None:
    with glass.box(profile=profile) as box:
        seen = box.report(_CLIMB, canary.path, user=user)
        own = box.report(_CLIMB, "/etc/hostname", user=user)
    assert seen == {"found": [], "top": True}
    assert own["found"]  # the twin: climbing does lead to the sandbox's own root


_CHROOT = """
os.makedirs("/tmp/jail", exist_ok=True)
out = os.open("/", os.O_PATH)
tried(lambda: os.chroot("/tmp/jail"))
tried(lambda: os.fchdir(out))
for _ in range(20):
    tried(lambda: os.chdir(".."))
tried(lambda: os.chroot("."))
say(tried(lambda: open(sys.argv[1]).read()))
"""


@glass.users
def test_a_chroot_does_not_lead_out(canary: glass.Canary, user: str) -> None:
    with glass.box(profile="permissive") as box:  # the one profile whose filter lets the call through
        assert box.report(_CHROOT, canary.path, user=user) is None


@glass.identities
@pytest.mark.parametrize(
    "name",
    [
        "environ",
        "mem",
        "maps",
        "exe",
        "root",
        "cwd",
        "fd/0",
        "fd/3",
        "ns/mnt",
        "ns/user",
        "map_files",
        "auxv",
        "stack",
    ],
)
def test_the_first_process_is_closed(boxes: dict[str, glass.Box], profile: str, user: str, name: str) -> None:
    look = """
def reach(path):
    if os.path.isdir(path):
        return repr(os.listdir(path))
    with open(path, "rb", buffering=0) as file:
        return "opened" + repr(os.readlink(path) if os.path.islink(path) else file.read(64))
say([tried(lambda: reach(f"/proc/{pid}/" + sys.argv[1])) for pid in (1, "self")])
"""
    first, own = boxes[profile].report(look, name, user=user)
    assert first is None
    if name not in ("mem", "stack", "fd/0", "fd/3"):  # the twin: a process may look at itself
        assert own is not None


@glass.users
def test_the_agent_s_program_cannot_be_overwritten(shared: glass.Box, user: str) -> None:
    """As in CVE-2019-5736: the program of a process that came from outside is a file of the host."""
    program = Path(os.path.realpath("/proc/self/exe"))
    before = program.stat()
    shared.exec("for p in /proc/[0-9]*; do echo x > $p/exe; echo x >> $p/exe; done", user=user)
    after = program.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )


@pytest.mark.parametrize("name", mounts.MASKED)
@glass.users
def test_masked_files_say_nothing(shared: glass.Box, name: str, user: str) -> None:
    path = f"/proc/{name}"
    result = shared.exec(f"head -c 64 {path}; ls -A {path}/ ; echo 0 > {path}", user=user)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "name", ["meminfo", "cpuinfo", "self/status", "self/maps", "loadavg", "uptime", "sys/kernel/ostype"]
)
def test_other_proc_files_can_be_read(shared: glass.Box, name: str) -> None:
    assert shared.out(f"cat /proc/{name}")


_KNOBS = ("kernel/hostname", "kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "kernel/randomize_va_space",
          "kernel/yama/ptrace_scope", "fs/suid_dumpable", "net/ipv4/ip_forward", "user/max_user_namespaces")  # fmt: skip


@pytest.mark.parametrize("name", _KNOBS)
@glass.users
def test_kernel_settings_of_the_host_stay(shared: glass.Box, name: str, user: str) -> None:
    path = Path(f"/proc/sys/{name}")
    before = path.read_text() if path.exists() else None
    inside = shared.exec(["cat", str(path)], user=user).stdout
    for value in ("1", "0", "canary", "|/bin/canary"):
        shared.exec(f"echo '{value}' > {path}; sysctl -w {name.replace('/', '.')}={value}", user=user)
    assert (path.read_text() if path.exists() else None) == before
    assert shared.exec(["cat", str(path)], user=user).stdout == inside


# --- devices ------------------------------------------------------------------------------------------------

_NODES = {"mem": (1, 1), "kmem": (1, 2), "kmsg": (1, 11), "sda": (8, 0), "vda": (254, 0), "loop0": (7, 0), "tty1": (4, 1),
          "fuse": (10, 229), "tun": (10, 200), "kvm": (10, 232), "null": (1, 3)}  # fmt: skip


@pytest.mark.parametrize("name", _NODES)
@glass.users
def test_device_nodes_cannot_be_made(shared: glass.Box, name: str, user: str) -> None:
    """Neither made nor, if one were there, opened: the file systems that can be written carry `nodev`."""
    make = """
kind = stat.S_IFBLK if sys.argv[1] in ("sda", "vda", "loop0") else stat.S_IFCHR
made = []
for place in ("/tmp", "/workspace", "/dev", "/dev/shm", "/usr", "/home/user"):
    path = f"{place}/node-{sys.argv[1]}"
    tried(lambda: os.mknod(path, 0o666 | kind, os.makedev(int(sys.argv[2]), int(sys.argv[3]))))
    opened = tried(lambda: os.open(path, os.O_RDWR | os.O_NONBLOCK))
    if opened is not None and not stat.S_ISREG(os.fstat(opened).st_mode):
        made.append(path)
say(made)
"""
    major, minor = _NODES[name]
    assert shared.report(make, name, str(major), str(minor), user=user) == []
    twin = "os.mkfifo('/tmp/fifo-' + sys.argv[1]); say(stat.S_ISFIFO(os.stat('/tmp/fifo-' + sys.argv[1]).st_mode))"
    assert shared.report(twin, name + user, user=user) is True


@glass.profiles
def test_dev_holds_only_harmless_devices(boxes: dict[str, glass.Box], profile: str) -> None:
    found = boxes[profile].out("find /dev -type c -o -type b | sort").split()
    assert set(found) <= {f"/dev/{name}" for name in (*mounts.DEVICES, "pts/ptmx")}
    assert boxes[profile].out("head -c 4 /dev/zero | od -An -tx1; echo gone > /dev/null") == " 00 00 00 00\n"


@glass.users
@pytest.mark.parametrize("device", ["null", "zero", "urandom", "tty"])
def test_host_devices_keep_mode_and_owner(shared: glass.Box, device: str, user: str) -> None:
    def look() -> tuple[int, int, int]:
        info = os.stat(f"/dev/{device}")
        return info.st_mode, info.st_uid, info.st_ino

    before = look()
    shared.exec(
        f"chmod 000 /dev/{device}; chown 1000 /dev/{device}; rm -f /dev/{device}; mv /dev/{device} /tmp/",
        user=user,
    )
    # The input of a command is the host's own /dev/null, which is the same file reached by another way.
    shared.python(
        "[tried(lambda: os.fchmod(fd, 0)) or tried(lambda: os.fchown(fd, 1000, 1000)) for fd in (0, 1, 2)]",
        user=user,
    )
    assert look() == before


# --- the files API ------------------------------------------------------------------------------------------


def _archive(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        item = tarfile.TarInfo(name)
        item.size = len(data)
        archive.addfile(item, io.BytesIO(data))
    return buffer.getvalue()


ACTS: dict[str, Callable[[glass.Box, str], object]] = {
    "read": lambda box, path: box.read(path),
    "write": lambda box, path: box.write(path, "overwritten"),
    "list": lambda box, path: box.files.list(path),
    "list-deep": lambda box, path: box.files.list(path, depth=3),
    "stat": lambda box, path: box.files.stat(path),
    "remove": lambda box, path: box.files.remove(path),
    "remove-tree": lambda box, path: box.files.remove(path, recursive=True),
    "move": lambda box, path: box.files.move(path, "/workspace/moved"),
    "move-onto": lambda box, path: (
        box.write("/workspace/source", "x"),
        box.files.move("/workspace/source", path),
    ),
    "make-dir": lambda box, path: box.files.make_dir(path + "/made/deep"),
    "upload": lambda box, path: box.files.upload(path, _archive("uploaded", b"x")),
    "download": lambda box, path: box.files.download(path),
}
LINKS = {
    "to-the-file": lambda path: path,
    "to-its-directory": os.path.dirname,
    "upwards": lambda path: "../../../../../../../.." + path,
    "through-proc": lambda path: "/proc/self/root" + path,
    "through-the-first-process": lambda path: "/proc/1/root" + path,
}


def _try(work: Callable[[], object]) -> str:
    """What came out of the API, or its refusal."""
    try:
        return repr(work())
    except errors.ClocheError as problem:
        return repr(problem)


def _answer(work: Callable[[], object]) -> object:
    """What the API gave; None if it refused, which it must do in its own words."""
    try:
        return work()
    except errors.ClocheError:
        return None


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("act", ACTS)
def test_a_planted_symlink_leads_nowhere(
    shared: glass.Box, canary: glass.Canary, act: str, link: str
) -> None:
    place = f"/workspace/{act}-{link}"
    shared.out(["bash", "-c", 'rm -rf "$2" && ln -s "$1" "$2"', "sh", LINKS[link](canary.path), place])
    said = _try(lambda: ACTS[act](shared, place))
    if link == "to-its-directory":
        said += _try(lambda: ACTS[act](shared, f"{place}/{os.path.basename(canary.path)}"))
    assert canary.is_unknown_to(said)
    assert canary.is_untouched()
    assert sorted(os.listdir(os.path.dirname(canary.path))) == [os.path.basename(canary.path)]


@pytest.mark.parametrize("act", ACTS)
def test_a_symlink_inside_is_followed_inside(box: glass.Box, act: str) -> None:
    """The twin: the same acts do something to what the sandbox itself has at the link's end."""
    box.out(
        "mkdir -p real/below && echo inside > real/file && ln -s /workspace/real/file link && ln -s real tree"
    )
    place = "tree" if act in ("list", "list-deep", "upload", "make-dir") else "link"
    said = _try(lambda: ACTS[act](box, place))
    assert "Error" not in said


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "/workspace/../../x", "a/../../b", "..", "/proc/self/root/../x"]
)
@pytest.mark.parametrize("act", ["read", "write", "remove", "make-dir"])
def test_paths_that_climb_are_refused(shared: glass.Box, path: str, act: str) -> None:
    with pytest.raises(errors.ClocheError) as refusal:
        ACTS[act](shared, path)
    assert refusal.value.code == "path_invalid"


@pytest.mark.parametrize("name", ["/etc/canary", "../canary", "a/../../canary", "/tmp/../../../canary"])
def test_an_archive_cannot_lead_out(box: glass.Box, name: str) -> None:
    with pytest.raises(errors.ClocheError):
        box.files.upload("/workspace/in", _archive(name, b"x"))
    assert not os.path.exists("/etc/canary")
    assert box.out("ls -A /workspace").split() in ([], ["in"])
    assert box.files.upload("/workspace/in", _archive("a/canary", b"x")) == 1


SPECIALS = {
    "fifo": "mkfifo /workspace/special",
    "socket": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/workspace/special')\"",
    "device": "ln -s /dev/zero /workspace/special",
    "terminal": "ln -s /dev/tty /workspace/special",
    "new-terminal": "ln -s /dev/ptmx /workspace/special",
    "loop": "ln -s special /workspace/special",
    "fd-of-the-agent": "ln -s /proc/self/fd/3 /workspace/special",
    "mem-of-the-agent": "ln -s /proc/self/mem /workspace/special",
    "directory": "mkdir /workspace/special",
    "dangling": "ln -s /nowhere/at/all /workspace/special",
}


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("act", ["read", "write", "download"])
def test_what_is_no_regular_file_neither_hangs_nor_answers(box: glass.Box, special: str, act: str) -> None:
    box.out(SPECIALS[special])
    before = glass.open_descriptors()
    answers = [_answer(lambda: ACTS[act](box, "/workspace/special")) for _ in range(50)]
    if act == "read":
        assert answers == [None] * 50
    assert glass.open_descriptors() < before + 50
    assert box.works()


def test_a_regular_file_is_read_and_written(box: glass.Box) -> None:
    box.write("/workspace/special", b"\0\xff data")
    assert box.read("/workspace/special") == b"\0\xff data"


_SWAP = """
# Swap a directory and a symlink in one step, over and over, until the flag appears.
os.makedirs("/workspace/victim", exist_ok=True)
open("/workspace/victim/keep", "w").write("keep")
os.symlink(sys.argv[1], "/workspace/trap")
nr = 276 if ARM else 316
def exchange():
    os.makedirs("/workspace/tree/sub/deep", exist_ok=True)
    call(nr, -100, b"/workspace/tree/sub", -100, b"/workspace/trap", 2)
print("ready", flush=True)
while not os.path.exists("/tmp/stop"):
    tried(exchange)
"""


@pytest.mark.parametrize("target", ["/workspace/victim", "host"])
def test_a_directory_swapped_for_a_symlink_is_not_followed(
    box: glass.Box, canary: glass.Canary, target: str
) -> None:
    leads_to = os.path.dirname(canary.path) if target == "host" else target
    box.out("mkdir -p /workspace/tree")
    box.write("/tmp/swap.py", glass.PRELUDE + _SWAP)
    swapper = box.start(["python3", "-I", "/tmp/swap.py", leads_to])
    for turn in range(150):
        _try(lambda: box.files.make_dir("/workspace/tree/sub/deep/er"))
        _try(lambda: box.files.remove("/workspace/tree", recursive=True))
        if turn % 10 == 0:
            _try(lambda: box.files.list("/workspace/tree", depth=4))
    box.write("/tmp/stop", "")
    assert glass.wait(swapper.wait()).exit_code == 0
    assert box.out("cat /workspace/victim/keep") == "keep"
    assert canary.is_untouched()


@pytest.mark.parametrize("act", ["read", "write"])
def test_a_file_swapped_for_a_symlink_stays_inside(box: glass.Box, canary: glass.Canary, act: str) -> None:
    program = """
os.symlink(sys.argv[1], "/workspace/b")
open("/workspace/a", "w").write("inside")
nr = 276 if ARM else 316
while not os.path.exists("/tmp/stop"):
    call(nr, -100, b"/workspace/a", -100, b"/workspace/b", 2)
"""
    swapper = box.start(["python3", "-I", "-c", glass.PRELUDE + program, canary.path])
    said = [_try(lambda: ACTS[act](box, "/workspace/a")) for _ in range(200)]
    box.write("/tmp/stop", "")
    glass.wait(swapper.wait())
    assert canary.is_unknown_to(*said)
    assert canary.is_untouched()


def test_a_deep_tree_and_odd_names_do_not_end_the_sandbox(box: glass.Box) -> None:
    """Names that are not UTF-8, are very long, or very deep are data, not a reason to give up."""
    box.report(r"""
os.chdir("/workspace")
for name in (b"\xff\xfe", b"new\nline", b"x" * 255, b"-rf", b"\x1b[2J", "\u202e.txt".encode()):
    open(name, "w").write("x")
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
say(None)
""")
    names = [entry.name for entry in box.files.list("/workspace")]
    assert len(names) == 7
    _try(lambda: box.files.list("/workspace", depth=3000))
    _try(lambda: box.files.download("/workspace"))
    _try(lambda: box.files.remove("/workspace/d", recursive=True))
    assert box.works()


# --- mounts by descriptor -----------------------------------------------------------------------------------


def test_swapped_bind_source(tmp_path: Path) -> None:
    """A source that has become a symlink between look and mount shows nothing of where the link leads."""
    secret, source, target = tmp_path / "secret", tmp_path / "source", tmp_path / "target"
    for directory in (secret, target):
        directory.mkdir()
    (secret / "token").write_text("canary")
    source.symlink_to(secret)
    builder = mounts.Builder.__new__(mounts.Builder)
    builder.rootless = True
    assert (
        _in_own_mounts(
            lambda: builder.idmap(str(source), str(target), -1, syscalls.MOUNT_ATTR_RDONLY), target
        )
        == []
    )
    assert _in_own_mounts(
        lambda: builder.idmap(str(secret), str(target), -1, syscalls.MOUNT_ATTR_RDONLY), target
    ) == ["token"]


def _in_own_mounts(work: Callable[[], None], look: Path) -> list[str]:
    """What `look` holds after `work`, in a child with mounts of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            uid, gid = os.getuid(), os.getgid()
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            for name, text in (("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1")):
                Path(f"/proc/self/{name}").write_text(text)
            try:
                work()
            except OSError:
                pass
            os.write(writing, "\n".join(os.listdir(look)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read().split()
    os.waitpid(pid, 0)
    return found


def test_state_directory_is_private(state_directory: Path, shared: glass.Box) -> None:
    assert stat.S_IMODE(state_directory.stat().st_mode) & 0o077 == 0
    assert shared.works()


@pytest.mark.parametrize("kind", ["long-names", "control-characters", "long-targets", "undecodable", "many"])
def test_a_directory_of_odd_names_is_listed_in_full(box: glass.Box, kind: str) -> None:
    """However much an entry takes on the wire, the list comes, and comes to an end."""
    count = box.report(
        r"""
os.makedirs("/workspace/d")
os.chdir(b"/workspace/d")
names = {"long-names": [b"%03d" % n + b"x" * 252 for n in range(500)],
         "control-characters": [b"%03d" % n + b"\x01" * 252 for n in range(300)],
         "undecodable": [b"\xff%03d" % n for n in range(900)],
         "many": [b"%05d" % n for n in range(3000)]}
if sys.argv[1] == "long-targets":
    for n in range(100):
        os.symlink(b"\x02" * 4000, b"l%03d" % n)
    say(100)
else:
    for name in names[sys.argv[1]]:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o644))
    say(len(names[sys.argv[1]]))
""",
        kind,
    )
    assert len(box.files.list("/workspace/d")) == count
    box.files.remove("/workspace/d", recursive=True)
    assert box.works()
