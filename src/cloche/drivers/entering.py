"""What the launcher's processes do beyond making a sandbox: give it files that were kept, and enter it while it runs.

Runs in a sandbox's first process before anything hostile does (`mount_kept`), or in a short-lived helper that the launcher
forks. Standard library, `linux` and `guest` only, like the launcher itself.
"""

import os

from cloche.guest import wire
from cloche.linux import loops, mounts, namespaces, syscalls

RANGE = 65536

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cloche.linux import comparing


def mount_kept(kept: "dict[str, Any]", fds: "list[int]", builder: mounts.Builder) -> bool:
    """The disks that a snapshot or an archive left: some read-only below the sandbox's own, and perhaps one that becomes
    its own; whether there is such a one.

    A sandbox counts its uids from where its range begins, and what it wrote is owned by those. Another sandbox has
    another range: a disk is shown to it by a map, with the host's root (who owns an overlay's working directories)
    standing for itself. Nothing is changed on a disk, so this costs the same for any number of files.
    """
    for number, base in enumerate(kept["below"]):
        held, device = loops.attach(fds[number])
        map_fd = _map(base, builder)
        builder.mount_below(device, number, map_fd)
        _close(held, map_fd)
    if kept["pack"]:
        from cloche.linux import trees  # what launchers need not hold in memory

        builder.make_disk("", kept["mib"])
        root = os.open(builder.stage.path + "/disk", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        trees.unpack(fds[-1], root, 0 if builder.rootless else builder.guest_uid)
        os.close(root)
        builder.kept = True
        return True
    own = kept["disk"]
    if own is None:
        return False
    builder.image_fd = os.dup(fds[len(kept["below"])])
    held, device = loops.attach(builder.image_fd)
    builder.make_disk(device, own["mib"])
    map_fd = _map(own["base"], builder)
    builder.shift(builder.stage.path + "/disk", map_fd)
    _close(held, map_fd)
    builder.kept = True
    return True


def _map(base: int, builder: mounts.Builder) -> int:
    if base == builder.guest_uid:
        return -1
    maps = [(0, 0, 1), (base, builder.guest_uid, RANGE)]
    return namespaces.make_user(maps, maps, proc=builder.proc)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


# --- helpers ------------------------------------------------------------------------------------------------


class Inside:
    """A running sandbox, as the launcher knows it."""

    def __init__(self, pid: int, space: int, first_id: int, rootless: bool, stage: str) -> None:
        self.pid = pid
        self.space = space  # its mount namespace
        self.first_id = first_id
        self.rootless = rootless
        self.stage = stage


def help(message: "dict[str, Any]", fds: "list[int]", inside: "Inside | None" = None) -> None:
    """Do one thing in a process of its own, which may take its time; the answer goes to the first descriptor, and its end
    says that there is none to come."""
    if os.fork():
        if inside is not None:
            os.close(inside.space)
        return
    try:
        answer = (
            _attach(message, fds[1:], inside)
            if message["act"] == "attach"
            else _ACTS[message["act"]](message, fds[1:])
        )
    except OSError as problem:
        answer = {"errno": problem.errno, "reason": problem.strerror or str(problem)}
    except BaseException as problem:
        answer = {"errno": 0, "reason": f"{type(problem).__name__}: {problem}"}
    try:
        os.write(fds[0], wire.encode(answer))
    finally:
        os._exit(0)


def _pack(message: "dict[str, Any]", fds: "list[int]") -> "dict[str, Any]":
    """Here, because what a sandbox made may be closed to the engine's own user."""
    from cloche.linux import trees

    disk, writing = fds
    done = trees.pack(disk, writing, message["first_id"], tuple(message["wanted"]))
    return {"files": done.files, "size": done.size}


def _diff(message: "dict[str, Any]", fds: "list[int]") -> "dict[str, Any]":
    """Compare two kept states, in a mount namespace of this helper's own."""
    from cloche.linux import comparing  # what launchers need not hold in memory

    syscalls.unshare(syscalls.CLONE_NEWNS)
    place = 0
    states = []
    for side in ("left", "right"):
        bases = message[side]
        count = len(bases) or 1
        opened, fds = fds[:count], fds[count:]
        if bases:
            opened = [_mount_kept(fd, f"{message['stage']}/kept/{place + n}") for n, fd in enumerate(opened)]
            place += count
        states.append({name: _state(opened, name, bases) for name in message["layers"]})
    changes: list[dict[str, Any]] = []
    for name, (prefix, base) in message["layers"].items():
        for change in comparing.differences(states[0][name], states[1][name], prefix, base):
            changes.append(change)
            if len(changes) >= comparing.MOST:
                return {"changes": changes, "more": True}
    return {"changes": changes, "more": False}


def _mount_kept(image: int, place: str) -> int:
    os.makedirs(place, exist_ok=True)
    held, device = loops.attach(image)
    syscalls.mount(
        device, place, "ext4", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY, "noinit_itable"
    )
    os.close(held)
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _state(opened: "list[int]", name: str, bases: "list[int]") -> "comparing.Node":
    from cloche.linux import comparing

    if not bases:
        return comparing.lay(comparing.root(), comparing.of_pack(opened[0], name))
    state = comparing.root()
    for fd, base in zip(opened, bases, strict=True):
        try:
            top = os.open(f"{name}/up", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        except FileNotFoundError:
            continue
        state = comparing.lay(state, comparing.of_directory(top, base))
    return state


def _measure(_message: "dict[str, Any]", fds: "list[int]") -> "dict[str, Any]":
    from cloche.linux import trees

    seen = set()
    size = 0
    for entry, _ in trees.walk(fds[0]):
        if entry["kind"] == "f" and entry["ino"] not in seen:
            seen.add(entry["ino"])
            size += entry["size"]
    return {"size": size}


def _attach(message: "dict[str, Any]", fds: "list[int]", inside: "Inside | None") -> "dict[str, Any]":
    """Mount a volume into a sandbox that runs already."""
    if inside is None:
        raise ProcessLookupError(3, "the sandbox has ended")
    users = -1 if inside.rootless else os.open(f"/proc/{inside.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    source = message["source"]
    if message["image"]:
        source = inside.stage + "/disk"
        held, device = loops.attach(fds[0])
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (syscalls.MS_RDONLY if message["read_only"] else 0)
        # SAFETY: only the kernel ever wrote to it; nobody inside has the blocks. tests/engine/test_volumes.py
        syscalls.mount(device, source, "ext4", flags, "" if message["read_only"] else "discard")
        os.close(held)
        if not message["read_only"] and os.path.isdir(source + "/lost+found"):
            os.rmdir(source + "/lost+found")
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
    attributes |= syscalls.MOUNT_ATTR_RDONLY if message["read_only"] else 0
    attributes |= syscalls.MOUNT_ATTR_IDMAP if users >= 0 and message["image"] else 0
    tree = syscalls.open_tree(
        syscalls.AT_FDCWD, source, syscalls.OPEN_TREE_CLONE | syscalls.AT_SYMLINK_NOFOLLOW
    )
    syscalls.mount_setattr(
        tree, "", syscalls.AT_EMPTY_PATH, set_attributes=attributes, userns_fd=max(users, 0)
    )
    syscalls.setns(inside.space, syscalls.CLONE_NEWNS)
    target = _make_way(message["target"], inside)
    syscalls.move_mount(
        tree, "", target, "", syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
    )
    return {}


def _make_way(path: str, inside: Inside) -> int:
    """A directory in the sandbox, made where it is missing, one name after the other and no link followed.

    What runs there may swap names meanwhile. SAFETY: each step is taken from the directory before it, so whatever it does
    leads to a place of its own. tests/engine/test_volumes.py::test_a_target_behind_a_link_is_refused
    """
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.strip("/").split("/"):
        try:
            there = _enter(here, name)
        except FileNotFoundError:
            _make_directory(here, name, inside)
            there = _enter(here, name)
        os.close(here)
        here = there
    return here


def _make_directory(here: int, name: str, inside: Inside) -> None:
    """As whoever owns the directory that it is made in, if that is one of the sandbox's; by the rights of that one alone."""
    if inside.rootless:
        os.mkdir(name, 0o755, dir_fd=here)
        return
    info = os.fstat(here)
    ids = range(inside.first_id, inside.first_id + RANGE)
    syscalls.setfsgid(info.st_gid if info.st_gid in ids else inside.first_id)
    syscalls.setfsuid(info.st_uid if info.st_uid in ids else inside.first_id)
    try:
        os.mkdir(name, 0o755, dir_fd=here)
    finally:
        syscalls.setfsuid(0)
        syscalls.setfsgid(0)


def _enter(here: int, name: str) -> int:
    strict = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_BENEATH
    return syscalls.openat2(here, name, os.O_PATH | os.O_DIRECTORY, resolve=strict)


_ACTS = {"pack": _pack, "diff": _diff, "measure": _measure}
