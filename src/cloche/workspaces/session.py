"""A workspace's beginning and end on the host.

    prepare    refuse, look, then: write down, make stubs and private copies, describe the mounts
    finish     merge, remove, disarm, report; after the sandbox's last process has ended
    sweep      what `finish` would have done for a session whose owner died, but nothing is merged

Everything that `finish` and `sweep` need lies in the sandbox's state directory (`session.json`, `stubs`), so either may run
in another process than `prepare`. Each step can be repeated: a crash in the middle of `finish` is finished by `sweep`.
The parent of the state directory must hold the states of all sandboxes and nothing that others write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import msgspec

from cloche import policy
from cloche.workspaces import (
    control,
    description,
    gitconfig,
    places,
    plan,
    protection,
    repositories,
    stubs,
    toolchains,
    walking,
)

_RECORD = "session.json"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a session must know."""

    root: str
    rules: policy.Merged
    secluded: tuple[repositories.Repository, ...] = ()
    known: repositories.Found
    before: dict[str, str]


def prepare(
    directory: str,
    *,
    rules: policy.Merged,
    home: str,
    state: str,
    environment: Mapping[str, str],
    overlay: bool = False,
) -> description.Prepared:
    """Make `directory` ready to be shown in a sandbox. Refusals come first and leave nothing behind."""
    root = places.resolve(directory, home=home, state=state, environment=environment)
    beside = plan.shown(rules, home=home, state=state, environment=environment)
    if overlay:
        mounts = _Mounts(beside)
        made = plan.Plan(root, rules, protection.Cover(root, state), None)
        # Writing goes to a layer above, so only what must not be read is covered; a stub would be in the workspace itself.
        mounts.deny = [path for path in made.make().denied if os.path.lexists(path)]
        return _describe(root, state, home, environment, mounts, overlay=True)
    with stubs.exclusive(state):
        try:
            return _prepare(root, rules, home, state, environment, _Mounts(beside))
        except BaseException:
            _clear(state)
            raise


def _prepare(
    root: str, rules: policy.Merged, home: str, state: str, environment: Mapping[str, str], mounts: _Mounts
) -> description.Prepared:
    known = repositories.find(root)
    before = control.snapshot(root, rules)
    secluded = _protect(root, rules, state, known, mounts)
    git_dirs = tuple(dict.fromkeys((*known.git_dirs, *(r.path for r in secluded if r.anchor == root))))
    session = Session(
        root=root, rules=rules, secluded=tuple(secluded), before=before,
        known=repositories.Found(git_dirs=git_dirs, complete=known.complete),
    )  # fmt: skip
    _save(state, session)
    for cover in mounts.covers:
        failed = set(stubs.make(state, sorted(cover.wants.values(), key=lambda want: want.path.count("/"))))
        for path in failed:
            cover.protect.pop(path, None)
        cover.pinned -= failed
    mounts.deny = [path for path in mounts.deny if os.path.lexists(path)]
    return _describe(root, state, home, environment, mounts, overlay=False)


def survey(
    directory: str, *, rules: policy.Merged, home: str, state: str, environment: Mapping[str, str]
) -> plan.Plan:
    """What `prepare` would cover now; nothing is made."""
    root = places.resolve(directory, home=home, state=state, environment=environment)
    mounts = _Mounts(plan.shown(rules, home=home, state=state, environment=environment))
    known = repositories.find(root)
    cover = protection.Cover(root, state)
    main = _main_repository(root, known, cover, mounts)
    made = plan.Plan(root, rules, cover, main).make()
    for git_dir in dict.fromkeys((*(() if main is None else (main,)), *known.git_dirs)):
        repositories.cover(cover, git_dir, "private")
    return made


class _Mounts:
    """What `_protect` collects for the description."""

    def __init__(self, beside: list[tuple[str, bool]]) -> None:
        self.beside = beside
        self.covers: list[protection.Cover] = []
        self.private: list[tuple[str, str]] = []
        self.binds: list[description.Bind] = []
        self.deny: list[str] = []
        self.warnings: list[str] = []


