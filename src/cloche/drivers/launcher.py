"""The launcher: a small process that forks sandboxes.

The engine never forks itself. It starts this once, with a clean environment and nothing secret in memory, and asks for
sandboxes over a socket. The launcher is PID 1 of a pid namespace of its own, so when it dies, however it dies, the
kernel ends every sandbox it made; and it exits as soon as the engine's end of the socket is closed.

For an ordinary user it first enters a user namespace of its own, where it may mount. From there on there is one path:
the sandbox's first process (`_birth`) builds the root with the launcher's rights, then enters a *further* user
namespace, one per sandbox, in which it owns nothing, and becomes the agent.

While nothing is asked it prepares what the next sandbox will need (`namespaces.Blank`).

Imports: standard library, `linux`, `guest`, `egress.capture`. Run as `python -I -S -c …` by drivers/spawning.py.
"""

import _signal  # type: ignore[import-not-found]  # its Python face imports enum, for every sandbox
import _socket
import errno
import gc
import os
import resource
import select
import sys
import time

from cloche.drivers import entering, narrow
from cloche.egress import capture
from cloche.guest import agent, calls, wire
from cloche.linux import landlock, loops, mounts, namespaces, seccomp, syscalls

_UNSHARED = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWTIME  # for its children: the agent itself reads no clock
)  # fmt: skip
_AGENT_CAPS = 1 << syscalls.CAP_SETUID | 1 << syscalls.CAP_SETGID | 1 << syscalls.CAP_KILL
# What root inside needs to install packages. Its ids are its own and its lowers are read-only: no file of anybody else's is
# in reach. tests/images/test_recipes.py::test_root_of_a_step_owns_its_files_and_nothing_else
_OWNER_CAPS = sum(
    1 << cap
    for cap in (syscalls.CAP_CHOWN, syscalls.CAP_DAC_OVERRIDE, syscalls.CAP_FOWNER, syscalls.CAP_FSETID)
)
RANGE = 65536
_LEFT = ("mnt", "net")
SYSTEM = 1000  # ids below are the system's own, above are people's
USER = 1000


