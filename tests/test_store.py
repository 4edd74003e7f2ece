import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors, events, model
from cloche.store import VERSION, Pruned, Store

NOW = 1_700_000_000.0
SIDE_FILES = ("", "-wal", "-shm")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "home/state.db"


@pytest.fixture
def store(path):
    made = Store(str(path))
    yield made
    made.close()


def sandbox(
    id_: str = "a", *, name: str | None = None, phase: model.Phase = "running", **fields
) -> model.SandboxInfo:
    isolation = model.Isolation(level="namespaces", driver="fake")
    known = {"owner": "1:100", "created_at": NOW, "labels": {}, "shown": (), **fields}
    return model.SandboxInfo(
        id=id_, name=name, phase=phase, template="base", profile="moderate", expires_at=None, idle_timeout_s=None,
        isolation=isolation, limits={"pids": model.Limit(value=8, enforcement="enforced", by="cgroup")},
        server="in process", **known,
    )  # fmt: skip


def paused(id_: str = "a", time: float = NOW) -> events.Paused:
    return events.Paused(sandbox=id_, time=time, actor="engine")


def refusal(call) -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        call()
    assert caught.value.hint
    return caught.value


# ── files that cannot be used ──────────────────────────────────────────────────────────────────────


def test_a_newer_file_is_refused_untouched_and_says_what_to_do(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    before = path.read_bytes()
    problem = refusal(Store(str(path)).sandboxes)
    assert problem.code == "state_too_new"
    assert "upgrade" in (problem.hint or "")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"not a database at all, but long enough to look like one" * 40, b"SQLite format 3\0" + b"\xff" * 4000],
)
def test_a_damaged_file_is_said_to_be_so(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    problem = refusal(Store(str(path)).sandboxes)
    assert problem.code == "state_corrupt"
    assert str(path) in problem.message
    assert path.read_bytes() == content


def test_damage_in_the_middle_is_said_to_be_so(store, path):
    store.record(paused(f"box{number}") for number in range(2000))
    store.close()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    assert refusal(lambda: store.events(limit=5000)).code == "state_corrupt"


def test_a_database_of_another_program_is_left_alone(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE recipes (id)")
    db.close()
    assert refusal(Store(str(path)).sandboxes).code == "state_corrupt"


def test_a_path_that_cannot_be_is_a_setting_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    problem = refusal(Store(str(tmp_path / "file/state.db")).sandboxes)
    assert problem.code == "settings_invalid"
    assert "CLOCHE_HOME" in (problem.hint or "")


def test_a_full_disk_is_said_to_be_so_and_loses_nothing(store):
    store.record([paused()])
    pages = store._connection().execute("PRAGMA page_count").fetchone()[0]
    store._connection().execute(f"PRAGMA max_page_count = {pages}")  # SQLite then behaves as on a full disk
    with pytest.raises(errors.CapacityExceeded) as caught:
        store.record(paused(f"box{number}") for number in range(5000))
    assert caught.value.code == "disk_full"
    assert caught.value.retryable
    store._connection().execute("PRAGMA max_page_count = 1000000")
    assert [event["sandbox"] for event in store.events()] == ["a"]
    assert store.record([paused("b")])


def test_a_lock_that_another_process_keeps_is_said_to_be_so(path):
    store = Store(str(path), busy_s=0)
    store.record([paused()])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert refusal(lambda: store.record([paused()])).code == "state_locked"
    assert len(store.events()) == 1  # readers do not wait
    other.close()
    store.record([paused()])
    store.close()


def test_a_sandbox_row_of_rubbish_is_said_to_be_so(store):
    store.put_sandbox(sandbox())
    store._connection().execute("UPDATE sandboxes SET info = '{'")
    assert refusal(store.sandboxes).code == "state_corrupt"


# ── opening ────────────────────────────────────────────────────────────────────────────────────────


def test_making_a_store_imports_and_creates_nothing(path):
    code = "import sys; from cloche.store import Store; Store(sys.argv[1]); print(*sys.modules)"
    done = run_python(code, str(path))
    assert "sqlite3" not in done.communicate()[0].split()
    assert not path.parent.exists()


def test_files_are_for_their_owner_alone(store, path):
    store.record([paused()])
    modes = {os.stat(f"{path}{suffix}").st_mode & 0o777 for suffix in SIDE_FILES}
    assert modes == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_was_opened_to_others_is_closed_again(path):
    path.parent.mkdir()
    path.touch(0o666)
    path.chmod(0o666)
    store = Store(str(path))
    store.sandboxes()
    assert path.stat().st_mode & 0o777 == 0o600
    store.close()


def test_closing_twice_is_harmless_and_the_next_use_opens_again(store):
    store.close()
    store.put_sandbox(sandbox())
    store.close()
    store.close()
    assert [info.id for info in store.sandboxes()] == ["a"]
    assert "state.db" in repr(store)


def test_memory_is_the_same_code():
    store = Store(":memory:")
    store.put_sandbox(sandbox())
    assert store.sandbox("a") == sandbox()
    store.close()


FORKING = """
import os, sys
from cloche import events
from cloche.store import Store
store = Store(sys.argv[1])
write = lambda name: store.record([events.Paused(sandbox=name, time=1.0, actor="test")])
write("parent")
pid = os.fork()
if pid == 0:
    write("child")
    os._exit(len(store._inherited))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
write("parent")
"""


def test_a_forked_child_uses_a_connection_of_its_own(store, path):
    # In a process of its own, since a test runner may have threads, and those do not go with forking.
    assert run_python(FORKING, str(path)).communicate()[0] == "1\n"
    assert [event["sandbox"] for event in store.events()] == ["parent", "child", "parent"]


# ── migrations ─────────────────────────────────────────────────────────────────────────────────────

VERSION_1 = """
CREATE TABLE sandboxes (id TEXT PRIMARY KEY, name TEXT, owner TEXT NOT NULL, phase TEXT NOT NULL, info BLOB NOT NULL)
    WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT, kind TEXT NOT NULL, time REAL NOT NULL,
    data BLOB NOT NULL);
PRAGMA user_version = 1;
"""


def write_version_1(path: Path, *infos: model.SandboxInfo) -> None:
    path.parent.mkdir(exist_ok=True)
    db = sqlite3.connect(path)
    db.executescript(VERSION_1)
    for info in infos:
        row = (info.id, info.name, info.owner, info.phase, msgspec.json.encode(info))
        db.execute("INSERT INTO sandboxes VALUES (?, ?, ?, ?, ?)", row)
    db.execute("INSERT INTO events VALUES (41, 'a', 'paused', 5.0, '{\"actor\":\"engine\"}')")
    db.commit()
    db.close()


def schema(store: Store) -> dict[str, str]:
    rows = store._query("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {name: " ".join(sql.split()) for name, sql in rows}


def test_a_file_of_version_1_keeps_everything_and_gains_the_rest(store, path):
    write_version_1(path, sandbox("a", name="box"), sandbox("b", phase="deleted", name="box"))
    assert [info.id for info in store.sandboxes()] == ["a", "b"]
    assert store.events() == [
        {"seq": 41, "kind": "paused", "sandbox": "a", "time": 5.0, "data": {"actor": "engine"}}
    ]
    assert store.record([paused()]) == [42]
    assert store._query("PRAGMA user_version") == [(VERSION,)]
    assert refusal(lambda: store.put_sandbox(sandbox("c", name="box"))).code == "name_conflict"


def test_a_migrated_file_has_the_layout_of_a_new_one(store, path, tmp_path):
    write_version_1(path)
    fresh = Store(str(tmp_path / "fresh.db"))
    assert schema(store).keys() == schema(fresh).keys()
    fresh.close()


def test_of_two_live_namesakes_in_version_1_one_keeps_the_name(store, path):
    write_version_1(path, sandbox("a", name="box"), sandbox("b", name="box"))
    found = store.sandbox("box")
    assert found is not None
    assert found.id == "b"
    assert len(store.sandboxes(live_only=True)) == 2


def test_a_migration_that_fails_changes_nothing(store, path):
    write_version_1(path, sandbox())
    db = sqlite3.connect(path)
    db.execute("CREATE INDEX events_time ON events (time)")  # the last step of version 2 will stumble over it
    with pytest.raises(errors.InternalError):
        store.sandboxes()
    columns = [column for _, column, *_ in db.execute("PRAGMA table_info(sandboxes)")]
    assert columns == ["id", "name", "owner", "phase", "info"]
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.execute("DROP INDEX events_time")
    db.close()
    assert store.sandboxes() == [sandbox()]


# ── sandboxes ──────────────────────────────────────────────────────────────────────────────────────


def test_a_name_belongs_to_one_live_sandbox_of_a_tenant(store):
    store.put_sandbox(sandbox("a", name="box"))
    problem = refusal(lambda: store.put_sandbox(sandbox("b", name="box")))
    assert isinstance(problem, errors.Conflict)
    assert problem.code == "name_conflict"
    assert "'box'" in problem.message
    store.put_sandbox(sandbox("c", name="box", tenant="other"))
    store.put_sandbox(sandbox("a", name="box", phase="deleted"))
    store.put_sandbox(sandbox("b", name="box"))
    assert sorted(info.id for info in store.sandboxes()) == ["a", "b", "c"]


def test_putting_again_replaces(store):
    store.put_sandbox(sandbox("a"))
    store.put_sandbox(sandbox("a", phase="paused", labels={"x": "y"}))
    assert store.sandboxes() == [sandbox("a", phase="paused", labels={"x": "y"})]


def test_live_ones_are_told_from_ended_ones(store):
    phases: tuple[model.Phase, ...] = ("running", "paused", "deleted", "lost")
    for number, phase in enumerate(phases):
        store.put_sandbox(sandbox(phase, phase=phase, created_at=NOW - number))
    assert [info.id for info in store.sandboxes()] == ["lost", "deleted", "paused", "running"]
    assert [info.id for info in store.sandboxes(live_only=True)] == ["paused", "running"]
    assert store.sandboxes(tenant="other") == []


def test_one_is_found_by_id_or_name_and_the_living_first(store):
    store.put_sandbox(sandbox("a", name="box", phase="deleted"), now=NOW)
    store.put_sandbox(sandbox("b", name="box", phase="lost"), now=NOW + 1)
    assert store.sandbox("box") == sandbox("b", name="box", phase="lost")
    store.put_sandbox(sandbox("c", name="box"))
    assert store.sandbox("box") == sandbox("c", name="box")
    assert store.sandbox("a") == sandbox("a", name="box", phase="deleted")
    assert store.sandbox("box", tenant="other") is None
    assert store.sandbox("z") is None


def test_a_host_path_that_is_not_text_can_be_stored(store):
    store.put_sandbox(sandbox(shown=("/home/caf\udce9",)))
    assert store.sandboxes()[0].shown == ("/home/caf\\udce9",)


def test_a_field_of_a_newer_engine_is_not_in_the_way(store):
    store.put_sandbox(sandbox())
    info = {**json.loads(msgspec.json.encode(sandbox())), "colour": "green"}
    store._connection().execute("UPDATE sandboxes SET info = ?", (json.dumps(info),))
    assert store.sandboxes() == [sandbox()]


def test_the_sandboxes_of_dead_owners_are_lost_once_and_with_a_reason(store):
    store.put_sandbox(sandbox("a", owner="1:100", name="box"))
    store.put_sandbox(sandbox("b", owner="1:100", phase="paused"))
    store.put_sandbox(sandbox("c", owner="2:200"))
    store.put_sandbox(sandbox("d", owner="1:100", phase="deleted"))
    asked = []

    def is_alive(owner: str) -> bool:
        asked.append(owner)
        return owner == "2:200"

    lost = store.mark_lost(is_alive, NOW)
    assert sorted(asked) == ["1:100", "2:200"]
    assert [(info.id, info.phase) for info in lost] == [("a", "lost"), ("b", "lost")]
    assert lost[0].reason == "its engine (process 1) ended without it; found at 2023-11-14T22:13:20Z"
    assert {info.id: info.phase for info in store.sandboxes()} == {
        "a": "lost", "b": "lost", "c": "running", "d": "deleted",
    }  # fmt: skip
    assert [(event["kind"], event["sandbox"]) for event in store.events()] == [("lost", "a"), ("lost", "b")]
    assert store.mark_lost(is_alive, NOW + 1) == []
    store.put_sandbox(sandbox("e", name="box"))  # the name is free again


def test_nothing_is_lost_while_its_owner_lives(store):
    store.put_sandbox(sandbox())
    assert store.mark_lost(lambda _: True, NOW) == []
    assert store.events() == []


# ── the journal ────────────────────────────────────────────────────────────────────────────────────


def test_events_are_read_after_a_cursor_in_order(store):
    assert store.last_seq() == 0
    numbers = [store.append_event("exited", "a", NOW + i, {"exit_code": i}) for i in range(5)]
    assert numbers == sorted(set(numbers))
    assert store.last_seq() == numbers[-1]
    assert [event["data"]["exit_code"] for event in store.events(after=numbers[1], limit=2)] == [2, 3]
    assert store.events(after=numbers[-1]) == []


def test_events_of_one_sandbox(store):
    store.record(
        [paused("a"), paused("b"), events.Swept(sandbox=None, time=NOW, actor="sweeper"), paused("a")]
    )
    assert [event["sandbox"] for event in store.events()] == ["a", "b", None, "a"]
    assert [event["seq"] for event in store.events(sandbox="a")] == [1, 4]
    assert store.record([]) == []


def test_an_event_comes_back_as_itself(store):
    event = events.Exited(sandbox="a", time=NOW, actor="uid:1", execution="e", exit_code=None, signal=9)
    store.record([event])
    row = store.events()[0]
    del row["seq"]
    assert events.from_row(events.Row(**row)) == event


def test_pruning_forgets_the_old_and_never_gives_a_number_twice(store):
    store.record([paused("a", NOW), paused("b", NOW + 10)])
    store.put_sandbox(sandbox("old", phase="deleted"), now=NOW)
    store.put_sandbox(sandbox("new", phase="lost"), now=NOW + 10)
    store.put_sandbox(sandbox("live"))
    store.put_sandbox(sandbox("old", phase="deleted"), now=NOW + 50)  # told again, ended when it ended
    assert store.prune(NOW + 5) == Pruned(events=1, sandboxes=1)
    assert sorted(info.id for info in store.sandboxes()) == ["live", "new"]
    assert store.prune(NOW + 100) == Pruned(events=1, sandboxes=1)
    assert store.events() == []
    assert store.last_seq() == 2
    assert store.record([paused()]) == [3]


def test_several_events_are_recorded_all_or_none(store):
    unwritable = events.Swept(sandbox="b", time=NOW, actor="sweeper", remains=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.record([paused("a"), unwritable])
    store._connection().execute("CREATE TRIGGER stop BEFORE INSERT ON events WHEN NEW.sandbox = 'b' "
                                "BEGIN SELECT RAISE(ABORT, 'no'); END")  # fmt: skip
    with pytest.raises(errors.InternalError):
        store.record([paused("a"), paused("b")])
    assert store.events() == []
    assert store.record([paused("a")]) == [1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20), st.integers(0, 25))
def test_a_follower_with_a_cursor_sees_everything_once(appended, page):
    store = Store(":memory:")
    seen, cursor = [], 0
    for whose, look in appended:
        store.record([paused(whose)])
        if look:
            found = store.events(after=cursor, limit=page + 1)
            cursor = found[-1]["seq"] if found else cursor
            seen += [event["sandbox"] for event in found]
    while found := store.events(after=cursor, limit=page + 1):
        cursor = found[-1]["seq"]
        seen += [event["sandbox"] for event in found]
    assert seen == [whose for whose, _ in appended]
    store.close()


# ── several processes ──────────────────────────────────────────────────────────────────────────────

WRITER = """
import sys
from cloche import events
from cloche.store import Store
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = Store(path)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    event = events.Extended(sandbox=name, time=float(number), actor="test", expires_at=float(number))
    print(*store.record([event]), flush=True)
"""


def run_python(code: str, *arguments: str) -> subprocess.Popen:
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **search},
    )  # fmt: skip


def let_go(*writers: subprocess.Popen) -> None:
    """Wait until all are ready, then start them at once: they also race to make the file."""
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()


def test_processes_that_write_at_once_lose_and_mix_nothing(store, path):
    writers = [run_python(WRITER, str(path), name, "150") for name in ("a", "b", "c")]
    let_go(*writers)
    answered = [int(number) for writer in writers for number in writer.communicate()[0].split()]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert sorted(answered) == list(range(1, 451))
    for name in ("a", "b", "c"):
        assert [event["time"] for event in store.events(sandbox=name)] == [
            float(number) for number in range(150)
        ]


@pytest.mark.parametrize("kill_after", [1, 2, 20, 57])
def test_a_writer_that_is_killed_leaves_a_whole_file(store, path, kill_after):
    writer = run_python(WRITER, str(path), "a", "1000000")
    let_go(writer)
    assert writer.stdout
    answered = [int(writer.stdout.readline()) for _ in range(kill_after)]
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read()  # `communicate` would pass by what the lines above left in the buffer
    writer.communicate()
    answered += [int(number) for number in rest.split("\n")[:-1]]
    found = [event["seq"] for event in store.events(limit=1_000_000)]
    assert found[: len(answered)] == answered  # what was answered is there
    assert found == list(range(1, len(found) + 1))
    assert store._query("PRAGMA integrity_check") == [("ok",)]
    assert store.record([paused()]) == [len(found) + 1]
