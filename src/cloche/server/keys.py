"""API keys: named, hashed, with roles and scopes, an end, and a tenant.

A key is `cl_` and 40 hex digits; `e2b_` and the same digits is the same key, because E2B's clients insist on their prefix. Only
the SHA-256 of the digits is kept: they are random, so there is nothing to guess and nothing to stretch. The file is
`$CLOCHE_HOME/keys/api.json`, written by renaming, read again when it changes; a lock orders writers.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from cloche import errors, model

ROLES: dict[str, tuple[str, ...]] = {
    "admin": ("*",),
    "developer": (
        "sandboxes", "exec", "files", "ports", "pools", "snapshots", "volumes", "policies", "images", "events",
    ),
    "runner": ("sandboxes", "exec", "files", "ports"),
    "viewer": ("events", "metrics"),
}  # fmt: skip
_KEY = re.compile(r"(?:cl|e2b)_([0-9a-f]{40})")


class Key(model.Noun, frozen=True, kw_only=True):
    """What is kept of a key, and shown; never the key."""

    name: str
    hash: str
    scopes: tuple[str, ...]
    tenant: str = ""
    created_at: float
    expires_at: float | None = None
    prefix: str = ""
    """The first characters, to recognise it by."""


class Keys:
    """The keys of one state directory."""

    def __init__(self, home: str, now: Callable[[], float] = time.time) -> None:
        self._directory = os.path.join(home, "keys")
        self._path = os.path.join(self._directory, "api.json")
        self._now = now
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, Key] = {}
        self._extra: dict[str, Key] = {}

    def create(
        self, name: str, scopes: tuple[str, ...], *, tenant: str = "", lifetime_s: float | None = None
    ) -> str:
        """A new key, which is seen here and never again."""
        model.check_name(name)
        model.check_seconds("lifetime_s", lifetime_s)
        digits = secrets.token_hex(20)
        now = self._now()
        made = Key(
            name=name,
            hash=_hash(digits),
            scopes=scopes,
            tenant=tenant,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            prefix=f"cl_{digits[:6]}",
        )
        with self._change() as keys:
            if any(key.name == name for key in keys.values()):
                raise errors.error(
                    "name_conflict",
                    f"there is a key {name!r} already",
                    hint="revoke it, or choose another name",
                )
            keys[made.hash] = made
        return f"cl_{digits}"

    def revoke(self, name: str) -> None:
        with self._change() as keys:
            found = [hash_ for hash_, key in keys.items() if key.name == name]
            if not found:
                raise errors.error(
                    "key_not_found", f"there is no key {name!r}", hint="`cloche key list` shows what is there"
                )
            del keys[found[0]]

    def list(self) -> list[Key]:
        self._refresh()
        return sorted(self._keys.values(), key=lambda key: key.created_at)

    def accept(self, secret: str, *, name: str = "environment") -> None:
        """Take a key that is kept elsewhere (CLOCHE_API_KEY) for this process's life."""
        matched = _KEY.fullmatch(secret)
        hash_ = _hash(matched.group(1) if matched else secret)
        self._extra[hash_] = Key(name=name, hash=hash_, scopes=("*",), created_at=self._now())

    def check(self, secret: str) -> Key:
        """The key that `secret` is, or `key_refused`. The words are the same for every reason but expiry."""
        self._refresh()
        matched = _KEY.fullmatch(secret)
        wanted = _hash(matched.group(1) if matched else secret)
        found: Key | None = None
        for hash_, key in (*self._keys.items(), *self._extra.items()):
            if hmac.compare_digest(hash_, wanted):  # all of them, so that time tells nothing
                found = key
        return self._valid(found)

    def named(self, name: str) -> Key:
        """The key of a name, under the same conditions."""
        self._refresh()
        every = (*self._keys.values(), *self._extra.values())
        return self._valid(next((key for key in every if key.name == name), None))

    def _valid(self, found: Key | None) -> Key:
        if found is None:
            raise errors.error(
                "key_refused", "the API key is not known here", hint="`cloche key create` makes one"
            )
        if found.expires_at is not None and found.expires_at <= self._now():
            raise errors.error(
                "key_refused", f"the API key {found.name!r} has expired", hint="make a new one"
            )
        return found

    def _refresh(self) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._keys, self._seen = {}, None
            return
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp != self._seen:
            with open(self._path, "rb") as file:
                self._keys = {key.hash: key for key in _decode(file.read(), self._path)}
            self._seen = stamp

    @contextmanager
    def _change(self) -> Iterator[dict[str, Key]]:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with open(os.path.join(self._directory, "api.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._seen = None
            self._refresh()
            keys = dict(self._keys)
            yield keys
            draft = f"{self._path}.{os.getpid()}"
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(list(keys.values())))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._path)


def scopes_of(roles: tuple[str, ...], scopes: tuple[str, ...]) -> tuple[str, ...]:
    """What roles and scopes amount to; an unknown role is an error that names it."""
    every: list[str] = list(scopes)
    for role in roles:
        if role not in ROLES:
            raise errors.error(
                "argument_invalid", f"there is no role {role!r}", hint=errors.nearest(role, ROLES)
            )
        every += ROLES[role]
    return tuple(dict.fromkeys(every))


def _hash(digits: str) -> str:
    return hashlib.sha256(digits.encode("utf-8", "surrogateescape")).hexdigest()


def _decode(data: bytes, path: str) -> list[Key]:
    try:
        return msgspec.json.decode(data, type=list[Key])
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise errors.error(
            "state_corrupt",
            f"{path} cannot be read: {problem}",
            hint="restore it, or remove it and make new keys",
        ) from None
