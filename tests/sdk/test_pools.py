"""Pools through the SDK: what is refused, what is bound, and that nothing is left."""

import asyncio
import textwrap

import pytest

import cloche
from cloche import errors, model


def test_a_pool_that_cannot_be_is_refused():
    with pytest.raises(errors.InvalidInput) as caught:
        cloche.Pool("base", size=-1)
    assert caught.value.code == "pool_invalid"
    with pytest.raises(errors.NotFound) as missing:
        cloche.Pool("nowhere")
    assert missing.value.code == "template_not_found"
    with pytest.raises(errors.NotFound) as absent:
        cloche.Pool.get("nowhere")
    assert absent.value.code == "pool_not_found"
    with pytest.raises(errors.InvalidInput):
        cloche.Pool("base", preset="nobody")
    with pytest.raises(errors.InvalidInput) as unknown:
        cloche.Template("x", colour="blue")
    assert unknown.value.code == "field_unknown"


def test_a_pool_is_claimed_from_and_gone_at_the_end():
    with cloche.Pool("base", size=2, name="sdk-two") as pool:
        assert pool.wait_ready().ready == 2
        with pool.claim(
            env={"A": "1"}, files={"d/in.txt": "hello", "b": b"\xff"}, labels={"who": "me"}
        ) as box:
            assert box.claim is not None
            assert box.claim.warm, box.claim.cold_reason
            assert box.exec("echo $A; cat d/in.txt; wc -c < b").stdout == "1\nhello1\n"
            assert box.info().labels == {"who": "me"}
        assert pool.info().hits == 1
        assert [info.name for info in cloche.Pool.list()] == ["sdk-two"]
        assert pool.scale(1).size == 1
        named = pool.claim("mine", memory_mib=128)
        assert pool.claim("mine", memory_mib=128).id == named.id
        assert named.info().limits["memory_mib"].value == 128
        with pytest.raises(errors.Conflict) as caught:
            pool.claim("mine")
        assert caught.value.code == "name_conflict"
        named.delete()
    with pytest.raises(errors.NotFound):
        pool.info()
    assert cloche.Pool.list() == []


def test_network_rules_are_bound_to_a_warm_sandbox():
    with cloche.Pool("base", size=1, name="sdk-rules") as pool:
        pool.wait_ready()
        with pool.claim(allow=["allowed.test"]) as box:
            assert box.claim is not None
            assert box.claim.warm, box.claim.cold_reason
            assert box.info().isolation.network == "rules"
            done = box.exec("curl -sS -m 5 http://refused.test/")
            assert [denial.kind for denial in done.denials] == ["network"]


def test_a_template_of_ones_own(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text(
        textwrap.dedent(
            """
            name: sdk-data
            env: {GREETING: hello}
            contexts: [python]
            preload: [decimal]
            startup:
              - run: echo ready > /tmp/state
              - wait_for: {command: test -s /tmp/state}
            """
        )
    )
    template = cloche.Template.load(str(path))
    assert template.name == "sdk-data"
    with cloche.Pool(template, size=1) as pool:
        pool.wait_ready()
        with pool.claim(env={"LATE": "bound"}) as box:
            code = "import os, sys; os.environ['GREETING'], os.environ['LATE'], 'decimal' in sys.modules"
            assert box.run_code(code).text == "('hello', 'bound', True)"
            assert box.exec("cat /tmp/state").stdout == "ready\n"
    with cloche.Sandbox(template="sdk-data") as box:
        assert box.exec("echo $GREETING; cat /tmp/state").stdout == "hello\nready\n"


def test_pools_work_asynchronously():
    async def main():
        async with cloche.AsyncPool("base", size=3, name="sdk-async") as pool:
            await pool.wait_ready()
            boxes = await asyncio.gather(*(pool.claim(env={"N": str(n)}) for n in range(5)))
            said = await asyncio.gather(*(box.exec("echo $N") for box in boxes))
            await asyncio.gather(*(box.delete() for box in boxes))
            return [result.stdout for result in said], len({box.id for box in boxes})

    assert asyncio.run(main()) == (["0\n", "1\n", "2\n", "3\n", "4\n"], 5)


def test_a_failing_startup_action_is_told():
    template = cloche.Template("sdk-bad", startup=[model.Action(run="echo what a pity; exit 4")])
    cloche.put_template(template)
    with pytest.raises(errors.SandboxError) as caught:
        cloche.Sandbox(template="sdk-bad")
    assert caught.value.code == "startup_failed"
    assert "what a pity" in caught.value.message
