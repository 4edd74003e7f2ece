"""What this host lets us do: each primitive really tried, and where one fails, why and what one command would
help.

A version number promises nothing: kernels are built without parts, distributions switch them off, containers
filter them. So every check forks a child, has it do the thing, and listens on a pipe for as long as a time
limit; whatever the child changed (namespaces, mounts, filters) ends with it. Two exceptions: KVM is only
looked at, since a broken one hangs whoever touches it, and a cgroup that would need the caller to be moved is
not made.

    Fact(name="user_namespaces", state="missing", detail="uid_map: Operation not permitted",
         cause="AppArmor restricts …", fix="sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")

States: `ok`; `limited`, it works in part or a weaker way stands in; `missing`. Names are stable, and `NAMES`
lists them in the order of the answer. The reason for a failing user namespace is decided by
`explain_user_namespaces`, which is pure and tested with every known case.

Call it from a process that may fork: before threads are started.
"""

import errno
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cloche.linux import cgroups, landlock, processes, seccomp, syscalls

if TYPE_CHECKING:
    import socket

OK, LIMITED, MISSING = "ok", "limited", "missing"

_SCRATCH = "/tmp"  # something to mount over, in a mount namespace of our own
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KERNEL_MIN, _KERNEL_RICH = (5, 13), (6, 2)

_REDIRECT_RULE = (
    "add table ip t; add chain ip t c { type nat hook output priority -100; };"
    " add rule ip t c tcp dport 1-65535 redirect to :1"
)

_SYSCTLS = (
    "kernel.apparmor_restrict_unprivileged_userns",
    "kernel.unprivileged_userns_clone",
    "user.max_user_namespaces",
)


class Fact(NamedTuple):
    """One thing that a host can do or not. `cause` and `fix` are empty where all is well."""

    name: str
    state: str
    detail: str
    cause: str = ""
    fix: str = ""


class Outcome(NamedTuple):
    """What a child reported: how far it came, and the errno that stopped it (0: it was not an errno)."""

    ok: bool
    text: str
    stage: str = ""
    code: int = 0


class Reason(NamedTuple):
    cause: str
    fix: str


# --- trying things in a child -------------------------------------------------------------------------------


class Trail:
    """Where the child is: set before each step, so that a failure tells which one it was."""

    def __init__(self) -> None:
        self.at = ""


def attempt(work: Callable[[Trail], str], timeout_s: float = 5.0) -> Outcome:
    """Do `work` in a forked child; what it returned, or how it failed."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _report(work, write_end, parent)
    os.close(write_end)
    try:
        said = _listen(read_end, time.monotonic() + timeout_s)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if said is None:
        return Outcome(False, f"no answer within {timeout_s:g} s")
    if not said:
        return Outcome(False, f"ended by signal {-os.waitstatus_to_exitcode(status)}", code=errno.ENOSYS)
    good, stage, code, text = said.decode(errors="replace").split("\0", 3)
    return Outcome(good == "ok", text, stage, int(code))


def _report(work: Callable[[Trail], str], write_end: int, parent: int) -> None:
    trail = Trail()
    code = 0
    try:
        processes.set_pdeathsig(parent=parent)
        answer = ("ok", work(trail))
    except OSError as error:
        code = error.errno or 0
        answer = ("no", f"{trail.at}: {os.strerror(code)}" if trail.at else str(error))
    except BaseException as error:
        answer = ("no", f"{trail.at}: {error!r}")
    os.write(write_end, "\0".join((answer[0], trail.at, str(code), answer[1])).encode()[:4096])
    os._exit(0)


def _listen(fd: int, deadline: float) -> bytes | None:
    """All that is said before the pipe closes; None if that takes too long."""
    said = b""
    while select.select([fd], [], [], max(0, deadline - time.monotonic()))[0]:
        piece = os.read(fd, 4096)
        if not piece:
            return said
        said += piece
    return None


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _enter(trail: Trail, flags: int) -> str:
    """Unshare with the rights we have, else from a new user namespace; says which it was."""
    trail.at = "unshare"
    try:
        syscalls.unshare(flags)
        how = "directly"
    except PermissionError:
        _enter_user_namespace(trail, flags)
        how = "in a user namespace"
    if flags & syscalls.CLONE_NEWNS:
        trail.at = "make / private"
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    return how


def _enter_user_namespace(trail: Trail, flags: int = 0) -> None:
    uid, gid = os.geteuid(), os.getegid()  # afterwards they read 65534
    trail.at = "unshare"
    syscalls.unshare(syscalls.CLONE_NEWUSER | flags)
    trail.at = "uid_map"
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _in_own_child(work: Callable[[], None]) -> None:
    """Run something in a further child, as a new pid namespace needs; its errno is raised here."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            processes.set_pdeathsig()
            work()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


