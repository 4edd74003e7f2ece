"""Layers: what each may say, what becomes of two, and that tightening never loosens. Refusals first."""

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche import errors, model, policy
from cloche.policy import explaining, globs, layers, modes, nouns, paths, rules

PAGE = Path(__file__).parents[2] / "docs/reference/policy.md"

NAMES = st.lists(st.sampled_from([".env", "secrets/", ".git/hooks/", "a", "a/b", "**/k", "a/*"]), max_size=4)
HOSTS = st.lists(st.sampled_from(["a.org", "*.a.org", "**.a.org:443", "b.org:80", "10.0.0.0/8"]), max_size=3)
GLOBS = st.lists(st.sampled_from(["*", "A_*", "A_B", "A_B_*", "*_B", "X"]), max_size=3)
CALLS = st.lists(st.sampled_from(["ptrace", "socket", "bpf"]), max_size=2)
PLACES = st.lists(st.sampled_from(["/srv", "/srv/a", "/srv/a/b", "/data"]), max_size=3)
NUMBERS = st.none() | st.integers(1, 5)


def group(**fields: Any) -> Any:
    """Some of the fields of a group."""
    return st.fixed_dictionaries({}, optional=fields)


TIGHTENING = st.fixed_dictionaries(
    {},
    optional={
        "files": group(
            root=st.sampled_from(["overlay", "read-only"]), protected=NAMES, deny=NAMES, read=PLACES, write=PLACES
        ),
        "network": group(mode=st.sampled_from(["rules", "open"]), allow=HOSTS, deny=HOSTS, ask=HOSTS) | st.just({"mode": "off"}),
        "syscalls": group(profile=st.sampled_from(policy.PROFILES), deny=CALLS),
        "limits": group(memory_mib=NUMBERS, cpus=NUMBERS, pids=NUMBERS, disk_mib=NUMBERS, timeout_s=NUMBERS),
        "environment": group(allow=GLOBS, deny=GLOBS),
        "secrets": group(allow=GLOBS),
        "isolation": group(
            minimum=st.sampled_from(model.LEVELS),
            root_user=st.booleans(),
            required=st.lists(st.sampled_from(["landlock", "seccomp"]), max_size=2),
        ),
    },
)  # fmt: skip
MERGED = st.builds(
    lambda name, fields: policy.parse(fields, base=policy.profile(name)),
    st.sampled_from(policy.PROFILES),
    TIGHTENING,
)
PATHS = st.sampled_from([".env", "a", "a/b", "a/b/c", "secrets/x", "z", "k", "z/k", ".git/hooks/x"])
REQUESTS = st.builds(
    rules.Request, st.sampled_from(["a.org", "x.a.org", "b.org", "c.org", "10.1.1.1", "8.8.8.8"]), st.sampled_from([80, 443])
)  # fmt: skip


def refusal(work: Any, *given: Any, **named: Any) -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        work(*given, **named)
    return caught.value


def is_at_least_as_tight(one: policy.Merged, other: policy.Merged) -> bool:
    """Said again here, field by field, so that the test does not lean on the code it tests."""
    freedom = {"off": 0, "rules": 1, "open": 2, "restrictive": 0, "moderate": 1, "permissive": 2}
    return (
        (one.files.root == "read-only" or other.files.root == "overlay")
        and freedom[one.network.mode] <= freedom[other.network.mode]
        and freedom[one.syscalls.profile] <= freedom[other.syscalls.profile]
        and one.isolation.root_user <= other.isolation.root_user
        and model.LEVELS.index(one.isolation.minimum) >= model.LEVELS.index(other.isolation.minimum)
        and all(
            set(getattr(getattr(one, group), field)) >= set(getattr(getattr(other, group), field))
            for group, field in nouns.DENYING
        )
        and all(
            getattr(other.limits, field) is None
            or (getattr(one.limits, field) or 10**9) <= getattr(other.limits, field)
            for field in nouns.Limits.__struct_fields__
        )
        and set(one.environment.set.items()) <= set(other.environment.set.items())
        and set(one.network.resolve.items()) <= set(other.network.resolve.items())
    )


