"""What stays: snapshots, restores and forks."""

from __future__ import annotations

from cloche import model, stock
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation


class Take(wire.Body, frozen=True, kw_only=True):
    name: str | None = None
    tags: tuple[str, ...] = ()


class Restore(wire.Body, frozen=True, kw_only=True):
    snapshot: str


class Snapshots(wire.Page, frozen=True, kw_only=True):
    snapshots: tuple[stock.SnapshotInfo, ...]


@operation(
    "POST", "/v1/sandboxes/{sandbox}/snapshots", scope="sandboxes", status=201,
    errors="sandbox_not_found sandbox_lost name_conflict disk_full not_supported_by_driver",
)  # fmt: skip
async def take_snapshot(call: Call, sandbox: str, body: Take) -> stock.SnapshotInfo:
    """Keep a sandbox's files as they are now."""
    return await call.backend.snapshot(sandbox, body.name, list(body.tags))


@operation(
    "POST",
    "/v1/sandboxes/{sandbox}/restore",
    scope="sandboxes",
    errors="sandbox_not_found snapshot_not_found",
)
async def restore_sandbox(call: Call, sandbox: str, body: Restore) -> model.SandboxInfo:
    """Put a snapshot's files in place of a sandbox's. Every process ends; the sandbox keeps its id."""
    return await call.backend.restore(sandbox, body.snapshot)


@operation(
    "POST", "/v1/sandboxes/{sandbox}/fork", scope="sandboxes", status=201,
    errors="sandbox_not_found capacity_exceeded limit_invalid",
)  # fmt: skip
async def fork_sandbox(call: Call, sandbox: str, body: wire.Fork) -> wire.Sandboxes:
    """Make sandboxes with the files of this one and processes of their own."""
    return wire.Sandboxes(sandboxes=tuple(await call.backend.fork(sandbox, body.count)))


@operation("GET", "/v1/snapshots", scope="sandboxes")
async def list_snapshots(
    call: Call, *, tag: str | None = None, limit: Limit = 100, cursor: Cursor | None = None
) -> Snapshots:
    """The snapshots, or those with a tag; oldest first."""
    snapshots = await call.backend.snapshots(tag)
    found, more = page(snapshots, lambda info: (info.created_at, info.id), limit, cursor)
    return Snapshots(snapshots=found, next_cursor=more)


@operation("GET", "/v1/snapshots/{snapshot}", scope="sandboxes", errors="snapshot_not_found")
async def get_snapshot(call: Call, snapshot: str) -> stock.SnapshotInfo:
    """One snapshot, by id or name."""
    return await call.backend.snapshot_info(snapshot)


@operation("DELETE", "/v1/snapshots/{snapshot}", scope="sandboxes", errors="snapshot_not_found")
async def delete_snapshot(call: Call, snapshot: str) -> None:
    """Delete a snapshot; sandboxes that started from it live on."""
    await call.backend.delete_snapshot(snapshot)


@operation("GET", "/v1/snapshots/{snapshot}/diff", scope="sandboxes", errors="snapshot_not_found")
async def diff_snapshots(
    call: Call, snapshot: str, *, other: str, limit: Limit = 1000, cursor: Cursor | None = None
) -> wire.Changes:
    """What differs between a snapshot and another, by path."""
    changes = await call.backend.diff_snapshots(snapshot, other)
    found, more = page(changes, lambda change: (change.path, change.kind), limit, cursor)
    return wire.Changes(changes=found, next_cursor=more)
