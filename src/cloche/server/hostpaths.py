"""Paths of the server's host, from callers who are not its owner: beneath the directories that the configuration names, and nowhere else.

A path is judged by where it leads, not by how it is spelled, and goes on as the place that it leads to. Whoever works in such a directory may move links about in it
while another request names one: so what was really opened is looked at again before anybody may use it (`Guarded`). A refusal has the same words for what
is elsewhere and for what is nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from cloche import errors, model

_TENANT = "{tenant}"
PATH = "/usr/bin:/bin"
"""The PATH of who may name a directory: no toolchain of the host's owner is shown to them."""


def directories(named: Sequence[str], tenant: str) -> tuple[str, ...]:
    """Those of a tenant hold its name; all others are for callers without one."""
    if not tenant:
        return tuple(one for one in named if _TENANT not in one)
    return tuple(one.replace(_TENANT, tenant) for one in named if _TENANT in one)


def place(path: str, allowed: Iterable[str]) -> str | None:
    """Where a path leads, if that is one of the directories or beneath one."""
    if not path.startswith("/") or "\0" in path:
        return None
    try:
        real = os.path.realpath(path, strict=True)
    except (OSError, ValueError):
        return None
    for directory in allowed:
        root = os.path.realpath(directory)
        if real == root or real.startswith(root.rstrip("/") + "/"):
            return real
    return None


def image(reference: str, allowed: Iterable[str]) -> str | None:
    """The image, by the place that it leads to."""
    scheme, _, rest = reference.partition(":")
    head, slash, last = rest.rpartition("/")
    name, colon, tag = last.partition(":") if scheme != "dir" else (last, "", "")
    real = place(f"{head}{slash}{name}", allowed)
    return None if real is None else f"{scheme}:{real}{colon}{tag}"


def refused(field: str, what: str, hint: str) -> errors.ClocheError:
    return errors.error(
        "host_path_refused",
        f"{what} of the server's host, which this caller may not name",
        hint=f"{hint}; the operator may name directories in server.host_paths",
        field=field,
    )


def opened_elsewhere(info: model.SandboxInfo, place: str) -> bool:
    return info.shown[:1] != (place,)