_UNCONFINED = "start the container with a profile that allows it, e.g. --security-opt seccomp=unconfined"

# --- user namespaces ----------------------------------------------------------------------------------------


def explain_user_namespaces(
    outcome: Outcome, sysctls: Mapping[str, str], *, root: bool, filtered: bool
) -> Reason:
    """Why a user namespace could not be made or used, told from how far the attempt came. Pure."""
    apparmor = "kernel.apparmor_restrict_unprivileged_userns"
    clone = "kernel.unprivileged_userns_clone"
    if outcome.code in (errno.ENOSPC, errno.EUSERS):
        return _namespace_limit(sysctls)
    if outcome.code in (errno.EINVAL, errno.ENOSYS) and outcome.stage in ("", "unshare") and not filtered:
        return Reason("this kernel was built without user namespaces (CONFIG_USER_NS)", "use another kernel")
    if not root and sysctls.get(clone) == "0":
        return Reason(f"{clone} is 0", f"sudo sysctl -w {clone}=1")
    if not root and sysctls.get(apparmor) == "1":
        return Reason(
            f"AppArmor restricts user namespaces ({apparmor} is 1)",
            f"sudo sysctl -w {apparmor}=0, or give this program an AppArmor profile with `userns,`",
        )
    if filtered and outcome.stage in ("", "unshare", "mount in it"):
        call = "mount" if outcome.stage == "mount in it" else "unshare"
        return Reason(
            f"a seccomp filter around this process refuses {call}: it runs in a container", _UNCONFINED
        )
    if outcome.stage == "uid_map":
        return Reason(
            "writing uid_map is refused: by a security module, or /proc is masked by a container",
            "start the container with --security-opt systempaths=unconfined, or without its security module",
        )
    if outcome.stage == "unshare":
        return Reason(
            "the kernel refuses unshare(CLONE_NEWUSER): a security module, or this process is in a chroot",
            "look for a denial in the kernel log (`sudo dmesg | tail`)",
        )
    return Reason(
        f"a user namespace can be made but gives no rights in it ({outcome.text}): a security module",
        "look for a denial in the kernel log (`sudo dmesg | tail`)",
    )


def _namespace_limit(sysctls: Mapping[str, str]) -> Reason:
    name = "user.max_user_namespaces"
    if sysctls.get(name) == "0":
        return Reason(f"{name} is 0", f"sudo sysctl -w {name}=15000")
    value = sysctls.get(name, "unknown")
    return Reason(
        f"the limit of user namespaces is reached ({name} is {value}), or they are nested too deep",
        f"sudo sysctl -w {name}=15000, or start from outside of other sandboxes",
    )


def read_sysctls() -> dict[str, str]:
    """The settings that decide on user namespaces, those of them that this kernel has."""
    found = {name: _read("/proc/sys/" + name.replace(".", "/")).strip() for name in _SYSCTLS}
    return {name: value for name, value in found.items() if value}


def _is_filtered() -> bool:
    return "Seccomp:\t2" in _read("/proc/self/status")


def _user_namespaces() -> Fact:
    def work(trail: Trail) -> str:
        _enter_user_namespace(trail)
        # An LSM may let the namespace be made and withhold its rights: use one.
        trail.at = "mount in it"
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("tmpfs", _SCRATCH, "tmpfs")
        return f"made, mapped and used by uid {uid}"

    uid = os.geteuid()
    outcome = attempt(work)
    if outcome.ok:
        return Fact("user_namespaces", OK, outcome.text)
    why = explain_user_namespaces(outcome, read_sysctls(), root=uid == 0, filtered=_is_filtered())
    return Fact("user_namespaces", MISSING, outcome.text, *why)


