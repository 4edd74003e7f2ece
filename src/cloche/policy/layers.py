"""How the layers of a policy become one.

    profile or mode  →  your own file  →  the project's file  →  arguments  →  the operator's ceiling

A layer says only the fields it names. A layer that may *loosen* (yours, the arguments, a project's file that you trust) is laid
over what is below it; one that may only *tighten* (a project's file, a ceiling) keeps what both allow. nouns.py says what
each field does in either case; here it is done. Invariant: after a tightening layer nothing is allowed that was not allowed
before it (tests/policy/test_layers.py, as a property, with the deciding functions as judges).

What a tightening layer cannot mean is refused, not ignored: a table such as `environment.set`, or `!` before an entry. A
repository that wants more than it may have should be read by a person (`cloche policy trust`).

Pure: files are read by `settings`, which hands over `Policy` objects that know where each field stands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.policy import nouns

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z")
_CALL = re.compile(r"[a-z_][a-z0-9_]{1,40}\Z")
_MAX_PAIRS = 20_000  # a project's file must not be able to keep an engine busy
_HINT = "see docs/reference/policy.md"

Where = Callable[[tuple[str, ...], str], str]
"""Where a key (and, in a list, an entry) stands: `FILE:LINE`, or some words."""


class Policy:
    """A policy as somebody writes it: the fields it names and no others, so that it can be laid over a profile.

    `Policy(files={"deny": ["secrets/"]}, network={"allow": ["pypi.org:443"]})`, or from a TOML file by `Policy.load`.
    Beside the groups it may define `profiles` and `agents`: tables of such groups with a `base` or `profile` below them.
    """

    __slots__ = ("agents", "fields", "profiles", "source", "where")

    def __init__(self, *, source: str = "arguments", where: Where | None = None, **groups: Any) -> None:
        self.source = source
        self.where: Where = where or (lambda key, entry: source)
        self.profiles: dict[str, dict[str, Any]] = _named(groups.pop("profiles", {}), "profiles", "base")
        self.agents: dict[str, dict[str, Any]] = _named(groups.pop("agents", {}), "agents", "profile")
        self.fields: dict[str, dict[str, Any]] = check(groups)

    @classmethod
    def load(cls, path: str) -> Policy:
        """Read a policy from a TOML file; a mistake is reported with file, line and key."""
        # By name, because `settings` stands a floor above and is the one place that reads such files.
        from importlib import import_module

        loaded = import_module("cloche.settings").load_policy(path)
        assert isinstance(loaded, Policy)
        return loaded

    def to_builtins(self) -> dict[str, Any]:
        """What the constructor takes, as plain data."""
        more = {"profiles": self.profiles, "agents": self.agents}
        return {**self.fields, **{name: table for name, table in more.items() if table}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.to_builtins() == other.to_builtins()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{group}={fields!r}' for group, fields in self.to_builtins().items())})"


class Layer(NamedTuple):
    """One of the things that are laid over each other."""

    name: str
    """`profile moderate`, `your file`, `project`, `arguments`, `ceiling`."""
    fields: Mapping[str, Mapping[str, Any]]
    tightens: bool
    where: Where
    whole: nouns.Merged | None = None
    """What it makes of nothing, if it says everything: a built-in profile, which is always the lowest."""


class Sources(NamedTuple):
    """The files that count for a sandbox, read."""

    user: Policy | None = None
    project: Policy | None = None
    trusted: bool = False
    """Whether the project's file is, as it stands, what the user has trusted."""
    ceilings: tuple[Policy, ...] = ()


# ── from what is said to layers ────────────────────────────────────────────────────────────────────


