"""What a sandbox may touch: the three profiles, how layers of policy merge, and why something is refused.

    restrictive   read-only root, network off, no root user
    moderate      writable overlay root, network off until rules are given          (the default)
    permissive    moderate, and ptrace, and network open

None of them shows a home directory, the host's environment, or lets a process make namespaces. A *tightening*
layer (a project's file, an operator's ceiling) can only take away; `tighten` is written so that it cannot give.
Pure: nothing here looks at the host (`Policy.load` hands over to `settings`, which does).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cloche import errors, model

Root = Literal["overlay", "read-only"]
Mode = Literal["off", "rules", "open"]
Syscalls = Literal["restrictive", "moderate", "permissive"]
PROFILES = ("restrictive", "moderate", "permissive")
_NETWORK_ORDER: tuple[Mode, ...] = ("off", "rules", "open")
_SYSCALLS_ORDER: tuple[Syscalls, ...] = ("restrictive", "moderate", "permissive")

# What tools and shells obey without asking; code that may write them reaches out of the glass later, when a
# trusted program reads them (threats.md §3). Relative to a workspace's root; a trailing slash is a directory.
PROTECTED: tuple[str, ...] = (
    ".git/hooks/", ".git/config.worktree", ".git/info/attributes",
    ".gitconfig", ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".profile",
    ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".config/fish/", ".ripgreprc", ".mcp.json",
    ".claude/settings.json", ".claude/settings.local.json", ".claude/commands/", ".claude/agents/",
    ".claude/skills/", ".claude/hooks/", ".claude/workflows/",
    ".codex/", ".agents/", ".gemini/", ".opencode/", ".cursor/", ".vscode/", ".idea/",
    ".envrc", ".husky/", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", "cloche.toml",
)  # fmt: skip

# Changed on purpose often enough that hiding them would break work, so they are reported at the end instead.
REPORTED: tuple[str, ...] = (
    ".gitattributes",
    ".pre-commit-config.yaml",
    ".gitmodules",
    "Makefile",
    "package.json",
)


class Files(model.Noun, frozen=True, kw_only=True):
    """`[files]`: the root, and paths of a workspace."""

    root: Root = "overlay"
    protected: tuple[str, ...] = PROTECTED
    """Workspace paths that can be read and not written."""
    deny: tuple[str, ...] = ()
    """Further workspace paths that are hidden from reading and writing."""


class Network(model.Noun, frozen=True, kw_only=True):
    """`[network]`: whom the sandbox may speak to. Rules are lines of rules.py; deny wins, an empty list denies all."""

    mode: Mode = "off"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    resolve: dict[str, str] = msgspec.field(default_factory=dict)
    """`host:port` → `address:port`: where that one is dialled, whatever the name service says."""


class Calls(model.Noun, frozen=True, kw_only=True):
    """`[syscalls]`: the filter."""

    profile: Syscalls = "moderate"


class Least(model.Noun, frozen=True, kw_only=True):
    """`[isolation]`: what creation must not fall below."""

    minimum: model.Level = "process"
    """The least that creation may end up with; the caller's own demand is "namespaces" unless it says otherwise."""
    required: tuple[str, ...] = ()
    """Kernel features without which creation must fail: 'landlock', 'seccomp', 'cgroup_memory', …"""
    root_user: bool = True
    """Whether `user="root"` is allowed; that root is nobody outside."""


class Merged(model.Noun, frozen=True, kw_only=True):
    """One merged policy, in the groups of its file."""

    files: Files = Files()
    network: Network = Network()
    syscalls: Calls = Calls()
    isolation: Least = Least()


class Policy:
    """A policy as somebody writes it: the fields it names and no others, so that it can be laid over a profile.

    `Policy(files={"deny": ["secrets/"]}, network={"mode": "off"})`, or from a TOML file by `Policy.load`.
    """

    __slots__ = ("fields",)

    def __init__(self, **groups: Mapping[str, Any]) -> None:
        self.fields: dict[str, dict[str, Any]] = check(groups)

    @classmethod
    def load(cls, path: str) -> Policy:
        """Read a policy from a TOML file; a mistake is reported with file, line and key."""
        # By name, because `settings` stands a floor above and is the one place that reads such files.
        from importlib import import_module

        loaded = import_module("cloche.settings").load_policy(path)
        assert isinstance(loaded, Policy)
        return loaded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{group}={fields!r}' for group, fields in self.fields.items())})"


