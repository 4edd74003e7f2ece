"""Whatever is done to a finished log is found, and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche.audit import lines
from tests.audit.conftest import Bench

SLOWLY = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def kinds(bench: Bench) -> list[str]:
    return [finding.kind for finding in bench.verify().findings]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Three writers, two of them at once; all closed."""
    bench = Bench(tmp_path_factory.mktemp("original"))
    one, two = bench.log("1:1"), bench.log("2:2")
    for number in range(4):
        bench.write(one, start=number)
        bench.write(two, start=number)
    one.close()
    two.close()
    third = bench.log("3:3")
    bench.write(third, 3)
    third.close()
    assert bench.verify().findings == []
    return bench


@pytest.fixture
def copy(original: Bench, tmp_path: Path) -> Callable[[], Bench]:
    def make() -> Bench:
        home = tmp_path / "copy"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(original.home, home)
        return Bench(home)

    return make


def files(bench: Bench) -> list[Path]:
    return [*bench.segments, bench.manifest]


# ── any one change ─────────────────────────────────────────────────────────────────────────────────


@SLOWLY
@given(st.data())
def test_any_byte_that_changes_is_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    raw = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    assert bench.verify().findings, (file.name, place)


@SLOWLY
@given(st.data())
def test_any_bytes_that_are_cut_out_are_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    raw = file.read_bytes()
    start = data.draw(st.integers(0, len(raw) - 1))
    end = data.draw(st.integers(start + 1, len(raw)))
    file.write_bytes(raw[:start] + raw[end:])
    assert bench.verify().findings, (file.name, start, end)


@SLOWLY
@given(st.data())
def test_any_bytes_that_are_put_in_are_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    raw = file.read_bytes()
    place = data.draw(st.integers(0, len(raw)))
    file.write_bytes(raw[:place] + data.draw(st.binary(min_size=1, max_size=40)) + raw[place:])
    assert bench.verify().findings, (file.name, place)


@SLOWLY
@given(st.data())
def test_any_shorter_file_is_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    raw = file.read_bytes()
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    assert bench.verify().findings, file.name


@SLOWLY
@given(st.data())
def test_any_two_lines_that_change_places_are_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    content = file.read_bytes().splitlines(keepends=True)
    first, second = data.draw(st.lists(st.integers(0, len(content) - 1), min_size=2, max_size=2, unique=True))
    content[first], content[second] = content[second], content[first]
    file.write_bytes(b"".join(content))
    report = bench.verify()
    assert report.damaged
    assert report.findings[0].kind in ("reordered", "removed")


@SLOWLY
@given(st.data())
def test_any_line_that_is_gone_is_found(copy, data):
    bench = copy()
    file = data.draw(st.sampled_from(files(bench)))
    content = file.read_bytes().splitlines(keepends=True)
    del content[data.draw(st.integers(0, len(content) - 1))]
    file.write_bytes(b"".join(content))
    assert bench.verify().findings


def test_any_file_that_is_gone_is_found(copy):
    for index in range(len(files(copy()))):
        bench = copy()
        files(bench)[index].unlink()
        report = bench.verify()
        assert report.damaged
        assert report.findings[0].kind in ("removed", "truncated")


def test_any_two_files_that_change_names_are_found(copy):
    bench = copy()
    one, two = bench.segments[:2]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert bench.verify().damaged


# ── each by its name ───────────────────────────────────────────────────────────────────────────────


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


def test_a_whole_log_is_clean_and_counts_what_is_signed(bench):
    bench.whole(5)
    report = bench.verify()
    assert not report.damaged
    assert report.findings == []
    assert (report.segments, report.lines, report.signed) == (1, 7, 6)  # the last one says that it is closed


def test_no_log_at_all_is_clean(bench):
    assert bench.verify().findings == []


def test_an_edit_names_line_and_segment(bench):
    bench.whole(5)
    file = bench.segments[0]
    content = lines_of(file)
    content[3] = content[3].replace(b"echo 2", b"echo 9")
    file.write_bytes(b"".join(content))
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.segment, finding.line) == ("edited", file.stem, 4)


