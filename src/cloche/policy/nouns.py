"""The groups of a policy with all that they may say, and what each field does when a layer is laid over another.

A field has one of five natures, said once here and obeyed by layers.py:

    choice    one word of an ordered list; of two, a tightening layer keeps the stricter
    ceiling   a number, None for none; the lower
    denying   a list that takes away: lists add up, whoever says them
    allowing  a list that gives: own layers add to it and an empty list clears it, a tightening layer keeps what both allow
    table     names and values that only a layer which may loosen can give
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cloche import model

Root = Literal["overlay", "read-only"]
Mode = Literal["off", "rules", "open"]
Syscalls = Literal["restrictive", "moderate", "permissive"]

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

Amount = Annotated[float, msgspec.Meta(gt=0)]
Whole = Annotated[int, msgspec.Meta(gt=0)]


class Files(model.Noun, frozen=True, kw_only=True):
    """`[files]`: the root, paths of a workspace, and directories of the host that are shown beside it."""

    root: Root = "overlay"
    protected: tuple[str, ...] = PROTECTED
    """Workspace paths that can be read and not written."""
    deny: tuple[str, ...] = ()
    """Workspace paths that can be neither read nor written."""
    read: tuple[str, ...] = ()
    """Absolute directories of the host that are shown at their own path, read-only."""
    write: tuple[str, ...] = ()
    """… and writable."""


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
    deny: tuple[str, ...] = ()
    """Further system calls that are refused, by name."""


class Limits(model.Noun, frozen=True, kw_only=True):
    """`[limits]`: the most that a sandbox may be given; None is no limit of the policy's own."""

    memory_mib: Whole | None = None
    cpus: Amount | None = None
    pids: Whole | None = None
    disk_mib: Whole | None = None
    timeout_s: Amount | None = None


class Environment(model.Noun, frozen=True, kw_only=True):
    """`[environment]`: which variables a caller may pass in, by name; `*` stands for any letters."""

    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    set: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables that every command gets; the caller's own of the same name win."""


class Secrets(model.Noun, frozen=True, kw_only=True):
    """`[secrets]`: which stored credentials may be bound, by name."""

    allow: tuple[str, ...] = ("*",)


class Least(model.Noun, frozen=True, kw_only=True):
    """`[isolation]`: what creation must not fall below."""

    minimum: model.Level = "process"
    """The least that creation may end up with; the caller's own demand is "namespaces" unless it says otherwise."""
    required: tuple[str, ...] = ()
    """Kernel features without which creation must fail: 'landlock', 'seccomp', 'cgroup_memory', …"""
    root_user: bool = True
    """Whether `user="root"` is allowed; that root is nobody outside."""


class Merged(model.Noun, frozen=True, kw_only=True):
    """What counts for one sandbox, in the groups of a policy file."""

    files: Files = Files()
    network: Network = Network()
    syscalls: Calls = Calls()
    limits: Limits = Limits()
    environment: Environment = Environment()
    secrets: Secrets = Secrets()
    isolation: Least = Least()


GROUPS: dict[str, type[msgspec.Struct]] = {
    "files": Files,
    "network": Network,
    "syscalls": Calls,
    "limits": Limits,
    "environment": Environment,
    "secrets": Secrets,
    "isolation": Least,
}

# Strictest first.
CHOICES: dict[tuple[str, str], tuple[object, ...]] = {
    ("files", "root"): ("read-only", "overlay"),
    ("network", "mode"): ("off", "rules", "open"),
    ("syscalls", "profile"): ("restrictive", "moderate", "permissive"),
    ("isolation", "minimum"): tuple(reversed(model.LEVELS)),
    ("isolation", "root_user"): (False, True),
}
DENYING = frozenset(
    {
        ("files", "protected"),
        ("files", "deny"),
        ("network", "deny"),
        ("network", "ask"),
        ("syscalls", "deny"),
        ("environment", "deny"),
        ("isolation", "required"),
    }
)
ALLOWING = frozenset(
    {
        ("files", "read"),
        ("files", "write"),
        ("network", "allow"),
        ("environment", "allow"),
        ("secrets", "allow"),
    }
)
TABLES = frozenset({("network", "resolve"), ("environment", "set")})

BUILT_IN: dict[str, Merged] = {
    "restrictive": Merged(
        files=Files(root="read-only"), syscalls=Calls(profile="restrictive"), isolation=Least(root_user=False)
    ),
    "moderate": Merged(),
    "permissive": Merged(network=Network(mode="open"), syscalls=Calls(profile="permissive")),
}
