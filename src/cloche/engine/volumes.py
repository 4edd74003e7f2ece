"""Volumes: named directories that outlive sandboxes. Several sandboxes read one, or one writes it.

    $CLOCHE_HOME/volumes/<name>                 what a driver made (`Driver.make_volume`); the store has a row for it
    $CLOCHE_HOME/volumes/<name>.<pid>.<start>   one that its maker, that process, has not finished

A volume is attached after a sandbox was made and before it is anybody's, at its creation as at a claim: by the same step, so
late binding costs nothing extra. It is detached by the sandbox's end, and by nothing else. Who has it is held by the driver
for all engines of the host; here stands only what this engine's sandboxes have, to say so.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import msgspec

from cloche import crash, errors, interfaces, model, stock
from cloche.engine import sandboxes, trees

_PATIENCE_S = 2.0
"""How long the kernel may take to let go of a volume whose sandbox has ended."""
_MAKER = "maker"
_FORBIDDEN = ("/", "/proc", "/dev", "/sys")


class Volumes:
    def __init__(
        self, home: str, store: interfaces.Store, clock: interfaces.Clock, owner: str,
        owner_lives: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._directory = os.path.join(home, "volumes")
        self._store = store
        self._clock = clock
        self._owner = owner
        self._owner_lives = owner_lives
        self._attached: dict[str, dict[str, bool]] = {}

    def place(self, name: str) -> str:
        return os.path.join(self._directory, name)

    # ── the nouns ───────────────────────────────────────────────────────────────────────────────

    async def create(self, spec: stock.VolumeSpec, driver: interfaces.Driver) -> stock.VolumeInfo:
        spec.check()
        for info in await self._rows():
            if info.spec == spec:
                return await self._now(info, driver)
            if info.spec.name == spec.name:
                raise _taken(spec.name)
        draft = self.place(f"{spec.name}.{self._owner.replace(':', '.')}")
        try:
            await asyncio.to_thread(self._make_draft, draft)
            limit = await driver.make_volume(draft, spec.size_mib)
            info = stock.VolumeInfo(spec=spec, created_at=self._clock.time(), used_bytes=0, limit=limit)
            await asyncio.to_thread(self._publish, draft, info)
        except BaseException:
            await asyncio.to_thread(trees.remove, draft)  # it is empty but for files of ours
            raise
        return await self._now(info, driver)

    def _make_draft(self, draft: str) -> None:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.mkdir(draft, 0o700)
            with open(os.path.join(draft, _MAKER), "x") as file:
                file.write(self._owner)
        except OSError as problem:
            raise trees.told(problem, draft) from None

    def _publish(self, draft: str, info: stock.VolumeInfo) -> None:
        """The directory's final name decides who was first."""
        place = self.place(info.spec.name)
        try:
            crash.point("volume_files:before")
            os.rename(draft, place)
            crash.point("volume_files:after")
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _taken(info.spec.name) from None
            raise trees.told(problem, draft) from None
        try:
            self._store.put_volume(info)
        except BaseException:
            os.rename(place, draft)
            raise

    async def _rows(self) -> builtins.list[stock.VolumeInfo]:
        return await asyncio.to_thread(self._store.volumes)

    async def _find(self, name: str) -> stock.VolumeInfo:
        for info in await self._rows():
            if info.spec.name == name:
                return info
        raise errors.error(
            "volume_not_found",
            f"there is no volume {name!r}",
            hint=f"make it first: `cloche volume create {name}`" if _is_name(name) else None,
        )

    async def _now(self, info: stock.VolumeInfo, driver: interfaces.Driver) -> stock.VolumeInfo:
        used = await driver.volume_used(self.place(info.spec.name))
        attached = dict(self._attached.get(info.spec.name, {}))
        return msgspec.structs.replace(info, used_bytes=used, attached=attached)

    async def list(self, driver: interfaces.Driver) -> builtins.list[stock.VolumeInfo]:
        return [await self._now(info, driver) for info in await self._rows()]

    async def find(self, name: str, driver: interfaces.Driver) -> stock.VolumeInfo:
        return await self._now(await self._find(name), driver)

    async def delete(self, name: str, driver: interfaces.Driver) -> None:
        info = await self._find(name)
        users = self._attached.get(info.spec.name)
        if users:
            raise errors.error(
                "volume_in_use",
                f"the volume {name!r} is in use by {', '.join(sorted(users))}",
                hint="delete the sandbox first",
            )
        await self._patiently(lambda: driver.check_volume(self.place(name)))
        await asyncio.to_thread(self._store.delete_volume, name)
        crash.point("remove_volume_files:before")
        await driver.remove_volume(self.place(name))
        await asyncio.to_thread(trees.remove, self.place(name))
        crash.point("remove_volume_files:after")

    # ── in sandboxes ────────────────────────────────────────────────────────────────────────────

    async def check(self, wanted: dict[str, model.Mount]) -> None:
        """Refuse what cannot be attached, before anything is made for it."""
        _check_targets(list(wanted))
        names = [mount.volume for mount in wanted.values()]
        for mount in wanted.values():
            await self._find(mount.volume)
            self._refuse_used(mount)
            if names.count(mount.volume) > 1 and not mount.read_only:
                raise errors.error(
                    "volume_in_use",
                    f"the volume {mount.volume!r} is asked for twice, and to be written",
                    hint="attach it once, or read-only",
                )

    def _refuse_used(self, mount: model.Mount) -> None:
        users = self._attached.get(mount.volume, {})
        if users and (not mount.read_only or any(users.values())):
            raise errors.error(
                "volume_in_use",
                f"the volume {mount.volume!r} is in use by {', '.join(sorted(users))}",
                hint="attach it read-only everywhere, or delete the sandbox that has it",
            )

    async def attach(self, sandbox: sandboxes.Sandbox, wanted: dict[str, model.Mount]) -> None:
        """Show volumes to a sandbox that runs: outer places first, so that none is hidden by the next."""
        for target in sorted(wanted, key=lambda path: (path.count("/"), path)):
            mount = wanted[target]
            info = await self._find(mount.volume)
            self._refuse_used(mount)
            users = self._attached.setdefault(info.spec.name, {})
            users[sandbox.id] = not mount.read_only
            act = partial(sandbox.machine.attach_volume, self.place(mount.volume), _clean(target))
            try:
                await self._patiently(partial(act, read_only=mount.read_only))
            except BaseException:
                users.pop(sandbox.id, None)
                raise

    async def _patiently(self, act: Callable[[], Awaitable[None]]) -> None:
        """The kernel lets go of a volume a moment after its sandbox's end; whoever is in use elsewhere stays so."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await act()
                return
            except errors.Conflict as problem:
                if problem.code != "volume_in_use" or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)

    def detach(self, sandbox: str) -> None:
        """A sandbox has ended, and what it had with it."""
        for name, users in list(self._attached.items()):
            users.pop(sandbox, None)
            if not users:
                del self._attached[name]

    async def sweep(self) -> builtins.list[str]:
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> builtins.list[str]:
        """Remove what dead makers did not finish; the names."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return []
        swept = []
        for name in names:
            if self._owner_lives(self._maker_of(name)):
                continue
            if name not in {info.spec.name for info in self._store.volumes()}:
                trees.remove(self.place(name))
                swept.append(name.partition(".")[0])
        return swept

    def _maker_of(self, name: str) -> str:
        _, _, owner = name.partition(".")
        if owner:
            return owner.replace(".", ":")
        with suppress(OSError), open(os.path.join(self.place(name), _MAKER)) as file:
            return file.read(64)
        return ""


def _taken(name: str) -> errors.ClocheError:
    return errors.error(
        "name_conflict",
        f"there is a volume {name!r} that was asked for differently",
        hint="delete it, or choose another name",
    )


def _clean(target: str) -> str:
    return os.path.normpath("/" + target.lstrip("/"))  # two slashes at the front would stay two


def _check_targets(targets: list[str]) -> None:
    places = [_clean(target) for target in targets]
    for target, place in zip(targets, places, strict=True):
        if (
            not target.startswith("/")
            or place in _FORBIDDEN
            or place.startswith(("/proc/", "/dev/", "/sys/"))
        ):
            raise errors.error(
                "path_invalid",
                f"a volume cannot be attached at {target!r}",
                hint="choose an absolute path such as /data or /workspace/data",
            )
        if places.count(place) > 1:
            raise errors.error(
                "path_invalid", f"two volumes cannot both be at {place!r}", hint="choose another path for one"
            )


def _is_name(name: str) -> bool:
    try:
        model.check_name(name)
    except errors.ClocheError:
        return False
    return True
