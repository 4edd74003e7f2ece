"""Every call of the table, with every pair of SDKs that has it; its effect through our own SDK."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import cloche
from tests.server import conftest as server
from tests.wires.e2b import table
from tests.wires.e2b.conftest import Client, client_of

pytestmark = pytest.mark.timeout(900)
LEAST = 60
_ORDER = (table.OLD, table.MIDDLE, table.NEW)
RUNS = [
    pytest.param(pair, case, id=f"{pair}-{case.call}", marks=[] if pair == table.NEW else [pytest.mark.slow])
    for pair in reversed(_ORDER)
    for case in table.TABLE
    if _ORDER.index(case.since) <= _ORDER.index(pair)
]


class Party:
    """A client's program and its shared sandbox, by both SDKs."""

    def __init__(self, pair: str, served: server.Served) -> None:
        self.program = client_of(pair, served)
        self.program("import e2b, asyncio, time\nfrom e2b_code_interpreter import Sandbox")
        self.box = self.program("box = Sandbox.create(timeout=3000)\nanswer = box.sandbox_id")

    def close(self) -> None:
        self.program("box.kill()")
        self.program.close()


@pytest.fixture(scope="session")
def parties(served: server.Served) -> Iterator[dict[str, Party]]:
    made: dict[str, Party] = {}
    yield made
    for party in made.values():
        party.close()


@pytest.fixture
def party(pair: str, parties: dict[str, Party], served: server.Served) -> Party:
    if pair not in parties:
        parties[pair] = Party(pair, served)
    return parties[pair]


@pytest.mark.parametrize(("pair", "case"), RUNS)
def test_a_call_and_its_effect(
    pair: str,
    case: table.Case,
    party: Party,
    served: server.Served,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOCHE_API_KEY", served.key)
    program: Client = party.program
    program("own = None")

    def ours(sandbox: str) -> cloche.Sandbox:
        return cloche.Sandbox.get(sandbox, server=served.url)

    try:
        answer: Any = program(case.source)
        assert case.effect(table.Seen(answer, ours(party.box), ours, http, program)), answer
    finally:
        program("answer = own.kill() if own is not None else None")


def test_there_are_enough_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    names = [case.call for case in table.TABLE]
    assert len(set(names)) == len(names)
    with capsys.disabled():
        print(f" {len(names)} calls of the SDK, {len(RUNS)} runs with three versions ", end="")
    assert len(names) >= LEAST
