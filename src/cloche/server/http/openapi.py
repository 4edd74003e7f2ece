"""The table as an OpenAPI 3.1 document: made, never written."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from typing import Any

import msgspec

from cloche import __version__, errors
from cloche.server.http import operations, wire

_REFERENCE = "#/components/schemas/{name}"
_DOOR = ("peer_refused", "key_missing", "key_refused", "scope_missing", "rate_exceeded")
_ALWAYS = ("argument_invalid", "field_unknown", "internal_error")


def document(table: operations.Table) -> dict[str, Any]:
    kinds = _kinds(table)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    of = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for made in table.operations.values():
        place = made.path.replace(":path", "")
        paths.setdefault(place, {})[made.method.lower()] = _operation(made, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cloche",
            "version": __version__,
            "description": "Sandboxes for code that nobody has read. Errors have one shape everywhere: see `Failure`.",
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _kinds(table: operations.Table) -> list[Any]:
    """Every type that the document refers to, once."""
    found: dict[str, Any] = {repr(wire.Failure): wire.Failure}
    for made in table.operations.values():
        for kind in (_json(made.body), *_payloads(made), *(query.type for query in made.queries)):
            if kind is not None:
                found.setdefault(repr(kind), kind)
    return list(found.values())


def _json(kind: Any) -> Any:
    return None if kind in (None, type(None), bytes) else kind


def _payloads(made: operations.Operation) -> tuple[Any, ...]:
    """What an answer carries; events of a stream may be of several types."""
    if not made.streams:
        return (_json(made.result),)
    events = typing.get_args(made.result)[0]
    return typing.get_args(events) if isinstance(events, types.UnionType) else (events,)


def _operation(made: operations.Operation, of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": made.name,
        "summary": made.summary,
        "tags": [made.tag],
        "parameters": [_place(name) for name in made.places] + [_query(query, of) for query in made.queries],
        "responses": {str(made.status): _success(made, of), **_failures(made)},
    }
    if made.description:
        described["description"] = made.description
    if made.scope is None:
        described["security"] = []
    else:
        described["x-scope"] = made.scope
    if made.body is not None:
        described["requestBody"] = {"required": True, "content": _content(made.body, of)}
    return described


def _place(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query(query: operations.Query, of: dict[str, Any]) -> dict[str, Any]:
    required = query.default is inspect.Parameter.empty
    schema = dict(of[repr(query.type)])
    if not required and query.default is not None:
        schema["default"] = query.default
    return {"name": query.name, "in": "query", "required": required, "schema": schema}


def _content(kind: Any, of: dict[str, Any]) -> dict[str, Any]:
    if kind is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": of[repr(kind)]}}


def _success(made: operations.Operation, of: dict[str, Any]) -> dict[str, Any]:
    if made.status == 204:
        return {"description": "Done."}
    if made.streams:
        events = [of[repr(kind)] for kind in _payloads(made)]
        return {
            "description": "Server-sent events; the data of each is JSON.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "x-events": events}},
        }
    return {"description": "Done.", "content": _content(made.result, of)}


def _failures(made: operations.Operation) -> dict[str, Any]:
    """One response per status, and the codes that it may carry."""
    codes = [*(_DOOR if made.scope is not None else _DOOR[:1]), *_ALWAYS, *made.errors]
    if made.body is not None:
        codes.append("body_too_large")
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        by_status.setdefault(errors.TABLE[code].http, []).append(code)
    answers = {
        str(status): {
            "description": ", ".join(f"`{code}`" for code in listed),
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Failure")}}},
        }
        for status, listed in sorted(by_status.items())
    }
    return answers | {
        "default": {
            "description": "Any other error.",
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Failure")}}},
        }
    }


@functools.cache
def encoded(table: operations.Table) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document(table)), indent=1)
