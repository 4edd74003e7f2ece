from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import model
from cloche.lifecycle import conditions
from cloche.stock import Condition

PHASES: tuple[model.Phase, ...] = get_args(model.Phase)
STATUSES: st.SearchStrategy[conditions.Status] = st.sampled_from(["True", "False", "Unknown"])
LISTS = st.dictionaries(st.sampled_from(["Ready", "Suspended", "Finished"]), STATUSES).map(
    lambda chosen: tuple(
        Condition(type=type_, status=status, reason="R", message="m") for type_, status in chosen.items()
    )
)
TIMES = st.integers(1, 10_000).map(float)


def said(phase: model.Phase, **observed) -> dict[str, tuple[str, str, str]]:
    return {
        found.type: (found.status, found.reason, found.message)
        for found in conditions.evaluate(phase, **observed)
    }


@pytest.mark.parametrize(
    ("phase", "observed", "ready", "suspended"),
    [
        ("running", {}, ("True", "DependenciesReady"), ("False", "NotSuspended")),
        ("paused", {}, ("False", "SandboxSuspended"), ("True", "SandboxSuspended")),
        ("deleted", {}, ("False", "DependenciesNotReady"), ("False", "NotSuspended")),
        ("deleted", {"expired": True}, ("False", "SandboxExpired"), ("False", "NotSuspended")),
        ("lost", {}, ("False", "DependenciesNotReady"), ("False", "NotSuspended")),
    ],
    ids=["running", "paused", "deleted", "expired", "lost"],
)
def test_each_phase_says_what_the_table_says(phase, observed, ready, suspended):
    found = said(phase, **observed)
    assert found["Ready"][:2] == ready
    assert found["Suspended"][:2] == suspended


def test_the_table_in_the_head_is_complete():
    table = (conditions.__doc__ or "").split("\n\n")[1]
    assert all(phase in table for phase in PHASES)
    assert all(reason in table for reason in conditions.READY_REASONS | conditions.SUSPENDED_REASONS)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("expired", [False, True])
def test_types_and_reasons_are_upstreams_and_none_speaks_of_pods(phase, expired):
    found = said(phase, expired=expired)
    assert list(found) == ["Ready", "Suspended"]
    assert found["Ready"][1] in conditions.READY_REASONS
    assert found["Suspended"][1] in conditions.SUSPENDED_REASONS
    assert "Pod" not in repr(found)


def test_messages_that_are_compared_literally():
    assert said("paused")["Ready"][2] == "Sandbox is suspended"
    assert said("running")["Suspended"][2] == "Sandbox is not suspended"
    assert said("deleted", expired=True)["Ready"][2] == "Sandbox has expired"


def test_why_it_is_gone_is_the_message_within_what_an_api_server_takes():
    assert said("lost", detail="its engine ended")["Ready"][2] == "its engine ended"
    assert len(said("lost", detail="x" * 40_000)["Ready"][2]) == 32768


def test_every_condition_carries_the_generation():
    assert {found.observed_generation for found in conditions.evaluate("running", generation=7)} == {7}


@given(LISTS, LISTS, TIMES, TIMES)
def test_the_time_moves_exactly_when_the_status_does(before, wanted, then, now):
    previous = {found.type: found for found in conditions.settle(before, (), then)}
    for found in conditions.settle(wanted, previous.values(), now):
        known = previous.get(found.type)
        same = known is not None and known.status == found.status
        assert found.last_transition_time == (then if same else now)


@given(LISTS, TIMES, TIMES)
def test_settling_again_changes_nothing(wanted, then, now):
    settled = conditions.settle(wanted, (), then)
    assert conditions.settle(wanted, settled, now) == settled


@given(LISTS, TIMES)
def test_settling_changes_the_time_only(wanted, now):
    settled = conditions.settle(wanted, (), now)
    assert [msgspec.structs.replace(found, last_transition_time=0.0) for found in settled] == list(wanted)


def test_a_new_reason_with_the_same_status_keeps_the_time():
    paused = conditions.settle(conditions.evaluate("paused"), (), 10)
    lost = conditions.settle(conditions.evaluate("lost"), paused, 20)
    ready, suspended = lost
    assert (ready.reason, ready.last_transition_time) == ("DependenciesNotReady", 10)
    assert (suspended.reason, suspended.last_transition_time) == ("NotSuspended", 20)


@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=12))
def test_along_a_life_each_time_is_that_of_the_last_flip(life):
    settled: tuple[Condition, ...] = ()
    flips: dict[str, tuple[str, float]] = {}
    for now, phase in enumerate(life, start=1):
        wanted = conditions.evaluate(phase)
        settled = conditions.settle(wanted, settled, float(now))
        for found in wanted:
            if flips.get(found.type, ("", 0))[0] != found.status:
                flips[found.type] = (found.status, float(now))
    assert {found.type: (found.status, found.last_transition_time) for found in settled} == flips
