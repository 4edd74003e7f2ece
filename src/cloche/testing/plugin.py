"""Sandboxes for your tests. Installed with the package; pytest finds it by itself.

    def test_it_prints(sandbox):                        # a fresh sandbox, deleted afterwards
        assert sandbox.exec("echo hi").stdout == "hi\\n"

    def test_two_of_them(make_sandbox):                 # as many as you like, described like `cloche.Sandbox`
        small, large = make_sandbox(memory_mib=64), make_sandbox(memory_mib=1024)

    @pytest.fixture
    def sandbox_options():                              # what `sandbox` is made with, per module, class or project
        return {"profile": "restrictive"}

A test that ends with its sandbox gone already (expired, deleted) is fine. pytest loads this at every start, wanted or
not, so it imports nothing of ours before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cloche.sdk.sync import Sandbox


@pytest.fixture
def sandbox_options() -> dict[str, Any]:
    """The arguments that the fixture `sandbox` is made with; override it to change them."""
    return {}


@pytest.fixture
def make_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """A function that makes sandboxes, with the arguments of `cloche.Sandbox`; all are deleted after the test."""
    from cloche.sdk.sync import Sandbox

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Sandbox(**options))


@pytest.fixture
def sandbox(make_sandbox: Callable[..., Sandbox], sandbox_options: dict[str, Any]) -> Sandbox:
    """A fresh sandbox, deleted after the test."""
    return make_sandbox(**sandbox_options)
