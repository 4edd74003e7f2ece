"""Our errors in E2B's words: a status and a message on the control plane, a Connect code in the data plane's calls."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

_GONE = frozenset(("sandbox_not_found", "sandbox_lost", "sandbox_expired"))
_CONNECT = {
    "file_exists": "already_exists",
    "execution_finished": "not_found",
    "sandbox_stopped": "failed_precondition",
    "directory_not_empty": "failed_precondition",
    "wait_timeout": "deadline_exceeded",
}
_BY_STATUS = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 405: "unimplemented",
    409: "failed_precondition", 410: "unavailable", 413: "resource_exhausted", 429: "resource_exhausted", 501: "unimplemented",
    502: "unavailable", 503: "unavailable", 504: "deadline_exceeded", 507: "resource_exhausted",
}  # fmt: skip
_TO_STATUS = {
    "invalid_argument": 400, "unauthenticated": 401, "permission_denied": 403, "not_found": 404, "already_exists": 409,
    "failed_precondition": 400, "resource_exhausted": 429, "unimplemented": 501, "unavailable": 503,
    "deadline_exceeded": 504, "internal": 500,
}  # fmt: skip


class Fault(Exception):
    """An answer that is no success, in E2B's own terms."""

    def __init__(self, status: int, message: str, *, connect: str | None = None, name: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.connect = connect or _BY_STATUS.get(status, "internal")
        self.name = name
        self.retry_after_s: float | None = None


def of(problem: errors.ClocheError) -> Fault:
    """The fault that one of our errors is."""
    words = f"{problem.message}; {problem.hint}" if problem.hint else problem.message
    status = errors.TABLE[problem.code].http
    made = Fault(status, words, connect=_CONNECT.get(problem.code), name=problem.code)
    after = problem.details.get("retry_after_s")
    if isinstance(after, (int, float)):
        made.retry_after_s = after
    return made


def is_gone(problem: errors.ClocheError) -> bool:
    return problem.code in _GONE


def missing(what: str, words: str = "") -> Fault:
    """Something of E2B's that is not honoured here (yet)."""
    return Fault(501, f"{what} is not supported by this server{words}", name=what)


def as_json(fault: Fault) -> Response:
    """E2B's shape on the control plane and of envd's plain routes."""
    body: dict[str, Any] = {"code": fault.status, "message": fault.message}
    if fault.name:
        body["error_code"] = fault.name
    headers = {}
    if fault.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(fault.retry_after_s)))
    return json(body, fault.status, headers)


def as_connect(fault: Fault) -> Response:
    """The answer to a unary call."""
    status = _TO_STATUS.get(fault.connect, 500)
    return json({"code": fault.connect, "message": fault.message}, status)


def gone(sandbox: str) -> Response:
    """What the real proxy says of a sandbox that is not running; clients look for the words."""
    words = f"The sandbox {sandbox} was not found"
    return json({"sandboxId": sandbox, "message": words, "code": 502}, 502)


def closed(sandbox: str, port: int) -> Response:
    words = f"The sandbox {sandbox} is running but its port is not open: {port}"
    return json({"sandboxId": sandbox, "message": words, "code": 502, "port": port}, 502)


def json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
