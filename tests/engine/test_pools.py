"""Templates, pools and claims in an engine: what is refused and leaves nothing, what is bound, who gets what.

Most of it on a driver in memory; `test_on_this_host` below is the same on the real one.
"""

import asyncio
import os

import msgspec
import pytest

from cloche import engine as engines
from cloche import errors, model, settings, stock, store, wiring, workspaces
from cloche.testing import fakes
from cloche.testing.clocks import FakeClock


def run(work):
    return asyncio.run(work)


class Bench:
    """An engine on a fake driver, for `async with`."""

    def __init__(self, home, *, driver=None, clock=None, warm=0, drivers=None, owner="", **limits):
        self.config = settings.Settings(home=str(home), limits=settings.Limits(**limits))
        self.driver = driver or fakes.FakeDriver(
            {"ok": fakes.Script(stdout=b"fine\n"), "no": fakes.Script(exit_code=3, stderr=b"broken\n")}
        )
        self.clock = clock
        self.warm = warm
        self.drivers = drivers
        self.owner = owner or wiring.owner()

    async def __aenter__(self):
        settings.make_home(self.config.home)
        self.store = store.Store(self.config.state_path)
        self.engine = engines.Engine(
            self.config,
            self.store,
            self.drivers or [("fake", lambda: self.driver)],
            owner=self.owner,
            interpreters=wiring.interpreters(),
            workspaces=workspaces.LocalWorkspaces(self.config.home, os.environ),
            egress=lambda: wiring.egress(self.config),
            secrets=lambda: wiring.secrets(self.config),
            policies=settings.PolicyFiles(self.config, {"HOME": self.config.home}),
            clock=self.clock,
            warm=self.warm,
        )
        return self

    async def __aexit__(self, *_):
        await self.engine.aclose()

    async def pool(self, template="base", size=2, **fields):
        info = await self.engine.put_pool(stock.PoolSpec(template=template, size=size, **fields))
        return await self.engine.wait_pool(info.name, timeout_s=30)

    async def claim(self, pool="base", **fields):
        return await self.engine.claim(stock.ClaimSpec(pool=pool, **fields))

    @property
    def live(self):
        return [machine for machine in self.driver.machines if not machine.ended.done()]

    async def settled(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


def refused(code):
    return _Refused(code)


class _Refused:
    def __init__(self, code):
        self.code = code

    def __enter__(self):
        return self

    def __exit__(self, kind, problem, _):
        assert isinstance(problem, errors.ClocheError), f"nothing was refused ({problem!r})"
        assert problem.code == self.code, problem
        self.error = problem
        return True


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


# ── templates ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "Data"}, "name_invalid"),
        ({"name": "x", "profile": "lax"}, "profile_unknown"),
        ({"name": "x", "policy": {"nothing": {}}}, "field_unknown"),
        ({"name": "x", "ports": (0,)}, "template_invalid"),
        ({"name": "x", "preload": ("a b",), "contexts": ("python",)}, "template_invalid"),
        ({"name": "x", "preload": ("json",)}, "template_invalid"),
        ({"name": "x", "resources": model.Resources(memory_mib=1)}, "limit_invalid"),
        ({"name": "x", "startup": (model.Action(),)}, "action_invalid"),
        ({"name": "base"}, "name_conflict"),
    ],
)
def test_a_template_that_cannot_be_is_refused_and_not_stored(home, fields, code):
    async def check():
        async with Bench(home) as bench:
            with refused(code):
                await bench.engine.put_template(stock.TemplateSpec(**fields))
            assert [t.spec.name for t in await bench.engine.templates()] == ["base", "python", "node"]

    run(check())


def test_templates_have_versions_and_conflicts(home):
    async def check():
        async with Bench(home) as bench:
            with refused("template_not_found"):
                await bench.engine.template("data")
            first = await bench.engine.put_template(stock.TemplateSpec(name="data", env={"A": "1"}))
            assert await bench.engine.put_template(first.spec) == first
            changed = msgspec.structs.replace(first.spec, env={"A": "2"})
            with refused("version_conflict"):
                await bench.engine.put_template(changed, if_version="0000")
            second = await bench.engine.put_template(changed, if_version=first.version)
            assert second.version != first.version
            assert msgspec.structs.replace(changed, name="other").version == second.version
            await bench.pool("data", 1)
            with refused("template_in_use"):
                await bench.engine.delete_template("data")
            await bench.engine.delete_pool("data")
            await bench.engine.delete_template("data")
            with refused("template_not_found"):
                await bench.engine.delete_template("data")
            with refused("template_in_use"):
                await bench.engine.delete_template("base")

    run(check())


