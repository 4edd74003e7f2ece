"""A log on a directory of its own, and a hand to damage it with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloche import events, settings
from cloche.audit import keys, verifying, writing


class Bench:
    """One state directory: write to its log, read its files, ask for a verdict."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "audit"

    def log(self, owner: str = "100:200", **more: Any) -> writing.Log:
        later = bool(more.pop("seal_later", False))
        clock = more.pop("clock", None)
        config = settings.Audit(**more)
        extra = {} if clock is None else {"clock": clock}
        return writing.Log(str(self.home), config, owner, seal_later=later, **extra)

    def write(self, log: writing.Log, count: int = 1, start: int = 0) -> None:
        for number in range(start, start + count):
            log.append(started(number))
        if log.flush():
            log.tend()

    def whole(self, count: int = 5, **more: Any) -> None:
        """A log of one writer that has closed it."""
        log = self.log(**more)
        self.write(log, count)
        log.close()
        assert log.problem is None

    def verify(self, head: str | None = None) -> verifying.Report:
        public = self.home / "keys" / keys.PUBLIC
        verifier = keys.verifier(str(public)) if public.exists() else None
        return verifying.verify(str(self.directory), verifier, head)

    @property
    def segments(self) -> list[Path]:
        return sorted(p for p in self.directory.iterdir() if p.name != "manifest.jsonl")

    @property
    def manifest(self) -> Path:
        return self.directory / "manifest.jsonl"


def started(number: int) -> events.Started:
    return events.Started(
        sandbox="k3", time=1000.0 + number, actor="uid:0", execution=f"e{number}", command=f"echo {number}"
    )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def benches(tmp_path: Path) -> Callable[[], Bench]:
    """As many as a property needs."""
    made: list[Bench] = []

    def make() -> Bench:
        made.append(Bench(tmp_path / str(len(made))))
        made[-1].home.mkdir()
        return made[-1]

    return make
