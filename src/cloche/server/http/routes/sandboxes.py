"""Sandboxes: create, look, extend, suspend, resume, delete."""

from __future__ import annotations

from typing import Literal

from cloche import errors, model
from cloche.server.http import wire
from cloche.server.http.answering import Call
from cloche.server.http.pages import Cursor, Limit, page
from cloche.server.http.routes.table import operation


class Apply(wire.Body, frozen=True, kw_only=True):
    paths: tuple[str, ...] | None = None
    """Those to take over; left out: all."""


class Applied(wire.Answer, frozen=True, kw_only=True):
    paths: tuple[str, ...]


@operation(
    "POST", "/v1/sandboxes", scope="sandboxes", status=201,
    errors="template_not_found name_conflict capacity_exceeded isolation_too_low host_path_refused",
)  # fmt: skip
async def create_sandbox(call: Call, body: wire.Create) -> model.SandboxInfo:
    """Create a sandbox.

    With a `name` it is idempotent: the same name and body is the same sandbox, another body is `name_conflict`. It stays until it is
    deleted or its time is up.
    """
    return await call.backend.create(call.spec(body))


@operation("GET", "/v1/sandboxes", scope="sandboxes")
async def list_sandboxes(
    call: Call, *, limit: Limit = 100, cursor: Cursor | None = None, label: str | None = None
) -> wire.Sandboxes:
    """List live sandboxes, oldest first.

    `label` is `key=value`.
    """
    key, separator, value = (label or "").partition("=")
    if label is not None and not separator:
        raise errors.error(
            "argument_invalid",
            f"the label {label[:100]!r} is not key=value",
            hint="?label=team%3Dred",
            field="label",
        )
    chosen = [i for i in await call.backend.list() if label is None or i.labels.get(key) == value]
    found, more = page(chosen, lambda info: (info.created_at, info.id), limit, cursor)
    return wire.Sandboxes(sandboxes=found, next_cursor=more)


@operation("GET", "/v1/sandboxes/{sandbox}", scope="sandboxes", errors="sandbox_not_found sandbox_lost")
async def get_sandbox(call: Call, sandbox: str) -> model.SandboxInfo:
    """Look at a sandbox, by id or name. Looking neither wakes it nor counts as use."""
    return await call.backend.info(sandbox)


@operation("DELETE", "/v1/sandboxes/{sandbox}", scope="sandboxes", errors="sandbox_not_found sandbox_lost")
async def delete_sandbox(call: Call, sandbox: str) -> None:
    """Delete a sandbox: afterwards nothing of it is left."""
    await call.backend.delete(sandbox)


@operation(
    "POST", "/v1/sandboxes/{sandbox}/extend", scope="sandboxes", errors="sandbox_not_found limit_invalid"
)
async def extend_sandbox(call: Call, sandbox: str, body: wire.Extend) -> model.SandboxInfo:
    """Give a sandbox a new life, from now on."""
    return await call.backend.extend(sandbox, body.timeout_s)


@operation("POST", "/v1/sandboxes/{sandbox}/suspend", scope="sandboxes", errors="sandbox_not_found")
async def suspend_sandbox(
    call: Call, sandbox: str, *, mode: Literal["pause", "archive"] = "pause"
) -> model.SandboxInfo:
    """Suspend a sandbox: `pause` keeps its memory, `archive` its files only. Any request that needs it wakes it again."""
    return await call.backend.suspend(sandbox, mode)


@operation("POST", "/v1/sandboxes/{sandbox}/resume", scope="sandboxes", errors="sandbox_not_found")
async def resume_sandbox(call: Call, sandbox: str) -> model.SandboxInfo:
    """Resume a suspended sandbox."""
    return await call.backend.resume(sandbox)


@operation("GET", "/v1/sandboxes/{sandbox}/usage", scope="sandboxes", errors="sandbox_not_found")
async def get_usage(call: Call, sandbox: str) -> model.SandboxUsage:
    """What a sandbox costs now, and has cost."""
    return await call.backend.usage(sandbox)


class NewToken(wire.Body, frozen=True, kw_only=True):
    scopes: tuple[model.TokenScope, ...] = ("exec", "files")
    ttl_s: float = 900


@operation(
    "POST", "/v1/sandboxes/{sandbox}/tokens", scope="sandboxes", status=201,
    errors="sandbox_not_found limit_invalid",
)  # fmt: skip
async def create_token(call: Call, sandbox: str, body: NewToken) -> model.AccessToken:
    """Make a token for this sandbox alone.

    It opens this sandbox to whoever shows it as a key, for what `scopes` say and never more than the caller may, until it expires or the sandbox ends.
    It can make no other token, and neither list nor create sandboxes.
    """
    return await call.backend.create_token(sandbox, list(body.scopes), body.ttl_s)


_OVERLAY = "sandbox_not_found sandbox_lost not_supported_by_driver"


@operation("GET", "/v1/sandboxes/{sandbox}/workspace/changes", scope="files", errors=_OVERLAY)
async def list_workspace_changes(
    call: Call, sandbox: str, *, limit: Limit = 1000, cursor: Cursor | None = None
) -> wire.Changes:
    """What a sandbox changed of its overlaid workspace."""
    changes = await call.backend.diff(sandbox)
    found, more = page(changes, lambda change: (change.path, change.kind), limit, cursor)
    return wire.Changes(changes=found, next_cursor=more)


@operation(
    "POST",
    "/v1/sandboxes/{sandbox}/workspace/apply",
    scope="files",
    errors=f"{_OVERLAY} apply_refused file_not_found",
    example={"paths": ["src/main.py"]},
)
async def apply_workspace_changes(call: Call, sandbox: str, body: Apply) -> Applied:
    """Take changes over into the directory of the server's host that the sandbox was lent: all of them, or none."""
    paths = None if body.paths is None else list(body.paths)
    return Applied(paths=tuple(await call.backend.apply(sandbox, paths)))


@operation("GET", "/v1/sandboxes/{sandbox}/workspace/report", scope="files", errors=_OVERLAY)
async def get_workspace_report(call: Call, sandbox: str) -> model.WorkspaceReport:
    """What a sandbox that has ended did to the control files of its workspace."""
    return await call.backend.workspace_report(sandbox)
