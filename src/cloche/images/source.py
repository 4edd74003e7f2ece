"""Images on this machine: a reference becomes a root that is unpacked, fitted and held.

A root is found by what a reference meant last (its pin); only a pull asks the registry again. What is not here is made in
a draft, by one maker at a time across engines, and published whole.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cloche import errors, interfaces, model, settings
from cloche.images import cache, fitting, layers, places, references, skopeo, trees, unpacking
from cloche.linux import syscalls

_WAIT_S = 0.05
_GONE = "gone"
Say = Callable[[str], None]


class LocalImages(interfaces.ImageSource):
    def __init__(self, home: str, chosen: settings.Images, environment: Mapping[str, str]) -> None:
        self._home = home
        self._chosen = chosen
        self._environment = environment
        self._cache = cache.Cache(os.path.join(home, "images"))
        self._swept = False

    @property
    def stored(self) -> cache.Cache:
        return self._cache

    @property
    def most_bytes(self) -> int:
        return self._chosen.max_mib << 20

    # ── getting one ─────────────────────────────────────────────────────────────────────────────

    async def resolve(
        self, reference: str, progress: interfaces.Progress | None = None, *, fresh: bool = False
    ) -> interfaces.Image:
        wanted = references.parse(reference)
        if wanted.kind == "host":
            raise references.invalid(reference, "it is this machine itself, which is not unpacked")
        say = _saying(progress)
        if not self._swept:
            self._swept = True
            await asyncio.to_thread(self._cache.sweep)
        if not fresh and (held := await asyncio.to_thread(self._find, wanted)) is not None:
            return held
        async with self.only_maker(wanted.text):
            held = None if fresh else await asyncio.to_thread(self._find, wanted)
            if held is None:
                held = await self._make(wanted, say)
        await asyncio.to_thread(self._cache.collect, self.most_bytes)
        return held

    @asynccontextmanager
    async def only_maker(self, what: str) -> AsyncIterator[None]:
        while True:
            with self._cache.making(what) as ours:
                if ours:
                    yield
                    return
            await asyncio.sleep(_WAIT_S)

    def _find(self, wanted: references.Reference) -> cache.Held | None:
        digest = self._digest_of(wanted)
        return None if digest is None else self._cache.hold(digest, time.time())

    def _digest_of(self, wanted: references.Reference) -> str | None:
        """What a reference means without asking anybody."""
        if wanted.kind == "stored":
            return wanted.digest
        if wanted.kind == "directory":
            return self._directory_digest(places.root_directory(wanted.path, self._home, self._environment))
        pin = self._cache.pinned(wanted.text)
        return pin.digest if pin is not None and pin.stamp == _stamp(wanted) else None

    async def _make(self, wanted: references.Reference, say: Say) -> cache.Held:
        if wanted.kind == "stored":
            raise errors.error(
                "image_not_found", f"no image {wanted.digest} is here",
                hint="`cloche image list` shows what is; pull or build it again",
            )  # fmt: skip
        if wanted.kind == "directory":
            return await asyncio.to_thread(self._copy_directory, wanted, say)
        stamp = _stamp(wanted)
        if stamp == _GONE:
            raise errors.error(
                "image_not_found", f"there is no image at {wanted.path!r}", hint="check the path"
            )
        with self._cache.draft() as draft:
            files = f"{draft.path}/files"
            os.mkdir(files, 0o700)
            fetched = await skopeo.fetch(wanted, files, self._chosen, self._environment, say)
            facts = skopeo.facts_of(fetched.config)
            held = await asyncio.to_thread(self._cache.hold, fetched.digest, time.time())
            if held is None:
                size = await unpacking.unpack(
                    fetched.blobs, draft.root, most_bytes=self.most_bytes, owners=owners(), progress=say
                )
                held = await asyncio.to_thread(
                    self.finish, draft, wanted.text, _kind(wanted), fetched.digest, size, facts
                )
            self._cache.pin(cache.Pin(wanted.text, fetched.digest, time.time(), stamp))
            # The removal of a draft's files takes a while; the loop goes on.
            await asyncio.to_thread(cache.remove_tree, files)
        return held

    def finish(
        self, draft: cache.Draft, reference: str, kind: model.ImageKind, digest: str, size: int, facts: dict[str, Any]
    ) -> cache.Held:  # fmt: skip
        """Fit a root that is complete, publish and hold it."""
        with trees.opened(draft.root) as root:
            fitting.fit(root, owners=owners())
            syscalls.raw("syncfs", root)  # what is published is there after a power cut too
        now = time.time()
        info = model.ImageInfo(
            reference=reference, digest=digest, kind=kind, size_bytes=size, created_at=now, last_used_at=now, **facts
        )  # fmt: skip
        self._cache.publish(draft, info)
        held = self._cache.hold(digest, now)
        if held is None:
            raise errors.error(
                "image_not_found", f"{digest} was removed as soon as it was made", hint="try again"
            )
        return held

    # ── a root directory ────────────────────────────────────────────────────────────────────────

    def _directory_digest(self, path: str) -> str:
        with trees.opened(path) as root:
            return f"sha256:{trees.fingerprint(root)}"

    def _copy_directory(self, wanted: references.Reference, say: Say) -> cache.Held:
        path = places.root_directory(wanted.path, self._home, self._environment)
        say(f"copying {path}")
        limits = layers.Limits(self.most_bytes, unpacking.MOST_FILES)
        with self._cache.draft() as draft, trees.opened(path) as source, trees.opened(draft.root) as target:
            digest = f"sha256:{trees.fingerprint(source)}"
            trees.copy(source, target, limits, owners=owners())
            trees.like(target, os.fstat(source), owners=owners())
            if f"sha256:{trees.fingerprint(source)}" != digest:
                raise errors.error(
                    "image_invalid",
                    f"{path} was changed while it was copied",
                    hint="try again when nobody writes to it",
                )
            return self.finish(draft, wanted.text, "directory", digest, self.most_bytes - limits.bytes, {})

    async def build(
        self,
        recipe: dict[str, Any] | str,
        directory: str,
        runner: interfaces.Runner,
        progress: interfaces.Progress,
    ) -> interfaces.Image:
        from cloche.images import build

        image = await build.Builder(self, runner, progress).build(recipe, directory)
        await asyncio.to_thread(self._cache.collect, self.most_bytes)
        return image

    # ── the rest ────────────────────────────────────────────────────────────────────────────────

    def images(self) -> list[model.ImageInfo]:
        return self._cache.images()

    def find(self, reference: str) -> model.ImageInfo:
        digest = self._digest_of(references.parse(reference))
        info = None if digest is None else self._cache.look(digest)
        if info is None:
            raise errors.error(
                "image_not_found", f"no image {reference!r} is here", hint="`cloche image list` shows what is"
            )
        return info

    def remove(self, reference: str) -> model.ImageInfo:
        info = self.find(reference)
        self._cache.remove(info.digest)
        for name in {references.parse(reference).text, info.reference}:
            self._cache.unpin(name)
        return info

    def collect(self) -> list[model.ImageInfo]:
        self._cache.sweep()
        return self._cache.collect(self.most_bytes)


def _saying(progress: interfaces.Progress | None) -> Say:
    def say(text: str) -> None:
        if progress is not None:
            progress(model.ImageProgress(kind="log", text=text[:1000]))

    return say


def owners() -> bool:
    """Whether files can be given to others: then a root's owners are the image's, else all are the caller's."""
    return os.geteuid() == 0


def _kind(wanted: references.Reference) -> model.ImageKind:
    assert wanted.kind != "host"
    assert wanted.kind != "stored"
    return wanted.kind


def _stamp(wanted: references.Reference) -> str:
    """Whether the file behind a reference is still the one that was read."""
    if not wanted.path:
        return ""
    path = f"{wanted.path}/index.json" if wanted.kind == "layout" else wanted.path
    try:
        found = os.stat(path)
    except OSError:
        return _GONE
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {stat.S_IFMT(found.st_mode)}"
