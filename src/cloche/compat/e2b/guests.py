"""Who acts inside, and what a path means to them: E2B's default user is `user`, and relative paths begin at its home."""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import Any

from starlette.datastructures import Headers

from cloche.compat.e2b import faults

HOME = "/home/user"
_USERS = ("user", "root")


def user_of(headers: Headers, named: str | None = None) -> str:
    """The user that a call names: by the query, or as the name of Basic authorization; else the default one."""
    if not named:
        scheme, _, encoded = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                named = base64.b64decode(encoded, validate=True).decode().partition(":")[0]
            except (binascii.Error, UnicodeDecodeError):
                raise faults.Fault(401, "the Authorization field is not Basic") from None
    if not named:
        return "user"
    if named not in _USERS:
        raise faults.Fault(
            401, f"invalid username: there is no user {named[:50]!r} inside", name="user_not_found"
        )
    return named


def path_of(given: Any) -> str:
    """An absolute path without `.` and `..`, as envd reads paths: by their spelling."""
    if not isinstance(given, str) or not given:
        return HOME
    if given == "~" or given.startswith("~/"):
        given = HOME + given[1:]
    return "/" + posixpath.normpath(posixpath.join(HOME, given)).lstrip("/")
