"""Volumes: named directories that outlive sandboxes."""

from __future__ import annotations

from cloche import stock
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation


class Volumes(wire.Page, frozen=True, kw_only=True):
    volumes: tuple[stock.VolumeInfo, ...]


@operation(
    "POST",
    "/v1/volumes",
    scope="volumes",
    status=201,
    errors="name_conflict name_invalid limit_invalid disk_full",
)
async def create_volume(call: Call, body: stock.VolumeSpec) -> stock.VolumeInfo:
    """Make a volume. The same name and body is the same volume."""
    return await call.backend.create_volume(body)


@operation("GET", "/v1/volumes", scope="volumes")
async def list_volumes(call: Call, *, limit: Limit = 100, cursor: Cursor | None = None) -> Volumes:
    """The volumes by name: their size, what they take, and which sandboxes have them."""
    found, more = page(await call.backend.volumes(), lambda info: (info.spec.name,), limit, cursor)
    return Volumes(volumes=found, next_cursor=more)


@operation("GET", "/v1/volumes/{volume}", scope="volumes", errors="volume_not_found")
async def get_volume(call: Call, volume: str) -> stock.VolumeInfo:
    """One volume."""
    return await call.backend.volume(volume)


@operation("DELETE", "/v1/volumes/{volume}", scope="volumes", errors="volume_not_found volume_in_use")
async def delete_volume(call: Call, volume: str) -> None:
    """Delete a volume that no sandbox has."""
    await call.backend.delete_volume(volume)
