import itertools
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors, model, policy

PAGE = Path(__file__).parent.parent / "docs/reference/policy.md"
PATHS = st.lists(st.sampled_from([".env", "secrets/", ".git/hooks/", "a", "a/b"]), max_size=4).map(tuple)
POLICIES = st.builds(
    policy.Merged,
    files=st.builds(
        policy.Files, root=st.sampled_from(["overlay", "read-only"]), protected=PATHS, deny=PATHS
    ),
    network=st.builds(policy.Network, mode=st.sampled_from(["off", "rules", "open"])),
    syscalls=st.builds(policy.Calls, profile=st.sampled_from(["restrictive", "moderate", "permissive"])),
    isolation=st.builds(
        policy.Least,
        minimum=st.sampled_from(model.LEVELS),
        required=st.lists(st.sampled_from(["landlock", "seccomp", "cgroup_memory"]), max_size=3).map(tuple),
        root_user=st.booleans(),
    ),
)


def is_at_least_as_tight(one: policy.Merged, other: policy.Merged) -> bool:
    """Said again here, field by field, so that the test does not lean on the code it tests."""
    freedom = {"off": 0, "rules": 1, "open": 2, "restrictive": 0, "moderate": 1, "permissive": 2}
    return (
        (one.files.root == "read-only" or other.files.root == "overlay")
        and freedom[one.network.mode] <= freedom[other.network.mode]
        and freedom[one.syscalls.profile] <= freedom[other.syscalls.profile]
        and one.isolation.root_user <= other.isolation.root_user
        and model.LEVELS.index(one.isolation.minimum) >= model.LEVELS.index(other.isolation.minimum)
        and set(one.isolation.required) >= set(other.isolation.required)
        and set(one.files.protected) >= set(other.files.protected)
        and set(one.files.deny) >= set(other.files.deny)
    )


# ── profiles ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_profile_is_refused_with_the_likely_one():
    with pytest.raises(errors.InvalidInput) as caught:
        policy.profile("restrictiv")
    assert caught.value.code == "profile_unknown"
    assert caught.value.hint == "did you mean 'restrictive'?"


def test_profiles_are_what_the_contract_says():
    restrictive, moderate, permissive = (policy.profile(name) for name in policy.PROFILES)
    assert (restrictive.files.root, restrictive.network.mode) == ("read-only", "off")
    assert not restrictive.isolation.root_user
    assert (moderate.files.root, moderate.network.mode) == ("overlay", "off")
    assert (permissive.files.root, permissive.network.mode) == ("overlay", "open")
    assert permissive.syscalls.profile == "permissive"
    assert moderate == policy.Merged()


def test_each_profile_is_tighter_than_the_next():
    profiles = [policy.profile(name) for name in policy.PROFILES]
    for tight, loose in itertools.pairwise(profiles):
        assert is_at_least_as_tight(tight, loose)
        assert policy.tighten(tight, loose) == tight


@pytest.mark.parametrize("name", policy.PROFILES)
def test_no_profile_leaves_control_files_open(name):
    assert policy.profile(name).files.protected == policy.PROTECTED


# ── tightening ─────────────────────────────────────────────────────────────────────────────────────


@given(POLICIES, POLICIES)
def test_tightening_never_loosens(one, ceiling):
    both = policy.tighten(one, ceiling)
    assert is_at_least_as_tight(both, one)
    assert is_at_least_as_tight(both, ceiling)


@given(POLICIES, POLICIES)
def test_tightening_takes_no_more_than_either_asks(one, ceiling):
    both = policy.tighten(one, ceiling)
    assert both.files.root in (one.files.root, ceiling.files.root)
    assert both.network.mode in (one.network.mode, ceiling.network.mode)
    assert both.syscalls.profile in (one.syscalls.profile, ceiling.syscalls.profile)
    assert both.isolation.minimum in (one.isolation.minimum, ceiling.isolation.minimum)
    assert set(both.files.deny) == {*one.files.deny, *ceiling.files.deny}
    assert set(both.isolation.required) == {*one.isolation.required, *ceiling.isolation.required}


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
    for data, word, likely in (
        ({"netwrok": {"mode": "off"}}, "netwrok", "network"),
        ({"network": {"mdoe": "off"}}, "mdoe", "mode"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            policy.parse(data)
        assert caught.value.code == "field_unknown"
        assert repr(word) in caught.value.message
        assert caught.value.hint == f"did you mean {likely!r}?"


@pytest.mark.parametrize(
    "data",
    [
        {"network": "yes"},
        {"network": {"mode": "yes"}},
        {"isolation": {"root_user": "no"}},
        {"files": {"deny": "a"}},
        {"syscalls": {"profile": "none"}},
        {"isolation": {"minimum": 3}},
    ],
    ids=repr,
)
def test_an_ill_typed_field_is_refused_and_named(data):
    with pytest.raises(errors.InvalidInput) as caught:
        policy.parse(data)
    assert caught.value.code == "policy_invalid"
    assert next(iter(data)) in caught.value.message


def test_given_fields_replace_those_of_the_base():
    base = policy.profile("restrictive")
    made = policy.parse({"network": {"mode": "rules"}, "files": {"deny": ["secrets/"]}}, base=base)
    assert (made.network.mode, made.files.deny, made.files.root) == ("rules", ("secrets/",), "read-only")
    assert policy.parse({}, base=base) == base
    assert policy.parse({}) == policy.Merged()


# ── explaining ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path", [".git/hooks", ".git/hooks/pre-commit", "./.git/hooks/x", "src/../.git/hooks/x", "cloche.toml"]
)
def test_control_files_may_be_read_but_not_written(path):
    refusal = policy.explain_path(policy.Merged(), path, write=True)
    assert (refusal.verdict, refusal.source) == ("deny", "files.protected")
    assert policy.explain_path(policy.Merged(), path, write=False).verdict == "allow"


def test_denied_paths_may_not_even_be_read():
    rules = policy.Merged(files=policy.Files(deny=("secrets/",)))
    assert policy.explain_path(rules, "secrets/key", write=False) == policy.Explanation(
        verdict="deny", rule="secrets/", source="files.deny"
    )
    assert policy.explain_path(rules, "secrets2", write=True).verdict == "allow"


@pytest.mark.parametrize("path", ["src/main.py", ".git/hooks2", ".gitconfig2", "a/.bashrc"])
def test_other_files_are_free(path):
    assert policy.explain_path(policy.Merged(), path, write=True).verdict == "allow"


# ── the page ───────────────────────────────────────────────────────────────────────────────────────


def test_every_field_and_profile_has_its_place_in_the_reference():
    page = PAGE.read_text()
    groups = msgspec.to_builtins(policy.Merged())
    assert re.findall(r"^## `\[(\w+)\]`", page, re.M) == list(groups)
    assert re.findall(r"^### `(\w+\.\w+)`", page, re.M) == [
        f"{group}.{field}" for group, fields in groups.items() for field in fields
    ]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(policy.PROFILES)


def test_the_page_lists_every_protected_and_reported_path():
    page = PAGE.read_text()
    assert [path for path in (*policy.PROTECTED, *policy.REPORTED) if f"`{path}`" not in page] == []
