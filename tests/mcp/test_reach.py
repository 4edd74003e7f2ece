"""What network a call gets: never more than the settings let it ask for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors
from cloche.mcp import nouns, tools

NAMES = st.lists(
    st.sampled_from(["pypi.org", "*.github.com", "*", "**", "0.0.0.0/0", "", "a.test:443"]), max_size=3
)
ASKED = st.none() | st.builds(
    nouns.Network, enabled=st.none() | st.booleans(), allowed_domains=st.none() | NAMES
)
PROFILES = st.sampled_from(["restrictive", "moderate", "permissive"])
GIVEN = st.sampled_from([(), ("mirror.test",)])


def answer(
    profile: str, asked: nouns.Network | None, most: str, rules: tuple[str, ...]
) -> dict[str, Any] | str:
    """The network, or the code of the refusal."""
    try:
        return dict(tools.reach(profile, asked, most=most, given=rules).get("network", {}))
    except errors.ClocheError as problem:
        return problem.code


@given(PROFILES, ASKED, st.sampled_from(["off", "rules", "open"]), GIVEN)
def test_never_more_than_the_settings_say(
    profile: str, asked: nouns.Network | None, most: str, given_rules: tuple[str, ...]
) -> None:
    network = answer(profile, asked, most, given_rules)
    if isinstance(network, str):
        assert network in ("network_refused", "argument_invalid")
        return
    # Nothing said means the profile's own, and only that of `permissive` is open.
    mode = network.get("mode", "open" if profile == "permissive" else "off")
    if mode == "open":
        assert most == "open"
    extra = set(network.get("allow", ())) - set(given_rules)
    assert not extra & {"*", "**", "0.0.0.0/0", ""}
    if most == "off":
        assert not extra


@pytest.mark.parametrize(
    ("asked", "most", "network"),
    [
        (
            nouns.Network(enabled=True, allowed_domains=["pypi.org"]),
            "rules",
            {"mode": "rules", "allow": ["pypi.org"]},
        ),
        (nouns.Network(allowed_domains=["pypi.org"]), "rules", {"mode": "rules", "allow": ["pypi.org"]}),
        (nouns.Network(enabled=True, allowed_domains=[]), "rules", {"mode": "rules", "allow": []}),
        (nouns.Network(enabled=False), "open", {"mode": "off"}),
        (nouns.Network(enabled=True), "open", {"mode": "open"}),
        (None, "open", None),
    ],
)
def test_what_is_asked_for_is_given(
    asked: nouns.Network | None, most: str, network: dict[str, Any] | None
) -> None:
    assert tools.reach("moderate", asked, most=most, given=()) == ({"network": network} if network else {})
