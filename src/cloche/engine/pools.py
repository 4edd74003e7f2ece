"""Pools: members made ahead of need, by `lifecycle.pools.plan`, each handed out once.

A member is a whole sandbox that nobody was told of: its contexts run, its startup actions are done. It leaves the pool in
one step of the event loop (`take`), so no two claims get the same one; whoever takes it answers for its end. What is made
and dropped is decided by the plan alone; this file acts on it, at every change and at the moment that the plan names. An
idle pool does nothing.

The sandbox that a keeper has waiting for the next `cloche run` is a member too, of a pool without a name: `Guesses` keeps
one such pool for each shape that `lifecycle.prewarming` expects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from cloche import errors, interfaces, model, stock
from cloche.engine import sandboxes
from cloche.lifecycle import claims as claiming
from cloche.lifecycle import conditions, prewarming
from cloche.lifecycle import pools as planning

_LOOK_DELAY_S = 0.003
"""A member that was taken is replaced a moment later: making one competes with the first command of the other."""
_PAUSE_S = 0.02
"""While more than one in `_RESERVE` is ready, refilling waits for such a pause in the claims: a burst is answered first."""
_RESERVE = 4
_MOST_TIMES = 10_000
_MOST_USES = 500
_REPLAN_S = 1.0
_USUAL_S = model.SandboxSpec().timeout_s  # what a policy lowers by itself; waiting does not count

Make = Callable[[model.SandboxSpec], Awaitable[sandboxes.Sandbox]]
Discard = Callable[[sandboxes.Sandbox, str], Coroutine[Any, Any, None]]


class Version(NamedTuple):
    """What members are made from."""

    id: str
    spec: model.SandboxSpec


class _Ready(NamedTuple):
    sandbox: sandboxes.Sandbox
    candidate: claiming.Candidate


class Pool:
    def __init__(
        self, name: str, spec: stock.PoolSpec, version: Version, make: Make, discard: Discard, clock: interfaces.Clock
    ) -> None:  # fmt: skip
        self.name = name
        self.spec = spec
        self.generation = 1
        self.version = version
        self.hits = self.misses = 0
        self._stable = version
        self._make = make
        self._discard = discard
        self._clock = clock
        self._state = planning.State(tokens_at=clock.monotonic())
        self._members: dict[str, planning.Member] = {}
        self._ready: dict[str, _Ready] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._waiters: deque[asyncio.Future[sandboxes.Sandbox]] = deque()
        self._times: deque[float] = deque(maxlen=_MOST_TIMES)
        self._conditions: tuple[stock.Condition, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._at = float("inf")
        self._changed = asyncio.Event()
        self.closed = False

    # ── what others see ─────────────────────────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        """Sandboxes that it has or is making."""
        return len(self._members) + self._leaving

    @property
    def _leaving(self) -> int:
        """Dropped, and not gone yet: ready ones, and those whose making was called off."""
        return len(self._ending) + sum(1 for key in self._making if key not in self._members)

    @property
    def working(self) -> Version:
        """What is known to become ready: in an update that has not shown it yet, the version before."""
        unproven = self._state.proven not in ("", self.version.id)
        return self._stable if unproven and self.spec.update == "Rolling" else self.version

    def info(self) -> stock.PoolInfo:
        ready = list(self._ready)
        return stock.PoolInfo(
            name=self.name, spec=self.spec, generation=self.generation, template_version=self.version.id,
            size=max(self._state.size, 0), ready=len(ready), making=len(self._making),
            outdated=sum(1 for m in self._members.values() if m.version != self.version.id), members=tuple(ready),
            hits=self.hits, misses=self.misses, claim=quantiles(self._times), conditions=self._conditions,
        )  # fmt: skip

    async def wait_ready(self, count: int | None, timeout_s: float) -> stock.PoolInfo:
        """Until so many are ready (None: as many as are wanted); `wait_timeout` says what was in the way."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            info = self.info()
            if self.closed:
                raise errors.error("pool_not_found", f"the pool {self.name!r} was deleted")
            if self._state.size >= 0 and info.ready >= (info.size if count is None else count):
                return info
            try:
                changed = self._changed
                await asyncio.wait_for(changed.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                words = "; ".join(c.message for c in info.conditions if c.status == "False")
                raise errors.error(
                    "wait_timeout", f"the pool {self.name!r} was not ready within {timeout_s:g} s: {words}"
                ) from None

    # ── claims ──────────────────────────────────────────────────────────────────────────────────

    def arrived(self) -> None:
        """A claim came."""
        self._state = planning.arrived(self._state, self._clock.monotonic())
        self._look_after_claims()

    def _look_after_claims(self) -> None:
        if _RESERVE * len(self._ready) <= self._state.size:
            self.look_soon()
            return
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self.look)

    def take(
        self, wanted: stock.Requirements, fits: Callable[[sandboxes.Sandbox], bool] = lambda _: True
    ) -> sandboxes.Sandbox | str:
        """A member, which is the caller's from now on, or why there is none. One that does not fit stays."""
        while True:
            choice = claiming.choose(
                self._candidates(), wanted, current=self.version.id, update=self.spec.update
            )
            if choice.id is None:
                return choice.reason
            if not fits(self._ready[choice.id].sandbox):
                return claiming.NO_MATCH.format(what="it was built differently")
            del self._members[choice.id]
            taken = self._ready.pop(choice.id).sandbox
            self._look_after_claims()
            if not taken.machine.ended.done():
                return taken

    def _candidates(self) -> Iterator[claiming.Candidate]:
        return (ready.candidate for ready in self._ready.values())

    async def next(self, wait_s: float) -> sandboxes.Sandbox | None:
        """A member that is in the making, when it is ready; None if there is none to wait for, or it does not come."""
        if len(self._making) <= len(self._waiters):
            return None
        coming: asyncio.Future[sandboxes.Sandbox] = asyncio.get_running_loop().create_future()
        self._waiters.append(coming)
        try:
            return await asyncio.wait_for(asyncio.shield(coming), wait_s)
        except (TimeoutError, asyncio.CancelledError) as problem:
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                self._end(coming.result(), "whoever waited for it went away")
            coming.cancel()
            if isinstance(problem, asyncio.CancelledError):
                raise
            return None
        except errors.ClocheError:
            return None  # the member failed; the claim may still start cold
        finally:
            with suppress(ValueError):
                self._waiters.remove(coming)

    def served(self, ms: float, *, warm: bool) -> None:
        self._times.append(ms)
        if warm:
            self.hits += 1
        else:
            self.misses += 1

    # ── the loop ────────────────────────────────────────────────────────────────────────────────

    def update(self, spec: stock.PoolSpec, version: Version) -> None:
        if version.id != self.version.id and self._state.proven == self.version.id:
            self._stable = self.version
        if spec.max != self.spec.max or spec.size != self.spec.size:
            self._state = self._state._replace(size=-1)
        self.spec, self.version = spec, version
        # What failed was another version, or another wish.
        self._state = self._state._replace(failures=0, retry_at=0.0, problem="")
        self.look()

    def look_soon(self) -> None:
        self._look_at(self._clock.monotonic() + _LOOK_DELAY_S)

    def _look_at(self, moment: float) -> None:
        if self.closed or (self._timer is not None and self._at <= moment):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = moment
        delay = max(0.0, moment - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self.look)

    def look(self) -> None:
        """One turn: plan, and act on it."""
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._timer, self._pause, self._at = None, None, float("inf")
        if self.closed:
            return
        now = self._clock.monotonic()
        seen = planning.Observed(
            self.spec, self.version.id, list(self._members.values()), self._state, self._leaving
        )
        plan = planning.plan(seen, now)
        self._state = plan.state
        self._conditions = conditions.settle(plan.conditions, self._conditions, self._clock.time())
        for member in plan.drop:
            self._drop(member)
        for _ in range(plan.create_stable):
            self._begin(self._stable)
        for _ in range(plan.create):
            self._begin(self.version)
        if plan.look_at is not None:
            self._look_at(plan.look_at)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _begin(self, version: Version) -> None:
        key = model.new_id()
        self._members[key] = planning.Member(key, version.id, False, self._clock.monotonic())
        task = asyncio.get_running_loop().create_task(self._make_one(key, version), name=f"make {self.name}")
        self._making[key] = task
        task.add_done_callback(lambda _: self._making.pop(key, None))

    async def _make_one(self, key: str, version: Version) -> None:
        try:
            made = await self._make(version.spec)
        except asyncio.CancelledError:
            self._members.pop(key, None)
            raise
        except Exception as problem:
            self._members.pop(key, None)
            self._failed(version, problem)
            return
        self._making.pop(key, None)
        if self._members.pop(key, None) is None or self.closed:
            await self._discard(made, "it was dropped while it was made")
            return
        made.template_version, made.origin = version.id, version.spec
        self._state = planning.made(self._state, version.id, self.version.id)
        self._add(made, version)
        self.look_soon()
        self._tell()

    def _failed(self, version: Version, problem: Exception) -> None:
        words = (
            problem.message
            if isinstance(problem, errors.ClocheError)
            else f"{type(problem).__name__}: {problem}"
        )
        if version.id == self.version.id:
            self._state = planning.failed(self._state, words, self._clock.monotonic())
        if self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(errors.error("startup_failed", words))
                waiter.exception()
        self.look_soon()

    def _add(self, made: sandboxes.Sandbox, version: Version) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(made)
                return
        now = self._clock.monotonic()
        self._members[made.id] = planning.Member(made.id, version.id, True, now)
        candidate = claiming.Candidate(
            made.id, version.id, made.spec.labels, made.machine.isolation.level, made.spec.resources, now
        )
        self._ready[made.id] = _Ready(made, candidate)
        made.machine.ended.add_done_callback(lambda _: self._lost(made))

    def _lost(self, made: sandboxes.Sandbox) -> None:
        """A member ended by itself."""
        if self._ready.pop(made.id, None) is not None:
            del self._members[made.id]
            self._end(made, "it ended while it waited")
            if not self.closed:
                self.look_soon()

    def _drop(self, key: str) -> None:
        self._members.pop(key, None)
        ready = self._ready.pop(key, None)
        if ready is not None:
            self._end(ready.sandbox, "the pool dropped it")
        elif key in self._making:
            self._making[key].cancel()

    def _end(self, sandbox: sandboxes.Sandbox, words: str) -> None:
        task = asyncio.get_running_loop().create_task(self._discard(sandbox, words), name=f"end {sandbox.id}")
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()
        if not self.closed:
            self.look_soon()

    async def close(self) -> None:
        """Drop everything, and wait until it is gone."""
        self.closed = True
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        making = list(self._making.values())
        for task in making:
            task.cancel()
        for key in list(self._ready):
            self._drop(key)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(errors.error("pool_not_found", f"the pool {self.name!r} was deleted"))
                waiter.exception()
        await asyncio.gather(*making, *list(self._ending), return_exceptions=True)
        self._members.clear()
        self._tell()


