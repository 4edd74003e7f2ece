"""Snapshots, restores and forks: what is refused leaves nothing; what is kept is whole; who starts from it owns its files."""

import errno
import os

import pytest

import cloche
from cloche.drivers import keeping
from cloche.linux import extents

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="a uid range needs root")


@pytest.fixture
def shelf(cloche_home):
    """What lies on the shelf, seen from outside."""

    def look():
        place = cloche_home / "snapshots"
        return sorted(os.listdir(place)) if place.is_dir() else []

    yield look
    for info in cloche.Snapshot.list():
        cloche.Snapshot.get(info.id).delete()
    assert look() == []


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    assert caught.value.hint or caught.value.code in ("limit_invalid", "name_invalid")
    return caught.value.code


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_that_is_not_there(sandbox, shelf):
    assert code_of(lambda: sandbox.restore("nothing")) == "snapshot_not_found"
    assert code_of(lambda: cloche.Snapshot.get("nothing")) == "snapshot_not_found"
    assert code_of(lambda: cloche.Sandbox(snapshot="nothing")) == "snapshot_not_found"
    assert sandbox.exec("echo alive").stdout == "alive\n"


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", "x" * 64])
def test_a_name_that_is_none(sandbox, shelf, name):
    assert code_of(lambda: sandbox.snapshot(name)) == "name_invalid"
    assert code_of(lambda: sandbox.snapshot(tags=[name])) == "name_invalid"
    assert shelf() == []


def test_a_name_is_given_once(sandbox, shelf):
    first = sandbox.snapshot("once")
    assert code_of(lambda: sandbox.snapshot("once")) == "name_conflict"
    assert shelf() == [first.id]
    first.delete()
    assert sandbox.snapshot("once").name == "once"


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_number_of_forks_that_is_none(sandbox, shelf, count):
    before = len(cloche.Sandbox.list())
    assert code_of(lambda: sandbox.fork(count)) == "limit_invalid"
    assert len(cloche.Sandbox.list()) == before
    assert shelf() == []


def test_a_workspace_is_in_no_snapshot(tmp_path, make_sandbox, shelf):
    box = make_sandbox(workspace=str(tmp_path))
    assert code_of(box.snapshot) == "argument_invalid"
    assert code_of(box.fork) == "argument_invalid"


