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


def help(message: "dict[str, Any]", fds: "list[int]") -> None:
    """Do one thing in a process of its own, which may take its time; the answer goes to the first descriptor, and its end
    says that there is none to come."""
    if os.fork():
        return
    try:
        answer = _ACTS[message["act"]](message, fds[1:])
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


_ACTS = {"pack": _pack, "diff": _diff}
