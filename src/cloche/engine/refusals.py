"""No answer before its record: what was done has its lines with the kernel when the caller hears of it, refusals included; and with
`audit.on_failure = "refuse"` a request is turned down for want of one.

`recorded` wraps every method of `interfaces.Backend` that the engine has, so a verb that is added later is covered without a thought:
the default is that it needs a record. What only looks, and what ends something, is exempt from that by name: an owner must be able
to see and to stop what runs while the disk is full.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from cloche import errors, interfaces

EXEMPT = frozenset(
    [
        "aclose",
        "attach",
        "claim_info",
        "claims",
        "contexts",
        "delete",
        "audit_lines",
        "check_policy",
        "delete_pool",
        "diff",
        "diff_snapshots",
        "events",
        "executions",
        "explain_policy",
        "follow_events",
        "info",
        "list",
        "list_files",
        "pool",
        "pools",
        "ports",
        "release_claim",
        "signal",
        "snapshot_info",
        "snapshots",
        "stat_file",
        "suspend",
        "sweep",
        "volume",
        "volumes",
        "template",
        "templates",
        "usage",
        "verify_audit",
        "wait",
        "wait_pool",
        "workspace_report",
    ]
)
# To look and find nothing is an answer, not a refusal.
_LOOKS = frozenset(["info", "list_files", "read_file", "read_file_stream", "stat_file", "workspace_report"])
_NOTHING_THERE = frozenset(["file_not_found", "sandbox_not_found"])

_COROUTINE, _ASYNC_GENERATOR = 0x80, 0x200  # of a code object; `inspect` would cost a command its import


class Recorder(Protocol):
    def check_audit(self) -> None: ...

    def settle_audit(self) -> None: ...

    def record_refusal(self, operation: str, sandbox: str | None, code: str, message: str) -> None: ...


T = TypeVar("T", bound=type)


def recorded(engine: T) -> T:
    for name in sorted(interfaces.Backend.__abstractmethods__ - {"aclose"}):
        method = engine.__dict__.get(name)
        if method is not None:
            setattr(engine, name, _wrapped(name, method))
    return engine


def _wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    flags = method.__code__.co_flags
    if flags & _COROUTINE:
        return _coroutine(name, method)
    if flags & _ASYNC_GENERATOR:
        return _generator(name, method)
    return _plain(name, method)


def _coroutine(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    needs = name not in EXEMPT

    @functools.wraps(method)
    async def call(self: Recorder, *args: Any, **named: Any) -> Any:
        try:
            if needs:
                self.check_audit()
            return await method(self, *args, **named)
        except Exception as problem:
            _record(self, name, args, named, problem)
            raise
        finally:
            self.settle_audit()

    return call


def _generator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    needs = name not in EXEMPT

    @functools.wraps(method)
    async def call(self: Recorder, *args: Any, **named: Any) -> AsyncIterator[Any]:
        try:
            if needs:
                self.check_audit()
            async for item in method(self, *args, **named):
                yield item
        except Exception as problem:
            _record(self, name, args, named, problem)
            raise

    return call


def _plain(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """What returns an iterator may refuse before it does."""

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **named: Any) -> Any:
        try:
            return method(self, *args, **named)
        except Exception as problem:
            _record(self, name, args, named, problem)
            raise

    return call


def _record(
    engine: Recorder, name: str, args: tuple[Any, ...], named: dict[str, Any], problem: Exception
) -> None:
    if getattr(problem, "_recorded", False):
        return  # one verb was carried out by way of another
    code = problem.code if isinstance(problem, errors.ClocheError) else "internal_error"
    problem._recorded = True  # type: ignore[attr-defined]
    if code == "port_closed" or (name in _LOOKS and code in _NOTHING_THERE):
        return
    about = named.get("sandbox", args[0] if args else None)
    message = getattr(problem, "message", None) or f"{type(problem).__name__}: {problem}"
    engine.record_refusal(name, about if isinstance(about, str) else None, code, message)
