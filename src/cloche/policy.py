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
from typing import Any, Literal

import msgspec

from cloche import errors, model

Root = Literal["overlay", "read-only"]
Network = Literal["off", "rules", "open"]
Syscalls = Literal["restrictive", "moderate", "permissive"]
PROFILES = ("restrictive", "moderate", "permissive")
_NETWORK_ORDER: tuple[Network, ...] = ("off", "rules", "open")
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


class Policy(model.Noun, frozen=True, kw_only=True):
    """One merged policy."""

    root: Root = "overlay"
    network: Network = "off"
    syscalls: Syscalls = "moderate"
    root_user: bool = True
    """Whether `user="root"` is allowed; that root is nobody outside."""
    minimum_isolation: model.Level = "process"
    """The least that creation may end up with; the caller's own demand is "namespaces" unless it says otherwise."""
    required: tuple[str, ...] = ()
    """Kernel features without which creation must fail: 'landlock', 'seccomp', 'cgroup_memory', …"""
    protected: tuple[str, ...] = PROTECTED
    deny: tuple[str, ...] = ()
    """Further workspace paths that are hidden from reading and writing."""

    @classmethod
    def load(cls, path: str) -> Policy:
        """Read a policy from a TOML file; a mistake is reported with file, line and key."""
        # By name, because `settings` stands a floor above and is the one place that reads such files.
        from importlib import import_module

        loaded = import_module("cloche.settings").load_policy(path)
        assert isinstance(loaded, Policy)
        return loaded


_PROFILE: dict[str, Policy] = {
    "restrictive": Policy(root="read-only", syscalls="restrictive", root_user=False),
    "moderate": Policy(),
    "permissive": Policy(network="open", syscalls="permissive"),
}


def profile(name: str) -> Policy:
    try:
        return _PROFILE[name]
    except KeyError:
        raise errors.error(
            "profile_unknown", f"there is no profile {name!r}", hint=errors.nearest(name, PROFILES)
        ) from None


def parse(data: dict[str, Any], *, base: Policy | None = None) -> Policy:
    """`base` with the given fields replaced; an unknown or ill-typed one is an error that names it."""
    for field in data:
        if field not in Policy.__struct_fields__:
            hint = errors.nearest(field, Policy.__struct_fields__)
            raise errors.error("field_unknown", f"a policy has no field {field!r}", hint=hint, field=field)
    merged = {**msgspec.to_builtins(base or Policy()), **data}
    try:
        return msgspec.convert(merged, Policy)
    except msgspec.ValidationError as problem:
        raise errors.error(
            "policy_invalid", f"the policy is not valid: {problem}", hint="see docs/reference/policy.md"
        ) from None


def tighten(policy: Policy, ceiling: Policy) -> Policy:
    """What both allow. Never looser than either, whatever the ceiling says."""
    return Policy(
        root="read-only" if "read-only" in (policy.root, ceiling.root) else "overlay",
        network=min(policy.network, ceiling.network, key=_NETWORK_ORDER.index),
        syscalls=min(policy.syscalls, ceiling.syscalls, key=_SYSCALLS_ORDER.index),
        root_user=policy.root_user and ceiling.root_user,
        minimum_isolation=max(policy.minimum_isolation, ceiling.minimum_isolation, key=model.LEVELS.index),
        required=tuple(dict.fromkeys((*policy.required, *ceiling.required))),
        protected=tuple(dict.fromkeys((*policy.protected, *ceiling.protected))),
        deny=tuple(dict.fromkeys((*policy.deny, *ceiling.deny))),
    )


class Explanation(model.Noun, frozen=True, kw_only=True):
    """Which rule decides, and where it came from."""

    verdict: Literal["allow", "deny"]
    rule: str
    source: str


def explain_path(policy: Policy, path: str, *, write: bool) -> Explanation:
    """Whether a path relative to the workspace may be read or written, by the very lists enforcement uses."""
    path = posixpath.normpath(path)
    for source, entries in (("policy.deny", policy.deny), ("policy.protected", policy.protected)):
        for entry in entries:
            if _covers(entry, path) and (write or source == "policy.deny"):
                return Explanation(verdict="deny", rule=entry, source=source)
    return Explanation(verdict="allow", rule="workspace", source="default")


def _covers(entry: str, path: str) -> bool:
    bare = entry.rstrip("/")
    return path == bare or path.startswith(bare + "/")