def _protect(
    root: str, rules: policy.Merged, state: str, known: repositories.Found, mounts: _Mounts
) -> list[repositories.Repository]:
    """Decide which names are covered and make the private copies; the repositories that got one."""
    cover = protection.Cover(root, state)
    mounts.covers.append(cover)
    main = _main_repository(root, known, cover, mounts)
    mounts.deny = list(plan.Plan(root, rules, cover, main).make().denied)
    found: list[repositories.Repository] = []
    if main is not None:
        _add_repository(cover, main, state, mounts, found)
    nested = [path for path in known.git_dirs if path != main]
    for path in nested[: repositories.MAX_NESTED]:
        _add_repository(cover, path, state, mounts, found)
    if len(nested) > repositories.MAX_NESTED:
        mounts.warnings.append(
            f"{len(nested) - repositories.MAX_NESTED} nested repositories are writable without protection; "
            "look at their config and hooks before using git there"
        )
    if not known.complete:
        mounts.warnings.append(
            f"only {repositories.MAX_DIRECTORIES} directories were searched for nested repositories"
        )
    _hide_stubs(cover, state, root, main)
    _warn_about_parent(root, main, mounts)
    return found + _add_common(root, state, mounts)


def _main_repository(
    root: str, known: repositories.Found, cover: protection.Cover, mounts: _Mounts
) -> str | None:
    """The workspace's own git directory relative to its root: there, to come, the root itself, or elsewhere (None)."""
    if "" in known.git_dirs:
        return ""
    if os.path.isdir(f"{root}/.git") and not os.path.islink(f"{root}/.git"):
        return ".git"
    if not os.path.lexists(f"{root}/.git"):
        return ".git"
    cover.add(".git")  # a file or a link: it must go on leading where it leads
    if os.path.islink(f"{root}/.git"):
        real = os.path.realpath(f"{root}/.git")
        if places.beneath(real, root):
            return real[len(root) + 1 :]
        mounts.warnings.append(f".git is a link to {real}, which is not shown; git will not work inside")
    return None


def _add_repository(
    cover: protection.Cover, git_dir: str, state: str, mounts: _Mounts, found: list[repositories.Repository]
) -> None:
    number = len(mounts.private)
    if not repositories.cover(cover, git_dir, repositories.link_path(state, number)):
        return
    repository, hidden = repositories.seclude(cover.anchor, git_dir, state, number)
    mounts.private.append((repository.private, f"{repositories.INSIDE}/{number}"))
    found.append(repository)
    if hidden:
        mounts.warnings.append(
            f"not shown inside, because it may hold credentials: {', '.join(hidden)} of {git_dir or '.'}/config"
        )


def _hide_stubs(cover: protection.Cover, state: str, root: str, main: str | None) -> None:
    if main is not None and main != "" and f"{root}/{main}/config" in cover.protect:
        source = repositories.exclude(state, root, f"{root}/{main}", cover.hidden)
        cover.add(f"{main}/info/exclude", source=source)


def _warn_about_parent(root: str, main: str | None, mounts: _Mounts) -> None:
    above = root
    while main == ".git" and above != "/":
        if os.path.lexists(f"{above}/.git/HEAD"):
            if above != root:
                mounts.warnings.append(
                    f"the repository is {above}, of which only {root} is shown; git will not work inside"
                )
            return
        above = os.path.dirname(above)


def _add_common(root: str, state: str, mounts: _Mounts) -> list[repositories.Repository]:
    """For a linked worktree: show its repository's git directory too, with the same protection."""
    if os.path.islink(f"{root}/.git") or not os.path.isfile(f"{root}/.git"):
        return []
    worktree = repositories.worktree_of(root)
    if worktree.warning:
        mounts.warnings.append(worktree.warning)
    if worktree.common is None or places.within(worktree.common, root):
        return []
    cover = protection.Cover(worktree.common, state)
    mounts.covers.append(cover)
    mounts.binds.append(description.Bind(worktree.common, worktree.common, writable=True, owner=True))
    found: list[repositories.Repository] = []
    _add_repository(cover, "", state, mounts, found)
    for path in repositories.find(worktree.common).git_dirs[: repositories.MAX_NESTED]:
        if path:
            _add_repository(cover, path, state, mounts, found)
    source = repositories.exclude(state, root, worktree.common, mounts.covers[0].hidden)
    cover.add("info/exclude", source=source)
    return found


