"""Archived sandboxes: their files, and the row that says what they were. They outlive engine and machine.

    $CLOCHE_HOME/sandboxes/<id>                 what a driver kept (`Machine.save`), while the row's phase is `archived`
    $CLOCHE_HOME/sandboxes/<id>.<pid>.<start>   one that its maker has not finished

The row is the truth. Archiving writes the files, then the row, and ends the machine after that; waking makes the machine,
then the row, and removes the files after that. So whenever the engine dies there is either a live sandbox, which is then
lost, or an archived one with all its files; and files without a row that says `archived` are swept once their maker is gone.

An archived sandbox belongs to whoever archived it while that engine lives, and afterwards to the first that asks for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NoReturn

from cloche import crash, errors, interfaces, model
from cloche.engine import trees

_MAKER = "maker"
_NOTHING = interfaces.Usage(0, 0, 0, 0, 0)


class Absent(interfaces.Machine):
    """Stands where an archived sandbox has no machine: what there is to say about it, and nothing to do with it."""

    def __init__(self, before: interfaces.Machine | model.SandboxInfo) -> None:
        self.id = ""
        self.isolation = before.isolation
        self.limits = before.limits
        self.shown = before.shown
        self.warnings = before.warnings
        self.cwd = before.cwd if isinstance(before, interfaces.Machine) else "/workspace"
        self.ended = asyncio.get_running_loop().create_future()
        self.ended.set_result("archived")

    def _refuse(self) -> NoReturn:
        raise errors.error("sandbox_stopped", "the sandbox is archived", hint="resume it")

    async def start(self, start: interfaces.Start) -> interfaces.Child:
        self._refuse()

    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        raise errors.error("execution_finished", "the process ended when the sandbox was archived")

    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int:
        self._refuse()

    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        self._refuse()

    def watch(self, path: str, *, recursive: bool, user: str = "user") -> AsyncIterator[model.FileEvent]:
        self._refuse()

    async def connect(self, port: int) -> int:
        self._refuse()

    def open_terminal(self) -> interfaces.Terminal:
        self._refuse()

    async def bind(self, binding: interfaces.Binding) -> None:
        self._refuse()

    def usage(self) -> interfaces.Usage:
        return _NOTHING

    async def pause(self) -> None:
        self._refuse()

    async def resume(self) -> None:
        self._refuse()

    async def kill(self, reason: str) -> None:
        return None

    def kill_now(self) -> None:
        return None


class Archive:
    def __init__(
        self, home: str, store: interfaces.Store, owner: str, owner_lives: Callable[[str], bool]
    ) -> None:
        self._directory = os.path.join(home, "sandboxes")
        self._store = store
        self._owner = owner
        self._owner_lives = owner_lives

    def place(self, sandbox: str) -> str:
        return os.path.join(self._directory, sandbox)

    async def keep(
        self, machine: interfaces.Machine, info: model.SandboxInfo, spec: model.SandboxSpec
    ) -> None:
        """Keep the files of a machine that stands still, on the disk and not only on their way there, and say so."""
        draft = self.place(f"{info.id}.{self._owner.replace(':', '.')}")
        try:
            await asyncio.to_thread(self._make_draft, draft)
            await machine.save(draft)
            await asyncio.to_thread(self._publish, draft, self.place(info.id))
        except BaseException:
            await asyncio.to_thread(trees.remove, draft)
            raise
        try:
            await asyncio.to_thread(self._store.put_sandbox, info, spec)
        except BaseException:
            await asyncio.to_thread(trees.remove, self.place(info.id))
            raise

    def _make_draft(self, draft: str) -> None:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.mkdir(draft, 0o700)
            with open(os.path.join(draft, _MAKER), "x") as file:
                file.write(self._owner)
        except OSError as problem:
            raise trees.told(problem, draft) from None

    def _publish(self, draft: str, place: str) -> None:
        try:
            for name in os.listdir(draft):
                _flush(os.path.join(draft, name))
            _flush(draft)
            crash.point("archive_files:before")
            os.rename(draft, place)
            _flush(self._directory)
            crash.point("archive_files:after")
        except OSError as problem:
            raise trees.told(problem, draft) from None

    async def forget(self, sandbox: str) -> None:
        """The files are not needed any more."""
        crash.point("remove_archive_files:before")
        await asyncio.to_thread(trees.remove, self.place(sandbox))
        crash.point("remove_archive_files:after")

    # ── what earlier engines left ───────────────────────────────────────────────────────────────

    def orphans(self) -> list[tuple[model.SandboxInfo, model.SandboxSpec]]:
        """Archived sandboxes whose engine is gone."""
        if not os.path.isdir(self._directory):
            return []
        return [(info, spec) for info, spec in self._store.archived() if not self._owner_lives(info.owner)]

    def adopt(self, sandbox: str) -> tuple[model.SandboxInfo, model.SandboxSpec] | None:
        """Take over the archived sandbox of that id or name, unless another engine has it."""
        for info, spec in self.orphans():
            if sandbox in (info.id, spec.full_name) and self._store.take_over(
                info.id, info.owner, self._owner
            ):
                return info, spec
        return None

    def sweep(self) -> list[str]:
        """Remove files that no row speaks of and whose maker is gone."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return []
        swept = []
        for name in names:
            maker = self._maker_of(name)
            if maker is None or self._owner_lives(maker):
                continue
            if name not in {info.id for info, _ in self._store.archived()}:
                trees.remove(self.place(name))
                swept.append(name.partition(".")[0])
        return swept

    def _maker_of(self, name: str) -> str | None:
        """None for a directory that is not ours."""
        _, _, owner = name.partition(".")
        if owner:
            return owner.replace(".", ":")
        with suppress(OSError), open(os.path.join(self.place(name), _MAKER)) as file:
            return file.read(64)
        return None


def _flush(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
