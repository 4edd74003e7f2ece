"""`interfaces.Backend` as messages: one table, made from the interface, read by both ends.

A method's parameters become a struct and its return type a decoder, so that a new method of the interface is on the wire
the moment it is declared, and both sides check types by the same declaration.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, NamedTuple

import msgspec

from cloche import errors, framing, interfaces, model, settings

LOCAL_ONLY = ("aclose",)


class Method(NamedTuple):
    name: str
    parameters: type[msgspec.Struct]
    result: Any
    streams: bool
    opens: bool = False
    """Whether it answers with a tunnel, which travels as frames of its own (framing.py)."""


@cache
def methods() -> dict[str, Method]:
    return {
        name: _describe(name, function)
        for name, function in inspect.getmembers(interfaces.Backend, inspect.isfunction)
        if not name.startswith("_") and name not in LOCAL_ONLY
    }


def _describe(name: str, function: Any) -> Method:
    from cloche import stock  # named by methods that a one-shot command does not call
    from cloche.policy import explaining  # noqa: F401 - likewise; as an attribute of `policy`

    hints = typing.get_type_hints(function, {**vars(interfaces), "stock": stock})
    result = hints.pop("return")
    streams = typing.get_origin(result) is AsyncIterator
    fields: list[Any] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        kind = hints[parameter.name]
        default = parameter.default
        fields.append(
            (parameter.name, kind) if default is inspect.Parameter.empty else (parameter.name, kind, default)
        )
    struct = msgspec.defstruct(f"{name}_arguments", fields, forbid_unknown_fields=True)
    opens = result is interfaces.Tunnel
    return Method(name, struct, typing.get_args(result)[0] if streams else result, streams, opens)


class Credit:
    """How much one side of a tunnel may still send before the other says what it has passed on."""

    def __init__(self) -> None:
        self._left = framing.WINDOW
        self._more = asyncio.Event()
        self._ended = False

    def give(self, count: int) -> None:
        self._left = min(framing.WINDOW, self._left + count)
        self._more.set()

    def spend(self, count: int) -> None:
        self._left -= count

    async def some(self, most: int) -> int:
        """How much may be sent now, at most so much; waits until it is something. Nothing: it has ended."""
        while self._left <= 0 and not self._ended:
            self._more.clear()
            await self._more.wait()
        return 0 if self._ended else min(most, self._left)

    def end(self) -> None:
        self._ended = True
        self._more.set()


class Call(msgspec.Struct):
    method: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    protocol: int = 0
    version: str = ""
    """The client's; empty for one that works with any of the protocol."""


class RunArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`run`: create, execute attached, delete; or attach to what exists."""

    spec: dict[str, Any] | None = None
    """The fields that were said; the others are the settings' (see `complete`)."""
    request: model.ExecRequest | None = None
    sandbox: str | None = None
    execution: str | None = None
    after: int = 0
    keep: bool = False
    capture: bool = False
    """Hand back what the command writes in the result, instead of as it is written."""


def complete(said: dict[str, Any], defaults: settings.Defaults) -> model.SandboxSpec:
    """A spec from the fields that were said. The thin client reads no settings, so its server fills them in."""
    resources = {**msgspec.to_builtins(defaults.resources), **said.get("resources", {})}
    if said.get("mode") is not None and said.get("profile") is not None:
        raise errors.error(
            "policy_invalid",
            f"the profile {said['profile']!r} and the mode {said['mode']!r} are both given; either is the lowest layer",
            hint="leave one out; [agents.NAME] of your policy file may name a profile",
        )
    base = {
        "profile": defaults.profile, "template": defaults.template, "minimum_isolation": defaults.minimum_isolation,
        "timeout_s": defaults.timeout_s, "idle_timeout_s": defaults.idle_timeout_s,
    }  # fmt: skip
    if (
        said.get("snapshot") or said.get("template", defaults.template) != "base"
    ):  # which says nothing of its own
        said = {**said, "inherit": [*_unsaid(said), *said.get("inherit", ())]}
    if said.get("mode") is not None:
        del base["profile"]
    try:
        return msgspec.convert({**base, **said, "resources": resources}, model.SandboxSpec)
    except msgspec.ValidationError as problem:
        raise _invalid(problem) from None


def _unsaid(said: dict[str, Any]) -> list[str]:
    """What the maker of a sandbox leaves to what it starts from."""
    kept = (
        "name",
        "snapshot",
        "stay",
        "inherit",
        "workspace",
        "overlay",
        "path",
        "env",
        "labels",
        "resources",
    )
    fields = [
        field for field in model.SandboxSpec.__struct_fields__ if field not in kept and field not in said
    ]
    limits = model.Resources.__struct_fields__
    return [*fields, *(f"resources.{name}" for name in limits if name not in said.get("resources", {}))]


def encode(message: Any) -> bytes:
    try:
        return msgspec.json.encode(message)
    except (
        UnicodeEncodeError
    ):  # a name that is not UTF-8 rides as lone surrogates, which only the standard writer takes
        return json.dumps(msgspec.to_builtins(message)).encode()


def decode_call(body: bytes) -> Call:
    call: Call = _decode(body, Call)
    return call


def decode_arguments(raw: msgspec.Raw, struct: type[msgspec.Struct]) -> Any:
    return _decode(bytes(raw), struct)


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as problem:
        raise _invalid(problem) from None
    except msgspec.DecodeError as problem:
        if b"\\udc" not in body:
            raise errors.error("argument_invalid", f"the request is not JSON: {problem}") from None
    return _decode_surrogates(body, kind)


def _decode_surrogates(body: bytes, kind: Any) -> Any:
    """Arguments and paths that are not UTF-8 come as lone surrogates, which only the standard parser takes."""
    try:
        plain = json.loads(body)
        if kind is Call:  # the arguments are decoded later, from their own bytes
            plain["arguments"] = msgspec.Raw(json.dumps(plain.get("arguments", {})).encode())
            return Call(**{name: plain[name] for name in Call.__struct_fields__ if name in plain})
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as problem:
        raise _invalid(problem) from None
    except (ValueError, TypeError, AttributeError) as problem:
        raise errors.error("argument_invalid", f"the request is not JSON: {problem}") from None


def _invalid(problem: msgspec.ValidationError) -> errors.ClocheError:
    code = "field_unknown" if "unknown field" in str(problem) else "argument_invalid"
    return errors.error(code, f"the request is not valid: {problem}")