def _describe(
    root: str, state: str, home: str, environment: Mapping[str, str], mounts: _Mounts, *, overlay: bool
) -> description.Prepared:
    tools = toolchains.find(home=home, environment=environment, root=root)
    trusted = (root, *(bind.target for bind in mounts.binds))
    settings = toolchains.git_settings(home=home, environment=environment, directories=trusted)
    mounts.private.append(repositories.global_settings(state, root, settings))
    # zsh writes here-documents to TMPPREFIX, bash to TMPDIR.
    env = {
        **tools.env,
        "TMPDIR": "/tmp",
        "TMPPREFIX": "/tmp/zsh",
        "GIT_CONFIG_GLOBAL": f"{repositories.INSIDE}/global/config",
    }
    binds = [] if overlay else [description.Bind(root, root, writable=True, owner=True)]
    binds += mounts.binds + [
        description.Bind(path, path) for path in tools.paths if not places.within(path, root)
    ]
    binds += [
        description.Bind(path, path, writable=writable, owner=writable)
        for path, writable in mounts.beside
        if not places.within(path, root)
    ]
    pinned: list[str] = []
    protect: list[tuple[str, str]] = []
    for cover in mounts.covers:
        more_pinned, more_protect = cover.mounts()
        pinned += more_pinned
        protect += more_protect
    return description.Prepared(
        root=root, state=state, overlay=overlay, binds=tuple(binds), private=tuple(mounts.private), pinned=tuple(pinned),
        protect=tuple(protect), deny=tuple(mounts.deny), env=env, cwd=root, warnings=tuple(mounts.warnings),
        shown=tuple(dict.fromkeys((root, *(bind.source for bind in binds)))),
    )  # fmt: skip


# ── the end ────────────────────────────────────────────────────────────────────────────────────────


def finish(prepared: description.Prepared) -> description.Report:
    """After the last process of the sandbox: put the host in order and say what changed. Twice is harmless."""
    return _end(prepared.state, merge=True)


def sweep(state: str) -> description.Report:
    """Finish for an owner that died. Nothing is merged: what it wrote live (commits, branches, files) is there anyway."""
    return _end(state, merge=False)


def _end(state: str, *, merge: bool) -> description.Report:
    session = _load(state)
    outcome = repositories.Outcome()
    if session is not None and merge:
        for repository in session.secluded:
            repositories.take_over(repository, outcome)
    with stubs.exclusive(state):
        removed = stubs.remove(state)
    changed: list[str] = []
    if session is not None and os.path.isdir(session.root):
        repositories.disarm(session.root, session.known, outcome)
        after = control.snapshot(session.root, session.rules)
        changed = control.changed(session.before, after)
        outcome.warnings += _look(session)
    _clear(state)
    return description.Report(
        control_files_changed=tuple(changed), config_merged=tuple(outcome.merged), config_dropped=tuple(outcome.dropped),
        stubs_removed=tuple(removed), warnings=tuple(outcome.warnings),
    )  # fmt: skip


def _look(session: Session) -> list[str]:
    """Things that are allowed and that a person should know before the next git command."""
    found: list[str] = []
    for repository in session.secluded:
        todo = walking.read_text(repository.full, "rebase-merge/git-rebase-todo") or ""
        if any(line.split(" ")[0] in ("exec", "x") for line in todo.splitlines()):
            found.append(
                f"{repository.path}: a rebase is under way whose next steps run commands; see git-rebase-todo"
            )
        for lock in ("index.lock", "HEAD.lock", "packed-refs.lock"):
            if os.path.lexists(f"{repository.full}/{lock}"):
                found.append(f"{repository.path}/{lock} is there; remove it if no git is running")
    modules = walking.read_text(session.root, ".gitmodules")
    found += _suspicious_modules(modules) if modules else []
    return found


def _suspicious_modules(text: str) -> list[str]:
    try:
        values = gitconfig.parse(text).values()
    except gitconfig.ConfigInvalid:
        return [".gitmodules cannot be read"]
    lines = []
    for key, found in values.items():
        if key[2] == "update" or (key[2] == "url" and not all(gitconfig.url_is_safe(url) for url in found)):
            lines.append(f".gitmodules sets {gitconfig.spell(key)}; look at it before `git submodule update`")
    return lines


def _save(state: str, session: Session) -> None:
    with open(f"{state}/{_RECORD}.new", "wb") as file:
        file.write(msgspec.json.encode(session))
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{state}/{_RECORD}.new", f"{state}/{_RECORD}")


def _load(state: str) -> Session | None:
    try:
        with open(f"{state}/{_RECORD}", "rb") as file:
            return msgspec.json.decode(file.read(), type=Session)
    except FileNotFoundError:
        return None


def _clear(state: str) -> None:
    stubs.remove(state)
    for name in ("git", "links"):
        shutil.rmtree(f"{state}/{name}", ignore_errors=True)
    for name in (_RECORD, f"{_RECORD}.new", "exclude"):
        try:
            os.unlink(f"{state}/{name}")
        except FileNotFoundError:
            pass
