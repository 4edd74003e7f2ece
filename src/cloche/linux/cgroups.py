"""Control groups, version 2 and version 1 behind one face: limits, accounting, killing and freezing of a
tree.

    hierarchy = detect()                               what is here, read-only, never an error
    group = hierarchy.create("cloche-x", memory_mib=256, cpus=0.5, pids=64)
    for path in group.paths: write "0" to it           how a process joins
    group.enforced, group.reasons                      what really holds, and why the rest does not

Groups are made beneath the caller's own (/proc/self/cgroup), never elsewhere: what the host granted to the
caller stays the ceiling. What is missing by permission or by kernel is no error but a limit that is not in
`enforced`.

Three layouts are met:

- *version 2*: one tree. A controller works in a group if its parent lists it in cgroup.subtree_control, and a
  parent that lists any may hold no processes itself. So if the caller's group is its own (delegated, holding
  only the caller's processes), the first `create` moves these into a leaf beside the future groups,
  `cloche-host`; if strangers are in it, they stay where they are and the limits are not enforced.
- *version 1*: a tree per controller, the caller perhaps in a different group of each.
- *hybrid*: version 1 with a version 2 tree beside it that has no controllers. It still kills, freezes and
  counts processor time, and is preferred for that: a task frozen by version 1 does not die on SIGKILL.

Standard library only, and no `typing`: see `syscalls`.
"""

import errno
import os
import signal
import time

from cloche.linux import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PREFIX = "cloche-"
_LEAF = "cloche-host"

# The limits we speak of, and the controller of each. The others count (cpuacct) or freeze (freezer) in
# version 1.
LIMITS = {"memory": "memory", "cpus": "cpu", "pids": "pids"}
_V1_HELPERS = ("cpuacct", "freezer")
_TREE = "unified"

_CPU_PERIOD_US = 100_000
_CPU_QUOTA_MIN_US = 1_000  # the kernel accepts no less
_MIB = 1 << 20

_DELEGATE = "start it in a group of its own, e.g. `systemd-run --user --scope -p Delegate=yes`"


class Files:
    """The file operations used here, apart so that a test can stand in for the kernel's rules."""

    def read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 1 << 20).decode()
        finally:
            os.close(fd)

    def write(self, path: str, text: str) -> None:
        # Never creating: a file that is not there is a feature that is not there.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def make(self, path: str) -> None:
        os.mkdir(path, 0o755)

    def remove(self, path: str) -> None:
        os.rmdir(path)

    def writable(self, path: str) -> bool:
        return os.access(path, os.W_OK, effective_ids=True)


