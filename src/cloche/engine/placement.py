"""Which driver makes a sandbox: the strongest that this host runs, never below what was asked for.

Drivers are started on first need and tried strongest first. When one cannot run here its reason is kept, and told if
none is left; going below the demanded level is a refusal, not a fallback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cloche import errors, interfaces, model


class Placement:
    def __init__(self, factories: Sequence[tuple[str, Callable[[], interfaces.Driver]]]) -> None:
        self._factories = dict(factories)
        self._started: dict[str, interfaces.Driver] = {}
        self._reasons: dict[str, errors.ClocheError] = {}
        self._lock = asyncio.Lock()

    @property
    def started(self) -> list[interfaces.Driver]:
        return list(self._started.values())

    async def choose(self, minimum: model.Level, name: str | None = None) -> interfaces.Driver:
        if name is not None and name not in self._factories:
            raise errors.error(
                "argument_invalid",
                f"there is no driver {name!r}",
                hint=f"one of {', '.join(self._factories)}",
            )
        for candidate in [name] if name is not None else list(self._factories):
            driver = await self._start(candidate)
            if driver is not None and model.LEVELS.index(driver.level) >= model.LEVELS.index(minimum):
                return driver
        raise self._refusal(minimum, name)

    async def _start(self, name: str) -> interfaces.Driver | None:
        if name in self._started:
            return self._started[name]
        async with self._lock:
            if name in self._started or name in self._reasons:
                return self._started.get(name)
            driver = self._factories[name]()
            try:
                await driver.start()
            except errors.NotSupported as problem:
                self._reasons[name] = problem
                return None
            self._started[name] = driver
            return driver

    def _refusal(self, minimum: model.Level, name: str | None) -> errors.ClocheError:
        reasons = "; ".join(f"{driver}: {problem.message}" for driver, problem in self._reasons.items())
        if name is not None and name in self._reasons:
            return self._reasons[name]
        text = f"no isolation of at least {minimum!r} can be had on this host" + (
            f" ({reasons})" if reasons else ""
        )
        return errors.error(
            "isolation_too_low", text,
            hint="run `cloche doctor`; to accept less, say minimum_isolation='process'",
        )  # fmt: skip

    async def close(self) -> None:
        await asyncio.gather(*(driver.close() for driver in self._started.values()))
        self._started.clear()
