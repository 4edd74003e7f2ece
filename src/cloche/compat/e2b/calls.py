"""What a handler of the control plane is given, and how it reads and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors, interfaces, model, settings
from cloche.compat.e2b import connect, faults, state

_PAGE = 100
T = TypeVar("T")


class Call(NamedTuple):
    request: Request
    backend: interfaces.Backend
    key: str
    """The caller's key, by name."""
    state: state.State
    config: settings.Settings
    places: dict[str, str]

    @property
    def sandbox(self) -> str:
        return self.places["sandbox"]


Handler = Callable[[Call], Awaitable[Response]]


class Route(NamedTuple):
    method: str
    path: str
    name: str
    handler: Handler | None

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(self.path)))


async def body(call: Call, kind: type[T]) -> T:
    data = await connect.read_all(call.request, call.config.server.max_body_mib << 20)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise faults.Fault(400, f"the body is not valid: {problem}", name="body_invalid") from None


async def alive(call: Call) -> model.SandboxInfo:
    """The sandbox of the path; 404 for one that never was, and for one that has ended."""
    try:
        info = await call.backend.info(call.sandbox)
    except errors.ClocheError as problem:
        if not faults.is_gone(problem):
            raise
        call.state.forget(call.sandbox)
        raise faults.Fault(404, f"sandbox {call.sandbox!r} not found", name=problem.code) from None
    if info.phase in ("running", "paused", "archived"):
        return info
    raise faults.Fault(404, f"sandbox {call.sandbox!r} not found: it is {info.phase}", name="sandbox_lost")


def page(
    call: Call, found: list[T], shown: Callable[[T], dict[str, Any]], headers: dict[str, str] | None = None
) -> Response:
    """Some of a list, and in a header where the next ones begin."""
    start, limit = whole(call, "nextToken", 0), max(1, min(whole(call, "limit", _PAGE), _PAGE))
    headers = headers or {}
    if start + limit < len(found):
        headers["x-next-token"] = str(start + limit)
    return faults.json([shown(one) for one in found[start : start + limit]], 200, headers)


def whole(call: Call, field: str, default: int) -> int:
    given = call.request.query_params.get(field, "")
    if given and not (given.isascii() and given.isdigit() and len(given) < 20):
        raise faults.Fault(400, f"{field} is {given[:50]!r}, which is not a number", name="query_invalid")
    return int(given) if given else default


def one_of(call: Call, field: str, allowed: tuple[str, ...], default: str) -> str:
    given = call.request.query_params.get(field) or default
    if given not in allowed:
        raise faults.Fault(
            400, f"{field} is {given[:50]!r}; it is one of {', '.join(allowed)}", name="query_invalid"
        )
    return given


def moment(call: Call, field: str) -> float:
    """A time of the query, in seconds; the beginning of time if it is not given."""
    given = call.request.query_params.get(field, "")
    try:
        return datetime.fromisoformat(given).timestamp() if given else 0.0
    except ValueError:
        raise faults.Fault(
            400, f"{field} is {given[:50]!r}, which is not a time", name="query_invalid"
        ) from None


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
