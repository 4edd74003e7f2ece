"""The encrypted file, its key, and how both change.

    $CLOCHE_HOME/secrets.json        {"version":1,"key":"<id>","secrets":[{"about":"<JSON>","nonce":"…","sealed":"…"}]}
    $CLOCHE_HOME/keys/secrets.key    64 hexadecimal digits; or the file that settings name, or CLOCHE_SECRETS_KEY

AES-256-GCM, a nonce per value. `about` (name, hosts, place, times) is readable, and authenticated with the value byte by byte:
who can write the file but has no key can neither read a value nor lead it to a host of his choice.

Invariants:
* Files are 0600 and ours; others' files are refused, not read (`secrets_locked`).
* The file is replaced whole, under a lock, and flushed before it has its name: a reader sees the old one or the new one.
* A key is never made where there are values that another key has sealed.
* Turning the key: the new key is stored beside the old one, then the file, then the new key takes its place. Whoever finds it
  half done finishes it, because the file says which key it needs.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from cloche import errors, model

T = TypeVar("T")
_MOST_BYTES = 64 * 1024 * 1024
_CONTEXT = b"cloche secret 1\0"


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    nonce: bytes
    sealed: bytes


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    key: str
    secrets: list[_Sealed]


class Entry(NamedTuple):
    info: model.SecretInfo
    sealed: _Sealed

    def __repr__(self) -> str:
        return f"Entry({self.info.name!r})"


class Vault:
    def __init__(self, home: str, *, key_file: str | None, key: str | None) -> None:
        self._home = home
        self._path = os.path.join(home, "secrets.json")
        self._key_path = key_file or os.path.join(home, "keys", "secrets.key")
        self._own_key = key_file is None
        self._given_key = key

    def __repr__(self) -> str:
        return f"Vault({self._path!r})"

    def read(self) -> list[Entry]:
        """What is stored; needs no key."""
        file = self._read()
        return [] if file is None else [_entry(sealed) for sealed in file.secrets]

    @contextmanager
    def changing(self) -> Iterator[list[Entry]]:
        """The entries, to be changed in place; written when the block ends well."""
        with self._locked():
            file = self._read()
            entries = [] if file is None else [_entry(sealed) for sealed in file.secrets]
            key = self._key(file)
            yield entries
            self._write(_File(1, _id(key), [entry.sealed for entry in entries]))

    def seal(self, info: model.SecretInfo, value: bytes) -> Entry:
        """Within `changing`."""
        return _seal(self._key(self._read()), info, value)

    def open(self, entry: Entry) -> bytes:
        return _open(self._key(self._read()), entry)

    def rotate(self) -> int:
        """Seal everything with a new key; how many values that were."""
        if self._given_key is not None:
            raise errors.error(
                "secret_invalid", "the key comes from CLOCHE_SECRETS_KEY, so it cannot be replaced here",
                hint="unset it to use a key file, or set the secrets anew under another key",
            )  # fmt: skip
        with self._locked():
            file = self._read()
            old = self._key(file)
            new = os.urandom(32)
            entries = [_entry(sealed) for sealed in file.secrets] if file is not None else []
            anew = [_seal(new, entry.info, _open(old, entry)).sealed for entry in entries]
            _replace(self._key_path + ".new", new.hex().encode() + b"\n")
            self._write(_File(1, _id(new), anew))
            os.replace(self._key_path + ".new", self._key_path)
            _flush_directory(os.path.dirname(self._key_path))
        return len(anew)

    # ── the key ─────────────────────────────────────────────────────────────────────────────────

    def _key(self, file: _File | None) -> bytes:
        """The key that the file needs; a new one if there is neither."""
        if self._given_key is not None:
            key = _parse_key(self._given_key, "CLOCHE_SECRETS_KEY")
        else:
            key = self._stored_key(file)
        if file is not None and file.secrets and file.key != _id(key):
            raise errors.error(
                "secrets_locked", f"the secrets in {self._path} were sealed with another key than the one that is here",
                hint="give the key they were stored with, or remove the file and set them anew",
            )  # fmt: skip
        return key

    def _stored_key(self, file: _File | None) -> bytes:
        wanted = file.key if file is not None and file.secrets else None
        for path in (self._key_path, self._key_path + ".new"):
            text = _read_private(path)
            if text is None:
                continue
            key = _parse_key(text.decode("ascii", "replace"), path)
            if wanted in (None, _id(key)):
                if path != self._key_path and wanted is not None:
                    os.replace(path, self._key_path)  # somebody was interrupted while turning the key
                return key
            if path == self._key_path and not os.path.exists(path + ".new"):
                return key  # the wrong one; `_key` says so
        if wanted is not None or not self._own_key:
            raise errors.error(
                "secrets_locked", f"the key {self._key_path} is not there",
                hint="put it back; without it the stored values cannot be read by anybody",
            )  # fmt: skip
        return self._make_key()

    def _make_key(self) -> bytes:
        os.makedirs(os.path.dirname(self._key_path), mode=0o700, exist_ok=True)
        key = os.urandom(32)
        _replace(self._key_path, key.hex().encode() + b"\n")
        return key

    # ── the file ────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(os.path.join(self._home, "secrets.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _read(self) -> _File | None:
        data = _read_private(self._path)
        if data is None:
            return None
        try:
            file = msgspec.json.decode(data, type=_File)
        except msgspec.MsgspecError as problem:
            raise _corrupt(self._path, str(problem)) from None
        if file.version != 1:
            raise _corrupt(self._path, f"it is of version {file.version}; this Cloche reads version 1")
        return file

    def _write(self, file: _File) -> None:
        _replace(self._path, msgspec.json.encode(file))


def _entry(sealed: _Sealed) -> Entry:
    try:
        return Entry(msgspec.json.decode(sealed.about, type=model.SecretInfo), sealed)
    except msgspec.MsgspecError as problem:
        raise _corrupt("secrets.json", str(problem)) from None


def _seal(key: bytes, info: model.SecretInfo, value: bytes) -> Entry:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    about = msgspec.json.encode(info).decode()
    nonce = os.urandom(12)
    return Entry(info, _Sealed(about, nonce, AESGCM(key).encrypt(nonce, value, _CONTEXT + about.encode())))


def _open(key: bytes, entry: Entry) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    sealed = entry.sealed
    try:
        return AESGCM(key).decrypt(sealed.nonce, sealed.sealed, _CONTEXT + sealed.about.encode())
    except (InvalidTag, ValueError):
        raise _corrupt(
            "secrets.json", f"the secret {entry.info.name!r} was changed by somebody without the key"
        ) from None


def _id(key: bytes) -> str:
    """What tells keys apart without telling anything about them."""
    return hashlib.sha256(b"cloche secrets key id\0" + key).hexdigest()[:16]


def _parse_key(text: str, where: str) -> bytes:
    text = text.strip()
    try:
        if len(text) == 64:
            return bytes.fromhex(text)
        key = base64.b64decode(text, validate=True)
        if len(key) == 32:
            return key
    except (ValueError, binascii.Error):
        pass
    raise errors.error(
        "secrets_locked", f"{where} holds no key: 64 hexadecimal digits, or 32 bytes in base64",
        hint="make one with `openssl rand -hex 32`",
    )  # fmt: skip


def _corrupt(path: str, why: str) -> errors.ClocheError:
    return errors.error(
        "secrets_corrupt", f"{path} cannot be used: {why}", hint="remove it and set the secrets anew"
    )


def _read_private(path: str) -> bytes | None:
    """A file that only we can read; None if it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _unsafe(path, f"cannot be read: {problem.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _unsafe(path, "is not a regular file")
        if found.st_uid not in (os.geteuid(), 0):
            raise _unsafe(path, f"belongs to uid {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & 0o077:
            raise _unsafe(path, f"may be read by others (mode {stat.S_IMODE(found.st_mode):o})")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES)
    finally:
        os.close(fd)


def _unsafe(path: str, why: str) -> errors.ClocheError:
    return errors.error("secrets_locked", f"{path} {why}", hint=f"chmod 600 {path}, and look who changed it")


def _replace(path: str, data: bytes) -> None:
    """Give `path` this content, whole or not at all, for our eyes only."""
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    _flush_directory(os.path.dirname(path))


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
