"""Volumes: refusals first; what one sandbox writes the next one reads; one writes or several read; targets of any shape."""

import os
import subprocess
import sys

import pytest

import cloche
from cloche import model

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="disks of exact size need root")


@pytest.fixture
def make_volume():
    made = []

    def make(**options):
        made.append(cloche.Volume.create(f"v{os.urandom(4).hex()}", **{"size_mib": 16, **options}))
        return made[-1]

    yield make
    for volume in made:
        try:
            volume.delete()
        except cloche.NotFound:
            continue


@pytest.fixture
def volume(make_volume):
    return make_volume()


def code_of(action):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    return caught.value.code


def refused(**options):
    """The code of a sandbox that is not made; nothing of it stays."""
    before = {info.id for info in cloche.Sandbox.list()}
    code = code_of(lambda: cloche.Sandbox(**options))
    assert {info.id for info in cloche.Sandbox.list()} == before
    return code


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", "a.b", "x" * 64])
def test_a_name_that_is_none(name):
    assert code_of(lambda: cloche.Volume.create(name)) == "name_invalid"


@pytest.mark.parametrize("size", [0, -1, 1 << 30])
def test_a_size_that_is_none(size):
    assert code_of(lambda: cloche.Volume.create("sized", size_mib=size)) == "limit_invalid"
    assert code_of(lambda: cloche.Volume.get("sized")) == "volume_not_found"


def test_a_volume_that_is_not_there():
    assert code_of(lambda: cloche.Volume.get("nothing")) == "volume_not_found"
    assert refused(volumes={"/data": "nothing"}) == "volume_not_found"


def test_a_name_means_one_volume(volume):
    assert cloche.Volume.create(volume.name, size_mib=16).name == volume.name
    assert code_of(lambda: cloche.Volume.create(volume.name, size_mib=17)) == "name_conflict"
    assert volume.info().spec.size_mib == 16


@pytest.mark.parametrize(
    "target", ["/", "//", "data", "/proc", "/proc/sys", "/dev/shm", "/sys", "/a/../b", "", "/a\0b"]
)
def test_a_target_that_is_none(volume, target):
    assert refused(volumes={target: volume.name}) == "path_invalid"


def test_two_at_one_place(make_volume):
    one, two = make_volume(), make_volume()
    assert refused(volumes={"/data": one.name, "/data/": two.name}) == "path_invalid"
    assert refused(volumes={"/a": one.name, "/b": one.name}) == "volume_in_use"


def test_a_target_that_is_a_file(volume):
    assert refused(volumes={"/etc/passwd": volume.name}) == "not_directory"


def test_a_target_behind_a_link_is_refused(volume, make_sandbox):
    """What a sandbox made before a volume comes may lead anywhere; nothing on the way is followed."""
    assert refused(volumes={"/bin/data": volume.name}) == "path_loop"
    sandbox = make_sandbox()
    sandbox.exec("ln -s /etc /workspace/link; mkdir /workspace/real", check=True)
    forked = {"/workspace/link/data": model.Mount(volume=volume.name)}
    assert attach(sandbox, forked) == "path_loop"
    assert attach(sandbox, {"/workspace/real/data": model.Mount(volume=volume.name)}) is None
    assert sandbox.exec("echo x > /workspace/real/data/x && cat /workspace/real/data/x").stdout == "x\n"


def attach(sandbox, wanted):
    """Attach to a sandbox that runs, as a claim does; the code of the refusal."""
    portal = cloche.sdk.portal
    backend = sandbox._async._backend

    async def work():
        await backend._volumes.check(wanted)
        await backend._volumes.attach(backend._find(sandbox.id), wanted)

    try:
        portal.run(work())
    except cloche.ClocheError as problem:
        return problem.code
    return None


def test_a_read_only_root_takes_volumes_in_its_private_places(volume):
    assert refused(profile="restrictive", volumes={"/data": volume.name}) == "path_invalid"
    with cloche.Sandbox(profile="restrictive", volumes={"/workspace/data": volume.name}) as box:
        assert box.exec("echo x > data/x && cat data/x").stdout == "x\n"


# ── one writer, or several readers ─────────────────────────────────────────────────────────────────


def test_a_writer_is_alone(volume, make_sandbox):
    writer = make_sandbox(volumes={"/data": volume.name})
    assert volume.info().attached == {writer.id: True}
    assert refused(volumes={"/data": volume.name}) == "volume_in_use"
    assert refused(volumes={"/data": volume.name + ":ro"}) == "volume_in_use"
    assert code_of(volume.delete) == "volume_in_use"
    writer.exec("echo kept > /data/a", check=True)
    writer.delete()
    reader = make_sandbox(volumes={"/data": volume.name + ":ro"})
    other = make_sandbox(volumes={"/elsewhere": volume.name + ":ro"})
    assert volume.info().attached == {reader.id: False, other.id: False}
    assert reader.exec("cat /data/a").stdout == other.exec("cat /elsewhere/a").stdout == "kept\n"
    assert refused(volumes={"/data": volume.name}) == "volume_in_use"
    for line in ("echo no > /data/a", "rm /data/a", "touch /data/b", "chmod 600 /data/a"):
        assert not reader.exec(line).ok
    assert not reader.exec("touch /data/root", user="root").ok if os.geteuid() == 0 else True


