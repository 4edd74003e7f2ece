"""Who gets which sandbox, what can be bound late, when a claim ends, and what it says."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche import model, policy
from cloche.lifecycle import claims
from cloche.stock import ClaimSpec, Requirements


def candidate(name, version="v1", labels=None, level="namespaces", memory_mib=512, ready_at=0.0):
    resources = model.Resources(memory_mib=memory_mib)
    return claims.Candidate(name, version, labels or {}, level, resources, ready_at)


def choose(candidates, wanted=claims.NOTHING, *, update="OnReplenish", current="v1"):
    return claims.choose(candidates, wanted, current=current, update=update)


# ── choosing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Requirements(labels={"gpu": "yes"}), "label gpu=yes"),
        (Requirements(minimum_isolation="microvm"), "microvm"),
        (Requirements(resources=model.Resources(memory_mib=4096)), "memory_mib of at least 4096"),
        (Requirements(template_version="v9"), "v9"),
        (Requirements(sandbox="other"), "other"),
    ],
)
def test_who_lacks_a_requirement_is_not_chosen_and_the_reason_names_it(wanted, words):
    choice = choose([candidate("a"), candidate("b")], wanted)
    assert choice.id is None
    assert words in choice.reason


def test_no_candidates_is_a_reason_of_its_own():
    assert choose([]) == claims.Choice(None, claims.NO_MEMBER)


def test_the_first_that_meets_them_is_chosen():
    members = [
        candidate("plain"),
        candidate("labelled", labels={"gpu": "yes"}),
        candidate("large", labels={"gpu": "yes"}, memory_mib=4096),
    ]
    assert choose(members).id == "plain"
    assert choose(members, Requirements(labels={"gpu": "yes"})).id == "labelled"
    assert choose(members, Requirements(resources=model.Resources(memory_mib=1024))).id == "large"
    assert choose(members, Requirements(sandbox="labelled")).id == "labelled"


def test_outdated_ones_serve_as_the_strategy_says():
    members = [candidate("old", "v1"), candidate("new", "v2")]
    assert choose(members, update="OnReplenish", current="v2").id == "old"
    assert choose(members, update="Rolling", current="v2").id == "new"
    assert choose(members[:1], update="Rolling", current="v2").id == "old"
    assert choose(members[:1], update="Recreate", current="v2").id is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(["v1", "v2"]), st.booleans(), st.integers(8, 64))),
    st.sampled_from(["OnReplenish", "Recreate", "Rolling"]),
    st.booleans(),
    st.integers(8, 64),
)
def test_a_choice_always_meets_what_was_asked_for_and_none_is_missed(members, update, labelled, memory):
    found = [
        candidate(str(n), version, {"l": "1"} if has else {}, memory_mib=mib)
        for n, (version, has, mib) in enumerate(members)
    ]
    resources = model.Resources(memory_mib=memory, cpus=0.01, pids=4, disk_mib=4)
    wanted = Requirements(labels={"l": "1"} if labelled else {}, resources=resources)
    fit = [
        c for c in found if claims.lacks(c, wanted) is None and (update != "Recreate" or c.version == "v2")
    ]
    choice = choose(found, wanted, update=update, current="v2")
    assert (choice.id is None) == (not fit)
    if fit:
        assert choice.id in [c.id for c in fit]


# ── binding ────────────────────────────────────────────────────────────────────────────────────────

BUILT = model.SandboxSpec()


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "other"},
        {"profile": "restrictive"},
        {"driver": "process"},
        {"workspace": "/x"},
        {"snapshot": "s"},
        {"resources": model.Resources(disk_mib=9)},
        {"contexts": ("python",)},
    ],
)
def test_what_a_sandbox_was_built_with_is_not_bound_late(changes):
    wanted = msgspec.structs.replace(BUILT, **changes)
    assert claims.unbindable(BUILT, wanted)
    assert claims.shape(BUILT) != claims.shape(wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"A": "1"}},
        {"labels": {"a": "b"}},
        {"timeout_s": 5},
        {"secrets": ("s",)},
        {"volumes": {"/v": model.Mount(volume="v")}},
        {"resources": model.Resources(memory_mib=1024, pids=9)},
        {"policy": {"network": {"mode": "rules", "allow": ["pypi.org"]}}},
        {"name": "n", "stay": True},
    ],
)
def test_everything_else_is(changes):
    wanted = msgspec.structs.replace(BUILT, **changes)
    assert claims.unbindable(BUILT, wanted) is None
    assert claims.shape(BUILT) == claims.shape(wanted)


def test_every_field_of_a_spec_is_decided_about():
    """A new field is fixed until somebody says that it can be bound late, never the other way round."""
    assert set(model.SandboxSpec.__struct_fields__) > claims.BOUND_LATE


def test_of_a_policy_only_the_network_is_bound_late():
    built = policy.profile("moderate")
    assert claims.fixed_rules(built, policy.parse({"network": {"mode": "open"}}, base=built)) is None
    assert "files" in (
        claims.fixed_rules(built, policy.parse({"files": {"root": "read-only"}}, base=built)) or ""
    )


# ── ending and conditions ──────────────────────────────────────────────────────────────────────────


def test_a_claim_ends_at_the_earlier_of_its_two_times():
    spec = ClaimSpec(pool="p", shutdown_time=100, ttl_seconds_after_finished=10, shutdown_policy="Retain")
    assert claims.end(ClaimSpec(pool="p"), 50) is None
    assert claims.end(spec, None) == claims.End(100, False)
    assert claims.end(spec, 50) == claims.End(60, False)
    assert claims.end(spec, 95) == claims.End(100, False)
    assert claims.end(ClaimSpec(pool="p", ttl_seconds_after_finished=0), 95) == claims.End(95, True)


def test_conditions_are_agent_sandboxes_own():
    assert claims.expired()[0].reason == "ClaimExpired"
    assert claims.expired()[0].message == "Claim expired. Sandbox cleanup initiated."
    assert claims.missing_pool("w")[0].message == 'SandboxWarmPool "w" not found'
    assert claims.missing_template("t")[0].reason == "TemplateNotFound"
    ready, finished = claims.finished("expired", "its time was up")
    assert (ready.reason, finished.type, finished.status) == ("SandboxExpired", "Finished", "True")
    assert ready.message == "Underlying Sandbox resource has expired independently of the Claim."
    assert claims.finished("lost", "its engine ended")[0].reason == "SandboxMissing"
