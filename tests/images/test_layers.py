"""Layers are somebody else's bytes: what is refused leaves nothing, what is taken lands where it says, and nowhere else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche import errors
from cloche.images import layers, unpacking
from tests.images import layouts
from tests.images.layouts import entry, hard_link, layer, link

OWNERS = os.geteuid() == 0


def blob(tmp_path: Path, data: bytes, packed: bytes | None = None) -> layers.Blob:
    stored = data if packed is None else packed
    path = tmp_path / hashlib.sha256(stored).hexdigest()
    path.write_bytes(stored)
    return layers.Blob(str(path), layouts.digest(stored), layouts.digest(data))


def put(tmp_path: Path, *stack: bytes, size: int = 1 << 24, files: int = 1000) -> Path:
    """Unpack layers into tmp_path/root, which lies beside something that must stay as it is."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    fd = os.open(root, os.O_PATH)
    try:
        limits = layers.Limits(size, files)
        modes = layers.Modes(fd, owners=OWNERS)
        for number, data in enumerate(stack):
            layers.unpack(blob(tmp_path, data), fd, limits, modes, owners=OWNERS, number=number)
        modes.settle()
    finally:
        os.close(fd)
    return root


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# ── refused ────────────────────────────────────────────────────────────────────────────────────────

DEVICE = {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}
REFUSED = [
    ("parent_path", [entry("../out", b"x")]),
    ("parent_path", [entry("a/../../out", b"x")]),
    ("parent_path", [entry("a/..", None)]),
    ("absolute_path", [entry("/etc/passwd", b"x")]),
    ("device", [entry("dev/null", b"", **DEVICE)]),
    ("device", [entry("etc/passwd", b"", type=tarfile.BLKTYPE, devmajor=8)]),
    ("device", [entry("hidden", b"", type=tarfile.CHRTYPE, devmajor=0, devminor=0)]),
    ("special_file", [entry("pipe", b"", type=tarfile.FIFOTYPE)]),
    ("hard_link", [hard_link("x", "not-there")]),
    ("absolute_path", [hard_link("x", "/etc/shadow")]),
    ("parent_path", [hard_link("x", "../../etc/shadow")]),
    ("hard_link", [entry("d", None), hard_link("x", "d")]),
    ("hard_link", [link("out", "/etc"), hard_link("x", "out/shadow")]),
    ("symlink_traversal", [link("out", "/etc"), entry("out/passwd", b"x")]),
    ("symlink_traversal", [link("out", "../beside"), entry("out/file", b"x")]),
    ("symlink_traversal", [link("a", "b"), link("b", "a"), entry("a/x", b"x")]),
    ("symlink_traversal", [entry("file", b""), entry("file/below", b"x")]),
    ("whiteout", [entry(".wh...", b"")]),
    ("whiteout", [entry(".wh..", b"")]),
    ("whiteout", [entry(".wh.", b"")]),
    ("whiteout", [entry("a/.wh.b/c", b"x")]),
    ("whiteout", [entry(".wh..wh.plnk", b"")]),
    ("whiteout", [link(".wh.x", "/etc/passwd")]),
    ("whiteout", [entry(".wh.x", None)]),
    ("duplicate", [entry("x", b"1"), entry("x", b"2")]),
    ("duplicate", [entry("x", b"1"), entry("./x", b"2")]),
    ("duplicate", [entry("x", None), entry("x", b"2")]),
    ("duplicate", [link("x", "/etc"), entry("x", None)]),
    ("name", [entry("/".join(["d"] * 300), b"x")]),
    ("name", [entry("n" * 256, b"x")]),
    ("name", [entry(".", b"x")]),
]


@pytest.mark.parametrize(("rule", "entries"), REFUSED, ids=[f"{r}-{e[-1][0].name[:20]}" for r, e in REFUSED])
def test_a_hostile_layer_is_refused_with_entry_and_rule(tmp_path, rule, entries):
    (tmp_path / "beside").mkdir()
    with pytest.raises(errors.PolicyRefused) as caught:
        put(tmp_path, layer(entry("etc", None)), layer(*entries))
    assert caught.value.code == "image_layer_refused"
    assert caught.value.details["rule"] == rule
    assert caught.value.details["layer"] == 2
    assert str(caught.value.details["entry"]) in entries[-1][0].name
    assert os.listdir(tmp_path / "beside") == []
    assert not (tmp_path / "out").exists()


