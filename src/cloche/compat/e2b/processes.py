"""`process.Process`: commands by pid.

A command outlives the stream that started it, and `Connect` shows what is still kept of its output before what comes. The follower of
`Start` is lossless, as E2B's is: the command waits for a slow reader, and goes on when the reader is cut. `Connect-Timeout-Ms` is the
command's time: it is killed then, and the stream ends with `deadline_exceeded`.
"""

from __future__ import annotations

import base64
import binascii
import signal
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from cloche import model
from cloche.compat.e2b import connect, faults, guests
from cloche.compat.e2b.state import Place

_SIGNALS = {
    "SIGNAL_SIGKILL": signal.SIGKILL,
    "SIGNAL_SIGTERM": signal.SIGTERM,
    9: signal.SIGKILL,
    15: signal.SIGTERM,
}
_KEEPALIVE_S = 90.0
_KEPT = 1000


async def start(place: Place) -> Response:
    message = await connect.only_message(place.request, _most(place))
    process = _object(message, "process")
    size = _object(_object(message, "pty"), "size") if "pty" in message else None
    request = model.ExecRequest(
        command=[_text(process, "cmd"), *_texts(process, "args")],
        env=_object(process, "envs"),
        cwd=guests.path_of(process.get("cwd")),
        user=guests.user_of(place.request.headers),
        open_stdin=message.get("stdin") is not False and size is None,
        pty=None if size is None else (_number(size, "cols", 80), _number(size, "rows", 24)),
        timeout_s=_timeout(place),
    )
    _check_environment(request.env)
    started = await place.backend.start(place.sandbox, request)
    _remember(place, started, process, message.get("tag"))
    return _stream(place, started, lossless=True)


async def reconnect(place: Place) -> Response:
    message = await connect.only_message(place.request, _most(place))
    found = await _find(place, message, ended_too=True)
    return _stream(place, found, lossless=False)


def _remember(place: Place, started: model.ExecutionInfo, process: dict[str, Any], tag: Any) -> None:
    kept = place.held.processes
    kept[started.id] = {"config": process, **({"tag": tag} if isinstance(tag, str) else {})}
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


def _stream(place: Place, found: model.ExecutionInfo, *, lossless: bool) -> Response:
    told = place.request.headers.get("keepalive-ping-interval", "")
    every_s = float(told) if told.isdigit() and int(told) > 0 else _KEEPALIVE_S
    events = connect.with_keepalive(
        _events(place, found, lossless=lossless), every_s, {"event": {"keepalive": {}}}
    )
    return connect.Stream(
        connect.enveloped(events, place.sandbox, _is_end),
        place.config.server.write_timeout_s,
        connect.STREAM_TYPE,
    )


def _is_end(event: dict[str, Any]) -> bool:
    return "end" in event["event"]


async def _events(
    place: Place, found: model.ExecutionInfo, *, lossless: bool
) -> AsyncIterator[dict[str, Any]]:
    yield {"event": {"start": {"pid": found.pid}}}
    attached = place.backend.attach(place.sandbox, found.id, lossless=lossless)
    async for event in attached:
        if isinstance(event, model.Output):
            stream = "pty" if found.pty else event.stream
            yield {"event": {"data": {stream: base64.b64encode(event.data).decode()}}}
        elif isinstance(event, model.Exited):
            if event.result.timed_out:
                raise faults.Fault(
                    504, f"the command took longer than its timeout and was killed (pid {found.pid})"
                )
            yield {"event": {"end": _end(event.result)}}


def _end(result: model.ExecResult) -> dict[str, Any]:
    if result.signal is None:
        status = f"exit status {result.shell_code}"
        return {"exitCode": result.shell_code, "exited": True, "status": status}
    try:
        name = signal.Signals(result.signal).name
    except ValueError:
        name = str(result.signal)
    words = "killed: out of memory" if result.oom_killed else f"signal: {name}"
    return {"exitCode": result.shell_code, "exited": False, "status": words, "error": words}


