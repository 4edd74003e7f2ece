"""What a pool makes and drops: refusals, the arithmetic one rule at a time, and then everything at once."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche import errors
from cloche.lifecycle import pools
from cloche.stock import PoolSpec


def spec(**fields):
    return PoolSpec(template="t", **fields)


def member(name, version="v1", ready=True, since=0.0):
    return pools.Member(name, version, ready, since)


def ready(count, version="v1", first=0):
    return [member(f"{version}-{first + n}", version, True, float(n)) for n in range(count)]


def look(wanted, members=(), *, version="v1", now=100.0, state=None, ending=0):
    state = state or pools.State(window=pools.MAX_BATCH, tokens_at=now)
    return pools.plan(pools.Observed(wanted, version, list(members), state, ending), now)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"size": -1}, "size"),
        ({"size": 10**9}, "size"),
        ({"min": 5, "max": 3, "size": 4}, "max"),
        ({"max": 0}, "max"),
        ({"min": 2}, "min"),
        ({"min": 2, "max": 4, "size": 5}, "size"),
        ({"min": 2, "max": 4, "size": 1}, "size"),
        ({"update": "Rolling", "max_surge": 0}, "max_surge"),
        ({"max_surge": -1}, "max_surge"),
        ({"refill_per_s": 0}, "refill_per_s"),
        ({"ready_grace_s": 0}, "ready_grace_s"),
        ({"min": 1, "max": 4, "scale_to_zero_after_s": 10}, "scale_to_zero_after_s"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_field(fields, field):
    with pytest.raises(errors.InvalidInput) as caught:
        pools.check(spec(**fields))
    assert caught.value.details["field"] == field
    assert caught.value.code in ("pool_invalid", "limit_invalid")


def test_a_pool_that_can_be_is_not_refused():
    pools.check(spec(size=3, min=1, max=5, update="Rolling"))
    pools.check(spec(size=0, scale_to_zero_after_s=60))


# ── one rule at a time ─────────────────────────────────────────────────────────────────────────────


def test_slow_start_doubles():
    state, batches = pools.State(), []
    members: list[pools.Member] = []
    for _ in range(5):
        plan = look(spec(size=20), members, state=state)
        batches.append(plan.create)
        state = plan.state
        for _ in range(plan.create):
            state = pools.made(state, "v1", "v1")
        members += ready(plan.create, first=len(members))
    assert batches == [1, 2, 4, 8, 5]


def test_members_in_the_making_count_against_the_window_and_the_size():
    making = [member(f"m{n}", ready=False, since=99) for n in range(3)]
    assert look(spec(size=10), making, state=pools.State(window=4)).create == 1
    assert look(spec(size=3), making).create == 0


def test_what_ends_still_takes_its_place():
    assert look(spec(size=3), ready(1), ending=2).create == 0


def test_a_failure_closes_the_window_and_waits_longer_each_time():
    state = pools.failed(pools.State(window=8), "no disk", 100)
    assert look(spec(size=3), now=100.5, state=state).create == 0
    assert look(spec(size=3), now=101, state=state).create == 1
    state = pools.failed(state, "no disk", 101)
    plan = look(spec(size=3), now=102.5, state=state)
    assert (plan.create, plan.look_at) == (0, 103)
    ready_condition = plan.conditions[0]
    assert (ready_condition.status, ready_condition.reason) == ("False", "MembersFailing")
    assert "no disk" in ready_condition.message


def test_the_refill_rate_is_a_token_bucket():
    wanted = spec(size=100, refill_per_s=2)
    state = pools.State(window=32, tokens=2, tokens_at=100)
    first = look(wanted, now=100, state=state)
    assert first.create == 2
    second = look(wanted, now=100.4, state=first.state)
    assert second.create == 0
    assert second.look_at == pytest.approx(100.5)
    assert look(wanted, now=110, state=second.state).create == 2  # the bucket holds no more


def test_a_stuck_member_is_dropped_and_counts_as_a_failure():
    plan = look(spec(size=2, ready_grace_s=30), [member("m", ready=False, since=70)])
    assert plan.drop == ("m",)
    assert plan.state.failures == 1
    assert plan.create == 0  # it waits first


def test_scaling_down_drops_unready_ones_first_then_the_newest():
    members = [*ready(3), member("unready", ready=False, since=50)]
    assert look(spec(size=2), members).drop == ("unready", "v1-2")


def test_on_replenish_keeps_what_is_there():
    plan = look(spec(size=3), ready(2), version="v2")
    assert (plan.create, plan.drop) == (1, ())
    assert plan.conditions[-1].reason == "OnReplenish"


def test_recreate_drops_the_old_at_once():
    plan = look(spec(size=2, update="Recreate"), ready(2), version="v2")
    assert set(plan.drop) == {"v1-0", "v1-1"}
    assert plan.create == 0  # their places are free when they are gone
    assert look(spec(size=2, update="Recreate"), [], version="v2").create == 2


def proven(version="v1", **fields):
    return pools.State(window=pools.MAX_BATCH, proven=version, tokens_at=100, **fields)


def test_a_rolling_update_surges_first_and_drops_for_each_that_is_ready():
    wanted = spec(size=3, update="Rolling", max_surge=1)
    first = look(wanted, ready(3), version="v2", state=proven())
    assert (first.create, first.create_stable, first.drop) == (1, 0, ())
    mixed = [*ready(3), *ready(1, "v2")]
    second = look(wanted, mixed, version="v2", state=proven("v2"))
    assert second.drop == ("v1-0",)
    assert second.create == 0  # the surge is used up until that one is gone


def test_a_rolling_update_whose_version_never_becomes_ready_stops_and_says_why():
    wanted = spec(size=4, update="Rolling", max_surge=0, max_unavailable=1)
    state = proven()
    first = look(wanted, ready(4), version="v2", state=state)
    assert first.drop == ("v1-0",)
    left = ready(4)[1:]
    second = look(wanted, left, version="v2", state=first.state)
    assert (second.create, second.create_stable) == (1, 0)
    state = pools.failed(second.state, "the port never opened", 100)
    third = look(wanted, left, version="v2", state=state)
    assert (third.create, third.create_stable, third.drop) == (0, 0, ())
    update = third.conditions[-1]
    assert (update.type, update.reason) == ("Updated", "NewVersionNotReady")
    assert "the port never opened" in update.message
    # Claims go on: what they take is made of the version that works.
    fourth = look(wanted, left[1:], version="v2", state=state)
    assert (fourth.create, fourth.create_stable) == (0, 1)


def test_idleness_scales_to_zero_and_a_claim_brings_it_back():
    wanted = spec(size=3, scale_to_zero_after_s=60)
    begun = look(wanted, now=100)
    assert begun.size == 3
    assert begun.look_at == 160
    asleep = look(wanted, ready(3), now=160, state=begun.state)
    assert asleep.size == 0
    assert len(asleep.drop) == 3
    assert asleep.look_at is None
    assert asleep.conditions[0].reason == "ScaledToZero"
    awake = look(wanted, now=200, state=pools.arrived(asleep.state, 200))
    assert awake.size == 3
    assert awake.create == 3


def test_autoscaling_follows_the_largest_recent_burst_within_its_bounds():
    wanted = spec(size=2, min=1, max=10)
    state = look(wanted, now=0).state
    for _ in range(6):
        state = pools.arrived(state, 5)
    assert look(wanted, now=6, state=state).size == 8  # six and a quarter more
    for _ in range(30):
        state = pools.arrived(state, 7)
    assert look(wanted, now=8, state=state).size == 10
    assert look(wanted, now=8 + 3 * pools.HALF_LIFE_S, state=state).size == 6
    assert look(wanted, now=2000, state=pools.arrived(state, 1990)).size == 2


def test_an_idle_pool_is_not_looked_at():
    assert look(spec(size=3), ready(3)).look_at is None


# ── everything at once ─────────────────────────────────────────────────────────────────────────────


class World:
    """A pool and its engine, simulated: makings take time and may fail, members crash, claims come."""

    def __init__(self, wanted, seed, *, version="v1", refuse=()):
        self.spec, self.version, self.random = wanted, version, random.Random(seed)
        self.state, self.now = pools.State(), 0.0
        self.making: dict[str, tuple[str, float]] = {}
        self.ready: dict[str, tuple[str, float]] = {}
        self.ending: list[float] = []
        self.granted: list[str] = []
        self.gone: set[str] = set()
        self.count = self.misses = self.claims = self.seconds_of_members = 0
        self.stable = version
        self.refuse = set(refuse)
        self.make_s = 0.5

    def members(self):
        making = [pools.Member(k, v, False, t) for k, (v, t) in self.making.items()]
        return making + [pools.Member(k, v, True, t) for k, (v, t) in self.ready.items()]

    def turn(self):
        seen = pools.Observed(self.spec, self.version, self.members(), self.state, len(self.ending))
        plan = pools.plan(seen, self.now)
        self.state = plan.state
        for key in plan.drop:
            assert key in self.making or key in self.ready
            self.making.pop(key, None)
            self.ready.pop(key, None)
            self.gone.add(key)
            self.ending.append(self.now + 0.1)
        for version, number in ((self.version, plan.create), (self.stable, plan.create_stable)):
            for _ in range(number):
                self.count += 1
                self.making[f"s{self.count}"] = (version, self.now)
        held = len(self.making) + len(self.ready) + len(self.ending)
        surge = self.spec.max_surge if self.spec.update == "Rolling" else 0
        # Who scaled down holds what it held until it is gone; it may not make more meanwhile.
        assert held <= max(plan.size + surge, len(self.ending)) or not (plan.create or plan.create_stable)
        return plan

    def step(self, seconds=0.1):
        self.now += seconds
        self.ending = [at for at in self.ending if at > self.now]
        for key, (version, since) in list(self.making.items()):
            if self.now - since >= self.make_s:
                del self.making[key]
                if version in self.refuse:
                    self.gone.add(key)
                    self.state = (
                        pools.failed(self.state, "refused", self.now)
                        if version == self.version
                        else self.state
                    )
                else:
                    self.ready[key] = (version, self.now)
                    self.state = pools.made(self.state, version, self.version)
        self.seconds_of_members += len(self.ready) * seconds
        return self.turn()

    def claim(self):
        self.claims += 1
        self.state = pools.arrived(self.state, self.now)
        if not self.ready:
            self.misses += 1
            return None
        key = next(iter(self.ready))
        del self.ready[key]
        assert key not in self.granted
        self.granted.append(key)
        return key

    def crash(self):
        for table in (self.ready, self.making):
            if table:
                key = self.random.choice(list(table))
                del table[key]
                self.gone.add(key)
                return

    def account(self):
        """Nothing is lost: every member is somewhere, once."""
        places = [set(self.making), set(self.ready), set(self.granted), self.gone]
        everything = set().union(*places)
        assert len(everything) == self.count == sum(map(len, places))


acts = st.lists(
    st.sampled_from(["claim", "claim", "claim", "step", "step", "step", "crash", "update", "grow", "shrink"]),
    max_size=120,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    acts=acts,
    seed=st.integers(0, 1000),
    size=st.integers(0, 8),
    update=st.sampled_from(["OnReplenish", "Recreate", "Rolling"]),
    surge=st.integers(0, 2),
    unavailable=st.integers(0, 2),
    rate=st.sampled_from([None, 1.0, 10.0]),
)
def test_whatever_happens_nothing_is_granted_twice_or_lost_and_no_pool_exceeds_its_size(
    acts, seed, size, update, surge, unavailable, rate
):
    wanted = spec(
        size=size,
        update=update,
        max_surge=surge or (unavailable == 0),
        max_unavailable=unavailable,
        refill_per_s=rate,
    )
    pools.check(wanted)
    world = World(wanted, seed)
    for act in acts:
        match act:
            case "claim":
                world.claim()
            case "step":
                world.step()
            case "crash":
                world.crash()
            case "update":
                if world.state.proven == world.version:
                    world.stable = world.version
                world.version = f"v{int(world.version[1:]) + 1}"
            case "grow" | "shrink":
                size = max(0, world.spec.size + (2 if act == "grow" else -2))
                world.spec = spec(
                    **{
                        **{f: getattr(wanted, f) for f in wanted.__struct_fields__ if f != "template"},
                        "size": size,
                    }
                )
        world.account()
    for _ in range(400):
        world.step(0.5)
    world.account()
    current = [key for key, (version, _) in world.ready.items() if version == world.version]
    assert len(world.ready) == world.spec.size  # left alone, it is what was asked for
    if update != "OnReplenish":
        assert len(current) == world.spec.size


def test_no_claim_is_refused_in_a_rolling_update_under_fifty_a_second():
    wanted = spec(size=40, update="Rolling", max_surge=10, max_unavailable=0)
    world = World(wanted, 1)
    world.make_s = 0.1
    for _ in range(100):
        world.step()
    world.version = "v2"
    for tick in range(400):
        world.step(0.02)
        world.claim()
        if tick == 200:
            assert any(version == "v2" for version, _ in world.ready.values())
    assert world.misses == 0
    assert all(version == "v2" for version, _ in world.ready.values())


def test_a_broken_version_refuses_no_claim_either():
    wanted = spec(size=40, update="Rolling", max_surge=5, max_unavailable=5)
    world = World(wanted, 1, refuse={"v2"})
    world.make_s = 0.1
    for _ in range(100):
        world.step()
    world.version = "v2"
    lowest = 40
    for _ in range(500):
        plan = world.step(0.02)
        world.claim()
        lowest = min(lowest, len(world.ready))
    assert world.misses == 0
    assert lowest >= 20
    assert plan.conditions[-1].reason == "NewVersionNotReady"


def arrivals(seed, hours=24):
    """A day: sessions come mostly by day; each is a few bursts of parallel claims, minutes apart."""
    random_ = random.Random(seed)
    moments = []
    for hour in range(hours):
        busy = 10 if 9 <= hour < 18 else 1 if 7 <= hour < 22 else 0
        for _ in range(random_.randint(0, 2 * busy)):
            start = hour * 3600 + random_.uniform(0, 3600)
            for burst in range(random_.randint(2, 6)):
                at = start + burst * random_.uniform(20, 150)
                moments += [at + random_.uniform(0, 3) for _ in range(random_.randint(2, 16))]
    return sorted(moments)


def simulate(wanted, moments):
    world = World(wanted, 0)
    world.make_s = 1.0
    pending = iter([*moments, float("inf")])
    coming = next(pending)
    while world.now < 24 * 3600:
        quiet = not world.making and not world.ending and coming - world.now > 5
        world.step(min(coming - world.now, 5.0) if quiet else 0.25)
        while coming <= world.now:
            world.claim()
            coming = next(pending)
    return world


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_bursty_day_misses_less_than_with_a_fixed_pool_of_the_same_mean_size(seed):
    moments = arrivals(seed)
    scaled = simulate(spec(size=4, min=0, max=60), moments)
    mean = scaled.seconds_of_members / (24 * 3600)
    fixed = simulate(spec(size=round(mean + 0.5)), moments)
    assert fixed.seconds_of_members >= scaled.seconds_of_members * 0.9
    assert scaled.claims == fixed.claims > 500
    assert scaled.misses < fixed.misses * 0.8