def stack(
    *,
    profile: str | None,
    mode: str | None = None,
    sources: Sources | None = None,
    arguments: Policy | None = None,
) -> tuple[Layer, ...]:
    """All layers of one sandbox, the lowest first."""
    if profile is not None and mode is not None:
        raise errors.error(
            "policy_invalid",
            f"the profile {profile!r} and the mode {mode!r} are both given, and either is the lowest layer",
            hint="leave one out; [agents.NAME] of a policy file may name a profile",
        )
    sources = sources or Sources()
    project, user = sources.project, sources.user
    if project is not None and not sources.trusted:
        _refuse_loosening(
            project, "only tighten until you trust it", f"read it, then: cloche policy trust {project.source}"
        )
    owners = [said for said in (user, project if sources.trusted else None, arguments) if said is not None]
    layers = list(
        _mode(mode, owners)
        if mode is not None
        else _profile("moderate" if profile is None else profile, owners)
    )
    if user is not None:
        layers.append(Layer("your file", user.fields, False, user.where))
    if project is not None:
        layers.append(Layer("project", project.fields, not sources.trusted, project.where))
    if arguments is not None:
        layers.append(Layer("arguments", arguments.fields, False, arguments.where))
    for ceiling in sources.ceilings:
        _refuse_loosening(ceiling, "only tighten, as every ceiling", "leave it out of the ceiling")
        layers.append(Layer("ceiling", ceiling.fields, True, ceiling.where))
    return tuple(layer for layer in layers if layer.fields)


def resolve(layers: Iterable[Layer]) -> nouns.Merged:
    """The one policy that counts."""
    merged = nouns.Merged()
    for layer in layers:
        if layer.whole is not None:
            merged = layer.whole
            continue
        merged = tighten(merged, layer.fields) if layer.tightens else lay(merged, layer.fields)
    return merged


def rebound(layers: tuple[Layer, ...], change: Mapping[str, Mapping[str, Any]]) -> tuple[Layer, ...]:
    """The layers of a live sandbox with other arguments: what is given replaces what the arguments said, list by list. Files
    and ceilings count as before."""
    old = next((layer for layer in layers if layer.name == "arguments"), None)
    fields = {group: dict(said) for group, said in (old.fields if old is not None else {}).items()}
    for group, said in change.items():
        kept = fields.setdefault(group, {})
        if kept.get("mode") == "off" and (said.get("allow") or said.get("ask")):
            del kept["mode"]
        kept.update(said)
    new = Layer("arguments", fields, False, old.where if old is not None else lambda key, entry: "arguments")
    below = [layer for layer in layers if layer.name not in ("arguments", "ceiling")]
    return (*below, new, *(layer for layer in layers if layer.name == "ceiling"))


def _profile(name: str, owners: Sequence[Policy], seen: tuple[str, ...] = ()) -> list[Layer]:
    if name in nouns.BUILT_IN:
        return [_built_in(name)]
    if name in seen:
        raise errors.error(
            "policy_invalid",
            f"profiles stand on each other in a circle: {' → '.join((*seen, name))}",
            hint=_HINT,
        )
    owner = next((owner for owner in owners if name in owner.profiles), None)
    if owner is None:
        known = [*nouns.BUILT_IN, *(known for owner in owners for known in owner.profiles)]
        raise errors.error(
            "profile_unknown", f"there is no profile {name!r}", hint=errors.nearest(name, known)
        )
    table = dict(owner.profiles[name])
    below = _profile(table.pop("base", "moderate"), owners, (*seen, name))
    return [*below, Layer(f"profile {name}", table, False, _under(owner, "profiles", name))]


@functools.cache
def _built_in(name: str) -> Layer:
    whole = nouns.BUILT_IN[name]
    return Layer(f"profile {name}", _all(whole), False, lambda key, entry: f"profile {name}", whole)


def _mode(name: str, owners: Sequence[Policy]) -> list[Layer]:
    from cloche.policy import modes

    tables = [(owner, dict(owner.agents[name])) for owner in owners if name in owner.agents]
    built_in = modes.BUILT_IN.get(name)
    if built_in is None and not tables:
        known = [*modes.BUILT_IN, *(known for owner in owners for known in owner.agents)]
        raise errors.error("mode_unknown", f"there is no mode {name!r}", hint=errors.nearest(name, known))
    profile = "moderate"
    for _, table in tables:
        profile = table.pop("profile", profile)
    layers = _profile(profile, owners)
    if built_in is not None:
        layers.append(Layer(f"mode {name}", built_in, False, lambda key, entry: f"mode {name}"))
    return layers + [
        Layer(f"mode {name}", table, False, _under(owner, "agents", name)) for owner, table in tables
    ]