async def list_processes(place: Place) -> dict[str, Any]:
    return {
        "processes": [
            {"pid": found.pid, **place.held.processes.get(found.id, {"config": {"cmd": found.command}})}
            for found in await place.backend.executions(place.sandbox)
            if found.running
        ]
    }


async def update(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    found = await _find(place, message)
    if "pty" in message:
        size = _object(_object(message, "pty"), "size")
        await place.backend.resize(
            place.sandbox, found.id, _number(size, "cols", 80), _number(size, "rows", 24)
        )
    return {}


async def send_input(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    found = await _find(place, message)
    await _write(place, found, message)
    return {}


async def _write(place: Place, found: model.ExecutionInfo, message: dict[str, Any]) -> None:
    given = _object(message, "input")
    encoded = given.get("pty" if found.pty else "stdin")
    if not isinstance(encoded, str):
        kind = "a terminal: send `pty`" if found.pty else "no terminal: send `stdin`"
        raise faults.Fault(400, f"process {found.pid} has {kind}")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise faults.Fault(400, "the input is not base64") from None
    await place.backend.write_stdin(place.sandbox, found.id, data)


async def stream_input(place: Place) -> Response:
    """Input as it comes, for one process, which the first message names."""
    found: model.ExecutionInfo | None = None
    async for message in connect.messages(place.request, _most(place)):
        if "start" in message:
            found = await _find(place, _object(message, "start"))
        elif "data" in message:
            if found is None:
                raise faults.Fault(400, "the stream begins with data; its first message names the process")
            await _write(place, found, _object(message, "data"))
    return Response(connect.envelope({}) + connect.envelope({}, 2), media_type=connect.STREAM_TYPE)


async def close_stdin(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    found = await _find(place, message)
    await place.backend.write_stdin(place.sandbox, found.id, b"", end=True)
    return {}


async def send_signal(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    number = _SIGNALS.get(message.get("signal", ""))
    if number is None:
        raise faults.Fault(400, f"the signal {str(message.get('signal'))[:50]!r} is not SIGKILL or SIGTERM")
    found = await _find(place, message)
    await place.backend.signal(place.sandbox, found.id, number, tree=number == signal.SIGKILL)
    return {}


async def _find(place: Place, message: dict[str, Any], *, ended_too: bool = False) -> model.ExecutionInfo:
    """The process that a selector means; of those that had a pid, the last."""
    selector = _object(message, "process")
    pid, tag = selector.get("pid"), selector.get("tag")
    known = place.held.processes
    for found in reversed(await place.backend.executions(place.sandbox)):
        named = found.pid == pid if pid is not None else known.get(found.id, {}).get("tag") == tag
        if named and (found.running or ended_too) and (pid is not None or tag is not None):
            return found
    what = f"pid {pid}" if pid is not None else f"tag {tag!r}"
    raise faults.Fault(404, f"process with {what} not found")


# ── fields ─────────────────────────────────────────────────────────────────────────────────────────


def _most(place: Place) -> int:
    return place.config.server.max_body_mib << 20


def _timeout(place: Place) -> float | None:
    told = place.request.headers.get("connect-timeout-ms", "")
    return int(told) / 1000 if told.isdigit() and int(told) > 0 else None


def _object(message: dict[str, Any], field: str) -> dict[str, Any]:
    found = message.get(field) or {}
    if not isinstance(found, dict):
        raise faults.Fault(400, f"{field} is not an object")
    return found


def _text(message: dict[str, Any], field: str) -> str:
    found = message.get(field)
    if not isinstance(found, str):
        raise faults.Fault(400, f"{field} is not a string")
    return found


def _texts(message: dict[str, Any], field: str) -> list[str]:
    found = message.get(field) or []
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise faults.Fault(400, f"{field} is not a list of strings")
    return found


def _number(message: dict[str, Any], field: str, default: int) -> int:
    found = message.get(field, default)
    if not isinstance(found, int):
        raise faults.Fault(400, f"{field} is not a number")
    return found


def _check_environment(env: dict[str, Any]) -> None:
    if not all(isinstance(value, str) for value in env.values()):
        raise faults.Fault(400, "envs is not a map of strings")