# --- other namespaces and mounts ----------------------------------------------------------------------------


def _judge(name: str, outcome: Outcome, fix: str = "", *, otherwise: str = MISSING) -> Fact:
    """The fact of a plain attempt: causes that are common to all of them are told here."""
    if outcome.ok:
        return Fact(name, OK, outcome.text)
    if outcome.code == errno.ENOSPC:
        cause, fix = "a limit in /proc/sys/user/max_*_namespaces is reached", "raise it with sysctl -w"
    elif outcome.code in (errno.EINVAL, errno.ENOSYS, errno.ENODEV):
        cause, fix = (
            "this kernel was built without it, or a filter around us hides it",
            fix or "use another kernel",
        )
    elif outcome.code == errno.EPERM and _is_filtered() and os.geteuid() == 0:
        # Root is refused by a filter, or by the lack of a capability: containers take both away, and the fix is one.
        cause, fix = (
            "a seccomp filter around this process may refuse it: it runs in a container",
            fix or _UNCONFINED,
        )
    elif outcome.code in (errno.EPERM, errno.EACCES):
        cause, fix = "not permitted to this user", fix or "run as root, or make user_namespaces work first"
    else:
        cause = "see the detail"
    return Fact(name, otherwise, outcome.text, cause, fix)


def _namespace(name: str, flag: int) -> Fact:
    return _judge(name, attempt(lambda trail: _enter(trail, flag)))


def _pid_namespace() -> Fact:
    def work(trail: Trail) -> str:
        how = _enter(trail, syscalls.CLONE_NEWPID)
        trail.at = "be process 1"
        _in_own_child(lambda: None if os.getpid() == 1 else os._exit(errno.ESRCH))
        return how

    return _judge("pid_namespace", attempt(work))


