"""What a request says, checked before anything is done: its query, its body, its conditions.

Nothing is guessed and nothing passed over. A parameter given twice, one that is unknown, bytes that are not UTF-8, a body of
another type than JSON, one that is nested without end: each is refused in its own words. A condition (`If-Match`) on something
that has no version is refused too, because who sends one relies on it.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from cloche import errors
from cloche.server.http import operations

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_TAG = re.compile(r'"([\x21\x23-\x7e]*)"')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [1 if byte in b"[{" else -1 for byte in range(256)]
_BOUND = re.compile(r"Expected `(int|float)` [<>]")
_DEEPEST = 64
_MOST_QUERIES = 50


def places(operation: operations.Operation, request: Request) -> dict[str, Any]:
    return {name: request.path_params[name] for name in operation.places}


def _code(problem: Exception) -> str:
    if "unknown field" in str(problem):
        return "field_unknown"
    return "limit_invalid" if _BOUND.match(str(problem)) else "argument_invalid"


# ── the query ──────────────────────────────────────────────────────────────────────────────────────


def query(operation: operations.Operation, request: Request) -> dict[str, Any]:
    given = _pairs(request.scope.get("query_string", b""))
    try:
        return operations.convert_query(operation, given)
    except KeyError as unknown:
        name = str(unknown.args[0])
        known = [query.name for query in operation.queries]
        hint = errors.nearest(name, known) if known else "this operation has no query"
        raise errors.error(
            "field_unknown", f"{operation.name} has no query parameter {name[:100]!r}", hint=hint, field=name
        ) from None
    except (msgspec.ValidationError, OverflowError) as problem:
        raise errors.error(
            _code(problem),
            f"the query is not valid: {problem}",
            hint=f"GET /docs#{operation.name} says what it takes",
        ) from None


def _pairs(raw: bytes) -> dict[str, str]:
    try:
        found = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_QUERIES
        )
    except UnicodeDecodeError:
        raise errors.error(
            "argument_invalid", "the query is not UTF-8", hint="percent-encode the bytes of UTF-8"
        ) from None
    except ValueError:
        raise errors.error(
            "argument_invalid", f"the query has more than {_MOST_QUERIES} parameters"
        ) from None
    given: dict[str, str] = {}
    for name, value in found:
        if name in given:
            raise errors.error(
                "argument_invalid",
                f"the query parameter {name[:100]!r} is given twice",
                hint="give it once",
                field=name,
            )
        given[name] = value
    return given


# ── the body ───────────────────────────────────────────────────────────────────────────────────────


async def body(operation: operations.Operation, request: Request, *, json_mib: int, raw_mib: int) -> Any:
    if operation.body is None:
        return None
    if operation.body is bytes:
        return await _all(request, raw_mib << 20)
    _check_type(request.headers)
    return decode(await _all(request, json_mib << 20), operation.body)


_KINDS = ("application/json", "application/x-www-form-urlencoded")


def _check_type(headers: Headers) -> None:
    """JSON, or what `curl -d` calls everything. That a page may send such a form without asking does not matter: it has no key, and
    its `Origin` is refused before."""
    given = headers.get("content-type")
    if given is None:
        return
    kind, _, parameters = given.lower().partition(";")
    charset = parameters.replace(" ", "").replace('"', "").partition("charset=")[2].partition(";")[0]
    kind = kind.strip()
    if (kind not in _KINDS and not kind.endswith("+json")) or charset not in ("", "utf-8"):
        raise errors.error(
            "body_type_refused",
            f"the body is {given[:100]!r}; this operation takes JSON in UTF-8",
            hint="send `Content-Type: application/json`",
        )


async def _all(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> errors.ClocheError:
    return errors.error(
        "body_too_large",
        f"the request's body is larger than {most >> 20} MiB",
        hint="send less, or raise server.max_body_mib (max_upload_mib for files)",
    )


def decode(data: bytes, kind: Any) -> Any:
    _check_depth(data)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as problem:
        raise errors.error(
            _code(problem),
            f"the body is not valid: {problem}",
            hint="GET /openapi.json says what it may hold",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise errors.error(
            "argument_invalid", f"the body is not JSON: {problem}", hint="send JSON in UTF-8"
        ) from None


def _check_depth(data: bytes) -> None:
    """Whatever reads a value later may follow its nesting with its own stack."""
    if data.count(b"[") + data.count(b"{") <= _DEEPEST:
        return
    brackets = _STRING.sub(b"", data).translate(None, _BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > _DEEPEST:
        raise errors.error(
            "argument_invalid", f"the body is nested more than {_DEEPEST} levels deep", hint="send it flatter"
        )


# ── conditions ─────────────────────────────────────────────────────────────────────────────────────


def idempotency_key(operation: operations.Operation, headers: Headers) -> str | None:
    given = headers.get("idempotency-key")
    if given is None or operation.method != "POST":
        return None
    if operation.streams:
        raise errors.error(
            "argument_invalid",
            "a stream cannot be told twice, so it takes no Idempotency-Key",
            hint="leave it out; the operation without a stream takes one",
            field="Idempotency-Key",
        )
    if not _KEY.fullmatch(given):
        raise errors.error(
            "argument_invalid",
            "Idempotency-Key is not 1 to 255 printable ASCII characters without spaces",
            hint="use a UUID",
            field="Idempotency-Key",
        )
    return given


def check_condition(operation: operations.Operation, headers: Headers) -> None:
    if "if-match" in headers and operation.method != "GET" and not operation.matches:
        raise errors.error(
            "argument_invalid",
            f"{operation.name} takes no If-Match: what it changes has no version",
            hint="leave the header out",
            field="If-Match",
        )


def if_match(headers: Headers) -> str | None:
    """The version that the caller has seen, None if any will do."""
    given = headers.get("if-match", "*").strip()
    if given == "*":
        return None
    tag = _TAG.fullmatch(given)
    if tag is None:
        raise errors.error(
            "argument_invalid",
            f"If-Match {given[:50]!r} is not one strong entity tag",
            hint='send the ETag of an earlier answer, with its quotes, or "*"',
            field="If-Match",
        )
    return tag[1]


def seen(headers: Headers, tag: str) -> bool:
    """Whether the caller says it has this version already (`If-None-Match`)."""
    given = headers.get("if-none-match", "")
    return given.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in given.split(",")]


def last_event_id(headers: Headers) -> int | None:
    last = headers.get("last-event-id")
    if last is None:
        return None
    if not last.isdecimal() or int(last) > operations.MOST:
        raise errors.error(
            "argument_invalid",
            f"Last-Event-ID {last[:50]!r} is not one of ours",
            hint="send the id of the last event that arrived",
            field="Last-Event-ID",
        )
    return int(last)
