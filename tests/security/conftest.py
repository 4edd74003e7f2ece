"""One state directory and one engine for the whole suite; a sandbox per test, or per module where nothing is changed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.sdk import portal
from tests.security import glass


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An engine in this process, with a state directory that nobody else uses."""
    home = tmp_path_factory.mktemp("state")
    before = dict(os.environ)
    os.environ.update(CLOCHE_HOME=str(home), CLOCHE_KEEPER="off")
    os.environ.pop("CLOCHE_URL", None)
    yield home
    portal.get().close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def box() -> Iterator[glass.Box]:
    with glass.box() as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[glass.Box]:
    """One sandbox for tests that only look."""
    with glass.box(profile="moderate") as made:
        yield made


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[str, glass.Box]]:
    """One sandbox of each profile for tests that only look."""
    made = {profile: glass.Box(profile=profile) for profile in glass.PROFILES}
    yield made
    for one in made.values():
        one.delete()


@pytest.fixture
def canary(tmp_path: Path) -> glass.Canary:
    return glass.Canary(tmp_path)


@pytest.fixture
def canary_process() -> Iterator[glass.CanaryProcess]:
    made = glass.CanaryProcess()
    yield made
    made.end()