def _tmpfs(trail: Trail) -> str:
    how = _enter(trail, syscalls.CLONE_NEWNS)
    trail.at = "mount tmpfs"
    syscalls.mount("tmpfs", _SCRATCH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m")
    _write_file(f"{_SCRATCH}/file")
    return how


def _write_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _overlay(name: str, *, nested: bool) -> Fact:
    """Mount one, write into it, and remove a lower file, which takes a whiteout."""

    def work(trail: Trail) -> str:
        if nested:
            _enter_user_namespace(trail)
        how = _tmpfs(trail)
        for part in ("lower", "upper", "work", "merged"):
            os.mkdir(f"{_SCRATCH}/{part}")
        _write_file(f"{_SCRATCH}/lower/file")
        trail.at = "mount overlay"
        mapped = nested or how != "directly"
        options = f"lowerdir={_SCRATCH}/lower,upperdir={_SCRATCH}/upper,workdir={_SCRATCH}/work"
        syscalls.mount(
            "overlay", f"{_SCRATCH}/merged", "overlay", 0, options + (",userxattr" if mapped else "")
        )
        trail.at = "write to the overlay"
        _write_file(f"{_SCRATCH}/merged/new")
        os.unlink(f"{_SCRATCH}/merged/file")
        if os.listdir(f"{_SCRATCH}/merged") != ["new"] or os.listdir(f"{_SCRATCH}/lower") != ["file"]:
            raise OSError(errno.EIO, "the overlay does not show what was done to it")
        return "in a user namespace" if mapped else "directly"

    return _judge(name, attempt(work), "sudo modprobe overlay, or Linux 5.11 and later for an ordinary user")


def _idmapped_mounts() -> Fact:
    def work(trail: Trail) -> str:
        trail.at = "unshare"
        syscalls.unshare(syscalls.CLONE_NEWNS)
        trail.at = "make a user namespace to map by"
        userns = _mapped_user_namespace()
        trail.at = f"id-map {directory}"
        tree = syscalls.open_tree(syscalls.AT_FDCWD, directory, syscalls.OPEN_TREE_CLONE)
        syscalls.mount_setattr(
            tree, "", syscalls.AT_EMPTY_PATH, set_attributes=syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns
        )
        shown, real = os.fstat(tree).st_uid, os.stat(directory).st_uid
        if shown != real + 100_000:
            raise OSError(errno.EIO, f"uid {real} is shown as {shown}")
        return f"uid {real} of {directory} is shown as {shown}"

    directory = _temporary_directory()
    fix = "run as root on a file system that supports it (ext4, xfs, btrfs, tmpfs from Linux 6.3)"
    return _judge("idmapped_mounts", attempt(work), fix)


def _mapped_user_namespace() -> int:
    """A user namespace in which uid 0 is 100000 outside, held open by its descriptor alone."""
    ready, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready[1], b".")
            os.read(release[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise PermissionError(errno.EPERM, "no user namespace")
        for kind in ("uid_map", "gid_map"):
            _write(f"/proc/{pid}/{kind}", "0 100000 65536")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _proc_mount() -> Fact:
    def work(trail: Trail) -> str:
        how = _enter(trail, syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
        trail.at = "mount proc"
        _in_own_child(mount_and_look)
        return how

    def mount_and_look() -> None:
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        if os.readlink("/proc/self") != "1":
            raise OSError(errno.EIO, "a foreign /proc")

    fix = "start the container with --security-opt systempaths=unconfined"
    outcome = attempt(work)
    if outcome.stage == "mount proc" and outcome.code == errno.EPERM and not _is_filtered():
        # The kernel gives a user namespace no fresh /proc that would show more than the one it sees.
        cause = "parts of /proc are masked: this is a container, and a fresh /proc would uncover them"
        return Fact("proc_mount", MISSING, outcome.text, cause, fix)
    return _judge("proc_mount", outcome, fix)


def _loopback() -> Fact:
    """A new network namespace, its loopback up, and a connection through it."""

    def work(trail: Trail) -> str:
        import fcntl
        import socket

        how = _enter(trail, syscalls.CLONE_NEWNET)
        trail.at = "lo up"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sh", b"lo", 1)
            fcntl.ioctl(control, 0x8914, request + bytes(40 - len(request)))  # SIOCSIFFLAGS, IFF_UP
        trail.at = "connect to 127.0.0.1"
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1).close()
        return how

    return _judge("loopback", attempt(work))


# --- filters ------------------------------------------------------------------------------------------------


def _seccomp() -> Fact:
    def work(trail: Trail) -> str:
        program = seccomp.build("moderate")
        trail.at = "load a filter"
        seccomp.load(program)
        trail.at = "be refused by it"
        try:
            syscalls.raw("keyctl", 0, -3, 0)
        except PermissionError:
            return f"{len(program) // 8} instructions"
        raise OSError(errno.EIO, "the filter does not work")

    return _judge("seccomp", attempt(work))


def _seccomp_notify() -> Fact:
    def work(trail: Trail) -> str:
        import socket

        here, there = socket.socketpair()
        trail.at = "load a filter with a listener"
        pid = os.fork()
        if pid == 0:
            _be_notified(there)
        there.close()
        _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
        if not descriptors:
            raise OSError(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "no listener")
        trail.at = "answer a notification"
        seen = seccomp.receive(descriptors[0])
        if seen is None or not seccomp.refuse(descriptors[0], seen.id, errno.EXFULL):
            raise OSError(errno.EIO, "the notification went astray")
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != errno.EXFULL:
            raise OSError(errno.EIO, "the answer went astray")
        return f"{seen.name} was notified and refused"

    return _judge(
        "seccomp_notify", attempt(work), "Linux 5.9 and later; an outer listener may hold the place"
    )


def _be_notified(link: "socket.socket") -> None:
    import socket

    try:
        processes.set_pdeathsig()
        listener = seccomp.load(seccomp.build("moderate", notify=True), listener=True)
        socket.send_fds(link, [b"."], [listener or 0])
        syscalls.raw("keyctl", 0, -3, 0)
    except OSError as error:
        os._exit(error.errno or 255)
    os._exit(0)


def _landlock() -> Fact:
    def work(trail: Trail) -> str:
        version = landlock.abi()
        trail.at = "restrict"
        held = landlock.restrict([("/usr", landlock.READ)], abi=version)
        os.listdir("/usr")
        try:
            os.listdir("/")
        except PermissionError:
            return f"ABI {version}: {', '.join(sorted(held))}"
        raise OSError(errno.EIO, "the restriction does not work")

    outcome = attempt(work)
    version = landlock.abi()
    if not version:
        cause = "Landlock is not in this kernel or not enabled at boot"
        return Fact("landlock", MISSING, outcome.text, cause, "add landlock to the lsm= boot parameter")
    if outcome.ok and version < 6:
        cause = f"ABI {version} does not scope signals and abstract sockets"
        return Fact("landlock", LIMITED, outcome.text, cause, "Linux 6.12 and later")
    return _judge("landlock", outcome)


# --- control groups and devices -----------------------------------------------------------------------------


def _cgroup_facts() -> list[Fact]:
    hierarchy = cgroups.detect()
    limits = dict.fromkeys(cgroups.LIMITS, 1)
    tried = attempt(lambda trail: _try_group(hierarchy)) if hierarchy.settled else None
    held = (
        hierarchy.enforceable if tried is None else frozenset(tried.text.split()) if tried.ok else frozenset()
    )
    facts = [_limit_fact(hierarchy, name, held, tried) for name in limits]
    tree = hierarchy.controllers["unified"]
    if tree.usable:
        facts.append(Fact("cgroup_kill", OK, f"kill and freeze in {tree.directory}"))
    else:
        cause, _, fix = tree.reason.partition(": ")
        facts.append(Fact("cgroup_kill", LIMITED, "processes are ended one after the other", cause, fix))
    return facts


def _try_group(hierarchy: cgroups.Hierarchy) -> str:
    group = hierarchy.create(f"cloche-probe-{os.getpid()}", memory_mib=64, cpus=1, pids=64)
    try:
        return " ".join(group.enforced)
    finally:
        group.remove()


def _limit_fact(hierarchy: cgroups.Hierarchy, name: str, held: frozenset[str], tried: Outcome | None) -> Fact:
    controller = hierarchy.controllers[cgroups.LIMITS[name]]
    if name in held:
        how = "" if tried else ", after moving the caller into a leaf"
        return Fact(f"cgroup_{name}", OK, f"version {controller.version} beneath {controller.directory}{how}")
    reason = hierarchy.reasons.get(name) or (tried.text if tried else "")
    cause, _, fix = reason.partition(": ")
    return Fact(f"cgroup_{name}", MISSING, "limits are watched, not enforced", cause, fix)


def _loop_devices() -> Fact:
    def work(trail: Trail) -> str:
        import fcntl

        trail.at = "open /dev/loop-control"
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        trail.at = "find a free loop device"
        free = fcntl.ioctl(control, 0x4C82)  # LOOP_CTL_GET_FREE
        device = os.open(f"/dev/loop{free}", os.O_RDWR | os.O_CLOEXEC)
        trail.at = f"configure /dev/loop{free}"
        file = os.open(_temporary_directory(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(file, 1 << 20)
        config = bytearray(304)  # struct loop_config
        struct.pack_into("=I", config, 0, file)
        struct.pack_into("=I", config, 60, 4)  # LO_FLAGS_AUTOCLEAR: gone with its last descriptor
        try:
            fcntl.ioctl(device, 0x4C0A, bytes(config))  # LOOP_CONFIGURE
        except OSError as error:
            if error.errno != errno.EBUSY:  # somebody else was quicker: it works then
                raise
        return f"/dev/loop{free} held a file of 1 MiB"

    return _judge(
        "loop_devices", attempt(work), "run as root; disk limits are then file systems of their own"
    )


def _kvm() -> Fact:
    if not os.path.exists("/dev/kvm"):
        return Fact("kvm", MISSING, "no /dev/kvm", "no virtualisation here, or it is switched off", "")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        fix = "sudo usermod -aG kvm $USER"
        return Fact("kvm", LIMITED, "/dev/kvm exists", "not readable and writable for this user", fix)
    return Fact("kvm", OK, "/dev/kvm exists; not tried")


# --- programs -----------------------------------------------------------------------------------------------


def find_program(name: str) -> str | None:
    """Where a program is, looking also where an ordinary user's PATH does not."""
    import shutil

    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), _SEARCH)))


