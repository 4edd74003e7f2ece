"""What a pool must make and drop: arithmetic, without a clock, a loop or a sandbox.

    size          unclaimed ready members wanted: the spec's, or what autoscaling makes of it between `min` and `max`
    never more    members, made and in the making and ending, stay within `size` (`size + max_surge` while a rolling
                  update replaces some)
    slow start    1, 2, 4, … at once: every success widens the window by one, a failure closes it to one and waits
    refill rate   a token bucket, where the spec limits it
    stuck         who is not ready within `ready_grace_s` is dropped, and counts as a failure
    updates       OnReplenish keeps old members and makes new ones by the new version; Recreate drops the old at once;
                  Rolling replaces them, holding `size - max_unavailable` ready throughout. Until the new version was ready
                  once it is *unproven*: what claims take away is then made by the version before it, so that a version
                  that never becomes ready stops the update and not the pool

`plan` is a function of what is seen and of the state it returned before; `made`, `failed` and `arrived` fold what happened
into that state. The engine calls them at every change, and again at `look_at`; an idle pool is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

from cloche import errors, model
from cloche.stock import Condition, PoolSpec

MAX_BATCH = 32
"""Members in the making at once: more would compete with claims for the same processors, and be done no sooner."""
MAX_SIZE = 100_000
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0

BURST_S = 10
"""A pool is refilled within so many seconds: what it must hold is the largest number of claims in as many."""
HORIZON_S = 900
HALF_LIFE_S = 300.0
"""After so long without its like, a burst counts half."""
HEADROOM = 1.25
RESCALE_S = 1.0


class Member(NamedTuple):
    id: str
    version: str
    ready: bool
    since: float
    """When it became ready; when it was begun, while it is not."""


class State(NamedTuple):
    """What a plan remembers."""

    window: int = 1
    tokens: float = 1.0
    tokens_at: float = 0.0
    size: int = -1
    """The autoscaled one; -1 before the first look."""
    scaled_at: float = float("-inf")
    claimed_at: float = float("-inf")
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    problem: str = ""
    """What the last failure said."""
    proven: str = ""
    """The version that was last seen ready."""
    burst: tuple[tuple[int, int], ...] = ()
    """(second, claims) of the seconds with claims, oldest first."""


class Observed(NamedTuple):
    spec: PoolSpec
    version: str
    """What the template is now."""
    members: Sequence[Member]
    state: State
    ending: int = 0
    """Dropped, and not yet gone."""


class Plan(NamedTuple):
    create: int
    create_stable: int
    """Of the version before, while the new one is unproven."""
    drop: tuple[str, ...]
    size: int
    conditions: tuple[Condition, ...]
    state: State
    look_at: float | None


def check(spec: PoolSpec) -> None:
    """Say what is wrong with a pool before anything is made."""
    if spec.name is not None:
        model.check_name(spec.name)
    for field in ("size", "min", "max", "max_surge", "max_unavailable"):
        value = getattr(spec, field)
        if value is not None and not 0 <= value <= MAX_SIZE:
            raise _invalid(field, f"{field} is {value}; it must be 0 to {MAX_SIZE}")
    if spec.max is not None and spec.max < max(spec.min, 1):
        raise _invalid("max", f"max is {spec.max}, below {'min' if spec.min else '1'} ({max(spec.min, 1)})")
    if spec.max is not None and not spec.min <= spec.size <= spec.max:
        raise _invalid("size", f"size is {spec.size}, outside of min {spec.min} and max {spec.max}")
    if spec.max is None and spec.min:
        raise _invalid(
            "min", "min bounds autoscaling, which needs max", hint="give max too, or leave min out"
        )
    if spec.update == "Rolling" and not spec.max_surge and not spec.max_unavailable:
        raise _invalid(
            "max_surge", "a rolling update needs max_surge or max_unavailable above 0", hint="max_surge=1"
        )
    if spec.refill_per_s is not None and not 0 < spec.refill_per_s <= MAX_SIZE:
        raise _invalid("refill_per_s", f"refill_per_s is {spec.refill_per_s}; it must be above 0")
    if spec.scale_to_zero_after_s is not None and spec.min:
        raise _invalid(
            "scale_to_zero_after_s", f"a pool with min {spec.min} does not scale to zero", hint="set min to 0"
        )
    for field in ("ready_grace_s", "scale_to_zero_after_s"):
        model.check_seconds(field, getattr(spec, field))


def _invalid(field: str, message: str, hint: str = "see docs/concepts/pools.md") -> errors.ClocheError:
    return errors.error("pool_invalid", message, hint=hint, field=field)


# ── what happened ──────────────────────────────────────────────────────────────────────────────────


def made(state: State, version: str, current: str) -> State:
    """A member became ready. One of the version before says nothing about the new one."""
    if version != current:
        return state
    return state._replace(
        window=min(state.window + 1, MAX_BATCH), failures=0, retry_at=0.0, problem="", proven=version
    )


def failed(state: State, problem: str, now: float) -> State:
    failures = state.failures + 1
    delay = min(FIRST_RETRY_S * 2 ** min(failures - 1, 16), LAST_RETRY_S)
    return state._replace(window=1, failures=failures, retry_at=now + delay, problem=problem)


def arrived(state: State, now: float) -> State:
    """A claim came, whether or not it found a member."""
    second = int(now)
    burst = state.burst
    if burst and burst[-1][0] == second:
        burst = (*burst[:-1], (second, burst[-1][1] + 1))
    else:
        burst = (*burst, (second, 1))
    if burst[0][0] < second - HORIZON_S:
        burst = tuple(entry for entry in burst if entry[0] >= second - HORIZON_S)
    return state._replace(claimed_at=now, burst=burst)


# ── how many ───────────────────────────────────────────────────────────────────────────────────────


def demand(burst: Iterable[tuple[int, int]], now: float) -> float:
    """The largest burst that is remembered, each fading with its age."""
    entries = list(burst)
    most, start, inside = 0.0, 0, 0
    for second, count in entries:
        inside += count
        while entries[start][0] <= second - BURST_S:
            inside -= entries[start][1]
            start += 1
        most = max(most, inside * 0.5 ** (max(0.0, now - second) / HALF_LIFE_S))
    return most


def scale(spec: PoolSpec, state: State, now: float) -> State:
    """The size wanted now, in the state."""
    if _asleep(spec, state, now):
        return state._replace(size=0, scaled_at=now)
    if spec.max is None or state.size < 0:
        return state._replace(size=spec.size, scaled_at=now)
    if now - state.scaled_at < RESCALE_S and state.size:
        return state
    wanted = ceil(demand(state.burst, now) * HEADROOM)
    return state._replace(size=min(max(wanted, spec.min), spec.max), scaled_at=now)


def _asleep(spec: PoolSpec, state: State, now: float) -> bool:
    """Whether nobody has claimed for so long that nothing is kept. A new pool counts from its first look."""
    return spec.scale_to_zero_after_s is not None and now - state.claimed_at >= spec.scale_to_zero_after_s


# ── the plan ───────────────────────────────────────────────────────────────────────────────────────


def plan(observed: Observed, now: float) -> Plan:
    spec, state = observed.spec, observed.state
    if state.claimed_at == float("-inf"):
        state = state._replace(claimed_at=now)  # idleness counts from the beginning
    state = scale(spec, state, now)
    state, stuck = _give_up(observed, state, now)
    kept = [member for member in observed.members if member.id not in stuck]
    drop = [*stuck, *_excess(observed, kept, state)]
    dropped = set(drop)
    kept = [member for member in kept if member.id not in dropped]
    new, stable = _missing(observed, kept, state, len(drop))
    new, stable, state = _throttle(observed, kept, new, stable, state, now)
    return Plan(
        new, stable, tuple(drop), state.size, _conditions(observed, kept, state), state,
        _look_at(observed, kept, state, now),
    )  # fmt: skip


def _give_up(observed: Observed, state: State, now: float) -> tuple[State, list[str]]:
    grace = observed.spec.ready_grace_s
    stuck = [m for m in observed.members if not m.ready and now - m.since >= grace]
    for member in stuck:
        state = failed(state, f"member {member.id} was not ready within {grace:g} s", now)
    return state, [member.id for member in stuck]


def _is_old(observed: Observed, member: Member) -> bool:
    return member.version != observed.version


def _excess(observed: Observed, members: list[Member], state: State) -> list[str]:
    """Who must go: the outdated as the strategy says, then what is over the size, unready and newest first."""
    spec, old = observed.spec, [m for m in members if _is_old(observed, m)]
    going: list[str] = []
    if spec.update == "Recreate":
        going = [m.id for m in old]
    elif spec.update == "Rolling" and old:
        going = _outdated_to_spare(observed, members, old, state)
    gone = set(going)
    left = [m for m in members if m.id not in gone]
    surge = spec.max_surge if spec.update == "Rolling" and any(_is_old(observed, m) for m in left) else 0
    over = len(left) - state.size - surge
    if over > 0:
        left.sort(key=lambda m: (m.ready, -m.since))
        going += [m.id for m in left[:over]]
    return going


def _outdated_to_spare(
    observed: Observed, members: list[Member], old: list[Member], state: State
) -> list[str]:
    """As many outdated ones as leave `size - max_unavailable` ready; those in the making too, once they are not needed."""
    spare = max(0, sum(1 for m in members if m.ready) - max(0, state.size - observed.spec.max_unavailable))
    going = [] if _unproven(observed, state) else [m.id for m in old if not m.ready]
    return going + [m.id for m in sorted((m for m in old if m.ready), key=lambda m: m.since)[:spare]]


def _missing(observed: Observed, kept: list[Member], state: State, dropping: int) -> tuple[int, int]:
    """How many of the new version are wanted, and how many of the stable one instead."""
    spec, size = observed.spec, state.size
    old = [m for m in kept if _is_old(observed, m)]
    rolling = spec.update == "Rolling" and (bool(old) or _unproven(observed, state))
    room = size - len(kept) - observed.ending - dropping
    if not rolling:
        return max(0, room), 0
    room += spec.max_surge
    new = max(0, min(size - (len(kept) - len(old)), room))
    if not _unproven(observed, state):
        return new, 0
    attempts = max(1, spec.max_surge + spec.max_unavailable)
    new = min(new, max(0, attempts - (len(kept) - len(old))))
    stable = max(0, min(size - spec.max_unavailable - len(old), room - new))
    return new, stable


def _unproven(observed: Observed, state: State) -> bool:
    return bool(state.proven) and state.proven != observed.version


def _throttle(
    observed: Observed, kept: list[Member], new: int, stable: int, state: State, now: float
) -> tuple[int, int, State]:
    """No more at once than slow start and the refill rate allow. What fails is the new version: the stable one is not
    held up by it, and comes first, because claims wait for it."""
    spec = observed.spec
    making = [m for m in kept if not m.ready]
    stable = min(stable, MAX_BATCH - sum(1 for m in making if _is_old(observed, m)))
    window = 0 if now < state.retry_at else state.window
    new = min(new, max(0, window - sum(1 for m in making if not _is_old(observed, m))))
    if spec.refill_per_s is not None:
        capacity = max(1.0, spec.refill_per_s)
        tokens = min(capacity, state.tokens + max(0.0, now - state.tokens_at) * spec.refill_per_s)
        stable = min(stable, int(tokens + 1e-9))
        new = min(new, int(tokens + 1e-9) - stable)
        state = state._replace(tokens=tokens - new - stable, tokens_at=now)
    return new, stable, state


# ── what is said, and when to look again ───────────────────────────────────────────────────────────


def _conditions(observed: Observed, kept: list[Member], state: State) -> tuple[Condition, ...]:
    ready = sum(1 for m in kept if m.ready)
    found = [_ready_condition(observed, ready, state)]
    old = sum(1 for m in kept if _is_old(observed, m))
    if old or _unproven(observed, state):
        found.append(_update_condition(observed, old, state))
    return tuple(found)


def _ready_condition(observed: Observed, ready: int, state: State) -> Condition:
    words = f"{ready} of {state.size} members are ready"
    if state.size == 0:
        asleep = observed.spec.scale_to_zero_after_s is not None
        reason = "ScaledToZero" if asleep or not observed.spec.size else "Idle"
        return Condition(type="Ready", status="True", reason=reason, message="no members are wanted now")
    if ready >= state.size:
        return Condition(type="Ready", status="True", reason="MembersReady", message=words)
    if state.failures:
        return Condition(
            type="Ready", status="False", reason="MembersFailing",
            message=f"{words}; {state.failures} in a row failed, the last one with: {state.problem}",
        )  # fmt: skip
    return Condition(type="Ready", status="False", reason="Replenishing", message=words)


def _update_condition(observed: Observed, old: int, state: State) -> Condition:
    version = observed.version
    if observed.spec.update == "OnReplenish":
        words = f"{old} members of an older version are left until they are claimed"
        return Condition(type="Updated", status="False", reason="OnReplenish", message=words)
    if _unproven(observed, state) and state.failures:
        words = (
            f"version {version} has never become ready ({state.problem}); "
            f"the update has stopped, {old} members of the version before it stay"
        )
        return Condition(type="Updated", status="False", reason="NewVersionNotReady", message=words)
    words = f"{old} members are still of an older version than {version}"
    return Condition(type="Updated", status="False", reason="RollingUpdate", message=words)


def _look_at(observed: Observed, kept: list[Member], state: State, now: float) -> float | None:
    spec = observed.spec
    moments: list[float] = []
    if len(kept) < state.size and state.retry_at > now:
        moments.append(state.retry_at)
    if spec.refill_per_s is not None and len(kept) < state.size and state.tokens < 1:
        moments.append(now + (1 - state.tokens) / spec.refill_per_s)
    moments += [m.since + spec.ready_grace_s for m in kept if not m.ready]
    if spec.scale_to_zero_after_s is not None and state.size:
        moments.append(state.claimed_at + spec.scale_to_zero_after_s)
    if spec.max is not None and state.claimed_at > state.scaled_at:
        moments.append(state.scaled_at + RESCALE_S)
    elif spec.max is not None and state.size > spec.min:
        moments.append(now + HALF_LIFE_S / 10)
    return min(moments, default=None)