def test_a_spec_takes_from_its_template_what_nobody_said(home):
    template = stock.TemplateSpec(
        name="data", env={"A": "template", "B": "template"}, timeout_s=77, cwd="/tmp",
        resources=model.Resources(memory_mib=256), labels={"team": "x"},
    )  # fmt: skip

    async def check():
        from cloche import rpc

        async with Bench(home) as bench:
            await bench.engine.put_template(template)
            said = {"template": "data", "env": {"A": "mine"}, "resources": {"pids": 9}}
            spec = rpc.complete(said, settings.Defaults(resources=model.Resources(memory_mib=128, cpus=2)))
            await bench.engine.create(spec)
            made = bench.driver.machines[0].spec
            assert made.env == {"A": "mine", "B": "template"}
            assert made.timeout_s == 77
            assert made.labels == {"team": "x"}
            assert made.resources == model.Resources(memory_mib=256, cpus=2, pids=9)
            own = rpc.complete({"template": "data", "timeout_s": 5}, settings.Defaults())
            await bench.engine.create(own)
            assert bench.driver.machines[1].spec.timeout_s == 5

    run(check())


# ── pools ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"template": "base", "size": -1}, "pool_invalid"),
        ({"template": "base", "min": 3, "max": 2}, "pool_invalid"),
        ({"template": "nowhere"}, "template_not_found"),
        ({"template": "base", "name": "Not A Name"}, "name_invalid"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_and_makes_nothing(home, fields, code):
    async def check():
        async with Bench(home) as bench:
            with refused(code):
                await bench.engine.put_pool(stock.PoolSpec(**fields))
            assert await bench.engine.pools() == []
            assert bench.driver.machines == []

    run(check())


def test_a_pool_that_is_not_there(home):
    async def check():
        async with Bench(home) as bench:
            for act in (
                bench.engine.pool("x"), bench.engine.delete_pool("x"), bench.engine.scale_pool("x", 1),
                bench.engine.wait_pool("x"), bench.claim("x"),
            ):  # fmt: skip
                with refused("pool_not_found"):
                    await act

    run(check())


def test_the_same_pool_again_is_the_same_and_another_body_a_conflict(home):
    async def check():
        async with Bench(home) as bench:
            info = await bench.pool(size=1)
            again = await bench.engine.put_pool(stock.PoolSpec(template="base", size=1))
            assert (again.name, again.generation) == (info.name, 1)
            with refused("name_conflict"):
                await bench.engine.put_pool(stock.PoolSpec(template="base", size=2))
            with refused("version_conflict"):
                await bench.engine.scale_pool("base", 3, if_generation=7)
            with refused("pool_invalid"):
                await bench.engine.scale_pool("base", -1)
            assert len(bench.live) == 1
            scaled = await bench.engine.scale_pool("base", 3, if_generation=1)
            assert (scaled.generation, scaled.size) == (2, 3)
            await bench.engine.wait_pool("base")
            await bench.engine.scale_pool("base", 0)
            await bench.settled(lambda: not bench.live)

    run(check())


def test_a_pool_fills_refills_and_leaves_nothing(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=3)
            claim = await bench.claim(env={"A": "1"}, files={"a.txt": b"x"})
            assert claim.warm
            await bench.engine.wait_pool("base")
            info = await bench.engine.pool("base")
            assert (info.ready, info.hits, info.misses, info.hit_rate) == (3, 1, 0, 1.0)
            assert info.claim.count == 1
            assert 0 < info.claim.p50_ms <= info.claim.max_ms
            assert len(bench.live) == 4
            assert claim.sandbox not in info.members
            await bench.engine.delete_pool("base")
            assert len(bench.live) == 1  # what was claimed lives on
            assert (await bench.engine.list())[0].id == claim.sandbox

    run(check())


def test_members_are_nobodys_until_they_are_claimed(home):
    async def check():
        async with Bench(home) as bench:
            info = await bench.pool(size=2)
            assert await bench.engine.list() == []
            with refused("sandbox_not_found"):
                await bench.engine.info(info.members[0])

    run(check())


def test_a_member_that_dies_is_replaced(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=2)
            bench.driver.machines[0].fail("the host took it")
            await bench.settled(lambda: len(bench.live) == 2 and len(bench.driver.machines) == 3)
            assert (await bench.engine.wait_pool("base")).ready == 2

    run(check())


def test_a_sandbox_of_the_same_template_and_shape_is_a_member(home):
    async def main():
        async with Bench(home) as bench:
            pool = await bench.pool(size=2)
            other = await bench.engine.create(
                model.SandboxSpec(template="base", resources=model.Resources(disk_mib=77))
            )
            assert other.id not in pool.members  # a disk is made with its sandbox
            assert (await bench.engine.pool("base")).hits == 0
            made = await bench.engine.create(
                model.SandboxSpec(env={"A": "1"}, labels={"l": "x"}, timeout_s=77, tenant="blue")
            )
            assert made.id in pool.members
            assert (made.labels, made.timeout_s, made.tenant) == ({"l": "x"}, 77, "blue")
            [machine] = [m for m in bench.live if any(b.env.get("A") == "1" for b in m.bindings)]
            assert machine is not None
            assert (await bench.engine.pool("base")).hits == 1
            again = [
                await bench.engine.create(model.SandboxSpec()) for _ in range(3)
            ]  # more than there are members
            assert len({made.id, other.id, *(info.id for info in again)}) == 5

    run(main())


def test_members_count_against_the_engines_capacity(home):
    async def check():
        async with Bench(home, max_sandboxes=3) as bench:
            await bench.pool(size=2)
            larger = model.SandboxSpec(resources=model.Resources(disk_mib=77))  # which no member can become
            await bench.engine.create(larger)
            with refused("capacity_exceeded"):
                await bench.engine.create(larger)

    run(check())


def test_a_failing_template_is_said_in_the_condition_and_leaves_nothing(home):
    bad = stock.TemplateSpec(name="bad", startup=(model.Action(run="no"),))

    async def check():
        async with Bench(home, clock=FakeClock()) as bench:
            await bench.engine.put_template(bad)
            await bench.engine.put_pool(stock.PoolSpec(template="bad", size=2))
            await bench.settled(lambda: bool(bench.driver.machines) and not bench.live)
            await bench.settled(
                lambda: bench.engine._stock.pool_info("bad").conditions[0].reason == "MembersFailing"
            )
            info = await bench.engine.pool("bad")
            assert "broken" in info.conditions[0].message
            with refused("wait_timeout"):
                await bench.engine.wait_pool("bad", timeout_s=0.05)
            with refused("startup_failed") as caught:
                await bench.claim("bad")
            assert "broken" in caught.error.message
            assert caught.error.details["output"] == "broken"
            assert not bench.live

    run(check())


def test_a_new_version_rolls_through_a_pool(home):
    async def check():
        async with Bench(home) as bench:
            spec = stock.TemplateSpec(name="data", env={"V": "1"})
            await bench.engine.put_template(spec)
            await bench.pool("data", 3, update="Rolling", max_surge=1)
            new = await bench.engine.put_template(msgspec.structs.replace(spec, env={"V": "2"}))

            def rolled():
                info = bench.engine._stock.pool_info("data")
                return info.ready == 3 and not info.outdated and info.template_version == new.version

            await bench.settled(rolled)
            # Those that were dropped may still be ending.
            await bench.settled(lambda: {machine.spec.env["V"] for machine in bench.live} == {"2"})
            claim = await bench.claim("data")
            assert claim.template_version == new.version

    run(check())


def test_a_broken_version_stops_the_roll_and_claims_go_on(home):
    async def check():
        async with Bench(home) as bench:
            spec = stock.TemplateSpec(name="data")
            old = await bench.engine.put_template(spec)
            await bench.pool("data", 3, update="Rolling", max_surge=0, max_unavailable=1)
            await bench.engine.put_template(msgspec.structs.replace(spec, startup=(model.Action(run="no"),)))

            def stopped():
                return any(
                    c.reason == "NewVersionNotReady" for c in bench.engine._stock.pool_info("data").conditions
                )

            await bench.settled(stopped)
            for _ in range(4):
                claim = await bench.claim("data")
                assert (claim.warm, claim.template_version) == (True, old.version)
                await bench.settled(lambda: bench.engine._stock.pool_info("data").ready >= 2)

    run(check())


# ── claims ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_claim_is_bound_in_one_message(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=1)
            claim = await bench.claim(
                env={"A": "1"}, files={"d/a.txt": b"x"}, labels={"who": "me"}, timeout_s=9,
                resources={"memory_mib": 64},
            )  # fmt: skip
            (machine,) = [m for m in bench.driver.machines if m.bindings]
            (binding,) = machine.bindings
            assert binding.env == {"A": "1"}
            assert list(binding.files) == [("d/a.txt", b"x", None)]
            assert binding.resources == model.Resources(memory_mib=64)
            assert await bench.engine.read_file(claim.sandbox, "d/a.txt") == b"x"
            info = await bench.engine.info(claim.sandbox)
            assert info.labels == {"who": "me"}
            assert info.expires_at == pytest.approx(info.created_at + 9, abs=1)
            assert info.limits["memory_mib"].value == 64
            assert [c.reason for c in claim.conditions] == ["DependenciesReady"]

    run(check())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "Bad Name"}, "name_invalid"),
        ({"env": {"A=": "1"}}, "environment_invalid"),
        ({"files": {"../x": b""}}, "path_invalid"),
        ({"files": {"/tmp": b""}}, "is_directory"),
        ({"timeout_s": -1}, "limit_invalid"),
        ({"wait_s": -1}, "limit_invalid"),
        ({"ttl_seconds_after_finished": -1}, "limit_invalid"),
        ({"resources": {"memory_mib": 1}}, "limit_invalid"),
        ({"resources": {"gpus": 1}}, "field_unknown"),
        ({"policy": {"nothing": {}}}, "field_unknown"),
        ({"files": {"a": bytes(65 << 20)}}, "file_too_large"),
        ({"requirements": stock.Requirements(sandbox="nosuchmember")}, "sandbox_not_found"),
    ],
)
def test_a_claim_that_cannot_be_is_refused_and_leaves_nothing(home, fields, code):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=1)
            with refused(code):
                await bench.claim(**fields)
            await bench.engine.wait_pool("base")
            assert await bench.engine.list() == []
            assert await bench.engine.claims() == []
            assert len(bench.live) == 1

    run(check())