def test_every_rule_but_those_of_the_format_has_a_layer_that_breaks_it():
    assert {rule for rule, _ in REFUSED} == set(layers.RULES) - {"sparse", "header"}


def test_a_sparse_file_is_refused(tmp_path):
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 20)
    data = subprocess.run(["tar", "-cS", "--format=gnu", "-C", tmp_path, "hole"], capture_output=True).stdout
    with pytest.raises(errors.PolicyRefused, match="sparse"):
        put(tmp_path, data)


def test_what_follows_the_end_is_refused(tmp_path):
    with pytest.raises(errors.PolicyRefused, match="follows the end") as caught:
        put(tmp_path, layer(entry("a", b"")) + b"\0" * 1024 + b"more")
    assert caught.value.details["rule"] == "header"
    assert listing(tmp_path / "root") == []


def test_a_header_that_says_it_is_a_gigabyte_is_refused(tmp_path):
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    data = info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 4096
    with pytest.raises(errors.PolicyRefused) as caught:
        put(tmp_path, data)
    assert caught.value.details["rule"] == "header"


def test_what_is_no_archive_is_no_image(tmp_path):
    with pytest.raises(errors.ClocheError) as caught:
        put(tmp_path, os.urandom(4096))
    assert caught.value.code == "image_layer_refused"


def test_a_compressed_layer_that_is_cut_is_no_image(tmp_path):
    data = layer(entry("a", os.urandom(100_000)))
    packed = gzip.compress(data)[:50_000]
    with pytest.raises(errors.InvalidInput) as caught:
        layers.judge(blob(tmp_path, data, packed), layers.Limits(1 << 20, 10))
    assert caught.value.code == "image_invalid"


def test_a_layer_with_another_digest_is_refused(tmp_path):
    made = blob(tmp_path, layer(entry("a", b"1")))
    for wrong in (made._replace(digest="sha256:" + "0" * 64), made._replace(diff_id="sha256:" + "0" * 64)):
        with pytest.raises(errors.InvalidInput) as caught:
            layers.judge(wrong, layers.Limits(1 << 20, 10))
        assert caught.value.code == "image_digest_mismatch"


def test_a_bomb_is_refused_before_it_is_written(tmp_path):
    data = layer(entry("big", b"\0" * (8 << 20)))
    packed = gzip.compress(data)
    assert len(packed) < 20_000
    root = tmp_path / "root"
    root.mkdir()
    fd = os.open(root, os.O_PATH)
    with pytest.raises(errors.InvalidInput) as caught:
        layers.unpack(
            blob(tmp_path, data, packed),
            fd,
            layers.Limits(4 << 20, 10),
            layers.Modes(fd, owners=OWNERS),
            owners=OWNERS,
        )
    os.close(fd)
    assert caught.value.code == "image_too_large"
    assert listing(root) == []


def test_padding_is_bounded_too(tmp_path):
    data = layer(entry("a", b"")) + b"\0" * (layers._SLACK + (3 << 20))
    with pytest.raises(errors.InvalidInput) as caught:
        layers.judge(blob(tmp_path, data, gzip.compress(data, 1)), layers.Limits(1 << 20, 10))
    assert caught.value.code == "image_too_large"


def test_too_many_files_are_refused(tmp_path):
    with pytest.raises(errors.InvalidInput) as caught:
        put(tmp_path, layer(*(entry(f"f{n}", b"") for n in range(11))), files=10)
    assert caught.value.code == "image_too_large"
    assert listing(tmp_path / "root") == []


