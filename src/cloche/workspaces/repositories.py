"""The git repositories of a workspace: what of them a sandbox writes live, and what it only seems to.

Objects, refs, index, HEAD, logs are the host's own, so that a commit is on the host the moment it is made. `config` is
not: inside, `.git/config` is a mount whose root is a *symlink* into a private directory. Git resolves a symlink before it
makes its lock file, so it writes `config.lock` and renames in that directory, where renaming works; a plain file bind would
answer EBUSY. Afterwards `gitconfig.merge` takes over what may come out. design/0005-workspaces.md has what was rejected.

Two names more than the usual lists have: `commondir` (a file with that name in *any* git directory makes git take
configuration and hooks from where it points) and the legacy `remotes/` and `branches/`.

A sandbox can make new repositories: `git init`, a clone, a submodule, or a trap. No mount can prevent that, so the end of
a session looks at each git directory that was not there before and makes it harmless: its configuration goes through the
same allow-list, its hooks and redirections are renamed to `*.disabled`.
"""

from __future__ import annotations

import os
import stat

import msgspec

from cloche.workspaces import gitconfig, places, protection, walking

INSIDE = "/run/cloche/git"
"""Where private configurations appear in a sandbox; one directory each beneath."""

PROTECTED = ("hooks/", "config.worktree", "info/attributes", "remotes/", "branches/")
MAX_NESTED = 16
MAX_DIRECTORIES = 20_000  # before a session: about half a second
MAX_DIRECTORIES_AFTER = 500_000  # hostile code must not be able to hide behind many directories
_EXCLUDE_NOTE = "# names that stand in for protected files while a sandbox runs\n"


class Repository(msgspec.Struct, frozen=True, kw_only=True):
    """A git directory whose configuration is private inside."""

    anchor: str
    path: str
    """Relative to the anchor; empty where the anchor itself is the git directory."""
    private: str
    base: str
    """The text that the sandbox was given."""
    fresh: bool = False
    """There was no repository yet."""

    @property
    def full(self) -> str:
        return f"{self.anchor}/{self.path}" if self.path else self.anchor

    @property
    def config(self) -> str:
        return f"{self.path}/config" if self.path else "config"


class Worktree(msgspec.Struct, frozen=True, kw_only=True):
    """What a `.git` *file* in the workspace's root leads to."""

    common: str | None = None
    git_dir: str | None = None
    warning: str | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Git directories beneath a root, relative to it, and whether all of it was seen."""

    git_dirs: tuple[str, ...]
    complete: bool


def find(root: str, limit: int | None = None) -> Found:
    """Every directory that git would take for a repository, by its shape or because a `.git` leads to it."""
    walk = walking.Walk(root, limit or MAX_DIRECTORIES)
    found: dict[str, None] = {}
    for listing in walk:
        if walking.is_git_dir(listing):
            found[listing.path] = None
        elif ".git" in listing.files:
            found.update(dict.fromkeys(_led_to(root, listing.path)))
    return Found(git_dirs=tuple(path for path in found if _speakable(path)), complete=walk.complete)


def _led_to(root: str, path: str) -> list[str]:
    """Where a `.git` that is a file or a symlink leads, if that is a directory in here."""
    place = os.path.normpath(f"{root}/{path}")
    text = walking.read_text(place, ".git")
    named = f"{place}/.git" if text is None else os.path.join(place, text.removeprefix("gitdir:").strip())
    real = os.path.realpath(named) if "\0" not in named else ""
    return [real[len(root) + 1 :]] if places.beneath(real, root) and os.path.isdir(real) else []


def _speakable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def worktree_of(root: str) -> Worktree:
    """Follow a `.git` file. Its repository is shown only if that one names this worktree too: the file alone may be a trap."""
    text = walking.read_text(root, ".git") or ""
    if not text.startswith("gitdir:"):
        return Worktree(warning=".git is a file, but no link to a repository; git will not work inside")
    git_dir = os.path.realpath(os.path.join(root, text[7:].strip()))
    common = os.path.realpath(os.path.join(git_dir, (walking.read_text(git_dir, "commondir") or ".").strip()))
    back = (walking.read_text(git_dir, "gitdir") or "").strip()
    names_us = bool(back) and os.path.realpath(os.path.join(git_dir, back)) == f"{root}/.git"
    if os.path.dirname(git_dir) != f"{common}/worktrees" or not names_us:
        return Worktree(
            git_dir=git_dir if places.beneath(git_dir, root) else None,
            warning=f".git leads to {git_dir}, which is no worktree of this directory; it is not shown, and git will not work inside",
        )
    if os.path.basename(common) != ".git" and not _is_repository(common):
        return Worktree(warning=f".git leads to {git_dir}, which belongs to no repository")
    return Worktree(common=common, git_dir=git_dir)


def _is_repository(path: str) -> bool:
    return all(os.path.lexists(f"{path}/{name}") for name in ("HEAD", "objects", "refs"))


def cover(found: protection.Cover, git_dir: str, link: str) -> bool:
    """Cover a git directory (relative to the anchor); whether its configuration is private now."""
    prefix = git_dir + "/" if git_dir else ""
    common = (walking.read_text(found.anchor, prefix + "commondir") or "").strip()
    found.add(prefix + "commondir", content=b".\n")
    if common not in ("", "."):  # a worktree's own directory: configuration and hooks are its repository's
        found.add(prefix + "gitdir", present_only=True)
        found.add(prefix + "config.worktree")
        return False
    for name in PROTECTED:
        found.add(prefix + name)
    return found.add(prefix + "config", source=link) is not None


def seclude(anchor: str, git_dir: str, state: str, number: int) -> tuple[Repository, list[str]]:
    """Make the private copy of a configuration, and the link that leads to it inside; with what was left out of it."""
    private = f"{state}/git/{number}"
    text = walking.read_text(anchor, f"{git_dir}/config" if git_dir else "config")
    try:
        base, hidden = gitconfig.without_credentials(text or "")
    except gitconfig.ConfigInvalid:
        base, hidden = "", ["everything, for it cannot be read"]
    data = base.encode("utf-8", "surrogateescape")
    os.makedirs(private, mode=0o700)
    with open(f"{private}/config", "wb") as file:
        file.write(data)
    os.makedirs(f"{state}/links", mode=0o700, exist_ok=True)
    os.symlink(f"{INSIDE}/{number}/config", link_path(state, number))
    for path in (private, f"{private}/config"):
        walking.own_like(path, os.stat(anchor))
    fresh = not os.path.lexists(f"{anchor}/{git_dir}/HEAD" if git_dir else f"{anchor}/HEAD")
    shown = data.decode("utf-8", "replace")
    return Repository(anchor=anchor, path=git_dir, private=private, base=shown, fresh=fresh), hidden


def global_settings(state: str, root: str, text: str) -> tuple[str, str]:
    """Git's global configuration inside, in a directory of its own so that `git config --global` can replace it."""
    private = f"{state}/git/global"
    os.makedirs(private, mode=0o700)
    with open(f"{private}/config", "w", encoding="utf-8") as file:
        file.write(text)
    for path in (private, f"{private}/config"):
        walking.own_like(path, os.stat(root))
    return private, f"{INSIDE}/global"


