"""The ladder of suspension, by properties: it goes down, in time, and only while nobody uses the sandbox."""

from hypothesis import given
from hypothesis import strategies as st

from cloche import model
from cloche.lifecycle import expiry, suspending

times = st.floats(min_value=0.1, max_value=1e6)
moments = st.floats(min_value=0, max_value=1e6)
phases = st.sampled_from(["running", "paused", "archived", "deleted", "lost"])
ladders = st.builds(
    model.Ladder, pause_after_s=st.none() | times, archive_after_s=st.none() | times.map(lambda t: t + 1e6)
)
lives = st.builds(
    expiry.Life,
    since=moments,
    last_used_at=st.none() | moments,
    running=st.integers(0, 2),
    paused=st.booleans(),
)
rests = st.builds(suspending.Rest, life=lives, ladder=ladders, phase=phases)


@given(rests, moments)
def test_what_is_used_or_was_put_to_rest_by_somebody_stays_where_it_is(rest, now):
    if rest.life.running or rest.life.paused or rest.phase not in ("running", "paused"):
        assert suspending.next_step(rest) is None
        assert suspending.due(rest, now) is None


@given(rests, moments)
def test_nothing_is_due_before_its_time_and_something_is_at_it(rest, now):
    step = suspending.next_step(rest)
    if step is None:
        assert suspending.due(rest, now) is None
        return
    assert (suspending.due(rest, now) is not None) == (step.at <= now)
    assert suspending.due(rest, step.at) is not None
    assert suspending.next_deadline([rest]) == step.at


@given(rests, moments)
def test_it_goes_down_and_the_lowest_rung_that_has_come_is_taken(rest, now):
    if rest.phase == "paused":
        assert suspending.due(rest, now) in (None, "archive")
    if rest.ladder.archive_after_s is not None and suspending.next_step(rest) is not None:
        assert suspending.due(rest, now + 1e9) == "archive"


@given(rests, moments)
def test_a_use_moves_every_rung_further_away(rest, now):
    before = suspending.next_step(rest)
    used = rest._replace(
        life=rest.life._replace(last_used_at=max(now, rest.life.last_used_at or 0, rest.life.since))
    )
    after = suspending.next_step(used)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.at >= before.at


def test_both_times_count_from_the_last_use():
    life = expiry.Life(since=0, last_used_at=100)
    ladder = model.Ladder(pause_after_s=10, archive_after_s=60)
    assert suspending.next_step(suspending.Rest(life, ladder, "running")) == (110, "pause")
    assert suspending.next_step(suspending.Rest(life, ladder, "paused")) == (160, "archive")
    assert suspending.due(suspending.Rest(life, ladder, "running"), 200) == "archive"