def test_the_unpacker_cannot_write_elsewhere(tmp_path):
    """The second fence: with the first taken away, Landlock still holds."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from cloche.images import unpacking;"
        "unpacking._confine(sys.argv[2]); open(sys.argv[2] + '/a', 'w').close(); open(sys.argv[3], 'w')"
    )
    from cloche.linux import landlock

    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "root").mkdir()
    source = os.path.dirname(os.path.dirname(os.path.dirname(unpacking.__file__)))
    ran = subprocess.run(
        [shutil.which("python3") or "python3", "-c", program, source, tmp_path / "root", tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert "PermissionError" in ran.stderr
    assert (tmp_path / "root/a").exists()
    assert not (tmp_path / "out").exists()


# ── taken ──────────────────────────────────────────────────────────────────────────────────────────


def test_layers_lie_over_each_other(tmp_path):
    root = put(
        tmp_path,
        layer(
            entry("./", None),
            entry("a/", None),
            entry("a/old", b"1"),
            entry("a/kept", b"2"),
            entry("gone", b"3"),
        ),
        layer(entry("a/.wh.old", b""), entry("a/new", b"4"), entry(".wh.gone", b""), entry(".wh.never", b"")),
    )
    assert listing(root) == ["a", "a/kept", "a/new"]


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_directory_hides_what_is_beneath_and_nothing_of_its_own_layer(tmp_path, first):
    opaque, own = entry("a/.wh..wh..opq", b""), entry("a/new", b"")
    order = (opaque, own) if first else (own, opaque)
    root = put(
        tmp_path,
        layer(entry("a", None), entry("a/old", b"1"), entry("b", b"")),
        layer(entry("a", None), *order),
    )
    assert listing(root) == ["a", "a/new", "b"]


def test_a_whiteout_does_not_hide_what_its_own_layer_brings(tmp_path):
    root = put(tmp_path, layer(entry("x", b"old")), layer(entry("x", b"new"), entry(".wh.x", b"")))
    assert (root / "x").read_bytes() == b"new"


def test_one_kind_of_entry_replaces_another(tmp_path):
    root = put(
        tmp_path,
        layer(entry("a", None), entry("a/b", b"1"), entry("f", b"2"), link("l", "a")),
        layer(
            entry("a", b"file now"),
            entry("f", None),
            entry("f/g", b"3"),
            entry("l", None),
            entry("l/m", b"4"),
        ),
    )
    assert listing(root) == ["a", "f", "f/g", "l", "l/m"]
    assert (root / "a").read_bytes() == b"file now"


def test_links_within_the_image_are_followed(tmp_path):
    root = put(
        tmp_path, layer(entry("usr/lib", None), link("lib", "usr/lib")), layer(entry("lib/x.so", b"1"))
    )
    assert (root / "usr/lib/x.so").read_bytes() == b"1"
    assert (root / "lib").is_symlink()


def test_a_link_may_point_anywhere_because_nobody_follows_it(tmp_path):
    root = put(tmp_path, layer(link("out", "/etc/passwd"), link("up", "../../..")))
    assert os.readlink(root / "out") == "/etc/passwd"


def test_a_hard_link_is_not_written_through(tmp_path):
    root = put(
        tmp_path,
        layer(entry("a", b"one"), hard_link("b", "a")),
        layer(entry("b", b"two")),
        layer(hard_link("c", "a")),
    )
    assert (root / "a").read_bytes() == (root / "c").read_bytes() == b"one"
    assert (root / "b").read_bytes() == b"two"


def test_modes_are_kept_without_the_bits_that_lend_rights(tmp_path):
    root = put(
        tmp_path,
        layer(entry("su", b"", mode=0o4755), entry("d", None, mode=0o2770), entry("t", None, mode=0o1777)),
    )
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("su", "d", "t")}
    assert modes == {"su": 0o755, "d": 0o770, "t": 0o1777}


@pytest.mark.root
@pytest.mark.skipif(not OWNERS, reason="only root gives files away")
def test_owners_are_the_image_s_as_far_as_a_sandbox_has_them(tmp_path):
    root = put(
        tmp_path,
        layer(entry("a", b"", uid=1000, gid=50), entry("b", b"", uid=0x70000000), link("l", "a", uid=7)),
    )
    assert ((root / "a").stat().st_uid, (root / "a").stat().st_gid) == (1000, 50)
    assert (root / "b").stat().st_uid == layers.NOBODY
    assert (root / "l").lstat().st_uid == 7


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd here")
def test_zstd_and_several_gzip_members_are_read(tmp_path):
    data = layer(entry("a", b"x" * 100_000))
    zstd = subprocess.run(["zstd", "-c"], input=data, capture_output=True).stdout
    members = gzip.compress(data[:600]) + gzip.compress(data[600:])
    for packed in (zstd, members):
        layers.judge(blob(tmp_path, data, packed), layers.Limits(1 << 20, 10))


def test_the_unpacker_says_what_it_does_and_what_went_wrong(tmp_path):
    (tmp_path / "root").mkdir()
    good, bad = blob(tmp_path, layer(entry("a", b"123"))), blob(tmp_path, layer(entry("../a", b"")))
    said: list[str] = []

    def unpack(*blobs: layers.Blob) -> int:
        work = unpacking.unpack(
            blobs, str(tmp_path / "root"), most_bytes=1 << 20, owners=OWNERS, progress=said.append
        )
        return asyncio.run(work)

    with pytest.raises(errors.PolicyRefused) as caught:
        unpack(bad)
    assert caught.value.details["rule"] == "parent_path"
    assert unpack(good) == 3
    assert said[-1] == "unpacking layer 1 of 1"


# ── anything ───────────────────────────────────────────────────────────────────────────────────────

PART = st.sampled_from(["a", "b", "c", "..", ".", "", ".wh.a", ".wh..wh..opq", ".wh..", "lnk"])
PATH = st.lists(PART, min_size=1, max_size=4).map("/".join)
TARGET = (
    st.sampled_from(["/", "/etc", "..", "../..", "a", "a/b", "/a", "lnk", "../beside", "b/../..", "."]) | PATH
)


@st.composite
def entries_of(draw):
    kind = draw(
        st.sampled_from(
            [
                tarfile.REGTYPE,
                tarfile.DIRTYPE,
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.CHRTYPE,
                tarfile.FIFOTYPE,
            ]
        )
    )
    info = tarfile.TarInfo(draw(PATH) or "x")
    info.type, info.mode = kind, draw(st.integers(0, 0o7777))
    info.linkname = draw(TARGET) if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    data = draw(st.binary(max_size=8)) if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    return info, data


def outcome(place: Path, *stack: bytes) -> str:
    try:
        put(place, *stack)
    except errors.ClocheError as problem:
        return problem.code
    return ""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stack=st.lists(st.lists(entries_of(), max_size=5), min_size=1, max_size=3))
def test_nothing_is_written_outside(tmp_path_factory, stack):
    """Whatever layers say: they are taken or refused, and what lies beside the root is as it was."""
    place = tmp_path_factory.mktemp("any")
    beside = place / "beside"
    beside.mkdir()
    (beside / "file").write_bytes(b"untouched")
    before = beside.stat().st_mtime_ns
    root = place / "root"
    code = outcome(place, *(layer(*entries) for entries in stack))
    assert code in ("", "image_layer_refused")
    assert (beside.stat().st_mtime_ns, (beside / "file").read_bytes()) == (before, b"untouched")
    assert sorted(path.name for path in place.iterdir() if len(path.name) != 64) == ["beside", "root"]
    for path, _, files in os.walk(root):
        for name in files:
            mode = os.lstat(f"{path}/{name}").st_mode
            assert stat.S_ISREG(mode) or stat.S_ISLNK(mode)
            assert not mode & 0o6000 or stat.S_ISLNK(mode)
            assert not name.startswith(".wh.")
    shutil.rmtree(place)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=3000))
def test_rubbish_is_an_error_of_ours(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("rubbish")
    assert outcome(place, data) in ("", "image_layer_refused", "image_invalid", "image_too_large")
    shutil.rmtree(place)