def link_path(state: str, number: int) -> str:
    return f"{state}/links/{number}"


def exclude(state: str, root: str, git_dir: str, hidden: set[str]) -> str:
    """A copy of `info/exclude` that also names the stubs: else `git add -A` inside would commit them."""
    path = f"{state}/exclude"
    text = walking.read_text(git_dir, "info/exclude") or ""
    lines = "".join(f"/{name}\n" for name in sorted(hidden) if not name.startswith(".git/"))
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text + ("" if not text or text.endswith("\n") else "\n") + _EXCLUDE_NOTE + lines)
    os.chmod(path, 0o644)
    walking.own_like(path, os.stat(root))
    return path


# ── afterwards ─────────────────────────────────────────────────────────────────────────────────────


class Outcome(msgspec.Struct):
    merged: list[str] = []
    dropped: list[str] = []
    warnings: list[str] = []


def take_over(repository: Repository, outcome: Outcome) -> None:
    """Merge what the sandbox wrote into its private configuration back into the host's."""
    label = f"{repository.path or '.'}/config"
    _compare_host(repository, label, outcome)
    if repository.fresh and not os.path.lexists(f"{repository.full}/HEAD"):
        return
    try:
        now = walking.read(repository.private, "config").decode("utf-8", "replace")
    except OSError as problem:
        outcome.dropped.append(f"{label}: everything ({problem.strerror or problem})")
        return
    if now == repository.base:
        return
    try:
        merged = _write_merged(repository, now)
    except FileExistsError:
        outcome.warnings.append(f"{label} is locked by another git; nothing was merged into it")
        return
    except (OSError, gitconfig.ConfigInvalid) as problem:
        outcome.warnings.append(f"{label}: nothing was merged into it ({problem})")
        return
    outcome.merged += [f"{label}: {line}" for line in merged.merged]
    outcome.dropped += [f"{label}: {line}" for line in merged.dropped]


