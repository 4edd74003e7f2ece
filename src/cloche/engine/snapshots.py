"""Snapshots: a sandbox's files at one moment, under an id, and perhaps a name and tags.

    $CLOCHE_HOME/snapshots/<id>                 what a driver kept (`Machine.save`); the store has a row for it
    $CLOCHE_HOME/snapshots/<id>.<pid>.<start>   one that its maker, that process, has not finished

A directory gets its final name when everything is in it, and its row after that; deletion goes the other way. So whoever
finds a row finds its files, and what has no row is finished by nobody and swept once its maker is gone. The maker of a
finished directory stands in it, for that case.
"""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from cloche import crash, errors, interfaces, model, stock
from cloche.engine import trees

_MAKER = "maker"
_MOST_TAGS = 32


class Shelf:
    def __init__(
        self, home: str, store: interfaces.Store, clock: interfaces.Clock, owner: str,
        owner_lives: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._directory = os.path.join(home, "snapshots")
        self._store = store
        self._clock = clock
        self._owner = owner
        self._owner_lives = owner_lives

    def place(self, snapshot: str) -> str:
        """Where the files of a snapshot are."""
        return os.path.join(self._directory, snapshot)

    async def find(self, snapshot: str) -> stock.SnapshotInfo:
        for info in await self.list():
            if snapshot in (info.id, info.full_name):
                return info
        raise errors.error(
            "snapshot_not_found",
            f"there is no snapshot {snapshot!r}",
            hint="`cloche snapshot list` shows what is there",
        )

    async def list(self, tag: str | None = None) -> list[stock.SnapshotInfo]:
        """Oldest first; with `tag`, those that have it."""
        found = await asyncio.to_thread(self._store.snapshots)
        return [info for info in found if tag is None or tag in info.tags]

    async def check_name(self, name: str | None, tags: Iterable[str], tenant: str) -> None:
        """Refuse before anything stands still."""
        tags = tuple(tags)
        for word in (*tags, *((name,) if name is not None else ())):
            model.check_name(word)
        if len(tags) > _MOST_TAGS:
            raise errors.error("limit_invalid", f"a snapshot has at most {_MOST_TAGS} tags, not {len(tags)}")
        taken = ((info.spec.tenant, info.name) for info in await self.list())
        if name is not None and (tenant, name) in taken:
            raise _taken(name)

    async def keep(
        self, machine: interfaces.Machine, *, name: str | None, tags: tuple[str, ...], sandbox: str, parent: str | None,
        spec: model.SandboxSpec,
    ) -> stock.SnapshotInfo:  # fmt: skip
        """Keep the files of a machine that stands still; whole, or not at all."""
        snapshot = model.new_id()
        draft = self.place(f"{snapshot}.{self._owner.replace(':', '.')}")
        try:
            await asyncio.to_thread(self._make_draft, draft)
            saved = await machine.save(draft)
            crash.point("snapshot_files:before")
            os.rename(draft, self.place(snapshot))
            crash.point("snapshot_files:after")
        except BaseException:
            await asyncio.to_thread(trees.remove, draft)
            raise
        info = stock.SnapshotInfo(
            id=snapshot, name=name, sandbox=sandbox, created_at=self._clock.time(), size_bytes=saved.size_bytes,
            files=saved.files, template=spec.template, parent=parent, tags=tags,
            spec=_bare(spec),
        )  # fmt: skip
        try:
            await asyncio.to_thread(self._store.put_snapshot, info)
        except BaseException:
            await asyncio.to_thread(trees.remove, self.place(snapshot))
            raise
        return info

    def _make_draft(self, draft: str) -> None:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.mkdir(draft, 0o700)
            with open(os.path.join(draft, _MAKER), "x") as file:
                file.write(self._owner)
        except OSError as problem:
            raise trees.told(problem, draft) from None

    @staticmethod
    def inherit(spec: model.SandboxSpec, info: stock.SnapshotInfo) -> model.SandboxSpec:
        """The spec of a sandbox that starts from a snapshot: what its maker did not say is as it was."""
        import msgspec

        whole = {field for field in spec.inherit if "." not in field}
        parts = {field.partition(".")[2] for field in spec.inherit if field.startswith("resources.")}
        changed = {
            field: getattr(info.spec, field)
            for field in whole
            if field in model.SandboxSpec.__struct_fields__
        }
        if parts:
            kept = {field: getattr(info.spec.resources, field) for field in parts}
            changed["resources"] = msgspec.structs.replace(spec.resources, **kept)
        changed |= {
            "env": {**info.spec.env, **spec.env},
            "labels": {**info.spec.labels, **spec.labels},
            "snapshot": info.id,
            "inherit": (),
        }
        return msgspec.structs.replace(spec, **changed)

    async def delete(self, snapshot: str) -> stock.SnapshotInfo:
        """Sandboxes that started from it keep their files."""
        info = await self.find(snapshot)
        await asyncio.to_thread(self._store.delete_snapshot, info.id)
        crash.point("remove_snapshot_files:before")
        await asyncio.to_thread(trees.remove, self.place(info.id))
        crash.point("remove_snapshot_files:after")
        return info

    async def sweep(self, unnamed_ttl_s: float | None = None) -> builtins.list[str]:
        """Remove what dead makers did not finish, and snapshots that nobody named and that are old; the ids."""
        swept = await asyncio.to_thread(self._sweep)
        if unnamed_ttl_s is None or not os.path.isdir(self._directory):  # noqa: ASYNC240
            return swept
        for info in await self.list():
            if not info.name and not info.tags and info.created_at + unnamed_ttl_s <= self._clock.time():
                await self.delete(info.id)
                swept.append(info.id)
        return swept

    def _sweep(self) -> builtins.list[str]:
        try:
            names = os.listdir(self._directory)
        except OSError:
            return []
        swept = []
        for name in names:
            if self._owner_lives(self._maker_of(name)):
                continue
            # Looked up after the maker was found dead: a row that is not there by now never comes.
            if name not in {info.id for info in self._store.snapshots()}:
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


def _bare(spec: model.SandboxSpec) -> model.SandboxSpec:
    """What a sandbox that starts from a snapshot is unless its maker says otherwise."""
    return msgspec.structs.replace(spec, name=None, snapshot=None, inherit=(), stay=False)


def _taken(name: str) -> errors.ClocheError:
    return errors.error(
        "name_conflict",
        f"there is a snapshot {name!r} already",
        hint="delete it, or choose another name",
    )