_PROFILE: dict[str, Merged] = {
    "restrictive": Merged(
        files=Files(root="read-only"), syscalls=Calls(profile="restrictive"), isolation=Least(root_user=False)
    ),
    "moderate": Merged(),
    "permissive": Merged(network=Network(mode="open"), syscalls=Calls(profile="permissive")),
}


def profile(name: str) -> Merged:
    try:
        return _PROFILE[name]
    except KeyError:
        raise errors.error(
            "profile_unknown", f"there is no profile {name!r}", hint=errors.nearest(name, PROFILES)
        ) from None


def check(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that `data` names, as plain data; an unknown or ill-typed one is an error that names it."""
    whole = msgspec.to_builtins(Merged())
    for group, fields in data.items():
        _refuse_unknown(group, whole, "a policy has no group")
        if not isinstance(fields, dict):
            raise errors.error(
                "policy_invalid", f"the group {group!r} of a policy is a table, not {fields!r}", field=group
            )
        for field in fields:
            _refuse_unknown(field, whole[group], f"the group {group!r} of a policy has no field")
    try:
        read = msgspec.to_builtins(msgspec.convert(data, Merged))
    except msgspec.ValidationError as problem:
        raise errors.error(
            "policy_invalid", f"the policy is not valid: {problem}", hint="see docs/reference/policy.md"
        ) from None
    return {group: {field: read[group][field] for field in fields} for group, fields in data.items()}


def parse(data: Mapping[str, Any], *, base: Merged | None = None) -> Merged:
    """`base` with the given fields replaced, group by group."""
    merged = msgspec.to_builtins(base or Merged())
    for group, fields in check(data).items():
        merged[group] |= fields
    said = data.get("network", {})
    if "mode" not in said and (said.get("allow") or said.get("ask")) and merged["network"]["mode"] == "off":
        merged["network"]["mode"] = "rules"  # the network is off until rules are given
    return msgspec.convert(merged, Merged)


def _refuse_unknown(name: str, known: dict[str, Any], sentence: str) -> None:
    if name not in known:
        raise errors.error(
            "field_unknown", f"{sentence} {name!r}", hint=errors.nearest(name, known), field=name
        )


def tighten(policy: Merged, ceiling: Merged) -> Merged:
    """What both allow. Never looser than either, whatever the ceiling says."""
    return Merged(
        files=Files(
            root="read-only" if "read-only" in (policy.files.root, ceiling.files.root) else "overlay",
            protected=_union(policy.files.protected, ceiling.files.protected),
            deny=_union(policy.files.deny, ceiling.files.deny),
        ),
        network=Network(
            mode=min(policy.network.mode, ceiling.network.mode, key=_NETWORK_ORDER.index),
            allow=policy.network.allow,
            deny=_union(policy.network.deny, ceiling.network.deny),
            ask=_union(policy.network.ask, ceiling.network.ask),
            resolve=policy.network.resolve,
        ),
        syscalls=Calls(
            profile=min(policy.syscalls.profile, ceiling.syscalls.profile, key=_SYSCALLS_ORDER.index)
        ),
        isolation=Least(
            minimum=max(policy.isolation.minimum, ceiling.isolation.minimum, key=model.LEVELS.index),
            required=_union(policy.isolation.required, ceiling.isolation.required),
            root_user=policy.isolation.root_user and ceiling.isolation.root_user,
        ),
    )


def _union(*lists: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for entries in lists for entry in entries))


class Explanation(model.Noun, frozen=True, kw_only=True):
    """Which rule decides, and where it came from."""

    verdict: Literal["allow", "deny"]
    rule: str
    source: str


def explain_path(policy: Merged, path: str, *, write: bool) -> Explanation:
    """Whether a path relative to the workspace may be read or written, by the very lists enforcement uses."""
    path = posixpath.normpath(path)
    for source, entries in (("files.deny", policy.files.deny), ("files.protected", policy.files.protected)):
        for entry in entries:
            if _covers(entry, path) and (write or source == "files.deny"):
                return Explanation(verdict="deny", rule=entry, source=source)
    return Explanation(verdict="allow", rule="workspace", source="default")


def _covers(entry: str, path: str) -> bool:
    bare = entry.rstrip("/")
    return path == bare or path.startswith(bare + "/")
