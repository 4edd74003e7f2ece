"""A machine's files, kept in a directory of ours: what snapshots, forks and archives are made of.

    DIR/0.ext4, 1.ext4, …   disk images, as sparse as they were, each lying above the one before (root, loop devices)
    DIR/files.pack          the trees in one file (`linux.trees`), where the disk is memory
    DIR/kept.json           whose uids are in them, what lies above what; written last, so that a directory without it
                            holds nothing

**Saving** copies the machine's own disk and *links* the images that already lay below it: images are never written again,
so any number of directories share one. The machine stands still meanwhile, so flushing its file system once makes the
image whole. It is not frozen (FIFREEZE) for that: a frozen file system whose engine dies is never let go of by the kernel.

**Starting** mounts the images read-only below a fresh disk, which takes the same time whatever is in them. An image of a
few MiB is copied and becomes the machine's own disk instead, so that who saves after every step does not pile up layers.

An image is safe to mount again because only the kernel ever wrote to it; a sandbox has files, never blocks.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from cloche import errors
from cloche.linux import extents, mounts, syscalls

_FORMAT = 1
_SMALL = 8 << 20  # an image up to this size is copied rather than stacked upon
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
PACK, NOTE = "files.pack", "kept.json"


class Image(NamedTuple):
    """One disk of a stack."""

    base: int
    """The first uid of the range that wrote it."""
    mib: int
    empty: int
    """Inodes that were in use before anybody wrote to it."""
    files: int = 0
    size: int = 0


class Kept(NamedTuple):
    """What a directory of kept files says about itself."""

    layers: tuple[str, ...]
    """What the writable layers lay above, in their order."""
    sources: tuple[str, ...] = ()
    """Where that is on the host."""
    images: tuple[Image, ...] = ()
    """The lowest first; none in a pack."""
    files: int = 0
    size: int = 0


class Below(NamedTuple):
    """An image that lies below a running machine's disk, and a descriptor that keeps it."""

    image: Image
    fd: int


class Start(NamedTuple):
    """What a machine starts from: images to lie below its disk, and what becomes its disk or is unpacked onto it. The
    descriptors are the maker's to close."""

    kept: Kept
    below: tuple[Below, ...]
    own: Below | None = None
    pack: int = -1
    mib: int = 0

    @property
    def fds(self) -> list[int]:
        more = [self.own.fd] if self.own is not None else []
        return [*(b.fd for b in self.below), *more, *([self.pack] if self.pack >= 0 else [])]

    def message(self) -> dict[str, Any]:
        disk = None if self.own is None else {"base": self.own.image.base, "mib": self.own.image.mib}
        return {
            "below": [b.image.base for b in self.below],
            "disk": disk,
            "pack": self.pack >= 0,
            "mib": self.mib,
        }

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def layers_of(steps: Sequence[mounts.Step]) -> tuple[str, ...]:
    """What the writable layers of a plan lie above: the n-th of them is `uN` on the disk."""
    return tuple(step[1] for step in steps if step[0] == "overlay" and not step[3].get("owner"))


def sources_of(steps: Sequence[mounts.Step]) -> tuple[str, ...]:
    return tuple(step[2] for step in steps if step[0] == "overlay" and not step[3].get("owner"))


def check_layers(kept: Kept, steps: Sequence[mounts.Step]) -> None:
    """A layer above something else than what it was written above would show files that never were."""
    wanted = layers_of(steps)
    if wanted != kept.layers:
        raise errors.error(
            "argument_invalid",
            "these files were kept above another root: "
            f"{', '.join(kept.layers) or 'a read-only one'}, and not {', '.join(wanted) or 'a read-only one'}",
            hint="use the same template, image and profile as the sandbox they come from",
        )


class Stack(NamedTuple):
    """What lies below a machine's own disk."""

    layers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    below: tuple[Below, ...] = ()


def save_images(disk: int, image: int, own: Image, stack: Stack, directory: str) -> Kept:
    """Keep the disk of a machine that stands still, and what lies below it."""
    with told(directory):
        syscalls.syncfs(disk)
        for number, lower in enumerate(stack.below):
            _link(lower.fd, f"{directory}/{number}.ext4")
        size = _copy(image, f"{directory}/{len(stack.below)}.ext4")
        files = max(0, used_inodes(disk) - own.empty)
        images = (*(b.image for b in stack.below), own._replace(files=files, size=size))
        kept = Kept(
            stack.layers, stack.sources, images, sum(i.files for i in images), sum(i.size for i in images)
        )
        write_note(directory, kept)
    return kept


