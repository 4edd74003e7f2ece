"""Quotas in an engine: what there is no room for is refused and leaves nothing, also if a hundred come at once."""

import asyncio
import os
import subprocess
import sys

import msgspec
import pytest

from cloche import engine as engines
from cloche import errors, model, settings, stock, wiring
from cloche.engine import quotas
from cloche.testing.clocks import FakeClock
from tests.engine.test_pools import Bench


class Limited(Bench):
    def __init__(self, home, *, tenants=None, clock=None, **said):
        super().__init__(home, clock=clock)
        given = {name: settings.Quota(**quota) for name, quota in (tenants or {}).items()}
        self.config = msgspec.structs.replace(self.config, quotas=settings.Quotas(**said, tenants=given))


def spec(tenant="", **more):
    return model.SandboxSpec(tenant=tenant, **more)


def resources(**more):
    return model.Resources(**{"memory_mib": 100, "cpus": 0.5, "disk_mib": 100, **more})


async def outcomes(work):
    """How many succeeded, and the errors of the others."""
    done = await asyncio.gather(*work, return_exceptions=True)
    problems = [one for one in done if isinstance(one, BaseException)]
    assert all(isinstance(one, errors.ClocheError) for one in problems), problems
    return len(done) - len(problems), problems


@pytest.mark.parametrize(
    ("quota", "used", "wanted"),
    [
        ({"sandboxes": 3}, 3, 1),
        ({"cpus": 1.5}, 1.5, 0.5),
        ({"memory_mib": 399}, 300, 100),
        ({"disk_mib": 350}, 300, 100),
        ({"creations_per_minute": 3}, 3, 1),
    ],
)
def test_what_there_is_no_room_for_is_refused_by_name_and_leaves_nothing(tmp_path, quota, used, wanted):
    async def attempt():
        async with Limited(tmp_path, clock=FakeClock(), **quota) as bench:
            for _ in range(3):
                await bench.engine.create(spec("red", resources=resources()))
            with pytest.raises(errors.CapacityExceeded) as caught:
                await bench.engine.create(spec("red", name="one-more", resources=resources()))
            name, limit = next(iter(quota.items()))
            details = caught.value.details
            assert caught.value.code == "quota_exceeded"
            assert (details["quota"], details["limit"], details["used"], details["wanted"]) == (
                name,
                limit,
                used,
                wanted,
            )
            assert ("retry_after_s" in details) is (name == "creations_per_minute")
            assert len(await bench.engine.list()) == 3
            await bench.engine.create(spec("blue", resources=resources()))

    asyncio.run(attempt())


def test_of_a_hundred_at_once_as_many_are_let_in_as_there_is_room_for(tmp_path):
    async def attempt():
        async with Limited(tmp_path, sandboxes=10) as bench:
            made, problems = await outcomes([bench.engine.create(spec("red")) for _ in range(100)])
            assert (made, len(problems)) == (10, 90)
            assert {problem.code for problem in problems} == {"quota_exceeded"}
            assert len(await bench.engine.list()) == 10
            for info in (await bench.engine.list())[:4]:
                await bench.engine.delete(info.id)
            made, _ = await outcomes([bench.engine.create(spec("red")) for _ in range(100)])
            assert made == 4

    asyncio.run(attempt())


def test_claims_creations_and_forks_at_once_share_the_room(tmp_path):
    async def attempt():
        async with Limited(tmp_path, sandboxes=10) as bench:
            await bench.pool(size=5)
            first = await bench.engine.create(spec())
            work = [bench.engine.create(spec()) for _ in range(20)]
            work += [bench.claim(wait_s=30) for _ in range(20)]
            made, problems = await outcomes(work)
            assert made == 9
            assert {problem.code for problem in problems} == {"quota_exceeded"}
            assert len(await bench.engine.list()) == 10
            with pytest.raises(errors.CapacityExceeded) as caught:
                await bench.engine.fork(first.id, 1)
            assert caught.value.details["quota"] == "sandboxes"
            assert (await bench.engine.snapshots()) == []

    asyncio.run(attempt())


def test_forks_are_all_or_none_and_count_before_anything_is_kept(tmp_path):
    async def attempt():
        async with Limited(tmp_path, sandboxes=4, creations_per_minute=20) as bench:
            first = await bench.engine.create(spec("red"))
            with pytest.raises(errors.CapacityExceeded) as caught:
                await bench.engine.fork(first.id, 4)
            assert caught.value.details["wanted"] == 4
            assert len(await bench.engine.list()) == 1
            assert await bench.engine.snapshots() == []

    asyncio.run(attempt())


def test_a_failed_creation_gives_its_room_back(tmp_path):
    async def attempt():
        async with Limited(tmp_path, sandboxes=2, memory_mib=300) as bench:
            for _ in range(5):
                with pytest.raises(errors.ClocheError):
                    await bench.engine.create(spec("red", driver="nonsense"))
            made, _ = await outcomes(
                [bench.engine.create(spec("red", resources=resources())) for _ in range(2)]
            )
            assert made == 2
            assert bench.engine._quotas._coming == {}

    asyncio.run(attempt())