# ── profiles and modes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["restrictiv", "", "Moderate", "strict"])
def test_an_unknown_profile_is_refused(name):
    assert refusal(policy.profile, name).code == "profile_unknown"


def test_an_unknown_profile_or_mode_is_refused_with_the_likely_one():
    assert refusal(policy.profile, "restrictiv").hint == "did you mean 'restrictive'?"
    found = refusal(policy.stack, profile=None, mode="codx")
    assert (found.code, found.hint) == ("mode_unknown", "did you mean 'codex'?")


def test_a_profile_and_a_mode_are_one_too_many():
    found = refusal(policy.stack, profile="moderate", mode="codex")
    assert found.code == "policy_invalid"
    assert "both" in found.message


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


@pytest.mark.parametrize("name", modes.BUILT_IN)
def test_a_mode_reaches_its_model_and_nothing_else(name):
    made = policy.resolve(policy.stack(profile=None, mode=name))
    policy.check(modes.BUILT_IN[name])
    assert made.network.mode == "rules"
    for line in made.network.allow:
        host = line.removesuffix(":443")
        assert explaining.host(made, rules.Request(host, 443, "tls")).verdict == "allow"
        assert explaining.host(made, rules.Request(host, 80)).verdict == "deny"
    for host in ("github.com", "pypi.org", "storage.googleapis.com", "8.8.8.8"):
        assert explaining.host(made, rules.Request(host, 443, "tls")).verdict == "deny"


def test_profiles_of_one_s_own_stand_on_others():
    own = policy.Policy(
        profiles={
            "ci": {"base": "restrictive", "limits": {"pids": 9}},
            "lab": {"base": "ci", "files": {"root": "overlay"}},
        },
        agents={
            "codex": {"profile": "lab", "network": {"allow": ["pypi.org"]}},
            "mine": {"files": {"deny": ["x"]}},
        },
    )
    made = policy.resolve(policy.stack(profile="lab", sources=policy.Sources(user=own)))
    assert (made.files.root, made.limits.pids, made.isolation.root_user) == ("overlay", 9, False)
    codex = policy.resolve(policy.stack(profile=None, mode="codex", sources=policy.Sources(user=own)))
    assert codex.network.allow == ("api.openai.com:443", "cdn.openai.com:443", "pypi.org")
    assert (codex.limits.pids, codex.isolation.root_user) == (9, False)
    mine = policy.resolve(policy.stack(profile=None, mode="mine", arguments=own))
    assert (mine.files.deny, mine.network.mode) == (("x",), "off")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"profiles": {"moderate": {}}}, "built in"),
        ({"profiles": {"Big": {}}}, "plain name"),
        ({"profiles": {"a": {"base": 3}}}, "name of a profile"),
        ({"profiles": {"a": 3}}, "not a table"),
        ({"profiles": 3}, "table of tables"),
        ({"agents": {"a": {"base": "moderate"}}}, "no group 'base'"),
        ({"profiles": {"a": {"files": {"denny": []}}}}, "no field 'denny'"),
        ({"profiles": {"a": {"profiles": {}}}}, "no group 'profiles'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tables, words):
    found = refusal(policy.Policy, **tables)
    assert found.code in ("policy_invalid", "field_unknown")
    assert words in found.message


def test_profiles_in_a_circle_are_refused():
    own = policy.Policy(profiles={"a": {"base": "b"}, "b": {"base": "a"}})
    assert "circle" in refusal(policy.stack, profile="a", arguments=own).message
    assert refusal(policy.stack, profile="c", arguments=own).code == "profile_unknown"


# ── what may be said ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("data", "word", "likely"),
    [
        ({"netwrok": {"mode": "off"}}, "netwrok", "network"),
        ({"network": {"mdoe": "off"}}, "mdoe", "mode"),
        ({"limits": {"memory": 3}}, "memory", "memory_mib"),
    ],
)
def test_an_unknown_field_is_refused_with_the_likely_one(data, word, likely):
    found = refusal(policy.parse, data)
    assert found.code == "field_unknown"
    assert repr(word) in found.message
    assert found.hint == f"did you mean {likely!r}?"


