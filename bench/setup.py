"""What all rows need: a state directory of their own, the sandbox under test, and the words for what holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cloche
from bench import baselines, records
from cloche import model
from cloche.sdk import portal

Measure = Callable[[], float]
WARM_UP = 10


class Bench:
    """One run: how much to measure, where to keep things, and what was found."""

    def __init__(
        self,
        *,
        home: str,
        quick: bool = False,
        full: bool = False,
        peers: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self.home = home
        self.scratch = home + ".scratch"
        self.quick = quick
        self.full = full
        self.peers = peers
        self.say = say
        self.rows: list[records.Row] = []
        self.skipped: list[records.Skipped] = []
        os.makedirs(self.scratch, exist_ok=True)

    def count(self, normal: int) -> int:
        return max(5, normal // 20) if self.quick else normal

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append(records.Skipped(name=name, reason=reason))
        self.say(f"skipped: {name}: {reason}")

    def attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """A baseline, or None and a word about why there is none."""
        try:
            return make()
        except (LookupError, OSError) as problem:
            self.skip(name, str(problem))
            return None


@contextmanager
def sandbox() -> Iterator[Any]:
    """A live sandbox with everything on, warmed by a few commands."""
    box = cloche.Sandbox(timeout_s=None)
    try:
        for _ in range(WARM_UP):
            box.exec(["true"], check=True)
        yield box
    finally:
        with suppress(cloche.ClocheError):
            box.delete()


def close_engine() -> None:
    """End the engine in this process, so that the next row starts with a fresh one."""
    portal.close()


def hold(row: records.Row, info: model.SandboxInfo) -> None:
    """Write into a row what was in force in the sandbox that it measured."""
    row.held = describe(info)
    row.whole = is_whole(info)


def describe(info: model.SandboxInfo) -> str:
    isolation = info.isolation
    parts = [isolation.level, "user namespace" if isolation.user_namespace else "NO user namespace"]
    parts.append("uid range" if isolation.uid_range else "one uid")
    parts.append(f"root {isolation.root}, network {isolation.network}")
    parts.append(f"seccomp ({info.profile})" if isolation.seccomp else "NO seccomp")
    parts.append(
        f"Landlock {isolation.landlock_abi}" if isolation.landlock_abi else "no Landlock in this kernel"
    )
    parts += [
        f"{name} {limit.value:g} {limit.enforcement} by {limit.by}" for name, limit in info.limits.items()
    ]
    return "; ".join(parts)


def is_whole(info: model.SandboxInfo) -> bool:
    """Everything that this kernel can give was on: no row is made fast by leaving a wall out."""
    limits = {"memory_mib", "pids", "cpus", "disk_mib"} <= info.limits.keys()
    held = all(limit.enforcement in ("enforced", "watched") for limit in info.limits.values())
    return (
        info.isolation.level == "namespaces"
        and info.isolation.user_namespace
        and info.isolation.seccomp
        and limits
        and held
    )


def interleave(rounds: int, *contestants: tuple[records.Series, Measure]) -> None:
    """Measure each in turn, round after round, so that a slow moment of the machine falls on all of them."""
    for _, measure in contestants:
        measure()
    for number in range(rounds):
        for offset in range(len(contestants)):  # who goes first changes: nobody always follows the costly one
            series, measure = contestants[(number + offset) % len(contestants)]
            series.add(measure())


def timed(work: Callable[[], object]) -> Measure:
    return lambda: baselines.elapsed(work)
