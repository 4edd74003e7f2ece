"""What a sandbox may touch: profiles and modes, how layers of policy become one, and why something is refused.

    restrictive   read-only root, network off, no root user
    moderate      writable overlay root, network off until rules are given          (the default)
    permissive    moderate, and ptrace, and network open

None of them shows a home directory, the host's environment, or lets a process make namespaces.

    nouns       the groups of a policy (`files`, `network`, …), their fields and the profiles
    layers      `Policy` (what one source says) → `Layer` → `resolve` → `Merged` (what counts)
    paths       entries of `files.protected` and `files.deny`: names and patterns
    names, rules   hosts, and the lines of `[network]`: `decide` is the whole question
    globs       names of variables and secrets
    modes       what the command lines of coding agents need
    explaining  which rule decides about a path, host, system call, variable or secret, and where it stands

Pure: nothing here looks at the host. The rooms that most creations do not need are imported when they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from cloche import errors, model
from cloche.policy.layers import (
    Layer,
    Policy,
    Sources,
    check,
    lay,
    names_directories,
    rebound,
    resolve,
    stack,
)
from cloche.policy.layers import tighten as tighten_by
from cloche.policy.nouns import BUILT_IN as _BUILT_IN
from cloche.policy.nouns import (
    PROTECTED,
    REPORTED,
    Calls,
    Environment,
    Files,
    Least,
    Limits,
    Merged,
    Mode,
    Network,
    Root,
    Secrets,
    Syscalls,
)

__all__ = [
    "PROFILES",
    "PROTECTED",
    "REPORTED",
    "Calls",
    "Environment",
    "Files",
    "Layer",
    "Least",
    "Limits",
    "Merged",
    "Mode",
    "Network",
    "Policy",
    "Root",
    "Secrets",
    "Sources",
    "Syscalls",
    "bound",
    "check",
    "check_environment",
    "check_secrets",
    "check_timeout",

    "lay",
    "names_directories",
    "parse",
    "profile",
    "rebound",
    "resolve",
    "stack",
    "tighten",
    "tighten_by",
]  # fmt: skip

PROFILES = tuple(_BUILT_IN)


def profile(name: str) -> Merged:
    """A built-in profile."""
    return resolve(stack(profile=name))


def parse(data: Mapping[str, Any], *, base: Merged | None = None) -> Merged:
    """`base` with the given fields laid over it."""
    return lay(base or Merged(), check(data))


def version(rules: Merged) -> str:
    """Equal rules have equal versions."""
    import hashlib  # few ask

    return hashlib.sha256(msgspec.json.encode(rules, order="deterministic")).hexdigest()[:16]


def tighten(policy: Merged, ceiling: Merged) -> Merged:
    """What both allow."""
    import msgspec

    fields = msgspec.to_builtins(ceiling)
    return tighten_by(policy, fields)


# ── what enforcement asks ──────────────────────────────────────────────────────────────────────────


def bound(rules: Merged, spec: model.SandboxSpec) -> model.SandboxSpec:
    """What a sandbox is asked to be, within the policy's limits. Asking for more is refused; a default is lowered."""
    import msgspec

    plain, lowered = model.SandboxSpec(), {}
    for field in ("memory_mib", "cpus", "pids", "disk_mib"):
        most, asked = getattr(rules.limits, field), getattr(spec.resources, field)
        if most is not None and asked > most:
            if asked != getattr(plain.resources, field):
                raise _over(field, asked, most)
            lowered[field] = most
    if lowered:
        spec = msgspec.structs.replace(spec, resources=msgspec.structs.replace(spec.resources, **lowered))
    if rules.limits.timeout_s is not None and spec.timeout_s == plain.timeout_s:
        spec = msgspec.structs.replace(spec, timeout_s=min(plain.timeout_s or 0, rules.limits.timeout_s))
    check_timeout(rules, spec.timeout_s)
    preset = rules.environment.set
    check_environment(rules, [name for name, value in spec.env.items() if preset.get(name) != value])
    if rules.environment.set:
        spec = msgspec.structs.replace(spec, env={**rules.environment.set, **spec.env})
    return spec


def check_timeout(rules: Merged, timeout_s: float | None) -> None:
    """Whether a sandbox may live so long."""
    most = rules.limits.timeout_s
    if most is not None and (timeout_s is None or timeout_s > most):
        raise _over("timeout_s", "without end" if timeout_s is None else timeout_s, most)


def _over(field: str, asked: object, most: object) -> errors.ClocheError:
    return errors.error(
        "limit_refused",
        f"{field} is {asked}; limits.{field} of the policy allows {most}",
        hint=f"ask for {most} or less; `cloche policy show` says who set it",
        rule=f"limits.{field}",
    )


def check_environment(rules: Merged, names: Collection[str]) -> None:
    """Whether a caller may pass these variables in."""
    said = rules.environment
    if not names or (said.allow == ("*",) and not said.deny):
        return
    from cloche.policy import explaining

    for name in names:
        found = explaining.variable(rules, name)
        if found.verdict == "deny":
            raise errors.error(
                "environment_refused",
                f"the variable {name} may not be passed in: {found.field} decides",
                hint=f"leave it out; `cloche policy explain env {name}` says which rule and where it stands",
                rule=found.rule,
                field=found.field,
            )


def check_secrets(rules: Merged, names: tuple[str, ...]) -> None:
    """Whether these credentials may be bound."""
    if not names or rules.secrets.allow == ("*",):
        return
    from cloche.policy import explaining

    for name in names:
        if explaining.secret(rules, name).verdict == "deny":
            raise errors.error(
                "secret_refused",
                f"the secret {name!r} may not be used here: secrets.allow of the policy does not have it",
                hint=f"`cloche policy explain secret {name}` says where that stands",
                rule="secrets.allow",
            )
