"""The plan of a root is pure, so what it promises is checked for any view; applying it is checked in sandboxes."""

from __future__ import annotations

import posixpath
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cloche.linux import mounts

names = st.sampled_from(["a", "b", "c", ".git", "hooks", "config"])
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/work/" + "/".join(parts))
binds = st.builds(mounts.Bind, paths, paths, writable=st.booleans(), owner=st.booleans())


def view(**changes: Any) -> mounts.View:
    return mounts.View(
        skeleton="/skeleton", layers=("/usr", "/opt"), shm_mib=64, **{"writable": True, **changes}
    )


def covers(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def state_of(steps: list[Any], path: str) -> str:
    """What the last mount at or above a path makes of it: the kernel shows the newest one."""
    seen = "nothing"
    for act, target, _source, options in steps:
        if not covers(target, path):
            continue
        if act == "seal":
            seen = "read-only" if sum(covers(t, path) for a, t, *_ in steps if a != "seal") == 1 else seen
        elif act == "mask":
            seen = "hidden"
        elif act == "pin":
            continue  # the same directory again
        elif act in ("bind",):
            seen = "writable" if options["writable"] else "read-only"
        else:
            seen = "read-only" if act == "layer" else "writable"
    return seen


@given(
    st.lists(binds, max_size=4),
    st.lists(paths, max_size=4),
    st.lists(paths, max_size=4),
    st.lists(paths, max_size=4),
)
def test_no_later_step_re_exposes_a_denied_path(
    shown: list[mounts.Bind], deny: list[str], protect: list[str], pinned: list[str]
) -> None:
    steps = mounts.plan(
        view(
            binds=tuple(shown), deny=tuple(deny), protect=tuple((p, p) for p in protect), pinned=tuple(pinned)
        )
    )
    for path in deny:
        assert state_of(steps, path) == "hidden"
        assert state_of(steps, path + "/below") == "hidden"


@given(st.lists(binds, max_size=4), st.lists(paths, max_size=4), st.lists(paths, max_size=4))
def test_no_later_step_makes_a_protected_path_writable(
    shown: list[mounts.Bind], protect: list[str], private: list[str]
) -> None:
    steps = mounts.plan(
        view(
            binds=tuple(shown),
            protect=tuple((p, p) for p in protect),
            private=tuple(("/ours", p) for p in private),
        )
    )
    for path in protect:
        assert state_of(steps, path) == "read-only"


@given(st.lists(binds, max_size=6), st.lists(paths, max_size=6))
def test_a_parent_is_mounted_before_its_child_within_each_kind(
    shown: list[mounts.Bind], protect: list[str]
) -> None:
    steps = mounts.plan(view(binds=tuple(shown), protect=tuple((p, p) for p in protect)))
    for kind in (
        lambda s: s[0] == "bind" and s[3].get("make"),
        lambda s: s[0] in ("bind", "pin") and not s[3].get("make"),
    ):
        depths = [step[1].count("/") for step in steps if kind(step)]
        assert depths == sorted(depths)


def test_a_read_only_root_keeps_private_places_writable() -> None:
    steps = mounts.plan(view(writable=False))
    assert state_of(steps, "/usr/bin/python3") == "read-only"
    assert state_of(steps, "/etc/passwd") == "read-only"
    for place in mounts.PRIVATE:
        assert state_of(steps, place + "/file") == "writable"


def test_a_read_only_root_is_sealed_after_a_workspace_is_mounted() -> None:
    steps = mounts.plan(view(writable=False, binds=(mounts.Bind("/w", "/w", writable=True),)))
    assert steps[-1][0] == "seal"
    assert state_of(steps, "/etc/passwd") == "read-only"
    assert state_of(steps, "/w/file") == "writable"


def test_layers_within_layers_are_mounted_outermost_first() -> None:
    steps = mounts.plan(mounts.View(skeleton="/s", layers=("/usr/local", "/usr"), shm_mib=1, writable=True))
    order = [step[1] for step in steps if step[0] == "overlay"]
    assert order == ["/", "/usr", "/usr/local"]


def test_a_plan_is_plain_data() -> None:
    import json

    steps = mounts.plan(view(binds=(mounts.Bind("/a", "/b", writable=True),), deny=("/b/c",)))
    assert json.loads(json.dumps(steps)) == steps
    assert all(posixpath.isabs(step[1]) for step in steps)
