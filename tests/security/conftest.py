"""One state directory and one engine for the whole suite; a sandbox per test, or per module where nothing is changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security import glass


@pytest.fixture(scope="session")
def home_of_the_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", autouse=True)
def state_directory(home_of_the_suite: Path) -> Iterator[Path]:
    """An engine in this process, with a state directory that nobody else uses. Per module, because the same process runs
    other suites in between, which have theirs; the engine itself stays until the end of the session."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CLOCHE_HOME", str(home_of_the_suite))
        environment.setenv("CLOCHE_KEEPER", "off")
        environment.delenv("CLOCHE_URL", raising=False)
        yield home_of_the_suite


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
