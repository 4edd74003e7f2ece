"""What an engine puts on record: every act, every refusal, in time; and what it does when it cannot."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloche import errors, events, model, wiring
from cloche.audit import reading, writing
from cloche.engine import refusals
from cloche.sdk import portal


class Watched:
    """An engine with a log, in the portal's loop."""

    def __init__(self, home: Path, settings: str = "") -> None:
        self.home = home
        environment = {**os.environ, "CLOCHE_HOME": str(home / "s"), "XDG_CONFIG_HOME": str(home / "c")}
        (home / "c/cloche").mkdir(parents=True)
        (home / "c/cloche/settings.toml").write_text(settings)

        async def make():
            return wiring.make_engine(environment)

        self.engine = portal.run(make())

    def do(self, work):
        return portal.run(work)

    def create(self, **fields):
        return self.do(self.engine.create(model.SandboxSpec(**fields)))

    def exec(self, sandbox, command, **fields):
        return self.do(self.engine.exec(sandbox, model.ExecRequest(command=command, **fields)))

    def lines(self, *kinds):
        wanted = reading.Wanted(kinds=kinds)
        return list(reading.read(str(self.home / "s/audit"), wanted))

    def journal(self, *kinds):
        return [e for e in self.do(self.engine.events()) if not kinds or e["kind"] in kinds]


@pytest.fixture
def watch(cloche_home):
    made = []

    def make(settings: str = "") -> Watched:
        made.append(Watched(cloche_home / f"w-{os.urandom(4).hex()}", settings))
        return made[-1]

    yield make
    for one in made:
        one.do(one.engine.aclose())


def test_what_is_turned_down_is_on_record(watch):
    one = watch()
    with pytest.raises(errors.NotFound):
        one.create(template="nothing")
    with pytest.raises(errors.NotFound):
        one.exec("nobody", "true")
    box = one.create(name="mine")
    with pytest.raises(errors.InvalidInput):
        one.exec("mine", "true", cwd="/../etc")
    with pytest.raises(errors.ClocheError):
        one.do(one.engine.write_file(box.id, "/etc/../x", b""))
    refused = one.lines("refused")
    assert [(line["data"]["operation"], line["data"]["code"]) for line in refused] == [
        ("create", "template_not_found"),
        ("exec", "sandbox_not_found"),
        ("exec", "path_invalid"),
        ("write_file", "path_invalid"),
    ]
    assert [line["sandbox"] for line in refused] == [None, "nobody", box.id, box.id]
    assert {line["outcome"] for line in refused} == {"refused"}
    assert [e["data"]["code"] for e in one.journal("refused")] == [line["data"]["code"] for line in refused]


def test_to_look_for_what_is_not_there_is_no_refusal(watch):
    one = watch()
    box = one.create()
    with pytest.raises(errors.NotFound):
        one.do(one.engine.stat_file(box.id, "nothing"))
    with pytest.raises(errors.NotFound):
        one.do(one.engine.read_file(box.id, "nothing"))
    assert one.lines("refused") == []


def test_every_act_is_a_line(watch):
    one = watch()
    box = one.create(name="box", labels={})
    engine, do = one.engine, one.do
    one.exec(box.id, "exit 3")
    do(engine.write_file(box.id, "a", b"xy"))
    do(engine.make_dir(box.id, "d"))
    do(engine.make_dir(box.id, "d"))
    do(engine.move_file(box.id, "a", "d/b"))
    do(engine.remove_file(box.id, "d/b"))
    do(engine.run_code(box.id, "1/0"))
    do(engine.extend(box.id, 60))
    do(engine.suspend(box.id))
    do(engine.resume(box.id))
    do(engine.sweep())
    do(engine.delete(box.id))
    lines = one.lines()
    acts = [
        (line["kind"], line["data"].get("change") or line["data"].get("command"), line["outcome"])
        for line in lines
    ]
    assert acts == [
        ("created", None, "ok"),
        ("started", "exit 3", "ok"),
        ("exited", None, "failed"),
        ("file_written", None, "ok"),
        ("files_changed", "directory_made", "ok"),
        ("files_changed", "moved", "ok"),
        ("files_changed", "removed", "ok"),
        ("started", "1/0", "ok"),
        ("exited", None, "failed"),
        ("extended", None, "ok"),
        ("paused", None, "ok"),
        ("resumed", None, "ok"),
        ("administered", None, "ok"),
        ("deleted", None, "ok"),
    ]
    assert {line["sandbox"] for line in lines} == {box.id, None}
    assert [e["kind"] for e in one.journal()] == [kind for kind, _, _ in acts]


def test_credentials_in_commands_reach_neither_log_nor_journal(watch):
    one = watch('[audit]\nredact = ["falcon"]\n')
    box = one.create()
    one.exec(box.id, "true --password=hunter2 falcon")
    assert [line["data"]["command"] for line in one.lines("started")] == ["true --password=*** ***"]
    assert [e["data"]["command"] for e in one.journal("started")] == ["true --password=*** ***"]


