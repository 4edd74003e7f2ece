"""The nouns that wait and the nouns that stay: templates, pools and claims; snapshots and volumes.

As in `model`, one declaration serves the SDK, the wire, the store and the documentation, and `check()` says what is
wrong with a request before anything is made. Apart from `model` because a one-shot command needs none of it, and pays for
every struct it loads.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cloche import errors, model

# ── what waits: templates, pools, claims ───────────────────────────────────────────────────────────


class TemplateSpec(model.Noun, frozen=True, kw_only=True):
    """A named starting point. Its version is its content: equal bodies have equal versions, whatever they are called."""

    name: str
    description: str = ""
    image: str = "host"
    profile: str = "moderate"
    policy: dict[str, Any] = {}
    resources: model.Resources = model.DEFAULT_RESOURCES
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str = "user"
    volumes: dict[str, model.Mount] = {}
    """Where inside → what."""
    ports: tuple[int, ...] = ()
    """What it serves, for people and proxies to know; every port can be reached."""
    labels: dict[str, str] = {}
    startup: tuple[model.Action, ...] = ()
    contexts: tuple[str, ...] = ()
    """Languages whose interpreter runs before anybody asks."""
    preload: tuple[str, ...] = ()
    """Python modules imported into that interpreter before any user's code."""
    timeout_s: float | None = 300
    idle_timeout_s: float | None = None
    ladder: model.Ladder = model.Ladder()
    minimum_isolation: model.Level = "namespaces"
    driver: str | None = None

    @property
    def version(self) -> str:
        import hashlib  # few commands ask for a version, and this costs as much as all the nouns

        body = msgspec.json.encode(
            msgspec.structs.replace(self, name="", description=""), order="deterministic"
        )
        return hashlib.sha256(body).hexdigest()[:16]


class TemplateInfo(model.Noun, frozen=True, kw_only=True):
    spec: TemplateSpec
    version: str
    created_at: float
    builtin: bool = False
    warnings: tuple[str, ...] = ()
    """What a manifest asked for that has no meaning here."""


Update = Literal["OnReplenish", "Recreate", "Rolling"]


class PoolSpec(model.Noun, frozen=True, kw_only=True):
    """N sandboxes of one template kept warm. `size` is how many unclaimed ready ones are wanted."""

    name: str | None = None
    """Its template's, if not given."""
    template: str
    size: int = 1
    min: int = 0
    max: int | None = None
    """With `max`, autoscaling sets the size between `min` and `max` from the observed rate of claims."""
    update: Update = "OnReplenish"
    max_surge: int = 1
    max_unavailable: int = 0
    refill_per_s: float | None = None
    """At most so many creations a second; None is as fast as slow start allows."""
    ready_grace_s: float = 300
    """A member that is not ready by then is stuck, and removed."""
    scale_to_zero_after_s: float | None = None
    """Without a claim for so long, none is kept; the next claim starts cold and brings them back."""
    stay: bool = False
    """A pool that stays outlives the connection that made it, and its engine: the next one fills it again."""


class Quantiles(model.Noun, frozen=True, kw_only=True):
    """Exact, over the claims of this engine's life (the last 10,000)."""

    count: int = 0
    p50_ms: float = 0
    p90_ms: float = 0
    p99_ms: float = 0
    max_ms: float = 0


class Condition(model.Noun, frozen=True, kw_only=True):
    """One statement about a noun, and since when it is so. The spelling of the wire is made at the border."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: float = 0
    """Seconds since 1970; set by `lifecycle.conditions.settle`."""
    observed_generation: int = 0


class PoolInfo(model.Noun, frozen=True, kw_only=True):
    name: str
    spec: PoolSpec
    generation: int
    template_version: str
    size: int
    """What is wanted now: the spec's, or what autoscaling made of it."""
    ready: int
    making: int = 0
    outdated: int = 0
    members: tuple[str, ...] = ()
    """The ready ones, oldest first."""
    hits: int = 0
    misses: int = 0
    claim: Quantiles = Quantiles()
    conditions: tuple[Condition, ...] = ()

    @property
    def hit_rate(self) -> float | None:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None


class Requirements(model.Noun, frozen=True, kw_only=True):
    """What a warm sandbox must have to serve a claim; what is not said does not matter."""

    labels: dict[str, str] = {}
    minimum_isolation: model.Level | None = None
    resources: model.Resources | None = None
    """At least so much of each, when it was made."""
    template_version: str | None = None
    sandbox: str | None = None
    """This very member."""


class ClaimSpec(model.Noun, frozen=True, kw_only=True):
    """A request for one sandbox, and everything that differs from its template: bound to a warm one in one message."""

    name: str | None = None
    """Makes the claim idempotent: the same name and body is the same claim."""
    pool: str
    """A pool, else a template (then the start is cold, and the claim says why)."""
    env: dict[str, str] = {}
    files: dict[str, bytes] = {}
    secrets: tuple[str, ...] = ()
    policy: dict[str, Any] = {}
    """Laid over the template's; `{"network": {"allow": […]}}` for instance."""
    resources: dict[str, float] = {}
    """The fields of `Resources` that differ from the template's."""
    volumes: dict[str, model.Mount] = {}
    labels: dict[str, str] = {}
    requirements: Requirements = Requirements()
    timeout_s: float | None = 300
    idle_timeout_s: float | None = None
    wait_s: float = 10
    shutdown_time: float | None = None
    ttl_seconds_after_finished: int | None = None
    shutdown_policy: Literal["Delete", "Retain"] = "Delete"
    stay: bool = False


class ClaimInfo(model.Noun, frozen=True, kw_only=True):
    name: str
    spec: ClaimSpec
    sandbox: str | None
    """The one it is bound to; None once a retained claim outlives it."""
    warm: bool
    cold_reason: str | None = None
    template: str
    template_version: str
    created_at: float
    bound_at: float | None = None
    finished_at: float | None = None
    conditions: tuple[Condition, ...] = ()


# ── what stays: snapshots and volumes ──────────────────────────────────────────────────────────────


class SnapshotInfo(model.Noun, frozen=True, kw_only=True):
    """A sandbox's files at one moment."""

    id: str
    name: str | None
    sandbox: str
    created_at: float
    size_bytes: int
    files: int
    template: str
    template_version: str | None = None
    parent: str | None = None
    tags: tuple[str, ...] = ()
    spec: model.SandboxSpec
    """What a sandbox that starts from it is, unless its maker says otherwise."""

    @property
    def full_name(self) -> str | None:
        """The name as the engine knows it: unique over all tenants."""
        return f"{self.spec.tenant}/{self.name}" if self.spec.tenant and self.name else self.name


class VolumeSpec(model.Noun, frozen=True, kw_only=True):
    """A named directory that outlives sandboxes."""

    name: str
    size_mib: int = 1024
    labels: dict[str, str] = {}

    def check(self) -> None:
        model.check_name(self.name)
        if not 1 <= self.size_mib <= 1 << 24:
            raise errors.error(
                "limit_invalid", f"size_mib is {self.size_mib}; it must be 1 to {1 << 24}", field="size_mib"
            )


class VolumeInfo(model.Noun, frozen=True, kw_only=True):
    spec: VolumeSpec
    created_at: float
    used_bytes: int
    limit: model.Limit
    attached: dict[str, bool] = {}
    """Sandbox → whether it may write."""
