"""Volumes on this host's disk: a file system of exact size where loop devices are to be had, else a directory.

    DIR/disk.ext4    (root) with a journal: it must survive what its sandboxes do not
    DIR/data         (an ordinary user)

Ids in it are those inside: the user's files belong to 1000. A sandbox is shown them through its own map.

*Several readers or one writer* is held by the kernel: the file is locked (flock) when it is opened, and the loop device keeps
that very opening for as long as the mount lives, in whatever engine or process. Nobody needs to remember to unlock.
"""

from __future__ import annotations

import fcntl
import os
import struct

from cloche import errors, model
from cloche.drivers import keeping

IMAGE, DATA, LOCK = "disk.ext4", "data", "lock"
USER = 1000
_SUPERBLOCK, _INCOMPAT, _RECOVER = 1024, 96, 4


def make(directory: str, size_mib: int, *, loop: bool) -> model.Limit:
    """Make an empty volume in an empty directory."""
    with keeping.told(directory):
        if not loop:
            os.mkdir(f"{directory}/{DATA}", 0o755)
            os.close(
                os.open(f"{directory}/{LOCK}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            )
        else:
            _format(f"{directory}/{IMAGE}", size_mib)
    return limit(size_mib, loop=loop)


def limit(size_mib: int, *, loop: bool) -> model.Limit:
    if loop:
        return model.Limit(value=size_mib, enforcement="enforced", by="loop file system")
    return model.Limit(
        value=size_mib, enforcement="none", by="a directory: an ordinary user has no disk of exact size"
    )


def _format(path: str, size_mib: int) -> None:
    import shutil
    import subprocess

    mkfs = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin") or "mkfs.ext4"
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(size_mib << 20)
    options = f"lazy_itable_init=1,nodiscard,root_owner={USER}:{USER}"
    command = [mkfs, "-q", "-F", "-b", "4096", "-m", "0", "-O", "^resize_inode", "-E", options, path]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise errors.error(
            "limit_invalid",
            f"a volume of {size_mib} MiB cannot be made: {done.stderr.strip()[-200:]}",
            hint="choose another size_mib",
            field="size_mib",
        )


class Held:
    """An open volume that is locked for a reader or for the writer."""

    def __init__(self, fd: int, path: str, *, image: bool) -> None:
        self.fd = fd
        self.path = path
        self.image = image

    def settle(self, *, read_only: bool) -> None:
        """After mounting: a reader that had to be alone for a moment no longer has."""
        if read_only:
            fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self.fd)


def hold(directory: str, *, read_only: bool) -> Held:
    """Open and lock a volume; `volume_in_use` where others have it."""
    image = os.path.exists(f"{directory}/{IMAGE}")
    name = IMAGE if image else LOCK
    try:
        fd = os.open(f"{directory}/{name}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise errors.error(
            "state_corrupt",
            f"the volume in {directory} cannot be opened: {problem.strerror}",
            hint="delete it",
        ) from None
    try:
        # After a power cut the journal is replayed by the first mount, and that one must be alone.
        alone = not read_only or (image and _needs_recovery(fd))
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise errors.error(
            "volume_in_use",
            f"the volume {os.path.basename(directory)!r} is in use"
            + (" by a writer" if read_only else " and can be written by one sandbox only"),
            hint="attach it read-only everywhere, or delete the sandbox that has it",
        ) from None
    path = f"{directory}/{IMAGE if image else DATA}"
    return Held(fd, path, image=image)


def _needs_recovery(fd: int) -> bool:
    found = struct.unpack("<I", os.pread(fd, 4, _SUPERBLOCK + _INCOMPAT))[0]
    return bool(found & _RECOVER)


def used(directory: str) -> int | None:
    """Bytes that the volume takes; None where it must be walked to know."""
    try:
        return os.stat(f"{directory}/{IMAGE}").st_blocks * 512
    except FileNotFoundError:
        return None


def remove(directory: str) -> None:
    """Remove a volume that nobody has."""
    from cloche.drivers import supervising

    if os.path.isdir(f"{directory}/{DATA}"):
        supervising.remove(f"{directory}/{DATA}")
    for name in (IMAGE, LOCK):
        try:
            os.unlink(f"{directory}/{name}")
        except FileNotFoundError:
            continue
