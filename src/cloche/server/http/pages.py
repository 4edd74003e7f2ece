"""Pages of lists. A cursor names a place in the order, not a number of rows: what is created or deleted between two pages is on the
next one or is not, and nothing else is missed or told twice. To callers it is opaque."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from cloche import errors

T = TypeVar("T")
Limit = Annotated[int, msgspec.Meta(ge=1, le=1000, description="How many at most.")]
Cursor = Annotated[
    str, msgspec.Meta(pattern="^[A-Za-z0-9_-]+$", description="`next_cursor` of the page before; opaque.")
]
Key = tuple[float | str, ...]


def page(
    items: Iterable[T], key: Callable[[T], Key], limit: int, cursor: str | None
) -> tuple[tuple[T, ...], str | None]:
    """So many of the items after the cursor, in the order of their keys, and where the next page begins."""
    rows = sorted(((key(item), item) for item in items), key=lambda row: row[0])
    if cursor is not None:
        shape = rows[0][0] if rows else None
        place = opened(cursor, shape)
        rows = [row for row in rows if row[0] > place]
    chosen = rows[:limit]
    more = made(chosen[-1][0]) if len(rows) > limit else None
    return tuple(item for _, item in chosen), more


def made(place: Key) -> str:
    return urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def opened(cursor: str, shape: Key | None) -> Key:
    """The place that a cursor names; one that is not of this list is refused."""
    try:
        raw = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        place = msgspec.json.decode(raw, type=tuple[float | str, ...])
    except (ValueError, binascii.Error, RecursionError):
        raise _not_ours(cursor) from None
    if shape is not None and [_kind(part) for part in place] != [_kind(part) for part in shape]:
        raise _not_ours(cursor)
    return place


def _kind(part: Any) -> str:
    return "text" if isinstance(part, str) else "number"


def _not_ours(cursor: str) -> errors.ClocheError:
    return errors.error(
        "argument_invalid",
        f"{cursor[:50]!r} is not a cursor of this list",
        hint="use next_cursor of the page before, as it is",
        field="cursor",
    )
