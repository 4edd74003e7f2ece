"""The table of operations. A handler's signature is its contract; routes, OpenAPI and tests are read from it.

    @operation("POST", "/v1/sandboxes/{sandbox}/exec", scope="exec")
    async def exec_command(call: Call, sandbox: str, body: wire.Exec, *, wait: bool = True) -> wire.Result:
        \"\"\"Run a command to its end.\"\"\"

* The first parameter is the call. Parameters named in the path are taken from it, `body` from the request (a struct: JSON;
  `bytes`: as it is), keyword-only ones from the query.
* The result type decides the answer: a struct or list is JSON, `bytes` an octet stream, `Stream[T]` server-sent events, `None`
  is 204.
* `scope` is what a key must have; `None` needs none at all, and is for probes.
* `version` gives the entity tag of what is answered; with `matches`, a change may be bound to one (`If-Match`).
"""

from __future__ import annotations

import asyncio
import inspect
import re
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

Scope = typing.Literal[
    "sandboxes", "exec", "files", "ports", "pools", "snapshots", "volumes", "policies", "secrets", "images", "events",
    "audit", "metrics", "admin",
]  # fmt: skip
SCOPES: tuple[str, ...] = typing.get_args(Scope)
T = TypeVar("T")
MOST = 2**53 - 1
"""The largest number that every JSON reader takes exactly."""
Number = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_PLACE = re.compile(r"\{(\w+)(?::\w+)?\}")


class Stream(Generic[T]):
    """Events of one type, each sent as it happens. `id` is what `Last-Event-ID` repeats."""

    def __init__(self, events: AsyncIterator[Event], *, endless: bool = False) -> None:
        """`endless`: nobody need wait for its end, because it has none of its own."""
        self.events = events
        self.endless = endless


class Event(NamedTuple):
    kind: str
    data: Any
    id: str | None = None


class Begun(AsyncIterator[Event]):
    """Events whose first has come already, or is waited for. Closing it closes them, whether or not any was taken."""

    def __init__(self, first: asyncio.Future[Event], events: AsyncIterator[Event]) -> None:
        self._first: asyncio.Future[Event] | None = first
        self._events = events

    async def __anext__(self) -> Event:
        if self._first is None:
            return await anext(self._events)
        first, self._first = self._first, None
        try:
            return await first
        except BaseException:
            await _settled(first)
            raise

    async def aclose(self) -> None:
        if self._first is not None:
            await _settled(self._first)
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()


async def _settled(first: asyncio.Future[Event]) -> None:
    first.cancel()
    await asyncio.wait((first,))
    if not first.cancelled():
        first.exception()


async def begun(events: AsyncIterator[Event], within_s: float | None = None) -> AsyncIterator[Event]:
    """The events once there is one, or that time is up: what is refused before the first is an answer and no stream."""

    async def step() -> Event:
        return await anext(events)

    first: asyncio.Future[Event] = asyncio.ensure_future(step())
    made = Begun(first, events)
    try:
        await asyncio.wait((first,), timeout=within_s)
        problem = first.exception() if first.done() else None
        if problem is not None and not isinstance(problem, StopAsyncIteration):
            raise problem
    except BaseException:
        await made.aclose()
        raise
    return made


class Query(NamedTuple):
    name: str
    type: Any
    default: Any
    """`inspect.Parameter.empty` where it must be given."""


