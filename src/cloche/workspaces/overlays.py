"""What a sandbox changed above a workspace shown as an overlay, and taking it over.

The upper directory of an overlay holds what is new, whole files of what changed, and marks:

    a character device 0:0, or an empty file with *.overlay.whiteout       the name was removed
    a directory with *.overlay.opaque = "y"                                nothing of the lower one shows through
    a directory with *.overlay.redirect                                    it was renamed (`redirect_dir=on`; refused here)

with `trusted.` for root and `user.` for others. The upper is the sandbox's work, so nothing in it is followed, and the
workspace is walked by descriptors from its root: a symlink that the sandbox made cannot redirect a write of ours
(CVE-2026-39861). `apply` decides about everything before it writes anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from cloche import errors, policy
from cloche.policy import paths as patterns
from cloche.workspaces import description, gitconfig, places, repositories, walking

Change = description.Change
_DRAFT = ".cloche-draft"
_PREFIXES = ("trusted.overlay.", "user.overlay.")


def diff(lower: str, upper: str, *, rules: policy.Merged | None = None) -> tuple[Change, ...]:
    """Every difference, parents before children, each with the reason if `apply` would refuse it."""
    with walking.directory(lower) as below, walking.directory(upper) as above:
        changes = sorted(_compare(below, above, ""), key=lambda change: change.path)
    root, files = os.path.realpath(lower), (rules or policy.Merged()).files
    made = (patterns.parse(entry, root) for entry in (*files.protected, *files.deny))
    covered = tuple(pattern for pattern in made if pattern is not None)
    return tuple(_judged(change, covered, root, upper) for change in changes)


def apply(
    lower: str,
    upper: str,
    paths: Iterable[str] | None = None,
    *,
    force: bool = False,
    rules: policy.Merged | None = None,
) -> description.Applied:
    """Take over the changes at and beneath `paths` (None: all). If one is refused nothing is done, unless `force`: then
    the refused ones are left out. Nothing makes a refused one pass."""
    chosen = [
        change for change in diff(lower, upper, rules=rules) if paths is None or _selected(change.path, paths)
    ]
    refused = [f"{change.path}: {change.refused}" for change in chosen if change.refused]
    if refused and not force:
        raise errors.error(
            "apply_refused", "these changes are not taken over: " + "; ".join(refused),
            hint="leave them out by naming the paths you want, or pass force to take over all the others", refused=refused,
        )  # fmt: skip
    outcome = repositories.Outcome()
    applied = []
    good = [change for change in chosen if not change.refused]
    # Removals first and deepest first: a file may have become a directory, or the reverse.
    for change in sorted(
        (c for c in good if c.kind == "removed"), key=lambda c: c.path.count("/"), reverse=True
    ):
        _remove(lower, change.path)
        applied.append(change.path)
    for change in (c for c in good if c.kind != "removed"):
        _write(lower, upper, change, outcome)
        applied.append(change.path)
    return description.Applied(
        applied=tuple(sorted(applied)), refused=tuple(refused), config_merged=tuple(outcome.merged),
        config_dropped=tuple(outcome.dropped),
    )  # fmt: skip


def _selected(path: str, paths: Iterable[str]) -> bool:
    return any(
        places.within(path, wanted.strip("/")) or places.within(wanted.strip("/"), path) for wanted in paths
    )


# ── looking ────────────────────────────────────────────────────────────────────────────────────────


def _compare(below: int | None, above: int, prefix: str) -> Iterator[Change]:
    """The changes of one directory; `below` is None where the lower one does not show through."""
    for name in sorted(os.listdir(above)):
        info = os.stat(name, dir_fd=above, follow_symlinks=False)
        old = _lstat(below, name)
        path = prefix + name
        if _is_whiteout(above, name, info):
            yield from _removed(below, name, path)
        elif stat.S_ISDIR(info.st_mode):
            yield from _compare_directory(below, above, name, path, old, info)
        elif old is not None and stat.S_ISDIR(old.st_mode):
            yield from _removed(below, name, path)
            yield _change("added", path, info)
        elif old is None:
            yield _change("added", path, info)
        elif not _same(below, above, name, old, info):
            yield _change("modified", path, info)


def _compare_directory(
    below: int | None, above: int, name: str, path: str, old: os.stat_result | None, info: os.stat_result
) -> Iterator[Change]:
    if _mark(above, name, "redirect"):
        yield _change("moved", path, info)
        return
    known = old is not None and stat.S_ISDIR(old.st_mode)
    if not known:
        if old is not None:
            yield _change("removed", path, old)
        yield _change("added", path, info)
    elif old is not None and stat.S_IMODE(old.st_mode) != stat.S_IMODE(info.st_mode):
        yield _change("modified", path, info)
    with walking.directory(above, name) as inner:
        if not known or below is None:
            yield from _compare(None, inner, path + "/")
            return
        with walking.directory(below, name) as lower:
            if _mark(above, name, "opaque") == b"y":
                for hidden in sorted(set(os.listdir(lower)) - set(os.listdir(inner))):
                    yield from _removed(lower, hidden, f"{path}/{hidden}")
            yield from _compare(lower, inner, path + "/")


def _removed(below: int | None, name: str, path: str) -> Iterator[Change]:
    """A lower entry and everything in it."""
    info = _lstat(below, name)
    if info is None or below is None:
        return
    yield _change("removed", path, info)
    if stat.S_ISDIR(info.st_mode):
        with walking.directory(below, name) as inner:
            for child in sorted(os.listdir(inner)):
                yield from _removed(inner, child, f"{path}/{child}")


def _change(kind: str, path: str, info: os.stat_result) -> Change:
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink"))
    name = next((name for test, name in kinds if test(info.st_mode)), "special")
    return Change(kind=kind, path=path, type=name, mode=stat.S_IMODE(info.st_mode), size=info.st_size)  # type: ignore[arg-type]


def _lstat(dir_fd: int | None, name: str) -> os.stat_result | None:
    if dir_fd is None:
        return None
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_whiteout(above: int, name: str, info: os.stat_result) -> bool:
    if stat.S_ISCHR(info.st_mode):
        return info.st_rdev == 0
    return stat.S_ISREG(info.st_mode) and info.st_size == 0 and _mark(above, name, "whiteout") is not None


def _mark(dir_fd: int, name: str, mark: str) -> bytes | None:
    for prefix in _PREFIXES:
        try:
            return os.getxattr(f"/proc/self/fd/{dir_fd}/{name}", prefix + mark, follow_symlinks=False)
        except OSError as problem:
            if problem.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EPERM):
                raise
    return None


def _same(below: int | None, above: int, name: str, old: os.stat_result, new: os.stat_result) -> bool:
    """Whether a copied-up entry is what it was: touching a file copies it without changing it."""
    if below is None or old.st_mode != new.st_mode:
        return False
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(name, dir_fd=below) == os.readlink(name, dir_fd=above)
    if not stat.S_ISREG(new.st_mode):
        return old.st_rdev == new.st_rdev
    if old.st_size != new.st_size:
        return False
    with (
        open(walking.open_regular(name, below), "rb") as one,
        open(walking.open_regular(name, above), "rb") as two,
    ):
        while chunk := one.read(1 << 20):
            if chunk != two.read(1 << 20):
                return False
        return not two.read(1)


# ── judging ────────────────────────────────────────────────────────────────────────────────────────


def _judged(change: Change, covered: tuple[patterns.Pattern, ...], root: str, upper: str) -> Change:
    reason = _refusal(change, covered, root, upper)
    if reason is None:
        return change
    return Change(
        kind=change.kind,
        path=change.path,
        type=change.type,
        mode=change.mode,
        size=change.size,
        refused=reason,
    )


def _refusal(change: Change, covered: tuple[patterns.Pattern, ...], root: str, upper: str) -> str | None:
    if change.kind == "moved":
        return "a directory renamed by redirection cannot be taken over"
    if change.type == "special" and change.kind != "removed":
        return "it is a device, a FIFO or a socket"
    if change.type == "file" and change.mode & (stat.S_ISUID | stat.S_ISGID) and change.kind != "removed":
        return "it has a set-user-id or set-group-id bit"
    if _is_control(change.path, covered, (upper, root)):
        return "it is a control file, which programs on the host obey"
    if change.type == "symlink" and change.kind != "removed" and _leads_out(root, upper, change.path):
        return "it is a symlink that leads out of the workspace"
    if (
        change.type == "file"
        and os.path.basename(change.path) == ".git"
        and _git_file_is_strange(root, upper, change.path)
    ):
        return "it is a .git file that leads out of the workspace"
    return None


_GIT_CONTROL = ("hooks", "commondir", "config.worktree", "remotes", "branches")


def _is_control(path: str, covered: tuple[patterns.Pattern, ...], trees: tuple[str, str]) -> bool:
    """Whether programs obey it: by the policy's lists, or as part of any git directory in here."""
    if patterns.covering(covered, path) is not None:
        return True
    parts = path.split("/")
    for index in range(len(parts)):
        above, rest = "/".join(parts[:index]), parts[index:]
        obeyed = rest[0] in _GIT_CONTROL or rest[:2] == ["info", "attributes"]
        if obeyed and (parts[max(index - 1, 0) : index] == [".git"] or _is_git_dir(above, trees)):
            return True
    return False


