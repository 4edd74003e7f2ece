"""Who gets which sandbox, what of a claim a warm one can take on, when a claim ends, and what its conditions say.

*Choosing.* Of the ready members that meet the claim's requirements the oldest goes first: it has been warm longest and would
be the first to be replaced anyway. In a rolling update members of the current version go first, so that the update is
seen as soon as it works; outdated ones still serve. A pool that recreates never hands out an outdated one.

*Binding.* Env, files, secrets, labels, times, network rules, volumes and the limits that a cgroup holds are bound to a warm
sandbox. What decides how it was *built* (root, filter, disk, image, driver, workspace) cannot be; `unbindable` names the
first such difference, and the claim starts cold with that as its reason.

*Ending.* A claim ends at its `shutdown_time`, or `ttl_seconds_after_finished` after its sandbox did, whichever is first.
`Delete` then removes the claim; `Retain` keeps it, without its sandbox.

*Conditions* are agent-sandbox's (v1beta1): `Ready` is the sandbox's own while it has one; `Finished` appears when it has
ended. Upstream's reasons for `Finished` are a pod's; here it is the reason for which the sandbox is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from cloche import model, policy
from cloche.stock import ClaimSpec, Condition, Requirements, Update

Ended = Literal["expired", "deleted", "lost"]

NO_POOL = "there is no pool {name!r}; its template was started cold"
NO_MEMBER = "the pool had no ready member"
NO_MATCH = "no ready member meets the requirements: {what}"


class Candidate(NamedTuple):
    id: str
    version: str
    labels: dict[str, str]
    level: model.Level
    resources: model.Resources
    ready_at: float


class Choice(NamedTuple):
    id: str | None
    reason: str = ""
    """Why there is none."""


def choose(
    candidates: Iterable[Candidate],
    wanted: Requirements,
    *,
    current: str,
    update: Update = "OnReplenish",
) -> Choice:
    """The member that serves a claim; candidates come oldest first."""
    second: str | None = None
    reason = NO_MEMBER
    anything = wanted == NOTHING
    for candidate in candidates:
        lacking = None if anything else lacks(candidate, wanted)
        if lacking is None and candidate.version == current:
            return Choice(candidate.id)
        if lacking is not None:
            reason = NO_MATCH.format(what=lacking)
        elif update == "OnReplenish":
            return Choice(candidate.id)
        elif update == "Rolling" and second is None:
            second = candidate.id
    return Choice(second, "" if second is not None else reason)


def lacks(candidate: Candidate, wanted: Requirements) -> str | None:
    """The first requirement that a candidate does not meet, in words."""
    if wanted.sandbox is not None and candidate.id != wanted.sandbox:
        return f"it is not {wanted.sandbox}"
    if wanted.template_version is not None and candidate.version != wanted.template_version:
        return f"template version {wanted.template_version}"
    least = wanted.minimum_isolation
    if least is not None and model.LEVELS.index(candidate.level) < model.LEVELS.index(least):
        return f"isolation of at least {least}"
    for key, value in wanted.labels.items():
        if candidate.labels.get(key) != value:
            return f"label {key}={value}"
    if wanted.resources is not None:
        for field in model.Resources.__struct_fields__:
            least_of = getattr(wanted.resources, field)
            if getattr(candidate.resources, field) < least_of:
                return f"{field} of at least {least_of:g}"
    return None


NOTHING = Requirements()


# ── binding ────────────────────────────────────────────────────────────────────────────────────────

# What a running sandbox can take on. Everything else of its spec was decided when it was built.
BOUND_LATE = frozenset(
    {
        "name", "env", "labels", "secrets", "volumes", "timeout_s", "idle_timeout_s", "stay", "inherit", "policy",
        "resources", "ladder", "cwd", "user", "tenant",
    }
)  # fmt: skip


def unbindable(built: model.SandboxSpec, wanted: model.SandboxSpec) -> str | None:
    """The first thing of `wanted` that a sandbox built as `built` cannot take on any more; None if it can be all of it."""
    for field in built.__struct_fields__:
        if field not in BOUND_LATE and getattr(built, field) != getattr(wanted, field):
            return f"{field} differs"
    if built.resources.disk_mib != wanted.resources.disk_mib:
        return "disk_mib differs, and a disk is made with its sandbox"
    return None


# What of a policy is settled when a sandbox is built; the rest is asked when something is bound or done.
_FIXED_GROUPS = ("files", "syscalls", "isolation")


def fixed_rules(built: policy.Merged, wanted: policy.Merged) -> str | None:
    """The first group of the policy that differs and is settled when a sandbox is built."""
    for group in _FIXED_GROUPS:
        if getattr(built, group) != getattr(wanted, group):
            return f"the policy's {group} differ from the template's"
    return None


def shape(spec: model.SandboxSpec) -> tuple[Any, ...]:
    """What two specs must agree in for one sandbox to stand in for the other."""
    fixed = [getattr(spec, field) for field in spec.__struct_fields__ if field not in BOUND_LATE]
    groups = sorted((group, repr(fields)) for group, fields in spec.policy.items() if group != "network")
    return (repr(fixed), repr(groups), spec.resources.disk_mib)


def shape_of_rules(rules: policy.Merged) -> str:
    return repr([getattr(rules, group) for group in _FIXED_GROUPS])


# ── ending ─────────────────────────────────────────────────────────────────────────────────────────


class End(NamedTuple):
    """What becomes of a claim whose time has come."""

    at: float
    remove: bool
    """The claim too, not only its sandbox."""


def end(spec: ClaimSpec, finished_at: float | None) -> End | None:
    """When the claim ends by its own rules (wall time), and how; None is never."""
    moments = []
    if spec.shutdown_time is not None:
        moments.append(spec.shutdown_time)
    if spec.ttl_seconds_after_finished is not None and finished_at is not None:
        moments.append(finished_at + spec.ttl_seconds_after_finished)
    return End(min(moments), spec.shutdown_policy == "Delete") if moments else None


# ── conditions ─────────────────────────────────────────────────────────────────────────────────────


def ready(detail: str = "Sandbox is ready") -> Condition:
    return Condition(type="Ready", status="True", reason="DependenciesReady", message=detail)


def expired() -> tuple[Condition, ...]:
    return (_not_ready("ClaimExpired", "Claim expired. Sandbox cleanup initiated."),)


def missing_pool(name: str) -> tuple[Condition, ...]:
    return (_not_ready("WarmPoolNotFound", f'SandboxWarmPool "{name}" not found'),)


def missing_template(name: str) -> tuple[Condition, ...]:
    return (_not_ready("TemplateNotFound", f'SandboxTemplate "{name}" not found'),)


def finished(how: Ended, detail: str) -> tuple[Condition, ...]:
    """The sandbox has ended: by its own limits, by somebody, or by accident."""
    if how == "expired":
        words = "Underlying Sandbox resource has expired independently of the Claim."
        first = _not_ready("SandboxExpired", words)
    else:
        first = _not_ready(
            "SandboxMissing", f"Sandbox does not exist: {detail}" if detail else "Sandbox does not exist"
        )
    return (
        first,
        Condition(type="Finished", status="True", reason=first.reason, message=detail or first.message),
    )


def _not_ready(reason: str, message: str) -> Condition:
    return Condition(type="Ready", status="False", reason=reason, message=message)