class Controller:
    """What is known of one controller: version 1 or 2 (0: not there), where groups are made, and why not."""

    __slots__ = ("directory", "mount", "name", "reason", "version")

    def __init__(
        self, name: str, version: int = 0, mount: str = "", directory: str = "", reason: str = ""
    ) -> None:
        self.name = name
        self.version = version
        self.mount = mount
        self.directory = directory
        self.reason = reason

    @property
    def usable(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        state = self.reason or f"usable beneath {self.directory}"
        return f"<Controller {self.name} v{self.version}: {state}>"


class Stats:
    """What a group uses; None where nothing counts it."""

    __slots__ = ("cpu_ms", "memory_bytes", "memory_peak_bytes", "oom_kills", "pids")

    def __init__(
        self,
        memory_bytes: int | None,
        memory_peak_bytes: int | None,
        cpu_ms: float | None,
        oom_kills: int | None,
        pids: int | None,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.memory_peak_bytes = memory_peak_bytes
        self.cpu_ms = cpu_ms
        self.oom_kills = oom_kills
        self.pids = pids

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


# --- detection ----------------------------------------------------------------------------------------------


def detect(*, proc: str = "/proc/self", files: Files | None = None) -> "Hierarchy":
    """Look at the groups of this process. Changes nothing and raises nothing; reasons are in the answer."""
    files = files or Files()
    own, mounts = _own_groups(files, proc), _mounts(files, proc)
    # SAFETY: the tree that kills comes first, so that a process which has joined anything can be killed there
    # (test_a_process_halfway_in_is_killed).
    tree = _version_2(files, mounts.get(_TREE), own.get(_TREE))
    controllers = {_TREE: tree}
    for name in (*LIMITS.values(), *_V1_HELPERS):
        if name in mounts:
            controllers[name] = _version_1(files, name, mounts[name], own.get(name))
    for name in LIMITS.values():
        if name not in controllers:
            controllers[name] = _version_2_controller(files, name, tree)
    return Hierarchy(controllers, files)


def _own_groups(files: Files, proc: str) -> dict[str, str]:
    """Controller → path of the caller's group, from lines like `4:memory:/a/b` and `0::/c`."""
    own = {}
    for line in _lines(files, f"{proc}/cgroup"):
        number, names, path = line.split(":", 2)
        for name in [_TREE] if number == "0" else names.split(","):
            own[name] = path
    return own


def _mounts(files: Files, proc: str) -> dict[str, tuple[str, str]]:
    """Controller → (mount point, which group is mounted there), from mountinfo."""
    found: dict[str, tuple[str, str]] = {}
    for line in _lines(files, f"{proc}/mountinfo"):
        fields = line.split()
        root, point = fields[3], fields[4].replace("\\040", " ")
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind == "cgroup2":
            found.setdefault(_TREE, (point, root))
        elif kind == "cgroup":
            for name in options.split(","):
                found.setdefault(name, (point, root))
    return found


def _lines(files: Files, path: str) -> list[str]:
    try:
        return files.read(path).splitlines()
    except OSError:
        return []


def _group_directory(mount: tuple[str, str], own: str | None) -> str | None:
    """Where the caller's group is in the file system; None when it lies outside what is mounted there."""
    point, root = mount
    if own is None or "/.." in own:
        return None
    inner = own if root == "/" else own[len(root) :] if (own + "/").startswith(root + "/") else None
    return None if inner is None else (point + inner).rstrip("/")


def _version_1(files: Files, name: str, mount: tuple[str, str], own: str | None) -> Controller:
    directory = _group_directory(mount, own)
    if directory is None:
        return Controller(name, 1, mount[0], "", f"the caller's {name} group is not visible in {mount[0]}")
    return Controller(name, 1, mount[0], directory, _not_writable(files, directory, "version 1 needs root"))


def _version_2(files: Files, mount: tuple[str, str] | None, own: str | None) -> Controller:
    if mount is None:
        return Controller(_TREE, reason="no cgroup2 file system is mounted")
    directory = _group_directory(mount, own)
    if directory is None:
        return Controller(_TREE, 2, mount[0], "", f"the caller's group is not visible in {mount[0]}")
    if os.path.basename(directory) == _LEAF:  # an earlier `create` moved us, or our parent, there
        directory = os.path.dirname(directory)
    return Controller(_TREE, 2, mount[0], directory, _not_writable(files, directory, _DELEGATE))


def _version_2_controller(files: Files, name: str, tree: Controller) -> Controller:
    if not tree.version:
        reason = f"no cgroup file system with {name} is mounted"
    elif tree.reason:
        reason = tree.reason
    elif name not in _words(files, f"{tree.directory}/cgroup.controllers"):
        reason = f"{name} is not delegated to {tree.directory}"
    elif name in _words(files, f"{tree.directory}/cgroup.subtree_control"):
        reason = ""
    elif _strangers(files, tree.directory):
        reason = f"other processes share {tree.directory}, so {name} cannot be enabled there: {_DELEGATE}"
    else:
        reason = ""
    return Controller(name, tree.version, tree.mount, tree.directory, reason)


def _not_writable(files: Files, directory: str, remedy: str) -> str:
    # Joining a group also needs the cgroup.procs of the group above it.
    if files.writable(directory) and files.writable(f"{directory}/cgroup.procs"):
        return ""
    return f"{directory} is not writable for this user: {remedy}"


def _words(files: Files, path: str) -> list[str]:
    return " ".join(_lines(files, path)).split()


def _is_root(files: Files, directory: str) -> bool:
    """The root of all groups, which alone may hold processes and controlled children: it has no type."""
    return not _lines(files, f"{directory}/cgroup.type")


def _strangers(files: Files, directory: str) -> list[int]:
    """Processes in a group that are not the caller's, and so forbid controllers beneath it."""
    if _is_root(files, directory):
        return []
    members = [int(word) for word in _words(files, f"{directory}/cgroup.procs")]
    if not members or members == [os.getpid()]:
        return []
    ours = {os.getpid(), *processes.descendants(os.getpid())}
    return [pid for pid in members if pid not in ours]


class Hierarchy:
    """The caller's place in the groups of this machine."""

    def __init__(self, controllers: dict[str, Controller], files: Files) -> None:
        self.controllers = controllers
        self._files = files

    def __repr__(self) -> str:
        return f"<Hierarchy {list(self.controllers.values())}>"

    @property
    def enforceable(self) -> frozenset[str]:
        """The limits that groups made here can be expected to hold."""
        return frozenset(name for name, controller in LIMITS.items() if self.controllers[controller].usable)

    @property
    def reasons(self) -> dict[str, str]:
        """For every limit that cannot be enforced, why."""
        found = {name: self.controllers[controller].reason for name, controller in LIMITS.items()}
        return {name: reason for name, reason in found.items() if reason}

    @property
    def kills(self) -> bool:
        """Whether a whole group can be killed at once, as opposed to one process after the other."""
        return self.controllers[_TREE].usable

    @property
    def settled(self) -> bool:
        """Whether `create` needs to move nothing: version 1, or the controllers are enabled already."""
        return not [c for c in self._wanted() if c.version == 2 and c.name != _TREE and not self._enabled(c)]

    def create(
        self,
        name: str,
        *,
        memory_mib: float | None = None,
        cpus: float | None = None,
        pids: int | None = None,
    ) -> "Group":
        """A new group; FileExistsError if the name is taken. Without a usable controller it is empty."""
        _check_name(name)
        refused = self._prepare()
        reasons = self.reasons | refused
        directories: dict[str, str] = {}
        try:
            for controller in self._wanted():
                if _limit_of(controller.name) not in refused:
                    self._make(controller, name, directories, reasons)
            group = Group(name, directories, self._versions(), self._files, reasons)
            group.set_limits(memory_mib=memory_mib, cpus=cpus, pids=pids)
        except BaseException:
            for directory in _distinct(directories):
                _try_remove(self._files, directory)
            raise
        return group

    def open(self, name: str) -> "Group":
        """A group that exists already beneath the caller's own, e.g. made by another process of ours."""
        _check_name(name)
        directories = {}
        for controller in self.controllers.values():
            if controller.directory and os.path.isdir(f"{controller.directory}/{name}"):
                directories[controller.name] = f"{controller.directory}/{name}"
        return Group(name, directories, self._versions(), self._files, {})

    def sweep(self, prefix: str = PREFIX, keep: "Iterable[str]" = ()) -> "list[Group]":
        """Groups whose name starts so and is not in `keep`, wherever we could remove them; removes nothing.

        Not only beneath the caller's own group, because who left them may have been in another one. They may
        be in use, by another engine: the prefix or `Group.populated` must tell.
        """
        if not prefix.startswith(PREFIX):
            raise ValueError(f"{prefix!r} does not start with {PREFIX!r}")
        spared = {*keep, _LEAF}
        found: dict[str, list[dict[str, str]]] = {}
        for mount in dict.fromkeys(c.mount for c in self.controllers.values() if c.mount):
            names = [c.name for c in self.controllers.values() if c.mount == mount]
            for path in _find(mount, prefix, spared):
                if self._files.writable(path):
                    _note(found.setdefault(os.path.basename(path), []), names, path)
        return [
            Group(name, directories, self._versions(), self._files, {})
            for name, same_name in found.items()
            for directories in same_name
        ]

    def _versions(self) -> dict[str, int]:
        return {name: controller.version for name, controller in self.controllers.items()}

    def _wanted(self) -> list[Controller]:
        """The controllers to make a group in: with a version 2 tree, version 1's helpers are not needed."""
        skipped = _V1_HELPERS if self.controllers[_TREE].usable else ()
        return [c for c in self.controllers.values() if c.usable and c.name not in skipped]

    def _make(self, controller: Controller, name: str, made: dict[str, str], reasons: dict[str, str]) -> None:
        path = f"{controller.directory}/{name}"
        if path not in made.values():
            try:
                self._files.make(path)
            except FileExistsError:
                raise
            except OSError as error:
                reasons[_limit_of(controller.name)] = f"cannot make {path}: {error.strerror}"
                return
        made[controller.name] = path

    def _prepare(self) -> dict[str, str]:
        """Version 2: enable our controllers beneath the caller's group; reasons for those that refuse."""
        tree = self.controllers[_TREE]
        missing = [c for c in self._wanted() if c.version == 2 and c is not tree and not self._enabled(c)]
        if not missing:
            return {}
        try:
            self._vacate(tree.directory)
        except OSError as error:
            reason = f"cannot empty {tree.directory} to enable controllers: {error.strerror}: {_DELEGATE}"
            return {_limit_of(c.name): reason for c in missing}
        return {_limit_of(c.name): reason for c in missing if (reason := self._enable(c))}

    def _enabled(self, controller: Controller) -> bool:
        return controller.name in _words(self._files, f"{controller.directory}/cgroup.subtree_control")

    def _enable(self, controller: Controller) -> str:
        try:
            self._files.write(f"{controller.directory}/cgroup.subtree_control", f"+{controller.name}")
        except OSError as error:
            return f"{controller.name} cannot be enabled in {controller.directory}: {error.strerror}"
        return ""

    def _vacate(self, directory: str) -> None:
        """Move our processes from a group to its leaf, for children of a group with processes are not
        controlled.

        Checked first and not left to the kernel, which lets `cpu` and `pids` through and then makes the
        children invalid.
        """
        if _is_root(self._files, directory) or not _words(self._files, f"{directory}/cgroup.procs"):
            return
        # SAFETY: a stranger's process is never moved (test_strangers_are_never_moved).
        if _strangers(self._files, directory):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        leaf = f"{directory}/{_LEAF}"
        try:
            self._files.make(leaf)
        except FileExistsError:
            pass
        for pid in _words(self._files, f"{directory}/cgroup.procs"):
            try:
                self._files.write(f"{leaf}/cgroup.procs", pid)
            except ProcessLookupError:
                pass


def _check_name(name: str) -> None:
    if (
        not name.startswith(PREFIX)
        or name == _LEAF
        or "/" in name
        or not name.isprintable()
        or len(name) > 200
    ):
        raise ValueError(f"{name!r} is no name for a group: it must start with {PREFIX!r} and hold no '/'")


def _limit_of(controller: str) -> str:
    return next((limit for limit, name in LIMITS.items() if name == controller), controller)


def _distinct(directories: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(directories.values()))


def _note(groups: list[dict[str, str]], controllers: list[str], path: str) -> None:
    """Add a directory to the first group of its name without one in this tree: a name may be left twice."""
    for group in groups:
        if controllers[0] not in group:
            break
    else:
        group = {}
        groups.append(group)
    group.update(dict.fromkeys(controllers, path))


def _find(top: str, prefix: str, spared: set[str]) -> list[str]:
    found = []
    waiting = [top]
    while waiting:
        path = waiting.pop()
        try:
            if os.stat(path).st_nlink == 2:
                continue  # nothing beneath, as nearly everywhere: a group has sixty files that need no look
            names = [entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # gone meanwhile
        found += [f"{path}/{name}" for name in names if name.startswith(prefix) and name not in spared]
        waiting += [f"{path}/{name}" for name in names if not name.startswith(prefix)]
    return found


# --- a group ------------------------------------------------------------------------------------------------


class Group:
    """One group: a directory in each controller's tree, or a single one in version 2."""

    def __init__(
        self,
        name: str,
        directories: dict[str, str],
        versions: dict[str, int],
        files: Files,
        reasons: dict[str, str],
    ) -> None:
        self.name = name
        self.reasons = reasons
        self._directories = directories
        self._versions = versions
        self._files = files
        self._enforced: set[str] = set()

    def __repr__(self) -> str:
        return f"<Group {self.name} in {_distinct(self._directories)} enforcing {sorted(self._enforced)}>"

    @property
    def paths(self) -> list[str]:
        """The files to which a process writes "0" to join: all, in this order, before it starts others or a thread.

        In version 1 a single thread moves by `tasks`, which spares it the lock that a whole process takes, and with it a
        wait for every processor of the machine (measured: 0.5 instead of 11 ms).
        """
        files = {}
        for name, directory in self._directories.items():
            files[directory] = "cgroup.procs" if self._versions.get(name) == 2 else "tasks"
        return [f"{directory}/{file}" for directory, file in files.items()]

    @property
    def enforced(self) -> frozenset[str]:
        """Of memory, cpus and pids: the limits that were asked for and hold."""
        return frozenset(self._enforced)

    @property
    def frozen(self) -> bool:
        if _TREE in self._directories:
            return self._number(_TREE, "cgroup.events", "frozen") == 1
        return self._text("freezer", "freezer.state").strip() == "FROZEN"

    @property
    def populated(self) -> bool:
        """Whether any process is in it."""
        if _TREE in self._directories:
            return self._number(_TREE, "cgroup.events", "populated") == 1
        return bool(self.pids())

    def pids(self) -> list[int]:
        """The processes in it, as far as our pid namespace shows them."""
        for directory in _distinct(self._directories):
            return [int(word) for word in _words(self._files, f"{directory}/cgroup.procs") if word != "0"]
        return []

    def set_limits(
        self, *, memory_mib: float | None = None, cpus: float | None = None, pids: int | None = None
    ) -> frozenset[str]:
        """Change limits, also of running processes; None leaves one as it is. Returns `enforced`."""
        if memory_mib is not None:
            self._limit("memory", self._set_memory, int(memory_mib * _MIB))
        if cpus is not None:
            self._limit("cpus", self._set_cpu_quota, max(_CPU_QUOTA_MIN_US, int(cpus * _CPU_PERIOD_US)))
        if pids is not None:
            self._limit("pids", self._set_pids, pids)
        return self.enforced

    def kill(self) -> bool:
        """SIGKILL every process in it, those being forked too; False when some may be left."""
        if self._try_write(_TREE, "cgroup.kill", "1"):
            return True
        self.thaw()
        allowed = self._text("pids", "pids.max")
        self._try_write("pids", "pids.max", "0")  # what cannot fork cannot outrun us
        try:
            return self._kill_each()
        finally:
            self._try_write("pids", "pids.max", allowed)

    def _kill_each(self) -> bool:
        for _ in range(2500):  # five seconds: on a busy machine the dying take their time
            members = self.pids()
            if not members:
                return bool(self._directories)
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    return False
            time.sleep(0.002)
        return False

    def freeze(self, timeout_s: float = 1.0) -> bool:
        """Stop every process in it where it stands; False when it cannot be done, or not within the time."""
        if not (
            self._try_write(_TREE, "cgroup.freeze", "1")
            or self._try_write("freezer", "freezer.state", "FROZEN")
        ):
            return False
        deadline = time.monotonic() + timeout_s
        while not self.frozen:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        return True

    def thaw(self) -> None:
        """Let it run again; harmless when it does."""
        self._try_write(_TREE, "cgroup.freeze", "0")
        self._try_write("freezer", "freezer.state", "THAWED")

    def stats(self) -> Stats:
        first = self._versions.get("memory") == 1
        usage, peak = ("usage_in_bytes", "max_usage_in_bytes") if first else ("current", "peak")
        return Stats(
            memory_bytes=self._number("memory", f"memory.{usage}"),
            memory_peak_bytes=self._number("memory", f"memory.{peak}"),
            cpu_ms=self._cpu_ms(),
            oom_kills=self._number("memory", "memory.oom_control" if first else "memory.events", "oom_kill"),
            pids=self._pid_count(),
        )

    def remove(self, timeout_s: float = 2.0) -> bool:
        """Kill what is in it, remove it with the groups beneath; False when some is left after the time."""
        if self._try_remove():
            return True
        self.thaw()
        self.kill()
        deadline = time.monotonic() + timeout_s
        pause = 0.0005
        # The dying take a moment to leave, and until then a group is busy.
        while not self._try_remove():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
            self.kill()
        return True

    def _try_remove(self) -> bool:
        left = [path for path in _distinct(self._directories) if not _try_remove(self._files, path)]
        return not left

    # Limits: each setter raises OSError when the kernel refuses.

    def _limit(self, name: str, setter: "Callable[[int], None]", value: int) -> None:
        if LIMITS[name] not in self._directories:
            self.reasons.setdefault(name, f"no {LIMITS[name]} controller")
            return
        try:
            setter(value)
        except OSError as error:
            self._enforced.discard(name)
            self.reasons[name] = f"the kernel refuses {name} of {self.name}: {error.strerror}"
        else:
            self._enforced.add(name)
            self.reasons.pop(name, None)

    def _set_memory(self, size: int) -> None:
        if self._versions["memory"] == 2:
            self._write("memory", "memory.max", str(size))
            self._try_write("memory", "memory.swap.max", "0")
            return
        # Memory with swap may never be below memory alone: lift it, then set both. Without it, swap is no
        # limit.
        self._try_write("memory", "memory.memsw.limit_in_bytes", "-1")
        self._write("memory", "memory.limit_in_bytes", str(size))
        self._try_write("memory", "memory.memsw.limit_in_bytes", str(size))

    def _set_cpu_quota(self, quota_us: int) -> None:
        if self._versions["cpu"] == 2:
            self._write("cpu", "cpu.max", f"{quota_us} {_CPU_PERIOD_US}")
            return
        self._write("cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_US))
        self._write("cpu", "cpu.cfs_quota_us", str(quota_us))

    def _set_pids(self, count: int) -> None:
        self._write("pids", "pids.max", str(count))

    # Reading: what is not there is None.

    def _cpu_ms(self) -> float | None:
        usage_us = self._number(_TREE, "cpu.stat", "usage_usec")
        if usage_us is not None:
            return usage_us / 1e3
        usage_ns = self._number("cpuacct", "cpuacct.usage")
        return None if usage_ns is None else usage_ns / 1e6

    def _pid_count(self) -> int | None:
        counted = self._number("pids", "pids.current")
        return counted if counted is not None else len(self.pids()) if self._directories else None

    def _number(self, controller: str, file: str, key: str | None = None) -> int | None:
        """The number in a file, or the one behind a word in it."""
        words = self._text(controller, file).split()
        if key is not None:
            words = words[words.index(key) + 1 :] if key in words else []
        return int(words[0]) if words else None

    def _text(self, controller: str, file: str) -> str:
        if controller not in self._directories:
            return ""
        return "\n".join(_lines(self._files, f"{self._directories[controller]}/{file}"))

    def _write(self, controller: str, file: str, text: str) -> None:
        self._files.write(f"{self._directories[controller]}/{file}", text)

    def _try_write(self, controller: str, file: str, text: str) -> bool:
        if controller not in self._directories:
            return False
        try:
            self._write(controller, file, text)
        except OSError:
            return False
        return True


def _try_remove(files: Files, directory: str) -> bool:
    """Remove a group and the empty ones beneath it, the deepest first; True when it is gone."""
    try:
        files.remove(directory)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        pass  # in use, or with groups beneath it: only then it is worth a look
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
        for name in names:
            _try_remove(files, f"{directory}/{name}")
        files.remove(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
