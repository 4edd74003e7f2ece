"""`cloche audit list|verify|export`: what was done, and whether the record of it is whole.

The log is read where it lies, without an engine: a verdict must not depend on what it is about.
"""

import argparse
import csv
import datetime
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from cloche import errors, events, settings
from cloche.audit import keys, lines, reading, verifying, writing
from cloche.cli import output, talk

ACTS = {
    "list": "the lines",
    "verify": "whether it is as it was written",
    "export": "all of it, for other programs",
}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BELONGS = {
    **dict.fromkeys(("since", "until", "sandbox", "kind", "actor", "outcome"), ("list", "export")),
    **dict.fromkeys(("key", "head", "strict"), ("verify",)),
    "limit": ("list",),
    "format": ("export",),
}
_COLUMNS = ("segment", "seq", "time", "actor", "sandbox", "kind", "outcome", "data", "prev", "hash")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("act", metavar="list|verify|export", choices=list(ACTS), help="what to do")
    parser.add_argument(
        "--since", metavar="WHEN", help="from then on: 2026-11-15, 2026-11-15T13:00, 90m, 7d ago"
    )
    parser.add_argument("--until", metavar="WHEN", help="before then")
    parser.add_argument("--sandbox", metavar="ID", help="only this sandbox's, by id or name")
    parser.add_argument("--kind", metavar="KIND", action="append", help="only this kind; may be given again")
    parser.add_argument("--actor", metavar="WHO", help="only what WHO did, as uid:1000")
    parser.add_argument("--outcome", choices=events.OUTCOMES, help="only what went so")
    parser.add_argument("--limit", metavar="N", type=int, help="list: the last N (default: 1000; 0 is all)")
    parser.add_argument("--format", choices=("jsonl", "csv"), help="export: as what (default: jsonl)")
    parser.add_argument(
        "--key", metavar="FILE", help="verify: with this public key (default: keys/audit.pub)"
    )
    parser.add_argument("--head", metavar="N:HASH", help="verify: also that this head, seen before, is in it")
    parser.add_argument(
        "--strict", action="store_true", help="verify: exit with 1 for torn and unsigned lines too"
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    _refuse_foreign_flags(chosen)
    home = _home()
    directory = os.path.join(home, writing.DIRECTORY)
    if chosen.act == "verify":
        return _verify(home, directory, chosen)
    found = reading.read(directory, _wanted(chosen))
    if chosen.act == "export":
        return _export(found, chosen.format or "jsonl")
    return _list(found, chosen)


def _refuse_foreign_flags(chosen: argparse.Namespace) -> None:
    """A filter that would not filter is worse than none."""
    for name, value in vars(chosen).items():
        if value and chosen.act not in _BELONGS.get(name, tuple(ACTS)):
            raise errors.error(
                "flag_unknown",
                f"cloche audit {chosen.act} has no flag '--{name}'",
                hint=f"it belongs to {' and '.join(_BELONGS[name])}",
            )


def _home() -> str:
    config = settings.load(os.environ)
    if config.url is not None:
        raise errors.error(
            "argument_invalid",
            f"the audit log of {config.url} is read where that server runs",
            hint="run this there, or unset CLOCHE_URL for the log of this machine",
        )
    return config.home


def _wanted(chosen: argparse.Namespace) -> reading.Wanted:
    known = [*events.KINDS, *lines.BOOKKEEPING]
    for kind in chosen.kind or ():
        if kind not in known:
            raise errors.error(
                "argument_invalid", f"there is no kind {kind!r}", hint=errors.nearest(kind, known)
            )
    if chosen.limit is not None and chosen.limit < 0:
        raise errors.error("argument_invalid", f"--limit is {chosen.limit}; it is a number of lines")
    return reading.Wanted(
        since=_moment("--since", chosen.since),
        until=_moment("--until", chosen.until),
        sandbox=chosen.sandbox,
        kinds=tuple(chosen.kind or ()),
        actor=chosen.actor,
        outcome=chosen.outcome,
    )


def _moment(flag: str, text: str | None) -> float | None:
    """A date, a time, or how long ago."""
    if text is None:
        return None
    span = _SPAN.fullmatch(text.removesuffix(" ago"))
    if span:
        return time.time() - float(span[1]) * _SECONDS[span[2]]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise errors.error(
            "argument_invalid",
            f"{flag} {text!r} is no time",
            hint="2026-11-15, 2026-11-15T13:00:00+01:00, 90m, 7d",
        ) from None


def _list(found: Iterable[dict[str, Any]], chosen: argparse.Namespace) -> int:
    limit = 1000 if chosen.limit is None else chosen.limit
    kept = deque(found, maxlen=limit or None)
    for line in kept:
        print(json.dumps(line) if chosen.json else talk.clean(_line(line)))
    sys.stdout.flush()
    if not kept:
        talk.say("nothing of the kind is on record")
    return 0


def _line(line: dict[str, Any]) -> str:
    facts = " ".join(
        f"{k}={_short(v)}" for k, v in line["data"].items() if v not in (None, False, "", [], {})
    )
    head = f"{output.clock(line['time'])}  {line['actor']:<9} {line['outcome']:<7} {line['kind']:<15}"
    return f"{head} {line['sandbox'] or '-':<20}  {facts}".rstrip()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _export(found: Iterable[dict[str, Any]], form: str) -> int:
    if form == "jsonl":
        for line in found:
            print(json.dumps(line))
    else:
        table = csv.writer(sys.stdout)
        table.writerow(_COLUMNS)
        for line in found:
            table.writerow([_cell(name, line.get(name)) for name in _COLUMNS])
    sys.stdout.flush()
    return 0


def _cell(name: str, value: object) -> object:
    if name == "data":
        return json.dumps(value)
    if name == "time" and isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.UTC).isoformat()
    text = "" if value is None else str(value)
    # A spreadsheet runs what begins so; nothing of ours does, and what a damaged file says is not ours.
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


def _verify(home: str, directory: str, chosen: argparse.Namespace) -> int:
    if chosen.head is not None and not re.fullmatch(r"(-|\d{1,12}):[0-9a-f]{64}", chosen.head):
        raise errors.error(
            "argument_invalid", "--head is not N:HASH", hint="as an earlier `verify` printed it"
        )
    public = chosen.key or os.path.join(home, "keys", keys.PUBLIC)
    verifier = keys.verifier(public) if chosen.key or os.path.exists(public) else None
    report = verifying.verify(directory, verifier, chosen.head)
    if chosen.json:
        output.as_json(report.to_builtins())
    else:
        _tell(report)
    return 1 if report.damaged or (chosen.strict and report.findings) else 0


def _tell(report: verifying.Report) -> None:
    for finding in report.findings:
        word = "damage" if finding.damage else "note"
        print(talk.clean(f"{word}: {finding.segment} line {finding.line}: {finding.kind}: {finding.words}"))
    state = "DAMAGED" if report.damaged else "whole"
    print(f"{state}: {report.segments} segments, {report.lines} lines, {report.signed} of them signed")
    print(f"head {report.head}")
    sys.stdout.flush()
