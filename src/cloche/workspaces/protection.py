"""From names to mounts: which paths are covered, which ancestors pinned, which stubs needed.

`Cover.add(path)` walks from the workspace's root to a protected name and decides at each step, looking but not touching:

    not there      a stub for it and for each missing directory on the way
    a symlink      bound onto itself, so that the *name* cannot be unlinked or replaced (a mount may lie on a symlink), and
                   the walk goes on at its target if that lies in the workspace; outside there is nothing to write
    a file where a directory is expected    bound onto itself: else it could be replaced by that directory
    there          bound read-only onto itself

and pins every directory passed, because renaming a parent of a mount point is allowed unless it is one itself.

On a file system that folds case (`.GIT/hooks`), a mount covers the folded spellings too, as they are the same entry; a
stub likewise. Only names that the *host's programs* fold and the file system does not would slip through; none is known.
"""

from __future__ import annotations

import os
import stat

from cloche.workspaces import places, stubs

_MAX_LINKS = 40


class Cover:
    """Collects the mounts of one directory tree, the *anchor*."""

    def __init__(self, anchor: str, state: str) -> None:
        self.anchor = anchor
        self.foreign = stubs.of_others(state)
        self.protect: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.wants: dict[str, stubs.Want] = {}
        self.hidden: set[str] = set()
        """Names that are stubs, ours or adopted, relative to the anchor."""

    def add(
        self, relative: str, *, source: str | None = None, content: bytes = b"", present_only: bool = False
    ) -> str | None:
        """Cover a name (a trailing slash: a directory); the path covered in the end, if in here.

        With `source`, that is what shows there instead of the path itself.
        """
        rest = [part for part in relative.split("/") if part]
        current = self.anchor
        links = 0
        while rest:
            part = rest.pop(0)
            if part == "..":
                current = os.path.dirname(current)
                if not places.within(current, self.anchor):
                    return None
                continue
            path = f"{current}/{part}"
            kind = self._kind(path)
            if kind is None:
                return (
                    None if present_only else self._stubs(path, rest, relative.endswith("/"), source, content)
                )
            if stat.S_ISLNK(kind) and not (source and not rest):
                links += 1
                target = self._through(path)
                if target is None or links > _MAX_LINKS:
                    return None
                current = self.anchor if target[0] == "/" else current
                rest = [step for step in target.split("/") if step not in ("", ".")] + rest
                continue
            if rest and not stat.S_ISDIR(kind):
                return self._cover(path)
            current = path
        return self._cover(current, source)

    def _kind(self, path: str) -> int | None:
        """The type of what is there; None for nothing, and for what is only to be made."""
        if path in self.wants:
            return None
        try:
            return os.lstat(path).st_mode
        except FileNotFoundError:
            return None

    def _through(self, path: str) -> str | None:
        """Where a link leads: relative to its directory, or with a leading slash relative to the anchor."""
        self._cover(path)
        target = os.readlink(path)
        if not target.startswith("/"):
            return target
        if not places.within(target, self.anchor):
            target = os.path.realpath(target)
        return "/" + target[len(self.anchor) :] if places.beneath(target, self.anchor) else None

    def _stubs(self, path: str, rest: list[str], directory: bool, source: str | None, content: bytes) -> str:
        """`path` is missing, and so is all of `rest`."""
        for part in rest:
            self._want(path, directory=True)
            path = f"{path}/{part}"
        self._want(path, directory=directory, content=content)
        return self._cover(path, source)

    def _want(self, path: str, *, directory: bool, content: bytes = b"") -> None:
        relative = path[len(self.anchor) + 1 :]
        self.wants.setdefault(path, stubs.Want(self.anchor, relative, directory, content))
        self.hidden.add(relative + ("/" if directory else ""))

    def _cover(self, path: str, source: str | None = None) -> str:
        if source or path not in self.protect:
            self.protect[path] = source or path
        self._adopt(path)
        above = os.path.dirname(path)
        while places.beneath(above, self.anchor):
            self.pinned.add(above)
            self._adopt(above)
            above = os.path.dirname(above)
        return path

    def _adopt(self, path: str) -> None:
        """Another sandbox's stub is present to the eye and absent in truth."""
        if not self.foreign or path in self.wants:
            return
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return
        if (info.st_dev, info.st_ino) in self.foreign:
            self._want(path, directory=stat.S_ISDIR(info.st_mode))

    def mounts(self) -> tuple[list[str], list[tuple[str, str]]]:
        """(pinned, protect), shallow first. What lies in a directory that is read-only anyway needs no mount."""
        whole = {path for path, source in self.protect.items() if source == path and self._is_directory(path)}
        pinned = [path for path in self.pinned if not any(places.within(path, above) for above in whole)]
        protect = [
            (source, path)
            for path, source in self.protect.items()
            if not any(places.beneath(path, above) for above in whole)
        ]
        return sorted(pinned, key=_depth), sorted(protect, key=lambda pair: _depth(pair[1]))

    def _is_directory(self, path: str) -> bool:
        want = self.wants.get(path)
        return want.directory if want else stat.S_ISDIR(os.lstat(path).st_mode)


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path
