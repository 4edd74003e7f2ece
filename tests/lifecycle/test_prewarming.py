"""What is kept ready before anybody asks."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche import errors
from cloche.lifecycle import prewarming
from cloche.lifecycle.prewarming import Use


def test_without_a_budget_nothing_is_guessed():
    assert prewarming.plan([Use("a", 0)], 0, 1) == {}


def test_what_was_long_ago_is_forgotten():
    assert prewarming.plan([Use("a", 0)], 3, prewarming.HORIZON_S) == {}


def test_a_single_one_goes_to_what_was_used_last():
    assert prewarming.plan([Use("a", 0), Use("a", 1), Use("b", 2)], 1, 2) == {"b": 1}


def test_more_go_where_they_are_likelier_to_be_used():
    uses = [Use("a", n) for n in range(6)] + [Use("b", 7)]
    assert prewarming.plan(uses, 4, 8) == {"b": 1, "a": 3}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1000))), st.integers(0, 8))
def test_the_budget_is_never_exceeded_and_never_wasted(uses, budget):
    ordered = [Use(shape, at) for shape, at in sorted(uses, key=lambda use: use[1])]
    dealt = prewarming.plan(ordered, budget, 1000.0)
    recent = [use for use in ordered if 1000.0 - use.at < prewarming.HORIZON_S]
    assert sum(dealt.values()) == (budget if recent else 0)
    assert set(dealt) <= {use.shape for use in recent}


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(errors.InvalidInput) as caught:
        prewarming.preset("claude")
    assert "claude-code" in (caught.value.hint or "")
    assert prewarming.preset("codex").size >= 1