def _run(*argv: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Exit status and output of a program; 124 when it took too long, 126 when it did not start."""
    import subprocess

    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 126, str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def _bubblewrap() -> Fact:
    path = find_program("bwrap")
    if path is None:
        return Fact("bubblewrap", MISSING, "no bwrap", "not installed", "sudo apt install bubblewrap")
    _, version = _run(path, "--version")
    status, said = _run(path, "--unshare-all", "--ro-bind", "/", "/", "true")
    if status:
        fix = "see user_namespaces, or give bwrap an AppArmor profile"
        return Fact("bubblewrap", LIMITED, f"{path}, {version}", f"does not run: {_first_line(said)}", fix)
    return Fact("bubblewrap", OK, f"{path}, {version}")


def _runsc() -> Fact:
    path = find_program("runsc")
    if path is None:
        return Fact(
            "runsc", MISSING, "no runsc", "not installed", "see https://gvisor.dev/docs/user_guide/install/"
        )
    status, version = _run(path, "--version")
    state = LIMITED if status else OK
    return Fact("runsc", state, f"{path}, {_first_line(version)}", "does not run" if status else "")


def _nftables() -> Fact:
    """A rule in a network namespace of its own, by the program, since that is what is used."""
    path = find_program("nft")
    if path is None:
        cause = "not installed: capture falls back to ports 80 and 443"
        return Fact("nftables", LIMITED, "no nft", cause, "sudo apt install nftables")

    def work(trail: Trail) -> str:
        how = _enter(trail, syscalls.CLONE_NEWNET)
        trail.at = "nft"
        status, said = _run(path, _REDIRECT_RULE, timeout_s=3)
        if status:
            raise RuntimeError(_first_line(said))
        return f"{path}, redirection {how}"

    return _judge("nftables", attempt(work), "sudo modprobe nf_tables nft_chain_nat", otherwise=LIMITED)


def _subuids() -> Fact:
    """Ranges of ids for this user, and the set-uid helper that maps them, tried."""
    if os.geteuid() == 0:
        return Fact("subuids", OK, "root maps any range")
    ranges = {kind: _range(kind) for kind in ("uid", "gid")}
    helper = find_program("newuidmap")
    if helper is None or not all(ranges.values()):
        cause = "no range for this user in /etc/subuid and /etc/subgid" if helper else "no newuidmap"
        add = "sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER"
        return Fact("subuids", MISSING, "one uid only", cause, f"sudo apt install uidmap; {add}")
    first, count = ranges["uid"] or (0, 0)
    outcome = attempt(lambda trail: _map_range(trail, helper, first, count))
    return _judge("subuids", outcome, f"make {helper} set-uid root")


def _map_range(trail: Trail, helper: str, first: int, count: int) -> str:
    target = os.getpid()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # maps its parent, which has entered the namespace by then
        os.close(ready[1])
        os.close(done[0])
        os.read(ready[0], 1)
        status, said = _run(helper, str(target), "0", str(os.getuid()), "1", "1", str(first), str(count))
        os.write(done[1], said.encode()[:200] or b"mapped" if not status else b"!" + said.encode()[:200])
        os._exit(0)
    os.close(done[1])
    trail.at = "unshare"
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    trail.at = "newuidmap"
    os.write(ready[1], b".")
    said = os.read(done[0], 200).decode(errors="replace")
    os.waitpid(pid, 0)
    if said != "mapped":
        raise RuntimeError(said[1:])
    return f"{count} uids from {first}"


def _range(kind: str) -> tuple[int, int] | None:
    """The first range of this user in /etc/subuid or /etc/subgid."""
    import pwd

    names = {str(os.getuid())}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        pass
    for line in _read(f"/etc/sub{kind}").splitlines():
        fields = line.split(":")
        if len(fields) == 3 and fields[0] in names and fields[2].isdecimal() and int(fields[2]):
            return int(fields[1]), int(fields[2])
    return None


# --- the machine --------------------------------------------------------------------------------------------


def _kernel() -> Fact:
    release = os.uname().release
    numbers = [part for part in release.replace("-", ".").split(".") if part.isdecimal()][:2]
    version = tuple(int(part) for part in numbers)
    if version < _KERNEL_MIN:
        return Fact("kernel", MISSING, release, "Linux before 5.13", "use a newer kernel")
    if version < _KERNEL_RICH:
        return Fact("kernel", LIMITED, release, "Linux before 6.2 truncates without asking Landlock", "")
    return Fact("kernel", OK, release)


def _architecture() -> Fact:
    if syscalls.ARCH in syscalls.ARCHITECTURES:
        return Fact("architecture", OK, syscalls.ARCH)
    known = " and ".join(syscalls.ARCHITECTURES)
    return Fact("architecture", MISSING, syscalls.ARCH, f"there are filters for {known} only", "")


def explain_wsl(version: str) -> Fact:
    """From /proc/version: WSL 1 has no Linux kernel at all, WSL 2 has one. Pure."""
    if "microsoft" not in version.lower():
        return Fact("wsl", OK, "not WSL")
    if "WSL2" in version or "microsoft-standard" in version:
        return Fact("wsl", OK, "WSL 2")
    cause = "WSL 1 imitates Linux: it has no namespaces"
    return Fact("wsl", MISSING, "WSL 1", cause, "wsl --set-version <distribution> 2")


def _temporary_directory() -> str:
    import tempfile

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return _SCRATCH


def _tmpdir() -> Fact:
    directory = os.environ.get("TMPDIR") or _temporary_directory()
    probe_file = f"{directory}/.cloche-probe-{os.getpid()}"
    try:
        fd = os.open(probe_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.close(fd)
        os.unlink(probe_file)
        status = os.statvfs(directory)
    except OSError as error:
        cause = f"cannot write there: {error.strerror}"
        return Fact("tmpdir", MISSING, directory, cause, "set TMPDIR to a directory of yours")
    return Fact("tmpdir", OK, f"{directory}, {status.f_bavail * status.f_frsize >> 20} MiB free")


# --- all of it ----------------------------------------------------------------------------------------------

_CHECKS: tuple[Callable[[], Fact], ...] = (
    _kernel,
    _architecture,
    lambda: explain_wsl(_read("/proc/version")),
    _user_namespaces,
    lambda: _namespace("mount_namespace", syscalls.CLONE_NEWNS),
    _pid_namespace,
    lambda: _namespace("net_namespace", syscalls.CLONE_NEWNET),
    lambda: _namespace("ipc_namespace", syscalls.CLONE_NEWIPC),
    lambda: _namespace("uts_namespace", syscalls.CLONE_NEWUTS),
    lambda: _namespace("cgroup_namespace", syscalls.CLONE_NEWCGROUP),
    lambda: _namespace("time_namespace", syscalls.CLONE_NEWTIME),
    lambda: _judge("mounts", attempt(_tmpfs)),
    lambda: _overlay("overlay", nested=False),
    lambda: _overlay("overlay_in_userns", nested=True),
    _idmapped_mounts,
    _proc_mount,
    _loopback,
    _seccomp,
    _seccomp_notify,
    _landlock,
    _loop_devices,
    _nftables,
    _kvm,
    _bubblewrap,
    _runsc,
    _subuids,
    _tmpdir,
)

NAMES = (
    "kernel",
    "architecture",
    "wsl",
    "user_namespaces",
    "mount_namespace",
    "pid_namespace",
    "net_namespace",
    "ipc_namespace",
    "uts_namespace",
    "cgroup_namespace",
    "time_namespace",
    "mounts",
    "overlay",
    "overlay_in_userns",
    "idmapped_mounts",
    "proc_mount",
    "loopback",
    "seccomp",
    "seccomp_notify",
    "landlock",
    "loop_devices",
    "nftables",
    "kvm",
    "bubblewrap",
    "runsc",
    "subuids",
    "tmpdir",
    "cgroup_memory",
    "cgroup_cpus",
    "cgroup_pids",
    "cgroup_kill",
)


def probe() -> tuple[Fact, ...]:
    """Every fact about this host, for the user who asks, in the order of `NAMES`."""
    return (*(check() for check in _CHECKS), *_cgroup_facts())