def test_a_claim_that_names_a_bound_sandbox_is_refused(home):
    async def check():
        async with Bench(home) as bench:
            info = await bench.pool(size=2)
            wanted = stock.Requirements(sandbox=info.members[1])
            claim = await bench.claim(requirements=wanted)
            assert claim.sandbox == info.members[1]
            with refused("sandbox_claimed"):
                await bench.claim(requirements=wanted)
            await bench.engine.delete(claim.sandbox)
            with refused("sandbox_claimed"):
                await bench.claim(requirements=wanted)

    run(check())


def test_a_name_makes_a_claim_idempotent(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=2)
            one, two = await asyncio.gather(bench.claim(name="mine"), bench.claim(name="mine"))
            assert one == two
            with refused("name_conflict"):
                await bench.claim(name="mine", env={"A": "1"})
            assert await bench.engine.claim_info("mine") == one
            assert await bench.engine.claim_info(one.sandbox) == one
            await bench.engine.release_claim("mine")
            with refused("claim_not_found"):
                await bench.engine.claim_info("mine")
            assert await bench.engine.list() == []
            assert (await bench.claim(name="mine", env={"A": "1"})).sandbox != one.sandbox

    run(check())


def test_no_sandbox_is_granted_twice_however_many_ask_at_once(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=10)
            claims = await asyncio.gather(*(bench.claim() for _ in range(30)))
            assert len({claim.sandbox for claim in claims}) == 30
            assert sum(claim.warm for claim in claims) == 10
            info = await bench.engine.pool("base")
            assert (info.hits, info.misses) == (10, 20)

    run(check())


