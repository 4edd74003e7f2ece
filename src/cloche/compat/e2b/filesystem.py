"""`filesystem.Filesystem`: what is where, and what becomes of it.

A watcher is in place before its making is answered: the guest takes requests in their order, so a question asked after the watch was
begun is answered after it is there. Events are named by their path below the watched directory.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from cloche import errors, model
from cloche.compat.e2b import connect, faults, guests
from cloche.compat.e2b.state import Place, Watcher

_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_MOST_WATCHERS = 100
_KEEPALIVE_S = 90.0
_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}")
"""What a file is called while the engine writes it; then it takes its place, which is told under its own name."""


def entry(info: model.FileInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": info.name,
        "type": _TYPES.get(info.type, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size),
        "mode": stat.S_IMODE(info.mode),
        "permissions": _permissions(info),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": datetime.fromtimestamp(info.modified_at, UTC).isoformat().replace("+00:00", "Z"),
    }
    if info.target is not None:
        found["symlinkTarget"] = info.target
    return found


def _permissions(info: model.FileInfo) -> str:
    kind = {"directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}.get(info.type, stat.S_IFREG)
    return stat.filemode(kind | stat.S_IMODE(info.mode))


async def stat_path(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    return {"entry": entry(await _stat(place, guests.path_of(message.get("path"))))}


async def _stat(place: Place, path: str) -> model.FileInfo:
    return await place.backend.stat_file(place.sandbox, path, guests.user_of(place.request.headers))


async def make_dir(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    path = guests.path_of(message.get("path"))
    with suppress(errors.NotFound):
        there = await _stat(place, path)
        if there.type == "directory":
            raise faults.Fault(409, f"directory already exists: {path}", connect="already_exists")
        raise faults.Fault(400, f"path already exists but it is not a directory: {path}")
    await place.backend.make_dir(place.sandbox, path, guests.user_of(place.request.headers))
    return {"entry": entry(await _stat(place, path))}


async def move(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    source, target = guests.path_of(message.get("source")), guests.path_of(message.get("destination"))
    user = guests.user_of(place.request.headers)
    await _stat(place, source)
    await place.backend.make_dir(place.sandbox, posixpath.dirname(target), user)
    await place.backend.move_file(place.sandbox, source, target, True, user)
    return {"entry": entry(await _stat(place, target))}


async def list_dir(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    path, depth = guests.path_of(message.get("path")), message.get("depth") or 1
    if not isinstance(depth, int) or depth < 1:
        raise faults.Fault(400, "depth is not a number from 1 on")
    await _directory(place, path)
    found = await place.backend.list_files(place.sandbox, path, depth, guests.user_of(place.request.headers))
    return {"entries": [entry(info) for info in found]}


async def _directory(place: Place, path: str) -> None:
    there = await _stat(place, path)
    if there.type == "file":
        raise faults.Fault(400, f"path is not a directory: {path}")


async def remove(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    path = guests.path_of(message.get("path"))
    with suppress(errors.NotFound):
        await place.backend.remove_file(place.sandbox, path, True, guests.user_of(place.request.headers))
    await place.backend.info(place.sandbox)  # what was not found may have been the sandbox
    return {}


# ── watching ───────────────────────────────────────────────────────────────────────────────────────


async def watch_dir(place: Place) -> Response:
    message = await connect.only_message(place.request, place.config.server.max_body_mib << 20)
    watcher = await _watcher(place, message)
    told = place.request.headers.get("keepalive-ping-interval", "")
    every_s = float(told) if told.isdigit() and int(told) > 0 else _KEEPALIVE_S
    events = connect.with_keepalive(_stream(watcher), every_s, {"keepalive": {}})
    return connect.Stream(
        connect.enveloped(events, place.sandbox), place.config.server.write_timeout_s, connect.STREAM_TYPE
    )


async def _stream(watcher: _Live) -> AsyncIterator[dict[str, Any]]:
    try:
        yield {"start": {}}
        async for event in watcher:
            yield {"filesystem": event}
    finally:
        await watcher.aclose()


async def create_watcher(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    if len(place.held.watchers) >= _MOST_WATCHERS:
        raise faults.Fault(429, f"the sandbox has {_MOST_WATCHERS} watchers already")
    live = await _watcher(place, message)
    made = Watcher()
    identity = model.new_id()
    made.task = asyncio.create_task(_collect(live, made))
    place.held.watchers[identity] = made
    return {"watcherId": identity}


async def _collect(live: _Live, made: Watcher) -> None:
    try:
        with suppress(errors.ClocheError):
            async for event in live:
                made.events.append(event)
    finally:
        await live.aclose()


async def get_watcher_events(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    watcher = _known(place, message)
    events = list(watcher.events)
    watcher.events.clear()
    return {"events": events}


async def remove_watcher(place: Place, message: dict[str, Any]) -> dict[str, Any]:
    _known(place, message).close()
    del place.held.watchers[message["watcherId"]]
    return {}


def _known(place: Place, message: dict[str, Any]) -> Watcher:
    found = place.held.watchers.get(str(message.get("watcherId")))
    if found is None:
        raise faults.Fault(404, f"watcher with id {str(message.get('watcherId'))[:50]} not found")
    return found


class _Live:
    """A watch that is in place."""

    def __init__(self, items: AsyncIterator[model.FileEvent], first: asyncio.Future[Any], base: str) -> None:
        self._items = items
        self._next: asyncio.Future[Any] | None = first
        self._base = base

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._events()

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            waiting = self._next or asyncio.ensure_future(anext(self._items))
            self._next = waiting
            try:
                event = await asyncio.shield(waiting)
            except StopAsyncIteration:
                return
            self._next = None
            name = event.path.removeprefix(self._base).lstrip("/")
            if event.type != "overflow" and not _DRAFT.fullmatch(posixpath.basename(name)):
                yield {"name": name, "type": f"EVENT_TYPE_{event.type.upper()}"}

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, errors.ClocheError):
                await self._next
        close = getattr(self._items, "aclose", None)
        if close is not None:
            with suppress(RuntimeError):
                await close()


async def _watcher(place: Place, message: dict[str, Any]) -> _Live:
    path = guests.path_of(message.get("path"))
    await _directory(place, path)
    items = place.backend.watch_files(
        place.sandbox, path, bool(message.get("recursive")), guests.user_of(place.request.headers)
    )
    live = _Live(items, asyncio.ensure_future(anext(items)), path)
    try:
        for _ in range(2):  # the first lets the watch be asked for, the second is answered after it
            await _stat(place, path)
    except BaseException:
        await live.aclose()
        raise
    return live
