"""A root file system: planned as data, then applied.

`plan(view)` says which mounts make the root, in order, as plain lists; it looks at nothing and is property-tested (no
later step re-exposes a denied path). `apply(steps, …)` runs in the sandbox's first process, between unshare and the
entry into its user namespace, and is dull on purpose: one step, one or two system calls.

    stage/            a tmpfs in the launcher's mount namespace: mount points only
      disk            the sandbox's writable file system
      kept/N          disks of snapshots that lie below it, read-only
      layer/N         read-only lowers, id-mapped to the sandbox's uids
      root            what pivot_root makes "/"

Targets are absolute paths *inside*; sources are host paths. Standard library and `linux.syscalls` only.
"""

import os
import stat

from cloche.linux import syscalls

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would cost every sandbox a megabyte
if TYPE_CHECKING:
    from typing import Any

    Step = list[Any]  # [act, target inside, source on the host, options]: plain, because it travels as JSON

_BIND = syscalls.MS_BIND
_LOCKED = syscalls.MS_NOSUID | syscalls.MS_NODEV
TERMINALS = 64  # that one sandbox may have open
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
MASKED = (  # of /proc: what tells about the host, or other people's keys
    "kcore", "keys", "key-users", "timer_list", "sched_debug", "sysrq-trigger", "latency_stats", "kallsyms",
    "kpagecount", "kpageflags", "kpagecgroup", "acpi", "scsi",
)  # fmt: skip
READ_ONLY = ("sys", "bus", "fs", "irq")  # of /proc
USER = 1000
KEPT = 48  # disks that may lie below one; the kernel takes a page of options, and each is some 30 bytes of it
DISK = tuple(
    f"u{n}/{part}" for n in range(4) for part in ("up", "work")
)  # made with the disk, for the first overlays
PRIVATE = ("/tmp", "/home/user", "/workspace", "/var/tmp")  # writable even where the root is not


class Bind:
    """A host path shown inside. `owner` maps the source's owner to the sandbox's user: both can write the same files."""

    __slots__ = ("owner", "source", "target", "writable")

    def __init__(self, source: str, target: str, *, writable: bool = False, owner: bool = False) -> None:
        self.source = source
        self.target = target
        self.writable = writable
        self.owner = owner


class View:
    """What a sandbox's processes shall see.

    Over the root come, in this order: `overlays` (host directories shown at their own path under a private writable
    layer), `binds`, `private` ((our directory, target), writable), `pinned` (directories bound onto themselves, so that
    they cannot be renamed), `protect` ((host source, target), read-only) and `deny` (hidden). Shallow targets first
    within each, so that a child's mount is not hidden by its parent's.
    """

    def __init__(
        self,
        *,
        skeleton: str,
        layers: "tuple[str, ...]",
        writable: bool,
        shm_mib: int,
        overlays: "tuple[str, ...]" = (),
        binds: "tuple[Bind, ...]" = (),
        private: "tuple[tuple[str, str], ...]" = (),
        pinned: "tuple[str, ...]" = (),
        protect: "tuple[tuple[str, str], ...]" = (),
        deny: "tuple[str, ...]" = (),
    ) -> None:
        self.skeleton = skeleton
        self.layers = layers
        self.writable = writable
        self.shm_mib = shm_mib
        self.overlays = overlays
        self.binds = binds
        self.private = private
        self.pinned = pinned
        self.protect = protect
        self.deny = deny


def plan(view: View) -> "list[Step]":
    """The mounts that make `view`, in order. Pure."""
    act = "overlay" if view.writable else "layer"
    lent = bool(view.overlays or view.binds or view.private)
    # A read-only root must still take the mount points of a workspace: it is sealed when they are made.
    steps: list[Step] = [["overlay" if lent else act, "/", view.skeleton, {}]]
    steps += [[act, layer, layer, {}] for layer in _outermost_first(view.layers)]
    if not view.writable:
        steps += [["private", path, view.skeleton + path, {}] for path in PRIVATE]
    steps.append(["devices", "/dev", "", {"shm_mib": view.shm_mib}])
    steps.append(["proc", "/proc", "", {}])
    made = {"make": True}
    groups: list[list[Step]] = [
        [["overlay", path, path, {"owner": True, **made}] for path in view.overlays],
        [
            ["bind", b.target, b.source, {"writable": b.writable, "owner": b.owner, **made}]
            for b in view.binds
        ],
        [
            ["bind", target, source, {"writable": True, "owner": True, **made}]
            for source, target in view.private
        ],
        # Late, so that nothing uncovers them.
        [["pin", target, "", {}] for target in view.pinned]
        + [["bind", target, source, {"writable": False, "owner": True}] for source, target in view.protect],
        [["mask", path, "", {}] for path in view.deny],
    ]
    for group in groups:
        steps += sorted(group, key=lambda step: step[1].rstrip("/").count("/"))
    if lent and not view.writable:
        steps.append(["seal", "/", "", {}])
    return steps


