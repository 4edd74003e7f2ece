"""What a behaviour is, how one is declared, and how its check says no.

A behaviour is an async function whose name is a sentence and whose docstring says it once more for people. It gets a
`bench.Bench`, makes what it needs and returns; whatever it raises is a failure.

    @behaviour("exec")
    async def exit_code_42_is_reported(bench: Bench) -> None:
        \"\"\"A command that ends with 42 has exit code 42.\"\"\"
        same((await (await bench.box()).exec("exit 42")).exit_code, 42)

Checks are functions, not `assert`: the suite is shipped, and must judge under `python -O` too.

Every behaviour is also run against drivers without any glass, as root. So none may do harm outside of one: it never
signals what it did not start, its hogs and bombs stop by themselves, and what it touches on the host has a name of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cloche import errors

if TYPE_CHECKING:
    from cloche.testing.conformance.bench import Bench

Check = Callable[["Bench"], Awaitable[None]]


class Behaviour(NamedTuple):
    name: str
    group: str
    sentence: str
    check: Check


class Broken(AssertionError):
    """The driver does not behave as the behaviour says."""


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(group: str) -> Callable[[Check], Check]:
    """Declare a behaviour of a group."""

    def declare(check: Check) -> Check:
        name = getattr(check, "__name__", "")
        if name in BEHAVIOURS:
            raise ValueError(f"there are two behaviours {name!r}")
        BEHAVIOURS[name] = Behaviour(name, group, (check.__doc__ or "").strip(), check)
        return check

    return declare


# ── how a check says no ────────────────────────────────────────────────────────────────────────────


def expect(held: object, otherwise: str) -> None:
    if not held:
        raise Broken(otherwise)


def same(found: object, wanted: object, what: str = "") -> None:
    if found != wanted:
        raise Broken(f"{what + ': ' if what else ''}{_short(found)} instead of {_short(wanted)}")


def holds(text: str | bytes, part: str | bytes) -> None:
    if part not in text:  # type: ignore[operator]
        raise Broken(f"{_short(part)} is not in {_short(text)}")


def lacks(text: str | bytes, part: str | bytes, why: str) -> None:
    if part in text:  # type: ignore[operator]
        raise Broken(f"{why}: {_short(part)} is in {_short(text)}")


@contextmanager
def refused(*codes: str) -> Iterator[None]:
    """What is done here must fail, with one of these codes."""
    try:
        yield
    except errors.ClocheError as problem:
        if problem.code not in codes:
            raise Broken(
                f"it was refused as {problem.code}, not as {' or '.join(codes)}: {problem.message}"
            ) from problem
        return
    raise Broken(f"it was not refused as {' or '.join(codes)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]} … {text[-140:]}"