def test_a_start_is_on_record_before_its_result_is_returned(watch):
    """Read by other means than ours, in the very turn in which the result arrives."""
    one = watch()
    box = one.create()
    (file,) = (one.home / "s/audit").glob("*.open")

    async def exec_and_look():
        result = await one.engine.exec(box.id, model.ExecRequest(command=["true"]))
        return result.execution, file.read_bytes()

    for _ in range(20):
        execution, content = one.do(exec_and_look())
        lines = [json.loads(line) for line in content.splitlines()]
        kinds = [line["kind"] for line in lines if line["data"].get("execution") == execution]
        assert kinds == ["started", "exited"]


def test_a_log_can_be_left_out(watch):
    one = watch("[audit]\nenabled = false\n")
    one.create()
    assert not (one.home / "s/audit").exists()
    assert [e["kind"] for e in one.journal()] == ["created"]


class Disk:
    """What the audit log lies on: 64 KiB, to be filled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with open(self.path / "ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 512)
            except OSError:
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink()


@pytest.fixture
def small(watch):
    """An engine whose log is on a small disk."""
    mounted = []

    def make(settings: str = "") -> tuple[Watched, Disk]:
        one = watch(settings)
        path = one.home / "s/audit"
        path.mkdir(mode=0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(path)], check=True)
        mounted.append(path)
        return one, Disk(path)

    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
def test_a_failing_log_is_told_with_every_sandbox_and_in_the_journal(small):
    one, disk = small()
    box = one.create()
    disk.fill()
    for _ in range(12):
        assert one.exec(box.id, "echo on").stdout == "on\n"
    warned = one.create()
    assert any("audit log" in warning and "No space left" in warning for warning in warned.warnings)
    (failed,) = one.journal("administered")
    assert failed["data"]["operation"] == "audit_failed"
    disk.free()
    assert not any("audit log" in warning for warning in one.create().warnings)
    kinds = [line["kind"] for line in one.lines()]
    assert kinds.count("started") == 12
    assert kinds.count("administered") == 1


@pytest.mark.root
def test_with_refuse_nothing_is_done_without_a_record_but_looking_and_ending(small):
    one, disk = small('[audit]\non_failure = "refuse"\n')
    box = one.create()
    disk.fill()
    while one.engine._audit.problem is None:
        one.exec(box.id, "true")
    for act in (
        lambda: one.exec(box.id, "touch /workspace/done"),
        one.create,
        lambda: one.do(one.engine.write_file(box.id, "done", b"")),
        lambda: one.do(one.engine.run_code(box.id, "1")),
    ):
        with pytest.raises(errors.ServerUnavailable) as refused:
            act()
        assert refused.value.code == "audit_unavailable"
    assert one.do(one.engine.list_files(box.id, ".")) == []
    assert one.do(one.engine.info(box.id)).phase == "running"
    disk.free()
    assert one.exec(box.id, "echo again").stdout == "again\n"
    disk.fill()
    one.do(one.engine.delete(box.id))
    assert one.do(one.engine.list()) == []


def test_what_is_exempt_is_a_verb():
    from cloche import interfaces

    assert interfaces.Backend.__abstractmethods__ >= refusals.EXEMPT


def test_the_next_engine_signs_what_a_killed_one_left(watch, cloche_home):
    home = cloche_home / f"k-{os.urandom(4).hex()}"
    program = """
import asyncio, os
from cloche import model, wiring
async def main():
    engine = wiring.make_engine(os.environ)
    made = await engine.create(model.SandboxSpec())
    await engine.exec(made.id, model.ExecRequest(command="echo hi"))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    environment = {**os.environ, "CLOCHE_HOME": str(home / "s"), "XDG_CONFIG_HOME": str(home / "c")}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, timeout=50)
    assert ended.returncode == -9
    (left,) = (home / "s/audit").glob(f"*{writing.OPEN}")
    kinds = [json.loads(line)["kind"] for line in left.read_bytes().splitlines()]
    assert kinds[:3] == ["opened", "created", "started"]
    one = Watched.__new__(Watched)
    one.home = home

    async def make():
        engine = wiring.make_engine(environment)
        await engine.sweep()
        await engine.aclose()

    asyncio.run(make())
    assert not left.exists()
    assert left.with_suffix(writing.DONE).exists()


def test_an_act_without_an_engine_is_recorded_too(tmp_path):
    environment = {"HOME": str(tmp_path), "CLOCHE_HOME": str(tmp_path / "s")}
    event = events.Administered(
        sandbox=None, time=1.0, actor="uid:0", operation="key_made", detail="token=abc"
    )
    assert wiring.record(environment, event) is None
    (line,) = reading.read(str(tmp_path / "s/audit"), reading.Wanted())
    assert (line["kind"], line["data"]["detail"]) == ("administered", "token=***")