class Operation(NamedTuple):
    method: str
    path: str
    name: str
    summary: str
    description: str
    tag: str
    scope: Scope | None
    places: tuple[str, ...]
    queries: tuple[Query, ...]
    body: Any
    result: Any
    status: int
    errors: tuple[str, ...]
    handler: Callable[..., Awaitable[Any]]
    matches: bool = False
    """Whether `If-Match` binds it to a version."""
    version: Callable[[Any], str] | None = None
    """Of what it answers; without one, an answer to GET is known by its bytes."""
    whole: bool = False
    """Whether that tag stands for all of the answer, so that who has seen it need not get it again."""
    events: Mapping[str, Any] = types.MappingProxyType({})
    """What a stream's events are called, and what each carries."""
    resumes: bool = False
    """Whether `Last-Event-ID` goes on where a stream was left."""
    fleeting: bool = False
    """Whether its work ends with the request, even where an idempotency key would carry it on."""
    media: str = "application/octet-stream"
    """What bytes are, in the body or the answer."""
    example: Any = None
    """A body that is accepted, or the query where there is no body."""

    @property
    def streams(self) -> bool:
        return typing.get_origin(self.result) is Stream

    @property
    def tagged(self) -> bool:
        """Whether the answer has an entity tag."""
        return self.version is not None or self.skips

    @property
    def skips(self) -> bool:
        """Whether who has seen the answer need not get it again."""
        by_bytes = self.method == "GET" and self.scope is not None and self.version is None
        return (by_bytes and not self.streams and self.result is not bytes) or self.whole

    @property
    def remembers(self) -> bool:
        """Whether an idempotency key makes it safe to repeat."""
        return self.method == "POST" and not self.streams


class Table:
    """Operations by their name, in the order of their declaration."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}

    def operation(
        self,
        method: str,
        path: str,
        *,
        scope: Scope | None,
        status: int | None = None,
        errors: str = "",
        **more: Any,
    ) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
        """`errors`: the codes that are peculiar to it, in one string; those of the door are added to all. `more`: further
        fields of `Operation`."""

        def enter(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            made = _read(method, path, scope, status, tuple(errors.split()), handler)._replace(**more)
            if made.name in self.operations:
                raise ValueError(f"two operations are called {made.name}")
            self.operations[made.name] = made
            return handler

        return enter


def _read(
    method: str,
    path: str,
    scope: Scope | None,
    status: int | None,
    codes: tuple[str, ...],
    handler: Callable[..., Awaitable[Any]],
) -> Operation:
    hints = typing.get_type_hints(handler, include_extras=True)
    result = hints.pop("return")
    places = tuple(_PLACE.findall(path))
    queries: list[Query] = []
    body: Any = None
    for parameter in list(inspect.signature(handler).parameters.values())[1:]:
        kind = hints[parameter.name]
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            queries.append(Query(parameter.name, kind, parameter.default))
        elif parameter.name == "body":
            body = kind
        elif parameter.name not in places:
            raise TypeError(f"{handler.__qualname__}: {parameter.name!r} is not in the path {path!r}")
    summary, _, description = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
    summary = " ".join(summary.split())
    if status is None:
        status = 204 if result is type(None) else 200
    return Operation(
        method, path, handler.__name__, summary, description.strip(), _tag(path),
        scope, places, tuple(queries), body, result, status, codes, handler,
    )  # fmt: skip


_TAGS = {
    "exec": "executions", "executions": "executions", "code": "contexts", "contexts": "contexts", "files": "files", "policy": "policies",
    "asks": "policies", "snapshots": "snapshots", "restore": "snapshots", "fork": "snapshots", "workspace": "workspaces", "ports": "ports",
}  # fmt: skip


def _tag(path: str) -> str:
    """The noun that an operation is about."""
    match path.strip("/").split("/"):
        case ["v1", "sandboxes", _, act, *_]:
            return _TAGS.get(act, "sandboxes")
        case ["v1", "secret-keys", *_]:
            return "secrets"
        case ["v1", noun, *more] if more or noun.endswith("s") or noun == "audit":
            return noun
        case ["run", *_]:
            return "run"
        case _:
            return "server"


def convert_query(operation: Operation, given: dict[str, str]) -> dict[str, Any]:
    """The query's values by type; raises msgspec.ValidationError or KeyError (for an unknown or missing one)."""
    known = {query.name for query in operation.queries}
    for name in given:
        if name not in known:
            raise KeyError(name)
    values: dict[str, Any] = {}
    for query in operation.queries:
        if query.name in given:
            values[query.name] = msgspec.convert(given[query.name], query.type, strict=False)
        elif query.default is inspect.Parameter.empty:
            raise msgspec.ValidationError(f"the query needs `{query.name}`")
        else:
            values[query.name] = query.default
    return values
