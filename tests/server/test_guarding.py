"""The guard has thought about every method, and refuses what nobody thought about."""

import asyncio

import pytest

from cloche import errors, interfaces, model, policy, rpc
from cloche.server import guarding
from cloche.server.http.operations import SCOPES

STRANGER = guarding.Principal("nobody", "red", frozenset())


class Nothing:
    """A backend that must not be reached."""

    where = "nowhere"

    def __getattr__(self, name):
        return getattr(interfaces.Backend, name).__get__(self)


def test_every_method_has_a_scope_and_every_scope_exists():
    assert set(guarding.SCOPES) == set(rpc.methods())
    assert set(guarding.SCOPES.values()) <= set(SCOPES)


@pytest.mark.parametrize("name", sorted(rpc.methods()))
def test_without_the_scope_nothing_is_reached(name):
    guarded = guarding.guard(Nothing(), STRANGER)  # type: ignore[arg-type]
    arguments = {field: object() for field in rpc.methods()[name].parameters.__struct_fields__}

    async def attempt():
        made = getattr(guarded, name)(**arguments)
        return await (anext(made) if rpc.methods()[name].streams else made)

    with pytest.raises(errors.PolicyRefused) as caught:
        asyncio.run(attempt())
    assert caught.value.code == "scope_missing"


def test_a_host_path_does_not_pass():
    caller = guarding.Principal("k", "", frozenset(("*",)))
    guarded = guarding.guard(Nothing(), caller)  # type: ignore[arg-type]
    with pytest.raises(errors.PolicyRefused) as caught:
        asyncio.run(guarded.create(model.SandboxSpec(workspace="/etc")))
    assert caught.value.code == "host_path_refused"


@pytest.mark.parametrize(
    "said",
    [
        {"files": {"read": ["/srv"]}},
        {"files": {"write": ["/srv"]}},
        {"profiles": {"a": {"files": {"read": ["/srv"]}}}},
        {"agents": {"a": {"files": {"deny": ["x"], "write": ["/srv"]}}}},
        {"files": [["read", "/srv"]]},
        {"profiles": [{"files": {"read": ["/srv"]}}]},
    ],
    ids=repr,
)
def test_directories_of_the_host_do_not_pass_in_a_policy(said):
    caller = guarding.Principal("k", "", frozenset(("*",)))
    guarded = guarding.guard(Nothing(), caller)  # type: ignore[arg-type]
    with pytest.raises(errors.PolicyRefused) as caught:
        asyncio.run(guarded.create(model.SandboxSpec(policy=said)))
    assert caught.value.code == "host_path_refused"
    assert not policy.names_directories({"files": {"deny": ["x"]}, "profiles": {"a": {"base": "moderate"}}})
