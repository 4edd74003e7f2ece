"""The table as an OpenAPI 3.1 document: made, never written.

What a reader needs and the types do not say comes from where it stands already: a field's words from the string below it in its class,
the codes of an error from `errors.TABLE`, examples from `examples`. Our own additions: `x-scope` (what a key must have), `x-codes` (what
an error's code may be) and `x-events` (what a stream's events are called, and what their data is).
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import typing
from types import ModuleType
from typing import Any

import msgspec
import msgspec.inspect

from cloche import __version__, errors
from cloche.server.http import examples, operations, wire

_REFERENCE = "#/components/schemas/{name}"
_DOOR = ("peer_refused", "key_missing", "key_refused", "scope_missing", "rate_exceeded")
_WIRE = ("url_too_long", "head_too_large", "request_too_slow")
_ALWAYS = ("argument_invalid", "field_unknown", "limit_invalid", "internal_error")
_ENGINE = ("audit_unavailable", "server_unavailable")
_SANDBOX = ("sandbox_not_found", "sandbox_lost")
_SHARED = {
    "Invalid": ("argument_invalid", "field_unknown", "limit_invalid"),
    "Unknown": ("key_missing", "key_refused"),
    "Forbidden": ("peer_refused", "scope_missing"),
    "Elsewhere": ("peer_refused",),
    "Conflict": ("name_conflict",),
    "TooLarge": ("body_too_large",),
    "WrongType": ("body_type_refused",),
    "TooMany": ("rate_exceeded",),
    "TooLong": ("url_too_long",),
    "TooMuchHead": ("head_too_large",),
    "TooSlow": ("request_too_slow",),
    "Ours": ("internal_error",),
    "Away": ("audit_unavailable", "server_unavailable"),
    "Missing": ("sandbox_not_found",),
    "Gone": ("sandbox_lost",),
}
"""What many operations answer in the same words."""
_TAG = {"type": "string", "pattern": r'^"[\x21\x23-\x7e]*"$'}
_TAGS = {
    "run": "One command in a sandbox of its own.",
    "sandboxes": "Create, look at, extend, suspend and delete sandboxes.",
    "executions": "Commands: run to the end, start, follow, feed, signal.",
    "contexts": "Interpreters that keep their state.",
    "files": "Files and trees inside a sandbox.",
    "ports": "What a sandbox serves.",
    "snapshots": "A sandbox's files at one moment; restores and forks.",
    "templates": "Named starting points.",
    "pools": "Sandboxes kept warm.",
    "claims": "Sandboxes taken from a pool.",
    "volumes": "Named directories that outlive sandboxes.",
    "workspaces": "Directories of the server's host that sandboxes were lent.",
    "policies": "What a sandbox may touch: checked, explained, changed, asked about.",
    "secrets": "Credentials that sandboxes use and never see.",
    "images": "The roots that sandboxes are made of.",
    "events": "What happened, as pages and as a stream.",
    "audit": "What was done, kept so that a change to it shows.",
    "server": "Probes, this document, chores.",
}


def document(table: operations.Table) -> dict[str, Any]:
    kinds = _kinds(table)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    of = dict(zip(map(repr, kinds), schemas, strict=True))
    structs = _structs(kinds)
    paths: dict[str, dict[str, Any]] = {}
    for made in table.operations.values():
        place = made.path.replace(":path", "")
        paths.setdefault(place, {})[made.method.lower()] = _operation(made, of)
    used = dict.fromkeys(made.tag for made in table.operations.values())
    tags = [tag for tag in _TAGS if tag in used] + [tag for tag in used if tag not in _TAGS]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cloche",
            "version": __version__,
            "description": (
                "Sandboxes for code that nobody has read.\n\nErrors have one shape everywhere (`Failure`), with a stable `code`. Lists have pages: "
                "give `next_cursor` as `cursor`. A POST with an `Idempotency-Key` is safe to repeat. A change may be bound to the `ETag` that was "
                "seen with `If-Match`. Streams are server-sent events."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "tags": [{"name": tag, "description": _TAGS.get(tag, "")} for tag in tags],
        "paths": paths,
        "components": {
            "schemas": {
                name: _worded(schema, structs.get(name)) for name, schema in sorted(components.items())
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token."},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "responses": {
                **{
                    name: _failure(errors.TABLE[listed[0]].http, list(listed))
                    for name, listed in _SHARED.items()
                },
                "Other": {**_failure(500, ["internal_error"]), "description": "Any other error."},
            },
            "examples": {code: _example(code) for code in sorted(_all_codes(table))},
            "headers": {
                "X-Request-ID": {
                    "description": "The caller's, or a new one: what the log and an error name.",
                    "schema": {"type": "string"},
                },
                "ETag": {"description": "The version of what is answered.", "schema": _TAG},
                "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
            },
        },
    }


def _kinds(table: operations.Table) -> list[Any]:
    """Every type that the document refers to, once."""
    found: dict[str, Any] = {repr(wire.Failure): wire.Failure, repr(wire.Broken): wire.Broken}
    for made in table.operations.values():
        queries = (query.type for query in made.queries)
        for kind in (_json(made.body), _json(made.result), *made.events.values(), *queries):
            if kind is not None:
                found.setdefault(repr(kind), kind)
    return list(found.values())


def _json(kind: Any) -> Any:
    return None if kind in (None, type(None), bytes) or typing.get_origin(kind) is operations.Stream else kind


# ── operations ─────────────────────────────────────────────────────────────────────────────────────


def _operation(made: operations.Operation, of: dict[str, Any]) -> dict[str, Any]:
    places = [_place(name) for name in made.places]
    described: dict[str, Any] = {
        "operationId": made.name,
        "summary": made.summary,
        "tags": [made.tag],
        "parameters": places + [_query(query, of) for query in made.queries] + _headers(made),
        "responses": {str(made.status): _success(made, of), **_unchanged(made), **_failures(made)},
    }
    if made.description:
        described["description"] = made.description
    if made.scope is None:
        described["security"] = []
    else:
        described["x-scope"] = made.scope
    if made.body is not None:
        content = _content(made.body, of, made.media)
        if made.body is not bytes:
            given = made.example if made.example is not None else examples.body(made.body)
            content["application/json"]["examples"] = {"usual": {"value": given}}
        described["requestBody"] = {"required": _needed(made.body), "content": content}
    return described


def _needed(kind: Any) -> bool:
    """A body all of whose fields may be left out may be left out itself."""
    fields = msgspec.structs.fields(kind) if isinstance(kind, type) and kind is not bytes else ()
    return kind is not bytes and any(field.required for field in fields)


def _place(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": examples.PLACES.get(name, "text"),
    }


def _query(query: operations.Query, of: dict[str, Any]) -> dict[str, Any]:
    required = query.default is inspect.Parameter.empty
    schema = dict(of[repr(query.type)])
    if not required and query.default is not None:
        schema["default"] = query.default
    described = {"name": query.name, "in": "query", "required": required, "schema": schema}
    if required:
        described["example"] = examples.named(query.name, query.type)
    return described


def _headers(made: operations.Operation) -> list[dict[str, Any]]:
    wanted: list[tuple[str, str, dict[str, Any]]] = []
    if made.matches:
        wanted.append(
            ("If-Match", "Change only this version: the `ETag` of an earlier answer.", {**_TAG, "pattern": r'^(\*|"[\x21\x23-\x7e]*")$'})
        )  # fmt: skip
    if made.remembers:
        words = "Makes it safe to repeat: the same key and request is the same answer."
        wanted.append(("Idempotency-Key", words, {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"}))
    if made.resumes:
        words = "Go on after this event."
        wanted.append(("Last-Event-ID", words, {"type": "integer", "minimum": 0, "maximum": operations.MOST}))
    return [
        {"name": name, "in": "header", "required": False, "description": words, "schema": schema}
        for name, words, schema in wanted
    ]


def _content(kind: Any, of: dict[str, Any], media: str) -> dict[str, Any]:
    if kind is bytes:
        return {media: {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": of[repr(kind)]}}


def _success(made: operations.Operation, of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": "Done.", "headers": {"X-Request-ID": _header("X-Request-ID")}}
    if made.tagged:
        described["headers"]["ETag"] = _header("ETag")
    if made.status == 204:
        return described
    if made.streams:
        described["description"] = "Server-sent events; the data of each is JSON."
        events = {name: of[repr(kind)] for name, kind in made.events.items()}
        events["error"] = of[repr(wire.Broken)]
        stream = {
            "schema": {"type": "string"},
            "x-events": events,
            "examples": {"usual": {"value": _stream(made)}},
        }
        return {**described, "content": {"text/event-stream": stream}}
    content = _content(made.result, of, made.media)
    if made.result is not bytes:
        content["application/json"]["examples"] = {"usual": {"value": examples.of(made.result)}}
    return {**described, "content": content}


def _stream(made: operations.Operation) -> str:
    """The first two kinds of event, as they go over the wire."""
    told = [
        f"event: {name}\ndata: {msgspec.json.encode(examples.of(kind)).decode()}\n\n"
        for name, kind in list(made.events.items())[:2]
    ]
    return "".join(told)


def _unchanged(made: operations.Operation) -> dict[str, Any]:
    if not made.skips:
        return {}
    return {"304": {"description": "As in `If-None-Match`.", "headers": {"ETag": _header("ETag")}}}


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def codes(made: operations.Operation) -> list[str]:
    """What it may fail with, as far as it is foreseen."""
    found = [*_DOOR, *_ENGINE] if made.scope is not None else [_DOOR[0]]
    found += [*_WIRE, *_ALWAYS, *(_SANDBOX if "sandbox" in made.places else ()), *made.errors]
    if made.body is not None:
        found.append("body_too_large")
        if made.body is not bytes:
            found.append("body_type_refused")
    if made.remembers:
        found.append("name_conflict")
    return list(dict.fromkeys(found))


def _all_codes(table: operations.Table) -> set[str]:
    return {code for made in table.operations.values() for code in codes(made)} | {
        code for listed in _SHARED.values() for code in listed
    }


def _example(code: str) -> dict[str, Any]:
    fault = {
        "code": code,
        "message": "What happened.",
        "hint": "What to do.",
        "request_id": examples.ID,
        "details": {},
    }
    return {"summary": f"HTTP {errors.TABLE[code].http}", "value": {"error": fault}}


def _failures(made: operations.Operation) -> dict[str, Any]:
    """One response per status, and the codes that it may carry."""
    by_status: dict[int, list[str]] = {}
    for code in codes(made):
        by_status.setdefault(errors.TABLE[code].http, []).append(code)
    shared = {tuple(listed): name for name, listed in _SHARED.items()}
    answers: dict[str, Any] = {}
    for status, listed in sorted(by_status.items()):
        name = shared.get(tuple(listed))
        answers[str(status)] = (
            _failure(status, listed) if name is None else {"$ref": f"#/components/responses/{name}"}
        )
    return answers | {"default": {"$ref": "#/components/responses/Other"}}


def _failure(status: int, listed: list[str]) -> dict[str, Any]:
    headers = {"X-Request-ID": _header("X-Request-ID")}
    if status == 429:
        headers["Retry-After"] = _header("Retry-After")
    shown = {code: {"$ref": f"#/components/examples/{code}"} for code in listed}
    content = {"schema": {"$ref": _REFERENCE.format(name="Failure")}, "examples": shown}
    return {
        "description": ", ".join(f"`{code}`" for code in listed),
        "x-codes": listed,
        "headers": headers,
        "content": {"application/json": content},
    }


# ── the words of fields ────────────────────────────────────────────────────────────────────────────


def _worded(schema: dict[str, Any], kind: type | None) -> dict[str, Any]:
    properties = schema.get("properties")
    if not properties or kind is None:
        return schema
    words = {field: text for base in reversed(kind.__mro__) for field, text in _strings(base).items()}
    shown = {
        field: ({**described, "description": words[field]} if field in words else described)
        for field, described in properties.items()
    }
    return {**schema, "properties": shown}


def _structs(kinds: list[Any]) -> dict[str, type]:
    """The classes behind the schemas, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls.__name__ in found:
                continue
            found[kind.cls.__name__] = kind.cls
            waiting += [field.type for field in kind.fields]
        for name in ("type", "item_type", "key_type", "value_type"):
            waiting += [getattr(kind, name)] if hasattr(kind, name) else []
        for name in ("types", "item_types"):
            waiting += getattr(kind, name, ())
    return found


def _strings(kind: type) -> dict[str, str]:
    module = sys.modules.get(kind.__module__)
    return {} if module is None else _parsed(module).get(kind.__name__, {})


@functools.cache
def _parsed(module: ModuleType) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            words = found.setdefault(node.name, {})
            for before, after in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(before, ast.AnnAssign)
                    and isinstance(before.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    words[before.target.id] = " ".join(textwrap.dedent(after.value.value).split())
    return found


@functools.cache
def encoded(table: operations.Table) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document(table)), indent=1)