def test_the_same_name_again_takes_no_more_room(tmp_path):
    async def attempt():
        async with Limited(tmp_path, sandboxes=1, creations_per_minute=1) as bench:
            same = await asyncio.gather(*(bench.engine.create(spec("red", name="a")) for _ in range(10)))
            assert len({info.id for info in same}) == 1

    asyncio.run(attempt())


def test_a_minute_has_so_many_creations_and_says_when_the_next_is(tmp_path):
    async def attempt():
        clock = FakeClock()
        async with Limited(tmp_path, clock=clock, creations_per_minute=3) as bench:
            for _ in range(3):
                await bench.engine.delete((await bench.engine.create(spec("red"))).id)
                clock.advance(10)
            with pytest.raises(errors.CapacityExceeded) as caught:
                await bench.engine.create(spec("red"))
            assert caught.value.details["retry_after_s"] == pytest.approx(30)
            clock.advance(29.9)
            made, _ = await outcomes([bench.engine.create(spec("red"))])
            assert made == 0
            clock.advance(0.2)
            made, _ = await outcomes([bench.engine.create(spec("red")) for _ in range(5)])
            assert made == 1

    asyncio.run(attempt())


def test_a_tenant_s_own_quota_and_that_of_who_has_none(tmp_path):
    async def attempt():
        tenants = {"red": {"sandboxes": 3}, "-": {"sandboxes": 1}, "none": {"sandboxes": 0}}
        async with Limited(tmp_path, sandboxes=2, tenants=tenants) as bench:
            for tenant, most in (("red", 3), ("blue", 2), ("", 1), ("none", 0)):
                made, _ = await outcomes([bench.engine.create(spec(tenant)) for _ in range(5)])
                assert made == most, tenant

    asyncio.run(attempt())


EARLIER = """
import asyncio, os
from cloche import model, wiring

async def main():
    engine = wiring.make_engine(os.environ)
    made = await engine.create(model.SandboxSpec(tenant="red", stay=True, timeout_s=None))
    await engine.suspend(made.id, "archive")
    await engine.aclose()

asyncio.run(main())
"""


@pytest.fixture
def place(tmp_path):
    """An environment of its own, and an engine in it with quotas."""
    environment = {
        "CLOCHE_HOME": str(tmp_path / "h"), "HOME": str(tmp_path), "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip

    def make(**said):
        config = settings.Settings(home=environment["CLOCHE_HOME"], quotas=settings.Quotas(**said))
        return wiring.make_engine(environment, config=config)

    return environment, make


def test_what_is_archived_keeps_its_place_and_needs_room_to_wake(place):
    async def attempt():
        engine: engines.Engine = place[1](sandboxes=2, memory_mib=250)
        try:
            first = await engine.create(spec("red", resources=resources(memory_mib=200)))
            await engine.suspend(first.id, "archive")
            second = await engine.create(spec("red", resources=resources(memory_mib=200)))
            with pytest.raises(errors.CapacityExceeded) as caught:
                await engine.exec(first.id, model.ExecRequest(command="true"))
            assert caught.value.details["quota"] == "memory_mib"
            with pytest.raises(errors.CapacityExceeded) as caught:
                await engine.create(spec("red", resources=resources(memory_mib=8)))
            assert caught.value.details["quota"] == "sandboxes"
            await engine.delete(second.id)
            assert (await engine.exec(first.id, model.ExecRequest(command="true"))).exit_code == 0
            await engine.delete(first.id)
        finally:
            await engine.aclose()

    asyncio.run(attempt())


def test_what_an_earlier_engine_archived_counts(place):
    environment, make = place
    done = subprocess.run([sys.executable, "-c", EARLIER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    async def attempt():
        engine: engines.Engine = make(sandboxes=3)
        try:
            made, _ = await outcomes([engine.create(spec("red", resources=resources())) for _ in range(5)])
            assert made == 2
            kept = next(info for info in await engine.list() if info.phase == "archived")
            await engine.resume(kept.id)
            made, _ = await outcomes([engine.create(spec("red", resources=resources()))])
            assert made == 0
        finally:
            await engine.aclose()

    asyncio.run(attempt())


def test_amounts_add_up():
    many = [quotas.of(model.Resources(cpus=0.1)) for _ in range(10)]
    kept = quotas.Quotas(settings.Quotas(cpus=1.0), lambda _: many[:9], lambda: 0.0)
    with kept.admit("red", many[9]):
        pass
    with pytest.raises(errors.CapacityExceeded):
        kept.check("red", quotas.of(model.Resources(cpus=0.2)))
    assert quotas.waking(model.Resources(cpus=2, memory_mib=64)) == quotas.Amounts(0, 2, 64, 0)


def test_a_claim_counts_what_it_requires(tmp_path):
    async def attempt():
        async with Limited(tmp_path, memory_mib=1000) as bench:
            least = stock.Requirements(resources=model.Resources(memory_mib=2000))
            with pytest.raises(errors.CapacityExceeded) as caught:
                await bench.claim(requirements=least)
            assert caught.value.details["wanted"] == 2000
            assert await bench.engine.list() == []

    asyncio.run(attempt())