def test_what_cannot_be_bound_late_starts_cold_and_says_why(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=1)
            large = await bench.claim(resources={"disk_mib": 2048})
            assert not large.warm
            assert "disk" in (large.cold_reason or "")
            strict = await bench.claim(policy={"files": {"root": "read-only"}})
            assert "policy" in (strict.cold_reason or "")
            await bench.engine.wait_pool("base")
            least = stock.Requirements(resources=model.Resources(memory_mib=2048))
            none = await bench.claim(requirements=least)
            assert "2048" in (none.cold_reason or "")
            assert (await bench.engine.info(none.sandbox)).limits["memory_mib"].value == 2048
            with refused("sandbox_not_found"):
                await bench.claim(requirements=stock.Requirements(labels={"gpu": "1"}))
            assert len((await bench.engine.pool("base")).members) == 1
            template = await bench.claim("python")
            assert "no pool" in (template.cold_reason or "")
            assert (await bench.engine.pool("base")).misses == 3
            events = await bench.engine.events(limit=100)
            told = [e["data"]["reason"] for e in events if e["kind"] == "claimed"]
            assert told == [large.cold_reason, strict.cold_reason, none.cold_reason, template.cold_reason]

    run(check())


def test_a_member_that_ends_while_it_is_bound_is_passed_over(home):
    class Dying(fakes.FakeDriver):
        async def create(self, *arguments, **named):
            made = await super().create(*arguments, **named)
            if len(self.machines) == 1:
                real = made.bind

                async def bind(binding):
                    made.fail("it died just then")
                    await real(binding)

                made.bind = bind  # type: ignore[method-assign]
            return made

    async def check():
        async with Bench(home, driver=Dying()) as bench:
            await bench.pool(size=2)
            claim = await bench.claim(env={"A": "1"})
            assert claim.warm
            assert (await bench.engine.info(claim.sandbox)).phase == "running"

    run(check())


