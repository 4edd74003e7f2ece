import ast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import events, model

# Any text at all, surrogates included: file names are bytes, and Python spells odd ones with surrogates.
TEXT = st.text(st.characters(), max_size=30)
LONG = st.builds(
    lambda part, times: part * times, st.text(st.characters(), min_size=1, max_size=3), st.integers(0, 3000)
)
ANY_TEXT = TEXT | LONG
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
INT = st.integers(-(2**63), 2**63 - 1)
DENIALS = st.builds(
    model.Denial,
    kind=st.sampled_from(["file", "syscall", "network", "limit"]),
    operation=TEXT,
    target=ANY_TEXT,
    rule=TEXT,
    hint=TEXT,
    evidence=st.sampled_from(["seccomp", "proxy", "limit", "landlock_audit", "inferred"]),
)
BY_TYPE = {
    "str": ANY_TEXT,
    "str | None": st.none() | TEXT,
    "str | msgspec.UnsetType": st.just(msgspec.UNSET) | TEXT,
    "float": FLOAT,
    "float | None": st.none() | FLOAT,
    "int": INT,
    "int | None": st.none() | INT,
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(TEXT, max_size=80).map(tuple),
    "model.Level": st.sampled_from(model.LEVELS),
    "model.Denial": DENIALS,
    "EndReason": st.sampled_from(["asked", "expired", "idle", "owner_gone", "engine_stopped", "failed"]),
    "Verdict": st.sampled_from(["allow", "deny", "ask"]),
    "Change": st.sampled_from(["created", "replaced", "updated", "deleted"]),
}


def strategy_of(kind: type[events.Event]) -> st.SearchStrategy:
    fields = {**events.Event.__annotations__, **kind.__annotations__}
    return st.builds(kind, **{name: values_of(str(type_)) for name, type_ in fields.items()})


def values_of(annotation: str) -> st.SearchStrategy:
    if annotation.startswith("Literal["):
        return st.sampled_from(ast.literal_eval(annotation.removeprefix("Literal")))
    return BY_TYPE[annotation]


EVENTS = st.one_of([strategy_of(kind) for kind in events.KINDS.values()])


def test_the_kinds_are_the_acts_a_sandbox_knows():
    assert list(events.KINDS) == [
        "created", "refused", "started", "exited", "denied", "decided", "credential_used", "file_written",
        "files_changed", "claimed", "extended", "paused", "suspended", "archived", "resumed", "forked",
        "snapshot_made", "snapshot_restored", "snapshot_deleted", "policy_changed", "secret_changed",
        "template_changed", "pool_changed", "volume_changed", "image_built", "image_pulled", "administered",
        "deleted", "lost", "swept",
    ]  # fmt: skip


@given(EVENTS)
def test_every_event_survives_its_line(event):
    line = events.encode(event)
    assert events.decode(line) == event
    assert type(events.decode(line)) is type(event)


@given(EVENTS)
def test_every_event_survives_the_journal(event):
    row = events.to_row(event)
    assert events.KINDS[row.kind] is type(event)
    stored = events.Row(row.kind, row.sandbox, row.time, msgspec.json.decode(msgspec.json.encode(row.data)))
    assert events.from_row(stored) == event


@given(EVENTS)
def test_every_event_is_one_short_line(event):
    line = events.encode(event)
    assert b"\n" not in line
    # Nine texts at most (or some and one list of them), each of at most six bytes a character once escaped.
    assert len(line) < (9 + events.MAX_ITEMS) * events.MAX_TEXT * 6 + 1024


@given(ANY_TEXT)
def test_bounding_is_done_once(text):
    once = events.bounded(text)
    assert len(once) <= events.MAX_TEXT
    assert events.bounded(once) is once


def test_a_name_that_is_not_text_is_escaped_and_a_long_one_cut():
    written = events.FileWritten(sandbox="a", time=0, actor="uid:0", path="caf\udce9", size=1)
    assert written.path == "caf\\udce9"
    started = events.Started(sandbox="a", time=0, actor="uid:0", execution="e", command="x" * 5000)
    assert len(started.command) == events.MAX_TEXT
    assert started.command.endswith("x…")


def test_what_a_guest_says_is_bounded_inside_a_denial_too():
    denial = model.Denial(
        kind="file", operation="open", target="\udcff" * 9000, rule="", hint="", evidence="seccomp"
    )
    event = events.Denied(sandbox="a", time=0, actor="guest", denial=denial)
    assert len(event.denial.target) == events.MAX_TEXT


def test_a_line_reads_as_documented():
    event = events.Exited(sandbox="k3", time=1.5, actor="uid:1000", execution="e1", exit_code=0)
    assert events.encode(event).startswith(
        b'{"kind":"exited","sandbox":"k3","time":1.5,"actor":"uid:1000","execution":"e1","exit_code":0,'
    )


def test_a_kind_of_a_newer_engine_is_skipped():
    assert events.decode(b'{"kind":"teleported","sandbox":"a","time":1,"actor":"x","to":"mars"}') is None
    assert events.from_row(events.Row("teleported", "a", 1, {"actor": "x"})) is None


def test_a_field_of_a_newer_engine_is_ignored():
    line = b'{"kind":"paused","sandbox":"a","time":1,"actor":"x","mood":"calm"}'
    assert events.decode(line) == events.Paused(sandbox="a", time=1, actor="x")


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"{}", b'{"kind":3}', b'{"kind":"paused"}', b'{"kind":"paused","sandbox":1}']
)
def test_a_broken_line_is_a_value_error(line):
    with pytest.raises(ValueError):
        events.decode(line)


def test_events_are_matched_by_class():
    match events.decode(b'{"kind":"deleted","sandbox":"a","time":1,"actor":"engine","reason":"idle"}'):
        case events.Deleted(reason=reason):
            assert reason == "idle"
        case other:
            pytest.fail(f"{other}")


def of(kind: str, **fields: object) -> events.AnyEvent:
    known = {"sandbox": "a", "time": 1.0, "actor": "uid:0", **fields}
    return msgspec.convert({"kind": kind, **known}, events.AnyEvent)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (of("refused", operation="exec", code="permission_denied", message=""), "refused"),
        (of("refused", operation="exec", code="sandbox_not_found", message=""), "refused"),
        (of("refused", operation="exec", code="sandbox_lost", message=""), "failed"),
        (of("refused", operation="exec", code="internal_error", message=""), "failed"),
        (of("refused", operation="exec", code="code_of_a_newer_engine", message=""), "failed"),
        (of("decided", verdict="deny", operation="connect", target="x:1"), "refused"),
        (of("decided", verdict="ask", operation="connect", target="x:1"), "ok"),
        (of("decided", verdict="allow", operation="connect", target="x:1"), "ok"),
        (of("exited", execution="e", exit_code=0), "ok"),
        (of("exited", execution="e", exit_code=1), "failed"),
        (of("exited", execution="e", exit_code=None, signal=9), "failed"),
        (of("deleted", reason="asked"), "ok"),
        (of("deleted", reason="failed"), "failed"),
        (of("lost", reason="gone", owner="1:2"), "failed"),
        (of("administered", operation="key_made"), "ok"),
        (of("administered", operation="audit_failed", failed=True), "failed"),
        (of("paused"), "ok"),
    ],
)
def test_the_outcome_of_an_act(event, outcome):
    assert events.outcome(event) == outcome


@given(EVENTS)
def test_every_event_has_an_outcome(event):
    assert events.outcome(event) in events.OUTCOMES
