"""An unpacked image as drivers see it: the same shape that the host's own root has."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from cloche import errors, interfaces
from cloche.images import host

# What the user inside is called and where it lives is ours to say, whatever an image believes.
_OURS = ("HOME", "USER", "LOGNAME", "TMPDIR")


def of(image: interfaces.Image) -> host.HostImage:
    ours = host.environment()
    ours["SHELL"] = "/bin/bash" if os.path.lexists(f"{image.root}/bin/bash") else "/bin/sh"
    return host.HostImage(image.root, (), {**ours, **image.info.env, **{name: ours[name] for name in _OURS}})


def check(root: str, exposure: interfaces.Exposure | None) -> None:
    """Refuse a workspace whose path leads through a link of the image: a mount there would land elsewhere."""
    if exposure is None:
        return
    for target in _targets(exposure):
        # SAFETY: the root is never written again, so what is looked at here is what will be mounted on.
        # tests/images/test_sandboxes.py::test_a_workspace_behind_a_link_of_the_image_is_refused
        link = _first_link(root, target)
        if link is not None:
            raise errors.error(
                "workspace_refused", f"{target!r} cannot be shown: {link!r} is not a directory in the image",
                hint="use a workspace at another path, or another image",
            )  # fmt: skip


def _targets(exposure: interfaces.Exposure) -> Iterable[str]:
    yield from (bind.target for bind in exposure.binds)
    yield from (target for _, target in (*exposure.private, *exposure.protect))
    yield from (*exposure.pinned, *exposure.deny)
    if exposure.overlay:
        yield exposure.root


def _first_link(root: str, target: str) -> str | None:
    """The first part of a path, the last included, that is there and is no directory; nothing is followed."""
    path = ""
    for part in target.strip("/").split("/"):
        path += "/" + part
        try:
            if not stat.S_ISDIR(os.lstat(root + path).st_mode):
                return path
        except FileNotFoundError:
            return None
    return None