@root_only
def test_a_full_disk_leaves_nothing(sandbox, shelf, monkeypatch):
    copied = []

    def full(reading, writing):
        copied.append(os.fstat(reading).st_size)
        os.write(writing, b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(extents, "copy", full)
    assert code_of(sandbox.snapshot) == "disk_full"
    assert copied
    assert shelf() == []
    assert sandbox.info().phase == "running"
    monkeypatch.undo()
    assert sandbox.exec("echo alive").stdout == "alive\n"
    assert sandbox.snapshot().id in shelf()


def test_another_root_than_it_was_taken_above(make_sandbox, shelf):
    snap = make_sandbox(profile="moderate").snapshot()
    before = len(cloche.Sandbox.list())
    assert code_of(lambda: cloche.Sandbox(snapshot=snap, profile="restrictive")) == "argument_invalid"
    assert len(cloche.Sandbox.list()) == before


# ── what a snapshot is ─────────────────────────────────────────────────────────────────────────────


def test_it_says_what_it_is(sandbox, shelf):
    sandbox.exec("mkdir d; echo one > d/a; head -c 3M /dev/urandom > b", check=True)
    snap = sandbox.snapshot("state-1", tags=["tried", "good"])
    info = snap.info()
    assert (info.name, info.sandbox, info.tags, info.parent) == (
        "state-1",
        sandbox.id,
        ("tried", "good"),
        None,
    )
    assert info.files >= 3
    assert 3 << 20 <= info.size_bytes < 8 << 20
    assert [s.id for s in cloche.Snapshot.list(tag="good")] == [snap.id]
    assert cloche.Snapshot.list(tag="bad") == []
    assert cloche.Snapshot.get("state-1").id == snap.id


def test_the_sandbox_goes_on(sandbox, shelf):
    process = sandbox.start("i=0; while read x; do i=$((i+x)); echo $i; done")
    process.write("1\n")
    sandbox.run_code("x = 41")
    sandbox.snapshot()
    process.write("2\n")
    process.close_stdin()
    assert process.wait().stdout == "1\n3\n"
    assert sandbox.run_code("x + 1").text == "42"


def test_a_paused_sandbox_stays_paused(sandbox, shelf):
    sandbox.exec("echo kept > a", check=True)
    sandbox.suspend()
    sandbox.snapshot("quiet")
    assert sandbox.info().phase == "paused"
    sandbox.resume()
    assert sandbox.restore("quiet").phase == "running"
    assert sandbox.files.read("a") == "kept\n"


# ── restore ────────────────────────────────────────────────────────────────────────────────────────


def test_restore_sets_files_back_and_ends_every_process(make_sandbox, shelf):
    box = make_sandbox(env={"WHO": "me"}, labels={"a": "b"})
    box.exec(
        "echo one > a; mkdir d; echo deep > d/e; ln -s a link; ln a hard; echo x > /tmp/t; echo h > ~/h",
        check=True,
    )
    snap = box.snapshot()
    before = box.info()
    process = box.start("sleep 1000")
    box.exec("rm -r d; echo two > a; echo new > b; rm /tmp/t; mv ~/h ~/i", check=True)
    box.run_code("x = 1")
    after = box.restore(snap)
    assert (after.id, after.labels, after.limits) == (box.id, before.labels, before.limits)
    assert after.expires_at == pytest.approx(before.expires_at, abs=1)
    with pytest.raises(cloche.SandboxLost):
        process.wait()
    said = box.exec("cat a d/e link hard /tmp/t ~/h; ls; echo $WHO; pgrep sleep", merge=True).stdout
    assert said == "one\ndeep\none\none\nx\nh\na\nd\nhard\nlink\nme\n"
    assert box.run_code("'x' in dir()").text == "False"
    assert box.snapshot().info().parent == snap.id


def test_a_snapshot_is_not_touched_by_who_starts_from_it(sandbox, make_sandbox, shelf):
    sandbox.exec("echo one > a; head -c 20M /dev/urandom > big; sha256sum big > sum", check=True)
    snap = sandbox.snapshot()
    for _ in range(2):
        box = make_sandbox(snapshot=snap)
        box.exec("sha256sum -c sum; echo two >> a; echo x >> big; mkdir -p d/e; mv d f; rm sum", check=True)
    other = make_sandbox(snapshot=snap.id)
    assert other.exec("cat a; sha256sum --status -c sum; echo $?; ls").stdout == "one\n0\na\nbig\nsum\n"
    assert sandbox.files.read("a") == "one\n"


def test_snapshots_of_snapshots(make_sandbox, shelf):
    """Small layers are copied and large ones stacked: both ways, removals and renames included."""
    box = make_sandbox()
    box.exec("mkdir -p d/sub; echo 0 > d/sub/n; echo gone > g", check=True)
    for step in range(1, 7):
        more = "head -c 12M /dev/zero | tr '\\0' x > large;" if step in (2, 4) else ""
        box.exec(
            f"{more} mv d e; mv e d; echo {step} > d/sub/n; touch s{step}; rm -f g s{step - 2}", check=True
        )
        snap = box.snapshot()
        box.restore(snap)
        assert box.files.read("d/sub/n") == f"{step}\n"
        assert box.exec("ls g s*; echo", merge=True).stdout.split() == [
            "ls:", "cannot", "access", "'g':", "No", "such", "file", "or", "directory",
            *(f"s{n}" for n in (step - 1, step) if n > 0),
        ]  # fmt: skip


def test_a_deleted_snapshot_is_kept_by_who_started_from_it(sandbox, make_sandbox, shelf):
    sandbox.exec("head -c 20M /dev/urandom > big; sha256sum big > sum", check=True)
    snap = sandbox.snapshot()
    box = make_sandbox(snapshot=snap)
    snap.delete()
    assert shelf() == []
    assert box.exec("sha256sum --status -c sum").ok
    again = make_sandbox(snapshot=box.snapshot())
    assert again.exec("sha256sum --status -c sum").ok


def test_what_is_not_said_is_as_it_was(make_sandbox, shelf):
    box = make_sandbox(memory_mib=300, pids=77, env={"A": "1", "B": "1"}, labels={"x": "1"})
    snap = box.snapshot()
    new = make_sandbox(snapshot=snap, pids=50, env={"B": "2"})
    info = new.info()
    assert (info.limits["memory_mib"].value, info.limits["pids"].value, info.labels) == (300, 50, {"x": "1"})
    assert new.exec("echo $A$B").stdout == "12\n"


def test_a_read_only_root_has_its_private_places_kept(make_sandbox, shelf):
    box = make_sandbox(profile="restrictive")
    box.exec(
        "echo w > /workspace/a; echo t > /tmp/b; echo h > ~/c; chmod 700 ~; rm -rf /var/tmp/x", check=True
    )
    for size in ("1k", "12M"):
        box.exec(f"head -c {size} /dev/urandom > /tmp/{size}", check=True)
        box.restore(box.snapshot())
        assert box.exec("cat a /tmp/b ~/c; stat -c %a ~; ls /tmp").stdout.split()[:5] == [
            "w",
            "t",
            "h",
            "700",
            *box.exec("ls /tmp").stdout.split()[:1],
        ]
        assert (
            box.exec(
                "echo x >> /tmp/b; rm ~/c; echo h > ~/c; sed -i 1q /tmp/b; touch /usr/no", merge=True
            ).exit_code
            == 1
        )


@root_only
def test_owners_are_the_same_in_another_range(sandbox, make_sandbox, shelf):
    sandbox.exec("touch mine; mkdir dir; chmod 750 dir", check=True)
    sandbox.exec("echo r > /etc/root-made; chmod 600 /etc/root-made; chown 33:44 /opt", user="root")
    snap = sandbox.snapshot()
    for box in (make_sandbox(snapshot=snap), *sandbox.fork(1)):
        assert box.exec("stat -c '%u:%g %a' mine dir /etc/root-made").stdout == (
            "1000:1000 644\n1000:1000 750\n0:0 600\n"
        )
        assert box.exec("cat /etc/root-made", merge=True).exit_code == 1
        assert box.exec("cat /etc/root-made", user="root").stdout == "r\n"
        box.exec("echo more >> mine; touch dir/new", check=True)


HOSTILE = """
import os, socket
os.symlink("/etc/shadow", "shadow"); os.symlink("../../../../../../etc", "up"); os.symlink("self", "self")
os.mkfifo("pipe"); s = socket.socket(socket.AF_UNIX); s.bind("sock")
open("setuid", "w").close(); os.chmod("setuid", 0o6755)
open("x", "w").close(); os.setxattr("x", "user.colour", b"blue")
os.link("x", "y")
open("a" * 255, "w").close(); open(b"not\\xffutf8", "w").close(); open("new\\nline", "w").close()
with open("sparse", "wb") as f: f.seek(50 << 20); f.write(b"end")
open("locked", "w").close(); os.chmod("locked", 0); os.mkdir("closed", 0)
here = os.getcwd()
for n in range(300):
    os.mkdir("d" * 50); os.chdir("d" * 50)
"""


def test_hostile_trees_are_kept_as_they_are(sandbox, make_sandbox, shelf):
    sandbox.files.write("make.py", HOSTILE)
    sandbox.exec("python3 make.py && rm make.py", check=True)
    listing = "find . -path ./ddd\\* -prune -o -printf '%P %y %m %n %s %l\\n' | sort"
    before = sandbox.exec(listing, check=True).stdout_bytes
    snap = sandbox.snapshot()
    assert snap.info().size_bytes < 30 << 20
    box = make_sandbox(snapshot=snap)
    assert box.exec(listing, check=True).stdout_bytes == before
    assert box.exec("cat shadow", merge=True).exit_code == 1
    deep = "import os\nfor n in range(300): os.chdir('d' * 50)\nprint(os.getxattr('/workspace/x', 'user.colour'))"
    assert box.exec(["python3", "-c", deep]).stdout == "b'blue'\n"


# ── forks ──────────────────────────────────────────────────────────────────────────────────────────


def test_forks_have_the_files_and_none_of_the_processes(make_sandbox, shelf):
    box = make_sandbox(name="origin", env={"A": "1"})
    box.exec("echo base > a; mkdir node_modules; touch node_modules/x", check=True)
    box.start("sleep 1000")
    forks = box.fork(3)
    try:
        assert len({fork.id for fork in forks} | {box.id}) == 4
        for number, fork in enumerate(forks):
            assert fork.exec("cat a; pgrep sleep; echo $A", merge=True).stdout == "base\n1\n"
            fork.exec(f"echo {number} >> a", check=True)
        assert [fork.files.read("a") for fork in forks] == ["base\n0\n", "base\n1\n", "base\n2\n"]
        assert box.files.read("a") == "base\n"
        assert box.exec("pgrep -c sleep").stdout == "1\n"
        assert shelf() == []
    finally:
        for fork in forks:
            fork.delete()


def test_forks_are_made_all_or_none(make_sandbox, shelf, monkeypatch):
    box = make_sandbox()
    before = {info.id for info in cloche.Sandbox.list()}
    real, calls = keeping.begin, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise cloche.errors.error("disk_full", "there is no space left", hint="free some")
        return real(*arguments)

    monkeypatch.setattr(keeping, "begin", failing)
    assert code_of(lambda: box.fork(4)) == "disk_full"
    assert {info.id for info in cloche.Sandbox.list()} == before
    assert shelf() == []


def test_events_tell(sandbox, shelf):
    snap = sandbox.snapshot("told")
    sandbox.restore(snap)
    [fork] = sandbox.fork()
    fork.delete()
    snap.delete()
    kinds = [event["kind"] for event in sandbox.events()]
    assert [kind for kind in kinds if "snapshot" in kind or kind == "forked"] == [
        "snapshot_made", "snapshot_restored", "forked", "snapshot_deleted",
    ]  # fmt: skip


# ── what dead makers leave ─────────────────────────────────────────────────────────────────────────


def test_what_a_dead_maker_did_not_finish_is_swept(make_sandbox, shelf, cloche_home):
    snap = make_sandbox().snapshot()
    place = cloche_home / "snapshots"
    for name in ("a" * 20 + ".999999999.1", "b" * 20):
        (place / name).mkdir(parents=True)
        (place / name / "0.ext4").write_text("half")
    (place / ("b" * 20) / "maker").write_text("999999999:1")
    live = place / f"{'c' * 20}.{os.getpid()}.{_start_time()}"
    live.mkdir()
    home = cloche.sdk.portal.get()
    backend = cloche.sdk.portal.run(cloche.sdk.connecting.connect(None, home), home)
    swept = cloche.sdk.portal.run(backend.sweep(), home)
    assert {"a" * 20, "b" * 20} <= set(swept)
    assert shelf() == sorted([snap.id, live.name])
    live.rmdir()


def _start_time():
    from cloche.linux import processes

    return processes.start_time(os.getpid())


# ── differences ────────────────────────────────────────────────────────────────────────────────────


def test_a_difference_with_nothing(sandbox, shelf):
    snap = sandbox.snapshot()
    assert code_of(lambda: snap.diff("nothing")) == "snapshot_not_found"
    assert snap.diff(snap) == []


def test_another_root_has_no_difference(make_sandbox, shelf):
    one, two = (make_sandbox(profile=profile).snapshot() for profile in ("moderate", "restrictive"))
    assert code_of(lambda: one.diff(two)) == "argument_invalid"


@pytest.mark.parametrize("padding", ["0", "12M"], ids=["copied", "stacked"])
def test_differences_are_told_by_path(make_sandbox, shelf, padding):
    box = make_sandbox()
    box.exec(
        f"head -c {padding} /dev/urandom > pad; echo 1 > same; echo 1 > changed; echo 1 > gone; mkdir -p d/deep; touch d/deep/x;"
        "ln -s a link; echo 12 > touched; echo 1 > mode; echo t > /tmp/t; mkdir moved; echo m > moved/m",
        check=True,
    )
    one = box.snapshot()
    box.restore(one)
    box.exec(
        "echo 2 > changed; rm gone; rm -r d; mkdir d; touch d/new; ln -sfn b link; echo 13 > touched;"
        "touch -r same touched; chmod 600 mode; rm /tmp/t; mv moved elsewhere; touch same2; rm same2",
        check=True,
    )
    found = {(change.kind, change.path, change.type) for change in one.diff(box.snapshot())}
    assert found == {
        ("modified", "/workspace/changed", "file"), ("removed", "/workspace/gone", "file"),
        ("removed", "/workspace/d/deep", "directory"), ("removed", "/workspace/d/deep/x", "file"),
        ("added", "/workspace/d/new", "file"), ("modified", "/workspace/link", "symlink"),
        ("modified", "/workspace/touched", "file"), ("modified", "/workspace/mode", "file"),
        ("removed", "/tmp/t", "file"), ("removed", "/workspace/moved", "directory"),
        ("removed", "/workspace/moved/m", "file"), ("added", "/workspace/elsewhere", "directory"),
        ("added", "/workspace/elsewhere/m", "file"),
    }  # fmt: skip


@root_only
def test_what_the_root_had_is_not_added(sandbox, shelf):
    one = sandbox.snapshot()
    sandbox.exec(
        "echo new > /etc/hostname; rm /etc/hosts; mkdir /opt/more; touch /usr/lib/new",
        user="root",
        check=True,
    )
    found = [(change.kind, change.path) for change in one.diff(sandbox.snapshot())]
    assert sorted(found) == [
        ("added", "/opt/more"), ("added", "/usr/lib/new"), ("modified", "/etc/hostname"), ("removed", "/etc/hosts"),
    ]  # fmt: skip
