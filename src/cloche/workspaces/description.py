"""What this room says to others: which mounts make a workspace, and what was found at the end.

`Prepared` is plain data, because the process that mounts is another one, and because a session that died is finished
by whoever reads the record of it. The order of mounting is the order of the fields, shallow targets first within each
of the last four:

    binds      a host path at a path inside, writable or not; missing mount points are made; those with `owner` (and all
               of the fields below) show the workspace owner's uid as the sandbox user's
    private    a directory of ours, writable, at a fresh path inside; missing mount points are made
    pinned     a directory bound onto itself, writable: its only use is that a mount point cannot be renamed
    protect    a path bound read-only over a target. Neither side is followed when it is a symlink: a mount may have a
               symlink as its root and may lie on one, and both are used here
    deny       covered by nothing-to-see, last of all

All targets are free of symlinks in every component but the last.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec


class Bind(NamedTuple):
    """A host path shown inside."""

    source: str
    target: str
    writable: bool = False
    owner: bool = False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A workspace that is ready to be mounted."""

    root: str
    state: str
    overlay: bool = False
    """The root is shown as the lower of an overlay; then there is nothing to protect, private or to pin."""
    binds: tuple[Bind, ...] = ()
    private: tuple[tuple[str, str], ...] = ()
    pinned: tuple[str, ...] = ()
    protect: tuple[tuple[str, str], ...] = ()
    deny: tuple[str, ...] = ()
    env: dict[str, str] = {}
    shown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cwd: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a session left behind, in words for the person who looks at it."""

    control_files_changed: tuple[str, ...] = ()
    config_merged: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()
    stubs_removed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between a workspace and the overlay above it."""

    kind: Literal["added", "modified", "removed", "moved"]
    path: str
    type: Literal["file", "directory", "symlink", "special"]
    mode: int = 0
    size: int = 0
    refused: str | None = None
    """Why `apply` will not take it over."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What `apply` did."""

    applied: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    config_merged: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()


def lost(prepared: Prepared, mountinfo: str) -> tuple[str, ...]:
    """The protections that a sandbox no longer has, by the text of its `/proc/PID/mountinfo`.

    The kernel detaches a mount when its mount point is unlinked or replaced in *another* mount namespace: an editor or
    a git on the host that renames over a protected file bares the name inside. Poll that file (it raises POLLPRI) and
    mount what is lost again.
    """
    points = {_unescape(line.split(" ")[4]) for line in mountinfo.splitlines() if line.count(" ") > 4}
    wanted = [target for _source, target in (*prepared.private, *prepared.protect)]
    return tuple(path for path in (*prepared.pinned, *wanted) if path not in points)


def _unescape(field: str) -> str:
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, plain)
    return field
