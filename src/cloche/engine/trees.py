"""Directories of ours, removed whole; and what a file system's refusal means."""

from __future__ import annotations

import errno
import os

from cloche import errors


def remove(path: str) -> None:
    """Remove what drivers kept: a few files of ours, never a tree that a sandbox shaped. What is gone is gone."""
    import shutil  # every engine sweeps at its start, and few have anything to remove

    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        raise errors.error("internal_error", f"{path} could not be removed", hint="remove it by hand")


def told(problem: OSError, path: str) -> errors.ClocheError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return errors.error(
            "disk_full",
            f"there is no space left for {path}",
            hint="delete snapshots that nobody needs, or set CLOCHE_HOME to a directory on another disk",
        )
    return errors.error("internal_error", f"{path}: {problem.strerror or problem}")