def test_deleting_the_sandbox_releases_the_claim(home):
    async def check():
        async with Bench(home) as bench:
            await bench.pool(size=1)
            claim = await bench.claim(name="mine")
            await bench.engine.delete(claim.sandbox)
            await bench.settled(lambda: not bench.engine._stock.claims._claims)
            assert await bench.engine.claims() == []

    run(check())


def test_a_sandbox_that_expires_finishes_its_claim(home):
    async def check():
        clock = FakeClock()
        async with Bench(home, clock=clock) as bench:
            await bench.pool(size=1)
            claim = await bench.claim(name="mine", timeout_s=10)
            clock.advance(11)
            bench.engine._reaper.sweep_once()
            await bench.settled(lambda: not bench.engine._sandboxes)
            ended = await bench.engine.claim_info("mine")
            assert ended.sandbox is None
            assert [c.reason for c in ended.conditions] == ["SandboxExpired", "SandboxExpired"]
            again = await bench.claim(name="mine", timeout_s=10)
            assert again.sandbox not in (None, claim.sandbox)

    run(check())


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_a_claim_ends_at_its_shutdown_time(home, policy):
    async def check():
        clock = FakeClock()
        async with Bench(home, clock=clock) as bench:
            await bench.pool(size=1)
            claim = await bench.claim(name="mine", shutdown_time=clock.time() + 0.01, shutdown_policy=policy)
            with_name = bench.engine._stock.claims._claims
            if policy == "Delete":
                await bench.settled(lambda: "mine" not in with_name)
                with refused("claim_not_found"):
                    await bench.engine.claim_info("mine")
            else:
                await bench.settled(lambda: with_name["mine"].info.sandbox is None)
                kept = await bench.engine.claim_info("mine")
                assert kept.conditions[0].reason == "ClaimExpired"
            await bench.settled(lambda: claim.sandbox not in bench.engine._sandboxes)

    run(check())


# ── startup actions ────────────────────────────────────────────────────────────────────────────────


def test_startup_actions_are_done_before_a_member_is_ready_and_told_in_the_claim(home):
    startup = (
        model.Action(write=model.FileToWrite(path="/tmp/f", content="x")),
        model.Action(run="ok"),
        model.Action(wait_for=model.Probe(command="ok")),
        model.Action(suspend="now"),
    )

    async def check():
        async with Bench(home) as bench:
            await bench.engine.put_template(stock.TemplateSpec(name="busy", startup=startup))
            await bench.pool("busy", 1)
            assert bench.driver.machines[0].paused
            claim = await bench.claim("busy")
            assert claim.warm
            assert not bench.driver.machines[0].paused
            words = claim.conditions[0].message
            assert all(word in words for word in ("wrote /tmp/f", "exited with 0", "suspended"))

    run(check())


@pytest.mark.parametrize(
    "action",
    [
        model.Action(wait_for=model.Probe(port=9, timeout_s=0.05, every_s=0.01)),
        model.Action(wait_for=model.Probe(command="no", timeout_s=0.05, every_s=0.01)),
        model.Action(write=model.FileToWrite(path="/tmp", content="x")),
        model.Action(run="no"),
    ],
    ids=lambda action: action.kind,
)
def test_a_startup_action_that_fails_ends_the_sandbox(home, action):
    async def check():
        async with Bench(home) as bench:
            await bench.engine.put_template(stock.TemplateSpec(name="busy", startup=(action,)))
            with refused("startup_failed"):
                await bench.claim("busy")
            assert not bench.live
            assert await bench.engine.list() == []

    run(check())


# ── what waits for `create` ────────────────────────────────────────────────────────────────────────


def _ready(bench):
    return sum(len(pool._ready) for pool in bench.engine._stock.guesses._pools.values())


