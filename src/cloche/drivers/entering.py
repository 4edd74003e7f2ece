"""What the launcher's processes do beyond making a sandbox: give it files that were kept, and enter it while it runs.

Runs in a sandbox's first process before anything hostile does (`mount_kept`), or in a short-lived helper that the launcher
forks. Standard library, `linux` and `guest` only, like the launcher itself.
"""

import os

from cloche.linux import loops, mounts, namespaces

RANGE = 65536

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
    return namespaces.make_user(maps, maps, close_nested=False, proc=builder.proc)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