def _outermost_first(paths: tuple[str, ...]) -> list[str]:
    return sorted(dict.fromkeys(paths), key=lambda path: (path.count("/"), path))


class StepFailed(OSError):
    """Which step of a plan failed, with the kernel's reason."""

    def __init__(self, step: "Step", cause: OSError) -> None:
        super().__init__(cause.errno, f"{step[0]} {step[1] or step[2]}: {cause.strerror or cause}")


class Stage:
    """The mount points that every sandbox of a launcher is built on."""

    def __init__(self, path: str, masked_file: str, masked_dir: str) -> None:
        self.path = path
        self.masked_file = masked_file
        self.masked_dir = masked_dir

    @property
    def root(self) -> str:
        return self.path + "/root"


def make_stage(path: str, layers: int = 24) -> Stage:
    """Mount the stage in this (the launcher's, private) mount namespace, with the parts that never differ."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    # SAFETY: only in the launcher's own mount namespace, made private before. tests/drivers/test_namespaces.py
    syscalls.mount("stage", path, "tmpfs", _LOCKED, "mode=0755,size=1m")
    for name in ("root", "disk", "layer", "kept", "masked", "dev", "proc"):
        os.mkdir(f"{path}/{name}", 0o755)
    for number in range(KEPT):
        os.mkdir(f"{path}/kept/{number}", 0o755)
    for number in range(layers):
        os.mkdir(f"{path}/layer/{number}", 0o755)
    _make_devices(f"{path}/dev")
    masked = f"{path}/masked"
    with open(f"{masked}/file", "wb"):
        os.chmod(f"{masked}/file", 0)
    os.mkdir(f"{masked}/dir", 0o000)
    for cover in ("file", "dir"):
        # A mount of their own, which nobody can write to; what is bound from it is as it is.
        syscalls.mount(f"{masked}/{cover}", f"{masked}/{cover}", None, _BIND)
        flags = _BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _LOCKED | syscalls.MS_NOEXEC
        syscalls.mount(None, f"{masked}/{cover}", None, flags)
    return Stage(path, f"{masked}/file", f"{masked}/dir")


def _make_devices(path: str) -> None:
    """One read-only /dev for every sandbox: six devices of the host, the usual links, and mount points."""
    syscalls.mount("dev", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "mode=0755,size=64k")
    for name in DEVICES:
        with open(f"{path}/{name}", "wb"):
            pass
        syscalls.mount(f"/dev/{name}", f"{path}/{name}", None, _BIND)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{path}/{name}", 0o755)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                         ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx"), ("core", "/proc/kcore")):  # fmt: skip
        os.symlink(target, f"{path}/{name}")
    syscalls.mount_setattr(
        syscalls.AT_FDCWD, path, syscalls.AT_RECURSIVE, set_attributes=syscalls.MOUNT_ATTR_RDONLY
    )


class Builder:
    """Applies one plan. Lives in the sandbox's first process and is gone with the setup."""

    def __init__(self, stage: Stage, *, user_fd: int, rootless: bool, ids: tuple[int, int]) -> None:
        self.stage = stage
        self.user_fd = user_fd
        self.lower_fd = user_fd  # the map of the host's own directories
        self.owner_fd = -1  # the map of a workspace's owner, where there is one
        self.rootless = rootless
        self.guest_uid, self.guest_gid = ids
        self.layers = 0
        self.applied: list[Step] = []
        self.proc = stage.path + "/proc"
        self.disk_mib = 0
        self.upper_fd = -1
        self.image_fd = -1  # what the disk's blocks are, where it is a loop device
        self.kept = False  # whether the disk came with files on it
        self.below: list[str] = []  # where kept disks are mounted that lie below this one, the topmost first

    def apply(self, steps: "list[Step]") -> None:
        """Make what a plan says, from where it goes on after what was applied before."""
        for step in steps[len(self.applied) :]:
            try:
                getattr(self, "do_" + step[0])(step[1], step[2], step[3])
            except OSError as problem:
                raise StepFailed(step, problem) from problem
            self.applied.append(step)

    def fits(self, steps: "list[Step]", disk_mib: int) -> bool:
        """Whether what was made ahead is how this plan begins."""
        return steps[: len(self.applied)] == self.applied and self.disk_mib == disk_mib

    def unmake(self) -> None:
        """Back to an empty stage, without a disk: another root is wanted than the one that was made ahead."""
        for path in (self.stage.root, self.stage.path + "/disk"):
            syscalls.umount2(path, syscalls.MNT_DETACH)
        self.applied, self.layers, self.disk_mib = [], 0, 0
        if self.image_fd >= 0:
            os.close(self.image_fd)
            self.image_fd = -1
        self.make_proc()

    def inside(self, path: str) -> str:
        return self.stage.root + (path if path != "/" else "")

    def make_disk(self, device: str, mib: int) -> None:
        """The sandbox's writable file system: a loop device of exactly that size, or memory where there is none."""
        disk = self.stage.path + "/disk"
        if device:
            # SAFETY: the image was formatted by us and is never written by anyone but this mount: a hostile file
            # system would be a kernel attack. tests/security/test_limits.py
            # No barriers: what ends with the sandbox need not reach the platter, and its end need not wait for that.
            options = "nodiscard,noinit_itable,nobarrier"
            syscalls.mount(device, disk, "ext4", _LOCKED | syscalls.MS_NOATIME, options)
        else:
            syscalls.mount("disk", disk, "tmpfs", _LOCKED, f"mode=0755,{_sized(mib)}")
        self.disk_mib = mib

    def mount_below(self, device: str, number: int, map_fd: int) -> None:
        """A disk that was kept, read-only beneath the sandbox's own."""
        path = f"{self.stage.path}/kept/{number}"
        # SAFETY: as above: only the kernel ever wrote to it. tests/engine/test_snapshots.py
        syscalls.mount(
            device, path, "ext4", _LOCKED | syscalls.MS_NOATIME | syscalls.MS_RDONLY, "noinit_itable"
        )
        self.shift(path, map_fd)
        self.below.insert(0, path)

    def shift(self, path: str, map_fd: int) -> None:
        """Show the owners of a mounted disk by a map: it was written by a sandbox with another uid range."""
        if map_fd < 0:
            return
        tree = syscalls.open_tree(syscalls.AT_FDCWD, path, syscalls.OPEN_TREE_CLONE)
        try:
            syscalls.mount_setattr(
                tree, "", syscalls.AT_EMPTY_PATH, set_attributes=syscalls.MOUNT_ATTR_IDMAP, userns_fd=map_fd
            )
            syscalls.umount2(path, syscalls.MNT_DETACH)
            syscalls.move_mount(tree, "", syscalls.AT_FDCWD, path, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)

    def do_layer(self, target: str, source: str, options: "dict[str, Any]") -> None:
        """A read-only host directory, owned inside as it is outside."""
        self.prepare(target, source, options)
        self.lower(source, self.inside(target), self.map_of(target))

    def do_overlay(self, target: str, source: str, options: "dict[str, Any]") -> None:
        self.prepare(target, source, options)
        lower = f"{self.stage.path}/layer/{self.layers}"
        lent = bool(options.get("owner"))
        self.lower(source, lower, self.owner_fd if lent else self.map_of(target))
        name = f"u{self.layers}"
        self.layers += 1
        self.make_private(name, self.lowers(name, source)[0], "up", "work")
        upper = f"{self.stage.path}/disk/{name}"
        if lent:  # a workspace: what is written above it can be looked at from outside
            if not self.rootless:
                os.chown(upper + "/up", self.guest_uid + USER, self.guest_gid + USER)
            self.upper_fd = os.open(upper + "/up", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # A renamed directory of a workspace is copied, not redirected: a redirection could not be taken over.
        redirect = "off" if lent else "on"
        extra = "userxattr" if self.rootless else f"index=off,redirect_dir={redirect},volatile"
        syscalls.mount(
            "overlay", self.inside(target), "overlay", _LOCKED,
            f"lowerdir={_stacked(self.lowers(name, lower))},upperdir={upper}/up,workdir={upper}/work,{extra}",
        )  # fmt: skip

    def open_layer(self) -> int:
        """What is written above the root, as a directory: the first overlay that was made."""
        return os.open(f"{self.stage.path}/disk/u0/up", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lowers(self, name: str, *last: str) -> "list[str]":
        """What lies below a writable layer, the topmost first: the same layer of the disks that were kept, and `last`."""
        kept = [f"{disk}/{name}/up" for disk in self.below]
        return [*filter(os.path.isdir, kept), *last]

    def do_private(self, target: str, shape: str, _options: "dict[str, Any]") -> None:
        name = "p" + target.replace("/", "_")
        lowers = self.lowers(name)
        if not lowers:
            self.make_private(name, shape, "up")
            syscalls.mount(f"{self.stage.path}/disk/{name}/up", self.inside(target), None, _BIND)
            return
        self.make_private(name, lowers[0], "up", "work")
        place = f"{self.stage.path}/disk/{name}"
        syscalls.mount(
            "overlay", self.inside(target), "overlay", _LOCKED,
            f"lowerdir={_stacked(lowers)},upperdir={place}/up,workdir={place}/work,index=off,redirect_dir=on,volatile",
        )  # fmt: skip

    def make_private(self, name: str, shape: str, *parts: str) -> None:
        """Directories on the sandbox's disk with the mode of `shape`, and its owner as the sandbox counts uids.

        The disk is not id-mapped like the lowers: an overlay's maker must be able to own its work directory.
        """
        info = os.stat(shape)
        path = f"{self.stage.path}/disk/{name}"
        if self.kept and os.path.isdir(path):
            # Modes and owners are as they were left; an overlay starts with a clean place to work in, and refuses one
            # that a mount without flushes (`volatile`) has used.
            if "work" in parts:
                os.makedirs(path + "/work", exist_ok=True)
                _empty(path + "/work")
            return
        if not os.path.isdir(path):
            for part in ("", *(f"/{part}" for part in parts)):
                os.mkdir(path + part, 0o755)
        if stat.S_IMODE(info.st_mode) != 0o755:
            os.chmod(path + "/up", stat.S_IMODE(info.st_mode))
        if not self.rootless:
            os.chown(path + "/up", self.guest_uid + info.st_uid % 65536, self.guest_gid + info.st_gid % 65536)

    def do_devices(self, target: str, _source: str, options: "dict[str, Any]") -> None:
        dev = self.inside(target)
        syscalls.mount(self.stage.path + "/dev", dev, None, _BIND | syscalls.MS_REC)
        # The instance's own terminals; its gid 5 (tty) does not exist inside, so the mode says it all.
        # SAFETY: the kernel has one number of terminals for all; without `max` one sandbox could take every one of them.
        # tests/security/test_limits.py::test_one_sandbox_cannot_take_all_terminals
        terminals = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
        syscalls.mount("devpts", dev + "/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, terminals)
        shm = f"mode=1777,{_sized(options['shm_mib'])}"
        syscalls.mount("shm", dev + "/shm", "tmpfs", _LOCKED | syscalls.MS_NOEXEC, shm)

    def make_proc(self) -> None:
        """A /proc of this pid namespace on the stage, with what must not be seen covered; `do_proc` moves it into place.

        hidepid keeps PID 1 out of sight of commands; the agent's supplementary group sees all, to end whole trees.
        """
        hide = "" if self.rootless else f"hidepid=invisible,gid={self.guest_gid}"
        proc, flags = self.stage.path + "/proc", _LOCKED | syscalls.MS_NOEXEC
        self.proc = proc
        syscalls.mount("proc", proc, "proc", flags, hide)
        for name in READ_ONLY:
            path = f"{proc}/{name}"
            if os.path.isdir(path):
                syscalls.mount(path, path, None, _BIND)
                syscalls.mount(None, path, None, _BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | flags)
        for name in MASKED:
            self.cover(f"{proc}/{name}")

    def do_proc(self, target: str, _source: str, _options: "dict[str, Any]") -> None:
        syscalls.mount(self.proc, self.inside(target), None, syscalls.MS_MOVE)
        self.proc = self.inside(target)

    def do_mask(self, target: str, _source: str, _options: "dict[str, Any]") -> None:
        self.cover(self.inside(target))

    def cover(self, path: str) -> None:
        """Hide a file or directory behind an empty one that nobody can open."""
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return
        cover = self.stage.masked_dir if stat.S_ISDIR(info.st_mode) else self.stage.masked_file
        syscalls.mount(cover, path, None, _BIND)

    def do_bind(self, target: str, source: str, options: "dict[str, Any]") -> None:
        self.prepare(target, source, options)
        # SAFETY: the source is opened once and that very tree is mounted, so that a name swapped for a symlink between
        # look and mount changes nothing. tests/security/test_files.py
        tree = self.tree(source, options)
        try:
            syscalls.move_mount(
                tree, "", syscalls.AT_FDCWD, self.inside(target), syscalls.MOVE_MOUNT_F_EMPTY_PATH
            )
        finally:
            os.close(tree)

    def tree(self, source: str, options: "dict[str, Any]") -> int:
        """A detached copy of a host path's mounts, as a bind step wants it."""
        fixed = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        attributes = fixed if options["writable"] else fixed | syscalls.MOUNT_ATTR_RDONLY
        user_fd = self.owner_fd if options.get("owner") else self.lower_fd
        return self.copy(source, user_fd, attributes, recursive=True)

    def do_seal(self, target: str, _source: str, _options: "dict[str, Any]") -> None:
        flags = _BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _LOCKED
        syscalls.mount(None, self.inside(target), None, flags)

    def do_pin(self, target: str, _source: str, _options: "dict[str, Any]") -> None:
        path = self.inside(target)
        syscalls.mount(path, path, None, _BIND)

    def map_of(self, target: str) -> int:
        """The skeleton is ours and has the user's directories in it; everything else is the host's."""
        return self.user_fd if target == "/" else self.lower_fd

    def lower(self, source: str, target: str, user_fd: int) -> None:
        attributes = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        self.idmap(source, target, user_fd, attributes)

    def idmap(self, source: str, target: str, user_fd: int, attributes: int) -> None:
        tree = self.copy(source, user_fd, attributes)
        try:
            syscalls.move_mount(tree, "", syscalls.AT_FDCWD, target, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)

    def copy(self, source: str, user_fd: int, attributes: int, *, recursive: bool = False) -> int:
        """A detached copy of `source`'s mount, with its owners shown as the sandbox's.

        Without a uid range there is one uid on both sides and nothing to map.
        """
        flags = syscalls.OPEN_TREE_CLONE | (syscalls.AT_RECURSIVE if recursive else 0)
        tree = syscalls.open_tree(syscalls.AT_FDCWD, source, flags | syscalls.AT_SYMLINK_NOFOLLOW)
        change = syscalls.AT_EMPTY_PATH | (syscalls.AT_RECURSIVE if recursive else 0)
        mapped = syscalls.MOUNT_ATTR_IDMAP if not self.rootless and user_fd >= 0 else 0
        try:
            syscalls.mount_setattr(
                tree, "", change, set_attributes=attributes | mapped, userns_fd=user_fd if mapped else 0
            )
        except OSError:
            os.close(tree)
            raise
        return tree

    def prepare(self, target: str, source: str, options: "dict[str, Any]") -> None:
        """Make the mount point, where the step says that it may be missing."""
        path = self.inside(target)
        if not options.get("make") or os.path.lexists(path):
            return
        directory = os.path.isdir(source)
        root = os.open(self.stage.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if not self.rootless:
            # What is made in the sandbox's root must be owned by the sandbox's own root; by descriptor, because that
            # root may not walk the path to the stage.
            syscalls.setfsgid(self.guest_gid)
            syscalls.setfsuid(self.guest_uid)
        try:
            for missing in _missing_parents(root, os.path.dirname(target)):
                os.mkdir(missing, 0o755, dir_fd=root)
            name = target.lstrip("/")
            if directory:
                os.mkdir(name, 0o755, dir_fd=root)
            else:
                os.close(
                    os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_EXCL, 0o644, dir_fd=root)
                )
        finally:
            if not self.rootless:
                syscalls.setfsuid(0)
                syscalls.setfsgid(0)
            os.close(root)


def pivot(root: str) -> None:
    """Make `root` the root of this mount namespace and let go of the old one."""
    os.chdir(root)
    # SAFETY: stacked on itself and detached, the old root is reachable by no path and no working directory.
    # tests/security/test_files.py::test_old_root_is_unreachable
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _missing_parents(root: int, path: str) -> "list[str]":
    """The directories on the way to `path` that are not there, outermost first, relative to the descriptor `root`."""
    missing = []
    relative = path.strip("/")
    while relative:
        try:
            os.stat(relative, dir_fd=root, follow_symlinks=False)
            break
        except FileNotFoundError:
            missing.append(relative)
        relative = os.path.dirname(relative)
    return missing[::-1]


def _empty(directory: str) -> None:
    """Remove what is in a directory that only the kernel wrote to: a few directories deep at most."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            _empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def _sized(mib: int) -> str:
    """The options that bound a tmpfs: bytes, and files, because an empty one takes memory too."""
    return f"size={mib}m,nr_inodes={mib * 256}"


def _stacked(paths: "list[str]") -> str:
    """The value of `lowerdir`, the topmost first."""
    return ":".join(map(_escape, paths))


def _escape(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
