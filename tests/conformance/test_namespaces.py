"""The driver `namespaces` against the suite: as whoever runs this, and as an ordinary user from the built package."""

import os
from collections.abc import Iterator

import pytest

from cloche.drivers import namespaces
from cloche.testing import conformance
from tests.conformance import gaps
from tests.conformance.conftest import Report

DRIVER = "cloche.drivers.namespaces:NamespacesDriver"
GAPS = gaps.of("namespaces", root=os.geteuid() == 0)
ORDINARY = gaps.of("namespaces", root=False)


@pytest.fixture(scope="module")
def session() -> Iterator[conformance.Session]:
    with conformance.Session(namespaces.NamespacesDriver) as session:
        yield session


@pytest.mark.parametrize("behaviour", conformance.pytest_params(GAPS))
def test_namespaces(session: conformance.Session, behaviour: conformance.Behaviour) -> None:
    session.check(behaviour)


def test_nothing_is_missing_for_root() -> None:
    assert len(conformance.BEHAVIOURS) >= 80
    if os.geteuid() == 0:
        assert GAPS == {}


@pytest.mark.timeout(400)
def test_an_ordinary_user_gets_the_same_but_for_the_gaps(ordinary_report: Report) -> None:
    report = ordinary_report()
    assert {name: why for name, why in report["failed"].items() if name not in ORDINARY} == {}
    assert ORDINARY.keys() - report["failed"].keys() == set(), "stale gaps"
    assert len(report["passed"]) == len(conformance.BEHAVIOURS) - len(ORDINARY)
