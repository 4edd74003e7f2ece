"""What a launcher is told: who it is, and which embryos to make. An engine is not needed for it.

An *embryo* is a sandbox that has its namespaces, cgroup, disk and root, and is nobody's yet; the driver keeps some. A
one-shot `cloche run` has its first one made while it still imports the engine (`begin`), which takes longer: the
driver finds launcher and embryo ready and takes them over.

Imports what the driver imports anyway, and nothing that needs asyncio or msgspec.
"""

import os

from cloche import errors
from cloche.drivers import slots, spawning
from cloche.guest import wire
from cloche.images import host
from cloche.linux import cgroups, loops, mounts, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from cloche import interfaces

MEMORY_MIB, DISK_MIB = (
    512,
    1024,
)  # of the first embryo, as `model.DEFAULT_RESOURCES`; another shape is made anew


class Embryo:
    """What the engine holds of one: the socket to its first process, and its cgroup."""

    __slots__ = ("group", "key", "link")

    def __init__(self, key: str, link: "socket.socket", group: "cgroups.Group | None") -> None:
        self.key = key
        self.link = link
        self.group = group


class Told(spawning.Launch):
    """A launcher that knows already who it is, and makes the first embryo."""

    def __init__(self, launch: spawning.Launch, taken: slots.Slots, groups: cgroups.Hierarchy) -> None:
        super().__init__(launch.end, launch.pid)
        self.rootless = not spawning.is_privileged()
        self.slots = taken
        self.groups = groups
        self.embryo: Embryo | None = None


def begin(launch: spawning.Launch, home: str) -> spawning.Launch:
    """Let a launcher begin with the one sandbox that is to come, if this state directory has been used before."""
    if not _is_ours(home):
        return launch
    told = Told(launch, slots.Slots(home), cgroups.detect())
    try:
        image = host.prepare(f"{home}/images")
        shape = make_shape(home, image, rootless=told.rootless)
        configure(launch.end, home, told.slots, rootless=told.rootless, blanks=0)
    except (OSError, errors.ClocheError):
        told.slots.close()
        return launch  # the driver will meet the same, and say it
    try:
        told.embryo = conceive(launch.end, told.groups, shape)
    except OSError:
        pass
    return told


def _is_ours(home: str) -> bool:
    """Whether it is a state directory that an engine has made and checked; one of somebody else is the engine's to refuse."""
    try:
        found = os.stat(home)
    except OSError:
        return False
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return private and os.path.isdir(f"{home}/stage") and os.path.isdir(f"{home}/images")


def configure(link: "wire.Socket", home: str, taken: slots.Slots, *, rootless: bool, blanks: int) -> None:
    """The first message to a launcher; it answers with `ready`."""
    if not rootless and not taken.taken:
        taken.take()
    stage = os.path.join(home, "stage")
    os.makedirs(stage, mode=0o700, exist_ok=True)
    config = {
        "rootless": rootless, "first_uid": slots.FIRST_UID, "slots": taken.taken or list(range(4096)),
        "blanks": blanks, "stage": stage,
    }  # fmt: skip
    wire.send(link, config)


def conceive(link: "wire.Socket", groups: cgroups.Hierarchy, shape: "dict[str, Any]") -> Embryo:
    """Have an embryo made; the launcher says `spawned`, or `refused`. OSError: it was not even told."""
    group = make_group(groups)
    here, there = wire.pair()
    key = os.urandom(8).hex()
    try:
        paths = group.paths if group is not None else []
        wire.send(link, {"op": "prepare", "id": key, "cgroups": paths, **shape}, [there.fileno()])
    except OSError:
        here.close()
        if group is not None:
            group.remove()
        raise
    finally:
        there.close()
    return Embryo(key, here, group)


def make_group(groups: cgroups.Hierarchy) -> "cgroups.Group | None":
    """A cgroup whose name carries the pid and start time of its engine: whoever finds one knows whether its owner lives."""
    if not groups.enforceable and not groups.kills:
        return None
    owner = f"{os.getpid()}-{processes.start_time(os.getpid())}"
    return groups.create(f"cloche-{owner}-{os.urandom(4).hex()}")


def make_shape(
    home: str,
    image: host.HostImage,
    *,
    rootless: bool,
    memory_mib: int = MEMORY_MIB,
    disk_mib: int = DISK_MIB,
    writable: bool = True,
) -> "dict[str, Any]":
    """What embryos are given ahead of need: a disk, and a root with nothing of the caller's in it."""
    return {
        "disk": find_disk(home, disk_mib, looped=has_loop_disks(rootless)),
        "steps": mounts.plan(make_view(image, memory_mib, writable)),
    }


def make_view(
    image: host.HostImage, memory_mib: int, writable: bool, shown: "interfaces.Exposure | None" = None
) -> mounts.View:
    shm_mib = max(1, min(memory_mib // 2, 1024))
    if shown is None:
        return mounts.View(skeleton=image.skeleton, layers=image.layers, writable=writable, shm_mib=shm_mib)
    return mounts.View(
        skeleton=image.skeleton, layers=image.layers, writable=writable, shm_mib=shm_mib,
        overlays=(shown.root,) if shown.overlay else (),
        binds=tuple(mounts.Bind(b.source, b.target, writable=b.writable, owner=b.owner) for b in shown.binds),
        private=shown.private, pinned=shown.pinned, protect=shown.protect, deny=shown.deny,
    )  # fmt: skip


def has_loop_disks(rootless: bool) -> bool:
    return not rootless and os.access("/dev/loop-control", os.W_OK)


def find_disk(home: str, mib: int, *, looped: bool) -> "dict[str, Any]":
    """The formatted image to copy, made if this size was never asked for before."""
    template = ""
    if looped:
        template = os.path.join(home, "images", f"disk-{mib}-1.ext4")
        if not os.path.exists(template):
            os.makedirs(os.path.dirname(template), mode=0o700, exist_ok=True)
            loops.format_image(template, mib, mounts.DISK)
    return {"mib": mib, "template": template}