def layer_names(layers: tuple[str, ...]) -> list[str]:
    """What the layers and the private places of a sandbox are called on its disk."""
    private = ["p" + path.replace("/", "_") for path in mounts.PRIVATE]
    return [*(f"u{number}" for number in range(len(layers))), *private]


def to_compare(left: Kept, right: Kept) -> dict[str, tuple[str, str]]:
    """The layers of two states by name: where each begins inside, and what it lies above on the host."""
    if left.layers != right.layers or bool(left.images) != bool(right.images):
        raise errors.error(
            "argument_invalid",
            "the two lie above different roots, so there is no difference to tell",
            hint="compare snapshots of sandboxes with the same template, image and profile",
        )
    roots = [*zip(left.layers, left.sources, strict=True), *((path, "") for path in mounts.PRIVATE)]
    return dict(zip(layer_names(left.layers), roots, strict=True))


def open_all(directory: str, kept: Kept) -> list[int]:
    names = [f"{number}.ext4" for number in range(len(kept.images))] or [PACK]
    with told(directory):
        return [os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def open_pack(directory: str) -> int:
    with told(directory):
        return os.open(f"{directory}/{PACK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def check_answer(answer: dict[str, Any], directory: str) -> None:
    """What a helper could not do, as an error of ours."""
    if "errno" in answer:
        with told(directory):
            raise OSError(answer["errno"], answer["reason"])


def _link(image: int, path: str) -> None:
    """A further name for an image; a copy where its last name is gone."""
    own = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(
            str(image), path, src_dir_fd=own, follow_symlinks=True
        )  # by a directory, or it would not follow
    except FileNotFoundError:
        _copy(image, path)
    finally:
        os.close(own)


def _copy(image: int, path: str) -> int:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        extents.copy(image, target)
        # Whoever attaches it to a loop device waits until it is on the disk: have that begun, and wait for nothing.
        syscalls.raw("sync_file_range", target, 0, 0, _START_WRITING)
        return os.fstat(target).st_blocks * 512
    finally:
        os.close(target)


def write_note(directory: str, kept: Kept) -> None:
    with open(f"{directory}/{NOTE}", "x") as file:
        os.fchmod(file.fileno(), 0o600)
        said = {**kept._asdict(), "images": [image._asdict() for image in kept.images]}
        json.dump({"format": _FORMAT, **said}, file)


def load(directory: str) -> Kept:
    try:
        with open(f"{directory}/{NOTE}") as file:
            said = json.load(file)
        if said.pop("format") != _FORMAT:
            raise ValueError("another format")
        images = tuple(Image(**image) for image in said.pop("images"))
        layers, sources = tuple(said.pop("layers")), tuple(said.pop("sources"))
        return Kept(layers, sources, images, **said)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise errors.error(
            "state_corrupt",
            f"the files kept in {directory} cannot be used: {problem}",
            hint="delete what they belong to",
        ) from None


def begin(directory: str, mib: int, scratch: str) -> Start:
    """Open what a machine with a disk of `mib` starts from; an image that becomes its own is copied to `scratch`."""
    kept = load(directory)
    opened: list[Below] = []
    with told(directory):
        try:
            if not kept.images:
                pack = os.open(f"{directory}/{PACK}", os.O_RDONLY | os.O_CLOEXEC)
                return Start(kept, (), pack=pack, mib=mib)
            for number, image in enumerate(kept.images):
                fd = os.open(f"{directory}/{number}.ext4", os.O_RDONLY | os.O_CLOEXEC)
                opened.append(Below(image, fd))
            top = opened[-1]
            if (top.image.size > _SMALL and len(opened) < mounts.KEPT) or top.image.mib != mib:
                return Start(kept, tuple(opened))
            own = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            opened.append(Below(top.image, own))
            extents.copy(top.fd, own)
            os.close(top.fd)
            return Start(kept, tuple(opened[:-2]), own=opened[-1])
        except BaseException:
            with suppress(OSError):
                for below in opened:
                    os.close(below.fd)
            raise


def used_inodes(disk: int) -> int:
    found = os.fstatvfs(disk)
    return found.f_files - found.f_ffree


class told:
    """A full disk, and whatever else the file system says, as errors of ours."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, problem: BaseException | None, _trace: object) -> None:
        if not isinstance(problem, OSError):
            return
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.error(
                "disk_full",
                f"there is no space left for {self._directory}",
                hint="delete snapshots that nobody needs, or set CLOCHE_HOME to a directory on another disk",
            ) from None
        if problem.errno == errno.ENOENT:
            raise errors.error(
                "state_corrupt",
                f"what was kept in {self._directory} is gone",
                hint="delete what it belongs to",
            ) from None
        raise errors.error("internal_error", f"{self._directory}: {problem.strerror or problem}") from None
