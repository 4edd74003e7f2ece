"""Idempotency keys by themselves: what is kept, for how long, and who does the work when somebody leaves."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cloche import errors
from cloche.server.http import remembering
from tests.server.conftest import Clock


class Work:
    """Counts how often it is done, and ends when it is told to."""

    def __init__(self, body: bytes = b"done") -> None:
        self.count = 0
        self.body = body
        self.go = asyncio.Event()

    async def __call__(self) -> Response:
        self.count += 1
        await self.go.wait()
        return Response(self.body, 201, headers={"ETag": '"1"'})


async def patient(work):
    return await work


def test_another_request_with_the_same_key_is_refused_also_while_the_first_is_under_way():
    async def main():
        kept, work = remembering.Remembered(), Work()
        first = asyncio.ensure_future(kept.once(("ci", "k"), "a", work, patient))
        await asyncio.sleep(0)
        with pytest.raises(errors.Conflict) as caught:
            await kept.once(("ci", "k"), "b", work, patient)
        assert caught.value.code == "name_conflict"
        work.go.set()
        await first
        assert work.count == 1

    asyncio.run(main())


def test_repeats_and_those_at_once_are_one_execution_with_one_answer():
    async def main():
        kept, work = remembering.Remembered(), Work()
        asked = [asyncio.ensure_future(kept.once(("ci", "k"), "a", work, patient)) for _ in range(5)]
        await asyncio.sleep(0)
        work.go.set()
        answers = [*await asyncio.gather(*asked), await kept.once(("ci", "k"), "a", work, patient)]
        assert {(answer.body, answer.status_code, answer.headers["etag"]) for answer in answers} == {
            (b"done", 201, '"1"')
        }
        assert len({id(answer) for answer in answers}) == 6
        assert work.count == 1
        await kept.once(("other", "k"), "b", work, patient)
        assert work.count == 2

    asyncio.run(main())


def test_a_failure_is_not_kept():
    async def main():
        kept = remembering.Remembered()

        async def fail():
            raise errors.error("capacity_exceeded", "full")

        for _ in range(2):
            with pytest.raises(errors.CapacityExceeded):
                await kept.once(("ci", "k"), "a", fail, patient)
        work = Work()
        work.go.set()
        assert (await kept.once(("ci", "k"), "b", work, patient)).body == b"done"

    asyncio.run(main())


def test_work_goes_on_when_its_client_leaves():
    async def main():
        kept, work = remembering.Remembered(), Work()

        async def leaving(waited):
            raise ClientDisconnect

        with pytest.raises(ClientDisconnect):
            await kept.once(("ci", "k"), "a", work, leaving)
        second = asyncio.ensure_future(kept.once(("ci", "k"), "a", work, patient))
        await asyncio.sleep(0)
        work.go.set()
        assert (await second).body == b"done"
        assert work.count == 1

    asyncio.run(main())


def test_work_that_ends_with_its_client_is_begun_anew_by_who_still_waits():
    async def main():
        kept, work = remembering.Remembered(), Work()
        gone = asyncio.Event()

        async def fleeting():
            await gone.wait()
            raise ClientDisconnect

        first = asyncio.ensure_future(kept.once(("ci", "k"), "a", fleeting, patient))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(kept.once(("ci", "k"), "a", work, patient))
        await asyncio.sleep(0)
        gone.set()
        work.go.set()
        assert (await second).body == b"done"
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(first, 5)
        assert work.count == 1

    asyncio.run(main())


@pytest.mark.parametrize("bound", ["age", "number", "bytes"])
def test_what_is_kept_is_bounded(monkeypatch, bound):
    monkeypatch.setattr(remembering, "_MOST", 3)
    monkeypatch.setattr(remembering, "_MOST_BYTES", 3000)

    async def main():
        clock = Clock()
        kept = remembering.Remembered(clock)
        work = Work(b"x" * (1600 if bound == "bytes" else 1))
        work.go.set()
        for number in range(4 if bound == "number" else 2):
            await kept.once(("ci", str(number)), "a", work, patient)
        clock.now = remembering._KEPT_S + 1 if bound == "age" else 0
        await kept.once(("ci", "more"), "a", work, patient)
        before = work.count
        await kept.once(("ci", "0"), "a", work, patient)
        assert work.count == before + 1  # the oldest was forgotten
        assert len(kept._known) <= 4

    asyncio.run(main())
