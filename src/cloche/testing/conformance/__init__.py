"""What every driver must do, as a suite that anybody can run on theirs.

    report = conformance.run(MyDriver, gaps={"a_terminal_has_the_size_asked_for": "there are no terminals"})
    assert report.ok, report.text()

A *behaviour* is one promise, tried through a real engine by its effect: what arrived, what is left on the host, what a
program inside could reach. A *gap* is a behaviour that a driver is known not to have, with the reason. A gap that turns
out to hold is an error as well (stale), so that lists of gaps only ever shrink. With pytest each is a test of its own:

    @pytest.fixture(scope="module")
    def session():
        with conformance.Session(MyDriver) as session:
            yield session

    @pytest.mark.parametrize("behaviour", conformance.pytest_params(GAPS))
    def test_my_driver(session, behaviour):
        session.check(behaviour)

`registry` says how behaviours are written, `bench` what they work on; the other modules are the behaviours, one per group.
docs/guides/writing-a-driver.md is the way in for authors of drivers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche.testing.conformance import (  # noqa: F401, importing declares the behaviours
    contexts,
    execution,
    files,
    isolation,
    life,
    limits,
    states,
    terminals,
    timing,
)
from cloche.testing.conformance.bench import Bench, MakeDriver
from cloche.testing.conformance.registry import BEHAVIOURS, Behaviour, Broken

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "BEHAVIOURS",
    "Behaviour",
    "Bench",
    "Broken",
    "MakeDriver",
    "Report",
    "Session",
    "pytest_params",
    "run",
]

DEADLINE_S = 30.0  # a hang is a failure; nothing here takes a second on an idle machine


class Report(NamedTuple):
    """How a driver did."""

    passed: tuple[str, ...]
    failed: dict[str, str]
    """Behaviour → what went wrong."""
    gaps: dict[str, str]
    """Behaviour → the reason given; they were tried, and failed as expected."""
    stale: tuple[str, ...]
    """Gaps that are none: the behaviour holds, or there is no such behaviour."""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.stale

    def text(self) -> str:
        """The report for people, one line a finding."""
        lines = [
            f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.gaps)} gaps, {len(self.stale)} stale"
        ]
        lines += [f"failed  {name}: {why}" for name, why in self.failed.items()]
        lines += [f"stale   {name}: it is listed as a gap, and is none" for name in self.stale]
        lines += [f"gap     {name}: {reason}" for name, reason in self.gaps.items()]
        return "\n".join(lines)


class Session:
    """One driver, tried behaviour by behaviour, in an event loop of its own.

    Behaviours share an engine, each has sandboxes of its own. After a failure the engine is replaced, so that one failure
    does not become many.
    """

    def __init__(self, make_driver: MakeDriver, *, deadline_s: float = DEADLINE_S) -> None:
        self._make_driver = make_driver
        self._deadline_s = deadline_s
        self._bench: Bench | None = None

    def __enter__(self) -> Session:
        self._runner = asyncio.Runner()
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._close())
        finally:
            self._runner.__exit__(kind, problem, trace)

    def check(self, behaviour: Behaviour) -> None:
        """Try one behaviour; raises what it raised, `Broken` if it hung."""
        self._runner.run(self._check(behaviour))

    async def _check(self, behaviour: Behaviour) -> None:
        if self._bench is None:
            self._bench = await Bench(self._make_driver).__aenter__()
        try:
            async with asyncio.timeout(self._deadline_s):
                await behaviour.check(self._bench)
                await self._bench.clear()
            if self._bench.retired:
                await self._close()
        except BaseException as problem:
            await self._close()
            if isinstance(problem, TimeoutError):
                raise Broken(f"it did not come to an end in {self._deadline_s:g} s") from problem
            raise

    async def _close(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            await bench.__aexit__()


def run(
    make_driver: MakeDriver, *, gaps: Mapping[str, str] | None = None, only: Iterable[str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Report:  # fmt: skip
    """Try every behaviour (or `only` some) on a driver. `make_driver` is given the state directory to use."""
    gaps = gaps or {}
    chosen = [BEHAVIOURS[name] for name in (BEHAVIOURS if only is None else only)]
    passed: list[str] = []
    failed: dict[str, str] = {}
    with Session(make_driver, deadline_s=deadline_s) as session:
        for behaviour in chosen:
            try:
                session.check(behaviour)
            except Exception as problem:
                failed[behaviour.name] = (
                    f"{type(problem).__name__}: {problem}"
                    if not isinstance(problem, Broken)
                    else str(problem)
                )
            else:
                passed.append(behaviour.name)
    stale = [name for name in gaps if name in passed or name not in BEHAVIOURS]
    return Report(
        passed=tuple(name for name in passed if name not in gaps),
        failed={name: why for name, why in failed.items() if name not in gaps},
        gaps={name: reason for name, reason in gaps.items() if name in failed},
        stale=tuple(stale),
    )


def pytest_params(gaps: Mapping[str, str] | None = None) -> list[Any]:
    """A `pytest.param` per behaviour; gaps are strict expected failures, so a stale one fails the run."""
    import pytest

    gaps = gaps or {}
    unknown = [name for name in gaps if name not in BEHAVIOURS]
    if unknown:
        raise ValueError(f"gaps without a behaviour: {', '.join(unknown)}")
    return [
        pytest.param(
            behaviour, id=f"{behaviour.group}-{name}", marks=_gap(gaps[name]) if name in gaps else ()
        )
        for name, behaviour in BEHAVIOURS.items()
    ]


def _gap(reason: str) -> Any:
    import pytest

    return pytest.mark.xfail(reason=reason, strict=True)