def quantiles(times: deque[float]) -> stock.Quantiles:
    """Exact: the value at each rank, no interpolation."""
    if not times:
        return stock.Quantiles()
    ordered = sorted(times)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return stock.Quantiles(
        count=len(ordered), p50_ms=at(0.5), p90_ms=at(0.9), p99_ms=at(0.99), max_ms=ordered[-1]
    )


class Guesses:
    """Sandboxes that wait for what is likely to be asked for next, one unnamed pool for each shape."""

    def __init__(self, budget: int, make: Make, discard: Discard, clock: interfaces.Clock) -> None:
        self._budget = budget
        self._make = make
        self._discard = discard
        self._clock = clock
        self._uses: deque[prewarming.Use] = deque(maxlen=_MOST_USES)
        self._specs: dict[Hashable, model.SandboxSpec] = {}
        self._pools: dict[Hashable, Pool] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._planned = float("-inf")

    @property
    def held(self) -> int:
        return sum(pool.held for pool in self._pools.values())

    def take(self, wanted: sandboxes.Wanted) -> sandboxes.Sandbox | None:
        pool = self._pools.get(_shape(wanted)) if _guessable(wanted) else None
        found = pool.take(claiming.NOTHING) if pool is not None else None
        return found if isinstance(found, sandboxes.Sandbox) else None

    def used(self, wanted: sandboxes.Wanted) -> None:
        """A sandbox of this shape was asked for: what is kept ready follows."""
        if self._budget <= 0 or not _guessable(wanted):
            return
        shape, now = _shape(wanted), self._clock.monotonic()
        again = bool(self._uses) and self._uses[-1].shape == shape and now - self._planned < _REPLAN_S
        self._specs[shape] = wanted.spec
        self._uses.append(prewarming.Use(shape, now))
        if again:
            return  # more of the same: the deal would be the same, and whoever takes one has it replaced
        self._planned = now
        dealt = prewarming.plan(self._uses, self._budget, now)
        for gone in [known for known in self._specs if known not in dealt]:
            self._specs.pop(gone)
            if gone in self._pools:
                self._close(self._pools.pop(gone))
        for likely, size in dealt.items():
            self._keep(likely, size)

    def _close(self, pool: Pool) -> None:
        task = asyncio.get_running_loop().create_task(pool.close(), name="guess again")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _keep(self, shape: Hashable, size: int) -> None:
        asked = self._specs[shape]
        spec = stock.PoolSpec(template=asked.template, size=size)
        pool = self._pools.get(shape)
        if pool is None:
            rules = {group: fields for group, fields in asked.policy.items() if group != "network"}
            bare = msgspec.structs.replace(
                asked, name=None, env={}, labels={}, secrets=(), stay=False, timeout_s=_USUAL_S, idle_timeout_s=None,
                policy=rules,
            )  # fmt: skip
            version = Version("guess", bare)
            pool = self._pools[shape] = Pool("", spec, version, self._make, self._discard, self._clock)
        if pool.spec != spec:
            pool.update(spec, pool.version)
        pool.look_soon()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), *self._closing)
        self._pools.clear()


def _guessable(wanted: sandboxes.Wanted) -> bool:
    """Whether one that nobody asked for yet could be it: files of one's own cannot be given afterwards."""
    spec, files = wanted.spec, wanted.rules.files
    own = spec.workspace is not None or spec.snapshot is not None or bool(files.read or files.write)
    return not (own or spec.startup or spec.volumes)


def _shape(wanted: sandboxes.Wanted) -> Hashable:
    """The rules are part of it, because files that they come from may have changed since."""
    return claiming.shape(wanted.spec), claiming.shape_of_rules(wanted.rules)