def test_another_engine_s_writer_counts_too(volume, make_sandbox):
    make_sandbox(volumes={"/data": volume.name})
    code = f"""
import cloche
try:
    cloche.Sandbox(volumes={{"/data": "{volume.name}"}})
except cloche.ClocheError as problem:
    print(problem.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["volume_in_use"]


@root_only
def test_its_size_is_held(make_volume, make_sandbox):
    volume = make_volume(size_mib=8)
    assert volume.info().limit.enforcement == "enforced"
    box = make_sandbox(volumes={"/data": volume.name}, disk_mib=64)
    assert not box.exec("head -c 20M /dev/zero > /data/big").ok
    assert box.exec("stat -c %s /data/big").stdout < "8388608\n"
    assert box.exec(
        "rm /data/big; head -c 1M /dev/zero > /data/small && head -c 20M /dev/zero > /workspace/big"
    ).ok
    assert volume.info().used_bytes <= 9 << 20


# ── what stays ─────────────────────────────────────────────────────────────────────────────────────


def test_it_belongs_to_the_user_and_outlives_sandboxes(volume):
    for number in range(3):
        with cloche.Sandbox(volumes={"/workspace/deep/data": volume.name}) as box:
            assert box.exec("stat -c '%u %a' deep/data").stdout == "1000 755\n"
            box.exec(f"echo {number} >> deep/data/a; mkdir -p deep/data/d; chmod 700 deep/data/d", check=True)
            assert box.files.read("deep/data/a").split() == [str(n) for n in range(number + 1)]
            box.files.write("deep/data/from-outside", "x")
            assert box.exec("ls deep/data; stat -c '%u:%g %a' deep/data/*").stdout == (
                "a\nd\nfrom-outside\n1000:1000 644\n1000:1000 700\n1000:1000 644\n"
            )


@root_only
def test_nothing_of_it_runs_as_somebody_else(volume):
    with cloche.Sandbox(volumes={"/data": volume.name}) as box:
        box.exec("cp /bin/id /data/id; chmod 4755 /data/id", check=True)
    with cloche.Sandbox(volumes={"/data": volume.name}) as box:
        assert box.exec("/data/id -u").stdout == "1000\n"
        options = box.exec("grep ' /data ' /proc/mounts").stdout
        assert "nosuid" in options
        assert "nodev" in options


def test_a_volume_is_in_no_snapshot_and_comes_back_with_its_sandbox(volume, make_sandbox):
    box = make_sandbox(volumes={"/data": volume.name})
    box.exec("echo v > /data/v; echo s > /workspace/s", check=True)
    snap = box.snapshot()
    box.exec("echo later > /data/v; echo later > /workspace/s", check=True)
    box.restore(snap)
    assert box.exec("cat /data/v /workspace/s").stdout == "later\ns\n"
    assert code_of(box.fork) == "volume_in_use"
    snap.delete()
    box.suspend("archive")
    assert volume.info().attached == {}
    with cloche.Sandbox(volumes={"/d": volume.name}) as other:
        assert other.exec("cat /d/v").stdout == "later\n"
        assert code_of(lambda: box.exec("true")) == "volume_in_use"
    assert box.exec("cat /data/v").stdout == "later\n"


def test_nested_places_are_both_seen(make_volume, make_sandbox):
    outer, inner = make_volume(), make_volume()
    box = make_sandbox(volumes={"/data/inner": inner.name, "/data": outer.name})
    box.exec("echo o > /data/o; echo i > /data/inner/i", check=True)
    box.delete()
    with cloche.Sandbox(volumes={"/data": inner.name}) as box:
        assert box.exec("ls /data").stdout == "i\n"


def test_a_list_says_what_there_is(make_volume):
    names = sorted(make_volume(labels={"k": "v"}).name for _ in range(2))
    found = {info.spec.name: info for info in cloche.Volume.list()}
    assert [name for name in found if name in names] == names
    assert found[names[0]].spec.labels == {"k": "v"}


def test_what_a_dead_maker_did_not_finish_is_swept(cloche_home, volume):
    place = cloche_home / "volumes"
    (place / "half.999999999.1").mkdir()
    (place / "rowless").mkdir()
    (place / "rowless" / "maker").write_text("999999999:1")
    portal = cloche.sdk.portal
    home = portal.get()
    backend = portal.run(cloche.sdk.connecting.connect(None, home), home)
    assert {"half", "rowless"} <= set(portal.run(backend.sweep(), home))
    assert volume.name in os.listdir(place)
    assert not {"half.999999999.1", "rowless"} & set(os.listdir(place))


def test_a_claim_gets_its_volume_and_a_second_one_does_not(volume, until):
    with cloche.Pool("base", size=2) as pool:
        until(lambda: pool.info().ready == 2)
        box = pool.claim(volumes={"/data": volume.name})
        assert box.exec("echo x > /data/a; cat /data/a").stdout == "x\n"
        assert volume.info().attached == {box.id: True}
        assert code_of(lambda: pool.claim(volumes={"/data": volume.name})) == "volume_in_use"
        box.delete()
        with pool.claim(volumes={"/data": f"{volume.name}:ro"}) as reader:
            assert reader.exec("cat /data/a").stdout == "x\n"
