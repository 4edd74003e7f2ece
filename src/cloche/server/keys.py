"""API keys: named, hashed, with roles and scopes, an end, and a tenant.

A key is `cl_` and 40 hex digits; `e2b_` and the same digits is the same key, because E2B's clients insist on their prefix. Only
the SHA-256 of the digits is kept: they are random, so there is nothing to guess and nothing to stretch. The file is
`$CLOCHE_HOME/keys/api.json`, written by renaming, read again when it changes; a lock orders writers.

*Rotation* gives a name another secret; the one before is good for the overlap that was asked for, so that those who hold it can be told.
What the name stands for (tenant, scopes, end) stays. *Last use* is the time of an empty file per key, touched once a minute at most: it says
"lately" or "never", which is what one asks before revoking, and costs no write that anybody waits for.
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
from contextlib import contextmanager, suppress

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
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_USED_EVERY_S = 60.0


class Former(model.Noun, frozen=True, kw_only=True):
    """A secret that was rotated away, and is good until then."""

    hash: str
    until: float


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
    rotated_at: float | None = None
    former: tuple[Former, ...] = ()


def new_secret() -> str:
    return f"cl_{secrets.token_hex(20)}"


class Keys:
    """The keys of one state directory."""

    def __init__(self, home: str, now: Callable[[], float] = time.time) -> None:
        self._directory = os.path.join(home, "keys")
        self._path = os.path.join(self._directory, "api.json")
        self._now = now
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, Key] = {}
        self._extra: dict[str, Key] = {}
        self._used: dict[str, float] = {}

    def create(
        self, name: str, scopes: tuple[str, ...], *, tenant: str = "", lifetime_s: float | None = None
    ) -> str:
        """A new key, which is seen here and never again."""
        model.check_name(name)
        model.check_seconds("lifetime_s", lifetime_s)
        if tenant:
            check_tenant(tenant)
        digits = secrets.token_hex(20)
        now = self._now()
        made = Key(
            name=name,
            hash=_hash(digits),
            scopes=scopes,
            tenant=tenant,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            prefix=_prefix(digits),
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

    def rotate(self, name: str, *, overlap_s: float = 0) -> str:
        """Another secret for the same name, seen here and never again; the one before is good for `overlap_s` more."""
        if not 0 <= overlap_s < 1e9:
            raise errors.error(
                "limit_invalid",
                f"the overlap is {overlap_s:g} seconds; it must be 0 or more",
                field="overlap_s",
            )
        digits = secrets.token_hex(20)
        now = self._now()
        with self._change() as keys:
            before = keys.pop(_find(keys, name))
            kept = [former for former in before.former if former.until > now]
            if overlap_s:
                kept.append(Former(hash=before.hash, until=now + overlap_s))
            made = msgspec.structs.replace(
                before, hash=_hash(digits), prefix=_prefix(digits), rotated_at=now, former=tuple(kept)
            )
            keys[made.hash] = made
        return f"cl_{digits}"

    def revoke(self, name: str) -> None:
        with self._change() as keys:
            del keys[_find(keys, name)]
        with suppress(FileNotFoundError):
            os.unlink(self._mark(name))

    def secret_file(self, name: str) -> str:
        """Where a server keeps the secret of the key that it made for its owner."""
        return os.path.join(self._directory, f"{name}.key")

    def keep_secret(self, name: str, secret: str, *, make: bool = False) -> None:
        """Put it into that file; unless told to `make` one, only if there is one."""
        path = self.secret_file(name)
        if make or os.path.exists(path):
            _replace(path, secret.encode() + b"\n")

    def list(self) -> list[Key]:
        self._refresh()
        return sorted(self._keys.values(), key=lambda key: key.created_at)

    def accept(self, secret: str, *, name: str = "environment") -> None:
        """Take a key that is kept elsewhere (CLOCHE_API_KEY) for this process's life."""
        matched = _KEY.fullmatch(secret)
        hash_ = _hash(matched.group(1) if matched else secret)
        self._extra[hash_] = Key(name=name, hash=hash_, scopes=("*",), created_at=0)

    def check(self, secret: str) -> Key:
        """The key that `secret` is, or `key_refused`. The words are the same for every reason but expiry."""
        self._refresh()
        matched = _KEY.fullmatch(secret)
        wanted = _hash(matched.group(1) if matched else secret)
        found: Key | None = None
        for hash_, key in (*self._keys.items(), *self._extra.items()):
            if hmac.compare_digest(hash_, wanted):  # all of them, so that time tells nothing
                found = key
            for former in key.former:
                if hmac.compare_digest(former.hash, wanted) and former.until > self._now():
                    found = key
        valid = self._valid(found)
        self._note_use(valid.name)
        return valid

    def named(self, name: str) -> Key:
        """The key of a name, under the same conditions."""
        self._refresh()
        every = (*self._keys.values(), *self._extra.values())
        return self._valid(next((key for key in every if key.name == name), None))

    def last_used(self, name: str) -> float | None:
        """When a server last let it in, within a minute; None for never."""
        try:
            return os.stat(self._mark(name)).st_mtime
        except OSError:
            return None

    def _note_use(self, name: str) -> None:
        now = self._now()
        if now - self._used.get(name, -_USED_EVERY_S) < _USED_EVERY_S:
            return
        self._used[name] = now
        mark = self._mark(name)
        with suppress(OSError):  # a full disk must not keep anybody out
            os.makedirs(os.path.dirname(mark), mode=0o700, exist_ok=True)
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.utime(mark, (now, now))

    def _mark(self, name: str) -> str:
        return os.path.join(self._directory, "used", name)

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
            _replace(self._path, msgspec.json.encode(list(keys.values())))


class SigningKey:
    """A secret of the server's own, `$CLOCHE_HOME/keys/NAME.key`: made at the first use, read again when it changes. Without it nothing that it
    signed is good."""

    def __init__(self, home: str, name: str) -> None:
        self._path = os.path.join(home, "keys", f"{name}.key")
        self._seen: tuple[int, int, int] | None = None
        self._key: bytes | None = None

    def read(self) -> bytes | None:
        try:
            found = os.stat(self._path)
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp != self._seen:
                with open(self._path, "rb") as file:
                    self._key = bytes.fromhex(file.read(1024).decode().strip())
                self._seen = stamp
        except FileNotFoundError:
            self._key, self._seen = None, None
        except ValueError:
            raise errors.error(
                "state_corrupt", f"{self._path} is not a key", hint="remove it; what it signed ends by that"
            ) from None
        return self._key if self._key and len(self._key) >= 32 else None

    def make(self) -> bytes:
        """The key, which is made if there is none."""
        found = self.read()
        if found is None:
            directory = os.path.dirname(self._path)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with open(os.path.join(directory, "api.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.read()
                if found is None:
                    _replace(self._path, secrets.token_hex(32).encode() + b"\n")
                    found = self.read()
        assert found is not None
        return found


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


def check_tenant(tenant: str) -> None:
    if not TENANT.fullmatch(tenant):
        raise errors.error(
            "name_invalid",
            f"the tenant {tenant[:100]!r} is not 1 to 63 of A-Z, a-z, 0-9, '.', '_' and '-', beginning with a letter or digit",
        )


def _replace(path: str, data: bytes) -> None:
    draft = f"{path}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _find(known: dict[str, Key], name: str) -> str:
    """Under which hash a name is kept."""
    for hash_, key in known.items():
        if key.name == name:
            return hash_
    raise errors.error(
        "key_not_found", f"there is no key {name!r}", hint="`cloche key list` shows what is there"
    )


def _prefix(digits: str) -> str:
    return f"cl_{digits[:6]}"


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