class Launcher:
    def __init__(self, link: _socket.socket, config: "dict[str, object]") -> None:
        self.link = link
        self.rootless = bool(config["rootless"])
        self.first_uid = int(config["first_uid"])  # type: ignore[call-overload]
        self.free: list[int] = list(config["slots"])  # type: ignore[call-overload]
        self.wanted = int(config["blanks"])  # type: ignore[call-overload]
        self.blanks: list[namespaces.Blank] = []
        self.children: dict[int, tuple[str, int]] = {}  # pid → sandbox id, slot
        self.groups: dict[int, list[str]] = {}  # pid → the files by which it joined its groups
        self.doors: dict[int, _socket.socket] = {}  # pid → where a rootless sandbox has left its namespaces
        self.spaces: dict[int, dict[str, int]] = {}  # pid → those that have been taken from there
        self.own_pidns = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.own_netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.stage = mounts.make_stage(str(config["stage"]))
        self.bounds = namespaces.Bounds()
        self.filters: dict[str, bytes] = {}
        self.images: dict[str, loops.Image] = {}
        self.lower_maps: dict[int, int] = {}
        self.landlock_abi = landlock.abi()

    # ── the loop ────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        self.tell({"ready": True, "landlock_abi": self.landlock_abi, "pid": os.getpid()})
        while True:
            idle = (len(self.blanks) >= self.wanted or not self.free) and len(self.filters) == len(
                seccomp.PROFILES
            )
            ready = [fd for fd, _ in poll.poll(None if idle else 0)]
            if self.link.fileno() in ready and not self.serve_one():
                self.clean_up()
                return
            if wake_read in ready:
                os.read(wake_read, 4096)
                self.reap()
            if not ready and not idle:
                self.prepare_something()

    def tell(self, message: "dict[str, object]", fds: "list[int] | tuple[int, ...]" = ()) -> None:
        try:
            wire.send(self.link, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # what it still asked for is read first, so that nothing of that is left either; then comes its end

    def clean_up(self) -> None:
        """The engine is gone. The kernel would end every sandbox with this process; their groups it would not remove."""
        for pid, files in self.groups.items():
            _thaw(files)
            os.kill(pid, _signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        for path in self.groups.values():
            for file in path:
                try:
                    os.rmdir(os.path.dirname(file))
                except OSError:
                    continue  # removed already, or still busy: the next engine's sweep has it

    def prepare_something(self) -> None:
        """One thing that the next sandbox will need, while nothing is asked."""
        for profile in seccomp.PROFILES:
            if profile not in self.filters:
                self.filter_of(profile, [])
                return
        self.blanks.append(self.make_blank())

    def serve_one(self) -> bool:
        received = wire.receive(self.link)
        if received is None:
            return False
        message, fds = received
        try:
            if message["op"] == "prepare":
                self.prepare(message, fds)
            elif message["op"] == "mount":
                self.mount(message)
            elif message["op"] == "capture":
                self.open_network(message)
            elif message["op"] == "help":
                entering.help(message, fds, self.inside(message))
            elif message["op"] == "slots":
                self.free[:0] = message["slots"]  # type: ignore[call-overload]
        finally:
            wire.close_all(fds)
        return True

    def inside(self, message: "dict[str, object]") -> "entering.Inside | None":
        """The sandbox that a helper is to enter."""
        for pid, (sandbox, slot) in self.children.items():
            if sandbox == message.get("id"):
                first = self.first_uid + slot * RANGE
                try:
                    space = self.space_of(pid, "mnt")
                except OSError:
                    return None  # it has just ended
                return entering.Inside(pid, space, first, self.rootless, self.stage.path)
        return None

    def mount(self, message: "dict[str, object]") -> None:
        """Mount something into a sandbox that runs already: a helper takes the trees here, where their sources are
        visible, enters the sandbox's mount namespace, and places them."""
        found = [pid for pid, (sandbox, _) in self.children.items() if sandbox == message["id"]]
        if not found:
            return
        space = self.space_of(found[0], "mnt")
        if os.fork() == 0:
            try:
                self.mount_into(found[0], space, message)
            finally:
                os._exit(0)  # what failed shows in the sandbox's mountinfo, which the engine watches
        os.close(space)

    def space_of(self, pid: int, kind: str) -> int:
        """A namespace of a sandbox, as a descriptor. Without privilege it could not be opened by name, because an agent
        cannot be looked into (it is not dumpable); so it leaves them at the door while it still can."""
        if not self.rootless:
            return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        if pid in self.doors:
            door = self.doors.pop(pid)
            received = wire.receive(door)
            door.close()
            self.spaces[pid] = dict(zip(_LEFT, received[1] if received is not None else (), strict=False))
        if kind not in self.spaces.get(pid, ()):
            raise ProcessLookupError(errno.ESRCH, "the sandbox has ended")
        return os.dup(self.spaces[pid][kind])

    def mount_into(self, pid: int, space: int, message: "dict[str, object]") -> None:
        first = self.first_uid + self.children[pid][1] * RANGE
        ids = (USER, USER) if self.rootless else (first, first)
        builder = mounts.Builder(self.stage, user_fd=-1, rootless=self.rootless, ids=ids)
        builder.owner_fd = self.make_owner_map(message, builder, "/proc")
        steps: list[mounts.Step] = message["steps"]  # type: ignore[assignment]
        masks = {"file": self.stage.masked_file, "directory": self.stage.masked_dir}
        trees = [
            (step[1], builder.tree(masks[step[2]] if step[0] == "mask" else step[2], step[3]))
            for step in steps
        ]
        syscalls.setns(space, syscalls.CLONE_NEWNS)
        for target, tree in trees:
            # SAFETY: the target is looked up in the sandbox's own root, where nothing of the host is; its last part is
            # not followed. tests/workspaces (lost protections are mounted again)
            syscalls.move_mount(tree, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)

    def open_network(self, message: "dict[str, object]") -> None:
        """Make the sockets by which a running sandbox reaches the egress process, and pass them out.

        No helper is forked: this process steps into the namespace for the half millisecond that it takes, so that rules
        can be bound when a sandbox is claimed. tests/engine/test_network.py
        """
        sandbox = str(message["id"])
        found = [pid for pid, (name, _) in self.children.items() if name == sandbox]
        try:
            if not found:
                raise ProcessLookupError(errno.ESRCH, "the sandbox has ended")
            made = self.capture_in(found[0])
        except (OSError, capture.CaptureError) as problem:
            self.tell({"captured": sandbox, "reason": str(problem) or "unknown"})
            return
        roles = [role for role, _ in made.sockets]
        fds = [one.fileno() for _, one in made.sockets]
        answer: dict[str, object] = {"captured": sandbox, "roles": roles, "how": made.how, "note": made.note}
        self.tell(answer, fds)
        made.close()

    def capture_in(self, pid: int) -> capture.Capture:
        space = self.space_of(pid, "net")
        try:
            syscalls.setns(space, syscalls.CLONE_NEWNET)
            return capture.prepare()
        finally:
            # SAFETY: back to its own, whatever failed; otherwise the launcher itself would sit in a sandbox's network.
            # tests/drivers/test_namespaces.py::test_the_launcher_stays_in_its_own_namespaces
            syscalls.setns(self.own_netns, syscalls.CLONE_NEWNET)
            os.close(space)

    def make_blank(self) -> namespaces.Blank:
        slot = self.free.pop()
        first = self.first_uid + slot * RANGE
        maps = [(USER, USER, 1)] if self.rootless else [(0, first, RANGE)]
        return namespaces.make_blank(maps, maps, slot, self.lower_map(slot))

    def lower_map(self, slot: int) -> int:
        """How the host's programs are owned inside: the system's ids as they are, people's as nobody's. Otherwise a file
        that only the host's uid 1000 may read would be readable for the user inside, who has that number.

        A map is only ever looked at, so one per slot serves every sandbox that gets the slot.
        """
        if self.rootless:
            return -1
        if slot not in self.lower_maps:
            system = [(0, self.first_uid + slot * RANGE, SYSTEM)]
            self.lower_maps[slot] = namespaces.make_user(system, system)
        return self.lower_maps[slot]

    def prepare(self, message: "dict[str, object]", fds: "list[int]") -> None:
        """Fork an embryo: a sandbox that has its namespaces and its cgroup, and waits on its link to be told the rest."""
        self.filter_of("moderate", [])  # made here once, it is in every child
        sandbox = str(message["id"])
        try:
            if message["disk"]["template"]:  # type: ignore[index]
                self.image(str(message["disk"]["template"]))  # type: ignore[index]
            blank = self.blanks.pop() if self.blanks else self.make_blank()
        except (OSError, IndexError) as problem:
            detail = problem.strerror if isinstance(problem, OSError) else "no uid range is free"
            self.tell({"refused": sandbox, "reason": str(detail)})
            return
        # SAFETY: only the next child enters the new pid namespace; the launcher goes back to its own at once, else its
        # later children would share one. tests/drivers/test_namespaces.py::test_sandboxes_share_no_namespace_with_each_other_or_with_us
        syscalls.unshare(syscalls.CLONE_NEWPID)
        ours, theirs = _door() if self.rootless else (None, None)
        pid = os.fork()
        if pid == 0:
            self.birth(message, fds[0], blank, theirs)
        syscalls.setns(self.own_pidns, syscalls.CLONE_NEWPID)
        if ours is not None and theirs is not None:
            theirs.close()
            self.doors[pid] = ours
        wire.close_all([blank.user_fd, blank.net_fd])
        self.children[pid] = (sandbox, blank.slot)
        self.groups[pid] = message["cgroups"]  # type: ignore[assignment]
        pidfd = os.pidfd_open(pid)
        self.tell({"spawned": sandbox}, [pidfd])
        os.close(pidfd)

    def filter_of(self, profile: str, deny: "list[str]") -> bytes:
        if deny:
            return seccomp.build(profile, deny=deny, notify=True)
        if profile not in self.filters:
            self.filters[profile] = seccomp.build(profile, notify=True)
        return self.filters[profile]

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                sandbox, slot = self.children.pop(pid)
                self.groups.pop(pid, None)
                self.forget(pid)
                self.free.append(slot)
                self.tell({"died": sandbox, "status": status})

    def forget(self, pid: int) -> None:
        wire.close_all(list(self.spaces.pop(pid, {}).values()))
        door = self.doors.pop(pid, None)
        if door is not None:
            door.close()

    # ── in the child ────────────────────────────────────────────────────────────────────────────

    def birth(
        self,
        message: "dict[str, object]",
        link_fd: int,
        blank: namespaces.Blank,
        door: "_socket.socket | None",
    ) -> None:
        """Become a sandbox. Whatever fails is told to the engine with the step that failed; nothing half-made runs."""
        status = 1
        link = _socket.socket(fileno=os.dup(link_fd))
        try:
            builder = self.gestate(message, link, blank, door)
            received = wire.receive(link)
            if received is not None:
                self.become(received[0], received[1], link, builder)
            status = 0
        except BaseException as problem:
            system = isinstance(problem, OSError)
            text = f"{problem.strerror or problem}" if system else f"{type(problem).__name__}: {problem}"  # type: ignore[attr-defined]
            wire.send(link, {"failed": text, "errno": problem.errno if system else None})  # type: ignore[attr-defined]
        finally:
            os._exit(status)

    def gestate(
        self,
        message: "dict[str, object]",
        link: _socket.socket,
        blank: namespaces.Blank,
        door: "_socket.socket | None",
    ) -> mounts.Builder:
        """The part that does not depend on who will ask: cgroup, namespaces, /proc, and a disk and root of the shape that
        was asked for last. Joining a cgroup waits for the whole kernel (RCU), several milliseconds, so this happens
        before anybody asks; another shape costs the mounts a second time."""
        _signal.set_wakeup_fd(-1)
        syscalls.prctl(syscalls.PR_SET_NAME, b"cloche-guest")
        _join(message["cgroups"])  # type: ignore[arg-type]
        kept = -1 if door is None else door.fileno()
        _keep_only(link.fileno(), blank.user_fd, blank.net_fd, blank.lower_fd, self.bounds.sysctl, kept)
        syscalls.setns(blank.net_fd, syscalls.CLONE_NEWNET)
        os.close(blank.net_fd)
        syscalls.unshare(_UNSHARED)
        if door is not None:
            _leave_at(door)
        _socket.sethostname("cloche")
        first = self.first_uid + blank.slot * RANGE
        ids = (USER, USER) if self.rootless else (first, first)
        builder = mounts.Builder(self.stage, user_fd=blank.user_fd, rootless=self.rootless, ids=ids)
        builder.lower_fd = blank.lower_fd
        builder.make_proc()
        self.mount_disk(message["disk"], builder)  # type: ignore[arg-type]
        builder.apply(message["steps"])  # type: ignore[arg-type]
        return builder

    def become(
        self, message: "dict[str, object]", fds: "list[int]", link: _socket.socket, builder: mounts.Builder
    ) -> None:
        trace = [time.monotonic_ns()]
        filter_ = self.filter_of(str(message["syscalls"]), list(message["denied_syscalls"]))  # type: ignore[call-overload]
        if message.get("affinity"):
            filter_ = narrow.before(filter_, narrow.PINNED)  # a limit that a program could undo would be none
        steps: list[mounts.Step] = message["steps"]  # type: ignore[assignment]
        builder.owner_fd = self.make_owner_map(message, builder, builder.proc)
        kept = message.get("kept")
        if kept or not builder.fits(steps, message["disk"]["mib"]):  # type: ignore[index]
            builder.unmake()
            if not kept or not entering.mount_kept(kept, fds, builder):  # type: ignore[arg-type]
                self.mount_disk(message["disk"], builder)  # type: ignore[arg-type]
        trace.append(time.monotonic_ns())
        builder.apply(steps)
        trace.append(time.monotonic_ns())
        terminals = os.open(self.stage.root + "/dev/pts", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        layer = builder.open_layer() if message.get("layer") else -1
        disk = os.open(self.stage.path + "/disk", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        mounts.pivot(self.stage.root)
        mounted = (
            os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC) if message.get("watch_mounts") else -1
        )
        self.enter_user_namespace(builder.user_fd, owns=bool(message.get("owns")))
        _limit(message["rlimits"], message.get("affinity"))  # type: ignore[arg-type]
        _keep_only(link.fileno(), terminals, builder.upper_fd, mounted, layer, disk, builder.image_fd)
        trace.append(time.monotonic_ns())
        listener = self.lock(message, filter_)
        trace.append(time.monotonic_ns())
        passed = {
            "terminals": terminals,
            "upper": builder.upper_fd,
            "mounts": mounted,
            "listener": listener,
            "layer": layer,
            "disk": disk,
            "image": builder.image_fd,
        }
        passed = {name: fd for name, fd in passed.items() if fd >= 0}
        first_id = None if self.rootless else builder.guest_uid
        answer = {"ready": True, "trace": trace, "passed": list(passed), "first_id": first_id}
        wire.send(link, answer, list(passed.values()))
        wire.close_all(list(passed.values()))
        agent.Agent(link, message["agent"]).run()  # type: ignore[arg-type]

    def make_owner_map(self, message: "dict[str, object]", builder: mounts.Builder, proc: str) -> int:
        """The map of a workspace: its owner outside is the user inside, so that both can write the same files."""
        owner = message.get("owner")
        if self.rootless or not isinstance(owner, list):
            return -1

        def map_of(host: int) -> "list[namespaces.IdMap]":
            root = [(0, builder.guest_uid, 1)] if host != 0 else []
            return [*root, (host, builder.guest_uid + USER, 1)]

        return namespaces.make_user(map_of(owner[0]), map_of(owner[1]), proc=proc)

    def image(self, template: str) -> loops.Image:
        """Read here once, it is in every child."""
        if template not in self.images:
            self.images[template] = loops.Image(template)
        return self.images[template]

    def mount_disk(self, wanted: "dict[str, object]", builder: mounts.Builder) -> None:
        """A private copy of the formatted image, on a loop device that frees itself with its mount."""
        mib, template = int(wanted["mib"]), str(wanted["template"])  # type: ignore[call-overload]
        if not template:
            builder.make_disk("", mib)
            return
        builder.image_fd = self.image(template).copy()
        held, device = loops.attach(builder.image_fd)
        builder.make_disk(device, mib)
        os.close(held)

    def enter_user_namespace(self, user_fd: int, *, owns: bool) -> None:
        # SAFETY: from here on this process has no rights over its own mounts, network or pid namespace, which belong to
        # the launcher's user namespace. tests/security/test_kernel.py::test_root_inside_cannot_mount
        syscalls.setns(user_fd, syscalls.CLONE_NEWUSER)
        self.bounds.apply()
        if not self.rootless:
            os.setgroups([])
            # The real ids are the user's: what the agent spawns takes them on by exec, without a fork of its own.
            os.setresgid(USER, 0, 0)
            os.setresuid(USER, 0, 0)
        kept = 0 if self.rootless else _AGENT_CAPS | _OWNER_CAPS if owns else _AGENT_CAPS
        # A command gets what is in the bounding set by exec if it is root's: nothing, but in a build.
        syscalls.drop_bounding_set(keep=kept if owns else 0)
        syscalls.set_caps(kept, kept, 0)

    def lock(self, message: "dict[str, object]", filter_: bytes) -> int:
        """The last steps, after which nothing can be gained back."""
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        # SAFETY: set after the credentials changed, because that clears it. tests/engine/test_faults.py
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, _signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        os.umask(0o022)
        if not self.rootless:
            calls.FileIdentity.begin(USER)
        if self.landlock_abi:
            rules = [(str(path), int(access)) for path, access in message["landlock"]]  # type: ignore[attr-defined]
            landlock.restrict(rules, abi=self.landlock_abi)
        listener = seccomp.load(filter_, listener=True)
        return -1 if listener is None else listener


def _door() -> "tuple[_socket.socket, _socket.socket]":
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)


def _leave_at(door: _socket.socket) -> None:
    """Give the launcher what it will need to come back in."""
    spaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _LEFT]
    wire.send(door, {}, spaces)
    wire.close_all(spaces)
    door.close()


def _join(paths: "list[str]") -> None:
    for path in paths:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.write(file, b"0")
        os.close(file)


def _thaw(paths: "list[str]") -> None:
    """A task that was frozen by version 1 does not die on SIGKILL."""
    for path in paths:
        try:
            with open(os.path.dirname(path) + "/freezer.state", "wb", buffering=0) as file:
                file.write(b"THAWED")
        except OSError:
            continue  # no freezer of version 1


def _keep_only(*kept: int) -> None:
    """Close every descriptor but stdio (/dev/null) and these."""
    low = 3
    for fd in sorted(fd for fd in kept if fd >= 0):
        if fd > low:
            syscalls.close_range(low, fd - 1)
        low = fd + 1
    syscalls.close_range(low)


def _limit(limits: "dict[str, int]", affinity: "list[int] | None") -> None:
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
    if affinity:
        os.sched_setaffinity(0, affinity)


def _enter_own_namespaces(rootless: bool) -> None:
    if rootless:
        uid, gid = os.getuid(), os.getgid()  # read before: afterwards both are 65534
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        for name, text in (
            ("uid_map", f"{USER} {uid} 1"),
            ("setgroups", "deny"),
            ("gid_map", f"{USER} {gid} 1"),
        ):
            with open("/proc/self/" + name, "w") as file:
                file.write(text)
    # A network of its own too: it needs none, and without privilege it could not return to the host's.
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET)
    if os.fork():
        os._exit(0)  # the engine waits for this one, and knows the child by its socket
    # SAFETY: no terminal of the caller's is ever this process's own, nor its children's: /dev/tty would lead there.
    # tests/security/test_processes.py::test_the_caller_s_terminal_is_not_the_sandbox_s
    os.setsid()
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    # The host's /proc counts pids as the host does; maps are written by the numbers that this namespace gives.
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)


def _quiet_stdio() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def main(fd: int) -> None:
    """Serve the engine at the other end of descriptor `fd`; never returns."""
    # SAFETY: what the caller left inheritable is not ours to hold. tests/security/test_descriptors.py
    _keep_only(fd)
    os.chdir("/")
    os.umask(0o022)  # the caller's may be tighter, and what is made here is for another user to enter
    link = _socket.socket(fileno=fd)
    received = wire.receive(link)
    if received is None:
        os._exit(0)
    config = received[0]
    try:
        syscalls.prctl(syscalls.PR_SET_NAME, b"cloche-launcher")
        _enter_own_namespaces(bool(config["rootless"]))
        _prime()
        launcher = Launcher(link, config)
        _quiet_stdio()
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # a terminal's ^C is the engine's business
    except OSError as problem:
        wire.send(link, {"ready": False, "errno": problem.errno, "reason": str(problem)})
        os._exit(1)
    launcher.run()
    os._exit(0)


def _prime() -> None:
    """Everything first use would pay for in each child, paid once; then keep the collector from touching pages."""
    syscalls.prime()
    agent.prime()
    os.strerror(errno.EPERM)
    sys.stdout.flush()
    gc.collect()
    gc.disable()
    gc.freeze()
