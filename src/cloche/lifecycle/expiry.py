"""When a sandbox ends by itself.

Two limits, and the earlier one decides (at the same moment: the first):

* *timeout*: `timeout_s` after creation or the last `extend`. It counts always, paused or not.
* *idle*: `idle_timeout_s` after the last use. In use is: an execution runs, or bytes pass on streams, files or ports.
  Looking (`info`, `list`, `logs`, `events`) is no use. It does not count while paused, because a pause is asked for and
  is not neglect; resuming is a use.

All times are seconds of one clock, and it should be a monotonic one: a user who sets the wall clock must not end
sandboxes. The caller keeps `last_used_at` up to date; nothing here has a memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Reason = Literal["expired", "idle"]


class Life(NamedTuple):
    """What is known of a sandbox's life."""

    since: float
    """When it was created or last extended."""
    timeout_s: float | None = None
    idle_timeout_s: float | None = None
    last_used_at: float | None = None
    """When an execution last ended or a byte last passed; None is never, and idleness counts from `since`."""
    running: int = 0
    """Executions that have not ended."""
    paused: bool = False


class Expiry(NamedTuple):
    """The moment at which a sandbox ends, and the limit that ends it."""

    at: float
    reason: Reason


def expiry(life: Life) -> Expiry | None:
    """When the sandbox ends if nothing more happens to it; None is never."""
    limits = [limit for limit in (_timeout(life), _idle(life)) if limit is not None]
    return min(limits, key=lambda limit: limit.at, default=None)


def due(life: Life, now: float) -> Expiry | None:
    """The expiry that has come by `now`, if one has."""
    end = expiry(life)
    return end if end is not None and end.at <= now else None


def extend(life: Life, now: float, timeout_s: float | None) -> Life:
    """A new life of `timeout_s` from now, be it longer or shorter than what was left. To extend is a use."""
    return life._replace(since=now, timeout_s=timeout_s, last_used_at=now)


def next_deadline(lives: Iterable[Life]) -> float | None:
    """The earliest moment at which any of them is due: how long one timer may sleep."""
    ends = (expiry(life) for life in lives)
    return min((end.at for end in ends if end is not None), default=None)


def _timeout(life: Life) -> Expiry | None:
    return None if life.timeout_s is None else Expiry(life.since + life.timeout_s, "expired")


def _idle(life: Life) -> Expiry | None:
    if life.idle_timeout_s is None or life.running > 0 or life.paused:
        return None
    last_used = life.since if life.last_used_at is None else life.last_used_at
    return Expiry(last_used + life.idle_timeout_s, "idle")