def test_an_edit_with_all_hashes_reckoned_anew_is_found_by_the_signature(bench):
    bench.whole(5)
    file = bench.segments[0]
    prev, made = lines.ZERO, []
    for raw in lines_of(file):
        members = json.loads(raw)
        del members["hash"], members["prev"]
        if members["kind"] == "started" and members["seq"] == 2:
            members["data"]["command"] = "echo nothing to see"
        line, prev = lines.chained(members, prev)
        made.append(line)
    file.write_bytes(b"".join(made))
    (finding,) = bench.verify().findings
    assert finding.kind == "edited"
    assert "signed" in finding.words


def test_a_removed_line_is_called_so(bench):
    bench.whole(5)
    file = bench.segments[0]
    content = lines_of(file)
    del content[2]
    file.write_bytes(b"".join(content))
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.line) == ("removed", 3)


def test_a_truncation_at_a_line_is_called_so(bench):
    bench.whole(5)
    file = bench.segments[0]
    file.write_bytes(b"".join(lines_of(file)[:4]))
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.line) == ("truncated", 5)


def test_a_truncation_within_a_signed_line_is_not_taken_for_a_crash(bench):
    bench.whole(5)
    file = bench.segments[0]
    file.write_bytes(b"".join(lines_of(file)[:4])[:-20])
    (finding,) = bench.verify().findings
    assert finding.kind == "truncated"


def test_reordered_lines_are_called_so(bench):
    bench.whole(5)
    file = bench.segments[0]
    content = lines_of(file)
    content[2], content[3] = content[3], content[2]
    file.write_bytes(b"".join(content))
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.line) == ("reordered", 3)


def test_lines_after_the_end_are_found(bench):
    bench.whole(5)
    file = bench.segments[0]
    last = json.loads(lines_of(file)[-1])
    line, _ = lines.of_log("created", last["seq"] + 1, last["hash"], 1, {})
    file.write_bytes(file.read_bytes() + line)
    (finding,) = bench.verify().findings
    assert finding.kind == "appended"


def test_a_segment_that_is_gone_is_named(bench):
    bench.whole(5)
    name = bench.segments[0].stem
    bench.segments[0].unlink()
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.segment) == ("removed", name)


def test_a_segment_that_nobody_opened_is_found(bench):
    bench.whole(5)
    (bench.directory / "20200101T000000-9-9-0001.jsonl").write_bytes(bench.segments[0].read_bytes())
    assert bench.verify().damaged


def test_a_manifest_without_its_end_is_found(bench):
    bench.whole(5)
    bench.manifest.write_bytes(b"".join(lines_of(bench.manifest)[:-1]))
    (finding,) = bench.verify().findings
    assert (finding.kind, finding.segment) == ("truncated", "manifest")


def test_another_key_is_called_so(benches):
    bench, other = benches(), benches()
    bench.whole(5)
    other.whole(5)
    shutil.copy(other.home / "keys/audit.pub", bench.home / "keys/audit.pub")
    finding = bench.verify().findings[0]
    assert (finding.kind, finding.segment) == ("wrong_key", "manifest")


def test_a_seal_signed_by_somebody_else_is_found(benches):
    """The whole log is written anew with another key, and says that it was ours."""
    bench, other = benches(), benches()
    bench.whole(5)
    other.whole(3)
    ours = json.loads(lines_of(bench.manifest)[-1])["key"]
    shutil.rmtree(bench.directory)
    shutil.copytree(other.directory, bench.directory)
    theirs = json.loads(lines_of(bench.manifest)[-1])["key"]
    bench.manifest.write_bytes(bench.manifest.read_bytes().replace(theirs.encode(), ours.encode()))
    assert bench.verify().damaged


def test_a_log_that_was_set_back_is_found_by_a_head_that_was_kept(bench):
    bench.whole(5)
    earlier = bench.home / "earlier"
    shutil.copytree(bench.directory, earlier)
    bench.whole(5, owner="9:9")
    head = bench.verify().head
    assert bench.verify(head).findings == []
    shutil.rmtree(bench.directory)
    shutil.copytree(earlier, bench.directory)
    assert bench.verify().findings == []  # nothing here could know
    (finding,) = bench.verify(head).findings
    assert finding.kind == "truncated"


def test_a_head_of_another_log_is_not_found(benches):
    bench, other = benches(), benches()
    bench.whole(5)
    other.whole(6)
    assert [f.kind for f in bench.verify(other.verify().head).findings] == ["edited"]
