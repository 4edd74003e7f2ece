"""Simulated time: an `interfaces.Clock` that stands still until a test moves it.

clock = FakeClock()
box = engine.create(timeout_s=300)
clock.advance(300)          # both clocks go on: the sandbox is due
clock.jump(-86_400)         # somebody sets the wall clock back a day: nothing may expire or revive by it
"""

from __future__ import annotations


class FakeClock:
    """Wall and monotonic time, moved by hand."""

    def __init__(self, time: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._time = time
        self._monotonic = monotonic

    def __repr__(self) -> str:
        return f"FakeClock(time={self._time!r}, monotonic={self._monotonic!r})"

    def time(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Time passes."""
        if seconds < 0:
            raise ValueError(
                f"monotonic time cannot go back by {-seconds} s; jump() moves the wall clock alone"
            )
        self._time += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """The wall clock is set, forwards or back; monotonic time does not notice."""
        self._time += seconds
