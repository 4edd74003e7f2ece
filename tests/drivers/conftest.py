"""Drivers are tested without the engine that other tests share: its embryos would be counted as left behind."""

import pytest

from cloche.sdk import portal


@pytest.fixture(autouse=True, scope="module")
def no_shared_engine() -> None:
    portal.close()