def _is_git_dir(path: str, trees: tuple[str, str]) -> bool:
    return any(os.path.lexists(f"{tree}/{path}/HEAD") for tree in trees)


def _leads_out(root: str, upper: str, path: str) -> bool:
    """Whether a link may lead out of the root, or into a git directory past all other checks.

    A ".." after a name is refused whatever it comes to: the name may be a link itself, and then it comes to something else.
    """
    target = os.readlink(f"{upper}/{path}")
    parts = [part for part in target.split("/") if part not in ("", ".")]
    after_name = parts[next((i for i, part in enumerate(parts) if part != ".."), len(parts)) :]
    named = os.path.join(root, os.path.dirname(path), target)
    places_led_to = (os.path.normpath(named), os.path.realpath(named))
    if ".." in after_name or not all(places.within(place, root) for place in places_led_to):
        return True
    return any(".git" in place[len(root) :].split("/") for place in places_led_to)


def _git_file_is_strange(root: str, upper: str, path: str) -> bool:
    """Whether a `.git` that is a file leads elsewhere than into the workspace."""
    text = walking.read_text(upper, path) or ""
    named = os.path.join(root, os.path.dirname(path), text.removeprefix("gitdir:").strip())
    return "\0" in named or not places.beneath(os.path.normpath(named), root)


