"""Refusals are on record, each of them or as a number; and a flood fills nothing."""

import asyncio

from cloche import errors, events
from cloche.server import refusals
from tests.server.conftest import Clock


class Book:
    """A backend that keeps a record."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str, str]] = []

    def record_refusal(self, operation, sandbox, code, message):
        self.lines.append((events.caller.get(""), operation, code, message))

    def settle_audit(self):
        pass


def refuse(ledger, caller, code="key_refused", count=1):
    events.caller.set(caller)
    for _ in range(count):
        ledger.record("look", None, errors.error(code, "no"))


def test_a_flood_is_so_many_lines_and_a_number():
    book, clock = Book(), Clock()
    ledger = refusals.Ledger(book, clock)

    async def flood() -> None:
        refuse(ledger, "stranger", count=10_000)
        refuse(ledger, "stranger", "key_missing", count=5)
        refuse(ledger, "key:ci")
        assert len(book.lines) == refusals.A_MINUTE + 1
        clock.now = 60
        refuse(ledger, "stranger")

    asyncio.run(flood())
    assert len(book.lines) == refusals.A_MINUTE + 3
    summary = book.lines[-2]
    assert summary[:3] == ("stranger", "many", "key_refused")
    assert f"{10_005 - refusals.A_MINUTE} more" in summary[3]
    assert "key_missing 5" in summary[3]


def test_the_number_is_written_also_if_nobody_comes_any_more(monkeypatch):
    monkeypatch.setattr(refusals, "_MINUTE_S", 0.01)
    book = Book()
    ledger = refusals.Ledger(book)

    async def flood() -> None:
        refuse(ledger, "stranger", count=refusals.A_MINUTE + 7)
        while len(book.lines) <= refusals.A_MINUTE:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(flood(), 30))
    assert book.lines[-1][3].startswith("7 more")


def test_at_the_end_nothing_is_left_untold():
    book = Book()
    ledger = refusals.Ledger(book, Clock())

    async def flood() -> None:
        refuse(ledger, "a", count=refusals.A_MINUTE + 1)
        refuse(ledger, "b", count=refusals.A_MINUTE + 2)
        ledger.close()

    asyncio.run(flood())
    assert [(line[0], line[3][:6]) for line in book.lines if line[1] == "many"] == [
        ("a", "1 more"),
        ("b", "2 more"),
    ]


def test_many_callers_are_not_many_memories():
    book = Book()
    ledger = refusals.Ledger(book, Clock())
    for number in range(3000):
        refuse(ledger, f"jwt:{number}")
    assert len(ledger._windows) == 1000
    assert len(book.lines) == 3000


def test_one_refusal_is_one_line():
    book = Book()
    problem = errors.error("key_refused", "no")
    problem.record = "because"
    refusals.record_refusal(book, "look", None, problem)
    refusals.record_refusal(book, "look", None, problem)
    refusals.record_refusal(object(), "look", None, problem)
    assert [line[3] for line in book.lines] == ["because"]
