"""Unpacked images on disk: found by digest, shared by several engines, and dropped when nobody needs them.

    images/roots/<hex>-<fitting>/   root/ (never written again), image.json, lock
    images/pins/<hash>.json         which digest a reference meant when it was last pulled
    images/drafts/<random>/         half-made, with a lock that its maker holds

A root appears by one rename and disappears by one, so nobody sees half of one. Whoever uses a root holds `lock` shared;
whoever removes one must have it alone first, and moves it into a draft of its own before it deletes. A draft whose
lock is free was left by a dead maker.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from cloche import errors, model
from cloche.images import fitting

_LOCK, _RECORD, _ROOT = "lock", "image.json", "root"


class Pin(msgspec.Struct, frozen=True):
    """What a reference meant. `stamp` tells whether a local file behind it is still the same."""

    reference: str
    digest: str
    at: float
    stamp: str = ""


class Draft(NamedTuple):
    path: str
    root: str


class Held:
    """A root that stays while this is held; counted within the process, locked against others."""

    owns = False

    def __init__(self, cache: Cache, name: str, info: model.ImageInfo, root: str) -> None:
        self.info = info
        self.root = root
        self._cache = cache
        self._name = name

    def release(self) -> None:
        """Twice is harmless."""
        if self._name:
            self._cache.let_go(self._name)
            self._name = ""


class Cache:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._locks: dict[str, tuple[int, int]] = {}  # name → its lock's descriptor, how often it is held

    # ── looking ─────────────────────────────────────────────────────────────────────────────────

    def hold(self, digest: str, now: float) -> Held | None:
        """The root of a digest, held; None where it is not here."""
        name = _name(digest)
        if not self._take(name):
            return None
        path = self._root(name)
        os.utime(f"{path}/{_LOCK}", (now, now))
        return Held(self, name, self._info(name), f"{path}/{_ROOT}")

    def look(self, digest: str) -> model.ImageInfo | None:
        """What is here under a digest, without using it."""
        try:
            return self._info(_name(digest))
        except FileNotFoundError:
            return None

    def _take(self, name: str) -> bool:
        if name in self._locks:
            fd, count = self._locks[name]
            self._locks[name] = (fd, count + 1)
            return True
        path = f"{self._root(name)}/{_LOCK}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        fcntl.flock(fd, fcntl.LOCK_SH)  # held alone only for as long as a rename takes
        try:
            same = os.path.samestat(os.stat(path), os.fstat(fd))
        except FileNotFoundError:
            same = False
        if not same:  # it was removed between the opening and the lock
            os.close(fd)
            return False
        self._locks[name] = (fd, 1)
        return True

    def let_go(self, name: str) -> None:
        fd, count = self._locks.pop(name)
        if count > 1:
            self._locks[name] = (fd, count - 1)
        else:
            os.close(fd)

    def images(self) -> list[model.ImageInfo]:
        """What is here, most recently used first."""
        found = []
        for name in self._names():
            with suppress(FileNotFoundError):  # removed meanwhile
                found.append(self._info(name))
        return sorted(found, key=lambda info: -info.last_used_at)

    def _names(self) -> list[str]:
        try:
            names = os.listdir(f"{self.directory}/roots")
        except FileNotFoundError:
            return []
        return [name for name in names if name.endswith("-" + fitting.signature())]

    def _info(self, name: str) -> model.ImageInfo:
        path = self._root(name)
        with open(f"{path}/{_RECORD}", "rb") as file:
            info = msgspec.json.decode(file.read(), type=model.ImageInfo)
        used = os.stat(f"{path}/{_LOCK}").st_mtime
        return msgspec.structs.replace(info, last_used_at=used, in_use=self._in_use(name))

    def _in_use(self, name: str) -> bool:
        if name in self._locks:
            return True
        fd = os.open(f"{self._root(name)}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(fd)

    def _root(self, name: str) -> str:
        return f"{self.directory}/roots/{name}"

    # ── making ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def draft(self) -> Iterator[Draft]:
        """A place to make a root in; what is left of it at the end is removed, also by the next engine."""
        path = f"{self.directory}/drafts/{os.urandom(8).hex()}"
        os.makedirs(path, mode=0o700)
        fd = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        entry = f"{path}/entry"
        try:
            os.makedirs(f"{entry}/{_ROOT}", mode=0o755)
            yield Draft(path, f"{entry}/{_ROOT}")
        finally:
            remove_tree(path)
            os.close(fd)

    def publish(self, draft: Draft, info: model.ImageInfo) -> None:
        """Let a finished root be found. Somebody else may have been first, which is as good."""
        entry = os.path.dirname(draft.root)
        with open(f"{entry}/{_RECORD}", "wb") as file:
            file.write(msgspec.json.encode(msgspec.structs.replace(info, in_use=False)))
            file.flush()
            os.fsync(file.fileno())
        os.close(os.open(f"{entry}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.makedirs(f"{self.directory}/roots", mode=0o700, exist_ok=True)
        target = self._root(_name(info.digest))
        try:
            os.rename(entry, target)
        except OSError:
            if not os.path.isdir(target):
                raise

    @contextmanager
    def making(self, what: str) -> Iterator[bool]:
        """Whether we are the one that makes `what`; who is not asks again. Across engines."""
        os.makedirs(f"{self.directory}/drafts", mode=0o700, exist_ok=True)
        fd = os.open(
            f"{self.directory}/drafts/{_hash(what)}.making", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = True
            except OSError:
                ours = False
            yield ours
        finally:
            os.close(fd)

    # ── pins ────────────────────────────────────────────────────────────────────────────────────

    def pin(self, pin: Pin) -> None:
        os.makedirs(f"{self.directory}/pins", mode=0o700, exist_ok=True)
        path = self._pin_path(pin.reference)
        draft = f"{path}.{os.urandom(4).hex()}"
        with open(draft, "wb") as file:
            file.write(msgspec.json.encode(pin))
        os.rename(draft, path)

    def pinned(self, reference: str) -> Pin | None:
        try:
            with open(self._pin_path(reference), "rb") as file:
                return msgspec.json.decode(file.read(), type=Pin)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def unpin(self, reference: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._pin_path(reference))

    def _pin_path(self, reference: str) -> str:
        return f"{self.directory}/pins/{_hash(reference)}.json"

    # ── removing ────────────────────────────────────────────────────────────────────────────────

    def remove(self, digest: str) -> bool:
        """Remove a root; `image_in_use` while somebody holds it. False if it was not there."""
        name = _name(digest)
        try:
            fd = os.open(f"{self._root(name)}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise errors.error(
                    "image_in_use",
                    f"the image {digest} is in use",
                    hint="delete the sandboxes that were made of it",
                ) from None
            with self.draft() as draft:
                os.rename(self._root(name), f"{draft.path}/removed")
        except FileNotFoundError:
            return False  # somebody else was first
        finally:
            os.close(fd)
        return True

    def collect(self, most_bytes: int) -> list[model.ImageInfo]:
        """Bring the cache below its limit: the least recently used go first, what is in use stays. What went."""
        images = self.images()
        total = sum(info.size_bytes for info in images)
        gone = []
        for info in reversed(images):
            if total <= most_bytes:
                break
            if info.in_use:
                continue
            with suppress(errors.Conflict):
                if self.remove(info.digest):
                    gone.append(info)
                    total -= info.size_bytes
        return gone

    def sweep(self) -> int:
        """Remove what dead makers left, and roots that an older version fitted; how many."""
        swept = 0
        drafts = f"{self.directory}/drafts"
        for name in os.listdir(drafts) if os.path.isdir(drafts) else []:
            swept += self._sweep_one(f"{drafts}/{name}")
        roots = f"{self.directory}/roots"
        for name in os.listdir(roots) if os.path.isdir(roots) else []:
            if not name.endswith("-" + fitting.signature()):
                swept += self._sweep_one(f"{roots}/{name}")
        return swept

    def _sweep_one(self, path: str) -> int:
        lock = path if path.endswith(".making") else f"{path}/{_LOCK}"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1  # its maker died, or is, between making the directory and its lock
            if _young(path):
                return 0
        except NotADirectoryError:
            return 0
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.isdir(path):
                remove_tree(path)
                return 1
            os.unlink(path)
            return 0
        except OSError:
            return 0
        finally:
            if fd >= 0:
                os.close(fd)


def remove_tree(path: str) -> None:
    """Whatever it is: directories that may not be read are opened up first."""

    def open_up(function: object, place: str, _problem: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(place), 0o700)
            if stat.S_ISDIR(os.lstat(place).st_mode):
                os.chmod(place, 0o700)
                shutil.rmtree(place)
            else:
                os.unlink(place)

    shutil.rmtree(path, onerror=open_up)
    shutil.rmtree(path, ignore_errors=True)


def _young(path: str) -> bool:
    import time

    try:
        return time.time() - os.stat(path).st_mtime < 60
    except OSError:
        return True


def _name(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')}-{fitting.signature()}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
