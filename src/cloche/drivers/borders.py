"""Foreign failures become ours here: an errno from inside a sandbox is the error of the path it was about."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cloche import errors

_CODES = {
    errno.ENOENT: ("file_not_found", "there is no {path} inside"),
    errno.EEXIST: ("file_exists", "{path} exists already"),
    errno.ENOTDIR: ("not_directory", "{path}, or a part of it, is not a directory"),
    errno.EISDIR: ("is_directory", "{path} is a directory"),
    errno.ENOTEMPTY: ("directory_not_empty", "{path} is not empty"),
    errno.ELOOP: ("path_loop", "{path} is a loop of symbolic links, or leads through a magic link"),
    errno.EXDEV: ("path_invalid", "{path} leads out of the sandbox"),
    errno.EACCES: ("permission_denied", "the sandbox's user may not do this to {path}"),
    errno.EPERM: ("permission_denied", "the sandbox's user may not do this to {path}"),
    errno.EROFS: ("permission_denied", "{path} is read-only in this sandbox"),
    errno.ENOSPC: ("sandbox_disk_full", "the sandbox's disk is full; {path} was not written"),
    errno.EDQUOT: ("sandbox_disk_full", "the sandbox's disk is full; {path} was not written"),
    errno.ENXIO: ("not_regular_file", "{path} is a FIFO or device, not a regular file"),
    errno.ENODEV: ("not_regular_file", "{path} is a FIFO or device, not a regular file"),
    errno.ENAMETOOLONG: ("path_invalid", "{path} is too long"),
    errno.EINVAL: ("path_invalid", "{path} is not a valid path for this"),
}
_HINTS = {
    "directory_not_empty": "remove it with recursive=True",
    "sandbox_disk_full": "remove files, or create the sandbox with a larger disk_mib",
    "file_not_found": "list the directory to see what is there",
}


@contextmanager
def paths(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        code, text = _CODES.get(
            problem.errno or 0, ("sandbox_create_failed", "{path}: " + str(problem.strerror))
        )
        raise errors.error(code, text.format(path=path), hint=_HINTS.get(code), path=path) from None