def test_a_keeper_has_one_waiting_of_the_shape_that_was_used_last(home):
    async def check():
        async with Bench(home, warm=1) as bench:
            first = await bench.engine.create(model.SandboxSpec(env={"A": "1"}))
            await bench.settled(lambda: len(bench.live) == 2 and _ready(bench) == 1)
            waiting = bench.live[1]
            assert waiting.environment == {}
            second = await bench.engine.create(model.SandboxSpec(env={"A": "2"}, name="second"))
            assert waiting.environment == {"A": "2"}
            assert (await bench.engine.info("second")).id == second.id != first.id
            await bench.settled(lambda: len(bench.live) == 3)
            other = model.SandboxSpec(profile="restrictive")
            await bench.engine.create(other)
            await bench.settled(lambda: [m.spec.profile for m in bench.live].count("restrictive") == 2)
            await bench.settled(lambda: len(bench.live) == 4)

    run(check())


# ── after a restart ────────────────────────────────────────────────────────────────────────────────


def test_what_stays_is_there_after_a_restart_and_live_things_are_lost(home):
    async def check():
        async with Bench(home, owner="999999:1") as bench:
            await bench.engine.put_template(stock.TemplateSpec(name="data", env={"A": "1"}))
            await bench.pool("data", 2, stay=True)
            await bench.pool("base", 1)
            claim = await bench.claim("data", name="mine", stay=True)
            half = msgspec.structs.replace(claim, name="half", sandbox="x" * 20)
            bench.store.put_claim(half, "999999:1", "binding")
            bench.engine._stock.claims._claims.clear()  # the engine is killed: it tells nobody
            bench.engine._stock.claims._of_sandbox.clear()
            bench.engine._sandboxes.clear()
        async with Bench(home) as bench:
            await bench.engine.host()
            assert [info.name for info in await bench.engine.pools()] == ["data"]
            assert (await bench.engine.wait_pool("data")).ready == 2
            (found,) = await bench.engine.claims()
            assert found.name == "mine"
            assert found.sandbox is None
            assert found.conditions[0].reason == "SandboxMissing"
            assert (await bench.claim("data", name="mine", stay=True)).warm
            await bench.engine.delete_pool("data")
        async with Bench(home) as bench:
            await bench.engine.host()
            assert await bench.engine.pools() == []

    run(check())


# ── on this host ───────────────────────────────────────────────────────────────────────────────────


def test_on_this_host(home):
    """The whole way, with the real driver: contexts run ahead, env reaches them, limits are moved, nothing is left."""

    async def check():
        async with Bench(home, drivers=wiring.drivers(str(home))) as bench:
            spec = stock.TemplateSpec(
                name="data", contexts=("python", "bash"), preload=("json", "decimal"), cwd="/tmp",
                startup=(model.Action(run="echo made > /workspace/started"),),
            )  # fmt: skip
            await bench.engine.put_template(spec)
            await bench.pool("data", 2)
            claim = await bench.claim("data", env={"A": "late"}, files={"in/a.bin": bytes(range(256))})
            assert claim.warm, claim.cold_reason
            box = claim.sandbox
            code = await bench.engine.run_code(
                box, "import os, sys; [os.environ['A'], 'decimal' in sys.modules]"
            )
            assert (code.text, code.execution_count) == ("['late', True]", 1)
            shell = await bench.engine.run_code(box, "echo $A", language="bash")
            assert shell.stdout == "late\n"
            done = await bench.engine.exec(
                box,
                model.ExecRequest(
                    command="echo $A; pwd; cat /workspace/started; wc -c < /workspace/in/a.bin"
                ),
            )
            assert done.stdout == "late\n/tmp\nmade\n256\n"
            assert len(await bench.engine.contexts(box)) == 2
            await bench.engine.delete(box)
            await bench.engine.delete_pool("data")
            assert bench.engine.live == 0

    run(check())


def test_a_preload_that_cannot_be_imported_fails_the_member(home):
    async def check():
        async with Bench(home, drivers=wiring.drivers(str(home))) as bench:
            spec = stock.TemplateSpec(name="data", contexts=("python",), preload=("no_such_module",))
            await bench.engine.put_template(spec)
            await bench.engine.put_pool(stock.PoolSpec(template="data"))
            pool = bench.engine._stock.pool_info
            await bench.settled(lambda: pool("data").conditions[0].reason == "MembersFailing")
            assert "No module named 'no_such_module'" in pool("data").conditions[0].message

    run(check())
