"""What a sandbox's conditions say: the types and reasons of kubernetes-sigs/agent-sandbox v1beta1, for our phases.

    phase      Ready                                Suspended
    running    True   DependenciesReady             False  NotSuspended
    paused     False  SandboxSuspended              True   SandboxSuspended
    archived   False  SandboxSuspended              True   SandboxSuspended
    deleted    False  DependenciesNotReady          False  NotSuspended
      expired  False  SandboxExpired                False  NotSuspended
    lost       False  DependenciesNotReady          False  NotSuspended

Reasons that speak of pods (`PodTerminated`, `PodFailed`, `PodScheduled`, …) belong to a cluster and do not appear here.
That leaves upstream no reason for Suspended=True, so we lend it the one that Ready has at that time; and `Finished`,
which has pod reasons only, is absent. `Suspended` is always present and toggles, it is never removed.

`evaluate` says what is true now; `settle` gives it the time since when, by the rule of Kubernetes: the transition time
moves when the *status* changes, not when reason or message do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from cloche import model
from cloche.stock import Condition

Status = Literal["True", "False", "Unknown"]
Type = Literal["Ready", "Suspended"]

MAX_MESSAGE = 32768  # what the API server takes
READY_REASONS = frozenset({"DependenciesReady", "DependenciesNotReady", "SandboxSuspended", "SandboxExpired"})
SUSPENDED_REASONS = frozenset({"NotSuspended", "SandboxSuspended"})


def evaluate(
    phase: model.Phase, *, expired: bool = False, detail: str | None = None, generation: int = 0
) -> tuple[Condition, ...]:
    """What is true of a sandbox in `phase`. `expired`: it ended by its own limits; `detail`: why it is gone."""
    suspended = phase in ("paused", "archived")
    return (
        _condition(generation, "Ready", *_ready(phase, expired, detail)),
        _condition(
            generation,
            "Suspended",
            "True" if suspended else "False",
            "SandboxSuspended" if suspended else "NotSuspended",
            "Sandbox is suspended" if suspended else "Sandbox is not suspended",
        ),
    )


def settle(wanted: Iterable[Condition], previous: Iterable[Condition], now: float) -> tuple[Condition, ...]:
    """`wanted`, each with its time: that of the previous condition of the same type and status, else `now`."""
    since = {(known.type, known.status): known.last_transition_time for known in previous}
    return tuple(
        msgspec.structs.replace(
            condition, last_transition_time=since.get((condition.type, condition.status), now)
        )
        for condition in wanted
    )


def _ready(phase: model.Phase, expired: bool, detail: str | None) -> tuple[Status, str, str]:
    match phase:
        case "running":
            return "True", "DependenciesReady", "Sandbox is ready"
        case "paused" | "archived":
            return "False", "SandboxSuspended", "Sandbox is suspended"
        case "deleted" if expired:
            return "False", "SandboxExpired", "Sandbox has expired"
        case "deleted":
            return "False", "DependenciesNotReady", detail or "Sandbox has been deleted"
        case "lost":
            return "False", "DependenciesNotReady", detail or "Sandbox has been lost"


def _condition(generation: int, type_: Type, status: Status, reason: str, message: str) -> Condition:
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE],
        observed_generation=generation,
    )
