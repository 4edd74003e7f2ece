"""A sandbox's logs, as E2B's command line asks for them: what our journal has of it, an entry for each event."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from cloche.compat.e2b import calls, faults
from cloche.compat.e2b.calls import Call

_MOST = 1000
_LEVELS = ("debug", "info", "warn", "error")
_WARNINGS = frozenset(("denied", "refused", "decided"))
_ERRORS = frozenset(("lost", "faulted"))


async def show(call: Call) -> Response:
    """The first form: lines and entries, oldest first, from `start` (milliseconds) on."""
    entries = await _entries(call, calls.whole(call, "start", 0), forward=True)
    lines = [
        {"timestamp": entry["timestamp"], "line": msgspec.json.encode(entry).decode()} for entry in entries
    ]
    return faults.json({"logs": lines, "logEntries": entries})


async def show_v2(call: Call) -> Response:
    """The second: entries, from `cursor` on in either direction, of a level and above, with a word in them."""
    forward = calls.one_of(call, "direction", ("forward", "backward"), "forward") == "forward"
    return faults.json({"logs": await _entries(call, calls.whole(call, "cursor", 0), forward=forward)})


async def _entries(call: Call, since_ms: int, *, forward: bool) -> list[dict[str, Any]]:
    info = await calls.alive(call)
    most = max(1, min(calls.whole(call, "limit", _MOST), _MOST))
    least = _LEVELS.index(calls.one_of(call, "level", _LEVELS, "debug"))
    word = call.request.query_params.get("search", "")
    found = [
        entry
        for entry, at_ms in map(_entry, await _all(call, info.id))
        if _LEVELS.index(entry["level"]) >= least
        and word in entry["message"]
        and (not since_ms or (at_ms >= since_ms if forward else at_ms <= since_ms))
    ]
    return found[:most] if forward else found[::-1][:most]


async def _all(call: Call, sandbox: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        some = await call.backend.events(found[-1]["seq"] if found else 0, sandbox, _MOST)
        found += some
        if len(some) < _MOST:
            return found


def _entry(event: dict[str, Any]) -> tuple[dict[str, Any], int]:
    kind, data = (
        event["kind"],
        {name: value for name, value in event["data"].items() if value not in (None, "", [])},
    )
    level = "warn" if kind in _WARNINGS else "error" if kind in _ERRORS else "info"
    fields = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in data.items()
    }
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    entry = {
        "timestamp": calls.time_of(event["time"]),
        "level": level,
        "message": f"{kind} {told}".strip(),
        "fields": {"event": kind, **fields},
    }
    return entry, int(event["time"] * 1000)
