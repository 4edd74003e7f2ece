"""What is begun before there is an engine: nothing where it may not, and the very sandbox that the driver goes on with."""

import asyncio
import os
from pathlib import Path

import pytest

from cloche import model, policy
from cloche.drivers import beginning, namespaces, spawning
from cloche.linux import cgroups


def _groups() -> set[str]:
    mine = f"cloche-{os.getpid()}-"
    return {group.name for group in cgroups.detect().sweep(mine)}


def _end(launch: spawning.Launch) -> None:
    launch.end.close()
    os.waitpid(launch.pid, 0)


def test_the_first_shape_is_the_usual_one() -> None:
    usual = model.DEFAULT_RESOURCES
    assert (usual.memory_mib, usual.disk_mib) == (beginning.MEMORY_MIB, beginning.DISK_MIB)


@pytest.mark.parametrize("mode", [0o755, None], ids=["open to others", "not there"])
def test_nothing_is_begun_where_no_engine_has_been(tmp_path: Path, mode: int | None) -> None:
    home = tmp_path / "home"
    if mode is not None:
        for name in ("stage", "images"):
            (home / name).mkdir(parents=True)
        home.chmod(mode)
    before = _groups()
    launch = spawning.start()
    try:
        assert beginning.begin(launch, str(home)) is launch
        assert _groups() == before
        assert not (home / "images").exists() or not os.listdir(home / "images")
    finally:
        _end(launch)


def _used_before(home: Path) -> None:
    home.mkdir(mode=0o700)
    for name in ("stage", "images"):
        (home / name).mkdir(mode=0o700)


def test_what_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    home = tmp_path / "home"
    _used_before(home)

    async def scenario() -> None:
        before = _groups()
        told = beginning.begin(spawning.start(), str(home))
        assert isinstance(told, beginning.Told)
        assert told.embryo is not None
        driver = namespaces.NamespacesDriver(str(home), launch=told, embryos=0)
        await driver.start()
        try:
            spec = model.SandboxSpec()
            made = await driver.create(model.new_id(), spec, policy.profile(spec.profile))
            assert made.key == told.embryo.key
        finally:
            await driver.close()
        assert _groups() == before

    asyncio.run(scenario())


def test_what_was_begun_and_not_wanted_leaves_nothing(tmp_path: Path) -> None:
    """Its launcher ends it when nobody is at the other end any more."""
    home = tmp_path / "home"
    _used_before(home)
    before = _groups()
    told = beginning.begin(spawning.start(), str(home))
    assert isinstance(told, beginning.Told)
    assert told.embryo is not None
    _end(told)
    told.embryo.link.close()
    told.slots.close()

    async def gone() -> None:
        while _groups() != before:
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(gone(), 60))