# ── writing ────────────────────────────────────────────────────────────────────────────────────────


def _remove(lower: str, path: str) -> None:
    with walking.parent(lower, path) as (dir_fd, name):
        info = _lstat(dir_fd, name)
        if info is None:
            return
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=dir_fd)
            return
        try:
            os.rmdir(name, dir_fd=dir_fd)
        except OSError as problem:
            if problem.errno != errno.ENOTEMPTY:  # something refused, or made by the user since, stays
                raise


def _write(lower: str, upper: str, change: Change, outcome: repositories.Outcome) -> None:
    if os.path.basename(change.path) == "config" and _is_git_dir(
        os.path.dirname(change.path), (upper, lower)
    ):
        _write_config(lower, upper, change, outcome)
        return
    with walking.parent(upper, change.path) as (above, name), _making_parent(lower, change.path) as below:
        if change.type == "directory":
            _write_directory(below, name, change.mode)
        elif change.type == "symlink":
            os.symlink(os.readlink(name, dir_fd=above), _DRAFT, dir_fd=below)
            os.rename(_DRAFT, name, src_dir_fd=below, dst_dir_fd=below)
        else:
            with open(walking.open_regular(name, above), "rb") as source:
                _write_file(below, name, source, change.mode)


@contextmanager
def _making_parent(lower: str, path: str) -> Iterator[int]:
    """The directory that will hold `path`; made where a selection by path left its parents out."""
    parts = os.path.dirname(path).split("/") if "/" in path else []
    for count in range(1, len(parts) + 1):
        with walking.directory(lower, "/".join(parts[: count - 1])) as fd:
            try:
                os.mkdir(parts[count - 1], 0o755, dir_fd=fd)
            except FileExistsError:
                pass
    with walking.directory(lower, "/".join(parts)) as fd:
        yield fd


def _write_directory(below: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=below)
    except FileExistsError:
        pass
    with walking.directory(below, name) as fd:
        walking.own_like(fd, os.fstat(below))
        os.fchmod(fd, mode & 0o1777)


def _write_file(below: int, name: str, source: BinaryIO, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_DRAFT, flags, 0o600, dir_fd=below)
    try:
        with open(fd, "wb") as draft:
            shutil.copyfileobj(source, draft)
            draft.flush()
            walking.own_like(fd, os.fstat(below))
            os.fchmod(fd, mode & 0o777)
        os.rename(_DRAFT, name, src_dir_fd=below, dst_dir_fd=below)
    except BaseException:
        os.unlink(_DRAFT, dir_fd=below)
        raise


def _write_config(lower: str, upper: str, change: Change, outcome: repositories.Outcome) -> None:
    """A git configuration is merged by the allow-list, as at the end of an ordinary session."""
    now = walking.read(upper, change.path).decode("utf-8", "replace")
    added = change.kind == "added"
    fresh = (
        repositories.worktree_is_inside(os.path.realpath(lower), os.path.dirname(change.path))
        if added
        else None
    )
    results: list[gitconfig.Merged] = []

    def merge(host: bytes) -> bytes:
        base = host.decode("utf-8", "surrogateescape")
        results.append(gitconfig.merge(base, host.decode("utf-8", "replace"), now, fresh=fresh))
        return results[0].text.encode("utf-8", "surrogateescape")

    with _making_parent(lower, change.path) as below:
        if added:
            os.close(
                os.open(
                    "config", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=below
                )
            )
    walking.update(lower, change.path, merge, lock="config.lock")
    outcome.merged += [f"{change.path}: {line}" for line in results[0].merged]
    outcome.dropped += [f"{change.path}: {line}" for line in results[0].dropped]