@pytest.mark.parametrize(
    "data",
    [
        {"network": "yes"}, {"network": {"mode": "yes"}}, {"network": {"allow": ["https://a.org"]}},
        {"network": {"allow": ["a.org colour=red"]}}, {"network": {"allow": ["169.254.169.254"]}},
        {"network": {"deny": ["a b"]}}, {"network": {"ask": ["*"]}}, {"network": {"resolve": {"a.org": "b"}}},
        {"isolation": {"root_user": "no"}}, {"isolation": {"minimum": 3}},
        {"files": {"deny": "a"}}, {"files": {"deny": ["../a"]}}, {"files": {"deny": [""]}}, {"files": {"deny": ["a\0"]}},
        {"files": {"deny": ["[a"]}}, {"files": {"deny": ["a**"]}}, {"files": {"deny": ["~/.ssh"]}}, {"files": {"deny": ["/"]}},
        {"files": {"deny": ["!a"]}}, {"files": {"protected": ["x", "!x"]}}, {"files": {"read": ["data"]}},
        {"files": {"read": ["~/data"]}}, {"files": {"write": ["/srv/../etc"]}}, {"files": {"write": ["/srv/"]}},
        {"syscalls": {"profile": "none"}}, {"syscalls": {"deny": ["rm -rf"]}},
        {"limits": {"pids": 0}}, {"limits": {"memory_mib": -1}}, {"limits": {"cpus": "2"}}, {"limits": {"pids": 1.5}},
        {"environment": {"deny": ["A B"]}}, {"environment": {"allow": [""]}}, {"environment": {"set": {"A=B": "1"}}},
        {"environment": {"set": {"A": "x\0"}}}, {"secrets": {"allow": ["a/b"]}},
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_is_refused_and_named(data):
    found = refusal(policy.parse, data)
    assert found.code == "policy_invalid"
    (group, fields) = next(iter(data.items()))
    named: Any = found.details["at"]
    assert named[0] == group
    assert not isinstance(fields, dict) or named[1] == next(iter(fields))


def test_a_mode_of_off_with_rules_is_a_contradiction():
    assert (
        "one of them is meant"
        in refusal(policy.parse, {"network": {"mode": "off", "allow": ["a.org"]}}).message
    )
    assert policy.parse({"network": {"mode": "off", "deny": ["a.org"]}}).network.mode == "off"


def test_a_policy_says_what_it_names_and_no_more():
    said = policy.Policy(files={"deny": ["secrets/"]})
    assert said.to_builtins() == {"files": {"deny": ["secrets/"]}}
    over = policy.resolve(policy.stack(profile="restrictive", arguments=said))
    assert (over.files.root, over.isolation.root_user, over.files.deny) == ("read-only", False, ("secrets/",))
    assert policy.Policy(network={"mode": "off"}) != policy.Policy()
    off = policy.resolve(policy.stack(profile="permissive", arguments=policy.Policy(network={"mode": "off"})))
    assert off.network.mode == "off"


# ── laying over ────────────────────────────────────────────────────────────────────────────────────


def lay(*tables: dict[str, Any], profile: str = "moderate") -> policy.Merged:
    made = policy.profile(profile)
    for table in tables:
        made = policy.parse(table, base=made)
    return made


def test_denying_lists_add_up_whoever_says_them():
    made = lay({"files": {"deny": ["a"]}}, {"files": {"deny": ["b"]}}, {"files": {"deny": []}})
    assert made.files.deny == ("a", "b")
    assert lay({"files": {"protected": ["x"]}}).files.protected == (*policy.PROTECTED, "x")


def test_protection_is_taken_back_by_name():
    made = lay({"files": {"protected": ["!.vscode/", "infra/"]}})
    assert set(made.files.protected) == {*policy.PROTECTED, "infra/"} - {".vscode/"}


def test_allowing_lists_add_up_and_an_empty_one_clears():
    first = lay({"network": {"allow": ["a.org"]}}, {"network": {"allow": ["b.org"]}})
    assert (first.network.mode, first.network.allow) == ("rules", ("a.org", "b.org"))
    assert lay({"network": {"allow": ["a.org"]}}, {"network": {"allow": []}}).network.allow == ()
    assert lay({"environment": {"allow": ["A"]}}, {"environment": {"allow": ["B"]}}).environment.allow == (
        "A",
        "B",
    )
    assert lay({"environment": {"allow": []}}).environment.allow == ()


def test_tables_add_up_and_the_later_value_counts():
    made = lay({"environment": {"set": {"A": "1", "B": "1"}}}, {"environment": {"set": {"B": "2"}}})
    assert made.environment.set == {"A": "1", "B": "2"}


def test_choices_and_limits_are_replaced():
    made = lay(
        {"limits": {"pids": 5}, "syscalls": {"profile": "permissive"}},
        {"limits": {"pids": 50}},
        profile="restrictive",
    )
    assert (made.limits.pids, made.syscalls.profile) == (50, "permissive")


# ── tightening ─────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(MERGED, TIGHTENING)
def test_tightening_never_loosens(below, fields):
    assert is_at_least_as_tight(policy.tighten_by(below, policy.check(fields)), below)


@settings(deadline=None)
@given(MERGED, TIGHTENING)
def test_what_is_said_is_kept(below, fields):
    """Nothing that a tightening layer denies is allowed in the end."""
    made = policy.tighten_by(below, policy.check(fields))
    alone = policy.tighten_by(policy.profile("permissive"), policy.check(fields))
    for group, field in nouns.DENYING:
        assert set(getattr(getattr(made, group), field)) >= set(getattr(getattr(alone, group), field)) - set(
            policy.PROTECTED
        )


@settings(deadline=None)
@given(MERGED, TIGHTENING)
def test_tightening_twice_changes_nothing_more(below, fields):
    said = policy.check(fields)
    once = policy.tighten_by(below, said)
    assert _loosely(policy.tighten_by(once, said)) == _loosely(once)


def _loosely(made: policy.Merged) -> Any:
    """The order of rules and of names, and rules within others, make no difference; the rest must be equal."""
    return msgspec.structs.replace(
        made,
        network=msgspec.structs.replace(made.network, allow=()),
        environment=msgspec.structs.replace(made.environment, allow=tuple(sorted(made.environment.allow))),
        secrets=msgspec.structs.replace(made.secrets, allow=tuple(sorted(made.secrets.allow))),
    )


@settings(deadline=None)
@given(MERGED, TIGHTENING, PATHS, st.booleans())
def test_no_path_is_allowed_that_was_not(below, fields, path, write):
    made = policy.tighten_by(below, policy.check(fields))
    if explaining.path(made, path, write=write).verdict == "allow":
        assert explaining.path(below, path, write=write).verdict == "allow"


@settings(deadline=None, max_examples=300)
@given(MERGED, TIGHTENING, REQUESTS)
def test_exactly_what_both_allow_of_the_network(below, fields, request):
    said = policy.check(fields)
    allowed = decided(below.network, request) and decided(alone(said.get("network", {}), below), request)
    assert decided(policy.tighten_by(below, said).network, request) == allowed


def decided(network: policy.Network, request: rules.Request) -> bool:
    return rules.decide(explaining.rule_set(network), request).allowed


def alone(said: dict[str, Any], below: policy.Merged) -> policy.Network:
    """What a tightening layer would allow by itself. One that names neither mode nor rules has nothing against anybody; one
    that wants rules and has none means those that are there."""
    if "allow" in said:
        made: dict[str, Any] = {"mode": "rules", **said}
    elif "mode" not in said:
        made = {"mode": "open", "allow": ["0.0.0.0/0"], **said}
    else:
        made = {**said, "allow": below.network.allow if said["mode"] == "rules" else ()}
    return msgspec.convert(made, policy.Network)


@given(MERGED, TIGHTENING, st.sampled_from(["A_B", "A_B_C", "A_", "X", "Q_B"]))
def test_no_variable_or_secret_is_allowed_that_was_not(below, fields, name):
    made = policy.tighten_by(below, policy.check(fields))
    for ask in (explaining.variable, explaining.secret):
        if ask(made, name).verdict == "allow":
            assert ask(below, name).verdict == "allow"


@given(MERGED, TIGHTENING)
def test_no_directory_is_shown_that_was_not(below, fields):
    made = policy.tighten_by(below, policy.check(fields))
    for field in ("read", "write"):
        for path in getattr(made.files, field):
            assert any(path == up or path.startswith(up + "/") for up in getattr(below.files, field))


@given(GLOBS, GLOBS, st.text("AB_X", max_size=6))
def test_both_lists_of_names_never_have_more_than_each(one, other, name):
    if globs.matching(globs.both(one, other), name) is not None:
        assert globs.matching(one, name) is not None
        assert globs.matching(other, name) is not None


@pytest.mark.parametrize(
    "said",
    [
        {"environment": {"set": {"ANTHROPIC_BASE_URL": "http://evil"}}},
        {"network": {"resolve": {"a.org:443": "10.0.0.1:443"}}},
        {"files": {"protected": ["!.git/hooks/"]}},
        {"profiles": {"mine": {"base": "permissive"}}},
        {"agents": {"codex": {"network": {"allow": ["evil.org"]}}}},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_cannot_tighten_is_refused_until_trusted(said):
    project = policy.Policy(**said, source="/w/cloche.toml")
    found = refusal(policy.stack, profile="moderate", sources=policy.Sources(project=project))
    assert found.code == "policy_untrusted"
    assert "cloche policy trust /w/cloche.toml" in str(found.hint)
    assert policy.stack(profile="moderate", sources=policy.Sources(project=project, trusted=True))
    ceiling = policy.Sources(ceilings=(project,))
    assert refusal(policy.stack, profile="moderate", sources=ceiling).code == "policy_untrusted"


def test_the_order_of_layers():
    user = policy.Policy(network={"allow": ["**.a.org", "b.org"]}, limits={"pids": 50})
    project = policy.Policy(network={"allow": ["x.a.org", "evil.org"]}, syscalls={"profile": "permissive"})
    arguments = policy.Policy(network={"allow": ["c.org"]}, limits={"pids": 99})
    ceiling = policy.Policy(
        network={"deny": ["b.org"], "allow": ["**.a.org", "c.org:443"]}, limits={"pids": 70}
    )

    def made(**sources: Any) -> policy.Merged:
        return policy.resolve(
            policy.stack(profile="moderate", sources=policy.Sources(**sources), arguments=arguments)
        )

    untrusted = made(user=user, project=project, ceilings=(ceiling,))
    assert untrusted.network.allow == ("x.a.org", "c.org:443")
    assert (untrusted.syscalls.profile, untrusted.limits.pids) == ("moderate", 70)
    trusted = made(user=user, project=project, trusted=True)
    assert trusted.network.allow == ("**.a.org", "b.org", "x.a.org", "evil.org", "c.org")
    assert (trusted.syscalls.profile, trusted.limits.pids) == ("permissive", 99)


def test_too_many_rules_to_compare_are_refused():
    lines = [f"h{n}.org" for n in range(200)]
    below = policy.parse({"network": {"allow": lines}})
    found = refusal(policy.tighten_by, below, {"network": {"allow": lines}})
    assert "too many" in found.message


# ── what enforcement asks ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["memory_mib", "cpus", "pids", "disk_mib"])
def test_more_than_the_limit_is_refused_and_a_default_lowered(field):
    rules_ = policy.parse({"limits": {field: 20 if field != "cpus" else 0.5}})
    more = model.SandboxSpec(
        resources=msgspec.convert({field: 4096 if field != "cpus" else 2.0}, model.Resources)
    )
    found = refusal(policy.bound, rules_, more)
    assert (found.code, found.details["rule"]) == ("limit_refused", f"limits.{field}")
    lowered = policy.bound(rules_, model.SandboxSpec()).resources
    assert getattr(lowered, field) == getattr(rules_.limits, field)
    assert policy.bound(policy.Merged(), more) == more


def test_a_life_longer_than_the_limit_is_refused():
    short = policy.parse({"limits": {"timeout_s": 60}})
    for life in (None, 61):
        assert (
            refusal(policy.bound, short, model.SandboxSpec(timeout_s=life)).details["rule"]
            == "limits.timeout_s"
        )
    assert policy.bound(short, model.SandboxSpec()).timeout_s == 60
    assert policy.bound(short, model.SandboxSpec(timeout_s=59)).timeout_s == 59


def test_variables_that_may_not_enter_are_refused_by_name():
    strict = policy.parse({"environment": {"allow": ["APP_*"], "deny": ["APP_KEY"], "set": {"SANDBOX": "1"}}})
    for name, field in (("APP_KEY", "environment.deny"), ("PATH", "environment.allow")):
        found = refusal(policy.bound, strict, model.SandboxSpec(env={name: "x"}))
        assert (found.code, found.details["field"]) == ("environment_refused", field)
        assert name in found.message
    assert policy.bound(strict, model.SandboxSpec(env={"APP_A": "x"})).env == {"APP_A": "x", "SANDBOX": "1"}


def test_secrets_that_are_not_named_are_refused():
    strict = policy.parse({"secrets": {"allow": ["github"]}})
    assert refusal(policy.check_secrets, strict, ("github", "aws")).code == "secret_refused"
    policy.check_secrets(strict, ("github",))
    policy.check_secrets(policy.Merged(), ("anything",))


# ── explaining ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [".git/hooks", ".git/hooks/pre-commit", "cloche.toml", ".codex/config.toml"])
def test_control_files_may_be_read_but_not_written(path):
    found = explaining.path(policy.Merged(), path, write=True)
    assert (found.verdict, found.field) == ("deny", "files.protected")
    assert explaining.path(policy.Merged(), path, write=False).verdict == "allow"


@pytest.mark.parametrize("path", ["src/main.py", ".git/hooks2", ".gitconfig2", "a/.bashrc"])
def test_other_files_are_free(path):
    assert explaining.path(policy.Merged(), path, write=True).verdict == "allow"


@pytest.mark.parametrize(
    ("entry", "covered", "free"),
    [
        ("secrets/", ["secrets", "secrets/a/b"], ["secrets2", "a/secrets"]),
        (".env", [".env", ".env/x"], ["a/.env", ".env2", ".Env"]),
        ("**/.env", [".env", "a/.env", "a/b/.env/c"], ["a/.env2"]),
        ("deploy/*.pem", ["deploy/a.pem", "deploy/.pem"], ["deploy/a/b.pem", "a.pem", "deploy/a.pem2"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b/z"], ["a", "b", "a/x"]),
        ("a/**", ["a/x", "a/x/y"], ["a", "ab"]),
        ("**", ["a", "a/b"], []),
        ("?.[kK]ey", ["a.key", "b.Key"], ["ab.key", "a.KEY", ".key"]),
        ("[!a-c]x", ["dx"], ["ax", "x"]),
        ("./a//b/", ["a/b", "a/b/c"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("/w/a", ["a"], ["w/a"]),
        ("/elsewhere/a", [], ["a", "elsewhere/a"]),
        ("[[]a]", ["[a]"], ["a"]),
    ],
)
def test_patterns(entry, covered, free):
    made = [found for found in [paths.parse(entry, "/w")] if found is not None]
    assert [path for path in covered if paths.covering(made, path) is None] == []
    assert [path for path in free if paths.covering(made, path) is not None] == []


def test_a_pattern_made_to_be_slow_is_not():
    slow = [paths.parse("/".join(["**", "*a" * 30 + "b"] * 4))]
    assert paths.covering([one for one in slow if one], "/".join(["a" * 200] * 50)) is None
    assert globs.matching(["*a" * 60 + "b"], "a" * 3000) is None


def test_an_answer_names_the_layer_that_gave_it():
    user = policy.Policy(network={"allow": ["**.a.org"]}, source="user")
    project = policy.Policy(
        network={"allow": ["x.a.org"]},
        environment={"deny": ["AWS_*"]},
        syscalls={"deny": ["ptrace"]},
        source="project",
    )
    stack = policy.stack(profile="permissive", sources=policy.Sources(user=user, project=project))

    def ask(work: Any, *given: Any) -> tuple[str, str]:
        found = explaining.explain(stack, lambda merged: work(merged, *given))
        return found.verdict, found.source

    assert ask(explaining.host, rules.Request("x.a.org", 443, "tls")) == ("allow", "project")
    assert ask(explaining.host, rules.Request("y.a.org", 443, "tls")) == ("deny", "project")
    assert ask(explaining.host, rules.Request("169.254.169.254", 80)) == ("deny", "built-in")
    assert ask(explaining.variable, "AWS_KEY") == ("deny", "project")
    assert ask(explaining.variable, "HOME") == ("allow", "profile permissive")
    assert ask(explaining.system_call, "ptrace", lambda profile, name: "allow") == ("deny", "project")
    assert ask(explaining.system_call, "mount", lambda profile, name: "refuse:EPERM") == (
        "deny",
        "profile permissive",
    )


# ── the page ───────────────────────────────────────────────────────────────────────────────────────


def test_every_field_profile_and_mode_has_its_place_in_the_reference():
    page = PAGE.read_text()
    groups = msgspec.to_builtins(policy.Merged())
    assert re.findall(r"^## `\[(\w+)\]`", page, re.M) == list(groups)
    assert re.findall(r"^### `(\w+\.\w+)`", page, re.M) == [
        f"{group}.{field}" for group, fields in groups.items() for field in fields
    ]
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.M) == [*policy.PROFILES, *modes.BUILT_IN]
    for mode in modes.BUILT_IN.values():
        assert all(f"`{line.removesuffix(':443')}`" in page for line in mode["network"]["allow"])


def test_every_field_has_one_nature():
    fields = {(group, field) for group, kind in nouns.GROUPS.items() for field in kind.__struct_fields__}
    natures = [set(nouns.CHOICES), nouns.DENYING, nouns.ALLOWING, nouns.TABLES]
    limits = {key for key in fields if key[0] == "limits"}
    assert sum(map(len, [*natures, limits])) == len(fields)
    assert set().union(*natures, limits) == fields
    page = PAGE.read_text()
    assert [f"{group}.{field}" for group, field in fields - limits if f"`{group}.{field}`" not in page] == []


def test_the_page_lists_every_protected_and_reported_path():
    page = PAGE.read_text()
    assert [path for path in (*policy.PROTECTED, *policy.REPORTED) if f"`{path}`" not in page] == []


@pytest.mark.parametrize("name", nouns.BUILT_IN)
def test_a_built_in_profile_says_everything(name):
    """So it may stand for itself instead of being laid over nothing, for every sandbox anew."""
    (layer,) = layers.stack(profile=name)
    assert layer.whole is not None
    assert layers.resolve([layer]) == layers.lay(nouns.Merged(), layer.fields) == layer.whole
