"""The fake driver under a real engine: what a test scripted is what an engine's user gets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cloche import errors, model
from cloche.engine import Engine
from cloche.testing import fakes
from cloche.testing.conformance import bench

Scene = Callable[[Engine, str, fakes.FakeMachine], Awaitable[None]]
COMMANDS: fakes.Commands = {
    "make test": fakes.Script(stdout=b"3 passed\n", stderr=b"a warning\n"),
    ("ls", "-l"): fakes.Script(exit_code=2, stderr=b"no\n"),
    "crash": fakes.Script(signal=11),
    "serve": fakes.Script(stdout=b"listening\n", runs=True),
    "greet": lambda start: fakes.Script(stdout=f"hello {start.env.get('WHO')}\n".encode()),
}


def play(tmp_path: Path, scene: Scene, driver: fakes.FakeDriver | None = None) -> fakes.FakeDriver:
    driver = driver or fakes.FakeDriver(COMMANDS)

    async def run() -> None:
        engine = bench.make_engine(str(tmp_path), driver)
        try:
            box = await engine.create(model.SandboxSpec())
            await scene(engine, box.id, driver.machines[0])
        finally:
            await engine.aclose()

    asyncio.run(run())
    return driver


def ask(command: str | list[str], **fields: object) -> model.ExecRequest:
    return model.ExecRequest(command=command, **fields)  # type: ignore[arg-type]


def test_scripted_commands_give_their_results(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        result = await engine.exec(box, ask("make test"))
        assert (result.exit_code, result.stdout, result.stderr) == (0, "3 passed\n", "a warning\n")
        assert (await engine.exec(box, ask(["ls", "-l"]))).exit_code == 2
        assert (await engine.exec(box, ask("crash"))).signal == 11
        assert (await engine.exec(box, ask("greet", env={"WHO": "you"}))).stdout == "hello you\n"
        assert (await engine.exec(box, ask("unknown"))).exit_code == 127
        assert [start.command for start in machine.started][:2] == ["make test", ["ls", "-l"]]

    play(tmp_path, scene)


def test_a_command_that_runs_ends_when_it_is_told(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        one, two = await engine.start(box, ask("serve")), await engine.start(box, ask("serve"))
        machine.write(one.pid, b"a request\n")
        machine.finish(one.pid, fakes.Script(exit_code=3))
        ended = await engine.wait(box, one.id)
        assert (ended.exit_code, ended.stdout) == (3, "listening\na request\n")
        await engine.signal(box, two.id, 15)
        assert (await engine.wait(box, two.id)).signal == 15
        assert machine.signals == [(two.pid, 15, "group")]

    play(tmp_path, scene)


def test_a_time_out_kills_the_tree(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        result = await engine.exec(box, ask("serve", timeout_s=0.001))
        assert (result.timed_out, result.signal) == (True, 9)
        assert [scope for _, _, scope in machine.signals] == ["tree"]

    play(tmp_path, scene)


def test_files_live_in_memory(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        await engine.write_file(box, "a/b/file", b"content")
        assert await engine.read_file(box, "/workspace/a/b/file") == b"content"
        await engine.write_file(box, "a/b/file", b"again", mode=0o755)
        assert machine.files.read("/workspace/a/b/file") == b"again"
        assert [f.path for f in await engine.list_files(box, ".", depth=3)] == ["a", "a/b", "a/b/file"]
        await engine.move_file(box, "a", "c")
        assert list(machine.files.paths()) == ["/workspace/c/b/file"]
        with pytest.raises(errors.ClocheError, match="directory_not_empty"):
            await engine.remove_file(box, "c")
        await engine.remove_file(box, "c", recursive=True)
        with pytest.raises(errors.NotFound):
            await engine.stat_file(box, "c/b/file")
        assert await engine.make_dir(box, "new") is True

    play(tmp_path, scene)


def test_a_failing_machine_is_a_lost_sandbox(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        running = await engine.start(box, ask("serve"))
        waiting = asyncio.ensure_future(engine.wait(box, running.id))
        await asyncio.sleep(0)
        machine.fail("the host lost power")
        with pytest.raises(errors.SandboxLost, match="lost power"):
            await waiting
        with pytest.raises(errors.SandboxLost, match="lost power"):
            await engine.exec(box, ask("make test"))

    play(tmp_path, scene)


def test_watchers_hear_what_the_test_says(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        events: AsyncIterator[model.FileEvent] = engine.watch_files(box, ".")
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        event = model.FileEvent(type="create", path="file")
        machine.happened(event)
        assert await first == event
        machine.fail("over")
        assert [late async for late in events] == []

    play(tmp_path, scene)


def test_use_wakes_and_usage_is_what_the_test_says(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        await engine.suspend(box)
        assert machine.paused
        await engine.exec(box, ask("make test"))
        assert not machine.paused
        machine.used = machine.used._replace(memory_mib=99)
        assert (await engine.usage(box)).memory_mib == 99

    play(tmp_path, scene)


def test_refusals_and_failures_are_raised(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        raise AssertionError("there is no sandbox")

    with pytest.raises(errors.ClocheError, match="isolation_too_low"):
        play(
            tmp_path,
            scene,
            fakes.FakeDriver(refuses=errors.error("kernel_feature_missing", "no such kernel")),
        )
    with pytest.raises(errors.ClocheError, match="disk_full"):
        play(tmp_path, scene, fakes.FakeDriver(fails=errors.error("disk_full", "no room")))
    with pytest.raises(errors.ClocheError, match="isolation_too_low"):
        play(tmp_path, scene, fakes.FakeDriver(level="process"))


def test_closing_ends_every_machine(tmp_path: Path) -> None:
    async def scene(engine: Engine, box: str, machine: fakes.FakeMachine) -> None:
        await engine.start(box, ask("serve"))

    driver = play(tmp_path, scene)
    assert driver.closes == 1
    assert [machine.ended.result() for machine in driver.machines] == ["its engine stopped"]