def _compare_host(repository: Repository, label: str, outcome: Outcome) -> None:
    """Say what appeared in the host's own file. It was somebody on the host, or the sandbox after somebody on the host
    replaced the file: the kernel then detaches the mount that covered it."""
    try:
        data = walking.read(repository.anchor, repository.config).decode("utf-8", "replace")
        now, _hidden = gitconfig.without_credentials(data)
    except (OSError, gitconfig.ConfigInvalid) as problem:
        if not repository.fresh:
            outcome.warnings.append(f"{label} cannot be read any more: {problem}")
        return
    foreign = gitconfig.merge(repository.base, repository.base, now).dropped
    if foreign:
        outcome.warnings.append(
            f"{label} was changed on the host while the sandbox ran; if not by you, undo: {'; '.join(foreign)}"
        )


def _write_merged(repository: Repository, now: str) -> gitconfig.Merged:
    results: list[gitconfig.Merged] = []
    fresh = worktree_is_inside(repository.anchor, repository.path) if repository.fresh else None

    def change(host: bytes) -> bytes:
        text = host.decode("utf-8", "surrogateescape")
        results.append(gitconfig.merge(text, repository.base, now, fresh=fresh))
        return results[0].text.encode("utf-8", "surrogateescape")

    # The host's git takes the same lock, so what is read is what is replaced.
    walking.update(repository.anchor, repository.config, change, lock="config.lock")
    return results[0]


def worktree_is_inside(root: str, git_dir: str) -> gitconfig.Fresh:
    """Whether a `core.worktree` of that git directory lies in the workspace and not in a git directory."""

    def check(value: str) -> bool:
        named = os.path.join(root, git_dir, value)
        led_to = (os.path.normpath(named), os.path.realpath(named))
        return all(
            places.within(place, root) and ".git" not in place[len(root) :].split("/") for place in led_to
        )

    return check


def disarm(root: str, known: Found, outcome: Outcome) -> None:
    """Make the git directories that appeared during a session harmless to the host."""
    now = find(root, MAX_DIRECTORIES_AFTER)
    for path in sorted(set(now.git_dirs) - set(known.git_dirs)):
        if not known.complete:
            outcome.warnings.append(
                f"{path or '.'} is a git directory that may be new; look at its config and hooks before using git there"
            )
            continue
        _disarm_one(root, path, set(known.git_dirs), outcome)
    if not now.complete:
        outcome.warnings.append(
            f"the workspace has more than {MAX_DIRECTORIES_AFTER} directories; not all were searched for new repositories"
        )


def _disarm_one(root: str, path: str, known: set[str], outcome: Outcome) -> None:
    prefix = path + "/" if path else ""
    if not path:
        outcome.warnings.append("the workspace's root has become a bare repository (HEAD, objects, refs)")
    try:
        with walking.directory(root, path) as fd:
            _disable(fd, "config.worktree", prefix, outcome)
            if not _leads_home(root, path, known):
                _disable(fd, "commondir", prefix, outcome)
            _disarm_hooks(fd, prefix, outcome)
    except OSError as problem:
        outcome.warnings.append(f"{path or '.'} could not be examined: {problem}")
    _filter_config(root, prefix, outcome)


def _leads_home(root: str, path: str, known: set[str]) -> bool:
    """Whether a new worktree belongs to a repository that was there before."""
    text = walking.read_text(root, f"{path}/commondir")
    if text is None or "\0" in text or os.path.basename(os.path.dirname(path)) != "worktrees":
        return False
    # The real path: by name alone, "link/.." would come to another place than git comes to.
    target = os.path.realpath(os.path.join(root, path, text.strip()))
    return target in {f"{root}/{one}" if one else root for one in known}


def _disable(dir_fd: int, name: str, prefix: str, outcome: Outcome) -> None:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    os.rename(name, name + ".disabled", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    outcome.warnings.append(f"{prefix}{name} came from the sandbox and is now {name}.disabled")


def _disarm_hooks(dir_fd: int, prefix: str, outcome: Outcome) -> None:
    try:
        info = os.stat("hooks", dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        _disable(dir_fd, "hooks", prefix, outcome)
        return
    with walking.directory(dir_fd, "hooks") as hooks:
        for name in sorted(os.listdir(hooks)):
            if not name.endswith((".sample", ".disabled")):
                _disable(hooks, name, prefix + "hooks/", outcome)


def _filter_config(root: str, prefix: str, outcome: Outcome) -> None:
    """Keep of a new repository's configuration what the allow-list knows."""
    results: list[gitconfig.Merged] = []
    fresh = worktree_is_inside(root, prefix)

    def change(data: bytes) -> bytes:
        results.append(gitconfig.merge("", "", data.decode("utf-8", "replace"), fresh=fresh))
        return results[0].text.encode() if results[0].dropped else data

    label = prefix + "config"
    try:
        walking.update(root, label, change, lock="config.lock.cloche")
    except FileNotFoundError:
        return
    except OSError as problem:
        outcome.warnings.append(f"{label} could not be made safe: {problem}")
    outcome.dropped += [f"{label}: {line}" for merged in results for line in merged.dropped]
