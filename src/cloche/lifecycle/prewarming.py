"""What to have ready before anybody asks, guessed from what was asked for: speculative prewarming, and presets.

A *shape* is everything about a sandbox that cannot be bound late (`claims.shape`). Whoever asked for one lately will ask for
its like again, soon, so each use counts half after `HALF_LIFE_S` and nothing after `HORIZON_S`. The budget (how many
sandboxes may wait in all) is dealt out one by one, each to the shape whose next use is least provided for; a single one
goes to the shape that was used last, because a person at a terminal repeats themself. Nothing is guessed with a budget of 0,
which is how an owner opts out.

A *preset* is what one kind of agent is known to do to a pool: how many sandboxes its first minute takes, how long its
pauses are, and what its commands weigh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from cloche import errors, model

HORIZON_S = 900.0
HALF_LIFE_S = 120.0


class Use(NamedTuple):
    shape: Hashable
    at: float


def plan(uses: Iterable[Use], budget: int, now: float) -> dict[Hashable, int]:
    """Shape → how many to keep ready. `uses` come oldest first."""
    recent = [use for use in uses if now - use.at < HORIZON_S]
    if budget <= 0 or not recent:
        return {}
    weights: dict[Hashable, float] = {}
    for use in recent:
        weights[use.shape] = weights.get(use.shape, 0.0) + 0.5 ** (max(0.0, now - use.at) / HALF_LIFE_S)
    dealt = {recent[-1].shape: 1}
    for _ in range(budget - 1):
        needy = max(weights, key=lambda shape: weights[shape] / (1 + dealt.get(shape, 0)))
        dealt[needy] = dealt.get(needy, 0) + 1
    return dealt


class Preset(NamedTuple):
    """How one kind of agent uses sandboxes."""

    size: int
    max: int
    scale_to_zero_after_s: float
    resources: model.Resources
    timeout_s: float
    idle_timeout_s: float


# Coding agents hold one sandbox for a session and take a few more for parallel tools and sub-agents; their commands are
# builds and tests, so memory and processes are those of a compiler. A session that rests for half an hour is over.
_CODING = model.Resources(memory_mib=2048, cpus=2, pids=1024, disk_mib=4096)
PRESETS: dict[str, Preset] = {
    "claude-code": Preset(3, 12, 1800, _CODING, 3600, 1800),  # several sub-agents at a time
    "codex": Preset(2, 8, 1800, _CODING, 3600, 1800),
    "gemini": Preset(2, 6, 1800, _CODING, 3600, 1800),
}


def preset(name: str) -> Preset:
    try:
        return PRESETS[name]
    except KeyError:
        raise errors.error(
            "argument_invalid", f"there is no preset {name!r}", hint=errors.nearest(name, PRESETS)
        ) from None
