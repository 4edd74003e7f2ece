import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import interfaces
from cloche.lifecycle import expiry
from cloche.lifecycle.expiry import Expiry, Life
from cloche.testing.clocks import FakeClock

TIMES = st.integers(0, 10_000).map(float)
LIMITS = st.none() | st.integers(1, 5_000).map(float)
LIVES = st.builds(
    Life,
    since=TIMES,
    timeout_s=LIMITS,
    idle_timeout_s=LIMITS,
    last_used_at=st.none() | TIMES,
    running=st.integers(0, 3),
    paused=st.booleans(),
)


def test_without_limits_it_never_ends():
    assert expiry.expiry(Life(since=0)) is None
    assert expiry.due(Life(since=0), now=1e12) is None


def test_the_timeout_counts_from_creation_and_is_due_to_the_second():
    life = Life(since=10, timeout_s=300)
    assert expiry.expiry(life) == Expiry(310, "expired")
    assert expiry.due(life, 309.999) is None
    assert expiry.due(life, 310) == Expiry(310, "expired")


def test_an_extension_counts_from_its_own_moment_longer_or_shorter():
    life = Life(since=0, timeout_s=300)
    assert expiry.expiry(expiry.extend(life, 200, 600)) == Expiry(800, "expired")
    assert expiry.expiry(expiry.extend(life, 200, 5)) == Expiry(205, "expired")
    assert expiry.expiry(expiry.extend(life, 200, None)) is None


def test_idleness_counts_from_the_last_use_or_else_from_creation():
    assert expiry.expiry(Life(since=5, idle_timeout_s=10)) == Expiry(15, "idle")
    assert expiry.expiry(Life(since=5, idle_timeout_s=10, last_used_at=7)) == Expiry(17, "idle")


def test_a_running_execution_holds_off_idleness_but_not_the_timeout():
    life = Life(since=0, timeout_s=300, idle_timeout_s=10, last_used_at=0, running=1)
    assert expiry.expiry(life) == Expiry(300, "expired")


def test_the_timeout_counts_while_paused_and_idleness_does_not():
    life = Life(since=0, timeout_s=300, idle_timeout_s=10, paused=True)
    assert expiry.expiry(life) == Expiry(300, "expired")


def test_at_the_same_moment_the_timeout_is_the_reason():
    assert expiry.expiry(Life(since=0, timeout_s=10, idle_timeout_s=10)) == Expiry(10, "expired")


@given(LIVES, TIMES)
def test_it_is_due_exactly_from_its_moment_on(life, now):
    end = expiry.expiry(life)
    assert (expiry.due(life, now) is not None) == (end is not None and now >= end.at)


@given(LIVES, TIMES)
def test_what_is_due_stays_due(life, now):
    if expiry.due(life, now):
        assert expiry.due(life, now + 1) == expiry.due(life, now)


@given(LIVES, TIMES)
def test_using_it_never_brings_the_end_nearer(life, used_at):
    end = expiry.expiry(life)
    latest = max(used_at, life.since, life.last_used_at or 0)
    later = expiry.expiry(life._replace(last_used_at=latest))
    assert end is None or (later is not None and later.at >= end.at)


@given(LIVES)
def test_a_pause_or_an_execution_never_brings_the_end_nearer(life):
    end = expiry.expiry(life._replace(paused=False, running=0))
    for held in (life._replace(paused=True), life._replace(running=1)):
        later = expiry.expiry(held)
        assert later is None or (end is not None and later.at >= end.at)


@given(LIVES, LIMITS)
def test_no_life_outlasts_its_timeout(life, timeout_s):
    end = expiry.expiry(life._replace(timeout_s=timeout_s))
    if timeout_s is not None:
        assert end is not None
        assert end.at <= life.since + timeout_s


@given(st.lists(LIVES, max_size=8))
def test_nothing_is_due_before_the_next_deadline_and_something_is_at_it(lives):
    deadline = expiry.next_deadline(lives)
    if deadline is None:
        assert not any(expiry.expiry(life) for life in lives)
    else:
        assert not any(expiry.due(life, deadline - 0.5) for life in lives)
        assert any(expiry.due(life, deadline) for life in lives)


def test_a_clock_that_is_set_neither_ends_nor_revives():
    clock = FakeClock()
    life = Life(since=clock.monotonic(), timeout_s=300)
    clock.jump(1e6)
    assert expiry.due(life, clock.monotonic()) is None
    clock.advance(300)
    clock.jump(-2e6)
    assert expiry.due(life, clock.monotonic()) is not None


def test_the_fake_clock_is_a_clock_that_goes_one_way():
    clock: interfaces.Clock = FakeClock(time=100, monotonic=5)
    assert (clock.time(), clock.monotonic()) == (100, 5)
    fake = FakeClock(time=100, monotonic=5)
    fake.advance(2.5)
    assert (fake.time(), fake.monotonic()) == (102.5, 7.5)
    with pytest.raises(ValueError):
        fake.advance(-1)
    assert repr(fake) == "FakeClock(time=102.5, monotonic=7.5)"
