import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors, model, policy

PAGE = Path(__file__).parent.parent / "docs/reference/policy.md"
PATHS = st.lists(st.sampled_from([".env", "secrets/", ".git/hooks/", "a", "a/b"]), max_size=4).map(tuple)
POLICIES = st.builds(
    policy.Policy,
    root=st.sampled_from(["overlay", "read-only"]),
    network=st.sampled_from(["off", "rules", "open"]),
    syscalls=st.sampled_from(["restrictive", "moderate", "permissive"]),
    root_user=st.booleans(),
    minimum_isolation=st.sampled_from(model.LEVELS),
    required=st.lists(st.sampled_from(["landlock", "seccomp", "cgroup_memory"]), max_size=3).map(tuple),
    protected=PATHS,
    deny=PATHS,
)


def is_at_least_as_tight(one: policy.Policy, other: policy.Policy) -> bool:
    """Said again here, field by field, so that the test does not lean on the code it tests."""
    freedom = {"off": 0, "rules": 1, "open": 2, "restrictive": 0, "moderate": 1, "permissive": 2}
    return (
        (one.root == "read-only" or other.root == "overlay")
        and freedom[one.network] <= freedom[other.network]
        and freedom[one.syscalls] <= freedom[other.syscalls]
        and one.root_user <= other.root_user
        and model.LEVELS.index(one.minimum_isolation) >= model.LEVELS.index(other.minimum_isolation)
        and set(one.required) >= set(other.required)
        and set(one.protected) >= set(other.protected)
        and set(one.deny) >= set(other.deny)
    )


# ── profiles ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_profile_is_refused_with_the_likely_one():
    with pytest.raises(errors.InvalidInput) as caught:
        policy.profile("restrictiv")
    assert caught.value.code == "profile_unknown"
    assert caught.value.hint == "did you mean 'restrictive'?"


def test_profiles_are_what_the_contract_says():
    restrictive, moderate, permissive = (policy.profile(name) for name in policy.PROFILES)
    assert (restrictive.root, restrictive.network, restrictive.root_user) == ("read-only", "off", False)
    assert (moderate.root, moderate.network) == ("overlay", "off")
    assert (permissive.root, permissive.network, permissive.syscalls) == ("overlay", "open", "permissive")
    assert moderate == policy.Policy()


def test_each_profile_is_tighter_than_the_next():
    profiles = [policy.profile(name) for name in policy.PROFILES]
    for tight, loose in itertools.pairwise(profiles):
        assert is_at_least_as_tight(tight, loose)
        assert policy.tighten(tight, loose) == tight


@pytest.mark.parametrize("name", policy.PROFILES)
def test_no_profile_leaves_control_files_open(name):
    assert policy.profile(name).protected == policy.PROTECTED


# ── tightening ─────────────────────────────────────────────────────────────────────────────────────


@given(POLICIES, POLICIES)
def test_tightening_never_loosens(one, ceiling):
    both = policy.tighten(one, ceiling)
    assert is_at_least_as_tight(both, one)
    assert is_at_least_as_tight(both, ceiling)


@given(POLICIES, POLICIES)
def test_tightening_takes_no_more_than_either_asks(one, ceiling):
    both = policy.tighten(one, ceiling)
    assert both.root in (one.root, ceiling.root)
    assert both.network in (one.network, ceiling.network)
    assert both.syscalls in (one.syscalls, ceiling.syscalls)
    assert both.minimum_isolation in (one.minimum_isolation, ceiling.minimum_isolation)
    assert set(both.deny) == {*one.deny, *ceiling.deny}
    assert set(both.required) == {*one.required, *ceiling.required}


@given(POLICIES, POLICIES)
def test_tightening_twice_changes_nothing_more(one, ceiling):
    both = policy.tighten(one, ceiling)
    assert policy.tighten(both, ceiling) == both
    assert policy.tighten(both, one) == both


@given(POLICIES, POLICIES, st.sampled_from([".env", "a", "a/b", "a/b/c", "secrets/x", "z"]), st.booleans())
def test_what_one_layer_denies_no_other_allows(one, ceiling, path, write):
    both = policy.explain_path(policy.tighten(one, ceiling), path, write=write)
    for layer in (one, ceiling):
        if policy.explain_path(layer, path, write=write).verdict == "deny":
            assert both.verdict == "deny"


# ── parsing ────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_field_is_refused_with_the_likely_one():
    with pytest.raises(errors.InvalidInput) as caught:
        policy.parse({"netwrok": "off"})
    assert caught.value.code == "field_unknown"
    assert "'netwrok'" in caught.value.message
    assert caught.value.hint == "did you mean 'network'?"


@pytest.mark.parametrize(
    "data",
    [{"network": "yes"}, {"root_user": "no"}, {"deny": "a"}, {"syscalls": "none"}, {"minimum_isolation": 3}],
    ids=repr,
)
def test_an_ill_typed_field_is_refused_and_named(data):
    with pytest.raises(errors.InvalidInput) as caught:
        policy.parse(data)
    assert caught.value.code == "policy_invalid"
    assert next(iter(data)) in caught.value.message


def test_given_fields_replace_those_of_the_base():
    base = policy.profile("restrictive")
    made = policy.parse({"network": "rules", "deny": ["secrets/"]}, base=base)
    assert (made.network, made.deny, made.root) == ("rules", ("secrets/",), "read-only")
    assert policy.parse({}, base=base) == base
    assert policy.parse({}) == policy.Policy()


# ── explaining ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path", [".git/hooks", ".git/hooks/pre-commit", "./.git/hooks/x", "src/../.git/hooks/x", "cloche.toml"]
)
def test_control_files_may_be_read_but_not_written(path):
    refusal = policy.explain_path(policy.Policy(), path, write=True)
    assert (refusal.verdict, refusal.source) == ("deny", "policy.protected")
    assert policy.explain_path(policy.Policy(), path, write=False).verdict == "allow"


def test_denied_paths_may_not_even_be_read():
    rules = policy.Policy(deny=("secrets/",))
    assert policy.explain_path(rules, "secrets/key", write=False) == policy.Explanation(
        verdict="deny", rule="secrets/", source="policy.deny"
    )
    assert policy.explain_path(rules, "secrets2", write=True).verdict == "allow"


@pytest.mark.parametrize("path", ["src/main.py", ".git/hooks2", ".gitconfig2", "a/.bashrc"])
def test_other_files_are_free(path):
    assert policy.explain_path(policy.Policy(), path, write=True).verdict == "allow"


# ── the page ───────────────────────────────────────────────────────────────────────────────────────


def test_every_field_and_profile_has_its_place_in_the_reference():
    page = PAGE.read_text()
    assert re.findall(r"^### `(\w+)`", page, re.M) == list(policy.Policy.__struct_fields__)
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(policy.PROFILES)


def test_the_page_lists_every_protected_and_reported_path():
    page = PAGE.read_text()
    assert [path for path in (*policy.PROTECTED, *policy.REPORTED) if f"`{path}`" not in page] == []
