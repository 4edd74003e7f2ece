"""The driver `namespaces` against the suite: as whoever runs this, and as an ordinary user from the built package."""

import os
from collections.abc import Iterator

import pytest

from cloche.drivers import namespaces
from cloche.testing import conformance
from tests.conformance import gaps
from tests.conformance.conftest import Reports

GAPS = gaps.of("namespaces", root=os.geteuid() == 0)
ORDINARY = gaps.of("namespaces", root=False)


@pytest.fixture(scope="module")
def session() -> Iterator[conformance.Session]:
    with conformance.Session(namespaces.NamespacesDriver) as session:
        yield session


@pytest.mark.parametrize("behaviour", conformance.pytest_params(GAPS))
def test_namespaces(session: conformance.Session, behaviour: conformance.Behaviour) -> None:
    session.check(behaviour)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("behaviour", conformance.pytest_params(ORDINARY))
def test_as_an_ordinary_user(ordinary_reports: Reports, behaviour: conformance.Behaviour) -> None:
    failed = ordinary_reports("namespaces")["failed"]
    assert behaviour.name not in failed, failed[behaviour.name]


def test_nothing_is_missing_for_root() -> None:
    assert len(conformance.BEHAVIOURS) >= 80
    if os.geteuid() == 0 and not set(GAPS) & set(gaps.NO_CGROUP):
        assert GAPS == {}
