"""The audit log: its lines, and whether it is as it was written. The operator's, like the whole machine."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from cloche import errors, events
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.pages import Cursor, Limit, made, opened
from cloche.server.http.routes.table import operation

Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11, description="Seconds since 1970.")]
Kind = Literal[
    "edited", "removed", "truncated", "reordered", "appended", "wrong_key", "torn", "unsigned", "unlisted"
]
_HEAD = re.compile(r"(-|\d{1,12}):[0-9a-f]{64}")


class Line(wire.Answer, frozen=True, kw_only=True):
    """One act, in the chain of its segment."""

    segment: str
    seq: int
    time: float
    kind: str
    actor: str | None
    sandbox: str | None
    outcome: str | None
    data: dict[str, Any]
    prev: str | None = None
    hash: str | None = None


class Lines(wire.Page, frozen=True, kw_only=True):
    lines: tuple[Line, ...]


class Finding(wire.Answer, frozen=True, kw_only=True):
    kind: Kind
    segment: str
    line: int
    words: str
    damage: bool


class Report(wire.Answer, frozen=True, kw_only=True):
    segments: int
    lines: int
    signed: int
    head: str
    """Keep it elsewhere: given to the next `verify`, it shows a log that was set back."""
    damaged: bool
    findings: tuple[Finding, ...]


@operation("GET", "/v1/audit", scope="audit", errors="audit_unavailable")
async def list_audit(
    call: Call, *, since: Moment | None = None, until: Moment | None = None, sandbox: str | None = None,
    kind: str | None = None, actor: str | None = None, outcome: str | None = None, limit: Limit = 100,
    cursor: Cursor | None = None,
) -> Lines:  # fmt: skip
    """What was done, oldest first. `kind` may be several, with commas between them; `sandbox` is an id or a name."""
    kinds = kind.split(",") if kind else []
    for one in kinds:
        if one not in events.KINDS:
            raise errors.error(
                "argument_invalid",
                f"there is no kind {one[:50]!r}",
                hint=errors.nearest(one, events.KINDS),
                field="kind",
            )
    if outcome is not None and outcome not in events.OUTCOMES:
        raise errors.error(
            "argument_invalid",
            f"there is no outcome {outcome[:50]!r}",
            hint=errors.nearest(outcome, events.OUTCOMES),
            field="outcome",
        )
    after = None
    if cursor is not None:
        time, segment, seq = opened(cursor, (0.0, "", 0.0))
        after = (float(time), str(segment), int(seq))
    found = await call.backend.audit_lines(since, until, sandbox, kinds, actor, outcome, after, limit)
    lines = tuple(_line(row) for row in found)
    more = made((lines[-1].time, lines[-1].segment, float(lines[-1].seq))) if len(lines) == limit else None
    return Lines(lines=lines, next_cursor=more)


def _line(row: dict[str, Any]) -> Line:
    """Whoever can write to the file can write anything; `verify` tells."""
    return Line(
        segment=row["segment"],
        seq=row["seq"] if isinstance(row["seq"], int) else 0,
        time=row["time"] if isinstance(row["time"], (int, float)) else 0.0,
        data=row["data"] if isinstance(row["data"], dict) else {},
        kind=str(row["kind"]),
        **{name: _text(row.get(name)) for name in ("actor", "sandbox", "outcome", "prev", "hash")},
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


@operation("GET", "/v1/audit/verify", scope="audit", errors="audit_unavailable")
async def verify_audit(call: Call, *, head: str | None = None) -> Report:
    """Whether the log is as it was written: chains, signatures, and a `head` that an earlier answer had."""
    if head is not None and not _HEAD.fullmatch(head):
        raise errors.error(
            "argument_invalid", "head is not N:HASH", hint="as an earlier answer had it", field="head"
        )
    return msgspec.convert(await call.backend.verify_audit(head), Report)