def _under(owner: Policy, *above: str) -> Where:
    return lambda key, entry: owner.where((*above, *key), entry)


def _all(merged: nouns.Merged) -> dict[str, dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = msgspec.to_builtins(merged)
    return plain


def _refuse_loosening(said: Policy, may: str, hint: str) -> None:
    """What cannot tighten is refused by name: a table, `!`, a profile or mode of its own."""
    for group, field in nouns.TABLES:
        if said.fields.get(group, {}).get(field):
            raise _untrusted(said, (group, field), may, hint)
    for entry in said.fields.get("files", {}).get("protected", ()):
        if entry.startswith("!"):
            raise _untrusted(said, ("files", "protected"), may, hint, entry)
    for kind in ("profiles", "agents"):
        for name in getattr(said, kind):
            raise _untrusted(said, (kind, name), may, hint)


def _untrusted(
    said: Policy, key: tuple[str, ...], may: str, hint: str, entry: str = ""
) -> errors.ClocheError:
    return errors.error(
        "policy_untrusted",
        f"{said.where(key, entry)}: {'.'.join(key)} gives something, and this file may {may}",
        hint=hint,
        file=said.source,
        key=".".join(key),
    )


def names_directories(said: Any) -> bool:
    """Whether what somebody says shows directories of the host, in a profile or mode of its own too. Anything that is not
    plainly without counts as such."""
    if not isinstance(said, Mapping):
        return bool(said)
    inner = [
        table
        for kind in ("profiles", "agents")
        for tables in [said.get(kind, {})]
        for table in (tables.values() if isinstance(tables, Mapping) else [tables])
    ]
    files = said.get("files", {})
    shown = isinstance(files, Mapping) and not (files.get("read") or files.get("write"))
    return not shown or any(map(names_directories, inner))


# ── laying one over another ────────────────────────────────────────────────────────────────────────


def lay(below: nouns.Merged, fields: Mapping[str, Mapping[str, Any]]) -> nouns.Merged:
    """`below` with the fields of a layer that may loosen."""
    changed: dict[str, Any] = {}
    for group, said in fields.items():
        now = getattr(below, group)
        new = {field: _laid((group, field), getattr(now, field), value) for field, value in said.items()}
        given = new.get("allow") or new.get("ask")
        if group == "network" and given and "mode" not in said and now.mode == "off":
            new["mode"] = "rules"  # whoever allows a host wants it reached
        changed[group] = _changed(now, new)
    return msgspec.structs.replace(below, **changed)


def _laid(key: tuple[str, str], now: Any, said: Any) -> Any:
    if key == ("files", "protected"):
        gone = {entry[1:] for entry in said if entry.startswith("!")}
        kept = [entry for entry in now if entry not in gone]
        return _union(kept, [entry for entry in said if not entry.startswith("!")])
    if key in nouns.DENYING:
        return _union(now, said)
    if key in nouns.ALLOWING:
        everything = tuple(now) == ("*",)
        return _union(() if everything or not said else now, said)
    if key in nouns.TABLES:
        return {**now, **said}
    return said


def tighten(below: nouns.Merged, fields: Mapping[str, Mapping[str, Any]]) -> nouns.Merged:
    """What both allow. Never looser than `below`, whatever the fields say."""
    changed: dict[str, Any] = {}
    for group, said in fields.items():
        now = getattr(below, group)
        new = {
            field: _tightened((group, field), getattr(now, field), value)
            for field, value in said.items()
            if group != "network" or field in ("deny", "ask")
        }
        changed[group] = _changed(_narrowed(now, said) if group == "network" else now, new)
    return msgspec.structs.replace(below, **changed)


def _tightened(key: tuple[str, str], now: Any, said: Any) -> Any:
    if key in nouns.CHOICES:
        return min(now, said, key=nouns.CHOICES[key].index)
    if key in nouns.DENYING:
        return _union(now, said)
    if key in nouns.TABLES:
        return now
    if key[0] == "files":
        return _common_directories(now, said)
    if key[0] in ("environment", "secrets"):
        from cloche.policy import globs

        return globs.both(now, said)
    return min((limit for limit in (now, said) if limit is not None), default=None)


def _narrowed(now: nouns.Network, said: Mapping[str, Any]) -> nouns.Network:
    """`network.mode` and `network.allow` of a tightening layer; one that names neither narrows nothing."""
    if not said.keys() & {"mode", "allow"}:
        return now
    if now.mode == "off" or said.get("mode") == "off":
        return msgspec.structs.replace(now, mode="off", allow=())
    from cloche.policy import rules

    if "allow" not in said and said["mode"] == "rules":
        return msgspec.structs.replace(now, mode="rules")  # by rules only: those that are there
    mine = rules.RuleSet.make(now.mode, allow=now.allow, resolve=now.resolve)
    theirs = rules.RuleSet.make(said.get("mode", "rules"), allow=said.get("allow", ()))
    if len(mine.allow) * len(theirs.allow) > _MAX_PAIRS:
        raise errors.error(
            "policy_invalid",
            f"network.allow has {len(mine.allow)} rules, narrowed by {len(theirs.allow)}: too many to compare",
            hint="write fewer, with wildcards",
        )
    both = rules.both(mine, theirs)
    return msgspec.structs.replace(
        now, mode=both.mode, allow=tuple(map(str, both.allow)), resolve=dict(both.resolve)
    )


def _common_directories(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
    pairs = ((left, right) for left in one for right in other)
    kept = (
        left if within(left, right) else right
        for left, right in pairs
        if within(left, right) or within(right, left)
    )
    return tuple(dict.fromkeys(kept))


def within(path: str, directory: str) -> bool:
    """Whether a path is a directory or lies in it, by their spelling."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _union(*lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for entries in lists for entry in entries))


def _changed(group: Any, fields: Mapping[str, Any]) -> Any:
    made = {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}
    return msgspec.structs.replace(group, **made)


# ── checking what is said ──────────────────────────────────────────────────────────────────────────


def check(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that `data` names, as plain data; an unknown, ill-typed or senseless one is an error that names it."""
    for group, fields in data.items():
        _refuse_unknown(group, nouns.GROUPS, "a policy has no group", (group,))
        if not isinstance(fields, Mapping):
            raise errors.error(
                "policy_invalid",
                f"the group {group!r} of a policy is a table, not {fields!r}",
                hint=_HINT,
                at=(group,),
            )
        for field in fields:
            known = nouns.GROUPS[group].__struct_fields__
            _refuse_unknown(field, known, f"the group {group!r} of a policy has no field", (group, field))
    try:
        read = _all(msgspec.convert(data, nouns.Merged))
    except msgspec.ValidationError as problem:
        cause, _, place = str(problem).partition(" - at `$")
        at = tuple(int(index) if index else name for name, index in _PART.findall(place))
        words = f"{'.'.join(map(str, at))} is wrong: {cause[:1].lower()}{cause[1:]}" if at else cause
        raise errors.error("policy_invalid", f"the policy is not valid: {words}", hint=_HINT, at=at) from None
    said = {group: {field: _plain(read[group][field]) for field in fields} for group, fields in data.items()}
    for group, fields in said.items():
        for field, value in fields.items():
            _check_value(group, field, value)
    network = said.get("network", {})
    if network.get("mode") == "off" and (network.get("allow") or network.get("ask")):
        raise errors.error(
            "policy_invalid",
            "network.mode is 'off' and network.allow has rules: one of them is meant",
            hint="leave the mode out, or the rules",
            at=("network", "mode"),
        )
    return said


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_PART = re.compile(r"\.([A-Za-z0-9_-]+)|\[(\d+)\]")


def _check_value(group: str, field: str, value: Any) -> None:
    if not value or not isinstance(value, list | tuple | dict):
        return
    try:
        _CHECKS.get((group, field), _no_check)(value)
    except errors.ClocheError as problem:
        problem.details.setdefault("at", (group, field))
        raise


def _no_check(value: Any) -> None:
    pass


def _check_network(value: Any) -> None:
    from cloche.policy import rules

    for line in value:
        rules.Rule.parse(line)


def _check_allow(value: Any) -> None:
    from cloche.policy import rules

    for line in value:
        rules.RuleSet.make("rules", allow=[line])


def _check_resolve(value: Any) -> None:
    from cloche.policy import rules

    rules.RuleSet.make("rules", resolve=value)


def _check_paths(value: Any) -> None:
    from cloche.policy import paths

    for entry in value:
        paths.check(entry)


def _check_protected(value: Any) -> None:
    from cloche.policy import paths

    for entry in value:
        paths.check(entry.removeprefix("!"))
        if entry.startswith("!") and entry[1:] in value:
            raise errors.error(
                "policy_invalid",
                f"files.protected has both {entry[1:]!r} and {entry!r}",
                hint="keep one",
                entry=entry,
            )


def _check_directories(value: Any) -> None:
    for entry in value:
        plain = entry.startswith("/") and not any(mark in entry for mark in "\0\n\r") and len(entry) < 4096
        if (
            not plain
            or {"..", "."} & set(entry.split("/"))
            or "//" in entry
            or (entry != "/" and entry.endswith("/"))
        ):
            raise errors.error(
                "policy_invalid",
                f"{entry[:80]!r} is not the plain absolute path of a directory",
                hint="such as /srv/data: no '~', no '..', no '/' at the end",
                entry=entry,
            )


def _check_globs(value: Any) -> None:
    from cloche.policy import globs

    for entry in value:
        globs.check(entry)


def _check_calls(value: Any) -> None:
    for entry in value:
        if not _CALL.match(entry):
            raise errors.error(
                "policy_invalid",
                f"{entry[:80]!r} is not the name of a system call",
                hint="such as ptrace",
                entry=entry,
            )


def _check_set(value: Any) -> None:
    from cloche import model

    try:
        model.check_environment(value)
    except errors.ClocheError as problem:
        raise errors.error("policy_invalid", problem.message, hint=problem.hint or _HINT) from None


_CHECKS: dict[tuple[str, str], Callable[[Any], None]] = {
    ("files", "protected"): _check_protected,
    ("files", "deny"): _check_paths,
    ("files", "read"): _check_directories,
    ("files", "write"): _check_directories,
    ("network", "allow"): _check_allow,
    ("network", "deny"): _check_network,
    ("network", "ask"): _check_network,
    ("network", "resolve"): _check_resolve,
    ("syscalls", "deny"): _check_calls,
    ("environment", "allow"): _check_globs,
    ("environment", "deny"): _check_globs,
    ("environment", "set"): _check_set,
    ("secrets", "allow"): _check_globs,
}


def _named(tables: Any, kind: str, base: str) -> dict[str, dict[str, Any]]:
    """`profiles` or `agents`: tables of groups, each with the name of what is below it."""
    if not isinstance(tables, Mapping):
        raise errors.error("policy_invalid", f"{kind!r} is a table of tables", hint=_HINT, at=(kind,))
    made: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping) or not _NAME.match(name):
            raise errors.error(
                "policy_invalid",
                f"{kind}.{name} is not a table with a plain name",
                hint=_HINT,
                at=(kind, name),
            )
        if kind == "profiles" and name in nouns.BUILT_IN:
            raise errors.error(
                "policy_invalid",
                f"the profile {name!r} is built in and cannot be made anew",
                hint=f"choose another name, with base = {name!r}",
                at=(kind, name),
            )
        said = dict(table)
        below = said.pop(base, None)
        if below is not None and not isinstance(below, str):
            raise errors.error(
                "policy_invalid",
                f"{kind}.{name}.{base} is the name of a profile",
                hint=_HINT,
                at=(kind, name, base),
            )
        try:
            made[name] = {**check(said), **({} if below is None else {base: below})}
        except errors.ClocheError as problem:
            inner: Any = problem.details.get("at", ())
            problem.details["at"] = (kind, name, *inner)
            raise
    return made


def _refuse_unknown(name: str, known: Iterable[str], sentence: str, at: tuple[str, ...]) -> None:
    if name not in known:
        raise errors.error(
            "field_unknown", f"{sentence} {name!r}", hint=errors.nearest(name, known), field=name, at=at
        )
