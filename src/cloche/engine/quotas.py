"""Quotas: what one tenant may have at a time, and how fast it may make more.

They are held where sandboxes are made, below every wire, so there is one door to them: creation, claims, forks and what wakes an archived sandbox. Looking and
reserving are one step of the event loop: of a hundred that come at once, as many are let in as there is room for. A reservation is given back when the
sandbox is among the live ones, which are counted themselves, or has failed; nothing has to be kept in step with endings.

What counts is what is there, whoever made it: all live sandboxes of the tenant, paused ones whole, archived ones with their place and their disk. Members of a
pool are nobody's until they are claimed. Callers without a tenant count as one more, `-` in the settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cloche import errors, model, settings

_MINUTE_S = 60.0
_SLACK = 1e-9  # sums of fractions of a processor


class Amounts(NamedTuple):
    sandboxes: float = 0
    cpus: float = 0
    memory_mib: float = 0
    disk_mib: float = 0

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        return Amounts(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


_NOTHING = Amounts()


def of(resources: model.Resources, *, archived: bool = False) -> Amounts:
    """What a sandbox takes."""
    if archived:
        return Amounts(1, 0, 0, resources.disk_mib)
    return Amounts(1, resources.cpus, resources.memory_mib, resources.disk_mib)


def waking(resources: model.Resources) -> Amounts:
    """What an archived sandbox takes in addition when it runs."""
    return Amounts(0, resources.cpus, resources.memory_mib, 0)


class Quotas:
    def __init__(
        self,
        config: settings.Quotas,
        held: Callable[[str], Iterable[Amounts]],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._held = held
        self._clock = clock
        self._coming: dict[str, Amounts] = {}
        self._made: dict[str, deque[float]] = {}

    def check(self, tenant: str, wanted: Amounts, *, times: int = 1, besides: Iterable[Amounts] = ()) -> None:
        """Refuse what there is no room for. `besides`: what the tenant has that is not among the live."""
        limits = self._config.of(tenant)
        used = self._coming.get(tenant, _NOTHING)
        for held in (*self._held(tenant), *besides):
            used = used.plus(held)
        for name, now, more in zip(Amounts._fields, used, wanted, strict=True):
            limit = getattr(limits, name)
            if limit is not None and more and now + times * more > limit + _SLACK:
                raise _exceeded(name, now, times * more, limit)
        if wanted.sandboxes and limits.creations_per_minute is not None:
            self._check_rate(tenant, times, limits.creations_per_minute)

    @contextmanager
    def admit(self, tenant: str, wanted: Amounts, *, besides: Iterable[Amounts] = ()) -> Iterator[None]:
        """Check, and keep room for it meanwhile."""
        self.check(tenant, wanted, besides=besides)
        if wanted.sandboxes and self._config.of(tenant).creations_per_minute is not None:
            self._made.setdefault(tenant, deque()).append(self._clock())
        self._coming[tenant] = self._coming.get(tenant, _NOTHING).plus(wanted)
        try:
            yield
        finally:
            left = self._coming[tenant].plus(wanted, -1)
            self._coming[tenant] = left
            if not left.sandboxes and abs(left.cpus) < _SLACK and not left.memory_mib:
                del self._coming[tenant]

    def _check_rate(self, tenant: str, times: int, most: int) -> None:
        made, now = self._made.setdefault(tenant, deque()), self._clock()
        while made and now - made[0] >= _MINUTE_S:
            made.popleft()
        if not made:
            del self._made[tenant]
        if len(made) + times <= most:
            return
        # When enough of them are a minute old; never, if more are asked for at once than a minute has.
        after = made[len(made) + times - most - 1] + _MINUTE_S - now if times <= most else None
        raise _exceeded("creations_per_minute", len(made), times, most, after)


def _exceeded(
    name: str, used: float, wanted: float, limit: float, after: float | None = None
) -> errors.ClocheError:
    words = {
        "sandboxes": "sandboxes", "cpus": "processors", "memory_mib": "MiB of memory", "disk_mib": "MiB of disk",
        "creations_per_minute": "creations within a minute",
    }[name]  # fmt: skip
    details: dict[str, object] = {
        "quota": name,
        "limit": limit,
        "used": round(used, 3),
        "wanted": round(wanted, 3),
    }
    if after is not None:
        details["retry_after_s"] = max(after, 0.001)
    return errors.error(
        "quota_exceeded",
        f"the quota is {limit:g} {words}; {used:g} are used, and {wanted:g} more are wanted",
        hint="wait as long as Retry-After says"
        if after is not None
        else f"delete or archive some, ask for less, or have the operator raise quotas.{name}",
        **details,
    )
