"""Which host directories may be a root: what is one, and is not this machine's own, somebody's home, or our state."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cloche import errors

# Refused with everything beneath.
_LIVE = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")
# Refused themselves; a root may lie below.
_COMMON = ("/", "/home", "/root", "/opt", "/srv", "/mnt", "/media", "/tmp", "/var", "/var/tmp", "/var/lib")
_SIGNS = ("usr", "bin", "sbin", "lib")


def root_directory(path: str, state: str, environment: Mapping[str, str]) -> str:
    """The real path of a directory that may be a root; everything else raises."""
    try:
        root = os.path.realpath(path, strict=True)
    except OSError as problem:
        raise errors.error(
            "image_not_found", f"there is no directory {path!r}: {problem.strerror}", hint="check the path"
        ) from None
    if not os.path.isdir(root):
        raise errors.error(
            "image_invalid", f"{path!r} is not a directory", hint="an archive is oci-archive:/file.tar"
        )
    reason = _refusal(root, os.path.realpath(state), environment)
    if reason:
        raise errors.error(
            "host_path_refused", f"{root!r} cannot be a sandbox's root: {reason}",
            hint="name a directory that holds a system of its own, as debootstrap makes it",
        )  # fmt: skip
    if not any(os.path.lexists(f"{root}/{name}") for name in _SIGNS):
        raise errors.error(
            "image_invalid", f"{root!r} is no root directory: it has none of {', '.join(_SIGNS)}",
            hint="name the directory whose `usr` or `bin` holds the programs",
        )  # fmt: skip
    return root


def _refusal(root: str, state: str, environment: Mapping[str, str]) -> str | None:
    if root in _COMMON or any(_within(root, path) for path in _LIVE):
        return "it belongs to this machine"
    home = environment.get("HOME", "")
    if home and _within(os.path.realpath(home), root):
        return "it is your home directory, or holds it"
    if _within(root, state) or _within(state, root):
        return "it is, or holds, the state directory of cloche"
    return None


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
